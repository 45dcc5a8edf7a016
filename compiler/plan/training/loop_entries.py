"""Parts of a plan's `train:` that are mappings of their own: data, clipping and checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from partc.compiler.plan.violation import Violation
from partc.runtime.artifact.data_spec import data_problems
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue


def _data(said: str | dict[str, JsonValue] | None) -> str | dict[str, JsonValue] | None:
    if said is not None and (problems := data_problems(said)):
        raise Violation("; ".join(fact for fact, _ in problems), help="; ".join(help for _, help in problems))
    return said


DataForm: TypeAlias = Annotated[str | dict[str, JsonValue] | None, AfterValidator(_data)]


class ClipEntry(BaseModel):
    """Gradients are scaled down to a global norm, or each number is kept within a bound."""

    model_config = ConfigDict(extra="forbid", strict=True)

    norm: float | None = Field(None, gt=0, description="Maximum of the global norm of all gradients, over all ranks.")
    value: float | None = Field(None, gt=0, description="Maximum absolute value of a gradient's elements.")


class CheckpointEntry(BaseModel):
    """Where and when training is saved."""

    model_config = ConfigDict(extra="forbid", strict=True)

    folder: str = Field("checkpoints", description="Folder for checkpoints.")
    every: int | Literal["epoch"] = Field(
        "epoch", description="Interval of checkpoints: a number of steps, or each epoch."
    )
    keep: int = Field(3, ge=1, description="Number of checkpoints to keep.")
