"""The sharding rule of one node: a letter per dim, so that sharding one dim shards all with the same letter; and the node's form on one
rank.

A factor is a letter that names dims which correspond across an op. MatMul is `mk,kn->mn`: sharding m shards the first input and the output;
sharding k, which no output has, leaves every rank a term of a sum: the output is Partial. A dim without a letter (`.`) is replicated: its
operand broadcasts there, or the op needs all of it.

If the plain node would be wrong on local shards, a rule's `local` emits other nodes. The programs of all ranks of a group have the same
list of nodes; a value that differs by rank (an offset, a zero or one) must be a constant, never another node, so that equal programs stay
equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.value_info import Shape

WHOLE = "."
OWN = "partc.nn"
"""The domain of ops that no runtime knows: `local` rewrites their nodes on every rank, even if nothing is sharded."""


@dataclass(frozen=True)
class Rule:
    """The ways in which one node may be sharded.

    `inputs`, `outputs`: for each operand one letter a dim, `.` for a dim that stays replicated; None for an operand that is absent or not a
    tensor. `reduce`: maps each contracted factor (one that an output lacks) to the reduction that remains after sharding it: sum, max or
    min, or "" if `local` leaves the result on every rank. A factor of inputs alone that is not in `reduce` cannot be sharded, nor can one
    in `replicated`. `linear`: inputs that may be Partial(sum), which makes the outputs Partial: "" none, "each" any one of `partial` while
    the others are replicated (a product), "joint" all of them together (a sum); None: as in the op's entry. `partial`: the inputs to which
    `linear` applies, by index; None: all tensors. `units`: maps factors to a number that their shards must divide besides the dims
    themselves: heads, groups, blocks. `looked_up`: the factor of a table's rows, to which the ids in another operand refer. It may share
    axes with factors that no operand has together with it: rows are then pulled from the ranks that have them, and the output is not a sum.
    `dealt`: the factor of rows that are with the owners of the looked-up table: it has the axes of these and of the ids. `joined`: a factor
    and the two whose axes it has, those of the first of them major. `served`: whether
    the table is the first input, and other ranks serve its rows, so that it is not sharded. `apart`: inputs that differ on every rank, and
    so do their cotangents. `local`: rewrites the node for a rank if the plain node would be wrong on local shards; None: as in the op's
    entry.
    """

    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    reduce: Mapping[str, str] = field(default_factory=dict)
    replicated: frozenset[str] = frozenset()
    linear: str | None = None
    partial: tuple[int, ...] | None = None
    local: Callable[[Local], None] | None = None
    units: Mapping[str, int] = field(default_factory=dict)
    apart: frozenset[int] = frozenset()
    looked_up: str = ""
    dealt: str = ""
    joined: tuple[str, ...] = ()
    served: bool = False

    @functools.cached_property
    def factors(self) -> tuple[str, ...]:
        """Letters that may be sharded, in order of their first appearance: the axes of an integer strategy's device matrix."""
        seen = dict.fromkeys(letter for operand in (*self.inputs, *self.outputs) if operand for letter in operand)
        made = {letter for operand in self.outputs if operand for letter in operand}
        return tuple(
            letter
            for letter in seen
            if letter != WHOLE and letter not in self.replicated and (letter in made or letter in self.reduce)
        )

    @functools.cached_property
    def ids(self) -> tuple[str, ...]:
        """The factors that may share axes with looked-up rows: those of operands without the rows."""
        row = self.looked_up
        beside = {letter for operand in self.inputs if operand and row in operand for letter in operand} | {self.dealt}
        return tuple(letter for letter in self.factors if letter not in beside) if row else ()

    @functools.cached_property
    def partial_inputs(self) -> tuple[tuple[int, ...], ...]:
        """Every set of inputs that may be Partial(sum) together while the others are replicated; the outputs are then Partial(sum)."""
        tensors = tuple(k for k, letters in enumerate(self.inputs) if letters is not None)
        partial = tensors if self.partial is None else tuple(k for k in tensors if k in self.partial)
        if not self.linear or not partial:
            return ()
        return (partial,) if self.linear == "joint" else tuple((k,) for k in partial)


@dataclass
class Local:
    """The arguments and results of a rule's `local`: one node on one rank, its operands as local shards, and the nodes emitted in its
    place.

    `shards`: maps factors to their number of shards (absent: 1); `shard`: to the index of this rank's. `inputs`: the names of the local
    operands ("" for an absent one), `outputs`: the names to make. `global_shapes`/`local_shapes`: the known shapes of operands and outputs.
    `nodes` and `constants`: the emitted ones; `itself`: the last emitted node that is the op itself.
    """

    node: ir.Node
    rule: Rule
    shards: Mapping[str, int]
    shard: Mapping[str, int]
    inputs: Sequence[str]
    outputs: Sequence[str]
    global_shapes: Mapping[str, Shape | None]
    local_shapes: Mapping[str, Shape | None]
    nodes: list[ir.Node] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    itself: ir.Node | None = None
    pieces: int = 1
    """The number of pieces into which a batch is dealt over all ranks; each part of the batch has a share of every piece."""

    def num_shards(self, factor: str) -> int:
        """The number of shards of a factor."""
        return self.shards.get(factor, 1)

    def index(self, factor: str) -> int:
        """The index of this rank's shard of a factor."""
        return self.shard.get(factor, 0)

    def constant(self, name: str, array: np.ndarray) -> str:
        """Adds a constant of this rank; `name` is its role (`offset`), and becomes `<first output>.offset`."""
        full = f"{self.outputs[0]}.{name}"
        self.constants[full] = array
        return full

    def same(self, inputs: Sequence[str] | None = None, outputs: Sequence[str] | None = None, **changed: Any) -> None:
        """Emits the node itself, with other operands or attributes if given; an attribute of None is left out."""
        attributes = {name: attr for name, attr in self.node.attributes.items() if name not in changed}
        extra = ir.convenience.convert_attributes({name: value for name, value in changed.items() if value is not None})
        self._append(
            self.node.op_type,
            inputs or self.inputs,
            outputs or self.outputs,
            [*attributes.values(), *extra],
            self.node.domain,
        )
        self.itself = self.nodes[-1]

    def emit(self, op_type: str, inputs: Sequence[str], word: str, **attributes: Any) -> str:
        """Emits an op with one internal output, which is named `<first output>.<word>`."""
        return self.give(op_type, inputs, f"{self.outputs[0]}.{word}", **attributes)

    def give(self, op_type: str, inputs: Sequence[str], *outputs: str, domain: str = "", **attributes: Any) -> str:
        """Emits an op whose outputs have these names, which may be among the node's outputs; returns the first."""
        self._append(op_type, inputs, outputs, ir.convenience.convert_attributes(attributes), domain)
        return outputs[0]

    def _append(
        self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Sequence[ir.Attr], domain: str
    ) -> None:
        self.nodes.append(
            ir.Node(
                domain,
                op_type,
                inputs=[ir.Value(name=name) if name else None for name in inputs],
                attributes=attributes,
                outputs=[ir.Value(name=name) for name in outputs],
            )
        )


RuleOf = Callable[[ir.Node], Rule | None]
