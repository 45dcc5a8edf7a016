"""Which values hold records of a batch that is run as microbatches, one after the other, and along which dim.

The law is that of a cut along the batch, `ops/rule.py`, in time instead of over ranks. A value holds the records of the microbatch along
a dim, or is the same in every microbatch: weights, the shape of the batch, and what is made of them. A node takes records along one
factor, which all its operands that have it must be cut along, and passes them to its outputs. What reduces over this factor, needs
all of it, or needs to know which of the records it has, cannot be done by microbatches.

A dim may hold records apart from each other (`analysis/record_dims.py`). A Reshape makes such dims and takes them apart, and what goes
by rows may stand between.

A value that is the same in every microbatch, but is read along the factor of the records, is cut where all its records are alike, as
those of an Expand, a ConstantOfShape or a constant of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import onnx_ir as ir
from partc.compiler.analysis.record_dims import KEEPS_ORDER, Rows, dim_of, reshaped, together
from partc.compiler.dims.facts import Facts
from partc.compiler.ir.program import Program
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import WHOLE, Local, Rule

TYPE_ALONE: Mapping[str, int] = {"CastLike": 1}
"""By op the operand of which only the type is read."""
_ROW = "r"
_LARGEST = 1 << 20
"""The most elements of a constant whose records are compared."""


class Records:
    """What is found of a program whose inputs `given` hold records.

    `rows`: by value how it holds records; `cut`: the nodes that take or make some, each with its rule and the factor of these; `refused`:
    by node why it cannot be done by microbatches.
    """

    def __init__(self, program: Program, given: Mapping[ir.Value, int], count: int) -> None:
        self.program, self.count = program, count
        self.known: Mapping[str, Facts] = {name: info.facts for name, info in program.symbols.items()}
        self.alike: dict[ir.Value, Rows] = {}
        """Values that are cut although they are the same in every microbatch, for their records are alike; and further inputs."""
        self.given = {value: Rows(dim, dim_of(value, dim)) for value, dim in given.items()}
        while not self._walk():
            pass

    def _walk(self) -> bool:
        """Goes through the graph; False once it finds another value that has to be cut."""
        self.rows = {**self.given, **{value: one for value, one in self.alike.items() if value.producer() is None}}
        self.cut: dict[ir.Node, tuple[Rule, str]] = {}
        self.refused: dict[ir.Node, str] = {}
        before = len(self.alike)
        for node in self.program.model.graph:
            if why := self._node(node):
                self.refused[node] = why
            if len(self.alike) > before:
                return False
        return True

    def _node(self, node: ir.Node) -> str:
        """Finds how the outputs lie; gives why the node cannot be done by microbatches, or ''."""
        if any(value in self.rows for value in self.program.around[node]):
            return "has a body that reads records of the batch"
        at = {k: self.rows[value] for k, value in enumerate(node.inputs) if value in self.rows}
        at = {k: rows for k, rows in at.items() if TYPE_ALONE.get(node.op_type) != k}
        if at:
            return self._passed(node, at)
        made = next(((k, self.alike[out]) for k, out in enumerate(node.outputs) if out in self.alike), None)
        if made is not None:
            k, rows = made
            if node.op_type == "Constant":
                self.rows[node.outputs[0]] = rows
                return ""
            rule = rule_of(node)
            self._made(node, rule, _letter(rule.outputs[k], rows.dim), rows)
        return ""

    def _passed(self, node: ir.Node, at: Mapping[int, Rows]) -> str:
        """Passes records on along the one factor that names them."""
        first = next(iter(at.values()))
        if node.op_type in KEEPS_ORDER and 0 in at:
            return self._reshaped(node, first)
        rule = rule_of(node)
        letters = {_letter(rule.inputs[k] if k < len(rule.inputs) else None, rows.dim) for k, rows in at.items()}
        letter = letters.pop()
        if letters or letter == WHOLE or letter in rule.replicated or letter in rule.units:
            return "may bring records of the batch together"
        if together(at.values()) is None or not passes(node, rule, letter, first):
            return "may bring records of the batch together"
        for k, operand in enumerate(rule.inputs):
            value = node.inputs[k] if k < len(node.inputs) else None
            have = (operand or "").count(letter)
            if value is None or not have or (k in at and have == 1):
                continue
            rows = replace(first, dim=(operand or "").index(letter))
            if k in at or first.apart != 1 or not self._cut_alike(value, rows):
                return f"takes '{value.name}', which is the same for all microbatches, by records of the batch"
            return ""
        if self._asks_where(node, rule, letter):
            return "needs to know which records of the batch it has"
        return self._made(node, rule, letter, first)

    def _made(self, node: ir.Node, rule: Rule, letter: str, rows: Rows) -> str:
        """The outputs of a node that is cut along a factor."""
        for out, made in zip(node.outputs, rule.outputs, strict=False):
            if made is None and out.name:
                return "may bring records of the batch together"
            if made is not None and letter in made:
                self.rows[out] = replace(rows, dim=made.index(letter))
            elif out.name and rule.reduce.get(letter) != "":  # as of Shape and Size, whose local form gives the whole
                how = {"sum": "a sum", "max": "the largest", "min": "the smallest"}.get(rule.reduce.get(letter, ""), "")
                return f"takes {how or 'something'} over the records of the batch"
        self.cut[node] = rule, letter
        return ""

    def _reshaped(self, node: ir.Node, rows: Rows) -> str:
        """What changes how elements are grouped into dims, and moves none."""
        source, out = node.inputs[0], node.outputs[0]
        made = reshaped(rows, source, out, self.known)
        if made is None or source is None or source.shape is None or out.shape is None:
            return "may bring records of the batch together"
        self.rows[out] = made
        inputs, outputs = (
            "".join(_ROW if at == one else WHOLE for at in range(len(side)))
            for side, one in ((source.shape, rows.dim), (out.shape, made.dim))
        )
        rule = rule_of(node)
        self.cut[node] = replace(rule, inputs=(inputs, *(WHOLE for _ in rule.inputs[1:])), outputs=(outputs,)), _ROW
        return ""

    def _asks_where(self, node: ir.Node, rule: Rule, letter: str) -> bool:
        """Whether the op's local form, cut along a factor, depends on which of its shards is meant."""
        if rule.local is None:
            return False
        numbers = _Asked({letter: 0})
        rule.local(local_form(self.program, node, rule, {letter: self.count}, numbers))
        return numbers.asked

    def _cut_alike(self, value: ir.Value, rows: Rows) -> bool:
        """Has a value cut that is the same in every microbatch; False where its records are not alike."""
        found = dict(self._alike(value, rows))
        if not found or None in found:
            return False
        self.alike.update({one: how for one, how in found.items() if one is not None and how is not None})
        return True

    def _alike(self, value: ir.Value, rows: Rows) -> Iterator[tuple[ir.Value | None, Rows | None]]:
        """The values that are cut if this one is; None among them where that cannot be."""
        node, fails = value.producer(), (None, None)
        if value in self.rows or value in self.alike or dim_of(value, rows.dim) != rows.size:
            yield fails if self.rows.get(value, self.alike.get(value)) != rows else (value, rows)
            return
        yield value, rows
        if node is None:
            if not value.is_graph_input() and not _same_records(value, rows.dim, self.count):
                yield fails
            return
        if node.op_type == "Constant":
            yield fails if not _same_records(value, rows.dim, self.count) else (value, rows)
            return
        rule = rule_of(node)
        letter = _letter(rule.outputs[value.index() or 0] if rule.outputs else None, rows.dim)
        if letter == WHOLE or letter in rule.replicated or letter in rule.units or self._asks_where(node, rule, letter):
            yield fails
            return
        for operand, letters in zip(node.inputs, rule.inputs, strict=False):
            if operand is not None and letters and letter in letters:
                yield from self._alike(operand, replace(rows, dim=letters.index(letter)))


