"""The local form of a node in a microbatch: the form that its rule gives for one of `count` shards of the batch, which follow in time."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from partc.compiler.ir.graph import operand_name, operands_of
from partc.compiler.ir.program import Typed
from partc.compiler.ops.rule import Local, Rule


class _ShardNumbers(dict[str, int]):
    """A mapping from factor to shard number; `was_read` is set once a rule has read a number."""

    was_read = False

    def get(self, key: str, default: int = 0) -> int:  # type: ignore[override]
        self.was_read = self.was_read or key in self
        return super().get(key, default)


def local_in_time(program: Typed, node: ir.Node, rule: Rule, letter: str, count: int) -> Local:
    """Returns the nodes that replace a node sharded along the factor `letter` into `count` shards."""
    return _local(program, node, rule, {letter: count}, {letter: 0})


def depends_on_shard(program: Typed, node: ir.Node, rule: Rule, letter: str, count: int) -> bool:
    """Whether the local form of a node sharded along a factor depends on the index of its shard."""
    numbers = _ShardNumbers({letter: 0})
    _local(program, node, rule, {letter: count}, numbers)
    return numbers.was_read


def _local(program: Typed, node: ir.Node, rule: Rule, shards: Mapping[str, int], numbers: Mapping[str, int]) -> Local:
    inputs, outputs = map(list, operands_of(node))
    operands = (*zip(node.inputs, rule.inputs, strict=False), *zip(node.outputs, rule.outputs, strict=False))
    values = [value for value in (*node.inputs, *node.outputs) if value is not None and value in program.values]
    shapes = {operand_name(value): program.values[value].shape for value in values}
    smaller = dict(shapes)
    for value, letters in operands:
        shape = None if value is None else shapes.get(operand_name(value))
        if value is not None and shape is not None and letters is not None:
            dims = zip(shape, letters, strict=False)
            smaller[operand_name(value)] = tuple(
                dim // shards.get(one, 1) if isinstance(dim, int) else dim for dim, one in dims
            )
    made = Local(node, rule, shards, numbers, inputs, outputs, shapes, smaller)
    if rule.local is not None:
        rule.local(made)
    return made
