"""Which values hold records of a batch that is run as microbatches, one after the other, and along which dim.

The law is that of a cut along the batch, `ops/rule.py`, in time instead of over ranks. A value is

    a dim      the records of the microbatch along it
    EVERY      the same in every microbatch: weights, and what is made of them alone
    OWN        of the microbatch's own size: `Shape(x)`, and what is computed of it; good for sizes alone

A node takes records along one factor, which all its operands that have it take records of, and passes them to its outputs. What reduces
over this factor, needs all of it, or needs to know which records of the batch it has, cannot be done by microbatches.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Mapping
from typing import TypeAlias

import onnx_ir as ir
from onnx_shape_inference import SYM_DATA_KEY
from partc.compiler.dims.reading import read
from partc.compiler.ir.program import Program
from partc.compiler.ops.local import Local
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import WHOLE, Rule

SIZES: Mapping[str, Collection[int]] = {
    "Reshape": (1,),
    "Expand": (1,),
    "Tile": (1,),
    "Resize": (2, 3),
    "Upsample": (1,),
    "AffineGrid": (1,),
    "ConstantOfShape": (0,),
}
"""By op the operands that say how large the output is, and nothing else."""


class Lies(enum.Enum):
    """How a value without records lies."""

    EVERY = "every"
    OWN = "own"


EVERY, OWN = Lies.EVERY, Lies.OWN
State: TypeAlias = Lies | int


class Records:
    """What `records_of_batch` finds: `states` by value, `EVERY` where there is none; `refused`: by node why it cannot be done."""

    def __init__(self, program: Program, given: Mapping[ir.Value, int], count: int) -> None:
        self.program, self.count = program, count
        self.states: dict[ir.Value, State] = dict(given)
        self.refused: dict[ir.Node, str] = {}
        first = (value.shape[dim] for value, dim in given.items() if value.shape is not None)
        self.batch = {str(dim.value) for dim in first if isinstance(dim, ir.SymbolicDim)}
        for node in program.model.graph:
            if why := self._node(node):
                self.refused[node] = why

    def state(self, value: ir.Value | None) -> State:
        """How a value lies."""
        return EVERY if value is None else self.states.get(value, EVERY)

    def _node(self, node: ir.Node) -> str:
        """Finds how the outputs lie; gives why the node cannot be done by microbatches, or ''."""
        if any(self.state(value) is not EVERY for value in self.program.around[node]):
            return "has a body that reads records of the batch"
        places = [(k, state) for k, value in enumerate(node.inputs) if (state := self.state(value)) is not EVERY]
        if not places:
            return ""
        at = {k: state for k, state in places if isinstance(state, int)}
        own = [k for k, state in places if state is OWN]
        if not at:
            return self._sizes(node, own)
        if any(k not in SIZES.get(node.op_type, ()) for k in own):
            return "computes with the number of records in the batch"
        return self._passed(node, rule_of(node), at)

    def _sizes(self, node: ir.Node, own: Collection[int]) -> str:
        """What is made of sizes: other sizes, or values whose records are all alike."""
        if node.op_type in SIZES and all(k in SIZES[node.op_type] for k in own):
            return self._alike(node)
        if node.op_type == "Range":
            return "numbers the records of the batch"
        for out in node.outputs:
            if out.shape is None or len(out.shape) > 1:
                return "computes with the number of records in the batch"
            self.states[out] = EVERY if self._holds_no_batch(out) else OWN
        return ""

    def _alike(self, node: ir.Node) -> str:
        """A value of the size of the batch made of nothing that has its records: they must be alike."""
        out, source = node.outputs[0], node.inputs[0]
        if out.shape is None or node.op_type not in ("ConstantOfShape", "Expand", "Tile"):
            return "makes records of the batch of something else"
        dims = [k for k, dim in enumerate(out.shape.dims) if self._speaks(dim)]
        if len(dims) > 1:
            return "makes a value whose size depends on the batch in two dims"
        if not dims:
            return ""
        if node.op_type != "ConstantOfShape":
            have = () if source is None or source.shape is None else source.shape.dims
            k = dims[0] - len(out.shape) + len(have)
            if source is None or source.shape is None or (k >= 0 and have[k] != 1):
                return "makes records of the batch of something else"
        self.states[out] = dims[0]
        return ""

    def _passed(self, node: ir.Node, rule: Rule, at: Mapping[int, int]) -> str:
        """Passes records on along the one factor that names them."""
        letters = {_letter(rule.inputs[k] if k < len(rule.inputs) else None, dim) for k, dim in at.items()}
        letter = letters.pop()
        if letters or letter == WHOLE or letter in rule.replicated or letter in rule.units:
            return "may bring records of the batch together"
        for k, operand in enumerate(rule.inputs):
            value = node.inputs[k] if k < len(node.inputs) else None
            have = (operand or "").count(letter)
            if value is not None and have and (k not in at or have > 1):
                return f"takes '{value.name}', which is the same for all microbatches, by records of the batch"
        if rule.local is not None and _asks_where(node, rule, letter, self.count):
            return "needs to know which records of the batch it has"
        for out, made in zip(node.outputs, rule.outputs, strict=False):
            if made is None and out.name:
                return "may bring records of the batch together"
            if made is not None and letter in made:
                self.states[out] = made.index(letter)
            elif rule.reduce.get(letter) == "":  # Shape, Size
                self.states[out] = EVERY if self._holds_no_batch(out) else OWN
            elif out.name:
                how = {"sum": "a sum", "max": "the largest", "min": "the smallest"}.get(rule.reduce.get(letter, ""), "")
                return f"takes {how or 'something'} over the records of the batch"
        return ""

    def _holds_no_batch(self, value: ir.Value) -> bool:
        """Whether what a value of shape arithmetic holds is known, and says nothing of the batch: `Shape(x)[1]` is `seq`."""
        held = value.metadata_props.get(SYM_DATA_KEY)
        entries = [read(str(one)) for one in json.loads(held)] if held is not None else [None]
        return bool(self.batch) and all(
            one is not None and self.batch.isdisjoint(map(str, one.free_symbols)) for one in entries
        )

    def _speaks(self, dim: int | ir.SymbolicDim) -> bool:
        return isinstance(dim, ir.SymbolicDim) and (
            dim.value is None or not self.batch.isdisjoint(map(str, dim.free_symbols()))
        )


class _Asked(dict[str, int]):
    """The number of a shard by factor; `asked` once a rule has looked one up."""

    asked = False

    def get(self, key: str, default: int = 0) -> int:  # type: ignore[override]
        self.asked = self.asked or key in self
        return super().get(key, default)


def _asks_where(node: ir.Node, rule: Rule, letter: str, count: int) -> bool:
    """Whether the op's local form, cut along a factor, depends on which of its shards is meant."""
    assert rule.local is not None
    numbers = _Asked({letter: 0})
    names = ["" if value is None else value.name or "" for value in node.inputs]
    made = [value.name or "" for value in node.outputs]
    unknown = dict.fromkeys([*names, *made])
    rule.local(Local(node, rule, {letter: count}, numbers, names, made, unknown, unknown))
    return numbers.asked


def _letter(letters: str | None, dim: int) -> str:
    return WHOLE if letters is None or dim >= len(letters) else letters[dim]
