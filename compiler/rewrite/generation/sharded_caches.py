"""Attention over caches whose entries a mesh axis shards: each rank attends its own entries, and two reductions merge the results.

    y, scores = ShardedCacheAttention(q, k, v, caches, ends)     lse = log sum exp scores        of a rank
    m = max lse                                                                                  AllReduce(max)
    w = exp(lse - m)                  merged = sum of w y, and of w                              AllReduce(sum) of both together
    e = exp(new scores - m)           result = (sum of w y - (p - 1) e v) / (sum of w - (p - 1) sum of e)    each rank subtracts a p-th

Entries are dealt out to the p ranks in blocks of a chunk: of a sequence of any length each rank has as many entries as the others, up to a
block. An entry's block is position / chunk, and its rank is block modulo p. A rank's entries of a sequence are the first ones of its shard:
it reads no others.

    chunk 4, p = 2        rank 0:  0 1 2 3 | 8 9 10 11 | .. | spare        rank 1:  4 5 6 7 | 12 13 14 15 | .. | spare

The new entries of a step are of one block, as the positions of chunks are multiples of a chunk. Every rank appends them to its own entries,
in place, and attends them. On the ranks that they do not belong to the next entries are written over them, and the block at the end of a
shard is spare, for those. So the p results have the new entries p times, of which p - 1 are subtracted. That loses nothing, since what is
left has at least as much of them. A rank without entries has a result of the new ones alone.

In the global view a cache has p * rows entries, and the merge is in plain ops, of which propagation makes partial results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import NoReturn

import numpy as np
import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import CONTEXT, ContextMark, take_out
from partc.compiler.ir.program import Loaded
from partc.compiler.ops.families.neural.sharded_cache_attention import ENTRIES, SHARDED_ATTENTION
from partc.compiler.ops.rule import OWN
from partc.compiler.plan.context import ContextRules
from partc.compiler.plan.generate import GenerateRules
from partc.compiler.rewrite.batch_norm import EXACT
from partc.compiler.rewrite.generation.fused_attention import (
    CachedOperand,
    Sight,
    is_taken,
    joined_rows,
    operand_of_cache,
)
from partc.compiler.rewrite.generation.node_builder import NodeBuilder
from partc.compiler.rewrite.generation.positions import Positions
from partc.runtime.artifact.generation import room_for_entries
from partc.runtime.units import count

_HEADS = "leave out 'context'; an axis tp shards the heads of caches"
_HIDDEN = -1e30
"""The addend of the score of a hidden entry: finite, so that no difference of two scores is NaN."""


@dataclass(frozen=True)
class ShardedEntries:
    """The entries of a cache of `length`, dealt out to `ranks` along a mesh axis, in blocks of `chunk`.

    `why`: the plan's line; `name`: that of the model.
    """

    context: ContextRules
    ranks: int
    length: int
    chunk: int
    why: str
    name: str

    @property
    def rows(self) -> int:
        """The entries in the shard of a rank, with the spare block."""
        return room_for_entries(self.length, self.chunk, self.ranks)

    def refuse(self, fact: str, law: str, help_: str = _HEADS) -> NoReturn:
        """Raises CompileError for a model whose caches cannot be cut."""
        raise CompileError(Problem(self.context.where("axis"), f"{self.name}: {fact}", law, help_))


def sharded_entries(program: Loaded, rules: GenerateRules, has_encoder: bool) -> ShardedEntries | None:
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
    if rules.cache is not None:
        law = "each rank attends the new entries, and all but one of these terms are subtracted again: rounded ones would not cancel"
        refuse("axis", f"'context' beside 'cache: {rules.cache}'", law, "leave out one of them")
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
    return ShardedEntries(context, mesh[context.axis], rules.length, rules.chunk, why, program.name)


class ShardedAttention:
    """Rewrites the attentions of a step in nodes of `build`, with numbers of entries that all layers share."""

    def __init__(self, build: NodeBuilder, positions: Positions, cut: ShardedEntries) -> None:
        self.build, self.positions, self.cut = build, positions, cut
        self.anchor = positions.length.producer()

    def rewrite(
        self, heads: Mapping[ir.Node, int], sights: Mapping[ir.Node, Sight], caches: dict[ir.Value, ir.Value]
    ) -> None:
        """Rewrites every Attention over caches, which `caches` then maps to the new op's outputs.

        Raises CompileError if one of `caches` is read otherwise.
        """
        for node, sight in sights.items():
            keys, values = (operand_of_cache(node, k) for k in (1, 2))
            if keys is None or values is None:
                continue
            if sight is not Sight.CAUSAL:
                law = "a rank attends all of its entries that are not after a token"
                self.cut.refuse(f"the mask of Attention '{node.name}' is not proven causal", law)
            if not all(is_taken(one.append.inputs[0], None) for one in (keys, values)):
                law = "onnxruntime's fused attention takes caches of float32 and float16, and heads of a multiple of 8"
                self.cut.refuse(f"the caches of Attention '{node.name}' have another type or size of heads", law)
            self._rewrite(node, heads[node], (keys, values), caches)
        for cache, following in caches.items():
            append = following.producer()
            if append is not None and append.op_type == "TensorScatter":
                law = "a cache in shards is read by ONNX's Attention over four dims, perhaps with repeated heads"
                help_ = "export the model at opset 23 or later, with attention as one op, or leave out 'context'"
                self.cut.refuse(f"the cache '{cache.name}' is read by other nodes than an Attention", law, help_)

    @cached_property
    def before(self) -> ir.Value:
        """The number [ranks, slots] of each slot's entries on each rank before the step."""
        op, number = self.build.op, self._number
        block = op("block", "Div", [self.positions.position, number("chunk", self.cut.chunk)])
        inside = op("in_block", "Mod", [self.positions.position, number("chunk", self.cut.chunk)])
        places = op("places", "Range", [number("zero", 0), number("ranks", self.cut.ranks), number("one", 1)])
        column = op("column_of_places", "Unsqueeze", [places, number("axis", [1])])
        raised = op("raised", "Add", [block, number("others", self.cut.ranks - 1)])
        full = op("full_blocks", "Div", [op("turns", "Sub", [raised, column]), number("ranks", self.cut.ranks)])
        owner = op("rank_of_block", "Mod", [block, number("ranks", self.cut.ranks)])
        in_last = op("in_last_block", "Where", [op("is_owner", "Equal", [owner, column]), inside, number("zero", 0)])
        found = op("before", "Add", [op("in_full_blocks", "Mul", [full, number("chunk", self.cut.chunk)]), in_last])
        self._put()
        return found

    @cached_property
    def ends(self) -> ir.Value:
        """The index [ranks, slots], of 32 bits, of each slot's last new entry."""
        op, before = self.build.op, self.before
        after = op("after", "Add", [before, self.positions.tokens])
        found = op(
            "ends", "Cast", [op("last_index", "Sub", [after, self._number("one", 1)])], to=ir.DataType.INT32.value
        )
        self._put()
        return found

    @cached_property
    def most(self) -> ir.Value:
        """A number, at least that of any slot's entries on any rank after the step: the same on all ranks."""
        op, number = self.build.op, self._number
        less, round_ = self.cut.ranks * self.cut.chunk - 1, self.cut.ranks * self.cut.chunk
        rounds = op(
            "rounds",
            "Div",
            [op("length_raised", "Add", [self.positions.length, number("less", [less])]), number("round", [round_])],
        )
        held = op("held", "Mul", [rounds, number("chunks", [self.cut.chunk])])
        more = op("held_and_new", "Add", [held, self.positions.tokens])
        bound = op(
            "most",
            "Squeeze",
            [op("most_of_room", "Min", [more, number("room", [self.cut.rows])]), number("begin", [0])],
        )
        self._put()
        return bound

    @cached_property
    def seen(self) -> ir.Value:
        """Whether each token of a slot attends each of the most entries of a rank: [ranks, slots, 1, tokens, most]."""
        op, number, before, most = self.build.op, self._number, self.before, self.most
        steps = self.positions.steps()
        last = op("last_seen", "Add", [op("before_apart", "Unsqueeze", [before, number("before_at", [2, 3])]), steps])
        column = op("last_seen_apart", "Unsqueeze", [last, number("last_at", [4])])
        entries = op("entries", "Range", [number("zero", 0), most, number("one", 1)])
        found = op("seen", "GreaterOrEqual", [column, entries])
        self._put()
        return found

    @cached_property
    def total(self) -> ir.Value:
        """The most entries, of 32 bits."""
        most = self.most
        found = self.build.op("most_32", "Cast", [most], to=ir.DataType.INT32.value)
        self._put()
        return found

    @cached_property
    def causal(self) -> ir.Value:
        """Whether each token of a step attends each token of it: [tokens, tokens]."""
        steps = self.positions.steps()
        column = self.build.op("steps_apart", "Unsqueeze", [steps, self._number("axis", [1])])
        found = self.build.op("causal", "GreaterOrEqual", [column, steps])
        self._put()
        return found

    def _number(self, word: str, numbers: object) -> ir.Value:
        return self.build.constant(f"cut_{word}", numbers)  # type: ignore[arg-type]

    def _put(self) -> None:
        """Inserts nodes that all layers share after those of positions."""
        last = self.build.waiting[-1]
        self.build.put(after=self.anchor)
        self.anchor = last

    def _rewrite(
        self,
        node: ir.Node,
        heads: int,
        reads: tuple[CachedOperand, CachedOperand],
        caches: dict[ir.Value, ir.Value],
    ) -> None:
        build, op, number, cut = self.build, self.build.op, self._number, self.cut
        ends, total, seen, causal = self.ends, self.total, self.seen, self.causal
        pasts = [one.append.inputs[0] for one in reads]
        cache = pasts[0]
        assert cache is not None
        assert cache.shape is not None
        kind = cache.dtype
        assert kind is not None
        kv, size = int(str(cache.shape[1])), int(str(cache.shape[3]))
        factor = node.attributes.get_float("scale", 0.0) or 1 / math.sqrt(size)
        softcap = node.attributes.get_float("softcap", 0.0)
        operands = (node.inputs[0], heads), *((one.new, kv) for one in reads)
        rows = [joined_rows(build, node, value, count) for value, count in operands if value is not None]
        attributes = {
            "num_heads": heads,
            "kv_num_heads": kv,
            "scale": factor,
            **({"softcap": softcap} if softcap else {}),
        }
        inputs = [*rows, *pasts, ends, total]
        own, *presents, scores = build.node("attention", SHARDED_ATTENTION, inputs, 4, OWN, **attributes)
        shared = own.producer()
        assert shared is not None
        shared.meta[CONTEXT] = ContextMark(cut.context.axis, "", ENTRIES, cut.why, first=True)

        def single(value: ir.Value, word: str) -> ir.Value:
            return value if kind is ir.DataType.FLOAT else op(word, "Cast", [value], to=ir.DataType.FLOAT.value)

        last_dim, first_dim, fourth = number("last_dim", [4]), number("begin", [0]), number("dim_3", [3])
        hidden = number("hidden", np.float32(_HIDDEN))
        masked = op("masked", "Where", [seen, single(scores, "scores_32"), hidden])
        # the largest share is exp(largest - log): a Softmax takes a tenth of the time of ReduceLogSumExp
        largest = op("largest", "ReduceMax", [masked, last_dim], keepdims=1)
        share = op("largest_share", "ReduceMax", [op("shares", "Softmax", [masked], axis=4), last_dim], keepdims=1)
        logs = op("log_of_rank", "Sub", [largest, op("log_of_share", "Log", [share])])
        top = op("top", "ReduceMax", [logs, first_dim], keepdims=1)
        weight = op("weight", "Exp", [op("below_top", "Sub", [logs, top])])
        by_token = op("weight_of_token", "Transpose", [weight], perm=[0, 1, 3, 2, 4])
        apart = op("of_heads", "Reshape", [single(own, "of_rank_32"), number(f"apart_{heads}", [0, 0, 0, heads, -1])])
        mixed = op("mixed_of_rank", "Concat", [op("weighted", "Mul", [apart, by_token]), by_token], axis=4)
        singles = [single(one, f"{word}_32") for one, word in zip(rows, "qkv", strict=True)]
        surplus = self._surplus(singles, heads, kv, factor, softcap, top, causal)
        left = op("merged", "ReduceSum", [op("part_of_rank", "Sub", [mixed, surplus]), first_dim], keepdims=0)
        begin, end, stop = (number(f"at_{at}", [at]) for at in (0, size, size + 1))
        attended = op(
            "attended",
            "Div",
            [op("mixed", "Slice", [left, begin, end, fourth]), op("weights", "Slice", [left, end, stop, fourth])],
        )
        if kind is not ir.DataType.FLOAT:
            attended = op("attended_16", "Cast", [attended], to=kind.value)
        attended = op("turned_back", "Transpose", [attended], perm=[0, 2, 1, 3])
        build.put(before=node)
        attended.type = node.outputs[0].type
        ir.convenience.replace_all_uses_with(node.outputs[0], attended)
        take_out(build.graph, node)
        for past, one, present in zip(pasts, reads, presents, strict=True):
            assert past is not None
            name, caches[past].name = caches[past].name, None
            present.name, present.type = name, caches[past].type
            caches[past] = present
            for each in (*one.between, one.append):
                take_out(build.graph, each)

    def _surplus(
        self,
        rows: Sequence[ir.Value],
        heads: int,
        kv: int,
        factor: float,
        softcap: float,
        top: ir.Value,
        causal: ir.Value,
    ) -> ir.Value:
        """Returns the share of each rank in the p - 1 terms of the new entries that are too many: [slots, tokens, heads, size + 1]."""
        op, number, group = self.build.op, self._number, heads // kv
        parted = [
            op(f"{word}_parted", "Reshape", [one, number(f"parted_{count[0]}_{count[1]}", [0, 0, *count, -1])])
            for one, word, count in zip(rows, "qkv", ((kv, group), (kv, 1), (kv, 1)), strict=True)
        ]
        turns = ([0, 2, 3, 1, 4], [0, 2, 3, 4, 1], [0, 2, 3, 1, 4])
        query, key, value = (
            op(f"{word}_turned", "Transpose", [one], perm=perm)
            for one, word, perm in zip(parted, "qkv", turns, strict=True)
        )
        scores = op(
            "new_scores",
            "MatMul",
            [op("scaled", "Mul", [query, number(f"scale_{factor:.9g}", np.float32(factor))]), key],
        )
        products = [scores]
        if softcap:
            cap = number(f"softcap_{softcap:.9g}", np.float32(softcap))
            scores = op("capped", "Mul", [op("tanh", "Tanh", [op("uncapped", "Div", [scores, cap])]), cap])
        of_heads = op("top_of_heads", "Squeeze", [top, number("begin", [0])])
        most = op("top_of_keys", "Reshape", [of_heads, number(f"top_{kv}_{group}", [0, kv, group, -1, 1])])
        shares = op("new_shares", "Exp", [op("new_below_top", "Sub", [scores, most])])
        known = op("new_seen", "Where", [causal, shares, number("nothing", np.float32(0))])
        sums = op("new_total", "ReduceSum", [known, number("last_dim", [4])], keepdims=1)
        products.append(op("new_values", "MatMul", [known, value]))
        mixed = op("new_mixed", "Concat", [products[1], sums], axis=4)
        for maker in filter(None, (one.producer() for one in products)):
            maker.meta[EXACT] = True  # they cancel terms that the fused op computes in float32
        share = np.float32((self.cut.ranks - 1) / self.cut.ranks)
        times = op("new_of_others", "Mul", [mixed, number("share", share)])
        turned = op("new_turned", "Transpose", [times], perm=[0, 3, 1, 2, 4])
        return op("new_joined", "Reshape", [turned, number(f"joined_{heads}", [0, 0, heads, -1])])
