"""The facts that training adds to a program: the loss, the trained weights and their optimizers, and the other numbers that change from
step to step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

import onnx_ir as ir
from partc.compiler.ir.graph import ADAPTER, Operands, name_of
from partc.runtime.artifact.format import LabelRecord, TrainingRecord
from partc.runtime.artifact.training.scalars import OptimizerRecord, scalar_name

if TYPE_CHECKING:
    from partc.compiler.dims.facts import Facts
    from partc.compiler.plan.precision import LossScale, PrecisionRules
    from partc.compiler.plan.training.optimizer import Optimizer
    from partc.compiler.plan.training.rules import TrainRules


_LOSS = "loss"


class ProgramKind(Enum):
    """The kind of a program of a plan; its name in the artifact."""

    STEP = ""
    """A whole step, with the update of a training; of a plan that generates, one token of each slot."""
    EVALUATION = "evaluate"
    """The loss and the metrics alone, of a batch of any size."""
    STREAMED_EVALUATION = "evaluate_streamed"
    """The same of a batch in the microbatches of the step, which stages run at the same time."""
    TOTALS = "totals"
    """The inputs that microbatches get from the global batch; it becomes part of the step."""
    PREFILL = "prefill"
    """A chunk of a prompt of one slot, over the caches of a step of one token."""
    DECODE_ROWS = "decode"
    """One token of some of the slots, over the same caches."""
    ENCODE = "encode"
    """The encoder on the input of one slot, which writes what the decoder's steps read of it."""

    @property
    def backward(self) -> bool:
        """Whether gradients are computed."""
        return self is ProgramKind.STEP

    @property
    def evaluates(self) -> bool:
        """Whether nodes have the forms of an evaluation."""
        return self in (ProgramKind.EVALUATION, ProgramKind.STREAMED_EVALUATION)

    @property
    def divides(self) -> bool:
        """Whether the microbatches of a plan divide its batch."""
        return self in (ProgramKind.STEP, ProgramKind.STREAMED_EVALUATION)


@dataclass(frozen=True)
class ParameterOptions:
    """The training of one parameter; frozen parameters are kept as they are."""

    frozen: bool = False
    weight_decay: float | None = None
    lr: float = 1.0
    """The factor of the learning rate."""
    optimizer: Optimizer | None = None
    """The optimizer that updates it; None for the optimizer of the training."""
    staleness: int = 0
    """The number of steps by which its updates are late."""
    where: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Maps each key to the line of the plan that has it."""


@dataclass(frozen=True)
class BatchRecords:
    """The layouts of a batch's records in the inputs and the outputs of a training."""

    fixed: tuple[str, ...] = ()
    """Inputs that hold one value for all records."""
    labels: Mapping[str, LabelRecord] = field(default_factory=dict)
    """Maps each input of labels to its valid labels."""
    summed: frozenset[str] = frozenset()
    """The values of a batch that are the sums of those of its microbatches; other outputs are their means."""
    totals: tuple[str, ...] = ()
    """The values that microbatches get from the global batch, which another program makes of the inputs alone."""
    shards: int = 1
    """Into how many shards a batch is dealt out that have means of their own."""


@dataclass(frozen=True)
class TrainingNotes:
    """Lines for the user."""

    shared: tuple[str, ...] = ()
    """About weights that several modules read."""
    tables: tuple[str, ...] = ()
    """About parameters that are looked up: which form their gradient has, and why."""
    not_streamed: str = ""
    """Why evaluations of a pipeline run each batch whole, one group of ranks after the other; empty where they do not."""


@dataclass(frozen=True)
class ModelOutputs:
    """Dims and types of a model's outputs by name, None where they are not known, as they follow from what is promised of dims."""

    promised: Mapping[str, Facts]
    types: Mapping[str, tuple[tuple[int | ir.SymbolicDim, ...] | None, ir.DataType | None]]

    def settled(self, promised: Mapping[str, Facts]) -> bool:
        """Whether all is known, and by the same promises."""
        shapes = [shape for shape, _ in self.types.values()]
        if promised != self.promised or None in shapes:
            return False
        return all(isinstance(dim, int) or dim.value is not None for shape in shapes for dim in shape or ())


@dataclass(frozen=True)
class Untrained:
    """The model before its loss and metrics were added, of which a plan speaks."""

    operands: Mapping[str, Operands] = field(default_factory=dict)
    """Keys are paths of nodes."""
    outputs: ModelOutputs | None = None
    """The outputs that the loss and the metrics replace."""


