"""Quantizes the weights that a plan names: of products, `MatMul` and `Gemm`, and tables of lookups, `Gather`.

    x -> MatMul(weight [K, N]) -> y     ->     x -> MatMulNBits(blocks [N, K / block, bytes], scales [N, K / block]) -> y
    ids -> Gather(table [V, K]) -> y    ->     ids -> GatherBlockQuantized(blocks [V, K * bits / 8], scales [V, K / block]) -> y

    ids -> GatherND(weights [E, N, K]) -> MatMul(x) -> y     ->     ExpertMatMulNBits(x, blocks, ids, scales): the pass `routed` writes it

The source is rewritten before any pass, so a plan shards and places the new nodes under the paths of the old ones, and `partc verify`
compares with the quantized model on one rank. The numbers are quantized later: onnxruntime's own quantizer makes the blocks of a shard when
the shard is written, from the mapped weight. A block depends only on its own elements, so ranks have the same bits in any layout.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.source import Source
from partc.compiler.ir.blocked import BLOCKED, EXPERT_BLOCKS, BlockedWeight, ExpertBlocks
from partc.compiler.ir.computed import Box, ComputedTensor, shard_of
from partc.compiler.ir.graph import add_initializer, name_of
from partc.compiler.ir.program import Loaded
from partc.compiler.ir.value_info import Array
from partc.compiler.matching import matched_nodes, nothing_matched
from partc.compiler.ops.registry import CONTRIB
from partc.compiler.plan.precision import BLOCKS, Blocks, QuantizeRule
from partc.compiler.plan.rules import Plan
from partc.compiler.rewrite.products import Product, products
from partc.compiler.rounded_caches import round_caches
from partc.compiler.start import start
from partc.runtime.errors import PartcError
from partc.runtime.spellings import first_free
from partc.runtime.units import first_of

_MOST_ELEMENTS = 1 << 22
"""The most elements that are quantized at once."""
_QUANTIZED = "partc.quantized"
"""Key of the `meta` of a tensor: maps kinds of quantization to its blocks and scales, which all programs of a plan share."""


def quantized(source: Source, plan: Plan | None, name: str) -> Source:
    """Returns the source with the plan's products quantized; the source itself if it names none, or they are already quantized.

    Raises CompileError with each pattern that matches no product, and each weight that cannot be divided into blocks.
    """
    if source.quantized:
        return source
    source = _with_warning(source, name)
    rules = () if plan is None else plan.quantize
    if plan is not None and plan.generate is not None and plan.generate.cache is not None:
        source = round_caches(source, plan.generate, name)
    if not rules and (not _blocked_weights(source.model.graph) or (plan is not None and plan.train is not None)):
        return source
    program = start(replace(source, model=source.model.clone()), plan and replace(plan, generate=None), name)
    chosen, problems = _chosen(program, rules)
    for node, (rule, product) in chosen.items():
        problems += _misfits(program.paths[node], product, rule)
    if problems:
        raise CompileError(problems)
    ordered = dict[tuple[ir.Value, bytes], ir.Value]()
    for node, (rule, product) in chosen.items():
        assert rule.blocks is not None
        if product.picked is None:
            _replace(program.model.graph, node, product, rule.blocks, ordered)
        else:
            _keep_blocks(product, rule.blocks, rule.where)
    program.model.opset_imports.setdefault(CONTRIB, 1)
    _drop(program.model.graph, {product.weight for _, product in chosen.values() if product.picked is None})
    return replace(source, model=program.model, quantized=True)


def _with_warning(source: Source, name: str) -> Source:
    """Returns the source with a warning of its own quantized products that compute in float32."""
    nodes = [node for node in source.model.graph if node.op_type == "MatMulNBits"]
    slow = [node for node in nodes if not node.attributes.get_int("accuracy_level", 0)]
    if not slow:
        return source
    fact = f"{name}: {len(slow)} of {len(nodes)} MatMulNBits have no accuracy_level, so they compute in float32, which takes longer"
    help_ = "quantize with accuracy_level 4, or let the plan's `quantize` do it"
    declared = replace(source.declared, warnings=(*source.declared.warnings, f"{fact}\n  help: {help_}"))
    return replace(source, declared=declared)


def reordered(source: Source) -> bool:
    """Whether some weights in blocks of the model's files have their rows in another order."""
    return any(blocked.order is not None for blocked in _blocked_weights(source.model.graph))


def _blocked_weights(graph: ir.Graph) -> list[BlockedWeight]:
    """Returns the weights that are in blocks in the model's files."""
    tensors = (value.const_value for value in graph.initializers.values())
    return [tensor.meta[BLOCKED] for tensor in tensors if tensor is not None and BLOCKED in tensor.meta]


