"""The costs of tasks: times per stage and kind, messages per edge, and the bytes that one microbatch saves from F for its backward pass.

Units are the caller's: seconds or any other for times, bytes or microbatches for what is saved. Times that were measured of single tasks
stand in `measured` and win. Where forward nodes are computed again, B takes their time too, and less is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task, parse

if TYPE_CHECKING:
    import sympy

MICROBATCHES, BYTES = "microbatches", "bytes"


@dataclass(frozen=True)
class StageCost:
    """`backward`: B where W is apart; `undivided`: B where it is not, by default both together.

    `saved`: what a microbatch keeps from the begin of F to the end of B. `deferred`: what is kept from the end of B to the end of W where
    these are apart; by default as much as `saved` (a linear layer keeps its input and the cotangent of its output).
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    undivided: float | None = None
    saved: float = 1.0
    deferred: float | None = None

    @property
    def full_backward(self) -> float:
        """The time of a backward pass that is one task."""
        return self.backward + self.weight if self.undivided is None else self.undivided

    @property
    def saved_for_weight(self) -> float:
        """The memory of the data saved from B to W."""
        return self.saved if self.deferred is None else self.deferred


@dataclass(frozen=True)
class Costs:
    """The costs of all stages; `message` is the time of a message, unless `messages` has one for its edge (source, target).

    `unit` is that of what is saved, `clock` that of times; `sizes` are those of the symbols that times are for. `fixed`: what each home
    keeps besides, over the whole step. `expressions`: per stage what is saved and deferred, in the symbols. `unbounded`: a dim that has no
    largest size, so that amounts in bytes are not a bound.
    """

    stages: tuple[StageCost, ...]
    message: float = 0.0
    messages: Mapping[tuple[int, int], float] = field(default_factory=dict)
    measured: Mapping[Task, float] = field(default_factory=dict)
    unit: str = MICROBATCHES
    clock: str = "units"
    sizes: str = ""
    fixed: tuple[float, ...] = ()
    expressions: tuple[tuple[sympy.Expr, sympy.Expr], ...] = ()
    unbounded: str = ""
    precision: float = 1e-3
    """The part of a time that is not worth a search: more where times are estimates."""

    def constant_memory(self, home: int) -> float:
        """The memory that a home keeps over the whole step."""
        return self.fixed[home] if self.fixed else 0.0

    def time(self, task: Task, split: bool) -> float:
        """The duration of a task; `split`: whether its stage and microbatch have a W."""
        if task in self.measured:
            return self.measured[task]
        cost = self.stages[task.stage]
        if task.kind is Kind.FORWARD:
            return cost.forward
        if task.kind is Kind.WEIGHT:
            return cost.weight
        return cost.backward if split else cost.full_backward

    def travel(self, stages: Stages, reader: int, maker: int) -> float:
        """The duration of a value's or cotangent's transfer from one stage to another: zero where both are on the same homes."""
        if stages.stage_ranks[reader] == stages.stage_ranks[maker]:
            return 0.0
        if not self.messages:
            return self.message
        return self.messages.get((min(reader, maker), max(reader, maker)), self.message)

    def in_microbatches(self, stages: Stages) -> Costs:
        """The same times; what is saved is counted in microbatches of a home."""
        shares = _shares(stages)
        some = [replace(c, saved=share, deferred=share) for c, share in zip(self.stages, shares, strict=True)]
        return replace(self, stages=tuple(some), unit=MICROBATCHES, fixed=(), expressions=())


def with_times(costs: Costs, times: Mapping[str, float], clock: str = "s") -> Costs:
    """Costs with times that were measured or are given, of a stage's tasks of a kind (`2F`) or of single tasks (`2F0`), which win.

    Where there is no `2W`, `2B` is the time of the whole backward pass, of which B and W have the parts that they had. ValueError
    for a key that names no task of these stages, and for a time below 0.
    """
    stage_costs, single = list(costs.stages), dict(costs.measured)
    for key, time in times.items():
        task = parse(f"{key}0" if key[-1:].isalpha() else key)
        if task.stage >= len(stage_costs):
            raise ValueError(f"{key}: the stages are 0 to {len(stage_costs) - 1}")
        if not 0 <= time < float("inf"):
            raise ValueError(f"{key}: {time} is not a time")
        if key[-1:].isalpha():
            stage_costs[task.stage] = _with_time(stage_costs[task.stage], task.kind, time, f"{task.stage}W" in times)
        else:
            single[task] = time
    return replace(costs, stages=tuple(stage_costs), measured=single, clock=clock)


def _with_time(cost: StageCost, kind: Kind, time: float, apart: bool) -> StageCost:
    match kind:
        case Kind.FORWARD:
            return replace(cost, forward=time)
        case Kind.WEIGHT:
            return replace(cost, weight=time, undivided=None)
        case Kind.BACKWARD:
            if apart:
                return replace(cost, backward=time, undivided=None)
            both = cost.backward + cost.weight
            part = cost.backward / both if both else 1.0
            return replace(cost, backward=time * part, weight=time * (1 - part), undivided=time)


def unit_costs(stages: Stages, message: float = 0.0) -> Costs:
    """F = B = W = 1 for every home and microbatch, in equal parts for its stages; so is what a microbatch saves."""
    return Costs(tuple(StageCost(share, share, share, saved=share) for share in _shares(stages)), message)


def _shares(stages: Stages) -> list[float]:
    """Maps each stage to its share of its home's work: 1 over the number of stages there."""
    return [1.0 / max(len(stages.on[home]) for home in homes) for homes in stages.stage_ranks]
