"""The plan's `parameters` and `stored`: the modules whose parameters ranks store in shards, and the times at which they are gathered.

    parameters:
      "layers.*": {stored: dp, after_forward: free}
      "{tokens,head}": {stored: dp}
    stored: {ahead: 1, reduce: step}

A module that a pattern matches is a unit: one message gathers its parameters. `**` matches all parameters: then a unit is the outermost
numbered module, such as `layers.3`, and outside of these each module with parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Literal, TypeAlias

from partc.compiler.plan.groups import frame_in
from partc.compiler.plan.pattern import compile_pattern
from partc.runtime.options import Options, Refused, shown
from pydantic import Field, PlainValidator, ValidationInfo

FREE: Literal["free"] = "free"
KEEP: Literal["keep"] = "keep"
EVERY = "**"
"""The pattern of all parameters."""
Often: TypeAlias = Literal["step", "microbatch"]
_LAW = "the ranks along an axis of the mesh share what they store; true means all ranks that hold the same"


@dataclass(frozen=True)
class StoredRule:
    """A rule that stores matched parameters in shards along a mesh axis; with True, over all ranks that have the same parameters.

    `after_forward`: whether they are freed after the forward pass and gathered again; None lets the compiler decide.
    """

    pattern: str
    axis: str | Literal[True]
    after_forward: Literal["free", "keep"] | None
    where: str

    def __str__(self) -> str:
        return f"{PurePath(self.where).name} '{self.pattern}'"

    def unit_of(self, parameter: str) -> str:
        """Returns the module that is the unit of the parameter of this name; "" if the rule does not match."""
        parts = parameter.split(".")
        modules = [".".join(parts[: end + 1]) for end in range(len(parts))]
        if self.pattern == EVERY:
            owner = modules[-2] if len(modules) > 1 else parameter
            return next((one for one in modules[:-1] if one.rpartition(".")[2].isdigit()), owner)
        return next(filter(compile_pattern(self.pattern).matches, modules), "")


@dataclass(frozen=True)
class StoredRules:
    """All rules in the order of the file; the last one that matches decides.

    `ahead`: the number of units between a unit's gather and its first reader. `gather`, `reduce`: once for each microbatch or once for each
    step; None if the plan does not say.
    """

    rules: tuple[StoredRule, ...] = ()
    ahead: int = 1
    gather: Often | None = None
    reduce: Often = "step"


def _axis(value: object, info: ValidationInfo) -> str | Literal[True]:
    if value is True:
        return True
    if not isinstance(value, str):
        raise Refused(f"expected an axis of the mesh, but got {shown(value)}", _LAW, "write stored: dp")
    axes = frame_in(info).mesh
    if axes is not None and value not in dict(axes):
        there = f"its axes are {', '.join(name for name, _ in axes)}" if axes else "the plan has no mesh"
        help_ = "name one of them" if axes else f"write mesh: {{{value}: 4}}, or stored: true"
        raise Refused(f"'{value}' is not an axis of the mesh", there, help_)
    return value


class StoredEntry(Options):
    """An entry of `parameters`: the storage of the modules that a pattern matches."""

    stored: Annotated[str | Literal[True], PlainValidator(_axis, json_schema_input_type=str | bool)] = Field(
        description="The mesh axis whose ranks store a shard each of what they would all have; true: all ranks that hold the same."
    )
    after_forward: Literal["free", "keep"] | None = Field(
        None,
        description="free: what was gathered is freed after the forward pass, and gathered again for the backward pass; keep: it stays. "
        "Without it free, where that lowers the peak.",
    )

    def rule(self, pattern: str, where: str) -> StoredRule:
        """Returns the rule of this entry for a pattern."""
        return StoredRule(pattern, self.stored, self.after_forward, where)


class StoredSettings(Options):
    """When stored parameters are gathered, and their gradients reduced."""

    ahead: int = Field(
        1,
        ge=1,
        le=64,
        description="How many units before its first reader a unit is gathered, beside their computation.",
    )
    gather: Often | None = Field(
        None,
        description="How often in a batch of microbatches: step keeps what is gathered for all of them, microbatch frees it after each "
        "pass of each. Without it as `after_forward` says.",
    )
    reduce: Often = Field(
        "step",
        description="How often gradients are reduced: step adds whole gradients of microbatches and reduces once; microbatch reduces "
        "those of each, and adds shards.",
    )


def refused_storage(entries: Mapping[str, StoredEntry], settings: StoredSettings, *, generates: bool) -> Refused | None:
    """Returns the refusal of `parameters` and `stored` that contradict each other or other keys; None if they fit."""
    if not entries:
        help_ = 'write parameters: {"layers.*": {stored: dp}}, or leave it out'
        law = "it says when what 'parameters' stores in shards is gathered"
        return Refused("'stored' without 'parameters'", law, help_, "stored") if settings.model_fields_set else None
    if generates:
        law = "each token would gather all that is stored"
        return Refused("'parameters' beside 'generate'", law, "cut products instead: sharding", "parameters")
    other = {"step": FREE, "microbatch": KEEP}.get(settings.gather or "", "")
    if wrong := next((pattern for pattern, one in entries.items() if one.after_forward == other), None):
        fact = f"'gather: {settings.gather}', and 'after_forward: {other}' of '{wrong}'"
        law = "what is gathered once a step is kept for all microbatches, and what is gathered for each is freed"
        return Refused(fact, law, "leave out one of them", "stored")
    return None
