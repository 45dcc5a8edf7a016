"""Adapters as a rewrite of a model's products: two narrow weights are added to an unchanged weight.

    y = x W     ->     y = x W + scale * (x A) B          A [inputs, rank], B [rank, outputs]

The rewrite applies to any op that is a product with a constant weight, of floats or of few bits, so it knows no framework's layers. The
weights are A^T and B^T, as in peft and torch's Linear, under the same names.

    y [slots, ..] = x W + (x Gather(As, adapter)) Gather(Bs, adapter)          As [places + 1, inputs, rank], Bs [places + 1, rank, outputs]

In a step of a decoder each slot has its own adapter, whose place is in the input `adapter` [slots]; place 0 has zeros, for slots without an
adapter. Ranks are padded with zeros up to the largest, and Bs includes the scales. A Gather by a slot's own place reads no other slot. If
the plan has room for adapters that are loaded while it serves, the stacks are state.

Sharding W shards A and B: columns of W those of B, rows of W those of A. Both partial sums are added before they are reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from partc.compiler.frontend.huggingface.adapter_folder import LowRank
from partc.compiler.ir.computed import Box, ComputedTensor, full_box, shard_of
from partc.compiler.ir.graph import ADAPTER, add_initializer
from partc.compiler.ir.value_info import Array
from partc.compiler.rewrite.generation.node_builder import NodeBuilder
from partc.compiler.rewrite.products import products

SLOT_ADAPTER = "adapter"
"""The input [slots] of a step: the place of each slot's adapter, 0 for a slot without one."""


@dataclass(frozen=True)
class AdaptedProduct:
    """A product with a constant weight: its node and path, its number of inputs and of outputs, and their type."""

    node: ir.Node
    path: str
    weight: str
    sizes: tuple[int, int]
    dtype: ir.DataType

    @property
    def module(self) -> str:
        """The module of its weight, as peft names it; if the weight has another name, the module of its node."""
        own = self.weight.removesuffix(".weight")
        return own if own != self.weight else self.path.rpartition(".")[0] or self.path

    def is_of(self, module: str) -> bool:
        """Whether it computes in a module, or with that module's weight."""
        return self.path.startswith(f"{module}.") or self.weight == f"{module}.weight"


def adapted_products(paths: Mapping[ir.Node, str]) -> list[AdaptedProduct]:
    """Returns the products to which an adapter can add."""
    adapted = []
    for node, product in products(paths).items():
        if not product.table and product.picked is None and product.weight.dtype is not None:
            name = str(product.weight.name)
            adapted.append(AdaptedProduct(node, paths[node], name, product.sizes, product.weight.dtype))
    for node, path in paths.items():
        scales = node.inputs[2] if node.op_type == "MatMulNBits" and len(node.inputs) > 2 else None
        if scales is not None and scales.dtype is not None:
            sizes = node.attributes["K"].as_int(), node.attributes["N"].as_int()
            name = str(node.inputs[1].name if node.inputs[1] is not None else "")
            adapted.append(AdaptedProduct(node, path, f"{name.split('.weight.')[0]}.weight", sizes, scales.dtype))
    return adapted


def add_adapter(graph: ir.Graph, product: AdaptedProduct, module: str, added: LowRank) -> tuple[ir.Value, ir.Value]:
    """Adds an adapter to a product, and returns its two weights, which all products of the module share."""
    build = NodeBuilder(graph, module)
    a, b = (
        _weight(graph, f"{module}.lora_{key}.weight", as_type(tensor, product.dtype))
        for key, tensor in (("A", added.a), ("B", added.b))
    )
    a.meta[ADAPTER] = added.scale * added.rank
    narrow = build.op(
        "lora_A.MatMul", "MatMul", [product.node.inputs[0], build.op("lora_A.Transpose", "Transpose", [a], perm=[1, 0])]
    )
    if added.scale != 1:
        scale = ir.tensor(np.array(added.scale, product.dtype.numpy()), name=f"{module}.lora_A.scale")
        narrow = build.op("lora_A.Mul", "Mul", [narrow, _weight(graph, f"{module}.lora_A.scale", scale)])
    wide = build.op("lora_B.MatMul", "MatMul", [narrow, build.op("lora_B.Transpose", "Transpose", [b], perm=[1, 0])])
    _add(build, product.node, wide, module)
    return a, b


