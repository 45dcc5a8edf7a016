"""Pass: the caches of a decoder, which are its inputs (past) and outputs (present), become tensors that ranks keep.

    present = Concat(past, new)     ->  next = TensorScatter(cache, new, position); its readers get Slice(next, 0, max(position) + tokens)
    Shape(past)[2]                  ->  max(position)
    Range(0, tokens) + that         ->  a row for each sequence, by its own position
    position_ids, attention_mask    ->  made of the position, if the model has them as inputs

    present = f(past)               ->  next = Where(count > 0, f(begun), begun), of a state, which has no entries (`states.py`)

A cache's first dim is the slots that a step computes, and the dim that grew has the plan's `length`, so all steps have the same shapes. The
number of valid entries is an input, `position` [slots]: the number of tokens before those of the step. Entries after a sequence's position
are never read, since the model's mask ends there. A plan has two programs over the same caches (`step_form.py`). Ranks may share the
entries of each cache (`sharded_caches.py`).

The law. A cache is an input whose readers are Shapes and one Concat, which has it as its first operand and makes an output of the graph.
All caches grow along one dim by as many entries as the step has tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import infer_shapes
from partc.compiler.analysis.shapes import shapes
from partc.compiler.dims.normal import normal_dim
from partc.compiler.dims.reading import read
from partc.compiler.dims.symbol import Symbol
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.names import node_paths
from partc.compiler.ir.declared import WINDOW, Declared, Decoding
from partc.compiler.ir.graph import COPIES_DIMS, drop_unread, name_of
from partc.compiler.ir.program import Generation, Loaded, Prepared
from partc.compiler.ir.training import ProgramKind
from partc.compiler.ops.node import operand
from partc.compiler.plan.generate import GenerateRules
from partc.compiler.plan.pattern import literal_pattern
from partc.compiler.plan.rules import OutputRule, Plan, SymbolRule
from partc.compiler.rewrite.adapters import add_slot_adapters
from partc.compiler.rewrite.generation.attended_caches import append_apart
from partc.compiler.rewrite.generation.encoder import ENCODER_LENGTH, Encoder
from partc.compiler.rewrite.generation.fused_attention import FUSED, fuse_attention, head_counts, sights_of
from partc.compiler.rewrite.generation.next_token import (
    EMBEDDING,
    NEXT,
    NextToken,
    choose,
    head_of,
    scores_of,
    shards_of,
    width_of,
)
from partc.compiler.rewrite.generation.node_builder import NodeBuilder
from partc.compiler.rewrite.generation.positions import COUNT, MASK, POSITION, ROWS, Positions, copies_of
from partc.compiler.rewrite.generation.rounding import rounding_of, scaled
from partc.compiler.rewrite.generation.sharded_caches import ShardedAttention, ShardedEntries, sharded_entries
from partc.compiler.rewrite.generation.standard_ops import use_standard_ops
from partc.compiler.rewrite.generation.states import renew, states_of
from partc.compiler.rewrite.generation.step_form import StepForm, narrow_chunks, narrow_rows
from partc.compiler.rewrite.opset import converted, cuts
from partc.compiler.rewrite.straighten import straighten
from partc.runtime.artifact.generation import (
    Blocks,
    DraftRecord,
    EmbeddingRecord,
    GenerationRecord,
    RequestDefaults,
    room_for_entries,
)
from partc.runtime.units import count

OPSET = 24
"""The first opset with TensorScatter."""
_PATH, _TOKENS = "generate", "tokens"
SCORED = "scored_tokens"
"""The input of a step, in a plan with drafts, with the numbers of the tokens that are scored."""


def caches_as_state(program: Loaded) -> Loaded:
    """Returns the program with `caches` and `generation`; the same program if the plan does not generate.

    Raises CompileError if the model has no caches, or caches of another form.
    """
    rules = program.plan.generate
    if rules is None:
        return program
    model = converted(program.model, program.name, OPSET)
    model.opset_imports.update({"": max(OPSET, model.opset_imports.get("", OPSET)), "com.microsoft": 1})
    append_apart(model, program.name)
    use_standard_ops(model)
    program = replace(program, model=model, paths=node_paths(model))
    if cuts(program.plan, program.declared):  # while the length of the past is still a dim that an input has
        program = straighten(shapes(program.into(Prepared, training=None))).into(Loaded)
    model = program.model
    form = StepForm.of(program, rules)
    encoder, build = Encoder.of(model.graph, rules, program.name), NodeBuilder(model.graph, _PATH)
    if program.kind is ProgramKind.ENCODE:
        assert encoder is not None
        return _encoding(program, encoder, build, form)
    cut = sharded_entries(program, rules, encoder is not None)
    apart = {} if encoder is None else encoder.leave(build, form)
    work = _Caches(model, form, program.name, cut)
    chosen = work.rewrite(shards_of(program, work.scores, name_of(work.ids)))
    embedding = None
    if rules.embeddings is not None:
        if encoder is not None:
            law = "an embedding is of a prompt that a decoder alone reads"
            raise CompileError(Problem(rules.where("embeddings"), "the model has an encoder", law, "leave it out"))
        embedding = EmbeddingRecord(output=EMBEDDING, width=chosen.width, pooling=rules.embeddings)
    adapter, stacks = add_slot_adapters(model.graph, node_paths(model), program.declared.adapters, form.rows)
    if rules.draft is not None:
        _refuse_drafts(work, rules, program.name)
    refuse_unknown_tokens(chosen.vocabulary, rules)
    refuse_beyond_positions(model.graph, work.rows, work.tokens, program.declared, rules)
    dims = program.plan.dims
    fixed = work.fixed | (frozenset() if encoder is None else encoder.fixed)
    symbols = {name: one for name, one in dims.symbols.items() if name not in fixed}
    if work.tokens not in work.fixed:
        said = dims.symbols.get(work.tokens)
        own = Symbol() if said is None else said.symbol
        most = replace(own, max=min(own.max or form.tokens, form.tokens))
        symbols[work.tokens] = SymbolRule(most, rules.where() if said is None else said.where)
    # where groups take turns nothing of a step comes back to the first stage, which would wait for it
    to = tuple(range(program.plan.ranks)) if rules.groups == 1 else None
    given = [OutputRule(literal_pattern(NEXT), to, rules.where())]
    if rules.sampling:  # draws look at a few candidates of each shard
        given.append(OutputRule(literal_pattern(name_of(chosen.logits)), None, rules.where(), sharded=True))
    if rules.embeddings is not None:
        given.append(OutputRule(literal_pattern(EMBEDDING), None, rules.where(), sharded=True))
    plan = replace(program.plan, dims=replace(dims, symbols=symbols), outputs=(*program.plan.outputs, *given))
    record = GenerationRecord(
        tokens=name_of(work.ids),
        position=POSITION,
        count=COUNT,
        next=NEXT,
        logits=name_of(chosen.logits) if rules.sampling else "",
        vocabulary=chosen.vocabulary,
        slots=rules.slots,
        groups=rules.groups,
        length=rules.length,
        chunk=rules.chunk,
        runs=form.runs,
        narrow_chunks=narrow_chunks(rules) if work.padded else [],
        narrow_rows=narrow_rows(rules, form.runs),
        cut=1 if cut is None else cut.ranks,
        products=_products(model.graph),
        padded=work.padded,
        states=[*map(name_of, work.states)],
        draft=None if rules.draft is None else DraftRecord(scored=SCORED, **rules.draft.model_dump()),
        memory=rules.memory,
        stop=[*program.declared.decoding.stop] if rules.stop is None else rules.stop,
        defaults=_defaults(program.declared.decoding, rules),
        embedding=embedding,
        adapter=adapter,
        adapters=_adapters(program.plan),
        encoder=None if encoder is None else encoder.record(rules, program.declared.start),
    )
    generation = Generation(
        {**work.caches, **apart}, record, work.unfused, work.sizes, stacks if rules.adapters else frozenset()
    )
    warnings = (*program.warnings, *_unfollowed(program))
    return replace(program, model=model, plan=plan, paths=node_paths(model), generation=generation, warnings=warnings)


def _refuse_drafts(work: _Caches, rules: GenerateRules, name: str) -> None:
    """Raises CompileError if a token of several in a step may get other bits than with other tokens after it."""
    where, help_ = rules.where("draft"), "leave out 'draft'"
    if not work.padded:
        law = "a step of drafts may have fewer tokens than it has room for"
        raise CompileError(Problem(where, f"{name} counts positions from one length for all", law, help_))
    makers = {name_of(cache): following.producer() for cache, following in work.caches.items()}
    if apart := [cache for cache, maker in makers.items() if maker is None or maker.op_type != FUSED]:
        fact = f"the cache '{apart[0]}' is not read by onnxruntime's fused attention: its mask is not proven causal, or it has another form"
        law = "only that op computes the same bits of a token whichever follow it, so that drafts change no token"
        raise CompileError(Problem(where, fact, law, help_))


def _unfollowed(program: Loaded) -> Iterator[str]:
    """Yields a warning for settings in the model's generation configuration that no step follows."""
    if ignored := program.declared.decoding.ignored:
        yield f"{program.name}: the model's configuration of generation has {', '.join(ignored)}: tokens are made without"
    rules = program.plan.generate
    assert rules is not None
    if rules.defaults is None and (defaults := _defaults(program.declared.decoding, rules).options):
        said = ", ".join(f"{name}: {value}" for name, value in defaults.items())
        yield (
            f"{program.name}: the model's configuration of generation has {said}: requests of `partc generate` and `partc serve` have that "
            "where they do not say otherwise; write 'defaults' under `generate` for others"
        )


