"""Runs a job: its ranks under a launcher, with cleanup however the job ends, or all ranks in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from partc.cli.interruption import stopped
from partc.cli.job.job import PROGRESS, Job
from partc.cli.job.profile import measured, op_times, write_profile
from partc.cli.job.rank import finish, open_job_inputs, prepare, recorded
from partc.cli.launch.launcher import IN_PROCESS, Hosts, Launcher, find_launcher, slots
from partc.cli.launch.ranks import command_of, environment_of, where_of
from partc.cli.launch.run_dir import RunDir, folder_of_copies
from partc.cli.launch.signals import Signals
from partc.cli.launch.supervise import Outcome, supervise
from partc.cli.output import console
from partc.cli.output.progress import Progress, TrainingBar
from partc.cli.output.targets import counted
from partc.cli.output.training_log import read_progress
from partc.runtime.artifact.format import Manifest
from partc.runtime.checkpoint.index import steps
from partc.runtime.errors import UsageError
from partc.runtime.files.replace import remove_abandoned
from partc.runtime.units import count

_GOES_ON = "\n  help: --resume auto goes on from the newest checkpoint"
_NOT_SAVED = ": nothing was saved\n  help: give --checkpoint DIR, so that it can go on"


def launch(job: Job, manifest: Manifest, hosts: Hosts, extra: Sequence[str], instead: str = IN_PROCESS) -> int:
    """Runs the job on the manifest's number of ranks, and returns the exit code; `instead`: a help text for use without a launcher."""
    if job.serving is not None:
        from partc.cli.launch.serve import serve

        return serve(job, manifest, hosts, extra)
    launcher = find_launcher(manifest.ranks, instead)
    keeps = manifest.training is not None and manifest.training.copies > 0
    if job.training is not None and job.training.restarts:
        with folder_of_copies() if keeps else nullcontext() as copies:
            training = dataclasses.replace(job.training, copies=None if copies is None else str(copies))
            return _train_on(dataclasses.replace(job, training=training), manifest, hosts, extra, launcher)
    if job.training is not None and keeps and not job.training.only_test:
        console.echo(
            "warning: no copies of the state are kept in memory: 'elastic: copies' is for --restarts", err=True
        )
    return _launched(*_fitting(job, manifest, hosts, extra, launcher), extra, launcher).code


def _fitting(
    job: Job, manifest: Manifest, hosts: Hosts, extra: Sequence[str], launcher: Launcher
) -> tuple[Job, Manifest, Hosts]:
    """Chooses the largest compiled number of ranks for which the hosts that answer have slots; raises UsageError if there is none.

    Returns the job, the manifest of the programs for that number, and the hosts.
    """

    if len(manifest.numbers) == 1 or (there := slots(hosts, launcher, extra)) is None:
        return job, manifest, hosts
    count_of, hosts, said = there
    fits = [ranks for ranks in manifest.numbers if ranks <= count_of]
    if not fits:
        least = min(manifest.numbers)
        fact = f"{job.folder}: compiled for {least} ranks at least, and {said}"
        raise UsageError(f"{fact}\n  help: name more hosts or slots, or less ranks under 'elastic' in the plan")
    if (ranks := max(fits)) < manifest.ranks:
        console.echo(f"{count(ranks, 'rank')} of {manifest.ranks}: {said}", err=True)
    return *prepare(job, ranks), hosts


def _train_on(job: Job, manifest: Manifest, hosts: Hosts, extra: Sequence[str], launcher: Launcher) -> int:
    """Trains, and restarts from the newest checkpoint if a rank, its host or the launcher is lost; returns the exit code.

    A new checkpoint since the last loss resets the count of restarts. A checkpoint that an earlier run left is resumed only if the command
    says so.
    """
    from partc.cli.job.training_inputs import TrainingInputs
    from partc.runtime.checkpoint.newest import latest

    assert job.training is not None
    settings = TrainingInputs(job, manifest).settings.checkpoint
    if settings is None:
        raise UsageError(
            "--restarts: the training has no folder for checkpoints\n  help: give --checkpoint DIRECTORY, too"
        )
    folder, most = Path(settings.folder), job.training.restarts
    copies = Path(job.training.copies) if job.training.copies else None
    before = known = latest(folder)
    copied = 0
    left, current, is_first = most, job, True
    while True:
        try:
            fitting = _fitting(current, manifest, hosts, extra, launcher)
        except UsageError as error:
            if is_first:
                raise
            console.failure(str(error))
            outcome = Outcome(error.exit_code, is_lost=True)  # too few hosts answer now
        else:
            outcome = _launched(*fitting, extra, launcher)
        is_first = False
        if not outcome.is_lost:
            return outcome.code
        newest, step = latest(folder), _last_copy(copies)
        left = most if newest != known or step > copied else left
        if not left:
            console.echo(f"{count(most, 'restart')} without a new checkpoint: the training is given up", err=True)
            return outcome.code
        left, known, copied = left - 1, newest, max(step, copied)
        if newest != before:
            training = dataclasses.replace(job.training, resume="auto", init=None, only=())
            current = dataclasses.replace(job, training=training)
        begin = "as the command says" if newest == before else f"from {newest}"
        begin += f", or from the copy of step {step} in {copies}" if step else ""
        console.echo(f"starts the ranks again {begin}; {left} more times without a new checkpoint", err=True)
        time.sleep(job.training.backoff)


