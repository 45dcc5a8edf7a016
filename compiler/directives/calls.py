"""The calls of `place` and `shard` as they are recorded: the target and the arguments of each, and the regions that its target became.

The region of a module is all that is inside. That of a function is what one call of it emits, that of an op is its node (`traced.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import onnx_ir as ir
from onnxscript import OpBuilder
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.declared import On
from partc.compiler.plan.shard_spec import ShardSpec, shown_spec


@dataclass
class Region:
    """What one call emitted: a scope's path, or one node; and the tensors that went in and came out."""

    path: str
    node: ir.Node | None
    arguments: tuple[ir.Value, ...]
    results: tuple[ir.Value, ...]


@dataclass
class TracedCall:
    """One call of `place` or `shard`: its target, its line, and the regions that calls of the target became."""

    verb: ClassVar[str]
    target: object
    where: str
    regions: list[Region] = field(default_factory=list, init=False)
    device: str = field(default="", init=False)
    """The kind of device of the region; empty where the call says nothing of it."""

    @property
    def name(self) -> str:
        """The module's class, the function's name, or the op's type."""
        if is_module(self.target):
            return type(self.target).__name__
        if bound := bound_op(self.target):
            return bound[1]
        name = str(getattr(self.target, "__name__", type(self.target).__name__))
        return name if name.isidentifier() else "function"

    def check(self, region: Region) -> None:
        """Raises CompileError where the call cannot mean this region."""


@dataclass
class PlaceCall(TracedCall):
    """One call of `place`: a module, a function, an op or a pattern, and where it runs."""

    verb: ClassVar[str] = "place"
    on: On | None
    role: str = ""


@dataclass
class ShardCall(TracedCall):
    """One call of `shard`: the module, function or op, and its shard specs."""

    verb: ClassVar[str] = "shard"
    inputs: tuple[ShardSpec | None, ...] | None
    outputs: tuple[ShardSpec | None, ...] | None
    parameters: Mapping[str, ShardSpec]
    level: int

    def check(self, region: Region) -> None:
        """Raises CompileError unless strategies have an entry for each tensor, and one for each of its dims."""
        problems: list[Problem] = []
        sides = [
            ("in", "is called with", self.inputs, region.arguments),
            ("out", "gives back", self.outputs, region.results),
        ]
        for side, verb, specs, values in sides:
            if specs is None:
                continue
            if len(specs) != len(values):
                fact = f"{side}_strategy is for {_count(len(specs), 'tensor')}, but '{self.name}' {verb} {len(values)}"
                problems.append(Problem(self.where, fact, help="write None for a tensor whose layout is derived"))
                continue
            for k, (spec, value) in enumerate(zip(specs, values, strict=True)):
                if spec is not None and value.shape is not None and len(spec) != len(value.shape):
                    dims = ", ".join(str(dim) for dim in value.shape)
                    fact = (
                        f"{side}_strategy[{k}] {shown_spec(spec)} is for {_count(len(spec), 'dim')}, but the tensor has"
                    )
                    fact = f"{fact} {len(value.shape)}, [{dims}]"
                    problems.append(Problem(self.where, fact, help="write one entry for each dim"))
        if problems:
            raise CompileError(problems)


def is_module(target: object) -> bool:
    """Whether this is a module of onnxscript or torch."""
    return not isinstance(target, type) and hasattr(target, "named_modules") and hasattr(target, "forward")


def bound_op(fn: object) -> tuple[OpBuilder, str] | None:
    """The builder and op type of `op.MatMul`, which a builder makes as a function of its own."""
    if not inspect.isfunction(fn) or fn.__module__ != OpBuilder.__module__:
        return None
    inside = inspect.getclosurevars(fn).nonlocals
    builder, op_type = inside.get("self"), inside.get("op_type")
    return (builder, op_type) if isinstance(builder, OpBuilder) and isinstance(op_type, str) else None


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
