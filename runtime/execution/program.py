"""Loads an artifact and runs its steps: one rank of an MPI job, or all ranks as threads of this process.

    with partc.runtime.load("build") as program:     # on every rank
        outputs = program(x=images)

A call is one step, collective over the ranks. If the inputs make a step impossible, all ranks refuse it with the same InputError, and the
program stays usable. A failure inside a step ends the step on all ranks.
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

from ..artifact.format import BEGIN, Manifest, Port
from ..artifact.generation import PREFILL
from ..artifact.manifest import Artifact, open_artifact
from ..communication.in_process import LocalWorld
from ..communication.leaving import leaving_message
from ..communication.transport import Agreements, Transport, Vector
from ..devices.devices import RequestedDevices, check_devices
from ..errors import ArtifactError, InputError, PartcError, RankError, StepError, UsageError, no_memory, out_of_memory
from ..job.status_board import AGREEING, SLOT, open_board
from ..job.turn import PROGRAM, CallGuard, one_call
from ..lookups.lookup import Moved
from ..program.sessions import Settings
from .collective_plans import connected, wire_tags
from .linked_file import LinkedFile, linked_file
from .rank_program import describe, lower_rank_program, settings_for
from .recover import attempt, failed, settle
from .state import State
from .step_plan import StepPlan
from .step_plans import StepPlans
from .symbol_bindings import AnnouncedStep, Binder, Bindings, Halted
from .targets.counts import TargetCounts
from .times.profiler import Profiler

if TYPE_CHECKING:
    from mpi4py import MPI


class StepAgreement:
    """A rank's end of the agreements on the sizes of a program's steps. `ahead`: whether they may begin while the previous step runs.

        agreement.announce(following)       # optional: the inputs of the step after the next one
        bindings, values = agreement.of(inputs)

    A rank that knows the inputs of the next step sends their sizes as soon as all have agreed on the current step. When it begins the
    next step, the others have sent theirs too, unless a rank is a whole step late. Agreements have an order of their own, so that each rank
    may begin one ahead or not, and may communicate otherwise between two steps.
    """

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
        """Creates the agreements; collective, called once before the first step."""
        if self.transport.size > 1:
            self._agreements = self.transport.agreements()

    def announce(self, inputs: Mapping[str, object]) -> None:
        """Announces the inputs of the step after the next one."""
        self._announced = {**inputs} if self.ahead else None

    def halt(self, now: bool) -> None:
        """Sets whether this rank, with the next sizes that it sends, asks all ranks to run no further step."""
        self._halt = now

    def request(self, number: int) -> None:
        """Sends a number with the next sizes; once the ranks agree on that step, each has the largest of their numbers as `requested`."""
        self._request = number

    @property
    def requested(self) -> int:
        """The largest number that ranks sent with the last step."""
        return self.binder.request

    @property
    def sizes(self) -> Bindings:
        """The sizes of the symbols in the last step."""
        return self.binder.sizes

    def of(self, inputs: Mapping[str, object]) -> tuple[Bindings, Mapping[str, Value]]:
        """Returns the bindings and inputs of this step, as all ranks agreed; then sends the sizes of the next step, if it is announced.

        If a rank has sent a request there may be no next step: then nothing is sent ahead, and the next step begins with its own agreement.
        """
        announced, sent = self._announced, self._told
        self._announced = self._told = None
        if sent is None:
            sent = self._send(inputs)
        elif not sent.is_of(inputs):
            raise UsageError(
                f"rank {self.transport.rank}: the inputs of a step are not those that were announced\n"
                "  help: call it with the very arrays that were announced, or announce nothing"
            )
        found = self.binder.bind(sent, self.transport)
        if announced is not None and not self.requested:
            self._told = self._send(announced)
        return found

    def of_all(self, inputs: Mapping[str, object]) -> tuple[Bindings, Mapping[str, Value]]:
        """Returns the bindings and inputs of a step with the same inputs on all ranks: it sends no message and does not wait."""
        self.transport.count_step()
        return self.binder.of_all(inputs)

    def reset(self) -> None:
        """Discards announced inputs and an agreement that was begun ahead, after a failure."""
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

    One call is under way at a time, of this program and of all that share its state (`job/turn.py`). In a job of one rank the calls of
    other threads wait for it; among several ranks they are refused with a UsageError, since threads have no order that all ranks know.
    Calls from inside a call, and those in a fork of the process, are refused too; after `close`, which waits for the call under way, every
    call is a RankError.
    """

    def __init__(
        self,
        artifact: Artifact,
        transport: Transport,
        settings: Settings,
        on_error: OnError,
        state: State | None = None,
        turn: CallGuard | None = None,
        linked: LinkedFile | None = None,
    ) -> None:
        self.turn = turn or CallGuard(waits=transport.size == 1)
        self.artifact = artifact
        self.manifest: Manifest = artifact.manifest
        self.rank: int = transport.rank
        self._transport = transport
        self._on_error = on_error
        self._settings = settings
        self._program = lower_rank_program(artifact, transport.rank, settings, state, linked)
        self.counts: TargetCounts = self._program.targets.counts
        artifact.refuse_replaced()
        self._wire = wire_tags(artifact.manifest, transport.tags)
        self._at_once: frozenset[int] = frozenset()
        self._schedules = StepPlans(self._program, self._new_plan)
        self._board = open_board(transport.rank)
        self._step = 0
        self._attempted: Bindings | None = None
        """The last sizes for which all ranks had a plan, where steps can be abandoned; ranks may cache plans for different other sizes."""
        self.agreement = StepAgreement(self._program.binder, transport, on_error != RECOVER)
        self._broken: str | None = None

    @property
    def state(self) -> State:
        """The state of this rank."""
        return self._program.state

    @property
    def looked_up(self) -> dict[str, Moved]:
        """Maps the op and path of each lookup in tables of several ranks to the counts of steps, ids and received bytes so far."""
        return {f"{one.call.op} {one.call.path}": one.moved for one in self._program.messages.lookups.values()}

    @one_call(PROGRAM, local=True)
    def record_times(self, number: int = 1, beside: Profiler | None = None) -> Profiler:
        """Measures every task of every step from the next one on, which has this `number`, until the profiler is stopped.

        `beside`: a profiler that already measures another program, from `sibling_program`, and is to measure this one too.
        """
        return self._schedules.measured_by(beside or Profiler(self.rank, number, bool(self._settings.profile)))

    @one_call(PROGRAM, local=True)
    def prepare(self, bindings: Bindings) -> None:
        """Makes the plan of a step of these sizes, without running it.

        Where freed memory is filled (`memory/freed.py`) the plan is proven: RankError names two values that share bytes while both are
        needed.
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
        """Runs one step: every rank passes the inputs that it reads (others are ignored), and gets the outputs delivered to it.

        A rank passes its shard (`Port.box`) of a sharded input, or the global value as a `Whole`; it gets its shard of a sharded output.

        All ranks raise InputError together, and the program stays usable. RankError names the rank and the op that failed, and the program
        cannot be called again; where it recovers all ranks raise a StepError instead, and it can be called again.
        """
        return self._run({**(inputs or {}), **named})

    @one_call(PROGRAM, "a step")
    def step_of_all(self, inputs: Mapping[str, object]) -> Outputs:
        """Runs a step with the same inputs on all ranks, also those that this rank does not read, each as a global value.

        The ranks agree on the step without a message. The outputs are not copied: they are valid until the next step of any program of the
        artifact.
        """
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
        """Announces the inputs of the step after the next one, so that its agreement begins in the next step and waits for no other rank.

        That step must be called with the same arrays, unchanged in between. Other ranks need not announce it. Where steps can be abandoned
        (`on_error="recover"`) each begins with an agreement of its own.
        """
        self.agreement.announce(inputs)

    def _attempt(self, bindings: Bindings, values: Mapping[str, Value]) -> Outputs:
        """Runs a step that all ranks abandon with a StepError if it fails on any rank."""
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
        """Whether the program can be called: no step has failed, and it is not closed."""
        return self._broken is None

    @one_call(PROGRAM)
    def connect(self) -> None:
        """Prepares the collectives of the artifact; all ranks call it, once, before the first step."""
        self._connect()

    def _connect(self) -> None:
        self.agreement.open()
        self._at_once = connected(self._program, self.manifest, self._transport)

    @property
    def transport(self) -> Transport:
        """This rank's end of the job, for messages that are not of a step."""
        return self._transport

    @one_call(PROGRAM)
    def all_gather_text(self, text: str) -> list[str]:
        """Returns the texts of all ranks, in the order of the ranks; collective."""
        return self._transport.all_gather_text(text)

    @one_call(PROGRAM)
    def sibling_program(self, name: str) -> Program:
        """Another program of the artifact over the same state and the same ranks, such as `evaluate` of a training; collective."""
        own = self._transport, replace(self._settings, profile=""), self._on_error, self.state
        artifact, host = self.artifact.program_named(name), self._on_error == RECOVER
        linked = linked_file(artifact, self._transport, self._settings.devices, self._program.messages.links, host)
        other = Program(artifact, *own, self.turn.shared(), linked)
        self.artifact.refuse_replaced()
        other._connect()
        return other

    def at_slots(self, slots: Sequence[int]) -> None:
        """Sets the slots that the next steps compute, the same on all ranks: for a prefill one of each run, for a decode a group."""
        if self._program.rows is None:
            fact = f"the program '{self.manifest.name}' computes all slots"
            raise UsageError(f"{fact}\n  help: choose slots of the program '{PREFILL}'")
        self._program.rows.choose(slots)

    def release(self) -> None:
        """Frees sessions and buffers, but not the connection between the ranks, which has another owner; waits for the call under way."""
        if not self.turn.over:
            self._end()

    @one_call(PROGRAM, "close()", ending=True)
    def _end(self, transport: Transport | None = None) -> None:
        if self._broken is None:
            self._broken = CLOSED
            if transport is not None:
                transport.close()
        self._schedules.clear()
        if (links := self._program.messages.links) is not None:
            links.close()
        self._program.runners.clear()
        if self._program.targets.workers is not None:
            self._program.targets.workers.close()
            self._program.targets.workers = None
        self._program.replacement.updates.clear()
        self._settings.shared.clear()
        self.turn.ended = self._broken

    @one_call(PROGRAM)
    def maxima(self, numbers: Vector) -> Vector:
        """Returns the element-wise maxima of all ranks' integers; collective."""
        return self._transport.all_reduce_max(numbers)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._transport.size

    @one_call(PROGRAM)
    def agreements(self) -> Agreements:
        """Creates agreements of all ranks that are independent of those of steps; collective."""
        return self._transport.agreements()

    @one_call(PROGRAM)
    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; collective."""
        return bool(self._transport.all_reduce_max(np.array([flag], np.int64))[0])

    def largest(self, number: int) -> int:
        """Returns the largest of the ranks' numbers; collective. It needs no turn: a reader of batches may call it inside an evaluation."""
        if self.turn.ended is not None:
            raise RankError(f"the program has stopped: {self.turn.ended}")
        return int(self._transport.all_reduce_max(np.array([number], np.int64))[0])

    def describe(self, action: int) -> str:
        """Returns the text for an action number of the status board."""
        return describe(self._program.steps, action)

    @one_call(PROGRAM)
    def recover(self) -> None:
        """Makes the program callable again after a failure; all ranks must call it, and the transport must hold no old message."""
        self._broken = self._attempted = None
        self.agreement.reset()

    def close(self) -> None:
        """Frees sessions, buffers and communicators, after the call under way; collective."""
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
        """Tells the other ranks that this one takes part in no further step, since an error has left its `with` block."""
        if not self.turn.over:
            self._broken = self._broken or "an error left its block"
            self._transport.leave(leaving_message(self.rank, error))

    def _new_plan(self, bindings: Bindings) -> StepPlan:
        together = self._on_error != RECOVER
        plan = StepPlan(self._program, bindings, self._transport, self._wire, self._at_once, together)
        if plan.memory.freed is not None:
            from .memory.proof import refuse_meeting  # which a job of a user does not need

            refuse_meeting(plan)
        return plan

    def _fail(self, error: BaseException) -> None:
        known = isinstance(error, PartcError) or not isinstance(error, Exception)
        own = f"rank {self.rank} failed: {type(error).__name__}: {error}"
        self._broken = text = leaving_message(self.rank, error) if known else own
        if self._on_error == "abort":
            self._transport.abort(text)
        else:
            self._transport.fail(text, list(self._schedules.values()))
        if (links := self._program.messages.links) is not None:
            links.abort()


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
    """Loads this rank's end of the artifact in `folder`; collective over `comm`, by default MPI.COMM_WORLD.

    `program`: the name of a program, by default the main one. `threads`: of each operator, by default the cores that belong to this rank.
    `trust`: do not hash the files. `stall`: seconds after which a wait is reported on stderr. `on_error`: the effect of a failure inside a
    step on the job: "raise" a RankError on every rank, "abort" the job by MPI, or "recover": every rank raises a StepError and the next
    step runs; that needs a program without state. `devices`: maps each target to its device, as `--device` does: {"device": "cuda"},
    {"cuda": "cpu"}. `first`: called on each rank before it opens a file; an exception of it fails all ranks. `op_times`: a folder for the
    files in which onnxruntime notes the time of every node, for a trace; that slows each step. One rank needs no MPI.
    """
    artifact: Artifact | None = None
    loaded: Program | None = None
    failure: Exception | None = None
    try:
        if first is not None:
            first()
        check_devices(devices or {})
        artifact = open_artifact(folder, trust=trust, program=program)
    except Exception as error:
        failure = error
    if artifact is not None:
        refuse_recovery(artifact, on_error)
    transport = _transport(folder, artifact.manifest.ranks if artifact else None, comm, stall)
    problem = "" if failure is None else _problem(transport.rank, failure)
    try:
        settings = settings_for(transport, threads, devices if artifact is not None else None, op_times)
        linked = linked_file(artifact, transport, settings.devices, host=on_error == RECOVER)
        if artifact is not None:
            loaded = Program(artifact, transport, settings, on_error, linked=linked)
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
    """Returns the text about a rank that cannot load, for the error of all ranks."""
    text = no_memory(reason) if (reason := out_of_memory(error)) else f"{type(error).__name__}: {error}"
    return str(error) if isinstance(error, PartcError) else f"rank {rank}: {text}"


def refuse_recovery(artifact: Artifact, on_error: OnError) -> None:
    """Raises UsageError where recovery is requested and steps change the state: some ranks may have replaced it when another one fails."""
    if on_error == RECOVER and any(one.op == BEGIN for one in artifact.manifest.collectives):
        fact = "it has a body in which ranks communicate, of which a rank that fails cannot tell how often the others run it"
        raise UsageError(f"{artifact.folder}: {fact}\n  help: leave out on_error='recover'")
    if on_error == RECOVER and any(record.next for record in artifact.manifest.state):
        fact = "its steps change what ranks keep, so none can be given up once it has begun"
        raise UsageError(f"{artifact.folder}: {fact}\n  help: leave out on_error='recover', go on from a checkpoint")


def _transport(
    folder: str | Path, ranks: int | None, comm: MPI.Intracomm | Transport | None, stall: float
) -> Transport:
    """Returns the transport of the job; UsageError unless it has `ranks` ranks. `ranks`: None if the artifact could not be opened."""
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
