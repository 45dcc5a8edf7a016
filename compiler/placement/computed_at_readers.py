"""Chooses values that are computed on every group that reads them, instead of sent: masks, tables of positions.

The law. A node may be repeated where no line of the plan names it, its op costs a bounded number of operations an element and draws
nothing at random, and its operands are inputs of the model, constants, shape arithmetic or results of other such nodes, none of them
a parameter that is learned. Where a line names a module around it, and it reads no large weight, it runs there if it is read there,
and on others that read it. It is repeated if several groups need it that have no rank in common, and

- what a group needs for that and does not read in any case has no more bytes than the result; inputs of the model count an eighth
  of theirs, since a rank reads them and none sends them, and what has at most 1 KiB counts nothing; and
- all nodes that make it from there do at most `MOST_WORK` operations for each element of the result.

Else it is computed once and sent, and what is made of it may be repeated from there. Bytes are those at typical sizes of the symbols.

    attention_mask [batch, seq] -> Cast -> Unsqueeze -> Sub -> Mul [batch, 1, 1, seq] -> Expand [batch, 1, seq, seq]
    read on 3 groups: each reads 8*batch*seq bytes of the input, and none is sent 4*batch*seq^2
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.autodiff.reach import trained_values
from partc.compiler.ir.program import Annotated, Typed
from partc.compiler.ir.sharded import Group
from partc.compiler.ops.registry import entry_of
from partc.compiler.placement.infer import Inferred
from partc.compiler.placement.typical_sizes import TypicalSizes
from partc.runtime.artifact import format as fmt

MOST_WORK = 64
_READ, _SMALL = 8, 1024

_COUNTED = ("MatMul", "ScatterND", "ConstantOfShape", "EyeLike", "OneHot", "Range")
"""Ops besides those that compute element by element, move or reduce whose work `_work` counts."""


def _is_cheap(node: ir.Node) -> bool:
    """Whether a node of the standard costs a bounded number of operations an element, and draws nothing."""
    entry = entry_of(node)
    if node.domain not in ("", "ai.onnx") or entry is None or entry.draws:
        return False
    return entry.is_elementwise or entry.moves or entry.work.kernel == "reduction" or entry.op_type in _COUNTED


def is_large_weight(value: ir.Value) -> bool:
    """Whether a value is a weight of more than 1 KiB, or one turned: the rows of a table are looked up where the plan puts the table."""
    while (node := value.producer()) is not None and node.op_type in ("Transpose", "Cast", "Identity", "Reshape"):
        if node.inputs[0] is None:
            return False
        value = node.inputs[0]
    floats = value.dtype is not None and value.dtype.is_floating_point()
    return floats and value.const_value is not None and value.is_initializer() and value.const_value.nbytes > _SMALL


def repeatable(
    program: Typed, fixed: Mapping[ir.Node, object], floating: Mapping[ir.Node, str], said: Collection[ir.Node]
) -> list[ir.Node]:
    """The nodes that may be repeated, in order; `fixed` ones are placed, `floating` ones run wherever they are read anyway.

    Of those that are `said` to the model's own annotations say that they run wherever they are read.
    """
    learned = trained_values(program.reads, program.training) if program.training else set()
    graph = program.model.graph
    ready = {value for value in (*graph.inputs, *graph.initializers.values()) if value not in learned}
    nodes_found = []
    for node, values in program.reads.items():
        if node in floating:
            ready.update(out for out in node.outputs if out not in learned)
        elif node in said or (
            node not in fixed
            and ready.issuperset(values)
            and _is_cheap(node)
            and all(program.values[out].shape is not None and program.values[out].is_tensor for out in node.outputs)
            and not (program.training is not None and program.training.adds(program.paths[node]))
        ):
            nodes_found.append(node)
            ready.update(node.outputs)
    return nodes_found


def worth_repeating(
    program: Annotated, candidates: list[ir.Node], inferred: Inferred, floating: Mapping[ir.Node, str]
) -> list[ir.Node]:
    """The nodes, among candidates whose readers are placed, that the law repeats on every group that reads them."""
    weighed = _Weighed(program, candidates, inferred, floating)
    said = following(program)
    return [node for node in candidates if weighed.repeats(node) or node in said]


def following(program: Annotated) -> set[ir.Node]:
    """The nodes that run wherever they are read without being weighed: those of which the model's own annotations say so, and of a decoder
    what is made of positions alone: masks, angles. Of these a step would send as much as there are tokens before.
    """
    found = {node for node, one in program.followed.items() if one.follows}
    return found | ({*_of_positions(program)} if program.generation is not None else set())


def _of_positions(program: Annotated) -> Iterator[ir.Node]:
    """The nodes of a decoder that read positions, sizes and constants, but neither a cache nor a large weight."""
    assert program.generation is not None
    graph, record = program.model.graph, program.generation.record
    ready = {value for value in graph.inputs if value.name in (record.position, record.count)}
    ready |= {
        value for value in graph.initializers.values() if value not in program.caches and not is_large_weight(value)
    }
    for node, values in program.reads.items():
        sizes = node.op_type in ("Shape", "Size")
        if (sizes and node.domain in ("", "ai.onnx")) or (ready.issuperset(values) and _is_cheap(node)):
            ready.update(node.outputs)
            if not sizes:
                yield node


@dataclass(frozen=True)
class _Way:
    """How a group makes a value that it repeats: from which values and by which nodes; `spent`: more work than is allowed."""

    roots: frozenset[ir.Value]
    nodes: frozenset[ir.Node] = frozenset()
    spent: bool = False


class _Weighed:
    def __init__(
        self, program: Annotated, candidates: list[ir.Node], inferred: Inferred, floating: Mapping[ir.Node, str]
    ) -> None:
        self.program, self.inferred, self.floating = program, inferred, floating
        self.sizes = TypicalSizes(program)
        self.present: dict[ir.Value, set[Group]] = {}
        among = set(candidates)
        for node in program.model.graph:
            if node not in among:
                for value in program.reads[node]:
                    self.present.setdefault(value, set()).update(inferred.groups[node])
        self.ways: dict[ir.Value, _Way] = {}
        self.work: dict[ir.Node, int] = {}

    def repeats(self, node: ir.Node) -> bool:
        """Whether a node is repeated; its producers have been asked before."""
        groups = self.inferred.groups[node]
        ways = [self.ways.get(value) or _Way(frozenset({value})) for value in self.program.reads[node]]
        roots = frozenset().union(*(way.roots for way in ways))
        nodes = frozenset({node}).union(*(way.nodes for way in ways))
        result = sum(self.sizes.bytes_of(out) for out in node.outputs)
        elements = sum(self.sizes.elements(out) for out in node.outputs)
        self.work[node] = _work(self.sizes, node)
        work = sum(self.work[each] for each in nodes)
        new = sum(
            self._bytes(root) for root in roots for group in groups[1:] if group not in self.present.get(root, ())
        )
        apart = len({rank for group in groups for rank in group}) == sum(map(len, groups))
        spent = work > MOST_WORK * max(1, elements) or any(way.spent for way in ways)
        worth = apart and not spent and new <= result * (len(groups) - 1)
        for out in node.outputs:
            # work that is too much counts on: the value behind it is sent, not one half way
            self.ways[out] = _Way(roots, nodes) if worth else _Way(frozenset({out}), spent=spent)
        return worth and len(groups) > 1

    def _bytes(self, root: ir.Value) -> int:
        producer = root.producer()
        if producer is not None and self.floating.get(producer) == fmt.SHAPE_ARITHMETIC:
            return 0  # it is made where it is read: at most a shape is sent
        size = self.sizes.bytes_of(root)
        if producer is None and size <= _SMALL:
            return 0
        return size // _READ if root.is_graph_input() else size


def _work(sizes: TypicalSizes, node: ir.Node) -> int:
    """Operations of a node: those of all factors of a product, else its largest tensor's elements, each as often as its windows read it."""
    if node.op_type == "MatMul":
        return math.prod(sizes.sizes(node).values())
    entry = entry_of(node)
    made_alone = entry is not None and (entry.moves or entry.op_type in _COUNTED[2:])
    windows = node.attributes.get_ints("kernel_shape") or (1,)
    read = () if made_alone else sizes.program.reads[node]
    return math.prod([*windows]) * max(map(sizes.elements, (*read, *node.outputs)), default=0)
