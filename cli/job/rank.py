"""One rank of `partc run`: reads its inputs, loads its program, runs the steps, and sends the outputs to rank 0.

The launcher starts it by `__main__.py`; under the user's own launcher it is called directly. A failure is printed once: rank 0 prints an
error that all ranks raise; a rank with an error of its own prints it, and then ends all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from partc.cli.interruption import restore
from partc.cli.job.faults import write_faults
from partc.cli.job.job import BOARD, Job
from partc.cli.job.processes import end_with_parent
from partc.cli.job.profile import measured, op_times, refuse_profile, write_profile
from partc.cli.output import console
from partc.cli.output.failures import INTERRUPTED, described
from partc.cli.output.targets import counted, line, mpi_memory
from partc.runtime.communication.leaving import leaving_message
from partc.runtime.errors import (
    NO_MEMORY,
    NO_MEMORY_HELP,
    ArtifactError,
    CheckpointError,
    InputError,
    NonFiniteError,
    StoppedError,
    UsageError,
    printable,
    speaks_of_memory,
)
from partc.runtime.files.replace import refuse_other
from partc.runtime.garbage_collection import uncollected
from partc.runtime.job.place import Place, is_launched, surrounding_job
from partc.runtime.job.status_board import VARIABLE, note_joined, open_task, processes, write_pid
from partc.runtime.units import count, seconds, size_text

if TYPE_CHECKING:
    from mpi4py import MPI
    from partc.cli.job.inputs import InputReader
    from partc.runtime import Request
    from partc.runtime.artifact.format import Manifest
    from partc.runtime.artifact.tensors.dtypes import Array
    from partc.runtime.communication.mpi_watch import Watch
    from partc.runtime.communication.transport import Transport
    from partc.runtime.execution.program import Program
    from partc.runtime.execution.times.profiler import Profiler
    from partc.runtime.execution.times.recording import Recording
    from partc.runtime.training.stopping import StopSignals


def timing(loaded: float, times: Sequence[float]) -> str:
    """Returns the line of a load time and the times of all steps, in seconds; the first step, which warms up, is reported separately.

    loaded in 412 ms, first step 12.3 ms, then 99 steps: median 1.02 ms, min 998 us, p90 1.2 ms; 968 steps/s
    """
    text = f"loaded in {seconds(loaded)}, first step {seconds(times[0])}"
    rest = sorted(times[1:])
    if not rest:
        return text
    p90 = rest[min(len(rest) - 1, round(0.9 * (len(rest) - 1)))]
    times_text = f"median {seconds(statistics.median(rest))}, min {seconds(rest[0])}, p90 {seconds(p90)}"
    return f"{text}, then {count(len(rest), 'step')}: {times_text}; {len(rest) / sum(rest):,.4g} steps/s"


Result = TypeVar("Result")

FRAME, BEGUN, ENDED = "partc-failure: ", "partc-begun", "partc-ended"
"""Lines on stderr for the launching process: the begin of a failure's, and those of rank 0: that it has joined the others on another host,
and that its part of the job is done."""


def run_rank(job: Job, early: StopSignals | None = None) -> int:
    """Runs this process's rank of the job to its end, and returns the exit code. `early`: the signals noted since the process began."""
    with _stop_signals(job) as signals:
        restore()
        if early is not None:
            early.pass_on(signals)
        return _run_rank(job, signals)


def _stop_signals(job: Job) -> AbstractContextManager[StopSignals | None]:
    """A context that notes stop signals of a training; it begins before the launching process can send one."""
    if job.training is None or job.training.only_test:
        return nullcontext()
    from partc.cli.job.training import signals_of
    from partc.runtime.artifact.manifest import open_artifact

    return signals_of(job, open_artifact(job.folder, trust=True).manifest)


