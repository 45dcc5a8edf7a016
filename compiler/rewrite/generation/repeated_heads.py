"""Pass: where there are more ranks than heads of keys, repeats keys and values over ranks, as in Megatron-LM.

Grouped attention has fewer heads of keys than of queries, and each rank needs the heads of keys that its queries read. With eight ranks and
four heads of keys, every head of keys and of values is on two ranks, and so is its cache. In the model each such head is repeated in place:

    k = x W, heads 0 1 2 3    ->    k = x W', heads 0 0 1 1 2 2 3 3       each rank has the columns of one head of W'

so the results are the same, and all shards have equal size. Keys are followed from the attention back to their weights, by the letter of
their heads in the rule of each op; where a node outside this path reads one of these values, they stay as they are.

Attention that is not fused reads a cache in one of two forms, and both may have repeated heads: `Attention` over fewer heads of keys
than of queries, and an Expand that repeats each head for its queries, which then repeats it fewer times:

    cache [.., 4, ..]  Unsqueeze, Expand to [.., 4, 4, ..], Reshape to 16 heads    ->    [.., 8, ..]  Expand to [.., 8, 2, ..]

A number of ranks that neither divides the heads of keys nor is a multiple of them is refused where it does not divide the columns either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

import numpy as np
import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.program import Typed
from partc.compiler.matching import placement_rules, sharding_rules
from partc.compiler.ops.families.neural.sharded_cache_attention import is_sharded_attention
from partc.compiler.ops.node import constant_ints
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import WHOLE
from partc.compiler.plan.rules import ShardingRule
from partc.compiler.rewrite.rewriting import Rewriting
from partc.compiler.sharding.seeding.seeds import TENSOR_PARALLEL

Size = TypeVar("Size")
Dims = dict[ir.Value, int]
"""Maps each value to the dim along which the heads of keys lie."""
_FUSED, _KEYS, _VALUES, _KEY_HEADS = "GroupQueryAttention", (1, 3), (2, 4), "kv_num_heads"
_SCALES = 11
"""The distance, among the operands, from the new keys (or values) to the scales of their cache."""
_REPEATED = "partc.repeated_heads"
"""Key of a tensor's meta: maps (dim, heads, times) to the tensor with its heads repeated."""
_COUNTS = {"MatMulNBits": "N", "RotaryEmbedding": "num_heads"}
"""Maps each op whose local form only divides an attribute to that attribute, which counts heads or columns."""
_PLAIN = ("Concat", "Gather", "Gemm", "ReduceMean", "Reshape", "Slice")
"""Ops whose rule rewrites a node, but not along a dim that only passes through; a Reshape gets another target."""