def _last_copy(copies: Path | None) -> int:
    """Returns the step of the newest copy of the state in this host's memory; 0 without one."""

    return max((step for step, _ in steps(copies)), default=0) if copies is not None else 0


def _launched(job: Job, manifest: Manifest, hosts: Hosts, extra: Sequence[str], launcher: Launcher) -> Outcome:
    """Runs the job once."""
    from partc.cli.job.training_inputs import saves
    from partc.runtime.training.stopping import NAMES, TRACE

    asks_to_stop = NAMES if saves(job, manifest) else ()  # the ranks of the training hear these, and not their launcher
    asks_for_trace = TRACE if job.training is not None and job.reporting.traces else ""
    with (
        Signals(asks_to_stop, handed=asks_for_trace) as signals,
        RunDir(manifest.ranks) as run_dir,
        Progress(job.inference.repeat) as progress,
    ):
        given = dataclasses.replace(job, run_dir=str(run_dir.folder))
        bar = TrainingBar()
        if job.training is not None:
            given = dataclasses.replace(given, training=dataclasses.replace(job.training, bar=sys.stderr.isatty()))
        command = command_of(given, launcher, manifest.ranks, hosts, extra)
        here = hosts.are_here

        def last_step() -> int:
            return min((step for step, _ in run_dir.board()), default=0)

        def tick() -> None:
            if signals.has_handed and (pid := run_dir.pids()[0]):
                signals.has_handed = False
                with contextlib.suppress(OSError):
                    os.kill(pid, getattr(signal, TRACE))
            pids = [pid for pid in run_dir.pids() if pid] if signals.passed else []
            if (number := signals.passed) and (pids or here):
                signals.passed = 0
                if not pids or not last_step():
                    raise stopped(number)  # before the first step there is nothing to save
                for pid in pids:
                    with contextlib.suppress(OSError):
                        os.kill(pid, number)
                        os.kill(pid, signal.SIGCONT)  # one that is stopped has to run to save
            if job.training is not None:
                if latest := read_progress(run_dir.folder / PROGRESS):
                    bar.show(*latest)
            else:
                progress.reached(last_step())

        try:
            before = bar.close if job.training is not None else progress.close
            environment = environment_of(launcher, hosts, run_dir)
            outcome = supervise(command, environment, run_dir, where_of(job), tick, before, signals, job.stall, here)
            if signals.noted:
                lost = ""
                if job.training is not None:
                    lost = _GOES_ON if asks_to_stop else _NOT_SAVED
                raise stopped(signals.noted[0], last_step(), lost)
            return outcome
        finally:
            bar.close()
            if job.inference.output is not None:
                remove_abandoned(Path(job.inference.output))


def run_here(job: Job, manifest: Manifest) -> int:
    """Runs all ranks of the job as threads, without MPI, and returns the exit code."""
    if job.training is not None:
        from partc.cli.job.training import run_threads

        return run_threads(job, manifest)
    if job.generation is not None:
        from partc.cli.job.generation import run_threads as generate

        return generate(job, manifest)
    if job.serving is not None:
        from partc.cli.job.serving import run_threads as serve_here

        return serve_here(job, manifest)
    from partc.cli.job.outputs import flatten
    from partc.runtime import load_local

    begin = time.perf_counter()
    inputs = open_job_inputs(job, manifest).read(port.name for port in manifest.inputs)
    times = []
    with (
        op_times(job) as folder,
        load_local(
            job.folder, threads=job.threads, trust=job.trust, stall=job.stall, devices=job.devices, op_times=folder
        ) as program,
    ):
        loaded = time.perf_counter() - begin
        file, texts = job.reporting.profile or "", list[str]()
        recordings = [recorded(job, one, lambda one: texts.append(measured(one, file))) for one in program.ranks]
        with Progress(job.inference.repeat) as progress:
            for step in range(job.inference.repeat):
                for recording in recordings:
                    recording.before(step + 1)
                start = time.perf_counter()
                outputs = program(inputs)
                times.append(time.perf_counter() - start)
                progress.reached(step + 1)
                for recording in recordings:
                    recording.after(step + 1)
        for recording in recordings:
            recording.end()
    if texts:
        write_profile(file, texts, job.reporting.quiet)
    counts = counted([one.counts.text() for one in program.ranks])
    finish(job, flatten(outputs), loaded, times, counts)
    return 0
