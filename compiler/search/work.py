"""The cost of a model's nodes at chosen sizes, and a rank's share of it when sharded: nodes of equal cost are priced once.

Of a node that reads weights its operands are the weights and the others. A rank that has one of r shards of the records and one of c of a
layer computes 1/(r c) of its operations, and moves 1/c of its weights and 1/(r c) of all else. A backward pass computes each product twice,
for both operands, and any other node once more.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import onnx_ir as ir
from partc.compiler.cost.machine import Processor
from partc.compiler.cost.node import PRODUCT, VIEW
from partc.compiler.cost.price import NodeCost, cost_of
from partc.compiler.cost.sizes import Operand
from partc.compiler.ir.program import Typed
from partc.compiler.ops.families.neural.experts import EXPERT_MATMUL, EXPERT_MATMUL_N_BITS, experts_of
from partc.compiler.placement.typical_sizes import TypicalSizes
from partc.compiler.proposal.flow import stored_bytes, weights_read
from partc.compiler.rewrite.context import attentions


@dataclass(frozen=True)
class Work:
    """What alike nodes cost each: `weights` and `output_elements` are the bytes of weights that one reads, and of what it makes."""

    cost: NodeCost
    weights: float
    output_elements: float

    def seconds(self, processor: Processor, records: int, shards: int) -> float:
        """Forward, of one of so many shards of the records and of the layer."""
        one, both = self.cost, records * shards
        moved = self.weights / shards + max(0.0, one.moved - self.weights) / both
        matrices = max(1, one.matrices // both) if one.matrices > 1 else 1
        laid_out = one.laid_out / (shards if one.kernel == PRODUCT and self.weights else both)
        own = replace(one, operations=one.operations / both, matrices=matrices, moved=moved, laid_out=laid_out)
        return replace(own, copied=one.copied / both).seconds(processor)

    def backward(self, processor: Processor, records: int, shards: int) -> float:
        """The seconds of its backward pass."""
        return (2 if self.cost.is_product else 1) * self.seconds(processor, records, shards)


@dataclass(frozen=True)
class Experts:
    """A layer of experts: their number, the bytes of their matrices, and of the rows that enter and leave it."""

    count: int
    weights: float
    entering: float
    leaving: float


class ModelWork:
    """The work of the nodes of a model at these sizes of its symbols; weights that are not trained are constants."""

    def __init__(self, program: Typed, sizes: Mapping[str, int], trains: bool = False) -> None:
        self.program, self.sizes, self.trains = program, TypicalSizes(program, sizes), trains
        read = weights_read(program)
        known: dict[object, Work] = {}
        self.of: dict[ir.Node, Work] = {}
        for node in program.model.graph:
            inputs, outputs = (list(map(self._operand, some)) for some in (node.inputs, node.outputs))
            weights = float(sum(map(stored_bytes, read.get(node, ()))))
            attributes = tuple(sorted((name, str(one)) for name, one in node.attributes.items()))
            key = node.domain, node.op_type, attributes, tuple(inputs), tuple(outputs), weights
            if key not in known:
                bytes = sum(one.bytes for one in outputs if one is not None)
                known[key] = Work(cost_of(node, inputs, outputs), weights, bytes)
            self.of[node] = known[key]
        self._order = {node: k for k, node in enumerate(self.of)}
        self.experts = self._experts()

    @property
    def experts_divisor(self) -> int:
        """The largest number that divides the experts of all layers; 1 without layers of experts."""
        return math.gcd(*(one.count for one in self.experts)) or 1

    @cached_property
    def keys_and_values(self) -> list[float]:
        """The bytes of the keys and of the values of each attention, before their heads are repeated."""
        return [self.bytes(side.source) for one in attentions(self.program)[0] for side in (one.keys, one.values)]

    def _experts(self) -> list[Experts]:
        layers = dict[ir.Value | None, list[ir.Node]]()
        for node in self.of:
            if node.op_type in (EXPERT_MATMUL, EXPERT_MATMUL_N_BITS):
                layers.setdefault(node.inputs[2], []).append(node)
        return [
            Experts(
                experts_of(products[0]),
                sum(self.of[node].weights for node in products),
                0.0 if products[0].inputs[0] is None else self.bytes(products[0].inputs[0]),
                self.bytes(products[-1].outputs[0]),
            )
            for products in layers.values()
        ]

    def _operand(self, value: ir.Value | None) -> Operand | None:
        info = self.program.values.get(value) if value is not None else None
        if value is None or info is None:
            return None
        sizes = None if info.shape is None else tuple(map(self.sizes.dim, info.shape))
        return Operand(sizes, info.item_bytes or 1, value.is_initializer() and not self.trains)

    def bytes(self, value: ir.Value) -> float:
        """All of a value."""
        found = self._operand(value)
        return 0.0 if found is None else found.bytes

    def counted(self, sharded: frozenset[ir.Node] = frozenset()) -> collections.Counter[tuple[Work, bool]]:
        """How many nodes have which work, and whether they are among the `sharded`; views are left out."""
        return collections.Counter((work, node in sharded) for node, work in self.nodes())

    def around(self, values: Collection[ir.Value]) -> list[tuple[ir.Node, Work]]:
        """The same of the nodes that read or make one of these values."""
        found = {node for value in values for node in (value.producer(), *(use.node for use in value.uses()))}
        own = [node for node in found if node is not None and node in self.of and self.of[node].cost.kernel != VIEW]
        return [(node, self.of[node]) for node in sorted(own, key=self._order.__getitem__)]

    def nodes(self) -> Iterator[tuple[ir.Node, Work]]:
        """The nodes that compute or move anything, in order."""
        yield from ((node, work) for node, work in self.of.items() if work.cost.kernel != VIEW)