def repeat_heads(program: Typed) -> Typed:
    """Returns the program with repeated heads of keys and values, where the plan shards their projections over a multiple of the heads.

    Raises CompileError with every attention whose heads, and columns, do not fit the ranks.
    """
    if program.generation is None or program.plan.ranks == 1:
        return program
    rules = {node: rule for node, rule in sharding_rules(program)[0].items() if rule.style == "colwise"}
    if not rules:
        return program
    work = _Repeating(program)
    problems = dict.fromkeys(work.shared(rules))
    for attention in (*work.fused(), *work.unfused()):
        lines = [next((line for line in work.makers(side) if line in rules), None) for side in attention.sides]
        cut = next((line for line in lines if line is not None), None)
        ranks = 1 if cut is None else work.ranks_of(cut)
        if cut is None or attention.heads % ranks == 0:
            continue
        if ranks % attention.heads or attention.queries % ranks:
            if attention.fused is not None and any(work.columns(side) % ranks for side in attention.sides):
                problems[_uneven(program.paths[cut], attention.queries, attention.heads, ranks, rules[cut])] = None
        elif all(line is not None and work.ranks_of(line) == ranks for line in lines):
            work.repeat(attention, ranks // attention.heads)
    if problems:
        raise CompileError([*problems])
    return work.done()


def _uneven(path: str, queries: int, keys: int, ranks: int, rule: ShardingRule) -> Problem:
    legal = [n for n in range(2, queries + 1) if queries % n == 0 and (keys % n == 0 or n % keys == 0)]
    fact = f"'{path}' makes {keys} heads of keys or values, for {queries} of queries, and is cut over {ranks} ranks"
    law = (
        f"each rank has whole heads: {ranks} neither divides {keys} nor is a multiple of it"
        if ranks % keys
        else f"each rank has whole heads: {queries} of queries are not divisible by {ranks}"
    )
    help = f"use {', '.join(map(str, legal))} ranks for it, or leave it whole" if legal else "leave it whole"
    return Problem(rule.where, fact, law, help)


@dataclass(frozen=True)
class _Attention:
    """An attention: its numbers of heads of keys and of queries, and for each side (keys, values) the values that have its heads.

    A side that cannot be followed has no values; `fused`: the node, where one node has it all.
    """

    sides: Sequence[Dims]
    heads: int
    queries: int
    fused: ir.Node | None = None


class _Repeating(Rewriting[Typed]):
    def __init__(self, program: Typed) -> None:
        super().__init__(program)
        self.placed = placement_rules(program)[0]

    def ranks_of(self, cut: ir.Node) -> int:
        """Returns the number of ranks over which a style shards the weight of a node."""
        plan = self.before.plan
        group = self.placed[cut].ranks if cut in self.placed else plan.workers
        return dict(plan.axes_of(group)).get(TENSOR_PARALLEL, 1) if plan.mesh else len(group)

    def fused(self) -> Iterator[_Attention]:
        """Yields each attention that is one node with its caches as operands."""
        for node in self.before.model.graph:
            if node.op_type != _FUSED:
                continue
            sides = []
            for places in (_KEYS, _VALUES):
                new, cache = (node.inputs[k] for k in places)
                assert new is not None
                assert cache is not None
                scales = {one: 0 for one in node.inputs[places[0] + _SCALES :][:1] if one is not None}
                sides.append(self._followed({cache: 1, node.outputs[places[0]]: 1, **scales}, (new, 2), node))
            queries, keys = (node.attributes.get_int(name, 0) for name in ("num_heads", _KEY_HEADS))
            yield _Attention(sides, keys, queries, node)

    def unfused(self) -> Iterator[_Attention]:
        """Yields each attention that reads its caches from separate nodes; in the second form (Expand) each side is one of its own."""
        found: dict[ir.Node, list[_Attention | None]] = {}
        for append in self.before.model.graph:
            if append.op_type == "TensorScatter" and append.inputs[0] in self.before.caches:
                end, side = self._cached(append)
                found.setdefault(end, []).append(side)
        for end, sides in found.items():
            known = [side for side in sides if side is not None]
            if len(known) == len(sides) == (2 if end.op_type == "Attention" else 1):
                yield replace(known[0], sides=[values for side in known for values in side.sides])

    def shared(self, rules: Mapping[ir.Node, ShardingRule]) -> Iterator[Problem]:
        """Yields a problem for each projection of keys or values that has fewer heads than ranks, where ranks share the caches' entries."""
        nodes = (node for node in self.before.model.graph if is_sharded_attention(node))
        for node, k in ((node, k) for node in nodes for k in (1, 2)):
            heads, new = node.attributes.get_int(_KEY_HEADS, 0), node.inputs[k]
            line = None if new is None else new.producer()
            while line is not None and line not in rules:
                line = None if line.inputs[0] is None else line.inputs[0].producer()
            if line is None or heads % (ranks := self.ranks_of(line)) == 0:
                continue
            fact = f"'{self.before.paths[line]}' makes {heads} heads of keys or values, and is cut over {ranks} ranks"
            law = "heads of caches whose entries ranks share are not repeated: each rank has whole heads"
            legal = [n for n in range(2, heads + 1) if heads % n == 0]
            help_ = f"use {', '.join(map(str, legal))} ranks for it, or leave it whole" if legal else "leave it whole"
            yield Problem(rules[line].where, fact, law, f"{help_}, or leave out 'context'")

    def _cached(self, append: ir.Node) -> tuple[ir.Node, _Attention | None]:
        """Follows a cache's heads to the node that ends their path; returns it with one side, None where its heads cannot be repeated."""
        cache, new = append.inputs[:2]
        assert cache is not None
        assert new is not None
        assert cache.shape is not None
        value, heads, end, k = append.outputs[0], cache.shape[1], append, 0
        values = {cache: 1, value: 1}
        while len(uses := [*value.uses()]) == 1:
            end, k = uses[0]
            if k != 0 or not (end.op_type == "Slice" or (end.op_type == "Unsqueeze" and constant_ints(end, 1) == (2,))):
                break
            value = end.outputs[0]
            values[value] = 1
        queries = 0
        if end.op_type == "Attention" and k in (1, 2):
            shape = None if end.inputs[0] is None else self.values[end.inputs[0]].shape
            queries = shape[1] if shape is not None and isinstance(shape[1], int) else 0
        elif end.op_type == "Expand" and isinstance(heads, int) and (merging := _merging(end, heads)) is not None:
            values[end.outputs[0]] = 1
            end, queries = merging
        if not queries or not isinstance(heads, int):
            return end, None
        found = self._followed(values, (new, 1), end)
        return end, _Attention([found], heads, queries) if found else None

    def _followed(self, dims_of_values: Dims, new: tuple[ir.Value, int], end: ir.Node) -> Dims:
        """Adds to the values in `dims_of_values` those from the new entries back to the weights.

        Returns an empty map where they cannot be followed, or a node other than `end` reads one of them.
        """
        ends, waiting = {*dims_of_values}, [new]
        while waiting:
            value, dim = waiting.pop()
            if dims_of_values.setdefault(value, dim) != dim:
                return {}
            producer = value.producer()
            if producer is None:
                if value.const_value is None:
                    return {}
                continue
            operands = _operands(producer, value, dim)
            if not operands:
                return {}
            waiting += operands
        inside = {*self.makers(dims_of_values), end}
        alone = all(use.node in inside for value in dims_of_values for use in value.uses())
        return (
            dims_of_values
            if alone and not any(one.is_graph_output() for one in dims_of_values if one not in ends)
            else {}
        )

    def makers(self, values: Dims) -> Iterator[ir.Node]:
        """Yields the nodes that compute the values, except the fused attention itself."""
        nodes = (value.producer() for value in values)
        return (node for node in nodes if node is not None and node.op_type != _FUSED)

    def columns(self, values: Dims) -> int:
        """Returns the size of the heads' dim in the first weight; 0, which every number divides, where there is none."""
        sizes = [
            value.shape[dim] for value, dim in values.items() if value.is_initializer() and value.shape is not None
        ]
        return next((size for size in sizes[1:] if isinstance(size, int)), 0)

    def repeat(self, attention: _Attention, times: int) -> None:
        """Repeats every head of keys and of values `times` times, in place."""
        if attention.fused is not None:
            attention.fused.attributes[_KEY_HEADS] = ir.AttrInt64(_KEY_HEADS, attention.heads * times)
        for value, dim in {value: dim for side in attention.sides for value, dim in side.items()}.items():
            info, shape, node = self.values[value], value.shape, value.producer()
            fewer = 2 if node is not None and node.op_type == "Expand" else None
            if shape is not None:
                shape = value.shape = ir.Shape(_scaled(shape.dims, dim, fewer, times))
            if info.shape is not None:
                self.values[value] = replace(info, shape=_scaled(info.shape, dim, fewer, times))
            if value in self.before.caches and value.dtype is not None and shape is not None:
                value.const_value = ir.tensor(np.broadcast_to(np.zeros((), value.dtype.numpy()), shape.numpy()))
            elif value.const_value is not None:
                value.const_value = _repeated(value.const_value, dim, attention.heads, times)
            elif node is not None and node.op_type in _COUNTS and (name := _COUNTS[node.op_type]) in node.attributes:
                node.attributes[name] = ir.AttrInt64(name, node.attributes.get_int(name, 0) * times)
            elif node is not None and node.op_type == "Reshape":
                self._aim(node, dim, Fraction(times))
            elif node is not None and node.op_type == "Expand":
                self._aim(node, dim, Fraction(times))
                self._aim(node, 2, Fraction(1, times))

    def _aim(self, node: ir.Node, dim: int, times: Fraction) -> None:
        """Multiplies a dim of the target of a Reshape or an Expand by `times`, where the target gives its size."""
        found = _said(node, dim)
        if found is None:
            return
        k, place, numbers = found
        if numbers[place] <= (1 if node.op_type == "Expand" else 0):
            return
        size = int(numbers[place] * times)
        name = f"{node.outputs[0].name}.repeated"
        aimed = self.constant(self.free(f"{name}.size"), [*numbers[:place], size, *numbers[place + 1 :]])
        target = node.inputs[1]
        assert target is not None
        if k is not None:
            maker = target.producer()
            assert maker is not None
            made = self.like(target, self.free(f"{name}.target"))
            self.put(node, "Concat", [*maker.inputs[:k], aimed, *maker.inputs[k + 1 :]], [made], ".target", axis=0)
            aimed = made
        node.replace_input_with(1, aimed)


def _scaled(dims: Sequence[Size], dim: int, fewer: int | None, times: int) -> tuple[int | Size, ...]:
    """Returns the sizes with dim `dim` multiplied by `times`, and dim `fewer` divided by it."""
    numbers = {k: one for k, one in enumerate(dims) if k in (dim, fewer) and isinstance(one, int)}
    scaled = {k: one * times if k == dim else one // times for k, one in numbers.items()}
    return tuple(scaled.get(k, one) for k, one in enumerate(dims))


def _said(node: ir.Node, dim: int) -> tuple[int | None, int, tuple[int, ...]] | None:
    """Finds a dim in the target of a Reshape or an Expand; None where its numbers are not constant.

    Returns the index of the operand in the Concat that makes the target (None where the target itself is a constant), the dim's index in
    that operand, and the operand's numbers.
    """
    if (numbers := constant_ints(node, 1)) is not None:
        return None, dim, numbers
    maker = None if node.inputs[1] is None else node.inputs[1].producer()
    if maker is None or maker.op_type != "Concat":
        return None
    begin = 0
    for k, value in enumerate(maker.inputs):
        size = None if value is None or value.shape is None else value.shape[0]
        if not isinstance(size, int):
            return None
        if dim < begin + size:
            numbers = constant_ints(maker, k)
            return None if numbers is None else (k, dim - begin, numbers)
        begin += size
    return None


def _merging(expand: ir.Node, heads: int) -> tuple[ir.Node, int] | None:
    """Returns the Reshape that merges heads with an Expand's repetitions, and the merged size; None where no Reshape does."""
    times, readers = _said(expand, 2), expand.outputs[0].consumers()
    merged = _said(readers[0], 1) if len(readers) == 1 and readers[0].op_type == "Reshape" else None
    if times is None or merged is None or merged[2][merged[1]] != heads * times[2][times[1]]:
        return None
    return readers[0], merged[2][merged[1]]


def _operands(node: ir.Node, made: ir.Value, dim: int) -> list[tuple[ir.Value, int]]:
    """Returns the operands that have the heads of the node's output, with their dims; empty where their number cannot change."""
    rule = rule_of(node)
    letters = rule.outputs[0]
    letter = letters[dim] if letters else WHOLE
    if made is not node.outputs[0] or letter == WHOLE or letter in rule.replicated:
        return []
    if any(out.uses() or out.is_graph_output() for out in node.outputs[1:]):
        return []
    if node.op_type == "Reshape" and _said(node, dim) is None:
        return []
    if rule.local is not None and node.op_type not in (*_COUNTS, *_PLAIN):
        return []
    return [
        (value, spelled.index(letter))
        for value, spelled in zip(node.inputs, rule.inputs, strict=False)
        if value is not None and spelled is not None and letter in spelled
    ]


def _repeated(tensor: ir.TensorProtocol, dim: int, heads: int, times: int) -> ir.TensorProtocol:
    """Returns a tensor with each head of a dim repeated, shared by all programs of a plan; it is computed when it is written."""
    known: dict[tuple[int, int, int], ir.TensorProtocol] = getattr(tensor, "meta", {}).setdefault(_REPEATED, {})
    key, shape = (dim, heads, times), [*tensor.shape.numpy()]

    def numbers() -> ir.TensorProtocol:
        array = tensor.numpy()
        apart = array.reshape(*shape[:dim], heads, shape[dim] // heads, *shape[dim + 1 :])
        whole = np.repeat(apart, times, axis=dim).reshape(made)
        return ir.Tensor(np.ascontiguousarray(whole), dtype=tensor.dtype)

    made = [*shape[:dim], shape[dim] * times, *shape[dim + 1 :]]
    if key not in known:
        known[key] = ir.LazyTensor(numbers, dtype=tensor.dtype, shape=ir.Shape(made), name=tensor.name, cache=False)
    return known[key]
