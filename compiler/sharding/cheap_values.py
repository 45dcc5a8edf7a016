"""Values that are cheap to compute from inputs and shapes are computed in a layout from which every reader takes a slice.

A mask that one reader takes sharded and another replicated would be gathered, or exchanged, in every step. Its operands are on every rank,
so every rank computes all of it instead: a sharding that only neighbours asked for is removed where a reader on the same ranks takes the
value in another layout. It stays where an input that arrives sharded would have to be gathered for that and has more bytes than the value.
"""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.program import Placed
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import on_common_mesh
from partc.compiler.placement.computed_at_readers import following, repeatable
from partc.compiler.sharding.propagate import Propagation
from partc.runtime.artifact import format as fmt


def replicate_cheap_values(program: Placed, done: Propagation) -> None:
    """Removes derived shardings from nodes that depend on inputs and shapes alone, where a reader takes the value in other shards."""
    shapes = {node: placed.rule for node, placed in program.placement.items() if placed.rule == fmt.SHAPE_ARITHMETIC}
    among = {*repeatable(program, {}, shapes, following(program)), *shapes}
    heavy = _sharded_input_bytes(program, done, among)
    for instance in reversed(done.instances):
        choice = done.choices[instance]
        node = instance.node
        if node not in among or not choice.axes or not choice.open:
            continue
        if any(why not in program.derived_paths for why in choice.why.values()):
            continue
        size = sum(done.weigh(value)[1] for value in node.outputs)
        if heavy.get(node, 0.0) > size:
            continue
        for letter in _disputed(instance, choice, done):
            del choice.axes[letter]
            choice.why.pop(letter, None)


def _disputed(instance: NodeOnGroup, choice: NodeSharding, done: Propagation) -> list[str]:
    """The factors of a node whose shards a reader on the same ranks takes in another layout."""
    found: dict[str, None] = {}
    for k, value in enumerate(instance.node.outputs):
        letters, made = choice.rule.outputs[k], choice.output(k)
        if letters is None or made is None:
            continue
        for reader, operand in done.readers.get((value, len(instance.group)), ()):
            if reader.group != instance.group:
                continue
            wanted = done.choices[reader].input(operand)
            for dim, letter in enumerate(letters):
                if letter in choice.axes and not _slices(made, wanted, dim):
                    found[letter] = None
    return list(found)


def _slices(made: Layout, wanted: Layout | None, dim: int) -> bool:
    """Whether each shard of a dim that a reader takes lies within one that the node computes."""
    if wanted is None:
        return False
    common = on_common_mesh(made, wanted)
    if common is None:
        return False
    have, want = common[0].cuts[dim], common[1].cuts[dim]
    return want[: len(have)] == have


def _sharded_input_bytes(program: Placed, done: Propagation, among: set[ir.Node]) -> dict[ir.Node, float]:
    """Maps each node to the bytes of its sharded inputs, direct and indirect."""
    cut = {
        value: done.weigh(value)[1]
        for value in (there.value for there in done.pinned.arriving)
        if value.is_graph_input()
    }
    below: dict[ir.Value, frozenset[ir.Value]] = {value: frozenset({value}) for value in cut}
    found: dict[ir.Node, float] = {}
    for node in program.model.graph:
        if node in among:
            inputs = frozenset[ir.Value]().union(*(below.get(value, frozenset()) for value in program.reads[node]))
            if node.op_type in ("Shape", "Size"):
                inputs = frozenset()  # a size is known wherever a shard is: nothing is gathered for it
            found[node] = sum(cut[value] for value in inputs)
            below.update(dict.fromkeys(node.outputs, inputs))
    return found
