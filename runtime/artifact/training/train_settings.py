"""The keys of a plan's `train:` that the runtime reads: an artifact stores them under the plan's names, and a command's options override
them.

settings = record.settings.merged(LoopSettings(batch=64, steps=100))
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from partc.runtime.artifact.training.data_spec import Data, DataForm
from partc.runtime.artifact.training.lr_schedule import Schedule
from partc.runtime.options import Options, Refused, Remedy, is_integer, shown
from partc.runtime.units import parse_seconds
from pydantic import BeforeValidator, Field, PlainValidator, SerializerFunctionWrapHandler, model_serializer


def _every(value: object) -> object:
    if value == "epoch" or (isinstance(value, int) and is_integer(value) and value > 0):
        return value
    if isinstance(value, str) and value.isdecimal() and int(value) > 0:
        return int(value)
    raise Refused(
        f"expected a number of steps, or 'epoch', but got {shown(value)}", help="use a number of steps, or 'epoch'"
    )


Every: TypeAlias = Annotated[
    int | Literal["epoch"],
    PlainValidator(_every, json_schema_input_type=Annotated[int, Field(ge=1)] | Literal["epoch"]),
]


def _duration(value: object) -> float:
    seconds = parse_seconds(str(value)) if isinstance(value, int | float | str) else None
    if isinstance(value, bool) or not seconds:
        raise Refused(
            f"expected a time, but got {shown(value)}",
            "a time is a number of seconds, 11h 50min, 1.5h, 11:50:00 or 1-12:00:00",
            "write max_time: 11h 50min",
        )
    return seconds


Duration: TypeAlias = Annotated[
    float, PlainValidator(_duration, json_schema_input_type=Annotated[float, Field(gt=0)] | str)
]


class EmaSettings(Options):
    """The exponential moving average of the parameters."""

    decay: float = Field(0.999, gt=0, lt=1, description="Share of the average that stays in a step.")
    evaluate: bool = Field(False, description="Evaluate the averages during training, in place of the parameters.")


class MetricChoice(Options):
    """A metric of the evaluations, and whether less or more of it is better."""

    metric: str = Field("loss", min_length=1, description="Name of the metric, or loss.")
    mode: Literal["min", "max"] | None = Field(
        None, description="Whether less or more is better; by default what the metric is for."
    )


class EarlyStop(MetricChoice):
    """When training ends since it does not get better any more."""

    patience: int = Field(3, ge=1, description="Number of evaluations in a row that may be no better than the best.")
    min_delta: float = Field(0.0, ge=0, description="By how much an evaluation must be better to count.")


class KeepSettings(Options):
    """Which checkpoints stay."""

    last: int | None = Field(3, ge=1, description="Number of the newest checkpoints to keep; null: all.")
    best: Annotated[MetricChoice | None, Remedy("write best: {metric: accuracy}")] = Field(
        None, description="Save each evaluation that is the best so far, and keep that checkpoint besides."
    )


def _keep(value: object) -> object:
    return {"last": value} if value is None or is_integer(value) else value


class CheckpointSettings(Options):
    """Where and when training is saved."""

    folder: str = Field("checkpoints", description="Folder for checkpoints.")
    every: Every = Field("epoch", description="Interval of checkpoints: a number of steps, or each epoch.")
    background: bool = Field(False, description="Write the files while training goes on, from a copy in memory.")
    keep: Annotated[
        KeepSettings,
        BeforeValidator(_keep, json_schema_input_type=Annotated[int, Field(ge=1)] | KeepSettings | None),
        Remedy("write keep: 3, or keep: {last: 3, best: {metric: accuracy}}"),
    ] = Field(KeepSettings(), description="Number of checkpoints to keep, or {last: 3, best: {metric: accuracy}}.")


class DataSettings(Options):
    """The records of a training, and how they are dealt out to batches."""

    data: DataForm | None = Field(None, description="Training data: a file, a folder, or one file per input.")
    test: DataForm | None = Field(None, description="Evaluation data, like `data`.")
    batch: int | None = Field(None, ge=1, description="Global batch size.")
    seed: int = Field(0, ge=0, description="Seed for shuffling and dropout.")
    shuffle: bool = Field(True, description="Shuffle the records in every epoch.")
    drop_last: bool = Field(True, description="Drop the last, smaller batch of an epoch.")
    interleave: int | None = Field(
        None, ge=1, description="Deal consecutive records to this many ranks in turn, without shuffling."
    )


class LoopSettings(DataSettings):
    """How far a training goes, and what happens on the way. `steps`, or else `epochs`; without either, one epoch."""

    schedule: Schedule | None = Field(None, description="Learning rate schedule: {type: cosine, ...}.")
    on_nonfinite: Literal["stop", "warn", "skip"] = Field(
        "stop",
        description="Behaviour if the loss, or with skip a gradient, is not finite; skip: the step changes nothing.",
    )
    epochs: int | None = Field(None, ge=1, description="Number of passes over the data.")
    steps: int | None = Field(None, ge=1, description="Number of steps, instead of epochs.")
    max_time: Duration | None = Field(
        None,
        description="Time after which training saves and stops with exit code 75, from the start of the command: 11h 50min.",
    )
    callbacks: str | None = Field(
        None, min_length=1, description="File of Python with on_step, on_evaluate and on_save, called on rank 0."
    )
    report: tuple[Literal["gradient_norm", "parameter_norm", "tokens", "memory"], ...] | None = Field(
        None,
        strict=False,
        description="Further numbers of progress lines: gradient_norm, parameter_norm, tokens, memory.",
    )
    evaluate: Every = Field("epoch", description="Interval of evaluations: a number of steps, or each epoch.")
    ema: Annotated[EmaSettings | None, Remedy("write ema: {decay: 0.999}")] = Field(
        None, description="Keep an exponential moving average of the parameters: {decay: 0.999}."
    )
    early_stop: Annotated[EarlyStop | None, Remedy("write early_stop: {metric: loss, patience: 3}")] = Field(
        None, description="End training when a metric of the evaluations gets no better: {metric: loss, patience: 3}."
    )
    log: Every = Field(10, description="Interval of progress lines: a number of steps, or each epoch.")
    checkpoint: Annotated[
        CheckpointSettings | None,
        Remedy("write checkpoint: {folder: checkpoints, every: 100}"),
    ] = Field(None, description="Folder and interval of checkpoints.")

    @model_serializer(mode="wrap")
    def _without_nulls(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {name: one for name, one in handler(self).items() if one is not None}

    def total_steps(self, batches: int | None) -> int | None:
        """The number of steps where an epoch has `batches` batches; None where that is unknown and `steps` is not set."""
        if self.steps is not None or batches is None:
            return self.steps
        return (self.epochs or 1) * batches

    def merged(self, said: LoopSettings) -> Self:
        """Returns these settings, overridden by the keys that `said` sets."""
        more = {name: getattr(said, name) for name in said.model_fields_set}
        if {"steps", "epochs"} & more.keys():
            more = {"steps": None, "epochs": None, **more}
        if (own := said.checkpoint) is not None:
            kept = {name: getattr(own, name) for name in own.model_fields_set}
            begun = self.checkpoint or (CheckpointSettings(keep=KeepSettings(last=None)) if "folder" in kept else None)
            if begun is not None and "keep" in kept:
                said_of_keep = {name: getattr(own.keep, name) for name in own.keep.model_fields_set}
                kept["keep"] = begun.keep.model_copy(update=said_of_keep)
            more["checkpoint"] = begun and begun.model_copy(update=kept)
        for name, planned in (("data", self.data), ("test", self.test)):
            if isinstance(one := more.get(name), Data):
                more[name] = one.with_values(planned)
        return self.model_copy(update=more)

    def seen_from(self, base: Path) -> Self:
        """Returns these settings with their paths joined to the folder `base`."""
        more: dict[str, object] = {
            "data": self.data and self.data.seen_from(base),
            "test": self.test and self.test.seen_from(base),
        }
        if self.callbacks is not None:
            more["callbacks"] = str(base / self.callbacks)
        if self.checkpoint is not None:
            more["checkpoint"] = self.checkpoint.model_copy(update={"folder": str(base / self.checkpoint.folder)})
        return self.model_copy(update=more)