def _chosen(
    program: Loaded, rules: Iterable[QuantizeRule]
) -> tuple[dict[ir.Node, tuple[QuantizeRule, Product]], list[Problem]]:
    """Maps each product to the last rule that matches it, without those that keep their weights; a weight in blocks keeps its blocks."""
    known, problems = products(program.paths), list[Problem]()
    own = {
        node: QuantizeRule("", Blocks.model_validate({"bits": blocked.bits, "block": blocked.block}), "")
        for node, product in known.items()
        if (blocked := product.blocked)
    }
    decided: dict[ir.Node, QuantizeRule] = {**own}
    for rule in rules:
        nodes = matched_nodes(program, rule.pattern)
        hit = [node for node in nodes if node in known]
        decided.update(dict.fromkeys((node for node in hit if rule.blocks or node not in own), rule))
        if not nodes:
            problems.append(nothing_matched(program, rule.pattern, rule.where))
        elif not hit:
            ops = first_of(sorted({node.op_type for node in nodes}))
            fact = f"'{rule.pattern}' matches no product with a constant weight and no table, but {ops}"
            law = "MatMul, Gemm and Gather with a float weight of two dims, and products with experts' weights, are quantized"
            paths = first_of([f"'{program.paths[node]}'" for node in known])
            problems.append(Problem(rule.where, fact, law, f"those of the model are {paths}" if paths else ""))
    return {node: (rule, known[node]) for node, rule in decided.items() if rule.blocks is not None}, problems


def _misfits(path: str, product: Product, rule: QuantizeRule) -> Iterator[Problem]:
    assert rule.blocks is not None
    size, block = product.sizes[0], rule.blocks.block
    if (blocked := product.blocked) is not None:
        if (blocked.bits, blocked.block) != (rule.blocks.bits, block):
            usual = f"{{bits: {blocked.bits}, block: {blocked.block}}}"
            fact = f"'{path}': '{product.weight.name}' is quantized already, {usual}"
            law = "a weight is quantized once, from floats"
            yield Problem(rule.where, fact, law, f"write {usual} for it, or no rule that matches it")
    elif size % block:
        fitting = [other for other in BLOCKS if size % other == 0]
        fact = f"'{path}': the {size} rows of '{product.weight.name}' cannot be divided into blocks of {block}"
        help_ = f"write block: {fitting[-1]}" if fitting else ""
        keep = f"'{path}': null behind it keeps the weight as it is"
        yield Problem(
            rule.where,
            fact,
            "a block has the same number of elements in each column",
            f"{help_}; {keep}" if help_ else keep,
        )


