"""`quantize` of a plan: selects the products whose weights have four or eight bits, in blocks of the contracted dim that share a scale.

quantize: {"**.{q,k,v,o,gate,up,down}_proj": {bits: 4, block: 32}, lm_head: {bits: 8}, "layers.0.**": null}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from partc.runtime.options import Options, Remedy
from pydantic import Field

BLOCKS = (16, 32, 64, 128, 256)
"""The sizes of blocks that onnxruntime has kernels for."""


class Blocks(Options):
    """How a weight is quantized: symmetrically, a scale for each block of consecutive elements of a column."""

    bits: Annotated[Literal[4, 8], Remedy("write bits: 4 or bits: 8; other widths have no kernel for CPUs")] = Field(
        4, description="Bits of an element: 4 or 8."
    )
    block: Annotated[Literal[16, 32, 64, 128, 256], Remedy("write block: 32; a block has 16, 32, 64, 128 or 256")] = (
        Field(32, description="Elements that share a scale: 16, 32, 64, 128 or 256.")
    )
    accuracy_level: Annotated[
        Literal[0, 1, 2, 3, 4], Remedy("write accuracy_level: 4, or 1 for products in float32")
    ] = Field(
        4,
        description="In what products compute, as onnxruntime numbers it: 1 float32, 2 float16, 3 bfloat16, 4 int8, which is the fastest; "
        "0 leaves it to the kernel.",
    )


@dataclass(frozen=True)
class QuantizeRule:
    """The quantization of the products that the pattern matches: in these blocks; None: they keep their weights."""

    pattern: str
    blocks: Blocks | None
    where: str