def _defaults(decoding: Decoding, rules: GenerateRules) -> RequestDefaults:
    """Returns the options of requests that do not set them: the plan's, else the model's if a step returns logits."""
    if rules.defaults is not None:
        return rules.defaults
    return RequestDefaults.model_validate(dict(decoding.defaults)) if rules.sampling else RequestDefaults()


def _products(graph: ir.Graph) -> list[Blocks]:
    """Returns the kinds of products with quantized weights."""
    usual = (("bits", 4), ("block_size", 32), ("accuracy_level", 0))
    found = {
        (*(node.attributes.get_int(name, number) for name, number in usual), operand(node, 3) is not None)
        for node in graph
        if node.op_type == "MatMulNBits"
    }
    return [Blocks(bits=bits, block=block, level=level, points=points) for bits, block, level, points in sorted(found)]


def _adapters(plan: Plan) -> list[str]:
    """Returns the names of the plan's adapters, and an empty name for each further place."""
    names = [rule.name for rule in plan.adapters]
    return names + [""] * ((plan.generate.adapters if plan.generate else 0) - len(names))


def _encoding(program: Loaded, encoder: Encoder, build: NodeBuilder, form: StepForm) -> Loaded:
    """Returns the program that computes the encoder for one slot of each run."""
    dims, prefill = program.plan.dims, program.other_programs[ProgramKind.PREFILL].generation
    assert prefill is not None
    encoding = encoder.encode(build, form)
    graph = program.model.graph
    stacks = add_slot_adapters(graph, node_paths(program.model), program.declared.adapters, form.rows)[1]
    kept = {str(dim) for value in program.model.graph.inputs for dim in value.shape or ()}
    plan = replace(
        program.plan,
        dims=replace(dims, symbols={name: one for name, one in dims.symbols.items() if name in kept}),
        outputs=(),
    )
    generation = Generation(encoding, prefill.record, stacks=stacks if form.rules.adapters else frozenset())
    return replace(program, plan=plan, paths=node_paths(program.model), generation=generation)


