"""Pass: the tokens of a sequence are sharded over a mesh axis, and each attention gets the keys and values of other ranks in one of three
ways.

    gather   the op table shards the tokens of queries; keys and values are gathered before heads are repeated
    heads    all tokens of a rank's heads: an AllToAll of queries, keys and values before attention, and one after it (Ulysses)
    ring     blocks of keys and values pass from rank to rank (`lower/ring.py`)

Attention of single ops is recognized by its dataflow: a product of queries and keys, elementwise ops, a Softmax over keys, and a product
with values. Marks on its nodes say which factors of their rules stay unsharded and which factor the axis shards; propagation derives the
rest. The repetition of keys' heads commutes with a change of layout along the tokens, so its nodes are marked too:

    k [b, 2, s, d]  --AllGather-->  Unsqueeze  Expand  Reshape [b, 8, s, d]  Transpose  MatMul

Bytes that a rank receives, in units of batch * tokens * depth * (bytes of a number), with H heads, G of keys, p ranks:

              forward                            backward
    gather    2 G (p-1)/p                        2 G (p-1)/p
    heads     (2 H + 2 max(G, p)) (p-1)/p^2      the same
    ring      2 G (p-1)/p                        4 G (p-1)/p + 2 G/p, without the last term if attention is causal
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from partc.compiler.dims.expression import facts_of
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import CONTEXT, ContextMark, name_of
from partc.compiler.ir.program import Typed
from partc.compiler.ir.sized import SIZES
from partc.compiler.ir.value_info import SymbolInfo, bytes_of
from partc.compiler.layout.moves import share_of
from partc.compiler.ops.families.neural.ring import RING, is_ring
from partc.compiler.ops.node import constant_ints, rank_of
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import OWN, WHOLE
from partc.compiler.placement.typical_sizes import TypicalSizes
from partc.compiler.plan.context import ContextRules, Way
from partc.compiler.plan.groups import DATA_AXIS
from partc.compiler.plan.rules import DATA_PARALLEL, DatasetSpec
from partc.compiler.plan.shard_spec import ShardSpec
from partc.compiler.rewrite.evaluation import computation_of
from partc.compiler.rewrite.fold import Folding
from partc.compiler.rewrite.joined_tokens import join_tokens
from partc.compiler.rewrite.precision import HALVES
from partc.compiler.rewrite.rewriting import Rewriting
from partc.compiler.sharding.seeding.seeds import TENSOR_PARALLEL
from partc.runtime.units import size_text

_PASSING = ("Add", "Cast", "Clip", "Div", "Dropout", "Identity", "Mul", "Sub", "Tanh", "Where")
"""Ops that may be between the two products of an attention, besides the Softmax."""
_VIEWS = ("Cast", "Div", "Expand", "Identity", "Mul", "Reshape", "Transpose", "Unsqueeze")
"""Ops that may be between the repetition of keys' heads and a product."""


@dataclass(frozen=True)
class Side:
    """The nodes from the repetition of keys' or values' heads to the product, each with its factors of tokens and of heads.

    `source`: the value that the first node reads. `heads`: its number of heads; None if they have no dim of their own, or of unknown size.
    """

    source: ir.Value
    heads: int | None
    nodes: tuple[tuple[ir.Node, str, str], ...] = ()


@dataclass(frozen=True)
class Attention:
    """An attention of single ops: the product with keys, the nodes between, and the product with values."""

    scores: ir.Node
    between: tuple[ir.Node, ...]
    product: ir.Node
    keys: Side
    values: Side

    def marked(self, way: Way) -> Iterator[tuple[ir.Node, str, str]]:
        """Yields each node of the attention with the factors that stay unsharded, and the factor of heads."""
        for node in (self.scores, *self.between):
            letters = rule_of(node).outputs[0] or ""
            yield node, letters[-2:] if way == "heads" else letters[-1:], letters[1:2]
        own, made = rule_of(self.product).inputs[0] or "", rule_of(self.product).outputs[0] or ""
        yield self.product, own[-2:] if way == "heads" else own[-1:], made[1:2]
        for side in (self.keys, self.values):
            yield from side.nodes


