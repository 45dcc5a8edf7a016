"""Gives values that an export computes from one position for all sequences the batch as an additional first dim, one position each.

    bias [1, heads, tokens, entries] = Unsqueeze(Transpose(Gather(table, bucket(Range(0, entries) - steps)), (2, 0, 1)), [0])
    ->  bias [slots, heads, tokens, entries] from steps [slots, tokens, 1] in place of [tokens, 1]: Transpose by (0, 3, 1, 2), no Unsqueeze

The dim is added from the steps on, through ops that compute element by element, look up rows, or move dims, up to the Unsqueeze or the
Reshape that would have added a first dim of 1: the batch takes its place. It also ends where another operand has the batch already:

    [tokens, size] + [batch, tokens, size]
    Expand([tokens], [batch, tokens])
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir
from partc.compiler.ops.registry import entry_of
from partc.compiler.rewrite.generation.node_builder import NodeBuilder

_AS_ONE = ("Cast", "Expand", "Identity", "Unsqueeze")
"""Ops that keep the first dim of their first operand where it is 1."""


def constant_of(value: ir.Value | None) -> list[int] | None:
    """Returns the integers of a constant; None for any other value."""
    if value is None or value.const_value is None:
        return None
    return [int(one) for one in value.const_value.numpy().reshape(-1)]


@dataclass
class Lifting:
    """Gives one value the batch as a new first dim. `edits` are changes of the graph, made after all are known to be possible.

    `batched`: the values whose first dim is the batch. `lifted`: maps each lifted value to its number of dims before. `sizes`: shapes of
    lifted values, which have one element more.
    """

    build: NodeBuilder
    ranks: Mapping[ir.Value, int]
    batched: Container[ir.Value]
    lifted: dict[ir.Value, int] = field(default_factory=dict)
    sizes: set[ir.Value] = field(default_factory=set)
    edits: list[Callable[[], None]] = field(default_factory=list)

    def of(self, value: ir.Value, rank: int) -> bool:
        """Follows a value of `rank` dims through its readers; returns whether every reader can take it with one more dim."""
        self.lifted[value] = rank
        waiting = [value]
        while waiting:
            for node in dict.fromkeys(node for node, _ in waiting.pop().uses()):
                made = node.outputs[0]
                if made in self.lifted or made in self.sizes:
                    continue
                reached = self._through(node)
                if reached is None:
                    return False
                waiting += reached
        return True

    def _through(self, node: ir.Node) -> list[ir.Value] | None:
        """Returns the outputs of a reader that get one more dim, too; None where the reader has no form for that."""
        output, data = node.outputs[0], node.inputs[0]
        if output.is_graph_output():
            return None
        if (entry := entry_of(node)) is not None and entry.is_elementwise:
            operands = [value for value in node.inputs if value is not None]
            rank = max(self.lifted.get(value, self.ranks.get(value, 99)) for value in operands)
            lower = [value for value in operands if value in self.lifted and self.lifted[value] < rank]
            if lower:  # [tokens, size] next to [batch, tokens, size]
                others = [value for value in operands if value not in lower and self.ranks.get(value, 99) == rank]
                meets = all(self.lifted[value] == rank - 1 for value in lower)
                return [] if meets and all(value in self.batched for value in others) else None
            self.lifted[output] = rank
        elif node.op_type == "Shape" and not node.attributes.get_int("start", 0) and "end" not in node.attributes:
            self.sizes.add(output)
        elif node.op_type == "Expand" and node.inputs[1] in self.sizes and data not in self.sizes:
            self.lifted[output] = self.ranks.get(output, 99)
        elif node.op_type == "Expand" and data in self.lifted and node.inputs[1] not in self.sizes:
            repeats = output in self.batched and self.ranks.get(output) == self.lifted[data] + 1
            return [] if repeats else None  # [tokens] for each sequence of a batch
        elif node.op_type == "Gather" and data not in self.lifted and not node.attributes.get_int("axis", 0):
            assert node.inputs[1] is not None
            self.lifted[output] = self.lifted[node.inputs[1]] + self.ranks.get(data, 99) - 1  # type: ignore[arg-type]
        elif node.op_type == "Transpose" and data in self.lifted:
            order = node.attributes.get_ints("perm") or [*range(self.lifted[data])][::-1]
            self.lifted[output] = self.lifted[data]
            perm = ir.AttrInt64s("perm", [0, *(dim + 1 for dim in order)])
            self.edits.append(lambda: node.attributes.add(perm))
        elif node.op_type == "Unsqueeze" and data in self.lifted and (axes := constant_of(node.inputs[1])) is not None:
            rank = self.lifted[data] + len(axes)
            axes = [axis % rank for axis in axes]
            if 0 in axes:
                self.edits.append(lambda: self._absorb(node, [axis for axis in axes if axis]))
                return []
            self.lifted[output] = rank
            self.edits.append(lambda: self._axes(node, [axis + 1 for axis in axes]))
        elif node.op_type == "Reshape" and data in self.lifted and _first_is_one(node.inputs[1]):
            self.edits.append(lambda: _copy_first(node, self.build))
            return []
        else:
            return None
        return [output]

    def _axes(self, node: ir.Node, axes: list[int]) -> None:
        word = f"lifted_{'_'.join(map(str, axes))}"
        node.replace_input_with(1, self.build.constant(word, axes))

    def _absorb(self, node: ir.Node, left: list[int]) -> None:
        """Puts the batch in place of the first dim of 1 that an Unsqueeze adds; the axes `left` are still added."""
        data = node.inputs[0]
        assert data is not None
        if left:
            self._axes(node, left)
        else:
            ir.convenience.replace_all_uses_with(node.outputs[0], data)
        once(data if not left else node.outputs[0], self.build)


def _copy_first(node: ir.Node, build: NodeBuilder) -> None:
    """Makes a Reshape copy its operand's first dim, the batch, where it made a dim of 1: a 0 in the target copies."""
    if (sizes := constant_of(node.inputs[1])) is not None:
        shape = build.constant(f"shape_{'_'.join(map(str, [0, *sizes[1:]]))}", [0, *sizes[1:]])
    else:
        maker = node.inputs[1].producer()  # type: ignore[union-attr]
        rest = maker.inputs[1:]  # type: ignore[union-attr]
        shape = build.op("shape_of_each", "Concat", [build.constant("same", [0]), *rest], axis=0)
    build.put(before=node)
    node.replace_input_with(1, shape)
    node.attributes.pop("allowzero", None)
    once(node.outputs[0], build)


