"""`precision` of a plan: which floating-point types the model computes in, and how its loss is scaled.

precision: {compute: float16, keep: ["head"], loss_scale: dynamic, messages: bfloat16}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from partc.compiler.plan.pattern import checked_pattern
from partc.compiler.plan.violation import Violation, shown
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

LowType: TypeAlias = Literal["float16", "bfloat16"]
DYNAMIC = "dynamic"
SMALLEST, LARGEST = 2.0**-24, 2.0**100
"""The bounds of a loss scale."""


_USUAL = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed", "bf16_mixed"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "f16", "half", "16", "16-mixed", "amp", "mixed"), "float16"),
}


def low_type(value: object) -> str:
    """The type that a usual name of a precision means; empty where it means none: bf16 is bfloat16."""
    return _USUAL.get(str(value).lower().rpartition(".")[2], "")


@dataclass(frozen=True)
class LossScale:
    """The factor of the loss: a fixed number, or with `interval` one that grows by `growth` after so many steps in a row with finite
    gradients, and shrinks by `backoff` at one without.
    """

    first: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 0

    @property
    def dynamic(self) -> bool:
        """Whether it changes from step to step."""
        return self.interval > 0


@dataclass(frozen=True)
class PrecisionRules:
    """A valid `precision:`. `keep`: patterns of what stays in float32, each with its place; `scale`: None where the loss is not scaled."""

    where: str
    compute: LowType
    keep: tuple[tuple[str, str], ...] = ()
    scale: LossScale | None = None
    messages: bool = False
    of_training: tuple[str, ...] = ()
    """The keys that say something of a training alone."""


class DynamicScaleEntry(BaseModel):
    """A loss scale that follows the gradients."""

    model_config = ConfigDict(extra="forbid", strict=True)

    first: float = Field(2.0**16, gt=0, le=LARGEST, description="The scale of the first step.")
    growth: float = Field(2.0, gt=1, description="Factor of the scale after `interval` steps with finite gradients.")
    backoff: float = Field(0.5, gt=0, lt=1, description="Factor of the scale after a step without; it changes nothing.")
    interval: int = Field(2000, ge=1, description="Number of steps with finite gradients until the scale grows.")

    def scale(self) -> LossScale:
        """The scale that the entry describes."""
        return LossScale(self.first, self.growth, self.backoff, self.interval)


def _loss_scale(value: object) -> LossScale | None:
    remedy = "write dynamic, none, a number such as 1024, or {first: 65536, interval: 2000}"
    if value is None or value == "none":
        return None
    if value == DYNAMIC:
        return DynamicScaleEntry.model_validate({}).scale()
    if isinstance(value, dict):
        return DynamicScaleEntry.model_validate(value).scale()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Violation(f"expected a loss scale, but got {shown(value)}", help=remedy)
    if not math.isfinite(value) or not SMALLEST <= value <= LARGEST:
        raise Violation(f"the loss scale is {value}", f"it is from {SMALLEST:.2g} to {LARGEST:.2g}", remedy)
    return LossScale(float(value))


def _or_empty(value: object) -> object:
    return [] if value is None else value


_SCALE_FORM: Mapping[str, Any] = {
    "anyOf": [
        {"enum": [DYNAMIC, "none"]},
        {"type": "number", "exclusiveMinimum": 0},
        DynamicScaleEntry.model_json_schema(),
        {"type": "null"},
    ]
}
ScaleForm: TypeAlias = Annotated[LossScale | None, PlainValidator(_loss_scale), WithJsonSchema(dict(_SCALE_FORM))]


class PrecisionEntry(BaseModel):
    """Computation in 16 bits: products in `compute`, sums and what leaves its range in float32; weights are kept in float32."""

    model_config = ConfigDict(extra="forbid", strict=True)

    compute: LowType = Field(description="The type of products: float16 or bfloat16.")
    keep: list[Annotated[str, AfterValidator(checked_pattern), Field(min_length=1)]] = Field(
        [], description="Patterns of modules or nodes that compute in float32."
    )
    loss_scale: ScaleForm = Field(
        None,
        description="Factor of the loss, by which gradients are divided again: dynamic, which follows the gradients, a number, or "
        "none. Without it dynamic for float16, none for bfloat16.",
    )
    messages: Literal["bfloat16"] | None = Field(
        None, description="The type in which gradients are reduced over ranks."
    )

    @property
    def scale(self) -> LossScale | None:
        """The loss scale: dynamic for float16 where nothing is said."""
        if "loss_scale" not in self.model_fields_set and self.compute == "float16":
            return DynamicScaleEntry.model_validate({}).scale()
        return self.loss_scale

    def rules(self, where: Callable[..., str]) -> PrecisionRules:
        """The entry as the compiler sees it; `where` gives the place of a key."""
        return PrecisionRules(
            where("precision"),
            self.compute,
            tuple((pattern, where("precision", "keep", k)) for k, pattern in enumerate(self.keep)),
            self.scale,
            self.messages is not None,
            tuple(key for key in ("loss_scale", "messages") if key in self.model_fields_set),
        )
