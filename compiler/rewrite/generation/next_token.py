"""Selects the next token of each sequence in the graph: a decoder scores only the last token of a step, and outputs the likeliest next one.

    logits = MatMul(h, W)       ->  logits = MatMul(GatherND(h, count - 1), W)          [slots, vocabulary]
                                    tokens = Where(logits = ReduceMax(logits), 0 .. vocabulary - 1, vocabulary)
                                    next_token = ReduceMin(Cast(ReduceMin(Reshape(tokens, [slots, shards, ..]))))

If the vocabulary is sharded, two reductions are partial on each rank: two AllReduces of one number for each sequence. Among equal scores
the lowest token wins; among scores that are not finite none does, and the result is the size of the vocabulary. Tokens are float32 up to
the Cast, which is exact up to 2**24: onnxruntime reduces these nearly three times as fast as int64. The minimum of each shard is cast, for
as many shards as ranks can share the vocabulary (`shards_of`): after the AllReduce a Cast would be a session of its own.

With `embeddings` in the plan a step also outputs the head's input for each sequence: that of its last token, or the sum over its tokens.

    embedding = ReduceSum(Where(Range(0, tokens) < count, h, 0), 1)                 [slots, width]
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.program import Loaded
from partc.compiler.matching import placement_rules
from partc.compiler.plan.generate import GenerateRules
from partc.compiler.plan.groups import DATA_AXIS
from partc.compiler.plan.rules import DATA_PARALLEL
from partc.compiler.rewrite.generation.node_builder import NodeBuilder
from partc.compiler.rewrite.generation.step_form import StepForm
from partc.compiler.rewrite.opset import cuts

NEXT, EMBEDDING = "next_token", "embedding"
_WHOLE = 1 << 24
"""The largest integer up to which float32 represents all."""
_ELEMENTWISE = ("Add", "Cast", "Div", "Identity", "Mul", "Tanh")
_PRODUCTS = ("MatMul", "MatMulNBits")
_OF_WEIGHTS = ("Cast", "DequantizeLinear", "Identity", "Transpose")


@dataclass(frozen=True)
class NextToken:
    """The outputs [slots], [slots, vocabulary] and, with `embeddings`, [slots, width]; and the sizes of the last dims."""

    chosen: ir.Value
    logits: ir.Value
    vocabulary: int
    width: int


def scores_of(outputs: Iterable[ir.Value], where: str) -> ir.Value:
    """Returns the output that scores every token of the vocabulary after each token of a step; raises CompileError unless it is unique."""
    candidates = [
        value
        for value in outputs
        if value.shape is not None
        and len(value.shape) == 3
        and value.dtype is not None
        and value.dtype.is_floating_point()
    ]
    if len(candidates) != 1:
        fact = f"{len(candidates)} outputs of the model are floats [batch, tokens, vocabulary]"
        raise CompileError(Problem(where, fact, "one of them has the logits of the tokens"))
    return candidates[0]


def shards_of(program: Loaded, scores: ir.Value, ids: str) -> int:
    """Returns a multiple of every number of shards that `scores` can have along the vocabulary; `ids` is the input of tokens.

    It is the size of the group that makes them, or the least common multiple of all groups that may, without the mesh axes over which the
    batch is sharded.
    """
    plan = program.plan
    if not cuts(plan, program.declared):
        return 1
    given = plan.dataset.specs.get(ids)
    first = ((DATA_AXIS,),) if plan.dataset.style == DATA_PARALLEL else () if given is None else given.spec[:1]
    dealt = {axis for dim in first if isinstance(dim, tuple) for axis in dim}
    rules = placement_rules(program)[0]
    maker = scores.producer()
    groups = {plan.workers, *(rule.ranks for rule in rules.values())} if maker not in rules else {rules[maker].ranks}
    sizes = [
        math.prod(size for name, size in axes if name not in dealt) if (axes := plan.axes_of(group)) else len(group)
        for group in groups
    ]
    return math.lcm(*sizes)


def width_of(scores: ir.Value, rules: GenerateRules) -> int:
    """Returns the last dim of the head's input, 0 if the plan has no embeddings; raises CompileError if it is not a number."""
    if rules.embeddings is None:
        return 0
    head = head_of(scores)
    hidden = None if head is None else head.inputs[0]
    width = None if hidden is None or hidden.shape is None or len(hidden.shape) != 3 else hidden.shape[2]
    if not isinstance(width, int):
        fact = "the model has no product with weights, of [batch, tokens, width], that makes the logits"
        law = "an embedding is its input"
        raise CompileError(Problem(rules.where("embeddings"), fact, law, "leave out 'embeddings'"))
    return width