def local_form(
    program: Program, node: ir.Node, rule: Rule, shards: Mapping[str, int], numbers: Mapping[str, int]
) -> Local:
    """What a rule's local form is asked with: a node in a microbatch, one of so many shards."""
    inputs = ["" if value is None else value.name or "" for value in node.inputs]
    outputs = [value.name or "" for value in node.outputs]
    shapes = {
        value.name or "": program.values[value].shape
        for value in (*node.inputs, *node.outputs)
        if value is not None and value in program.values
    }
    smaller = dict(shapes)
    for value, letters in (
        *zip(node.inputs, rule.inputs, strict=False),
        *zip(node.outputs, rule.outputs, strict=False),
    ):
        shape = None if value is None else shapes.get(value.name or "")
        if value is not None and shape is not None and letters is not None:
            smaller[value.name or ""] = tuple(
                dim // shards.get(letter, 1) if isinstance(dim, int) else dim
                for dim, letter in zip(shape, letters, strict=False)
            )
    return Local(node, rule, shards, numbers, inputs, outputs, shapes, smaller)


class _Asked(dict[str, int]):
    """The number of a shard by factor; `asked` once a rule has looked one up."""

    asked = False

    def get(self, key: str, default: int = 0) -> int:  # type: ignore[override]
        self.asked = self.asked or key in self
        return super().get(key, default)


def _same_records(value: ir.Value, dim: int, count: int) -> bool:
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > _LARGEST or dim >= len(tensor.shape):
        return False
    array = tensor.numpy()
    size = array.shape[dim] // count
    first = array.take(range(size), dim)
    return all((array.take(range(k * size, (k + 1) * size), dim) == first).all() for k in range(1, count))


def passes(node: ir.Node, rule: Rule, letter: str, rows: Rows) -> bool:
    """Whether records along a factor stand in the outputs as in the inputs: apart from each other only where all dims are of one size."""
    if rows.apart == 1:
        return True
    operands = (*zip(node.inputs, rule.inputs, strict=False), *zip(node.outputs, rule.outputs, strict=False))
    sizes = {dim_of(value, letters.index(letter)) for value, letters in operands if letters and letter in letters}
    return len(sizes) == 1 and None not in sizes


def _letter(letters: str | None, dim: int) -> str:
    return WHOLE if letters is None or dim >= len(letters) else letters[dim]
