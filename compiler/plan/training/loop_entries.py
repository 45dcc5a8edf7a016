"""Parts of a plan's `train:` that are mappings of their own: clipping and checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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
