"""Loading an artifact and calling it: one rank of an MPI job, or all ranks as threads of this process.

    with partc.runtime.load("build") as program:     # on every rank
        outputs = program(x=images)

A call is one step, collective over the ranks. A step that the inputs make impossible is refused by all ranks with one InputError
and leaves the program usable. A failure inside a step ends it on all ranks.

The agreement of all ranks that begins each step: begun with the step, or ahead, while the step before runs.

    agreement.announce(following)       # optional: what the step after the next one is given
    bindings, values = agreement.of(inputs)

A rank that knows the inputs of the next step sends the others its sizes as soon as all have agreed on this one, and goes on. When it
comes to the next step they have told theirs, too, unless one is a whole step behind: so ranks wait for each other's values, and hardly ever
for each other. Agreements have an order of their own, so that each rank may begin one ahead or not, and do other things with the
others between two steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

import numpy as np
from partc.runtime.artifact.tensors.tensor import Value

from ..artifact.format import Manifest, Port
from ..artifact.generation import PREFILL
from ..artifact.manifest import Artifact, open_artifact
from ..communication.in_process import LocalWorld
from ..communication.leaving import leaving_message
from ..communication.transport import Agreements, Transport, Vector
from ..devices.devices import RequestedDevices
from ..errors import ArtifactError, InputError, PartcError, RankError, StepError, UsageError, no_memory, out_of_memory
from ..job.status_board import AGREEING, SLOT, open_board
from ..job.turn import PROGRAM, CallGuard, one_call
from ..lookups.lookup import Moved
from ..program.sessions import Settings
from .collective_plans import connected, wire_tags
from .rank_program import describe, lower_rank_program
from .recover import attempt, failed, settle
from .session_settings import settings_for
from .state import State
from .step_plan import StepPlan
from .step_plans import StepPlans
from .symbol_bindings import AnnouncedStep, Binder, Bindings, Halted
from .targets.counts import TargetCounts
from .times.profiler import Profiler

if TYPE_CHECKING:
    from mpi4py import MPI


class StepAgreement:
    """A rank's end of the agreements on the steps of one program. `ahead`: whether they may begin while the step before runs."""

    def __init__(self, binder: Binder, transport: Transport, ahead: bool) -> None:
        self.binder = binder
        self.transport = transport
        self.ahead = ahead
        self._agreements: Agreements | None = None
        self._announced: Mapping[str, object] | None = None
        self._told: AnnouncedStep | None = None
        self._halt = False
        self._request = 0

    def open(self) -> None:
        """Make ready; collective, once, before the first step."""
        if self.transport.size > 1:
            self._agreements = self.transport.agreements()

    def announce(self, inputs: Mapping[str, object]) -> None:
        """Says what the step after the next one is given."""
        self._announced = {**inputs} if self.ahead else None

    def halt(self, now: bool) -> None:
        """Says whether this rank wants no further step, with the next sizes that it sends."""
        self._halt = now

    def request(self, number: int) -> None:
        """Sends a number with the next sizes: all ranks know the largest, `requested`, once they agree on that step."""
        self._request = number

    @property
    def requested(self) -> int:
        """The largest number that ranks have sent with the last step."""
        return self.binder.request

    @property
    def sizes(self) -> Bindings:
        """The values to which the inputs of the last step have bound their symbols."""
        return self.binder.sizes

    def of(self, inputs: Mapping[str, object]) -> tuple[Bindings, Mapping[str, Value]]:
        """The bindings and inputs that all ranks agreed on for this step; then sends the sizes of the next step, if it is announced.

        Where a rank has sent a request, there may be no next step, and all ranks leave it to begin with an agreement of its own.
        """
        announced, told = self._announced, self._told
        self._announced = self._told = None
        if told is None:
            told = self._send(inputs)
        elif not told.is_of(inputs):
            raise UsageError(
                f"rank {self.transport.rank}: the inputs of a step are not those that were announced\n"
                "  help: call it with the very arrays that were announced, or announce nothing"
            )
        found = self.binder.bind(told, self.transport)
        if announced is not None and not self.requested:
            self._told = self._send(announced)
        return found

    def of_all(self, inputs: Mapping[str, object]) -> tuple[Bindings, Mapping[str, Value]]:
        """The bindings and inputs of a step that all ranks are given alike: nothing is sent, and nothing waited for."""
        self.transport.count_step()
        return self.binder.of_all(inputs)

    def reset(self) -> None:
        """Forget what has begun, after a failure."""
        self._announced = self._told = None

    def _send(self, inputs: Mapping[str, object]) -> AnnouncedStep:
        halt, self._halt = self._halt, False
        return self.binder.announce(inputs, self._agreements, halt, self._request)