def shard_context(program: Typed) -> Typed:
    """Returns the program with sharded tokens in its inputs and marks on its attentions; the same program if the plan has no `context`.

    Raises CompileError with each attention that is not recognized or does not fit its way, or if no input has the tokens.
    """
    rules = program.plan.context
    ranks = 0 if rules is None else dict(program.plan.mesh).get(rules.axis, 0)  # the unsharded model has no mesh
    if program.generation is not None or rules is None or not ranks or (ranks == 1 and rules.attention != "ring"):
        return program  # of a decoder it cuts the caches (`generation/sharded_caches.py`)
    attentions_found, lengths = attentions(program)
    strange = list[Problem]()
    known = {one for each in attentions_found for one in (each.scores, *each.between, each.product)}
    for node in program.model.graph:
        shape = _scores_shape(program, node)
        if shape is not None and node not in known and {*shape[-2:]} <= {*lengths}:
            fact = f"the attention of '{program.paths[node]}' is not recognized: its Softmax is over [{shape[-2]}, {shape[-1]}]"
            law = "an attention is a product with keys, elementwise ops, a Softmax, and a product with values"
            strange.append(Problem(rules.where(), fact, law, "write it so, or leave out 'context' and cut `dataset`"))
    if not attentions_found:
        law = "an attention is a product with keys, elementwise ops, a Softmax over them, and a product with values"
        strange.append(Problem(rules.where(), "no attention is recognized", law, "cut `dataset` by hand"))
    if strange:
        raise CompileError(strange)
    return _Context(program, rules).of(attentions_found, lengths)


def attentions(program: Typed) -> tuple[list[Attention], dict[int | str, None]]:
    """Returns the attentions of single ops, and their numbers of queries."""
    all_attentions, lengths = list[Attention](), dict[int | str, None]()
    for node in program.model.graph:
        shape = _scores_shape(program, node)
        if shape is not None and (one := _attention(node)) is not None:
            all_attentions.append(one)
            lengths[shape[-2]] = None
    return all_attentions, lengths