def _replace(
    graph: ir.Graph, node: ir.Node, product: Product, how: Blocks, ordered: dict[tuple[ir.Value, bytes], ir.Value]
) -> None:
    """Replaces a node by the quantized op; a bias is added after it, as `Linear` exports it.

    `ordered`: maps an input and an order of columns to the reordered input, which products share.
    """
    size, columns = product.sizes
    blocks, scales = (_operand(graph, product, how, kind) for kind in ("rows" if product.table else "blocks", "scales"))
    attributes: dict[str, Any] = {"bits": how.bits, "block_size": how.block}
    if product.table:
        op_type, operands = "GatherBlockQuantized", [blocks, node.inputs[1], scales]
        attributes |= {"gather_axis": 0, "quantize_axis": 1}
    else:
        op_type, operands = "MatMulNBits", [_in_order(graph, node, product.blocked, ordered), blocks, scales]
        if product.blocked is not None and not product.blocked.symmetric:
            operands.append(_operand(graph, product, how, "points"))
        attributes |= {"K": size, "N": columns}
        if how.accuracy_level:
            attributes["accuracy_level"] = how.accuracy_level
    out, options = node.outputs[0], ir.convenience.convert_attributes(attributes)
    new = [ir.Node(CONTRIB, op_type, operands, options, name=node.name)]
    if product.bias is not None:
        product_of = new[0].outputs[0]
        product_of.name, product_of.type, product_of.shape = f"{out.name}.product", out.type, out.shape
        new.append(ir.Node("", "Add", [product_of, product.bias], name=f"{node.name}.bias"))
    for one in new:
        one.metadata_props.update(node.metadata_props)
        one.meta.update(node.meta)
    result = new[-1].outputs[0]
    result.name, result.type, result.shape = out.name, out.type, out.shape
    graph.insert_before(node, new)
    ir.convenience.replace_all_uses_with(out, result, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _keep_blocks(product: Product, how: Blocks, where: str) -> None:
    """Stores the blocks of experts' weights, which the product of rows by expert reads (`rewrite/routed.py`)."""
    tensor = product.weight.const_value
    assert tensor is not None
    made = _tensors(tensor, product, how, name_of(product.weight))
    attributes = {"bits": how.bits, "block_size": how.block, "accuracy_level": how.accuracy_level}
    product.weight.meta[EXPERT_BLOCKS] = ExpertBlocks(
        made["blocks"], made["scales"], attributes, product.transposed, where
    )


def _in_order(
    graph: ir.Graph, node: ir.Node, blocked: BlockedWeight | None, ordered: dict[tuple[ir.Value, bytes], ir.Value]
) -> ir.Value:
    """Returns the first input of a product, with its columns in the order of the weight's blocks."""
    source = node.inputs[0]
    assert source is not None
    if blocked is None or blocked.order is None:
        return source
    key = source, blocked.order.tobytes()
    if key not in ordered:
        name = first_free(f"{blocked.name}.order", graph.initializers.__contains__)
        order = add_initializer(graph, name, ir.Tensor(blocked.order.astype(np.int64), name=name))
        gather = ir.Node("", "Gather", [source, order], [ir.AttrInt64("axis", -1)], name=f"{node.name}.order")
        gather.metadata_props.update(node.metadata_props)
        gather.meta.update(node.meta)
        value = gather.outputs[0]
        value.name, value.type, value.shape = f"{node.outputs[0].name}.ordered", source.type, source.shape
        graph.insert_before(node, gather)
        ordered[key] = value
    return ordered[key]


def _operand(graph: ir.Graph, product: Product, how: Blocks, kind: str) -> ir.Value:
    """Returns the blocks or the scales of a weight, as an initializer that all nodes with the same blocks share."""
    weight = product.weight
    assert weight.const_value is not None
    tensor = _tensors(weight.const_value, product, how, name_of(weight))[kind]
    shared = next((value for value in graph.initializers.values() if value.const_value is tensor), None)
    if shared is not None:
        return shared
    name = first_free(f"{name_of(weight)}.{how.bits}bits.{kind}", graph.initializers.__contains__)
    return add_initializer(graph, name, tensor)


def _tensors(tensor: ir.TensorProtocol, product: Product, how: Blocks, name: str) -> Mapping[str, ComputedTensor]:
    """Returns the blocks and the scales of a weight."""
    known: dict[tuple[int, int, bool], Mapping[str, ComputedTensor]] = tensor.meta.setdefault(_QUANTIZED, {})
    key = (how.bits, how.block, product.transposed)
    if product.blocked is not None and key not in known:
        known[key] = product.blocked.operands(tensor.dtype)
    if key not in known:
        size, columns = product.sizes
        shape = columns, size // how.block
        row, block, kind = size * how.bits // 8, how.block * how.bits // 8, ir.DataType.UINT8
        if product.picked is not None:
            experts = _experts(product, how)
            stack = len(experts), *shape
            known[key] = {
                "blocks": ComputedTensor(
                    lambda box: np.stack([one.blocks(box[1:]) for one in experts[box[0]]]), kind, (*stack, block), name
                ),
                "scales": ComputedTensor(
                    lambda box: np.stack([one.scales(box[1:]) for one in experts[box[0]]]), tensor.dtype, stack, name
                ),
            }
            return known[key]
        work = _Quantizer(tensor, product.transposed, how, name)
        blocks = ComputedTensor(work.blocks, kind, (*shape, block), f"{name}.blocks")
        known[key] = {
            "blocks": blocks,
            "rows": ComputedTensor(work.rows, kind, (columns, row), f"{name}.rows", rows_of=blocks),
            "scales": ComputedTensor(work.scales, tensor.dtype, shape, f"{name}.scales"),
        }
    return known[key]


def _experts(product: Product, how: Blocks) -> list[_Quantizer]:
    """Returns the quantizer of each matrix of a weight: several for a stack."""
    tensor = product.weight.const_value
    assert tensor is not None
    name, shape = name_of(product.weight), tensor.shape.numpy()
    if product.picked is None:
        return [_Quantizer(tensor, product.transposed, how, name)]

    def matrix(k: int) -> ComputedTensor:
        return ComputedTensor(
            lambda box: shard_of(tensor, (slice(k, k + 1), *box))[0], tensor.dtype, shape[1:], f"{name}[{k}]"
        )

    return [_Quantizer(matrix(k), product.transposed, how, f"{name}[{k}]") for k in range(shape[0])]


@dataclass(frozen=True)
class _Quantizer:
    """Makes the blocks and scales of any shard of a weight."""

    tensor: ir.TensorProtocol
    transposed: bool
    how: Blocks
    name: str

    def blocks(self, box: Box) -> Array:
        """Returns the packed elements in a box of [columns, blocks, bytes]."""
        found = [blocks for _, blocks, _ in self.runs(box[0], box[1])]
        return np.concatenate(found)[:, :, box[2]]

    def rows(self, box: Box) -> Array:
        """Returns the packed elements in a box of a table's [rows, bytes]; the box has whole blocks."""
        block = self.how.block * self.how.bits // 8
        first, last = box[1].start // block, -(-box[1].stop // block)
        found = [blocks.reshape(len(blocks), -1) for _, blocks, _ in self.runs(box[0], slice(first, last))]
        return np.concatenate(found)[:, box[1].start - first * block : box[1].stop - first * block]

    def scales(self, box: Box) -> Array:
        """Returns the scales in a box of [columns, blocks]."""
        return np.concatenate([scales for _, _, scales in self.runs(box[0], box[1])])

    def runs(self, columns: slice, blocks: slice) -> Iterator[tuple[Array, Array, Array]]:
        """Yields the weight [K, columns], its blocks and its scales, for a limited number of columns at a time."""
        rows = slice(blocks.start * self.how.block, blocks.stop * self.how.block)
        some = max(1, _MOST_ELEMENTS // max(1, rows.stop - rows.start))
        for begin in range(columns.start, columns.stop, some):
            chosen = slice(begin, min(begin + some, columns.stop))
            weight = shard_of(self.tensor, (chosen, rows) if self.transposed else (rows, chosen))
            numbers = np.ascontiguousarray(weight.T if self.transposed else weight)
            if not np.isfinite(numbers).all():
                raise PartcError(
                    f"'{self.name}' has NaN or infinite elements, which no block of {self.how.bits} bits has"
                )
            yield numbers, *_quantize(numbers, self.how)


def _quantize(weight: Array, how: Blocks) -> tuple[Array, Array]:
    """Returns the blocks [N, K / block, bytes] and scales [N, K / block] of a weight [K, N]."""
    packed, scales, _ = _onnxruntime_quantizer(how.bits, how.block).qbits_block_quant(weight)
    return packed, scales.reshape(packed.shape[:2])


@functools.cache
def _onnxruntime_quantizer(bits: int, block: int) -> Any:
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    from onnxruntime.quantization.matmul_nbits_quantizer import (
        DefaultWeightOnlyQuantConfig,
        DefaultWeightOnlyQuantizer,
    )

    root.handlers[:] = handlers  # the import configures logging of the whole process
    root.setLevel(level)
    config = DefaultWeightOnlyQuantConfig(block_size=block, is_symmetric=True, bits=bits)
    return DefaultWeightOnlyQuantizer(config)


def errors(source: Source, plan: Plan, name: str) -> dict[str, float]:
    """Maps the path of each product that `plan` quantizes to the relative error of its weight, a ratio of root mean squares."""
    program = start(replace(source, model=source.model.clone()), replace(plan, generate=None), name)
    chosen, _ = _chosen(program, plan.quantize)
    return {
        program.paths[node]: _relative_error(product, rule.blocks)
        for node, (rule, product) in chosen.items()
        if rule.blocks is not None and product.blocked is None
    }


def _dequantized(blocks: Array, scales: Array, bits: int) -> Array:
    """Returns the weight [N, K] from its blocks and scales."""
    numbers = blocks.astype(np.int16)
    if bits == 4:
        numbers = np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(*blocks.shape[:2], -1)
    centred = (numbers - (1 << (bits - 1))).astype(scales.dtype)
    return (centred * scales[..., None]).reshape(len(blocks), -1)


def _relative_error(product: Product, how: Blocks) -> float:
    """Returns the root mean square of a quantized weight's error, relative to that of the weight itself."""
    size, columns = product.sizes
    wrong, total = 0.0, 0.0
    for work in _experts(product, how):
        for weight, blocks, scales in work.runs(slice(0, columns), slice(0, size // how.block)):
            exact = weight.T.astype(np.float64)
            wrong += float(((_dequantized(blocks, scales, how.bits) - exact) ** 2).sum())
            total += float((exact**2).sum())
    return float(np.sqrt(wrong / total)) if total else 0.0


def _drop(graph: ir.Graph, weights: set[ir.Value]) -> None:
    """Removes weights that are no longer read, with the Transposes between them and their products."""
    for node in reversed(list(graph)):
        out = node.outputs[0]
        if node.op_type == "Transpose" and node.inputs[0] in weights and not (out.uses() or out.is_graph_output()):
            graph.remove(node, safe=True)
    for weight in weights:
        if not weight.uses() and not weight.is_graph_output():
            del graph.initializers[name_of(weight)]
            if weight in graph.inputs:
                graph.inputs.remove(weight)
