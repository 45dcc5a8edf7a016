"""What training adds to a program: the loss, which weights are trained and how, and what else changes from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import onnx_ir as ir
from partc.compiler.ir.graph import Operands
from partc.runtime.artifact.format import LabelRecord, TrainingRecord
from partc.runtime.artifact.lr_schedule import OTHERS, scalar_name
from pydantic import JsonValue

if TYPE_CHECKING:
    from partc.compiler.plan.precision import LossScale
    from partc.compiler.plan.training.optimizer import Optimizer


_LOSS = "loss"


class ProgramKind(Enum):
    """What a program does of a training; its name in the artifact."""

    STEP = ""
    """A whole step, with the update."""
    EVALUATION = "evaluate"
    """The loss and the metrics alone."""
    TOTALS = "totals"
    """What microbatches are given of the whole batch; it becomes part of the step."""

    @property
    def backward(self) -> bool:
        """Whether gradients are computed."""
        return self is ProgramKind.STEP


@dataclass(frozen=True)
class ParameterOptions:
    """How one parameter is trained; frozen ones are kept as they are."""

    frozen: bool = False
    weight_decay: float | None = None
    lr: float = 1.0
    """What the learning rate is multiplied with."""
    optimizer: Optimizer | None = None
    """By which it is updated; None: by that of the training."""
    staleness: int = 0
    """By how many steps its updates are late."""
    where: Mapping[str, str] = field(default_factory=dict, compare=False)
    """By key the place of the plan's line that says it."""


@dataclass(frozen=True)
class Training:
    """The training half of a program.

    `parameters` are the trainable weights, frozen ones too; `statistics` those that a node replaces itself, with what it makes.
    `per_rank_mean`: the gradient is that of the sum over ranks of the mean of what each has, not of the mean over the whole batch.
    """

    loss: ir.Value
    optimizer: Optimizer
    parameters: Mapping[ir.Value, ParameterOptions]
    statistics: Mapping[ir.Value, ir.Value | None] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    formulas: Mapping[str, str] = field(default_factory=dict)
    """By metric that is made of the sums which the output are what makes it."""
    denominators: Mapping[str, str] = field(default_factory=dict)
    """By the loss or metric that is a mean of what records have unevenly the output that says what it is divided by."""
    sums: tuple[str, ...] = ()
    """The numbers of a batch that are sums over its records."""
    bucket_bytes: int = 10 << 20
    clip_norm: float | None = None
    clip_value: float | None = None
    per_rank_mean: bool = False
    summed: frozenset[str] = frozenset()
    """The outputs of a batch that are the sums of those of its parts; the others are their means."""
    totals: tuple[str, ...] = ()
    """What the parts are given of the whole batch, which another program makes of the inputs alone."""
    fixed: tuple[str, ...] = ()
    """Inputs that hold one value for all records."""
    labels: Mapping[str, LabelRecord] = field(default_factory=dict)
    """By input the labels that there may be."""
    shard: str | Literal[True] | None = None
    """Along which mesh axis ranks share the optimizer's state and work."""
    scalars: tuple[str, ...] = ()
    schedule: Mapping[str, JsonValue] = field(default_factory=dict)
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    accumulate: int = 1
    """Into how many parts a batch is cut, whose gradients are added up."""
    guarded: bool = False
    """Whether a step whose gradients are not finite changes nothing, on any rank."""
    pieces: int = 1
    """Into how many pieces a batch is dealt out that have means of their own."""
    shared: tuple[str, ...] = ()
    """Lines for the user about weights that several modules read."""
    tables: tuple[str, ...] = ()
    """Lines for the user about parameters that are looked up: which form their gradient has, and why."""
    written: Mapping[str, Operands] = field(default_factory=dict)
    """By the path of a node its operands before it became what it is in training: a plan speaks of these."""
    part: ProgramKind = ProgramKind.STEP
    scale: LossScale | None = None
    """By what the loss is multiplied, and gradients are divided; None: by nothing."""
    messages: bool = False
    """Whether gradients are reduced over ranks in bfloat16."""

    def from_folder(self, folder: str) -> Training:
        """The same with the plan's folder, as it is seen from the artifact: the files that the plan names are there."""
        return replace(self, settings={**self.settings, "folder": folder})

    def adds(self, path: str) -> bool:
        """Whether a node of this path is of the loss or of a metric that the plan adds."""
        return path.partition(".")[0] in (_LOSS, *self.metrics)

    def optimizer_of(self, parameter: ir.Value) -> Optimizer:
        """The optimizer that updates a parameter."""
        learned = self.parameters.get(parameter)
        return (learned and learned.optimizer) or self.optimizer

    def lr_multiplier(self, parameter: ir.Value) -> float:
        """What the rate of a step, that of the training's optimizer, is multiplied with for a parameter.

        Of an optimizer whose rate is no step's: what its own is multiplied with.
        """
        optimizer, rate = self.optimizer_of(parameter), self.optimizer.lr
        proportion = 1.0 if optimizer.lr == rate or not optimizer.is_scheduled else optimizer.lr / rate
        return self.parameters[parameter].lr * proportion

    @cached_property
    def others(self) -> Mapping[str, Optimizer]:
        """The optimizers beside that of the training, by name: their type, with a number where several are of one type.

        Two that differ in rate or decay alone are one: these are numbers of each parameter.
        """
        found: dict[str, Optimizer] = {}
        for one in self.parameters.values():
            optimizer = one.optimizer
            if (
                optimizer is None
                or one.frozen
                or any(known.is_like(optimizer) for known in (self.optimizer, *found.values()))
            ):
                continue
            alike = sum(known.type == optimizer.type for known in (self.optimizer, *found.values()))
            found[f"{optimizer.type}_{alike + 1}" if alike else optimizer.type] = optimizer
        return found

    def scalars_of(self, optimizer: Optimizer) -> dict[str, str]:
        """By what a function of the optimizer calls them the names of the numbers that a step is given: all share the rate."""
        name = next((name for name, other in self.others.items() if other.is_like(optimizer)), "")
        return {one: scalar_name(name, one) for one in optimizer.scalars}

    @property
    def fed(self) -> tuple[str, ...]:
        """All numbers that a step is given."""
        of_optimizers = [
            name for one in (self.optimizer, *self.others.values()) for name in self.scalars_of(one).values()
        ]
        return tuple(dict.fromkeys((*of_optimizers, *self.scalars)))

    def record(self) -> TrainingRecord:
        """What the manifest says of it."""
        others: dict[str, JsonValue] = {name: {"type": one.type, **one.hyper} for name, one in self.others.items()}
        return TrainingRecord(
            loss=self.loss.name or "",
            metrics=list(self.metrics),
            formulas=dict(self.formulas),
            denominators=dict(self.denominators),
            sums=list(self.sums),
            sum_over_ranks=self.per_rank_mean,
            scalars=list(self.fed),
            optimizer={
                "type": self.optimizer.type,
                "lr": self.optimizer.lr,
                **self.optimizer.hyper,
                **({OTHERS: others} if others else {}),
            },
            schedule=dict(self.schedule),
            settings=dict(self.settings),
            fixed=list(self.fixed),
        )