@dataclass(frozen=True)
class Append:
    """A cache: the input, the node that appends to it, and the dim along which it grows."""

    past: ir.Value
    append: ir.Node
    axis: int

    @property
    def present(self) -> ir.Value:
        """The output of the node."""
        return self.append.outputs[0]


def appends_of(graph: ir.Graph, name: str, where: str) -> list[Append]:
    """Returns the caches; raises CompileError if there are none, or one has another reader."""
    outputs, problems, appended, states = {*graph.outputs}, list[Problem](), list[Append](), states_of(graph)
    for value in (value for value in graph.inputs if value not in states):
        readers = [node for node, k in value.uses() if node.op_type == "Concat" and k == 0]
        appends = [node for node in readers if node.outputs[0] in outputs]
        if not appends or value.shape is None:
            continue
        others = [node for node, _ in value.uses() if node is not appends[0] and node.op_type != "Shape"]
        if others or len(appends[0].inputs) != 2:
            reader = others[0] if others else appends[0]
            fact = f"'{value.name}' is also read by {reader.op_type} '{reader.name}'"
            law = "a cache is read by the one Concat that appends to it, and by Shape"
            problems.append(Problem(name, fact, law, "export the model with its cache as past and present"))
            continue
        appended.append(Append(value, appends[0], appends[0].attributes["axis"].as_int() % len(value.shape)))
    if problems:
        raise CompileError(problems)
    if not appended and not states:
        makers = (value.producer() for value in outputs)
        merged = next((node for node in makers if node is not None and node.op_type == "If"), None)
        fact = "the model has no cache"
        if merged is not None:
            fact = f"the model has its caches in the If '{merged.name}', which chooses between a first step and a later one"
        law = "a cache is an input to which a Concat appends what becomes an output: present = Concat(past, new)"
        help_ = (
            "export one decoder for both, at opset 23, with position_ids, and with past and present as inputs and outputs; "
            "or leave out 'generate'"
        )
        raise CompileError(Problem(where, fact, law, help_))
    return appended


