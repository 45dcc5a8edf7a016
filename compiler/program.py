"""The program that passes take and give: the model, the plan, and what each pass found out.

    load -> Program -> shapes -> place -> partition -> Program

A pass never changes what an earlier one wrote; it fills its own fields. Decisions are bound to the graph's objects, not to
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import onnx_ir as ir
from partc.compiler.load.onnx_file import bodies

if TYPE_CHECKING:
    from partc.compiler.declare import Declared
    from partc.compiler.facts import Facts
    from partc.compiler.plan.rules import Plan

Dim = int | str
Shape = tuple[Dim, ...]


@dataclass(frozen=True)
class SymbolInfo:
    """A dynamic dim of the inputs: what is promised of it, and where (`plan.yaml:3`, or the input that names it)."""

    facts: Facts
    where: str
    unique: bool = False


@dataclass(frozen=True)
class ValueInfo:
    """What is known of a value: its type as onnxruntime writes it, and its global shape; None where only a run tells."""

    type: str
    shape: Shape | None
    item_bytes: int | None

    @property
    def is_tensor(self) -> bool:
        return self.type.startswith("tensor(")


@dataclass(frozen=True)
class Placed:
    """Where a node runs, and the rule that decided: `plan.yaml:8 'conv1'`; `follows`: wherever it is read, as constants do."""

    ranks: tuple[int, ...]
    rule: str
    follows: bool = False


@dataclass(frozen=True)
class Transfer:
    """One message of a step: `value` goes from rank `source` to rank `target` because of `cause`."""

    tag: int
    value: ir.Value
    source: int
    target: int
    cause: str


@dataclass(frozen=True)
class Send:
    """In a rank's program: the transfer leaves here."""

    transfer: Transfer


@dataclass(frozen=True)
class Recv:
    """In a rank's program: the transfer's receive is posted here."""

    transfer: Transfer


Step = ir.Node | Send | Recv


@dataclass(frozen=True)
class Part:
    """One rank's program: its steps in order, the inputs that it reads, its weights, the outputs delivered to it."""

    rank: int
    steps: tuple[Step, ...]
    inputs: tuple[ir.Value, ...]
    weights: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]


@dataclass(frozen=True)
class Program:
    """A model on its way to ranks; `name` is its file's, `paths` gives every node of the main graph its dotted path."""

    name: str
    model: ir.Model
    plan: Plan
    declared: Declared
    paths: Mapping[ir.Node, str]
    symbols: Mapping[str, SymbolInfo] = field(default_factory=dict)
    values: Mapping[ir.Value, ValueInfo] = field(default_factory=dict)
    placement: Mapping[ir.Node, Placed] = field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()
    parts: tuple[Part, ...] = ()
    warnings: tuple[str, ...] = ()

    @cached_property
    def reads(self) -> dict[ir.Node, tuple[ir.Value, ...]]:
        """Per node of the main graph, the distinct values that it reads, those captured by its bodies included."""
        return {node: tuple(dict.fromkeys(_read_by(node))) for node in self.model.graph}


def _read_by(node: ir.Node) -> list[ir.Value]:
    values = [value for value in node.inputs if value is not None]
    for body in bodies(node):
        values += captured(body)
    return values


def captured(body: ir.Graph) -> list[ir.Value]:
    """Values that a body reads from outside of itself, in order of their first use."""
    inside: set[ir.Value] = {*body.inputs, *body.initializers.values()}
    outside: list[ir.Value] = []
    for node in body:
        outside += [value for value in _read_by(node) if value not in inside]
        inside.update(node.outputs)
    return outside + [value for value in body.outputs if value not in inside]