def add_slot_adapters(
    graph: ir.Graph, paths: Mapping[ir.Node, str], stacks: Mapping[str, Mapping[str, ir.TensorProtocol]], rows: int
) -> tuple[str, frozenset[str]]:
    """Adds the adapters of all slots to a decoder's products.

    Returns the name of the input with each slot's adapter, empty without adapters, and the names of the stacks.
    """
    if not stacks:
        return "", frozenset()
    known = adapted_products(paths)
    places = ir.Value(name=SLOT_ADAPTER, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([rows]))
    for module, tensors in stacks.items():
        for product in [product for product in known if product.is_of(module)]:
            _add_of_slots(graph, product, module, tensors, places)
    if places.uses():  # of an encoder alone there may be no product
        graph.inputs.append(places)
    names = (f"{module}.lora_{key}.stack" for module in stacks for key in "AB")
    return SLOT_ADAPTER, frozenset(names)


def _add_of_slots(
    graph: ir.Graph, product: AdaptedProduct, module: str, stacks: Mapping[str, ir.TensorProtocol], places: ir.Value
) -> None:
    build, value = NodeBuilder(graph, module), product.node.inputs[0]
    merged = None if value is None else _merging(value)
    value = value if merged is None else merged.inputs[0]
    for key in "AB":
        stack = _weight(graph, f"{module}.lora_{key}.stack", stacks[key])
        rows = build.op(f"lora_{key}.Gather", "Gather", [stack, places], axis=0)
        value = build.op(f"lora_{key}.MatMul", "MatMul", [value, rows])
    if merged is not None:
        value = build.op("lora_B.Reshape", "Reshape", [value, build.constant("rows", [-1, product.sizes[1]])])
    assert value is not None
    _add(build, product.node, value, module)


def stacked(
    adapters: Sequence[LowRank | None], sizes: tuple[int, int], dtype: ir.DataType, module: str, least: int
) -> dict[str, ir.TensorProtocol]:
    """Returns the stacks A [places + 1, inputs, rank] and B [places + 1, rank, outputs] of a module, computed when they are read.

    `least`: the least rank of the stacks.
    """
    rank = max([least, *(one.rank for one in adapters if one is not None)])
    shapes = {"A": (len(adapters) + 1, sizes[0], rank), "B": (len(adapters) + 1, rank, sizes[1])}

    def tensor(key: str) -> ir.TensorProtocol:
        def compute(box: Box) -> Array:
            padded = np.zeros((box[0].stop - box[0].start, *shapes[key][1:]), dtype.numpy())
            for at, place in enumerate(range(box[0].start, box[0].stop)):
                one = adapters[place - 1] if place else None
                if one is not None:
                    part = factor(one, key)
                    padded[at, : part.shape[0], : part.shape[1]] = part
            return padded[:, *box[1:]]

        return ComputedTensor(compute, dtype, shapes[key], f"{module}.lora_{key}.stack")

    return {key: tensor(key) for key in "AB"}


def factor(added: LowRank, key: str) -> Array:
    """Returns the factor A [inputs, rank], or B [rank, outputs] multiplied by the scale."""
    tensor = added.a if key == "A" else added.b
    turned = shard_of(tensor, full_box(tensor.shape.numpy())).astype(np.float32).T
    return turned if key == "A" else np.asarray(turned * np.float32(added.scale))


def _merging(value: ir.Value) -> ir.Node | None:
    """Returns the Reshape that merges all dims of a value except the last; None if there is none."""
    node = value.producer()
    target = node.inputs[1] if node is not None and node.op_type == "Reshape" else None
    if target is None or target.const_value is None:
        return None
    numbers = target.const_value.numpy().reshape(-1)
    return node if len(numbers) == 2 and numbers[0] == -1 else None


def _add(build: NodeBuilder, node: ir.Node, more: ir.Value, module: str) -> None:
    """Adds `more` to the result of a product, whose readers then read the sum."""
    out = node.outputs[0]
    total = build.op("lora_B.Add", "Add", [out, more])
    total.type, total.shape, more.type = out.type, out.shape, out.type
    readers = [(use.node, use.idx) for use in out.uses() if use.node is not total.producer()]
    outputs = [k for k, value in enumerate(build.graph.outputs) if value is out]
    for reader, k in readers:
        reader.replace_input_with(k, total)
    for k in outputs:
        build.graph.outputs[k] = total
        out.name, total.name = f"{out.name}.base", out.name
    for new in build.waiting:
        new.meta[ADAPTER] = module
    build.put(after=node)


def _weight(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Returns the initializer of a name, which is made of the tensor if it does not exist."""
    if name not in graph.initializers:
        add_initializer(graph, name, tensor)
    return graph.initializers[name]


def as_type(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.TensorProtocol:
    """Returns the tensor in another type."""
    if tensor.dtype == dtype:
        return tensor
    return ComputedTensor(
        lambda box: shard_of(tensor, box).astype(dtype.numpy()), dtype, tensor.shape.numpy(), str(tensor.name)
    )