def ids_of(graph: ir.Graph, where: str) -> ir.Value:
    """Returns the input of a step's tokens: integers [batch, tokens]."""
    candidates = [
        value
        for value in graph.inputs
        if value.dtype in (ir.DataType.INT64, ir.DataType.INT32)
        and value.name not in (MASK, ROWS)
        and value.shape is not None
        and len(value.shape) == 2
        and not isinstance(value.shape[0], int)
        and value.shape[1] in (1, *(dim for dim in value.shape if not isinstance(dim, int)))
    ]
    if len(candidates) == 1:
        return candidates[0]
    fact = f"{len(candidates)} inputs of the model are integers [batch, tokens] of two dynamic dims"
    help_ = "export the model with a dynamic batch, and dynamic tokens"
    raise CompileError(Problem(where, fact, "one of them has the tokens of a step", help_))


class _Caches:
    """One rewrite. `ids`: the tokens of a step; `tokens`: the name of their dim; `fixed`: the names of dims that become numbers.

    `padded`: whether all steps have the same number of tokens; `rows`: the tokens' positions. `caches`: maps each cache to its value after
    a step.
    """

    def __init__(self, model: ir.Model, form: StepForm, name: str, cut: ShardedEntries | None) -> None:
        self.graph, self.form, self.name, self.cut = model.graph, form, name, cut
        self.heads = head_counts(model)
        self.build = NodeBuilder(self.graph, _PATH)
        self.states = states_of(self.graph)
        self.pairs = appends_of(self.graph, name, form.rules.where())
        self.ids = ids_of(self.graph, form.rules.where())
        dims = self.ids.shape
        assert dims is not None
        self.tokens = str(dims[1].value or _TOKENS) if isinstance(dims[1], ir.SymbolicDim) else _TOKENS
        gone = [dims[0], *(dim for pair in self.pairs for dim in pair.past.shape or ())]
        gone += [dim for state in self.states for dim in state.shape or ()]
        self.fixed = {str(dim.value) for dim in gone if isinstance(dim, ir.SymbolicDim)}
        self.ranks = _ranks(model)
        self._refuse_other_growth()
        self._refuse_chunks()
        replacing = {*self.states.values()}
        self.scores = scores_of(
            (value for value in self.graph.outputs if value not in replacing), self.form.rules.where()
        )
        self.sizes = self._sizes()
        self.caches: dict[ir.Value, ir.Value] = {}
        self.unfused: tuple[str, ...] = ()

    def rewrite(self, shards: int) -> NextToken:
        """Edits the model, whose vocabulary has at most `shards` shards; returns its new outputs."""
        assert self.ids.shape is not None
        batch, width = self.ids.shape[0], width_of(self.scores, self.form.rules)
        named = isinstance(batch, ir.SymbolicDim) and batch.value is not None
        batched = {value for value in self.ranks if named and value.shape and value.shape[0] == batch}
        for value in (value for node in self.graph for value in node.outputs if value is not self.scores):
            value.shape = None  # of other sizes from now on: the pass `shapes` infers them
        position, count = (self._fed(name) for name in (POSITION, COUNT))
        positions = Positions(self.build, position, count, self.ids, self.form, self.ranks, batched)
        for pair in self.pairs:
            self._keep(pair, positions)
        for state, present in self.states.items():
            cache, self.caches[cache] = renew(self.build, state, present, self.form.rows, positions)
        positions.give_rows()
        scored = self._fed(SCORED, self.form.scored) if self.form.rules.draft is not None else None
        chosen = choose(self.build, self.scores, count, scored, self.form, shards, width)
        drop_unread(self.graph, self.caches.values())
        self._refuse_unfed((position, count) if scored is None else (position, count, scored))
        self.padded, self.rows = not positions.one_length, positions.rows
        if self.padded or self.form.tokens == 1:
            self.fixed.add(self.tokens)
        tokens = self.form.tokens if self.tokens in self.fixed else self.tokens
        if isinstance(tokens, str):
            self.sizes = {}  # one slot, and a prompt's last chunk is as long as it is
        self.ids.shape = ir.Shape([self.form.rows, tokens])
        sights = sights_of(self.graph, self.heads, positions, self.form, self.name)
        if self.cut is not None:
            if not self.padded:
                law = "each slot appends to its own block of a cache"
                self.cut.refuse(
                    "it counts positions from one length for all", law, "export it with an input 'position_ids'"
                )
            if not self.pairs:
                self.cut.refuse("it has no cache with entries", "states of fixed size have none to cut")
            ShardedAttention(self.build, positions, self.cut).rewrite(self.heads, sights, self.caches)
        elif self.padded:  # else a prompt's last step has fewer tokens
            left = fuse_attention(self.build, self.heads, sights, self.caches, positions)
            self.unfused = tuple(node.name or node.op_type for node in left)
        drop_unread(self.graph, self.caches.values())
        for node in self.graph:
            if node.op_type == "Reshape":
                node.meta[COPIES_DIMS] = True
        return chosen

    def _refuse_chunks(self) -> None:
        """Raises CompileError if a step has several tokens of a sequence, and the model takes one, or has states."""
        if self.form.rules.chunk == 1 or not (self.states or isinstance([*(self.ids.shape or ())][1], int)):
            return
        fact, law = f"'chunk' is {self.form.rules.chunk}", "the model takes one token of each sequence"
        if self.states:
            law = f"the model keeps states of fixed size, such as '{next(iter(self.states)).name}', which each token replaces"
        raise CompileError(Problem(self.form.rules.where("chunk"), fact, law, "write chunk: 1"))

    def _sizes(self) -> dict[ir.Value, tuple[int | None, ...]]:
        """Maps each value to its dims: the slots or tokens of a step in place of the model's batch or tokens, else None."""
        dims, form = self.ids.shape or (), (self.form.rows, self.form.tokens)
        sizes = {
            dim: size for dim, size in zip(dims, form, strict=True) if isinstance(dim, ir.SymbolicDim) and dim.value
        }
        shapes = {value: value.shape or () for node in self.graph for value in node.outputs}
        known_sizes = {
            value: tuple(sizes.get(dim) if isinstance(dim, ir.SymbolicDim) else None for dim in shape)
            for value, shape in shapes.items()
        }
        if (
            (head := head_of(self.scores)) is not None
            and head.inputs[0] is not None
            and self.ranks.get(head.inputs[0]) == 3
        ):
            known_sizes[head.inputs[0]] = (*form, None)  # whatever is known of it: its last token is scored
        return {value: known for value, known in known_sizes.items() if any(known) and value not in self.graph.outputs}

    def _refuse_other_growth(self) -> None:
        """Raises CompileError with the caches that are known to grow by another number of entries than a step has tokens."""
        problems = []
        for pair in self.pairs:
            new = pair.append.inputs[1]
            dims = None if new is None else new.shape
            if dims is None or dims[pair.axis] == [*(self.ids.shape or ())][1]:
                continue
            if other := _other_growth(normal_dim(dims[pair.axis], {})):
                fact = f"{pair.append.op_type} '{pair.append.name}' appends {other} to '{pair.past.name}'"
                law = "a cache gets one entry for each token of a step: sequences have one length in all caches"
                problems.append(Problem(self.name, fact, law, "export the model with caches that grow alike"))
        if problems:
            raise CompileError(problems)

    def _fed(self, name: str, numbers: int = 0) -> ir.Value:
        """Adds an input of a step with a number for each sequence, or with `numbers` for each."""
        if any(value.name == name for value in self.graph.inputs):
            law = f"a step is given '{name}' beside the model's inputs"
            help_ = "rename the input where the model is exported"
            raise CompileError(Problem(self.name, f"the model has an input '{name}'", law, help_))
        shape = ir.Shape([self.form.rows, numbers] if numbers else [self.form.rows])
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=shape)
        self.graph.inputs.append(value)
        return value

    def _refuse_unfed(self, given: tuple[ir.Value, ...]) -> None:
        """Raises CompileError with the inputs that remain, for which no step has a value."""
        fed = (self.ids, *given)
        left = [one for one in self.graph.inputs if one.uses() and one not in fed and one.name != ENCODER_LENGTH]
        if left:
            fact = f"no step is given {', '.join(repr(one.name) for one in left[:4])}, which the decoder reads"
            law = f"it has tokens, '{MASK}' and '{ROWS}'; another input is a cache, to which a Concat appends: present = Concat(past, new)"
            raise CompileError(Problem(self.name, fact, law, "export the model without other inputs"))

    def _keep(self, pair: Append, positions: Positions) -> None:
        """Turns an input into a cache, and its Concat into the write of the new entries."""
        value, node, present = pair.past, pair.append, pair.present
        new, shape, kind = node.inputs[1], self._shape(pair), value.dtype
        assert kind is not None
        if (rounded := rounding_of(new)) is not None:
            kind = ir.DataType.INT8
        for reader in [reader for reader, _ in value.uses() if reader.op_type == "Shape"]:
            positions.measure(reader, shape, pair.axis)
        zeros = ir.tensor(np.broadcast_to(np.zeros((), kind.numpy()), shape), name=value.name)
        cache = ir.val(value.name, const_value=zeros)
        self.graph.inputs.remove(value)
        self.graph.register_initializer(cache)
        if rounded is not None:
            new = self.build.op("entries", "Cast", [rounded.whole], to=kind.value)
        following = self.build.op("append", "TensorScatter", [cache, new, positions.position], axis=pair.axis)
        begin, axis = self.build.constant("begin", [0]), self.build.constant(f"axis_{pair.axis}", [pair.axis])
        read = self.build.op("read", "Slice", [following, begin, positions.length, axis])
        following.type = read.type = ir.TensorType(kind)
        if rounded is not None:
            numbers = self.build.op("numbers", "Cast", [read], to=ir.DataType.FLOAT.value)
            read = scaled(self.build, numbers, rounded.scale, rounded.type)
            read.type = value.type
        self.build.put(before=node)
        following.name, present.name = present.name, None
        self.graph.outputs.remove(present)
        ir.convenience.replace_all_uses_with(present, read)
        self.graph.remove(node, safe=True)
        self.caches[cache] = following

    def _shape(self, pair: Append) -> tuple[int, ...]:
        """Returns the shape of a cache."""
        dims = [*(pair.past.shape or ())]
        rules, ranks = self.form.rules, 1 if self.cut is None else self.cut.ranks
        dims[0], dims[pair.axis] = self.form.rows, ranks * room_for_entries(rules.length, rules.chunk, ranks)
        if unknown := [str(dim) for dim in dims if not isinstance(dim, int)]:
            fact = f"'{pair.past.name}' has the dim {unknown[0]}, which is neither the batch nor the one along which it grows"
            raise CompileError(Problem(self.name, fact, help=f"export the model with a number for {unknown[0]}"))
        return tuple(dim for dim in dims if isinstance(dim, int))


