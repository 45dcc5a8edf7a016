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
    """A whole step, with the update if the plan trains; for a plan that generates, one token of each slot."""
    EVALUATION = "evaluate"
    """Only the loss and the metrics, of a batch of any size."""
    STREAMED_EVALUATION = "evaluate_streamed"
    """The loss and the metrics of a batch in the microbatches of the step, which the stages run at the same time."""
    TOTALS = "totals"
    """The inputs that microbatches get from the global batch; this program becomes part of the step."""
    PREFILL = "prefill"
    """A chunk of one slot's prompt, over the caches of the one-token step."""
    DECODE_ROWS = "decode"
    """One token of some of the slots, over the caches of the one-token step."""
    DRAFT = "draft"
    """A token of one slot and those drafted after it, all scored, over the caches of the one-token step."""
    ENCODE = "encode"
    """The encoder on the input of one slot; it writes the values that the decoder's steps read."""

    @property
    def backward(self) -> bool:
        """Whether gradients are computed."""
        return self is ProgramKind.STEP

    @property
    def evaluates(self) -> bool:
        """Whether nodes have their evaluation forms."""
        return self in (ProgramKind.EVALUATION, ProgramKind.STREAMED_EVALUATION)

    @property
    def divides(self) -> bool:
        """Whether the batch is divided into the microbatches of the plan."""
        return self in (ProgramKind.STEP, ProgramKind.STREAMED_EVALUATION)


@dataclass(frozen=True)
class ParameterOptions:
    """The training options of one parameter; a frozen parameter is not updated."""

    frozen: bool = False
    weight_decay: float | None = None
    lr: float = 1.0
    """The factor of the learning rate."""
    optimizer: Optimizer | None = None
    """The optimizer that updates the parameter; None for the optimizer of the training."""
    staleness: int = 0
    """The number of steps by which its updates are delayed."""
    where: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Maps each key to the line of the plan that sets it."""


@dataclass(frozen=True)
class BatchRecords:
    """The way in which a training's inputs and outputs hold the records of a batch."""

    fixed: tuple[str, ...] = ()
    """Inputs whose value is the same for all records."""
    labels: Mapping[str, LabelRecord] = field(default_factory=dict)
    """Maps each input of labels to its valid labels."""
    summed: frozenset[str] = frozenset()
    """Outputs whose value for a batch is the sum over its microbatches; other outputs are means over them."""
    totals: tuple[str, ...] = ()
    """The values that microbatches get from the global batch; another program computes them from the inputs alone."""
    shards: int = 1
    """The number of shards into which a batch is split that have means of their own."""


@dataclass(frozen=True)
class TrainingNotes:
    """Lines about the training for the user."""

    shared: tuple[str, ...] = ()
    """Lines about weights that several modules read."""
    tables: tuple[str, ...] = ()
    """Lines about parameters that are looked up: the form of their gradient, and why."""
    not_streamed: str = ""
    """Why evaluations of a pipeline run each batch whole, one group of ranks after another; empty where stages run at the same time."""


@dataclass(frozen=True)
class ModelOutputs:
    """Maps each output of the model to its dims and type, None where unknown, as inferred from the promises about dims."""

    promised: Mapping[str, Facts]
    types: Mapping[str, tuple[tuple[int | ir.SymbolicDim, ...] | None, ir.DataType | None]]

    def settled(self, promised: Mapping[str, Facts]) -> bool:
        """Whether all shapes are known and were inferred from the same promises."""
        shapes = [shape for shape, _ in self.types.values()]
        if promised != self.promised or None in shapes:
            return False
        return all(isinstance(dim, int) or dim.value is not None for shape in shapes for dim in shape or ())


@dataclass(frozen=True)
class Untrained:
    """The model before its loss and metrics were added: the names in a plan refer to it."""

    operands: Mapping[str, Operands] = field(default_factory=dict)
    """Maps the path of each node to its operands."""
    outputs: ModelOutputs | None = None
    """The outputs that the loss and the metrics replace."""