def _run_rank(job: Job, signals: StopSignals | None) -> int:
    place = surrounding_job(os.environ)
    _begin(job, place)
    try:
        comm, watch = _join(job, place.rank if place is not None else 0)
    except Exception as error:
        if place is None or place.rank == 0 or not isinstance(error, UsageError) or not is_launched():
            _report(job, 0, error)
        return described(error)[0]
    code = _run_joined(job, comm, signals)
    if job.run_dir is not None and comm.Get_rank() == 0:
        print(ENDED, file=sys.stderr, flush=True)
    from partc.runtime.communication.mpi_calls import end

    end(watch)
    return code


def _run_joined(job: Job, comm: MPI.Intracomm, signals: StopSignals | None) -> int:
    """Runs a rank that has joined the others and returns the exit code; an error of this rank alone aborts the job."""
    from partc.runtime.communication.mpi_calls import abort

    rank = comm.Get_rank()
    try:
        return _run(job, comm, signals)
    except _Refused as refused:
        if rank == refused.rank:
            _print_failure(job, rank, refused.code, refused.text)
        return refused.code
    except (ArtifactError, CheckpointError, InputError, NonFiniteError, StoppedError) as error:
        if rank == 0:
            _report(job, rank, error)
        return error.exit_code
    except Exception as error:
        _report(job, rank, error)
        abort(comm, described(error)[0])
        raise
    except BaseException as error:
        # sys.exit, or an interrupt, in the code of a user: the others would wait for ever.
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        _print_failure(job, rank, code, leaving_message(rank, error))
        abort(comm, code)
        raise


def _begin(job: Job, place: Place | None) -> None:
    """Registers this process in the job's folder before MPI begins, and makes it end when its launcher ends."""
    end_with_parent(signal.SIGKILL)
    if job.run_dir is not None and place is not None and Path(job.run_dir).is_dir():
        os.environ[VARIABLE] = str(Path(job.run_dir) / BOARD)
        write_pid(Path(job.run_dir), place.rank)
        open_task(Path(job.run_dir), place.rank)


def _join(job: Job, rank: int) -> tuple[MPI.Intracomm, Watch]:
    """The communicator of all ranks, and the watch over blocking calls of MPI."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        with uncollected():
            from partc.runtime.communication.mpi_calls import begin
            from partc.runtime.communication.mpi_watch import Watch
    except (ImportError, RuntimeError) as error:
        if speaks_of_memory(str(error)):
            raise
        help = 'help: install one with pip install "partc[mpi]", or run with --in-process'
        raise UsageError(f"no MPI library can be loaded: {error}\n{help}") from None
    watch = Watch(rank, job.stall, processes)
    with _temporary(job.run_dir):
        comm = begin(watch)
    note_joined(rank)
    if job.run_dir is not None and rank == 0 and not Path(job.run_dir).is_dir():
        print(BEGUN, file=sys.stderr, flush=True)
    if job.run_dir is not None:
        write_faults(Path(job.run_dir), rank)
    return comm, watch


@contextlib.contextmanager
def _temporary(folder: str | None) -> Iterator[None]:
    """A context in which temporary files go to the job's folder: files that Open MPI leaves are then removed with it."""
    before = os.environ.get("TMPDIR")
    if folder is None or not Path(folder).is_dir():
        yield
        return
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


class _Refused(Exception):
    """Raised on all ranks if some rank cannot begin: the lowest such rank, its exit code and its text."""

    def __init__(self, rank: int, code: int, text: str) -> None:
        super().__init__(text)
        self.rank, self.code, self.text = rank, code, text


def _on_all_ranks(transport: Transport, action: Callable[[], Result]) -> Result:
    """The action's result if it succeeds on every rank; else raises `_Refused` on every rank."""
    problem: tuple[int, str] | None = None
    result: Result | None = None
    try:
        result = action()
    except Exception as error:
        problem = described(error)
    for rank, text in enumerate(transport.all_gather_text(json.dumps(problem))):
        found = json.loads(text)
        if found is not None:
            raise _Refused(rank, *found)
    return result  # type: ignore[return-value]