def _other_growth(entries: int | ir.SymbolicDim) -> str:
    """Returns a text about a number of entries that cannot be the tokens of a step, whatever their dim is named; empty if it can."""
    if isinstance(entries, int):
        return f"{count(entries, 'entry', 'entries')} in each step"
    expression = None if entries.value is None else read(str(entries.value))
    if expression is None:
        return ""
    more, times = expression.as_coeff_Add()[0], expression.as_coeff_Mul()[0]
    if more != 0:
        return f"{more} more than a step has tokens"
    return f"{times} entries for each token" if times.is_Integer and times != 1 else ""


def _ranks(model: ir.Model) -> dict[ir.Value, int]:
    """Maps each value to its number of dims, as far as it is known."""
    made = [value for node in model.graph for value in node.outputs]
    if any(value.shape is None for value in made):
        infer_shapes(model, {})
    values = (*made, *model.graph.inputs, *model.graph.initializers.values())
    return {value: len(value.shape) for value in values if value.shape is not None}


def refuse_beyond_positions(
    graph: ir.Graph, rows: Iterable[ir.Value], tokens: str, declared: Declared, rules: GenerateRules
) -> None:
    """Raises CompileError if the plan's `length` exceeds the tables of positions or the model's limit.

    `rows`: the positions of tokens, by which the tables are looked up. `tokens`: the dim whose declared maximum is the model's limit.
    """
    said = declared.symbols.get(tokens)
    most, law = declared.decoding.longest, "each token of a sequence has a position of its own"
    limits = [(said.max, f"the model has {said.max} positions", law)] if said is not None and said.max else []
    limits += [(size, f"the table of positions '{name}' has {size}", law) for name, size in _tables(graph, rows)]
    if most:
        changing = f"beyond {most} tokens the frequencies of the model's {declared.decoding.positions} positions change"
        law = "the keys in a cache stay as they were rotated"
        if declared.decoding.positions == WINDOW:
            changing = f"the cache of transformers keeps {most} entries of this model, whose mask has no window"
            law = "beyond these `generate` of transformers makes other tokens than the model's forward"
        limits = [(most, changing, law), *limits]
    size, fact, law = min(limits, default=(rules.length, "", ""), key=lambda one: one[0])
    if size < rules.length:
        fact = f"{fact}, and 'length' is {rules.length}"
        raise CompileError(Problem(rules.where("length"), fact, law, f"write length: {size} or less"))


def refuse_unknown_tokens(vocabulary: int, rules: GenerateRules) -> None:
    """Raises CompileError if a stop token is not a token of the model."""
    if outside := [token for token in rules.stop or () if not 0 <= token < vocabulary]:
        fact = (
            f"{', '.join(map(str, outside))} {'is not a token' if len(outside) == 1 else 'are not tokens'} of the model"
        )
        help_ = "write the tokens behind which a sequence ends, or leave out 'stop'"
        raise CompileError(Problem(rules.where("stop"), fact, f"its tokens are 0 to {vocabulary - 1}", help_))


def _tables(graph: ir.Graph, rows: Iterable[ir.Value]) -> Iterator[tuple[str, int]]:
    """Yields the weights whose rows are looked up by positions, each with its number of rows."""
    indices = {copy for value in rows for copy in copies_of(value)}
    for node in graph:
        if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0 or node.inputs[1] not in indices:
            continue
        table = node.inputs[0]
        if table is not None and table.is_initializer() and table.shape is not None and len(table.shape) > 1:
            size = table.shape[0]
            if isinstance(size, int):
                yield name_of(table), size