class _Context(Rewriting[Typed]):
    def __init__(self, program: Typed, rules: ContextRules) -> None:
        super().__init__(program)
        self.rules, self.ranks = rules, dict(program.plan.mesh)[rules.axis]
        styled = any(rule.style is not None for rule in (*program.declared.sharding, *program.plan.sharding))
        self.forms: dict[Attention, _RingForm | None] = {}
        self.is_folded = rules.order == "fold" and self.ranks > 1
        self.tensor_parallel = dict(program.plan.mesh).get(TENSOR_PARALLEL, 1) if styled else 1

    def of(self, attentions: list[Attention], lengths: Mapping[int | str, None]) -> Typed:
        specs = self.dataset(lengths)
        counts, problems = dict[str, int](), [*self.windows(attentions)] if self.is_folded else []
        for attention in attentions:
            ways = {way: cost for way, cost in self.costs(attention).items() if self.rules.attention in ("auto", way)}
            if not ways:
                law = "one type of floats, keys of the queries' tokens, scores scaled and masked once, by what heads share and none learns"
                fact = f"the attention of '{self.paths[attention.product]}' has no ring"
                problems.append(Problem(self.rules.where("attention"), fact, law, "write attention: gather, or heads"))
                continue
            fitting = {way: cost for way, cost in ways.items() if not cost.problem}
            if not fitting:
                problems += [Problem(self.rules.where("attention"), *cost.problem) for cost in ways.values()]
                continue
            way = min(fitting, key=lambda name: fitting[name].units)
            text = ", ".join(f"{name} {cost.text}" for name, cost in self.costs(attention).items())
            self.mark(attention, way)
            counts[f"by {way} ({text})"] = counts.get(f"by {way} ({text})", 0) + 1
        if problems:
            raise CompileError([*dict.fromkeys(problems)])
        warnings = [
            f"{self.rules.where()}: {count} attention{'s' * (count > 1)} {text}" for text, count in counts.items()
        ]
        dataset = self.before.plan.dataset
        plan = replace(self.before.plan, dataset=replace(dataset, specs={**dataset.specs, **specs}))
        self.drop([*self.graph])  # masks that no attention reads
        where, tokens = PurePath(self.rules.where()).name, dict(self.tokens(lengths))
        hot = [node for node in self.graph if is_ring(node) or CONTEXT in node.meta]
        plain = join_tokens(self, tokens, self.ranks, self.rules.axis, f"{where} context") if self.ranks > 1 else {}
        if self.is_folded and (causes := Folding(self, self.rules.axis, self.ranks, where, tokens).fold(hot)):
            raise CompileError([self.unfolded(plain.get(cause, cause)) for cause in causes])
        return self.done(plan=plan, warnings=(*self.before.warnings, *warnings))

    def unfolded(self, cause: ir.Node) -> Problem:
        """Returns the problem of an op that needs the natural order of tokens."""
        fact = f"'{self.paths[cause]}' ({cause.op_type}) cannot run on folded tokens"
        law = "each rank has two runs of tokens, and the op depends on their places, or leads to one that does"
        help_ = "write order: runs, or leave the op to the program that reads the output"
        return Problem(self.rules.where("order"), fact, law, help_)

    def windows(self, attentions: Iterable[Attention]) -> Iterator[Problem]:
        """Yields a problem for each attention whose mask is known to be a window."""
        for one in attentions:
            scoring, shape = _scoring(one), self.values[one.scores.outputs[0]].shape or ()
            mask = None if scoring is None else self.evaluated(scoring.mask, shape[-2])
            if mask is not None and _is_window(mask):
                fact = f"the attention of '{self.paths[one.product]}' has a window of tokens"
                law = "in folded order a rank's neighbours are on other ranks: a window would send more, and its work is even in runs"
                yield Problem(self.rules.where("order"), fact, law, "write order: runs")

    def dataset(self, lengths: Mapping[int | str, None]) -> dict[str, DatasetSpec]:
        """Maps each input with tokens to its dataset spec, sharded along the tokens; raises CompileError if no input has tokens."""
        plan, specs, problems = self.before.plan, dict[str, DatasetSpec](), list[Problem]()
        for value, at in self.tokens(lengths):
            info, name = self.values[value], name_of(value)
            records = self.before.batch_dims.get(value, 0 if at else None)
            in_plan = plan.dataset.specs.get(name)
            spec: ShardSpec = in_plan.spec if in_plan is not None else ((),) * len(info.shape or ())
            if in_plan is None and plan.dataset.style == DATA_PARALLEL and records is not None:
                axes = (DATA_AXIS,) if DATA_AXIS in dict(plan.mesh) else ()
                spec = tuple(axes if dim == records else () for dim in range(len(spec)))
            wrong = [one for one in spec if isinstance(one, int) and one > 1]
            there = spec[at] if at < len(spec) else ()
            if in_plan is not None and (wrong or (isinstance(there, tuple) and there)):
                fact = f"dataset of '{name}' {'is spelled by numbers' if wrong else 'cuts the tokens itself'}"
                law = f"'context' cuts dim {at}, the tokens, over '{self.rules.axis}'"
                problems.append(Problem(in_plan.where, fact, law, "write null for that dim, and mesh axes for others"))
                continue
            if taken := [dim for dim, one in enumerate(spec) if isinstance(one, tuple) and self.rules.axis in one]:
                fact = f"'{self.rules.axis}' cuts '{name}' dim {taken[0]} already"
                law = f"'context' cuts dim {at}, the tokens, over it, and an axis cuts one dim"
                problems.append(
                    Problem(self.rules.where("axis"), fact, law, "give the tokens an axis of their own in the mesh")
                )
                continue
            if problem := self.uneven(name, at, info.shape[at] if info.shape else 0):
                problems.append(problem)
            named = [one if isinstance(one, tuple) else () for one in spec]
            named[at] = () if self.is_folded else (self.rules.axis,)  # each rank takes its two runs of a whole input
            specs[name] = DatasetSpec(tuple(named), self.rules.where())
        if not specs and not problems:
            sizes = ", ".join(map(str, lengths))
            law = f"the attentions are over {sizes} tokens: an input of so many is cut"
            problems.append(
                Problem(self.rules.where("axis"), "no input has the tokens' dim", law, "cut `dataset` by hand")
            )
        if problems:
            raise CompileError(problems)
        return specs

    def tokens(self, lengths: Mapping[int | str, None]) -> Iterator[tuple[ir.Value, int]]:
        """Yields each input that has tokens, with their dim."""
        for value in self.graph.inputs:
            records = self.before.batch_dims.get(value)
            dims = (
                dim for dim, size in enumerate(self.values[value].shape or ()) if size in lengths and dim != records
            )
            if (first := next(dims, None)) is not None:
                yield value, first

    def uneven(self, name: str, dim: int, size: int | str) -> Problem | None:
        """Returns the problem of a number of tokens that the ranks do not divide; None if they divide it."""
        where, runs = self.rules.where("axis"), 2 * self.ranks if self.is_folded else self.ranks
        fact = f"'{self.rules.axis}' has {self.ranks} ranks, and '{name}' dim {dim} has {size} tokens"
        two = ": a rank has two runs of tokens" if self.is_folded else ""
        if isinstance(size, int):
            legal = [str(one) for one in (size // runs * runs, -(-size // runs) * runs) if one]
            law, help_ = f"{size} is not divisible by {runs}{two}", f"take {' or '.join(legal)} tokens"
            return Problem(where, fact, law, help_) if size % runs else None
        facts = facts_of(size, {symbol: info.facts for symbol, info in self.before.symbols.items()})
        if facts.divisible_by(runs):
            return None
        divisor = math.lcm(facts.real_divisor(), runs)
        law = f"{size} is a multiple of {facts.real_divisor()}, not always of {runs}; nothing is padded{two}"
        known = size in self.before.symbols
        help_ = (
            f"declare `{size}: {{divisor: {divisor}}}` under symbols" if known else "give its symbols a larger divisor"
        )
        return Problem(where, fact, law, help_)

    def costs(self, attention: Attention) -> dict[Way, _Cost]:
        """Returns the cost of each way to compute an attention."""
        query = attention.scores.inputs[0]
        assert query is not None
        info, p, trains = self.values[query], self.ranks, self.before.training is not None and self.before.kind.backward
        dims = info.shape or ()
        heads = dims[1] if len(dims) > 3 and isinstance(dims[1], int) else 0
        keys = sum(side.heads or heads for side in (attention.keys, attention.values))
        moved = 2 * heads + sum(self.moved(side, heads) for side in (attention.keys, attention.values))
        whole, unit = bytes_of(info, info.shape), Fraction(1, (heads or 1) * self.tensor_parallel)
        ring, by_heads = Fraction(keys * (p - 1), p), Fraction(moved * (p - 1), p * p)
        units: dict[Way, tuple[Fraction, Fraction, Fraction]] = {
            "gather": (ring, ring, Fraction(keys)),
            "heads": (by_heads, by_heads, Fraction(moved, p)),
        }
        form = self.ring_form(attention)
        if form is not None:
            home = 0 if form.causal and not self.is_folded else Fraction(keys, p)
            units["ring"] = ring, 2 * ring + home, Fraction(2 * keys, p)
        costs: dict[Way, _Cost] = {}
        limit = self.rules.memory
        for way, (forward, backward, kept) in units.items():
            refused: tuple[str, ...] = ()
            received = forward + (backward if trains else 0)
            if way == "heads" and (not heads or heads % (p * self.tensor_parallel)):
                count = f"{heads} heads" if heads else "heads without a dim of their own"
                fact = f"'heads' of '{self.paths[attention.product]}': {count} over {p * self.tensor_parallel} ranks"
                refused = fact, "each rank has whole heads"
                refused += ("write attention: gather, or an axis whose ranks divide the heads",)
            bytes_kept = math.ceil(kept * unit * self.largest.bytes_of(query))
            if limit is not None and bytes_kept > limit:
                fact = f"'{way}' of '{self.paths[attention.product]}' keeps {size_text(bytes_kept)} on a rank"
                refused = fact, f"'memory' is {size_text(limit)}", "raise 'memory', or cut over more ranks"
            text = "unknown" if whole is None else str(share_of(received * unit, whole))
            costs[way] = _Cost(received, f"{text} bytes", refused)
        return costs

    @cached_property
    def largest(self) -> TypicalSizes:
        """The sizes of values at the upper bounds of the symbols, where these are known."""
        bounds = {name: info.facts.max for name, info in self.before.symbols.items()}
        return TypicalSizes(self.before, {name: size for name, size in bounds.items() if size is not None})

    def moved(self, side: Side, heads: int) -> int:
        """The number of keys' or values' heads to send: all if the ranks divide them, else one a rank, else as many as queries have."""
        own = side.heads or heads
        spread = self.ranks * self.tensor_parallel
        if own % spread == 0:
            return own
        forms = [node.op_type for node, _, _ in side.nodes[-3:]]
        repeated = forms == ["Reshape", "Expand", "Unsqueeze"] and constant_ints(side.nodes[-1][0], 1) == (2,)
        return spread if repeated and spread % own == 0 else heads

    def mark(self, attention: Attention, way: Way) -> None:
        """Marks an attention's nodes with the factors that stay unsharded and the one that the axis shards, or replaces it by a ring."""
        if way == "ring":
            self.ring(attention)
            return
        where, axis, apart = PurePath(self.rules.where()).name, self.rules.axis, set[ir.Node]()
        for side in (attention.keys, attention.values) if way == "heads" else ():
            if side.heads is not None and (moved := self.moved(side, 0)) != side.heads:
                if moved:
                    self.repeat(side, moved)
                else:  # sent as they are repeated
                    apart.update(node for node, _, _ in side.nodes)
        for node, whole, heads in attention.marked(way):
            if node not in apart:
                cut = heads if way == "heads" else ""
                node.meta[CONTEXT] = ContextMark(axis, whole.replace(WHOLE, ""), cut, f"{where} context")

    def repeat(self, side: Side, heads: int) -> None:
        """Repeats keys' heads until each rank has one, before the existing repetition, which then repeats them less often."""
        expand, unsqueeze = side.nodes[-2][0], side.nodes[-1][0]
        source, spread, wide = side.source, unsqueeze.outputs[0], expand.outputs[0]
        assert side.heads is not None
        name, times = name_of(wide), heads // side.heads
        rest = self.values[wide].shape
        assert rest is not None
        left = int(rest[2]) // times
        ones = self.like(spread, self.free(f"{name}.one"))
        more = self.like(spread, self.free(f"{name}.more"), {2: times})
        joined = self.like(source, self.free(f"{name}.joined"), {1: heads})
        self.put(unsqueeze, "Unsqueeze", [source, unsqueeze.inputs[1]], [ones], ".one")
        self.put(
            unsqueeze, "Expand", [ones, self.constant(self.free(f"{name}.times"), [1, 1, times, 1, 1])], [more], ".more"
        )
        target = self.constant(self.free(f"{name}.heads"), [0, heads, -1, int(rest[4])])
        self.put(unsqueeze, "Reshape", [more, target], [joined], ".joined")
        unsqueeze.replace_input_with(0, joined)
        expand.replace_input_with(1, self.constant(self.free(f"{name}.left"), [1, 1, left, 1, 1]))
        for value, sizes in ((spread, {1: heads}), (wide, {1: heads, 2: left})):
            value.shape = ir.Shape([sizes.get(k, dim) for k, dim in enumerate(value.shape or ())])
            info = self.values[value]
            self.values[value] = replace(info, shape=tuple(sizes.get(k, dim) for k, dim in enumerate(info.shape or ())))

    def ring_form(self, attention: Attention) -> _RingForm | None:
        """Returns the operands of the attention as a ring; None if its form is not supported."""
        if attention not in self.forms:
            self.forms[attention] = self._ring_form(attention)
        return self.forms[attention]

    def _ring_form(self, attention: Attention) -> _RingForm | None:
        query, keys, values = attention.scores.inputs[0], attention.scores.inputs[1], attention.product.inputs[1]
        scoring = _scoring(attention)
        if query is None or keys is None or values is None or scoring is None:
            return None
        keys, times = self._source(keys, turned=True)
        values, weight = self._source(values, turned=False)
        tokens = self._tokens_in_ring(query, keys, values)
        if weight != 1 or tokens is None:
            return None
        form = _RingForm(query, keys, values, replace(scoring, scale=scoring.scale * times), causal=False)
        mask = self.evaluated(scoring.mask, tokens)
        unseen = [self.evaluated(guard, tokens) for guard in scoring.guards]
        if _is_causal(mask, scoring.hidden, tokens) and all(one is not None and not one.any() for one in unseen):
            return replace(form, scoring=replace(form.scoring, mask=None, guards=()), causal=True)
        return form if scoring.mask is None or self._fits_ring(scoring.mask, tokens) else None

    def _tokens_in_ring(self, query: ir.Value, keys: ir.Value, values: ir.Value) -> int | str | None:
        """Returns the number of tokens of the operands of a ring; None if their shapes or types do not fit."""
        kinds = {one.dtype for one in (query, keys, values)}
        if len(kinds) > 1 or kinds - {ir.DataType.FLOAT, ir.DataType.DOUBLE, *HALVES}:
            return None
        shapes = [self.values[one].shape or () for one in (query, keys, values)]
        if any(len(shape) != 4 for shape in shapes):
            return None
        (_, heads, tokens, depth), (_, groups, *_), (_, others, _, width) = shapes
        sizes = heads, depth, groups, others, width
        fits = groups == others and {shape[2] for shape in shapes} == {tokens}
        return tokens if fits and all(isinstance(one, int) for one in sizes) and not int(heads) % int(groups) else None

    def _fits_ring(self, mask: ir.Value, tokens: int | str) -> bool:
        """Whether a ring takes a mask: all heads share it, its last dims are queries and keys, and no parameter is trained by it."""
        shape = self.values[mask].shape
        if shape is None or len(shape) > 4:
            return False
        _, heads, queries, keys = (1,) * (4 - len(shape)) + shape
        return heads == 1 and queries in (1, tokens) and keys in (1, tokens) and not self.learns(mask)

    def evaluated(self, value: ir.Value | None, tokens: int | str) -> npt.NDArray[Any] | None:
        """Evaluates a mask or a guard at a length that shows its form; None if it depends on more than sizes and constants."""
        return None if value is None else _of_sizes(self.graph, value, self.before.symbols, tokens)

    def learns(self, value: ir.Value) -> bool:
        """Whether a value depends on a trained parameter; a ring computes no gradient of its mask."""
        training = self.before.training
        waiting, seen = [value], set[ir.Value]()
        while waiting and training is not None:
            one = waiting.pop()
            if one in training.parameters and not training.parameters[one].frozen:
                return True
            node = one.producer()
            waiting += [each for each in (node.inputs if node else ()) if each is not None and each not in seen]
            seen.update(waiting)
        return False

    def _source(self, value: ir.Value, *, turned: bool) -> tuple[ir.Value, float]:
        """Returns keys or values before their heads are repeated, and the factor by which they are multiplied afterwards.

        `turned`: whether the value is transposed; if no node before it transposes it, a Transpose is added that restores the dims.
        """
        times, at, perm = 1.0, value, [0, 1, 3, 2]
        while (node := at.producer()) is not None:
            first = node.inputs[0]
            number = _number(node.inputs[1]) if node.op_type in ("Mul", "Div") else None
            if first is None:
                break
            if number is not None:
                times *= number if node.op_type == "Mul" else 1 / number
            elif node.op_type == "Transpose" and turned and [*(node.attributes.get_ints("perm") or ())] == perm:
                turned = False
            elif not self._is_view(node):
                break
            at = first
        if turned:
            node = value.producer()
            back = self.turned(value, self.free(f"{name_of(value)}.turned"), perm)
            reader = next(iter(value.consumers()))
            self.put(reader, "Transpose", [value], [back], ".turned", perm=perm)
            return back, 1.0
        reshape = _by(at, "Reshape")
        expand = _by(reshape.inputs[0], "Expand") if reshape is not None else None
        unsqueeze = _by(expand.inputs[0], "Unsqueeze") if expand is not None else None
        narrow = None if unsqueeze is None or constant_ints(unsqueeze, 1) != (2,) else unsqueeze.inputs[0]
        if narrow is None or expand is None:
            return at, times
        few, wide = self.values[narrow].shape or (), self.values[expand.outputs[0]].shape or ()
        if len(few) != 4 or len(wide) != 5 or not isinstance(few[1], int) or not isinstance(wide[2], int):
            return at, times
        fits = wide == (*few[:2], wide[2], *few[2:]) and self.values[at].shape == (few[0], few[1] * wide[2], *few[2:])
        return (narrow, times) if fits else (at, times)

    def _is_view(self, node: ir.Node) -> bool:
        """Whether a node is an Identity, or a Reshape that leaves the shape as it is."""
        before = node.inputs[0]
        same_dims = before is not None and self.values[before].shape == self.values[node.outputs[0]].shape
        return node.op_type in ("Identity", "Reshape") and same_dims and self.values[node.outputs[0]].shape is not None

    def ring(self, attention: Attention) -> None:
        """Replaces an attention by a ring."""
        form, old = self.ring_form(attention), attention.product.outputs[0]
        assert form is not None
        ringed = self.like(old, self.free(f"{name_of(old)}.ring"))
        scoring = form.scoring
        inputs = [form.query, form.keys, form.values, *([scoring.mask] if scoring.mask is not None else [])]
        numbers = ir.convenience.convert_attributes(
            {
                "scale": scoring.scale,
                "causal": int(form.causal),
                "hidden": scoring.hidden,
                "tokens": self.ranks if self.is_folded else 0,
            }
        )
        self.put(attention.product, RING, inputs, [ringed], ".ring", numbers, OWN)
        for k, guard in enumerate(scoring.guards):
            info = self.values[old]
            zero = self.constant(
                self.free(f"{name_of(old)}.zero"), np.zeros((), old.dtype.numpy() if old.dtype else np.float32)
            )
            kept = self.like(old, self.free(f"{name_of(old)}.kept{k}"))
            self.values[kept] = info
            self.put(attention.product, "Where", [guard, zero, ringed], [kept], f".kept{k}")
            ringed = kept
        self.take_place(ringed, old, attention.product)


@dataclass(frozen=True)
class _Scoring:
    """The ops between the two products of an attention: scores are multiplied by `scale`, then masked.

    `hidden`: the score of a key that a boolean mask hides. `guards`: conditions for each query under which its result is 0.
    """

    scale: float = 1.0
    mask: ir.Value | None = None
    hidden: float = 0.0
    guards: tuple[ir.Value, ...] = ()


@dataclass(frozen=True)
class _RingForm:
    """The operands of a ring: keys and values before their heads are repeated. Causal attention has neither mask nor guards."""

    query: ir.Value
    keys: ir.Value
    values: ir.Value
    scoring: _Scoring
    causal: bool


def _scoring(attention: Attention) -> _Scoring | None:
    """Returns the scale, the mask and the guards of an attention; None if its ops are others, or in another order."""
    scoring, value, is_share = _Scoring(), attention.scores.outputs[0], False
    for node in attention.between:
        first, *rest = (one for one in node.inputs if one is not None)
        other = rest[0] if len(rest) == 1 and value is first else first
        number = _number(other) if len(rest) == 1 else None
        match node.op_type, is_share:
            case "Cast" | "Identity", _:
                pass
            case "Softmax", False:
                is_share = True
            case "Where", True if value is rest[1] and _number(rest[0]) == 0 and _is_for_queries(first):
                scoring = replace(scoring, guards=(*scoring.guards, first))
            case _ if is_share or scoring.mask is not None:
                return None
            case "Mul", _ if number is not None:
                scoring = replace(scoring, scale=scoring.scale * number)
            case "Div", _ if number is not None and value is first:
                scoring = replace(scoring, scale=scoring.scale / number)
            case "Add", _ if len(rest) == 1:
                scoring = replace(scoring, mask=other)
            case "Where", _ if value is rest[0] and (hidden := _number(rest[1])) is not None:
                scoring = replace(scoring, mask=first, hidden=hidden)
            case _:
                return None
        value = node.outputs[0]
    return scoring


def _is_for_queries(condition: ir.Value) -> bool:
    """Whether a condition has one element for all keys of a query."""
    return condition.shape is not None and condition.shape[-1] == 1


def _by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes a value, if it has this op; else None."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None


def _number(value: ir.Value | None) -> float | None:
    """The number in a constant of one element; None for other values."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return float(tensor.numpy().reshape(())) if tensor is not None and tensor.size == 1 else None


@dataclass(frozen=True)
class _Cost:
    """The cost of a way: units that a rank receives, the bytes as text, and the fact, law and remedy of a way that does not fit."""

    units: Fraction
    text: str
    problem: tuple[str, ...] = ()


def _scores_shape(program: Typed, node: ir.Node) -> tuple[int | str, ...] | None:
    """The shape of the scores that a Softmax over the last dim reads; None for other nodes."""
    value = node.inputs[0] if node.op_type == "Softmax" and node.domain in ("", "ai.onnx") else None
    shape = None if value is None else program.values[value].shape
    if shape is None or len(shape) < 3 or node.attributes.get_int("axis", -1) not in (-1, len(shape) - 1):
        return None
    return shape


def _attention(softmax: ir.Node) -> Attention | None:
    """The attention around a Softmax; None if its nodes do not have the form of one."""
    value, after = softmax.outputs[0], list[ir.Node]()
    while True:
        readers = _readers(value)
        if len(readers) != 1 or value.is_graph_output():
            return None
        (node,) = readers
        if node.op_type == "MatMul":
            break
        if node.op_type not in _PASSING:
            return None
        after.append(node)
        value = node.outputs[0]
    product, rank = node, rank_of(softmax.outputs[0])
    before = _back(softmax.inputs[0], rank)
    keys = None if not before else before[-1].inputs[1]
    if product.inputs[0] is not value or before is None or keys is None or product.inputs[1] is None or rank is None:
        return None
    scores = before[-1]
    if any(rank_of(one) != rank for one in (*scores.inputs, *product.inputs)):
        return None
    made = rule_of(scores).outputs[0] or ""
    own = rule_of(product).inputs[1] or ""
    sides = _side(keys, len(made) - 1), _side(product.inputs[1], len(own) - 2)
    return Attention(scores, (*before[-2::-1], softmax, *after), product, *sides)


def _back(value: ir.Value | None, rank: int | None) -> list[ir.Node] | None:
    """The nodes from a value back to the product of queries and keys, which is last; None if there is no such path."""
    node = value.producer() if value is not None else None
    if node is None or rank_of(value) != rank:
        return None
    if node.op_type == "MatMul":
        return [node]
    if node.op_type not in _PASSING or len(_readers(node.outputs[0])) > 1:
        return None
    ways = (_back(one, rank) for one in node.inputs)
    found = next((way for way in ways if way is not None), None)
    return None if found is None else [node, *found]


def _side(value: ir.Value, tokens: int) -> Side:
    """The nodes from the repetition of heads to a value of keys or values; `tokens`: the dim of the tokens in the value."""
    nodes, end, at = list[tuple[ir.Node, str, str]](), 0, value
    heads: int | None = 1 if (rank_of(value) or 0) > 3 else None
    source, count = value, _size(value, heads)
    while (node := at.producer()) is not None and node.op_type in _VIEWS and len(_readers(at)) == 1:
        rule = rule_of(node)
        made = rule.outputs[0]
        letter, head = (made[tokens], made[heads] if heads is not None else WHOLE) if made else (WHOLE, WHOLE)
        k = next((k for k, own in enumerate(rule.inputs) if own and letter in own), None)
        operand = None if k is None or letter == WHOLE else node.inputs[k]
        if k is None or operand is None or operand.const_value is not None:
            break
        own = rule.inputs[k] or ""
        nodes.append((node, letter, head))
        tokens, heads, at = own.index(letter), own.index(head) if head != WHOLE and head in own else None, operand
        if node.op_type == "Unsqueeze" and any(one.op_type == "Expand" for one, _, _ in nodes):
            source, count, end = at, _size(at, heads), len(nodes)
            break
    return Side(source, count, tuple(nodes[:end]))


def _readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read a value's elements, and not only its shape."""
    return [node for node in dict.fromkeys(value.consumers()) if node.op_type not in SIZES]


def _size(value: ir.Value, dim: int | None) -> int | None:
    size = None if dim is None or value.shape is None else value.shape[dim]
    return size if isinstance(size, int) else None


_LIMIT, _LENGTH = 256, 64
"""The largest integer in an evaluated mask, and the least length: beyond a few times that integer the form of a mask does not change."""
_LOWEST = -1e4


def _is_causal(mask: npt.NDArray[Any] | None, hidden: float, tokens: int | str) -> bool:
    """Whether a mask, evaluated for enough `tokens`, lets each token see itself and earlier tokens only."""
    if mask is None or mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    if mask.shape[-1] != tokens and (isinstance(tokens, int) or mask.shape[-1] < _LENGTH):
        return False
    seen = np.tril(np.ones(mask.shape[-2:], bool))
    if mask.dtype == np.bool_:
        return hidden <= _LOWEST and bool((mask == seen).all())
    return bool((np.where(seen, mask == 0, mask <= _LOWEST)).all())


def _is_window(mask: npt.NDArray[Any]) -> bool:
    """Whether a mask, evaluated for enough tokens, lets each token see itself and no later token, but not all earlier ones."""
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    seen = mask if mask.dtype == np.bool_ else mask > _LOWEST
    causal = np.tril(np.ones(mask.shape[-2:], bool))
    return not (seen & ~causal).any() and not (seen == causal).all() and bool(np.diagonal(seen, 0, -2, -1).all())


def _of_sizes(
    graph: ir.Graph, value: ir.Value, symbols: Mapping[str, SymbolInfo], tokens: int | str
) -> npt.NDArray[Any] | None:
    """Evaluates a value that depends only on the inputs' sizes and on constants; None for other values.

    If `tokens` is a symbol, its size is the first legal one that is at least four times the largest integer among the constants, and other
    symbols are small. Returns None if an integer is larger than `_LIMIT`: the mask could differ at a length that is not evaluated.
    """
    computation = computation_of(graph, value, (), graph.inputs)
    if computation is None:
        return None
    most = 0
    for known, by_elements in computation.sources.items():
        if known.const_value is None or not by_elements:
            continue
        array = known.const_value.numpy().ravel()
        finite = np.abs(array[np.isfinite(array)].astype(np.float64)) if array.dtype.kind in "biuf" else np.zeros(0)
        roles = {(use.node.op_type, use.idx) for use in known.uses() if use.node in computation.nodes}
        if roles <= {("Slice", 1), ("Slice", 2)}:  # an end beyond all others
            finite = finite[finite < 1 << 31]
        elif roles <= {(op, k) for op in ("Equal", "Mul", "Where") for k in range(3)} and (array <= 1).all():
            # what is added to scores
            finite = finite[array[np.isfinite(array)] > _LOWEST]
        most = max(most, int(np.ceil(finite.max(initial=0))))
    if most > _LIMIT:
        return None

    def size_of(dim: int | ir.SymbolicDim) -> int | None:
        if isinstance(dim, int) or str(dim.value) not in symbols:
            return dim if isinstance(dim, int) else None
        facts, least = symbols[str(dim.value)].facts, max(_LENGTH, 4 * most) if dim.value == tokens else 2
        step, rest = facts.divisor or 1, facts.remainder or 0
        return -(-max(0, least - rest) // step) * step + rest

    arrays = {}
    for known in computation.sources:
        if known.const_value is None:
            dims = [None] if known.shape is None else [size_of(dim) for dim in known.shape]
            if None in dims or known.dtype is None:
                return None
            arrays[name_of(known)] = np.zeros([dim for dim in dims if dim is not None], known.dtype.numpy())
    try:
        return computation.run(arrays)
    except Exception:
        return None