def _run(job: Job, comm: MPI.Intracomm, signals: StopSignals | None) -> int:
    from partc.runtime.communication.mpi import MpiTransport

    begin = time.perf_counter()
    transport = MpiTransport(comm, job.stall)
    if job.reporting.verbose and transport.rank == 0 and transport.mpi_alone:
        console.echo(f"ranks of one host share no memory and use MPI: {transport.mpi_alone}", err=True)
    try:
        if job.generation is not None:
            with uncollected():
                from partc.cli.job.generation import run_generation

            requests = _on_all_ranks(transport, lambda: _requests(job, transport.rank))
            return run_generation(job, transport, requests, begin)
        if job.serving is not None:
            from partc.cli.job.serving import run_server

            return run_server(job, transport)
        if job.training is None:
            return _infer(job, transport, begin)
        with uncollected():
            from partc.cli.job.training import run_training

        return run_training(job, transport, signals=signals)
    except BaseException as error:
        # Where it is this rank's alone, the others would wait.
        transport.leave(leaving_message(transport.rank, error))
        raise


def _infer(job: Job, transport: Transport, begin: float) -> int:
    with uncollected():
        from partc.cli.job.outputs import gather
        from partc.runtime import load

    inputs = _on_all_ranks(transport, lambda: _open(job, transport))
    on_error: Literal["raise", "abort"] = "abort" if job.run_dir is None else "raise"
    with (
        op_times(job) as folder,
        load(
            job.folder,
            transport,
            threads=job.threads,
            trust=job.trust,
            on_error=on_error,
            devices=job.devices,
            op_times=folder,
        ) as program,
    ):
        loaded = time.perf_counter() - begin
        times = list[float]()
        recording = recorded(job, program, lambda profiler: _gather(job, transport, profiler))
        for left in reversed(range(job.inference.repeat)):
            recording.before(len(times) + 1)
            start = time.perf_counter()
            if left:
                program.announce(inputs)
            outputs = program(inputs)
            times.append(time.perf_counter() - start)
            recording.after(len(times))
        arrays = gather(transport, program.manifest, outputs)
        recording.end()
        counts = counted(transport.all_gather_text(program.counts.text()))
        if transport.rank == 0:
            finish(job, arrays, loaded, times, counts)
        transport.all_gather_text("")
    return 0


def recorded(job: Job, program: Program, write: Callable[[Profiler], None]) -> Recording:
    """Returns the recording of the steps for the job's profile, which `write` fills."""
    from partc.runtime.execution.times.recording import Recording

    return Recording(program, write, job.reporting.recorded) if job.reporting.profile else Recording.off(program)


def _gather(job: Job, transport: Transport, profiler: Profiler) -> None:
    assert job.reporting.profile is not None
    ranks = transport.all_gather_text(measured(profiler, job.reporting.profile, transport))
    if transport.rank == 0:
        write_profile(job.reporting.profile, ranks, job.reporting.quiet)


def _requests(job: Job, rank: int) -> Sequence[Request]:
    """Returns the requests of a generation on rank 0, which sends them to the other ranks; empty on these."""
    from partc.cli.job.prompts import requests_of
    from partc.runtime.artifact.manifest import open_artifact

    assert job.generation is not None
    return requests_of(job.generation, open_artifact(job.folder, trust=True).manifest) if rank == 0 else ()


def _open(job: Job, transport: Transport) -> dict[str, object]:
    """Checks the number of ranks, and returns this rank's inputs, or its shards of them."""
    from partc.runtime.execution.inputs import shard

    rank, size = transport.rank, transport.size
    _, manifest = prepare(job)
    if manifest.ranks != size:
        raise UsageError(wrong_ranks(job.folder, manifest, size))
    ports = {port.name: port for port in manifest.inputs if rank in port.ranks}
    values = open_job_inputs(job, manifest).read(ports)
    return {name: shard(ports[name], rank, value) for name, value in values.items()}