def _first_is_one(shape: ir.Value | None) -> bool:
    """Whether the first number of a target shape is 1; a constant shape must also have no 0."""
    if (sizes := constant_of(shape)) is not None:
        return sizes[:1] == [1] and 0 not in sizes
    maker = None if shape is None else shape.producer()
    return maker is not None and maker.op_type == "Concat" and constant_of(maker.inputs[0]) == [1]


def once(value: ir.Value, build: NodeBuilder) -> None:
    """Removes each Tile that repeats a first dim of 1 for each sequence, and changes Reshapes to 1: `value` has the batch there."""
    waiting, followed = [value], {value}
    while waiting:
        for node, k in [*waiting.pop().uses()]:
            if k == 0 and node.op_type == "Tile" and _repeats_first(node):
                ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])  # type: ignore[arg-type]
            elif node.outputs[0] not in followed and _keeps_first(node, k, followed):
                followed.update(node.outputs)
                if node.op_type == "Reshape":
                    _copy_first(node, build)  # it continues there
                else:
                    waiting += node.outputs


def _keeps_first(node: ir.Node, k: int, followed: set[ir.Value]) -> bool:
    """Whether a node whose operand `k` has the batch instead of a first dim of 1 has it in its output, too, or would reshape it to 1."""
    others = (value for value in node.inputs if value not in followed and value is not None)
    match node.op_type:
        case "Concat":
            return node.attributes["axis"].as_int() != 0 and not [*others]
        case "Reshape":
            return k == 0 and _first_is_one(node.inputs[1])
        case "Split":
            return k == 0 and node.attributes.get_int("axis", 0) != 0
        case "Slice":
            axes = constant_of(node.inputs[3]) if len(node.inputs) > 3 else None
            return k == 0 and axes is not None and 0 not in axes
        case "Transpose":
            order = node.attributes.get_ints("perm")
            return order is not None and order[0] == 0
        case kind if kind in _AS_ONE:
            return k == 0 and 0 not in (constant_of(node.inputs[-1]) or ())
    entry = entry_of(node)
    return entry is not None and entry.is_elementwise and all(value.is_initializer() for value in others)


def _repeats_first(node: ir.Node) -> bool:
    """Whether a Tile repeats along the first dim alone."""
    counts = node.inputs[1].producer() if node.inputs[1] is not None else None
    return (
        counts is not None and counts.op_type == "Concat" and all(constant_of(one) == [1] for one in counts.inputs[1:])
    )
