"""The plan's `train:`: what is trained, from which loss, by which optimizer, and the settings of the loop around the steps.

    train:
      loss: {type: softmax_cross_entropy, logits: logits, labels: label}
      optimizer: {type: momentum, lr: 0.01, momentum: 0.9}
      parameters: {"**.bias": {weight_decay: 0}, "embedding": {frozen: true}}
      data: {x: train-images.gz, label: train-labels.gz}
      batch: 32
      epochs: 10

Losses, optimizers and schedules check their own options; what they refuse is said at the line of their key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from partc.compiler.errors import CompileError
from partc.compiler.plan.groups import Frame
from partc.compiler.plan.pattern import checked_pattern
from partc.compiler.plan.pipeline import MOST_MICROBATCHES
from partc.compiler.plan.target import checked_target
from partc.compiler.plan.training.forms import (
    loss_form,
    metrics_form,
    optimizer_form,
    own_optimizer_form,
    schedule_form,
)
from partc.compiler.plan.training.initial import InitialEntry
from partc.compiler.plan.training.loop_entries import CheckpointEntry, ClipEntry, DataForm
from partc.compiler.plan.training.loss import Loss, loss
from partc.compiler.plan.training.metric import Metric, metric
from partc.compiler.plan.training.optimizer import Optimizer, optimizer
from partc.compiler.plan.violation import Violation, shown
from partc.runtime.artifact.lr_schedule import schedule
from partc.runtime.errors import UsageError
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

SUM_OVER_RANKS = "sum_over_ranks"


@dataclass(frozen=True)
class ParameterRule:
    """How parameters whose names match are trained; None where the rule says nothing."""

    pattern: str
    where: str
    frozen: bool | None = None
    weight_decay: float | None = None
    lr: float | None = None
    shared: bool | None = None
    optimizer: Optimizer | None = None
    initial: InitialEntry | None = None
    staleness: int | None = None


@dataclass(frozen=True)
class TrainRules:
    """A valid `train:`. Rules for parameters are in the order of the file, the later wins.

    `settings` are those of the loop, which the compiler hands on as they are.
    """

    where: str
    where_loss: str
    where_metrics: str
    loss: Loss
    optimizer: Optimizer
    per_rank_mean: bool = False
    shard: str | Literal[True] | None = None
    schedule: Mapping[str, JsonValue] = field(default_factory=dict)
    parameters: tuple[ParameterRule, ...] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    clip_norm: float | None = None
    clip_value: float | None = None
    bucket_bytes: int = 10 << 20
    seed: int = 0
    accumulate: int = 1
    guarded: bool = False
    """Whether a step whose gradients are not finite changes nothing."""
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    target: str = ""
    """The kind of device that updates parameters, and where their state lies; empty: that of what reads a parameter."""


def _said(check: Any, *options: Any) -> Any:
    """What a loss, an optimizer or a schedule makes of its options; Violation with its own words where it refuses them."""
    try:
        return check(*options)
    except CompileError as error:
        first = error.problems[0]
        facts = "; ".join(problem.fact for problem in error.problems)
        helps = "; ".join(dict.fromkeys(problem.help for problem in error.problems if problem.help))
        raise Violation(
            facts, first.law, helps, first.where.removeprefix(_KEY) if _KEY in first.where else ""
        ) from None
    except (ValueError, TypeError, UsageError) as error:
        fact, _, help = str(error).partition("\n  help: ")
        raise Violation(fact.removeprefix("schedule: "), help=help) from None


@dataclass(frozen=True)
class LossChoice:
    """The loss of a plan, and whether gradients are those of the sum over ranks of their means."""

    loss: Loss
    per_rank_mean: bool = False


def _loss(value: object, info: ValidationInfo) -> LossChoice:
    folder = info.context.folder if isinstance(info.context, Frame) else Path()
    if isinstance(value, str):
        return LossChoice(_said(loss, value))
    if not isinstance(value, dict):
        raise Violation("a loss is the name of an output, or a mapping with its type", help=_LOSS_HELP)
    options = dict(value)
    per_rank = options.get("reduction") == SUM_OVER_RANKS
    if per_rank:
        options["reduction"] = "mean"
    return LossChoice(_said(loss, options, "train.loss", folder), per_rank)


@dataclass(frozen=True)
class OptimizerChoice:
    """The optimizer of a plan, and the mesh axis along which ranks share its state; True: all that hold the same."""

    optimizer: Optimizer
    shard: str | Literal[True] | None = None
    target: str = ""


def _optimizer(value: object) -> OptimizerChoice:
    if isinstance(value, str):
        value = {"type": value}
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise Violation(
            "an optimizer is a mapping with its type", help="write {type: momentum, lr: 0.01, momentum: 0.9}"
        )
    options = {key: one for key, one in value.items() if key not in ("type", "shard", "target")}
    shard = value.get("shard")
    if shard not in (None, False, True) and not isinstance(shard, str):
        raise Violation(f"expected the name of a mesh axis as 'shard', but got {shown(shard)}", key="shard")
    found: Optimizer = _said(optimizer, value["type"], options, lambda key: f"{_KEY}{key}" if key in options else "")
    return OptimizerChoice(found, shard or None, _target(value.get("target")))


def _target(value: object) -> str:
    """The device of the updates, empty where nothing is said."""
    if value is None:
        return ""
    try:
        return checked_target(value)
    except Violation as violation:
        raise Violation(violation.fact, violation.law, violation.help, "target") from None


@dataclass(frozen=True)
class OwnOptimizer:
    """The optimizer of some parameters; `rated`: whether it says its rate, and does not take that of `train.optimizer`."""

    optimizer: Optimizer
    rated: bool

    def at(self, rate: float) -> Optimizer:
        """The optimizer, with this rate where it says none."""
        return self.optimizer if self.rated else replace(self.optimizer, lr=rate)


def _own_optimizer(value: object) -> OwnOptimizer | None:
    if value is None:
        return None
    given = {"type": value} if isinstance(value, str) else value
    for key in ("shard", "target"):
        if isinstance(given, dict) and key in given:
            fact = f"'{key}' is no option of some parameters alone"
            raise Violation(fact, help="write it in train.optimizer, for all", key=key)
    rated = isinstance(given, dict) and "lr" in given
    return OwnOptimizer(
        _optimizer({"lr": _RATE_TO_COME, **given} if isinstance(given, dict) else given).optimizer, rated
    )


def _schedule(value: Json | None) -> Json | None:
    """A schedule that the runtime will take; a user's own function is looked at when training begins."""
    if value is not None and value.get("type") != "python":
        _said(schedule, value, 1.0)
    return value


