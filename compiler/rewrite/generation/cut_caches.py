"""Attention over caches whose entries a mesh axis shards: each rank attends its own entries, and two reductions merge the results.

    scores = q kT of a rank's entries, masked          m = ReduceMax(scores)           AllReduce(max)
    e = exp(scores - m)    l = ReduceSum(e)    o = e v                                 AllReduce(sum) of o and l together
    y = o / l

Entries are dealt out to the p ranks in blocks of a chunk: of a sequence of any length each rank has as many entries as the others, up to a
block. An entry's block is position / chunk, and its rank is block modulo p. A rank's entries of a sequence are the first ones of its
shard: it reads no others.

    chunk 4, p = 2        rank 0:  0 1 2 3 | 8 9 10 11 | .. | spare        rank 1:  4 5 6 7 | 12 13 14 15 | .. | spare

The new entries of a step are of one block, as the positions of chunks are multiples of a chunk. One rank appends them there. All others
append them to the spare block at the end of their shard, which no attention reads: an append in place that differs by its index alone.

In the global view a cache has p * rows entries, and all is in plain ops, of which propagation makes partial results. A mask adds a finite
number: of a rank without valid entries all exp are 0, since m is that of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import NoReturn

import numpy as np
import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import CONTEXT, SPARE_ENTRIES, ContextMark
from partc.compiler.ir.program import Loaded
from partc.compiler.ops.families.indexing.scatter import ROW
from partc.compiler.plan.context import ContextRules
from partc.compiler.plan.generate import GenerateRules
from partc.compiler.rewrite.generation.fused_attention import CachedOperand, Sight, operand_of_cache
from partc.compiler.rewrite.generation.node_builder import NodeBuilder
from partc.compiler.rewrite.generation.positions import Positions
from partc.runtime.artifact.generation import room_for_entries
from partc.runtime.units import count

_HEADS = "leave out 'context'; an axis tp shards the heads of caches"
_HIDDEN = -1e30
"""What is added to the score of a hidden entry: finite, so that no difference of two scores is NaN."""


@dataclass(frozen=True)
class CutEntries:
    """How the entries of a cache of `length` are dealt out to `ranks` along a mesh axis, in blocks of `chunk`.

    `low`: whether products are computed in 16 bits; `why`: the plan's line; `name`: that of the model.
    """

    context: ContextRules
    ranks: int
    length: int
    chunk: int
    low: bool
    why: str
    name: str

    @property
    def rows(self) -> int:
        """The entries in the shard of a rank, with the spare block."""
        return room_for_entries(self.length, self.chunk, self.ranks)

    def refuse(self, fact: str, law: str, help_: str = _HEADS) -> NoReturn:
        """Raises CompileError for a model whose caches cannot be cut."""
        raise CompileError(Problem(self.context.where("axis"), f"{self.name}: {fact}", law, help_))


def cut_of(program: Loaded, rules: GenerateRules, has_encoder: bool) -> CutEntries | None:
    """Returns how the plan's `context` cuts the caches; None if it does not, or over one rank.

    Raises CompileError with all that the plan has and that caches in shards have no form for.
    """
    context, mesh = program.plan.context, dict(program.plan.mesh)
    if context is None or mesh.get(context.axis, 1) == 1:
        return None
    problems = list[Problem]()

    def refuse(key: str, fact: str, law: str, help_: str) -> None:
        problems.append(Problem(context.where(key), fact, law, help_))

    beside = "beside 'generate' it shards the entries of caches, and a step's tokens are on every rank"
    if context.attention != "auto":
        refuse(
            "attention",
            f"'attention: {context.attention}' of tokens that 'context' does not cut",
            beside,
            "leave it out",
        )
    if context.order != "runs":
        refuse("order", f"'order: {context.order}' of tokens that 'context' does not cut", beside, "leave it out")
    if context.memory is not None:
        refuse(
            "memory",
            "'memory' of keys and values that no rank sends",
            beside,
            "leave it out; 'memory' of 'generate' limits a rank",
        )
    for name, one in program.plan.dataset.specs.items():
        if any(isinstance(dim, tuple) and context.axis in dim for dim in one.spec):
            law = f"'{context.axis}' shards the entries of caches, and a step's tokens are on every rank along it"
            help_ = "cut slots along an axis of their own in the mesh"
            problems.append(Problem(one.where, f"dataset of '{name}' cuts it along '{context.axis}'", law, help_))
    if rules.draft is not None:
        law = "the entries of a step are in one block of a chunk, and drafts begin at any position"
        refuse("axis", "'context' beside 'draft'", law, "leave out one of them")
    if has_encoder:
        law = "caches of an encoder are written once and whole"
        refuse("axis", f"'context' cuts caches, and {program.name} has an encoder", law, _HEADS)
    ranks, blocks = mesh[context.axis], -(-rules.length // rules.chunk)
    if blocks < ranks:
        fact = f"'{context.axis}' has {ranks} ranks, and a sequence of {rules.length} tokens has {count(blocks, 'block')} of {rules.chunk}"
        law = "entries are dealt out in blocks of a chunk, and each rank has some"
        most = next((size for size in range(-(-rules.length // ranks), 0, -1) if -(-rules.length // size) >= ranks), 0)
        refuse("axis", fact, law, f"write chunk: {most} or less" if most else f"use {rules.length} ranks or fewer")
    if problems:
        raise CompileError(problems)
    why = f"{PurePath(context.where()).name} context"
    return CutEntries(
        context, mesh[context.axis], rules.length, rules.chunk, program.plan.precision is not None, why, program.name
    )


class CutAttention:
    """Rewrites the attentions of a step in nodes of `build`, with masks that all layers share."""

    def __init__(self, build: NodeBuilder, positions: Positions, cut: CutEntries) -> None:
        self.build, self.positions, self.cut = build, positions, cut
        self.biases: dict[int, ir.Value] = {}
        self.anchor = positions.length.producer()

    def rewrite(
        self, heads: Mapping[ir.Node, int], sights: Mapping[ir.Node, Sight], caches: Mapping[ir.Value, ir.Value]
    ) -> None:
        """Rewrites every Attention over caches. Raises CompileError if one of `caches` is read otherwise."""
        for node, sight in sights.items():
            keys, values = (operand_of_cache(node, k) for k in (1, 2))
            if keys is None or values is None:
                continue
            if sight is not Sight.CAUSAL:
                law = "a rank computes the mask of its own entries from their positions"
                self.cut.refuse(f"the mask of Attention '{node.name}' is not proven causal", law)
            self._rewrite(node, heads[node], keys, values)
        appends = {cache: following.producer() for cache, following in caches.items()}
        for cache, node in appends.items():
            if node is not None and node.op_type == "TensorScatter" and SPARE_ENTRIES not in node.meta:
                law = "a cache in shards is read by ONNX's Attention over four dims, perhaps with repeated heads"
                help_ = "export the model at opset 23 or later, with attention as one op, or leave out 'context'"
                self.cut.refuse(f"the cache '{cache.name}' is read by other nodes than an Attention", law, help_)

    @cached_property
    def index(self) -> ir.Value:
        """The index [slots] of each slot's first new entry in the global view of a cache."""
        op, number = self.build.op, self._number
        block = op("block", "Div", [self.positions.position, number("chunk", self.cut.chunk)])
        inside = op("in_block", "Mod", [self.positions.position, number("chunk", self.cut.chunk)])
        rank = op("rank_of_block", "Mod", [block, number("ranks", self.cut.ranks)])
        turn = op("turn", "Div", [block, number("ranks", self.cut.ranks)])
        begin = op("begin_of_rank", "Mul", [rank, number("rows", self.cut.rows)])
        row = op("row", "Add", [op("begin_of_block", "Mul", [turn, number("chunk", self.cut.chunk)]), inside])
        found = op("index", "Add", [begin, row])
        self._put()
        return found

    @cached_property
    def held(self) -> ir.Value:
        """The number [1] of entries of the longest sequence on each rank, in whole blocks."""
        op, number = self.build.op, self._number
        whole = op("raised", "Add", [self.positions.length, number("less", [self.cut.ranks * self.cut.chunk - 1])])
        rounds = op("rounds", "Div", [whole, number("of_all_ranks", [self.cut.ranks * self.cut.chunk])])
        found = op("held", "Mul", [rounds, number("chunks", [self.cut.chunk])])
        self._put()
        return found

    @cached_property
    def entries(self) -> ir.Value:
        """The position of each entry that ranks read: [1, 1, ranks, 1, held]."""
        op, number, held = self.build.op, self._number, self.held
        count = op("held_number", "Squeeze", [held, number("begin", [0])])
        local = op("held_entries", "Range", [number("zero", 0), count, number("one", 1)])
        inside = op("entry_in_block", "Mod", [local, number("chunk", self.cut.chunk)])
        turn = op("turn_of_entry", "Div", [local, number("chunk", self.cut.chunk)])
        begin = op("round", "Mul", [turn, number("round", self.cut.ranks * self.cut.chunk)])
        places = op("places", "Range", [number("zero", 0), number("ranks", self.cut.ranks), number("one", 1)])
        first = op("first_of_rank", "Mul", [places, number("chunk", self.cut.chunk)])
        first = op("first_of_ranks", "Unsqueeze", [first, number("places_at", [0, 1, 3, 4])])
        found = op("entries", "Add", [op("entry", "Add", [begin, inside]), first])
        self._put()
        return found

    def bias(self, group: int) -> ir.Value:
        """Returns what is added to scores [slots, heads of keys, ranks, group * tokens, held]: 0, or less for entries that are hidden."""
        if group not in self.biases:
            op, number, entries = self.build.op, self._number, self.entries
            begin, steps = (
                op("column", "Unsqueeze", [self.positions.position, number("axis", [1])]),
                self.positions.steps(),
            )
            rows = op("tokens_of_step", "Unsqueeze", [op("rows", "Add", [begin, steps]), number("axis", [1])])
            each = op("tokens_of_heads", "Expand", [rows, number(f"heads_{group}", [1, group, 1])])
            of_heads = op("tokens_and_heads", "Reshape", [each, number("flat", [0, -1])])
            queries = op("queries", "Unsqueeze", [of_heads, number("queries_at", [1, 2, 4])])
            seen = op("seen", "LessOrEqual", [entries, queries])
            nothing, hidden = number("nothing", np.float32(0)), number("hidden", np.float32(_HIDDEN))
            self.biases[group] = op("bias", "Where", [seen, nothing, hidden])
            self._put()
        return self.biases[group]

    def _number(self, word: str, numbers: object) -> ir.Value:
        return self.build.constant(f"cut_{word}", numbers)  # type: ignore[arg-type]

    def _put(self) -> None:
        """Inserts nodes that all layers share after those of positions."""
        last = self.build.waiting[-1]
        self.build.put(after=self.anchor)
        self.anchor = last

    def _rewrite(self, node: ir.Node, heads: int, keys: CachedOperand, values: CachedOperand) -> None:
        build, op, number, cut = self.build, self.build.op, self._number, self.cut
        cache, query = keys.append.inputs[0], node.inputs[0]
        assert cache is not None
        assert cache.shape is not None
        assert query is not None
        kind = cache.dtype if keys.scale is None else keys.scale.dtype
        assert kind is not None
        kv, size = int(str(cache.shape[1])), int(str(cache.shape[3]))
        group = heads // kv
        bias = self.bias(group)
        scale = node.attributes.get_float("scale", 0.0) or 1 / math.sqrt(size)
        query = op("scaled", "Mul", [query, self._float("scale", scale, kind)])
        apart = number(f"apart_{kv}_{group}_{size}", [0, kv, group, -1, size])
        together = number(f"together_{kv}_{size}", [0, kv, 1, -1, size])
        query = op("grouped", "Reshape", [op("by_heads", "Reshape", [query, apart]), together])
        read = [self._read(one, kv) for one in (keys, values)]
        turned = op("turned", "Transpose", [read[0]], perm=[0, 1, 2, 4, 3])
        scores = op("scores", "MatMul", [query, turned])
        if softcap := node.attributes.get_float("softcap", 0.0):
            cap = self._float("softcap", softcap, kind)
            scores = op("capped", "Mul", [op("tanh", "Tanh", [op("uncapped", "Div", [scores, cap])]), cap])
        if kind is not ir.DataType.FLOAT:
            scores = op("scores_32", "Cast", [scores], to=ir.DataType.FLOAT.value)
        scores = op("masked", "Add", [scores, bias])
        top = op("top", "ReduceMax", [scores, number("over_entries", [2, 4])], keepdims=1)
        shares = op("shares", "Exp", [op("below_top", "Sub", [scores, top])])
        total = op("total_of_rank", "ReduceSum", [shares, number("last_dim", [4])], keepdims=1)
        if kind is not ir.DataType.FLOAT:
            taken = op("shares_16", "Cast", [shares], to=kind.value)
            mixed = op(
                "mixed_32", "Cast", [op("mixed_of_rank", "MatMul", [taken, read[1]])], to=ir.DataType.FLOAT.value
            )
        else:
            mixed = op("mixed_of_rank", "MatMul", [shares, read[1]])
        of_rank = op("mixed_and_total", "Concat", [mixed, total], axis=4)
        merged = op("merged", "ReduceSum", [of_rank, number("over_ranks", [2])], keepdims=0)
        begin, width, end, dim = (number(f"at_{at}", [at]) for at in (0, size, size + 1, 3))
        mixed = op("mixed", "Slice", [merged, begin, width, dim])
        total = op("total", "Slice", [merged, width, end, dim])
        made = op("attended", "Div", [mixed, total])
        if kind is not ir.DataType.FLOAT:
            made = op("attended_16", "Cast", [made], to=kind.value)
        joined = number(f"joined_{heads}_{size}", [0, heads, -1, size])
        made = op("joined", "Reshape", [op("parted", "Reshape", [made, apart]), joined])
        build.put(before=node)
        made.type = node.outputs[0].type
        ir.convenience.replace_all_uses_with(node.outputs[0], made)
        for one in (keys, values):
            one.append.replace_input_with(2, self.index)
            one.append.meta[CONTEXT] = ContextMark(cut.context.axis, "", ROW, cut.why, first=True)
            one.append.meta[SPARE_ENTRIES] = cut.chunk

    def _read(self, operand: CachedOperand, heads: int) -> ir.Value:
        """Returns the entries [slots, heads, ranks, held, size] of a cache after the append."""
        op, number, following = self.build.op, self._number, operand.append.outputs[0]
        cache = operand.append.inputs[0]
        assert cache is not None
        assert cache.shape is not None
        size = int(str(cache.shape[3]))
        shards = [0, heads, self.cut.ranks, self.cut.rows, size]
        apart = op("shards", "Reshape", [following, number(f"shards_{heads}_{size}", shards)])
        read = op("held_of_rank", "Slice", [apart, number("begin", [0]), self.held, number("entries_dim", [3])])
        if operand.scale is None:
            return read
        assert operand.scale.const_value is not None
        scale = operand.scale.const_value.numpy().reshape(1, heads, 1, 1, size)
        kind = operand.scale.dtype
        assert kind is not None
        whole = op("whole", "Cast", [read], to=kind.value)
        return op("unrounded", "Mul", [whole, number(f"{operand.scale.name}.by_head", scale)])

    def _float(self, word: str, number: float, kind: ir.DataType) -> ir.Value:
        """Returns a number of a type."""
        made = self._number(f"{word}_{number:.9g}", np.float32(number))
        return made if kind is ir.DataType.FLOAT else self.build.op(f"{word}_16", "Cast", [made], to=kind.value)
