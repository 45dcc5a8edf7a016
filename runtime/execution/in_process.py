"""Runs all ranks of an artifact in this process, each as a thread: for tests, `partc verify`, and machines without MPI."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
from partc.runtime.artifact.tensors.boxes import distinct, merge
from partc.runtime.artifact.tensors.tensor import Value

from ..artifact.format import Manifest, Port
from ..artifact.manifest import Artifact, open_artifact
from ..communication.in_process import LocalWorld
from ..devices.devices import RequestedDevices
from ..job.turn import PROGRAM, CallGuard, one_call
from ..program.sessions import Settings
from .inputs import Whole
from .linked_file import linked_file
from .program import CLOSED, RECOVER, OnError, Outputs, Program, refuse_recovery
from .rank_program import settings_for
from .rank_threads import RankThreads, Result


class LocalProgram:
    """All ranks of an artifact as threads of this process: called with the unsharded model's inputs, it returns all outputs.

    Any number of threads may call it: one call is under way at a time, and the others wait (`job/turn.py`). `close` waits for the call
    under way; a later call is a RankError. Calls from inside a call, and in a fork of the process, are UsageErrors.
    """

    def __init__(
        self, artifact: Artifact, settings: Sequence[Settings], stall: float, on_error: OnError = "raise"
    ) -> None:
        self.manifest: Manifest = artifact.manifest
        self._world = LocalWorld(artifact.manifest.ranks, stall)
        transports = [self._world.transport(rank) for rank in range(self._world.size)]
        pairs = list(zip(transports, settings, strict=True))
        self.turn = turn = CallGuard(waits=True)
        self._threads = RankThreads(self._world)
        turn.working = self._threads.identifiers
        turns = [CallGuard(waits=False, admits=self._admits) for _ in transports]
        host = on_error == RECOVER
        files = self._threads.run(
            [partial(linked_file, artifact, transport, own.devices, host=host) for transport, own in pairs],
            after=self._world.reset,
        )
        self._ranks = [
            Program(artifact, transport, own, on_error, turn=one, linked=file)
            for (transport, own), one, file in zip(pairs, turns, files, strict=True)
        ]
        self._sound = True
        """Whether no message or failure remains from an earlier call."""
        self._main = self
        self._others: list[LocalProgram] = []
        """The other programs of the artifact that were loaded with this one."""
        self._all([partial(self._connect, program) for program in self._ranks])

    @property
    def ranks(self) -> list[Program]:
        """Every rank's end."""
        return self._ranks

    @property
    def inputs(self) -> list[Port]:
        """The model's inputs."""
        return self.manifest.inputs

    @property
    def outputs(self) -> list[Port]:
        """The model's outputs."""
        return self.manifest.outputs

    @one_call(PROGRAM, "a step")
    def __call__(self, inputs: Mapping[str, object] | None = None, /, **named: object) -> Outputs:
        """Runs one step on all ranks, with global inputs and outputs. After an InputError or a RankError it can be called again."""
        given = {**(inputs or {}), **named}
        for port in self.inputs:
            if port.boxes is not None and port.name in given and not isinstance(given[port.name], Whole):
                given[port.name] = Whole(given[port.name])
        found = self._all([partial(program, given) for program in self._ranks])
        return {port.name: joined_output(port, found) for port in self.outputs if port.ranks}

    @one_call(PROGRAM, "a step")
    def step_of_all(self, inputs: Mapping[str, object]) -> list[Outputs]:
        """Returns the result of each rank's `Program.step_of_all` for these inputs, in the order of the ranks."""
        return self._all([partial(program.step_of_all, inputs) for program in self._ranks])

    @one_call(PROGRAM, "loading")
    def sibling_program(self, name: str) -> LocalProgram:
        """Loads another program of the artifact over the same state, such as `prefill` of a decoder; it is closed with this one."""
        found = copy.copy(self)
        found._ranks = self._all([partial(program.sibling_program, name) for program in self._ranks])
        found.manifest = found._ranks[0].manifest
        self._others.append(found)
        return found

    def at_slots(self, slots: Sequence[int]) -> None:
        """As `Program.at_slots`, on all ranks."""
        for program in self._ranks:
            program.at_slots(slots)

    def _admits(self, thread: int) -> bool:
        """Whether a thread may call one of the ranks: a rank's own thread, or the thread whose call of all ranks is under way."""
        return thread in self._threads.identifiers or self.turn.has(thread)

    def _all(self, jobs: Sequence[Callable[[], Result]]) -> list[Result]:
        """Returns the results of all ranks. Where ranks fail, it raises the first cause, and the program can be called again."""
        main = self._main
        if not main._sound:
            self._threads.await_idle()  # an interrupted call may still run, at any point
            main._recover()
        main._sound = False
        try:
            results = self._threads.run(jobs, after=self._world.reset)
        except BaseException:
            if self._threads.idle:
                main._recover()
            raise
        main._sound = True
        return results

    def _recover(self) -> None:
        """Discards what a failed call left, in the ranks' own threads, so that another Ctrl-C leaves none of their locks taken."""
        for one in (self, *self._others):
            self._threads.run([program.recover for program in one._ranks], after=self._world.reset)
        self._sound = True

    def _connect(self, program: Program) -> None:
        try:
            program.connect()
        except Exception as error:
            self._world.fail(f"rank {program.rank} failed: {type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        """Frees sessions, buffers and threads, after the call under way."""
        if not self.turn.over:
            self._end()

    @one_call(PROGRAM, "close()", ending=True)
    def _end(self) -> None:
        self.turn.ended = CLOSED
        self._threads.close()
        for other in self._others:
            for program in other._ranks:
                program.release()
        for program in self._ranks:
            program.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def joined_output(port: Port, found: Sequence[Outputs]) -> Value:
    """Returns the global value of an output, joined from the outputs of all ranks."""
    if port.boxes is None:
        return found[port.ranks[0]][port.name]
    chosen = distinct(port)
    return merge([box for _, box in chosen], [np.asarray(found[rank][port.name]) for rank, _ in chosen])


def load_local(
    folder: str | Path,
    *,
    program: str = "",
    threads: int | None = None,
    trust: bool = False,
    stall: float = 30.0,
    on_error: Literal["raise", "recover"] = "raise",
    devices: RequestedDevices | None = None,
    op_times: Path | None = None,
) -> LocalProgram:
    """Loads all ranks of the artifact in `folder` as threads of this process, without MPI.

    `program`, `devices`, `on_error` and `op_times` are as for `load`. In one process a program can be called again after any failure; with
    "recover" it fails as it does over MPI.
    """
    artifact = open_artifact(folder, trust=trust, program=program)
    world = LocalWorld(artifact.manifest.ranks)
    settings = [settings_for(world.transport(rank), threads, devices, op_times) for rank in range(world.size)]
    refuse_recovery(artifact, on_error)
    return LocalProgram(artifact, settings, stall, on_error)
