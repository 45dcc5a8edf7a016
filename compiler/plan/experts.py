"""The plan's `experts`: the mesh axis along which a layer's experts are sharded; each rank has whole experts.

experts: {axis: dp}
experts: {"layers.*.mlp": {axis: ep}}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from partc.compiler.plan.groups import frame_in
from partc.runtime.options import Options, Refused, Remedy, or_empty
from pydantic import Field, ValidationInfo, field_validator

_LAW = "each rank along the axis has as many whole experts"


class ExpertsEntry(Options):
    """The mesh axis that shards the experts of a layer."""

    axis: Annotated[str, Remedy("write experts: {axis: dp}, an axis of the mesh")] = Field(
        description="The mesh axis along which experts are sharded. Where it shards the tokens, too, these go to their experts' ranks."
    )

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
    """A rule that shards the experts of the layers that its pattern matches along an axis."""

    pattern: str
    axis: str
    where: str


def everywhere(value: object) -> object:
    """Returns an entry without patterns as one for all layers."""
    return {"**": value} if isinstance(value, dict) and "axis" in value else or_empty(value)