def _metrics(value: object) -> dict[str, Metric]:
    if value is None:
        return {}
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        value = {str(one): {"type": one} for one in value}
    if not isinstance(value, dict):
        raise Violation("metrics are a list of names, or a mapping from names to options", help="write [accuracy]")
    return {name: _said(metric, name, {"type": name} if one is None else one) for name, one in value.items()}


def _or_empty(value: object) -> object:
    return {} if value is None else value


_KEY = "key "
_RATE_TO_COME = 1.0
"""In the place of the rate of train.optimizer while an optimizer of some parameters is checked."""
_LOSS_HELP = "write {type: softmax_cross_entropy, logits: logits, labels: label}"
Json: TypeAlias = dict[str, JsonValue]
LossForm: TypeAlias = Annotated[LossChoice, PlainValidator(_loss), WithJsonSchema(loss_form())]
OptimizerForm: TypeAlias = Annotated[OptimizerChoice, PlainValidator(_optimizer), WithJsonSchema(optimizer_form())]
OwnOptimizerForm: TypeAlias = Annotated[
    OwnOptimizer | None, PlainValidator(_own_optimizer), WithJsonSchema(own_optimizer_form())
]
MetricsForm: TypeAlias = Annotated[dict[str, Metric], PlainValidator(_metrics), WithJsonSchema(metrics_form())]
ScheduleForm: TypeAlias = Annotated[Json | None, AfterValidator(_schedule), WithJsonSchema(schedule_form())]