@dataclass(frozen=True)
class Training:
    """The training part of a program: the plan's `rules` and `precision`, and the facts that passes add."""

    rules: TrainRules
    loss: ir.Value
    parameters: Mapping[ir.Value, ParameterOptions]
    """The trainable weights, including frozen ones."""
    statistics: Mapping[ir.Value, ir.Value | None] = field(default_factory=dict)
    """Maps each running statistic to the value by which a node replaces it; None where no node does."""
    metrics: tuple[str, ...] = ()
    denominators: Mapping[str, str] = field(default_factory=dict)
    """Maps the loss, or a metric, that is a mean over a varying number of entries per record to the output that has its divisor."""
    scalars: tuple[str, ...] = ()
    """Numbers that are fed to a step, besides those of optimizers."""
    precision: PrecisionRules | None = None
    records: BatchRecords = BatchRecords()
    untrained: Untrained = Untrained()
    notes: TrainingNotes = TrainingNotes()
    folder: str = ""
    """The plan's folder relative to the artifact; the files that the plan names are there."""

    @property
    def scale(self) -> LossScale | None:
        """The loss scale, by which gradients are divided again; None where the loss is not scaled."""
        return self.precision.scale if self.precision is not None else None

    @property
    def low_messages(self) -> bool:
        """Whether gradients are reduced over ranks in bfloat16."""
        return self.precision is not None and self.precision.messages is not None

    def adds(self, path: str) -> bool:
        """Whether the node of this path belongs to the loss or to a metric that the plan adds."""
        return path.partition(".")[0] in (_LOSS, *self.metrics)

    def optimizer_of(self, parameter: ir.Value) -> Optimizer:
        """The optimizer that updates a parameter."""
        learned = self.parameters.get(parameter)
        return (learned and learned.optimizer) or self.rules.optimizer

    def lr_multiplier(self, parameter: ir.Value) -> float:
        """The factor of a parameter's learning rate, relative to the step's rate, which is that of the training's optimizer.

        If the optimizer's rate is constant, the factor applied to that constant.
        """
        optimizer, rate = self.optimizer_of(parameter), self.rules.optimizer.lr
        proportion = 1.0 if optimizer.lr == rate or not optimizer.is_scheduled else optimizer.lr / rate
        return self.parameters[parameter].lr * proportion

    @cached_property
    def others(self) -> Mapping[str, Optimizer]:
        """Maps a name to each optimizer other than the training's: its type, with a number where several have the same type.

        Optimizers that differ only in rate or decay count as one: rate and decay are numbers of each parameter.
        """
        optimizers: dict[str, Optimizer] = {}
        for one in self.parameters.values():
            optimizer = one.optimizer
            if (
                optimizer is None
                or one.frozen
                or any(known.is_like(optimizer) for known in (self.rules.optimizer, *optimizers.values()))
            ):
                continue
            alike = sum(known.type == optimizer.type for known in (self.rules.optimizer, *optimizers.values()))
            optimizers[f"{optimizer.type}_{alike + 1}" if alike else optimizer.type] = optimizer
        return optimizers

    def scalars_of(self, optimizer: Optimizer) -> dict[str, str]:
        """Maps the scalars of the optimizer's function to the names of the numbers that are fed to a step: all share the rate."""
        name = next((name for name, other in self.others.items() if other.is_like(optimizer)), "")
        return {one: scalar_name(name, one) for one in optimizer.scalars}

    @property
    def fed(self) -> tuple[str, ...]:
        """The names of all numbers that are fed to a step."""
        of_optimizers = [
            name for one in (self.rules.optimizer, *self.others.values()) for name in self.scalars_of(one).values()
        ]
        return tuple(dict.fromkeys((*of_optimizers, *self.scalars)))

    def record(self) -> TrainingRecord:
        """The training's record in the manifest."""
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
