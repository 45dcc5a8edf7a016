"""The plan's `train:`: the trained parameters, the loss, the optimizer, and the settings of the loop around the steps.

    train:
      loss: {type: softmax_cross_entropy, logits: logits, labels: label}
      optimizer: {type: momentum, lr: 0.01, momentum: 0.9}
      parameters: {"**.bias": {weight_decay: 0}, "embedding": {frozen: true}}
      data: {x: train-images.gz, label: train-labels.gz}
      batch: 32
      epochs: 10

The compiler works with the model that reads the YAML; the artifact has the keys of the loop unchanged.

A plan may set initial values of parameters: a distribution and a seed, from which each rank draws its own shard.

    parameters: {"table.weight": {initial: {normal: 0.01, seed: 7}}}

They are those that `nn.init` gives a parameter of this name under this seed; what the model has as the parameter's numbers is not read.
"""

from __future__ import annotations

import math
from typing import Annotated, Self, TypeAlias

from partc.compiler.plan.document import PlacedOptions
from partc.compiler.plan.pattern import checked_pattern
from partc.compiler.plan.pipeline import MOST_MICROBATCHES
from partc.compiler.plan.training.losses import LossForm
from partc.compiler.plan.training.metrics import MetricsForm
from partc.compiler.plan.training.optimizer import Optimizer, OptimizerForm, OwnOptimizer
from partc.runtime.artifact.format import Law
from partc.runtime.artifact.training.lr_schedule import above_base
from partc.runtime.artifact.training.train_settings import LoopSettings, MetricChoice
from partc.runtime.options import Options, Refused, Remedy, or_empty, shown
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

_DRAWS = ("normal", "truncated_normal", "uniform", "constant")
_HELP = "write {normal: 0.01, seed: 7}"


def _bounds(value: object) -> tuple[float, float] | None:
    """Returns the least and the largest value of a uniform distribution."""
    law = "a uniform distribution is within a number of zero, or from a number to another"
    help = "write {uniform: 0.1}, or {uniform: [-0.1, 0.1]}"
    if value is None:
        return None
    if isinstance(value, list) and len(value) != 2:
        raise Refused(f"a list of {len(value)}", law, help)
    low, high = (_finite(one, law, help) for one in (value if isinstance(value, list) else (value, value)))
    if not isinstance(value, list):
        if low < 0:
            raise Refused(f"{value} is below zero", law, help)
        low = -low
    if low > high:
        raise Refused(f"{low:g} is above {high:g}", law, help)
    return low, high