def choose(
    build: NodeBuilder,
    scores: ir.Value,
    count: ir.Value,
    scored_tokens: ir.Value | None,
    form: StepForm,
    most: int,
    width: int,
) -> NextToken:
    """Makes the model score only the last of each sequence's `count` tokens, and adds the choice of the likeliest next token.

    With `scored_tokens` [slots, n] it scores those tokens, and outputs have n rows for each slot. `most`: the shards of the
    vocabulary (`shards_of`), as far as its size is divisible by them; `width`: that of embeddings (`width_of`).
    """
    assert scores.shape is not None
    graph, vocabulary = build.graph, scores.shape[2]
    if not isinstance(vocabulary, int):
        fact = f"the last dim of '{scores.name}' is {vocabulary}"
        raise CompileError(Problem(form.rules.where(), fact, "the number of tokens of the vocabulary is known"))
    head, name, axis = head_of(scores), scores.name, build.constant("axis", [1])
    scored = scores if head is None else head.inputs[0]
    if scored_tokens is None:
        last = _last(build, scored, count)
    else:
        tokens = build.op("tokens_of_slots", "Unsqueeze", [scored_tokens, build.constant("axis_2", [2])])
        last = build.op("scored", "Flatten", [build.op("of_slots", "GatherND", [scored, tokens], batch_dims=1)], axis=2)
    embedding = _embedding(build, head, last if scored_tokens is None else None, count, form)
    build.put(before=head)
    if head is not None:
        head.replace_input_with(0, last)
    logits = last if head is None else scores
    top = build.op("top", "ReduceMax", [logits, axis], keepdims=1)
    kind = np.float32 if vocabulary <= _WHOLE else np.int64
    numbers, nobody = (
        build.constant(word, kind(one)) for word, one in (("numbers", np.arange(vocabulary)), ("nobody", vocabulary))
    )
    likeliest = build.op("likeliest", "Where", [build.op("is_top", "Equal", [logits, top]), numbers, nobody])
    if (shards := math.gcd(vocabulary, most)) > 1:
        target = build.constant(f"shards_of_{vocabulary // shards}", [0, -1, vocabulary // shards])
        apart = build.op("by_shard", "Reshape", [likeliest, target])
        least = build.op("least_of_shard", "ReduceMin", [apart, build.constant("axis_2", [2])], keepdims=0)
        whole = build.op("whole", "Cast", [least], to=ir.DataType.INT64.value)
        chosen = build.op("least", "ReduceMin", [whole, axis], keepdims=0)
    else:
        least = build.op("least", "ReduceMin", [likeliest, axis], keepdims=0)
        chosen = build.op("next", "Cast", [least], to=ir.DataType.INT64.value)
    build.put()
    if logits is not scores:
        scores.name, logits.name, scores.shape = f"{name}_of_all", name, None
    results = form.rows * form.scored
    logits.type, logits.shape = scores.type, ir.Shape([results, vocabulary])
    chosen.name, chosen.type, chosen.shape = NEXT, ir.TensorType(ir.DataType.INT64), ir.Shape([results])
    graph.outputs[graph.outputs.index(scores)] = chosen
    if form.rules.sampling:
        graph.outputs.append(logits)
    if embedding is not None:
        embedding.shape = ir.Shape([form.rows, width])
        graph.outputs.append(embedding)
    return NextToken(chosen, logits, vocabulary, width)


def _last(build: NodeBuilder, values: ir.Value | None, count: ir.Value) -> ir.Value:
    """Returns the values [slots, width] of the last of each sequence's `count` tokens, of `values` [slots, tokens, width]."""
    before = build.op("before", "Sub", [count, build.constant("one", 1)])
    row = build.op("row", "Max", [before, build.constant("zero", 0)])  # a sequence without a part has count 0
    rows = build.op("rows", "Unsqueeze", [row, build.constant("axis", [1])])
    return build.op("last", "GatherND", [values, rows], batch_dims=1)


def _embedding(
    build: NodeBuilder, head: ir.Node | None, last: ir.Value | None, count: ir.Value, form: StepForm
) -> ir.Value | None:
    """Adds the input of the head, pooled for each sequence as the plan says, in float32; returns None if the plan has no embeddings.

    `last`: that of the last token, where the scored tokens are those.
    """
    if (pooling := form.rules.embeddings) is None:
        return None
    if any(value.name == EMBEDDING for value in (*build.graph.inputs, *build.graph.outputs)):
        fact = f"the model has an input or output '{EMBEDDING}'"
        raise CompileError(Problem(form.rules.where("embeddings"), fact, "", "rename it where the model is exported"))
    assert head is not None  # the caches have asked for its width
    hidden = head.inputs[0]
    assert hidden is not None
    kind = ir.DataType.FLOAT.value
    if pooling == "mean":
        zero, one, axis = (build.constant(name, n) for name, n in (("zero", 0), ("one", 1), ("axis", [1])))
        tokens = build.op("hidden_tokens", "Squeeze", [build.op("hidden_dim", "Shape", [hidden], start=1, end=2)])
        steps = build.op("hidden_steps", "Range", [zero, tokens, one])
        meant = build.op("is_meant", "Less", [steps, build.op("meant", "Unsqueeze", [count, axis])])
        column = build.op("meant_column", "Unsqueeze", [meant, build.constant("axis_2", [2])])
        floats = build.op("hidden", "Cast", [hidden], to=kind)
        kept = build.op("hidden_meant", "Where", [column, floats, build.constant("nothing", np.float32(0))])
        pooled = build.op("pooled", "ReduceSum", [kept, axis], keepdims=0)
    else:
        pooled = build.op("pooled", "Cast", [_last(build, hidden, count) if last is None else last], to=kind)
    pooled.name, pooled.type = EMBEDDING, ir.TensorType(ir.DataType.FLOAT)
    return pooled


def head_of(scores: ir.Value) -> ir.Node | None:
    """Returns the last product of a model with weights, after which no op mixes tokens; None if there is none."""
    value: ir.Value | None = scores
    while value is not None and (node := value.producer()) is not None:
        others = [one for one in node.inputs[1:] if one is not None]
        if len(value.uses()) > (value is not scores) or not all(map(_is_weight, others)):
            return None
        if node.op_type in _PRODUCTS:
            return node
        if node.op_type not in _ELEMENTWISE:
            return None
        value = node.inputs[0]
    return None


def _is_weight(value: ir.Value) -> bool:
    """Whether a value is computed from weights alone."""
    node = value.producer()
    if node is None:
        return value.const_value is not None
    return node.op_type in _OF_WEIGHTS and all(_is_weight(one) for one in node.inputs if one is not None)