def prepare(job: Job, ranks: int | None = None) -> tuple[Job, Manifest]:
    """Runs all checks that need no rank, and returns the job, with its prompts read, and the manifest; raises PartcError for a fault.

    `ranks`: the number of ranks, if it is known; for an elastic artifact the job's folder becomes that of its programs for this number.
    """
    from partc.runtime.artifact.manifest import open_artifact

    artifact = open_artifact(job.folder, trust=True)
    if folder := artifact.manifest.numbers.get(ranks or 0):
        job = replace(job, folder=str(Path(job.folder) / folder))
        artifact = open_artifact(job.folder, trust=True)
    artifact.refuse_without_weights()
    manifest = artifact.manifest
    steps = job.inference.repeat if job.training is None else None
    refuse_profile(job.reporting, steps)
    if job.training is not None:
        from partc.cli.job.training_inputs import check

        check(job, manifest)
        return job, manifest
    if job.generation is not None:
        from partc.cli.job.prompts import requests_of

        requests = requests_of(job.generation, manifest)
        return replace(job, generation=replace(job.generation, requests=requests)), manifest
    if job.serving is not None:
        from partc.cli.job.serving import reader_of

        reader_of(job.serving, manifest)
        return job, manifest
    open_job_inputs(job, manifest)
    if job.inference.output is not None:
        refuse_other(Path(job.inference.output))
        if not Path(job.inference.output).parent.is_dir():
            raise UsageError(f"{job.inference.output}: the folder {Path(job.inference.output).parent} does not exist")
    return job, manifest


def open_job_inputs(job: Job, manifest: Manifest) -> InputReader:
    """Opens the sources of the job's inputs."""
    from partc.cli.job.inputs import open_inputs

    return open_inputs(manifest, job.inference.inputs, job.inference.random, job.inference.sizes, job.max_bytes)


def wrong_ranks(folder: str, manifest: Manifest, started: int) -> str:
    """The message for a wrong number of ranks."""
    first, *others = map(str, manifest.numbers)
    if not others:
        return f"{folder}: compiled for {count(manifest.ranks, 'rank')}, not {started}; run it with -n {first}"
    numbers = f"{', '.join([first, *others[:-1]])} or {others[-1]}"
    more = f"or name {started} under 'elastic' in the plan, and compile again"
    return f"{folder}: compiled for {numbers} ranks, not {started}\n  help: run it with -n {numbers}, {more}"


def finish(
    job: Job, arrays: dict[str, Array], loaded: float, times: list[float], counts: dict[str, Any] | None = None
) -> None:
    """Writes or prints the outputs, then prints the timing and the counts of the ranks' targets."""
    from partc.cli.job.outputs import OUTPUT_KEYS, hand_over, statistics, summary, write

    if job.inference.output is not None:
        path = Path(job.inference.output)
        write(path, arrays)
    if job.reporting.json:
        told = {"targets": counts} if counts else {}
        rows = [dict(zip(OUTPUT_KEYS, row, strict=True)) for row in statistics(arrays)]
        hand_over(job, {"outputs": rows, "file": job.inference.output, "loaded": loaded, "steps": times, **told})
    if job.reporting.quiet:
        return
    if job.inference.output is None:
        console.echo(summary(arrays).plain())
    else:
        console.echo(f"wrote {path}: {count(len(arrays), 'array')}, {size_text(path.stat().st_size)}")
    console.echo(timing(loaded, times))
    if counts:
        console.echo(line(counts, mpi_memory()))
    sys.stdout.flush()


def _report(job: Job, rank: int, error: Exception) -> None:
    code, text = described(error)
    told = f"rank {rank}: {text}{NO_MEMORY_HELP}" if text.startswith(NO_MEMORY) else text
    _print_failure(job, rank, code, told)


def _print_failure(job: Job, rank: int, code: int, text: str) -> None:
    """Prints a failure, or sends it to the launching process, which prints the first that it receives."""
    sys.stdout.flush()
    if job.run_dir is None:
        console.result({"error": text})
    line = printable(text) if job.run_dir is None else FRAME + json.dumps({"rank": rank, "code": code, "text": text})
    os.write(sys.stderr.fileno(), f"{line}\n".encode())