@dataclass(frozen=True)
class Training:
    """The training half of a program: what the plan says of it, `rules` and `precision`, and what passes found out."""

    rules: TrainRules
    loss: ir.Value
    parameters: Mapping[ir.Value, ParameterOptions]
    """The trainable weights, frozen ones too."""
    statistics: Mapping[ir.Value, ir.Value | None] = field(default_factory=dict)
    """The running statistics, with the value by which a node replaces each; None where none does."""
    metrics: tuple[str, ...] = ()
    denominators: Mapping[str, str] = field(default_factory=dict)
    """Maps the loss, or a metric, that is a mean over unevenly many entries of records to the output that has its divisor."""
    scalars: tuple[str, ...] = ()
    """Numbers that a step is given besides those of optimizers."""
    precision: PrecisionRules | None = None
    records: BatchRecords = BatchRecords()
    untrained: Untrained = Untrained()
    notes: TrainingNotes = TrainingNotes()
    folder: str = ""
    """The plan's folder, as it is seen from the artifact: the files that the plan names are there."""

    @property
    def scale(self) -> LossScale | None:
        """The factor of the loss, by which gradients are divided; None for no factor."""
        return self.precision.scale if self.precision is not None else None

    @property
    def low_messages(self) -> bool:
        """Whether gradients are reduced over ranks in bfloat16."""
        return self.precision is not None and self.precision.messages is not None

    def adds(self, path: str) -> bool:
        """Whether a node of this path is of the loss or of a metric that the plan adds."""
        return path.partition(".")[0] in (_LOSS, *self.metrics)

    def optimizer_of(self, parameter: ir.Value) -> Optimizer:
        """The optimizer that updates a parameter."""
        learned = self.parameters.get(parameter)
        return (learned and learned.optimizer) or self.rules.optimizer

    def lr_multiplier(self, parameter: ir.Value) -> float:
        """The factor of a step's rate, that of the training's optimizer, for a parameter.

        If the optimizer's rate is constant, the factor applied to that constant.
        """
        optimizer, rate = self.optimizer_of(parameter), self.rules.optimizer.lr
        proportion = 1.0 if optimizer.lr == rate or not optimizer.is_scheduled else optimizer.lr / rate
        return self.parameters[parameter].lr * proportion

    @cached_property
    def others(self) -> Mapping[str, Optimizer]:
        """The optimizers other than that of the training, by name: their type, with a number where several are of one type.

        Two that differ in rate or decay alone are one: these are numbers of each parameter.
        """
        found: dict[str, Optimizer] = {}
        for one in self.parameters.values():
            optimizer = one.optimizer
            if (
                optimizer is None
                or one.frozen
                or any(known.is_like(optimizer) for known in (self.rules.optimizer, *found.values()))
            ):
                continue
            alike = sum(known.type == optimizer.type for known in (self.rules.optimizer, *found.values()))
            found[f"{optimizer.type}_{alike + 1}" if alike else optimizer.type] = optimizer
        return found

    def scalars_of(self, optimizer: Optimizer) -> dict[str, str]:
        """Maps the names in a function of the optimizer to the names of the numbers that a step is given: all share the rate."""
        name = next((name for name, other in self.others.items() if other.is_like(optimizer)), "")
        return {one: scalar_name(name, one) for one in optimizer.scalars}

    @property
    def fed(self) -> tuple[str, ...]:
        """All numbers that a step is given."""
        of_optimizers = [
            name for one in (self.rules.optimizer, *self.others.values()) for name in self.scalars_of(one).values()
        ]
        return tuple(dict.fromkeys((*of_optimizers, *self.scalars)))

    def record(self) -> TrainingRecord:
        """Its record in the manifest."""
        optimizer, rules = self.rules.optimizer, self.rules
        return TrainingRecord(
            loss=name_of(self.loss),
            metrics=list(self.metrics),
            formulas={name: metric.formula for name, metric in rules.metrics.items() if metric.formula},
            denominators=dict(self.denominators),
            sums=[name_of(self.loss)] if rules.loss.reduction == "sum" else [],
            sum_over_ranks=rules.loss.per_rank_mean,
            scalars=list(self.fed),
            optimizer=OptimizerRecord(
                type=optimizer.type,
                lr=optimizer.lr,
                hyper=dict(optimizer.hyper),
                others={
                    name: OptimizerRecord(type=one.type, lr=one.lr, hyper=dict(one.hyper))
                    for name, one in self.others.items()
                },
            ),
            settings=rules.settings(),
            folder=self.folder,
            fixed=list(self.records.fixed),
            not_streamed=self.notes.not_streamed,
            adapter={
                name_of(value).removesuffix(".lora_A.weight"): value.meta[ADAPTER]
                for value in self.parameters
                if ADAPTER in value.meta
            },
        )
