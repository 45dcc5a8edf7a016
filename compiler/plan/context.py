"""The plan's `context`: shards the tokens of a sequence over a mesh axis, and says in which of three ways attention is computed.

In a plan with `generate` it shards the entries of caches, and has an axis alone.

context: {axis: cp, attention: auto, memory: 256MB}
"""

from __future__ import annotations

from typing import ClassVar, Literal

from partc.compiler.plan.document import PlacedOptions
from partc.compiler.plan.groups import frame_in, shown_mesh
from partc.runtime.options import ByteCount, Refused
from pydantic import Field, ValidationInfo, model_validator

Way = Literal["ring", "heads", "gather"]


class ContextRules(PlacedOptions):
    """The axis that cuts the tokens, and how attention gets the keys and values of other ranks."""

    KEY: ClassVar[str] = "context"

    axis: str = Field(
        description="The mesh axis that cuts the tokens' dim of inputs and labels; beside `generate`, the entries of caches."
    )
    attention: Literal["auto", "ring", "heads", "gather"] = Field(
        "auto",
        description="gather: each rank gets all keys and values; heads: each rank gets all tokens of its heads; ring: keys and values pass "
        "from rank to rank. auto: the fewest bytes within 'memory'.",
    )
    order: Literal["runs", "fold"] = Field(
        "runs",
        description="runs: a rank has one run of tokens. fold: of 2p runs rank r of p has r and 2p-1-r, so that in causal rings all ranks "
        "compute equally much; not for windows.",
    )
    memory: ByteCount = Field(
        None,
        description="The most bytes of queries, keys and values of other ranks that an attention keeps on a rank; null: no limit.",
    )

    @model_validator(mode="after")
    def _of_the_mesh(self, info: ValidationInfo) -> ContextRules:
        mesh = frame_in(info).mesh
        if mesh is not None and self.axis not in dict(mesh):
            law = f"the mesh is {shown_mesh(mesh)}" if mesh else "there is no mesh"
            help_ = f"write axis: {mesh[-1][0]}" if mesh else f"write mesh: {{{self.axis}: 2}}"
            raise Refused(f"'{self.axis}' is not an axis of the mesh", law, help_, "axis")
        return self
