"""`pipeline` of a plan: into how many microbatches a batch is cut, and in which order the stages run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

MICROBATCH: Literal["microbatch"] = "microbatch"


@dataclass(frozen=True)
class PipelineRules:
    """A valid `pipeline:`. `schedule` is a name, rows as text, or None for the one that fits; `rows` are the places of rows."""

    where: str
    microbatches: int
    schedule: str | tuple[str, ...] | None = None
    memory: str | int | None = None
    statistics: Literal["microbatch"] | None = None
    rows: tuple[str, ...] = ()


class PipelineEntry(BaseModel):
    """How a batch runs through the stages that the placement makes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    microbatches: int = Field(ge=1, description="The number of equal parts of a batch, which follow each other.")
    schedule: str | list[str] | None = Field(
        None,
        description="The order of the stages' tasks: gpipe, 1f1b, interleaved, zb_h1, zbv, auto, or a row of tasks "
        "for each rank, ['0F0 0F1 0B0 0B1', ...]. Without it 1f1b where every stage has ranks of its own, else auto.",
    )
    memory: str | int | None = Field(
        None, description="The most microbatches whose values a rank may keep, such as '2.5 microbatches'."
    )
    statistics: Literal["microbatch"] | None = Field(
        None,
        description="microbatch: what a layer takes of all records, such as a batch normalization's mean, it takes of each "
        "microbatch; without it such a layer is refused.",
    )

    def rules(self, where: Callable[..., str]) -> PipelineRules:
        """The entry as the compiler sees it; `where` gives the place of a key."""
        rows = self.schedule if isinstance(self.schedule, list) else []
        return PipelineRules(
            where("pipeline"),
            self.microbatches,
            tuple(rows) or (self.schedule if isinstance(self.schedule, str) else None),
            self.memory,
            self.statistics,
            tuple(where("pipeline", "schedule", k) for k in range(len(rows))),
        )