class ParameterEntry(BaseModel):
    """How the parameters that a pattern matches are trained."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

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
    optimizer: OwnOptimizerForm = Field(
        None,
        description="The optimizer of these parameters: a type, or a mapping with its options; `lr` is that of train.optimizer by default.",
    )
    initial: InitialEntry | None = Field(
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
    def _trained(self) -> ParameterEntry:
        for key in ("weight_decay", "lr", "optimizer", "staleness"):
            if self.frozen and getattr(self, key) is not None:
                raise Violation(
                    f"frozen, and '{key}'", "a frozen parameter has no update", "leave out one of them", key
                )
        return self

    def rule(self, pattern: str, where: str, main: Optimizer) -> ParameterRule:
        """The rule of a pattern, in a training by this optimizer."""
        own = self.optimizer.at(main.lr) if self.optimizer is not None else None
        said = (self.frozen, self.weight_decay, self.lr, self.shared)
        return ParameterRule(pattern, where, *said, own, self.initial, self.staleness)


class TrainEntry(BaseModel):
    """What is trained and how; and the loop around the steps."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    loss: LossForm = Field(
        description="The type of the loss with its options, or the name of a scalar output of the model."
    )
    optimizer: OptimizerForm = Field(
        description="The type of the optimizer with its options; `lr` is the learning rate."
    )
    schedule: ScheduleForm = Field(None, description="Learning rate schedule: {type: cosine, ...}.")
    parameters: Annotated[
        dict[Annotated[str, AfterValidator(checked_pattern)], ParameterEntry],
        BeforeValidator(_or_empty, json_schema_input_type=dict[str, ParameterEntry] | None),
    ] = Field(
        {},
        description="By pattern of parameter names: frozen, weight_decay, lr (a factor), optimizer. The last match wins.",
    )
    metrics: MetricsForm = Field({}, description="Metrics besides the loss: [accuracy], or names with options.")
    clip: ClipEntry | None = Field(None, description="Gradient clipping.")
    on_nonfinite: Literal["stop", "warn", "skip"] = Field(
        "stop",
        description="Behaviour if the loss, or with skip a gradient, is not finite; skip: the step changes nothing.",
    )
    accumulate: int = Field(
        1,
        ge=1,
        le=MOST_MICROBATCHES,
        description="Number of microbatches of a batch, whose gradients are added: a pipeline of that many, in the least memory.",
    )
    bucket_mb: float = Field(10.0, gt=0, description="Size of the gradient buckets in MB.")
    seed: int = Field(0, ge=0, description="Seed for shuffling and dropout.")
    data: DataForm = Field(None, description="Training data: a file, a folder, or one file per input.")
    test: DataForm = Field(None, description="Evaluation data, like `data`.")
    batch: int | None = Field(None, ge=1, description="Global batch size.")
    shuffle: bool = Field(True, description="Shuffle the records in every epoch.")
    drop_last: bool = Field(True, description="Drop the last, smaller batch of an epoch.")
    interleave: int | None = Field(
        None, ge=1, description="Deal consecutive records to this many ranks in turn, without shuffling."
    )
    epochs: int | None = Field(None, ge=1, description="Number of passes over the data.")
    steps: int | None = Field(None, ge=1, description="Number of steps, instead of epochs.")
    evaluate: int | Literal["epoch"] = Field(
        "epoch", description="Interval of evaluations: a number of steps, or each epoch."
    )
    log: int | Literal["epoch"] = Field(10, description="Interval of progress lines: a number of steps, or each epoch.")
    checkpoint: CheckpointEntry | None = Field(None, description="Folder and interval of checkpoints.")

    @model_validator(mode="before")
    @classmethod
    def _older_keys(cls, said: object) -> object:
        """`last: drop` or `keep` is an older form of `drop_last`, `deal` one of `interleave`."""
        if not isinstance(said, dict) or not {"last", "deal"} & said.keys():
            return said
        for old, new in (("last", "drop_last"), ("deal", "interleave")):
            if old in said and new in said:
                raise Violation(f"'{old}' and '{new}' are two names of one setting", help=f"leave '{old}' out", key=old)
        found = {name: value for name, value in said.items() if name not in ("last", "deal")}
        if "deal" in said:
            found["interleave"] = said["deal"]
        if "last" in said:
            if said["last"] not in ("drop", "keep"):
                raise Violation(
                    f"'last' is {shown(said['last'])}",
                    "a last, smaller batch is dropped or kept",
                    "write drop_last: true or false",
                    "last",
                )
            found["drop_last"] = said["last"] == "drop"
        return found

    @model_validator(mode="after")
    def _one_rate(self) -> TrainEntry:
        """An optimizer with one rate for all steps has no schedule."""
        kind, own = self.optimizer.optimizer.type, self.schedule or {}
        if not self.optimizer.optimizer.is_scheduled and (
            own.get("type", "constant") != "constant" or own.get("warmup")
        ):
            raise Violation(
                f"the rate of {kind} is the same in all steps",
                "what it keeps of a parameter is in proportion to 1/lr",
                f"leave 'schedule' out, or give {kind} to some parameters only, under 'parameters'",
                "schedule",
            )
        return self

    def rules(self, where: Callable[..., str]) -> TrainRules:
        """The entry as the compiler sees it; `where` gives the place of a key, `where("train", "loss")`."""
        loop = ("on_nonfinite", "seed", "data", "test", "batch", "shuffle")
        settings: dict[str, Any] = {name: getattr(self, name) for name in loop}
        settings |= {"last": "drop" if self.drop_last else "keep", "deal": self.interleave}
        settings |= {name: getattr(self, name) for name in ("epochs", "steps", "evaluate", "log")}
        if self.checkpoint is not None:
            settings["checkpoint"] = self.checkpoint.model_dump()
        return TrainRules(
            where=where("train"),
            where_loss=where("train", "loss"),
            where_metrics=where("train", "metrics"),
            loss=self.loss.loss,
            optimizer=self.optimizer.optimizer,
            shard=self.optimizer.shard,
            target=self.optimizer.target,
            per_rank_mean=self.loss.per_rank_mean,
            schedule=self.schedule or {},
            parameters=tuple(
                one.rule(pattern, where("train", "parameters", pattern), self.optimizer.optimizer)
                for pattern, one in self.parameters.items()
            ),
            metrics=self.metrics,
            clip_norm=self.clip.norm if self.clip else None,
            clip_value=self.clip.value if self.clip else None,
            bucket_bytes=round(self.bucket_mb * (1 << 20)),
            seed=self.seed,
            accumulate=self.accumulate,
            guarded=self.on_nonfinite == "skip",
            settings={name: value for name, value in settings.items() if value is not None},
        )
