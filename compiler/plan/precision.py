"""The plan's `precision`: the floating-point types of computation, and the scale of the loss.

precision: {compute: float16, keep: ["head"], loss_scale: dynamic, messages: bfloat16}
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

from partc.compiler.plan.pattern import checked_pattern
from partc.compiler.plan.placed_options import PlacedOptions
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


class MessageRules(PlacedOptions):
    """The form in which values travel between ranks."""

    KEY = "messages"

    gradients: Annotated[GradientMessages, Remedy("write gradients: {bits: 8, block: 256, keep_rest: true}")] = Field(
        description="Sums of gradients over ranks, of float32: blocks of integers of 8 bits."
    )
