"""The plan's `precision`: the floating-point types of computation, and the scale of the loss.

precision: {compute: float16, keep: ["head"], loss_scale: dynamic, messages: bfloat16}

`quantize` of a plan: selects the products whose weights have four or eight bits, in blocks of the contracted dim that share a scale.

quantize: {"**.{q,k,v,o,gate,up,down}_proj": {bits: 4, block: 32}, lm_head: {bits: 8}, "layers.0.**": null}
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from partc.compiler.plan.document import PlacedOptions
from partc.compiler.plan.pattern import checked_pattern
from partc.runtime.options import Options, Refused, Remedy, shown
from pydantic import AfterValidator, Field, PlainValidator

LowType: TypeAlias = Literal["float16", "bfloat16"]
DYNAMIC = "dynamic"
SMALLEST, LARGEST = 2.0**-24, 2.0**100
"""The bounds of a loss scale."""


_USUAL = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed", "bf16_mixed"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "f16", "half", "16", "16-mixed", "amp", "mixed"), "float16"),
}


def low_type(value: object) -> str:
    """Returns the type for a common name of a precision (bf16 is bfloat16); "" for an unknown name."""
    return _USUAL.get(str(value).lower().rpartition(".")[2], "")


class LossScale(Options):
    """A factor of the loss that follows the gradients; with an `interval` of 0 a fixed number."""

    first: float = Field(2.0**16, gt=0, le=LARGEST, description="The scale of the first step.")
    growth: float = Field(2.0, gt=1, description="Factor of the scale after `interval` steps with finite gradients.")
    backoff: float = Field(0.5, gt=0, lt=1, description="Factor of the scale after a step without; it changes nothing.")
    interval: int = Field(2000, ge=1, description="Number of steps with finite gradients until the scale grows.")

    @property
    def dynamic(self) -> bool:
        """Whether it changes from step to step."""
        return self.interval > 0


def _loss_scale(value: object) -> LossScale | None:
    remedy = "write dynamic, none, a number such as 1024, or {first: 65536, interval: 2000}"
    if value is None or value == "none":
        return None
    if value == DYNAMIC:
        return LossScale()
    if isinstance(value, dict):
        return LossScale.model_validate(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(f"expected a loss scale, but got {shown(value)}", help=remedy)
    if not math.isfinite(value) or not SMALLEST <= value <= LARGEST:
        raise Refused(f"the loss scale is {value}", f"it is from {SMALLEST:.2g} to {LARGEST:.2g}", remedy)
    return LossScale.model_construct(first=float(value), interval=0)


ScaleForm: TypeAlias = Annotated[
    LossScale | None,
    PlainValidator(
        _loss_scale,
        json_schema_input_type=Literal["dynamic", "none"] | Annotated[float, Field(gt=0)] | LossScale | None,
    ),
]


class PrecisionRules(PlacedOptions):
    """Computation in 16 bits: products in `compute`, sums and what leaves its range in float32; weights are kept in float32."""

    KEY = "precision"

    compute: Annotated[
        LowType,
        Remedy("write compute: float16, or bfloat16; without 'precision' the model computes in its own types"),
    ] = Field(description="The type of products: float16 or bfloat16.")
    keep: Annotated[
        list[Annotated[str, AfterValidator(checked_pattern), Field(min_length=1)]], Remedy("write keep: [head]")
    ] = Field([], description="Patterns of modules or nodes that compute in float32.")
    loss_scale: ScaleForm = Field(
        None,
        description="Factor of the loss, by which gradients are divided again: dynamic, which follows the gradients, a number, or "
        "none. Without it dynamic for float16, none for bfloat16.",
    )
    messages: Annotated[Literal["bfloat16"] | None, Remedy("write messages: bfloat16, or leave it out")] = Field(
        None, description="The type in which gradients are reduced over ranks."
    )

    @property
    def scale(self) -> LossScale | None:
        """The loss scale: dynamic for float16 if the plan does not set it."""
        if "loss_scale" not in self.model_fields_set and self.compute == "float16":
            return LossScale()
        return self.loss_scale


class GradientMessages(Options):
    """Gradients that travel as blocks of integers, each with its scale."""

    bits: Literal[8] = Field(8, description="Bits of a number.")
    block: int = Field(256, ge=8, le=1 << 16, description="Numbers that share a scale.")
    keep_rest: bool = Field(
        True, description="What rounding leaves of a gradient is added to that of the next step, and is in checkpoints."
    )


LEAST_BLOCK = 4
"""The fewest numbers of a row that share a scale: of as many a message has half the bytes."""


class RowMessages(Options):
    """Rows of tokens that travel to their experts and back as blocks of integers, each with its scale; so do their gradients."""

    bits: Literal[8] = Field(8, description="Bits of a number.")
    block: int = Field(
        64, ge=LEAST_BLOCK, le=1 << 16, description="Numbers of a row that share a scale; a row is whole blocks."
    )


class MessageRules(PlacedOptions):
    """The form in which values travel between ranks."""

    KEY = "messages"

    gradients: Annotated[
        GradientMessages | None, Remedy("write gradients: {bits: 8, block: 256, keep_rest: true}, or leave it out")
    ] = Field(None, description="Sums of gradients over ranks, of float32: blocks of integers of 8 bits.")
    rows: Annotated[RowMessages | None, Remedy("write rows: {bits: 8, block: 64}, or leave it out")] = Field(
        None, description="Rows of tokens that are sent to the ranks of their experts: blocks of integers of 8 bits."
    )


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
