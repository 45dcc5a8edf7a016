"""The plan's `experts`: the mesh axis along which a layer's experts are sharded; each rank has whole experts.

experts: {axis: dp}
experts: {"layers.*.mlp": {axis: ep, capacity: 1.25}}
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from partc.compiler.plan.groups import frame_in
from partc.runtime.options import Options, Refused, Remedy, or_empty
from pydantic import Field, ValidationInfo, field_validator

_LAW = "each rank along the axis has as many whole experts"
_FINEST, _MOST = 10_000, 1_000_000


class ExpertsEntry(Options):
    """The mesh axis that shards the experts of a layer, and the most rows that an expert takes."""

    axis: Annotated[str, Remedy("write experts: {axis: dp}, an axis of the mesh")] = Field(
        description="The mesh axis along which experts are sharded."
    )
    capacity: Annotated[float | None, Remedy("write capacity: 1.25, or leave it out: no token is then dropped")] = (
        Field(
            None,
            ge=1,
            le=_MOST,
            description="The most rows of a rank's tokens that an expert takes, as a multiple of their mean number for each expert; the "
            "later ones are dropped, and count as zeros.",
        )
    )

    @field_validator("capacity", mode="before")
    @classmethod
    def _enough(cls, capacity: object) -> object:
        if isinstance(capacity, int | float) and capacity < 1:
            law = "an expert has room for its mean number of rows, or tokens are dropped even where all experts have as many"
            raise Refused(f"a capacity of {capacity}", law, "write a number from 1 on, such as 1.25")
        return capacity

    @field_validator("axis")
    @classmethod
    def _known(cls, axis: str, info: ValidationInfo) -> str:
        mesh = frame_in(info).mesh
        if mesh is not None and axis not in dict(mesh):
            there = f"the mesh has the axes {', '.join(dict(mesh))}" if mesh else "there is no mesh"
            raise Refused(
                f"'{axis}' is not an axis of the mesh", f"{there}; {_LAW}", "name one of the mesh: {dp: 2, ep: 4}"
            )
        return axis


@dataclass(frozen=True)
class ExpertsRule:
    """A rule that shards the experts of the layers that its pattern matches along an axis.

    `capacity`: the most rows of one sender that an expert takes, divided by the mean over experts; None if no row is dropped.
    """

    pattern: str
    axis: str
    where: str
    capacity: Fraction | None = None

    @staticmethod
    def of(pattern: str, entry: ExpertsEntry, where: str) -> ExpertsRule:
        """Returns the rule of an entry, with its capacity in ten-thousandths at the finest."""
        capacity = None if entry.capacity is None else Fraction(entry.capacity).limit_denominator(_FINEST)
        return ExpertsRule(pattern, entry.axis, where, capacity)


def everywhere(value: object) -> object:
    """Returns an entry without patterns as one for all layers."""
    return {"**": value} if isinstance(value, dict) and {*ExpertsEntry.model_fields} & {*value} else or_empty(value)