Outputs: TypeAlias = dict[str, Value]
OnError: TypeAlias = Literal["raise", "abort", "recover"]

RECOVER = "recover"
CLOSED = "it was closed"


class Program:
    """One rank's end of a loaded artifact.

    One call is under way at a time, of it and of what shares its state (`job/turn.py`). In a job of one rank calls of other threads wait
    for it; among several ranks they are refused with a UsageError, since threads have no order that all ranks know. Refused are calls from
    inside of a call, too, and those in a fork of the process; after `close`, which waits for the call under way, each is a RankError.
    """

    def __init__(
        self,
        artifact: Artifact,
        transport: Transport,
        settings: Settings,
        on_error: OnError,
        state: State | None = None,
        turn: CallGuard | None = None,
    ) -> None:
        self.turn = turn or CallGuard(waits=transport.size == 1)
        self.artifact = artifact
        self.manifest: Manifest = artifact.manifest
        self.rank: int = transport.rank
        self._transport = transport
        self._on_error = on_error
        self._settings = settings
        self._program = lower_rank_program(artifact, transport.rank, settings, state)
        self.counts: TargetCounts = self._program.targets.counts
        artifact.refuse_replaced()
        self._wire = wire_tags(artifact.manifest, transport.tags)
        self._at_once: frozenset[int] = frozenset()
        self._schedules = StepPlans(self._program, self._new_plan)
        self._board = open_board(transport.rank)
        self._step = 0
        self._attempted: Bindings | None = None
        """The sizes for which all ranks have had a plan last, where steps can be given up; the other sizes that they keep may differ."""
        self.agreement = StepAgreement(self._program.binder, transport, on_error != RECOVER)
        self._broken: str | None = None

    @property
    def state(self) -> State:
        """The state of this rank."""
        return self._program.state

    @property
    def looked_up(self) -> dict[str, Moved]:
        """Maps the op and path of each lookup in tables of several ranks to what this rank has moved so far."""
        return {f"{one.call.op} {one.call.path}": one.moved for one in self._program.messages.lookups.values()}

    @one_call(PROGRAM, local=True)
    def record_times(self, number: int = 1, beside: Profiler | None = None) -> Profiler:
        """Measures every task of every step from the next one on, which has this number, until it is stopped; `sibling_program` measures
        another program.
        """
        return self._schedules.measured_by(beside or Profiler(self.rank, number, bool(self._settings.profile)))

    @one_call(PROGRAM, local=True)
    def prepare(self, bindings: Bindings) -> None:
        """Makes the plan of a step of these sizes, without running it. Where freed memory is filled (`memory/freed.py`) it is proven,
        and RankError names two values that share bytes while both are needed.
        """
        self._schedules.of(bindings)

    @property
    def inputs(self) -> list[Port]:
        """The model inputs that this rank reads."""
        return [port for port in self.manifest.inputs if self.rank in port.ranks]

    @property
    def outputs(self) -> list[Port]:
        """The model outputs that are delivered to this rank."""
        return [port for port in self.manifest.outputs if self.rank in port.ranks]

    @one_call(PROGRAM, "a step")
    def __call__(self, inputs: Mapping[str, object] | None = None, /, **named: object) -> Outputs:
        """Run one step; give every rank the inputs that it reads (others are ignored), and get the outputs delivered to it.

        Of an input that is cut a rank gives its shard (`Port.box`), or the `Whole` of it; of such an output it gets its shard.

        InputError is raised on all ranks alike and harms nothing. RankError says which rank failed in which op; the program
        cannot be called again. Where it recovers, that is a StepError on all ranks alike, and it can.
        """
        return self._run({**(inputs or {}), **named})

    @one_call(PROGRAM, "a step")
    def step_of_all(self, inputs: Mapping[str, object]) -> Outputs:
        """A call that all ranks give the same inputs, whole ones also of those that a rank does not read: they agree without a message.
        What comes back lies where the step made it, until the next step of any program of the artifact."""
        return self._run(inputs, of_all=True)

    def _run(self, inputs: Mapping[str, object], of_all: bool = False) -> Outputs:
        if self._broken is not None:
            raise RankError(f"the program has stopped: {self._broken}")
        self._step += 1
        try:
            SLOT.pack_into(self._board.buffer, self._board.offset, self._step, AGREEING)
            bindings, values = self.agreement.of_all(inputs) if of_all else self.agreement.of(inputs)
            if self._on_error == RECOVER:
                return self._attempt(bindings, values)
            return self._schedules.of(bindings).run(values, self._board, self._step, lent=of_all)
        except (InputError, Halted):
            raise
        except BaseException as error:
            if not (isinstance(error, StepError) and self._on_error == RECOVER):
                self._fail(error)
            raise

    @one_call(PROGRAM)
    def announce(self, inputs: Mapping[str, object]) -> None:
        """Says what the step after the next one is given: the next one begins the agreement on it, and waits for no other rank.

        That step must then be called with the same arrays, unchanged since. Other ranks need not announce it. Where steps can be given up
        (`on_error="recover"`) each begins with an agreement of its own.
        """
        self.agreement.announce(inputs)

    def _attempt(self, bindings: Bindings, values: Mapping[str, Value]) -> Outputs:
        """A step that all ranks give up with a StepError where it fails on any."""
        if bindings != self._attempted:
            failure = None
            try:
                self._schedules.of(bindings)
            except InputError:
                raise
            except Exception as error:
                failure = failed(self._transport, error)
            settle(self._transport, failure)
            self._attempted = dict(bindings)
        outputs, failure = attempt(self._schedules.of(bindings), values, self._board, self._step)
        settle(self._transport, failure)
        return outputs

    @property
    def usable(self) -> bool:
        """Whether it can be called: no step has failed, and it was not closed."""
        return self._broken is None

    @one_call(PROGRAM)
    def connect(self) -> None:
        """Make ready for the collectives of the artifact; all ranks call it, once, before the first step."""
        self._connect()

    def _connect(self) -> None:
        self.agreement.open()
        self._at_once = connected(self._program, self.manifest, self._transport)

    @one_call(PROGRAM)
    def all_gather_text(self, text: str) -> list[str]:
        """The text of every rank, in order of ranks; collective."""
        return self._transport.all_gather_text(text)

    @one_call(PROGRAM)
    def sibling_program(self, name: str) -> Program:
        """Another program of the artifact over the same state and the same ranks, such as `evaluate` of a training; collective."""
        own = self._transport, replace(self._settings, profile=""), self._on_error, self.state
        other = Program(self.artifact.program_named(name), *own, self.turn.shared())
        self.artifact.refuse_replaced()
        other._connect()
        return other

    def at_slots(self, slots: Sequence[int]) -> None:
        """Let the next steps compute these slots, of a prefill one of each run, of a decode in turns a group; the same on all ranks."""
        if self._program.rows is None:
            fact = f"the program '{self.manifest.name}' computes all slots"
            raise UsageError(f"{fact}\n  help: choose slots of the program '{PREFILL}'")
        self._program.rows.choose(slots)

    def release(self) -> None:
        """Give back sessions and buffers, and leave the ranks' connection to whom it belongs; after the call under way."""
        if not self.turn.over:
            self._end()

    @one_call(PROGRAM, "close()", ending=True)
    def _end(self, transport: Transport | None = None) -> None:
        if self._broken is None:
            self._broken = CLOSED
            if transport is not None:
                transport.close()
        self._schedules.clear()
        self._program.runners.clear()
        if self._program.targets.workers is not None:
            self._program.targets.workers.close()
            self._program.targets.workers = None
        self._program.replacement.updates.clear()
        self._settings.shared.clear()
        self.turn.ended = self._broken

    @one_call(PROGRAM)
    def maxima(self, numbers: Vector) -> Vector:
        """The element-wise maxima of all ranks' whole numbers; collective."""
        return self._transport.all_reduce_max(numbers)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._transport.size

    @one_call(PROGRAM)
    def agreements(self) -> Agreements:
        """Agreements of all ranks other than those of steps; collective."""
        return self._transport.agreements()

    @one_call(PROGRAM)
    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; collective."""
        return bool(self._transport.all_reduce_max(np.array([flag], np.int64))[0])

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers; collective. It takes no turn: what reads batches calls it, also inside of an evaluation."""
        if self.turn.ended is not None:
            raise RankError(f"the program has stopped: {self.turn.ended}")
        return int(self._transport.all_reduce_max(np.array([number], np.int64))[0])

    def describe(self, action: int) -> str:
        """The text of an action that the status board shows."""
        return describe(self._program.steps, action)

    @one_call(PROGRAM)
    def recover(self) -> None:
        """Make the program callable again after a failure; all ranks must do so, and the transport must hold no old message."""
        self._broken = self._attempted = None
        self.agreement.reset()

    def close(self) -> None:
        """Give back sessions, buffers and communicators, after the call under way; collective."""
        if not self.turn.over:
            self._end(self._transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.leave(error)
        self.close()

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks that this one takes part in nothing more, since an error has left its block."""
        if not self.turn.over:
            self._broken = self._broken or "an error left its block"
            self._transport.leave(leaving_message(self.rank, error))

    def _new_plan(self, bindings: Bindings) -> StepPlan:
        return StepPlan(self._program, bindings, self._transport, self._wire, self._at_once, self._on_error != RECOVER)

    def _fail(self, error: BaseException) -> None:
        known = isinstance(error, PartcError) or not isinstance(error, Exception)
        own = f"rank {self.rank} failed: {type(error).__name__}: {error}"
        self._broken = text = leaving_message(self.rank, error) if known else own
        if self._on_error == "abort":
            self._transport.abort(text)
        else:
            self._transport.fail(text, list(self._schedules.values()))


def load(
    folder: str | Path,
    comm: MPI.Intracomm | Transport | None = None,
    *,
    program: str = "",
    threads: int | None = None,
    trust: bool = False,
    stall: float = 30.0,
    on_error: OnError = "raise",
    devices: RequestedDevices | None = None,
    first: Callable[[], object] | None = None,
    op_times: Path | None = None,
) -> Program:
    """This rank's end of the artifact in `folder`; collective over `comm`, by default MPI.COMM_WORLD.

    `program`: its name, by default the main one. `threads`: of each operator, by default the cores that belong to this rank. `trust`:
    do not hash the files. `stall`: seconds after which a wait is reported on stderr. `on_error`: what a failure inside a step does to
    the job: "raise" a RankError on every rank, "abort" it by MPI, or "recover": every rank raises a StepError and the next step runs,
    of a program that keeps no state. `devices`: by target its device, as `--device` says it: {"device": "cuda"}, {"cuda": "cpu"}.
    `first`: what each rank does before it opens anything, for all. `op_times`: a folder for the files in which onnxruntime notes the
    time of every node, for a trace; that slows each step. One rank needs no MPI.
    """
    artifact: Artifact | None = None
    loaded: Program | None = None
    failure: Exception | None = None
    try:
        if first is not None:
            first()
        artifact = open_artifact(folder, trust=trust, program=program)
    except Exception as error:
        failure = error
    if artifact is not None:
        refuse_recovery(artifact, on_error)
    transport = _transport(folder, artifact.manifest.ranks if artifact else None, comm, stall)
    problem = "" if failure is None else _problem(transport.rank, failure)
    if artifact is not None:
        try:
            loaded = Program(artifact, transport, settings_for(transport, threads, devices, op_times), on_error)
        except Exception as error:
            problem = _problem(transport.rank, error)
    said = [
        text.partition("\n") for text in transport.all_gather_text(f"{artifact.digest if artifact else ''}\n{problem}")
    ]
    problems = [text for text in dict.fromkeys(text for _, _, text in said) if text]
    if not problems and len({digest for digest, _, _ in said}) > 1:
        fact = "the ranks read different artifacts: it was replaced meanwhile, or is not the same on all hosts"
        problems = [f"{folder}: {fact}\n  help: try again, with a folder that all ranks share"]
    if loaded is None or problems:
        transport.close()
        if failure is not None and not isinstance(failure, ArtifactError):
            raise failure
        raise ArtifactError("\n".join(problems))
    try:
        loaded.connect()
    except BaseException as error:
        loaded._fail(error)
        raise
    return loaded


def _problem(rank: int, error: Exception) -> str:
    """The error of a rank that cannot load, as all ranks raise it."""
    text = no_memory(reason) if (reason := out_of_memory(error)) else f"{type(error).__name__}: {error}"
    return str(error) if isinstance(error, PartcError) else f"rank {rank}: {text}"


def refuse_recovery(artifact: Artifact, on_error: OnError) -> None:
    """UsageError where steps change what ranks keep: some may have replaced it when another one fails."""
    if on_error == RECOVER and any(record.next for record in artifact.manifest.state):
        fact = "its steps change what ranks keep, so none can be given up once it has begun"
        raise UsageError(f"{artifact.folder}: {fact}\n  help: leave out on_error='recover', go on from a checkpoint")


def _transport(
    folder: str | Path, ranks: int | None, comm: MPI.Intracomm | Transport | None, stall: float
) -> Transport:
    """The transport for a job of the right size, `ranks`, unless that is not known; UsageError says the right one."""
    launched = any(os.environ.get(name, "1") != "1" for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    if comm is None and ranks in (1, None) and not launched:
        return LocalWorld(1, stall).transport(0)
    if comm is None:
        from ..communication.mpi_start import started

        comm = started(stall)
    if ranks is not None and comm.size != ranks:
        fact = f"{folder}: was compiled for {ranks} ranks, this job has {comm.size}"
        raise UsageError(f"{fact}\n  help: start it with `partc run -n {ranks} {folder}` or `mpiexec -n {ranks} ...`")
    if isinstance(comm, Transport):
        return comm
    from ..communication.mpi import MpiTransport

    return MpiTransport(comm, stall)
