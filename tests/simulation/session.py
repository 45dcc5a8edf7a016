"""A sample made ready once, and run by many seeds: each run must end equal to the undisturbed one, or refused with the right rank named.

A seed decides the weather, the interleaving, and whether something goes wrong: a rank that dies, sleeps or raises at any of its actions or
calls of the transport, or is given what no step can take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from equivalence import same
from partc.runtime import InputError, Program, Trainer, Whole, load, load_trainer
from partc.runtime.artifact.tensors.boxes import slices
from partc.runtime.communication.in_process import LocalWorld
from partc.runtime.communication.leaving import leaving_message
from partc.runtime.errors import StepError
from partc.runtime.execution.program import OnError
from partc.runtime.execution.step_plan import StepPlan
from partc.runtime.program.steps import Segment
from training_equivalence import put, same_tensors, tensors

from .faults import (
    DIES,
    DIMS,
    DISK,
    EXITS,
    KINDS,
    LABEL,
    MISSING,
    NONE,
    NONFINITE,
    RAISES,
    REFUSED,
    SLEEPS,
    WORDS,
    Fault,
    Results,
    spoiled,
    without_numbers,
)
from .samples import Sample
from .scheduler import Choices, Endless, Killed
from .transport import SimulatedTransport
from .verdict import judged
from .world import CALM, SimulatedWorld, Weather


@dataclass(frozen=True)
class Found:
    """How a run went: its problems, none where all is well."""

    sample: str
    seed: int
    weather: Weather
    fault: Fault
    hit: bool
    decisions: int
    problems: list[str]
    trace: list[tuple[float, int, str]] | None
    given_up: int = 0
    """How many ranks gave up a step and went on."""


class Session:
    """A sample with its ranks loaded and its undisturbed run known."""

    def __init__(self, sample: Sample, folder: Path) -> None:
        self.sample, self.folder = sample, folder
        self.artifact = folder / "build"
        if not self.artifact.exists():
            sample.compile(self.artifact)
        self.steps = sample.steps(np.random.default_rng(7))
        self.world = SimulatedWorld(sample.ranks)
        self.transports = [
            SimulatedTransport(self.world, rank, sample.native, sample.own_cores, sample.tags)
            for rank in range(sample.ranks)
        ]
        self.ends: list[Program | Trainer] = self._loaded()
        self.programs = [_programs(end) for end in self.ends]
        self.start = [[(array, array.copy()) for _, array in row[0].state.arrays()] for row in self.programs]
        self.before = self.tensors()
        self.fault, self.hit = Fault(NONE), False
        self.counts = [0] * sample.ranks
        self.at: list[tuple[Program, int] | None] = [None] * sample.ranks
        self.run_count = 0
        for rank, row in enumerate(self.programs):
            for program in row:
                self._watch_schedules(rank, program)
        self.world.watch = self._happen
        self.reference = self._reference()
        self.after = self.tensors()
        # The second run of a size is like all others: what was prepared anew has been agreed upon.
        self._run(CALM, Choices(Random(0)), Fault(NONE))
        self.lengths, self.computing = list(self.counts), [list(row) for row in self.segments]

    def close(self) -> None:
        """Ends the threads."""
        self.world.close()

    def renew(self) -> None:
        """Prepares steps anew, as they are for runs from here on."""
        for row in self.programs:
            for program in row:
                program._schedules.clear()
        self._run(CALM, Choices(Random(0)), Fault(NONE))

    def seeded(self, seed: int, limit: int | None = None, traced: bool = False) -> Found:
        """The run of a seed; only its first `limit` decisions disturb it."""
        random = Random(seed)
        weather = Weather.of(random)
        fault = self._fault(random)
        choices = Choices(Random(random.getrandbits(64)), limit)
        self.world.trace = [] if traced else None
        outcomes = self._run(weather, choices, fault)
        problems = judged(self, outcomes)
        trace, self.world.trace = self.world.trace, None
        given_up = sum(bool(outcome.value.given_up) for outcome in outcomes if outcome.value)
        return Found(self.sample.name, seed, weather, fault, self.hit, choices.made, problems, trace, given_up)

    def _fault(self, random: Random) -> Fault:
        stops = self.sample.trains and "on_nonfinite" not in self.sample.plan
        kind = random.choice((*KINDS, *[DISK] * 4 * self.sample.saves, *[NONFINITE] * 2 * stops))
        rank = random.randrange(self.sample.ranks)
        if kind in (REFUSED, DISK, NONFINITE):
            wanted = "tensor(float)" if kind == NONFINITE else "tensor("
            readers = [end.rank for end in self.ends if any(port.type.startswith(wanted) for port in end.inputs)]
            at = rank if kind == DISK else random.choice(readers)
            labelled = any(port.labels for port in self.ends[at].inputs)
            way = random.choice((DIMS, MISSING, LABEL) if labelled else (DIMS, MISSING))
            return Fault(kind, at, random.randrange(len(self.steps)), way)
        if kind == RAISES and self.computing[rank] and random.random() < 0.5:
            return Fault(kind, rank, random.choice(self.computing[rank]))
        return Fault(kind, rank, random.randrange(1, self.lengths[rank] + 1))

    def _loaded(self) -> list[Any]:
        make = load_trainer if self.sample.trains else load

        on_error: OnError = "recover" if self.sample.recovers else "raise"

        def job(rank: int) -> Callable[[], Any]:
            return lambda: make(self.artifact, self.transports[rank], threads=1, on_error=on_error)

        self.world.forget(CALM, Choices(Random(0)))
        outcomes = self.world.run([job(rank) for rank in range(self.sample.ranks)])
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.value for outcome in outcomes]

    def _reference(self) -> list[Results]:
        """The undisturbed run, held against the whole model."""
        outcomes = self._run(CALM, Choices(Random(0)), Fault(NONE))
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        if problems := [*self.world.misuses, *self.world.leftovers()]:
            raise AssertionError(f"{self.sample.name}, undisturbed: {problems}")
        found: list[Results] = [outcome.value for outcome in outcomes]
        sample, folder = self.sample, self.folder / "whole"
        if not folder.exists():
            sample.compile(folder, whole=True)
        end = (load_trainer if sample.trains else load)(folder, LocalWorld(1).transport(0), threads=1)
        program = _programs(end)[0]
        put(SimpleNamespace(ranks=[program]), self.before)  # type: ignore[arg-type]
        want = _whole_steps(end, self.steps)
        for k, outputs in enumerate(want):
            for name, value in outputs.items():
                have = self._assembled(name, [one.outputs[k] for one in found])
                same(have, value, f"{sample.name}, step {k}: {name}", sample.tolerance, sample.tolerance)
        if sample.trains:
            whole = tensors(SimpleNamespace(ranks=[program]))  # type: ignore[arg-type]
            same_tensors(self.tensors(), whole, self.before, 1e-3)
        return found

    def _assembled(self, name: str, outputs: list[Mapping[str, Any]]) -> Any:
        port = next(port for port in self.programs[0][0].manifest.outputs if port.name == name)
        if port.boxes is None:
            return outputs[port.ranks[0]][name]
        raise NotImplementedError("samples deliver outputs whole")

    def tensors(self) -> dict[str, np.ndarray]:
        return tensors(SimpleNamespace(ranks=[row[0] for row in self.programs])) if self.sample.trains else {}  # type: ignore[arg-type]

    def _watch_schedules(self, rank: int, program: Program) -> None:
        made = program._schedules.of

        def schedule(bindings: dict[str, int]) -> StepPlan:
            known = [*program._schedules.values()]
            found = made(bindings)
            if found not in known:
                self._watch_actions(rank, program, found)
            return found

        program._schedules.of = schedule  # type: ignore[method-assign]

    def _watch_actions(self, rank: int, program: Program, schedule: StepPlan) -> None:
        def watched(place: int, index: int, action: Callable[[], object]) -> Callable[[], object]:
            computes = schedule.is_step(place) and isinstance(program._program.steps[index], Segment)

            def act() -> object:
                self.at[rank] = program, index
                if computes:
                    self.segments[rank].append(self.counts[rank] + 1)
                self.world.step(rank, lambda: program.describe(index))
                self.at[rank] = None
                return action()

            return act

        schedule.actions[:] = [(index, watched(k, index, act)) for k, (index, act) in enumerate(schedule.actions)]

    def _happen(self, rank: int, _: str) -> None:
        """Counts what a rank does, and lets the fault happen when its time has come."""
        self.counts[rank] += 1
        at, fault = self.at[rank], self.fault
        if fault.rank != rank or self.counts[rank] != fault.at or fault.kind not in (DIES, SLEEPS, RAISES, EXITS):
            return
        self.hit = True
        if fault.kind == DIES:
            self.world.die(rank)
        elif fault.kind == SLEEPS:
            self.world.sleep(rank, 2.5 * self.world.stall)
        elif fault.kind == EXITS:
            raise SystemExit(WORDS)
        elif at is None:
            raise OSError(WORDS)  # a call of the transport
        else:
            raise ValueError(WORDS)

    def _run(self, weather: Weather, choices: Choices, fault: Fault) -> list[Any]:
        self.fault, self.hit = fault, False
        self.counts, self.at = [0] * self.sample.ranks, [None] * self.sample.ranks
        self.segments: list[list[int]] = [[] for _ in range(self.sample.ranks)]
        self.run_count += 1
        self.kept = self.folder / f"kept {self.run_count}"
        self.world.forget(weather, choices)
        for row, arrays in zip(self.programs, self.start, strict=True):
            for array, start in arrays:
                array[...] = start
            for program in row:
                program.recover()
        for end in self.ends:
            if isinstance(end, Trainer):
                end.step = end.skipped = 0
                end._untold.clear()
        return self.world.run([self._job(rank) for rank in range(self.sample.ranks)])

    def _job(self, rank: int) -> Callable[[], Results]:
        def job() -> Results:
            results = Results([], [], {})
            try:
                self._take(rank, results)
            except (Killed, Endless):
                raise
            except BaseException as error:
                # What the end of the block of a program does.
                self.transports[rank].leave(leaving_message(rank, error))
                raise
            return results

        return job

    def _take(self, rank: int, results: Results) -> None:
        end, fault = self.ends[rank], self.fault
        every = [_given(end, step) for step in self.steps]
        for number, given in enumerate(every):
            if fault.kind == REFUSED and fault.at == number:
                self.hit = True
                self._refuse(end, spoiled(end, given, fault.way) if fault.rank == rank else given, results)
            if (fault.kind, fault.rank, fault.at) == (NONFINITE, rank, number):
                given = without_numbers(end, given)
            self.hit |= fault.kind == NONFINITE and fault.at == number
            try:
                results.outputs.append(_step(end, given, self._announced(rank, number, every)))
            except StepError as error:
                results.given_up[number] = str(error)
                results.outputs.append({})
            if self.sample.saves and isinstance(end, Trainer):
                self._save(rank, end, number)
        if isinstance(end, Trainer):
            if self.sample.saves:
                end.load(self.kept)
            batch = {port.name: piece(self.steps[0][port.name], port.box(rank)) for port in end.inputs}
            results.outputs.append(end.evaluate([(batch, 1), (batch, 1)]))

    def _announced(self, rank: int, number: int, every: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """What a rank knows of the following step, every other time; ranks differ in that."""
        last, fault = number + 1 == len(every), self.fault
        if last or (rank + number) % 2 or fault.kind == NONFINITE or (fault.kind, fault.at) == (REFUSED, number + 1):
            return None
        return every[number + 1]

    def _save(self, rank: int, end: Trainer, number: int) -> None:
        if (self.fault.kind, self.fault.rank, self.fault.at) != (DISK, rank, number):
            end.save(self.kept, keep=1)
            return
        self.hit = True
        program, state = end.program, end.program.state
        broken = [(record, array.reshape(-1)[:0]) for record, array in state.arrays()]
        program._program.state = SimpleNamespace(arrays=lambda: broken, records=state.records)  # type: ignore[assignment]
        try:
            end.save(self.kept, keep=1)
        finally:
            program._program.state = state

    def _refuse(self, end: Program | Trainer, given: Mapping[str, Any], results: Results) -> None:
        try:
            results.outputs.append(_step(end, given))
        except InputError as error:
            results.refused.append(str(error))


def piece(array: np.ndarray, box: Any) -> np.ndarray:
    """What a rank has of an input."""
    return array if box is None else array[slices(box, array.shape)]


def _programs(end: Program | Trainer) -> list[Program]:
    if isinstance(end, Program):
        return [end]
    return [end.program, *(end._evaluation.programs if end._evaluation is not None else [])]


def _given(end: Program | Trainer, step: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(end, Trainer):
        return {port.name: piece(step[port.name], port.box(end.rank)) for port in end.inputs}
    return {port.name: step[port.name] if port.boxes is None else Whole(step[port.name]) for port in end.inputs}


def _step(
    end: Program | Trainer, given: Mapping[str, Any], following: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    if isinstance(end, Trainer):
        return end.train(given, following)
    if following is not None:
        end.announce(following)
    return end(given)


def _whole_steps(end: Program | Trainer, steps: Any) -> list[Mapping[str, Any]]:
    """The steps on one rank, and an evaluation."""
    found = [_step(end, _given(end, step)) for step in steps]
    if isinstance(end, Trainer):
        batch = _given(end, steps[0])
        found.append(end.evaluate([(batch, 1), (batch, 1)]))
    return found