def _finite(value: object, law: str, help: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refused(f"expected a finite number, but got {shown(value)}", law, help)
    return float(value)


_BoundsForm: TypeAlias = Annotated[
    tuple[float, float] | None,
    PlainValidator(
        _bounds, json_schema_input_type=float | Annotated[list[float], Field(min_length=2, max_length=2)] | None
    ),
]


class InitialRules(Options):
    """First values, drawn from a seed and the parameter's name: one distribution, and what belongs to it."""

    normal: float | None = Field(None, ge=0, description="Normal distribution of this standard deviation.")
    truncated_normal: float | None = Field(
        None, ge=0, description="As normal, cut off at two standard deviations from the mean."
    )
    uniform: _BoundsForm = Field(
        None, description="Evenly within this bound of zero, or from the first to the second number."
    )
    constant: float | None = Field(None, description="This number everywhere.")
    mean: float = Field(0.0, description="Mean of a normal distribution.")
    seed: int = Field(0, ge=0, description="Seed; parameters of other names have other numbers.")

    @model_validator(mode="after")
    def _one_distribution(self) -> InitialRules:
        given = [name for name in _DRAWS if getattr(self, name) is not None]
        if len(given) != 1:
            fact = f"'{given[0]}' and '{given[1]}' are two distributions" if given else "it names no distribution"
            raise Refused(fact, f"first values have one of {', '.join(_DRAWS)}", _HELP)
        if self.mean and given[0] not in ("normal", "truncated_normal"):
            raise Refused(f"'mean' belongs to a normal distribution, and this is '{given[0]}'", help=_HELP, key="mean")
        return self

    def law(self, name: str) -> Law:
        """Returns the law of the initial values of the parameter with this name."""
        stream = f"{self.seed}/{name}"
        if self.constant is not None:
            return Law(draw="constant", offset=self.constant)
        if self.uniform is not None:
            low, high = self.uniform
            return Law(draw="uniform", stream=stream, offset=low, factor=high - low)
        if self.normal is not None:
            return Law(draw="normal", stream=stream, offset=self.mean, factor=self.normal)
        assert self.truncated_normal is not None
        return Law(draw="truncated_normal", stream=stream, offset=self.mean, factor=self.truncated_normal)


class ClipRules(Options):
    """Gradients are scaled down to a global norm, or each number is kept within a bound."""

    norm: float | None = Field(None, gt=0, description="Maximum of the global norm of all gradients, over all ranks.")
    value: float | None = Field(None, gt=0, description="Maximum absolute value of a gradient's elements.")


class ParameterRule(Options):
    """How the parameters that a pattern matches are trained."""

    frozen: bool | None = Field(
        None, description="Not trained; false, under a tensor's full name, trains a tensor that would not be."
    )
    weight_decay: float | None = Field(
        None, ge=0, description="Weight decay of these parameters, in place of the optimizer's."
    )
    lr: float | None = Field(None, ge=0, description="Factor of the learning rate.")
    shared: bool | None = Field(
        None, description="For a weight that several modules read: one parameter, or with false one per module."
    )
    optimizer: Annotated[OwnOptimizer | None, Remedy("write optimizer: {type: adam, betas: [0.9, 0.95]}")] = Field(
        None,
        description="The optimizer of these parameters: a type, or a mapping with its options; `lr` is that of train.optimizer by default.",
    )
    initial: Annotated[InitialRules | None, Remedy("write initial: {normal: 0.01, seed: 7}")] = Field(
        None,
        description="First values in place of the model's: {normal: 0.01, seed: 7}. Each rank draws its own shard.",
    )
    staleness: int | None = Field(
        None,
        ge=0,
        le=64,
        description="By how many steps updates are late: a step reads those of this many steps before.",
    )

    @model_validator(mode="after")
    def _trained(self) -> Self:
        for key in ("weight_decay", "lr", "optimizer", "staleness"):
            if self.frozen and getattr(self, key) is not None:
                raise Refused(f"frozen, and '{key}'", "a frozen parameter has no update", "leave out one of them", key)
        return self


def _clip(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return f"write clip: {{norm: {value}}}, the largest global norm, or {{value: {value}}}, the largest element"
    return "write clip: {norm: 1.0}, the largest global norm, or {value: 0.5}"


class TrainRules(LoopSettings, PlacedOptions):
    """What is trained and how; and the loop around the steps."""

    KEY = "train"

    loss: LossForm = Field(
        description="The type of the loss with its options, or the name of a scalar output of the model."
    )
    optimizer: OptimizerForm = Field(
        description="The type of the optimizer with its options; `lr` is the learning rate."
    )
    parameters: Annotated[
        dict[Annotated[str, AfterValidator(checked_pattern)], ParameterRule],
        BeforeValidator(or_empty, json_schema_input_type=dict[str, ParameterRule] | None),
        Remedy('write parameters: {"**.bias": {weight_decay: 0}}'),
    ] = Field(
        {},
        description="By pattern of parameter names: frozen, weight_decay, lr (a factor), optimizer. The last match wins.",
    )
    metrics: MetricsForm = Field({}, description="Metrics besides the loss: [accuracy], or names with options.")
    clip: Annotated[ClipRules | None, Remedy(_clip)] = Field(None, description="Gradient clipping.")
    accumulate: int = Field(
        1,
        ge=1,
        le=MOST_MICROBATCHES,
        description="Number of microbatches of a batch, whose gradients are added: a pipeline of that many, in the least memory.",
    )
    bucket_mb: float = Field(10.0, gt=0, description="Size of the gradient buckets in MB.")

    @model_validator(mode="after")
    def _one_rate(self) -> Self:
        """An optimizer with one rate for all steps has no schedule; an optimizer of some parameters has the common rate by default."""
        kind, schedule = self.optimizer.type, self.schedule
        if (
            not self.optimizer.is_scheduled
            and schedule is not None
            and (schedule.type != "constant" or schedule.warmup)
        ):
            raise Refused(
                f"the rate of {kind} is the same in all steps",
                "what it keeps of a parameter is in proportion to 1/lr",
                f"leave 'schedule' out, or give {kind} to some parameters only, under 'parameters'",
                "schedule",
            )
        if schedule is not None and (wrong := above_base(schedule, self.optimizer.lr)):
            raise Refused(wrong.fact, wrong.law, wrong.help, "schedule")
        rules = {pattern: _at(rule, self.optimizer.lr) for pattern, rule in self.parameters.items()}
        return self if rules == self.parameters else self.model_copy(update={"parameters": rules})

    @model_validator(mode="after")
    def _judged_by_a_metric(self) -> Self:
        """What `early_stop` and `keep: {best: ...}` judge is the loss or a metric, with the mode that this is for."""
        more: dict[str, object] = {}
        if self.early_stop is not None:
            more["early_stop"] = self._with_mode("early_stop", self.early_stop)
        if self.checkpoint is not None and self.checkpoint.keep.best is not None:
            best = self._with_mode("checkpoint", self.checkpoint.keep.best)
            keep = self.checkpoint.keep.model_copy(update={"best": best})
            more["checkpoint"] = self.checkpoint.model_copy(update={"keep": keep})
        return self.model_copy(update=more) if more else self

    def _with_mode(self, key: str, chosen: MetricChoice) -> MetricChoice:
        if chosen.metric != "loss" and chosen.metric not in self.metrics:
            raise Refused(
                f"'{chosen.metric}' is not a metric of this training",
                f"it has {', '.join(['loss', *self.metrics])}",
                "name one of them, or add it to metrics",
                key,
            )
        mode = chosen.mode or ("min" if chosen.metric == "loss" else self.metrics[chosen.metric].mode)
        if mode is None:
            law = "whether less or more of an output of the model is better cannot be known"
            raise Refused(f"'{chosen.metric}' has no mode", law, "write mode: min, or mode: max", key)
        return chosen.model_copy(update={"mode": mode})

    def settings(self) -> LoopSettings:
        """The keys that the runtime reads."""
        return LoopSettings.model_construct(
            self.model_fields_set & LoopSettings.model_fields.keys(),
            **{name: getattr(self, name) for name in LoopSettings.model_fields},
        )

    @property
    def bucket_bytes(self) -> int:
        """The size of the gradient buckets."""
        return round(self.bucket_mb * (1 << 20))

    @property
    def clipping(self) -> ClipRules:
        """The bounds of gradients."""
        return self.clip or ClipRules()

    @property
    def guarded(self) -> bool:
        """Whether a step whose gradients are not finite changes nothing, on any rank."""
        return self.on_nonfinite == "skip"


def _at(rule: ParameterRule, rate: float) -> ParameterRule:
    """Returns the rule; if its optimizer has no rate, with this rate."""
    own: Optimizer | None = rule.optimizer
    if own is None or "lr" in own.model_fields_set:
        return rule
    return rule.model_copy(update={"optimizer": own.model_copy(update={"lr": rate})})
