"""Splits an encoder from its decoder: a separate program runs it once for a sequence, and writes the caches that the decoder's layers read.

    encode             states = encoder(input_ids, mask);  k = states x W  ->  next = TensorScatter(cache, k, 0)
    prefill, decode    y = Attention(q, k, ..)                             ->  y = Attention(q, cache, ..)
    all of them        encoder_attention_mask [batch, entries]             ->  1 for the entries before `encoder_length` of each sequence

The cache of such keys and values is written at once, and never appended to: a decoder reads all of its entries, and its mask excludes those
after the sequence's `encoder_length`. An encoder whose input has a fixed size, such as the features of 30 s of sound, has no mask.

The law. The keys and values that the decoder reads from the encoder are outputs of the model [batch, heads, entries, size] that depend on
no past. The decoder depends on the encoder's input only through them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import onnx_ir as ir
from partc.compiler.dims.normal import normal_dim
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import drop_unread, name_of
from partc.compiler.plan.generate import GenerateRules
from partc.compiler.rewrite.generation.node_builder import NodeBuilder
from partc.compiler.rewrite.generation.states import states_of
from partc.compiler.rewrite.generation.step_form import StepForm
from partc.runtime.artifact.generation import EncoderRecord
from partc.runtime.artifact.tensors.dtypes import BY_CODE

ENCODER_LENGTH, ENCODER_MASK = "encoder_length", "encoder_attention_mask"
"""The input [slots] that steps get in addition to the model's inputs; the model's input that it replaces."""
_GROWS = 2
"""The dim of keys and values along which their entries lie."""


@dataclass(frozen=True)
class Encoder:
    """An encoder: `source` is its input, `mask` marks the valid entries of the input, or is None where all are valid.

    `crossing`: the keys and values that a decoder reads; `length`: their most entries; `fixed`: the names of dims that become numbers;
    `vocabulary`: the number of rows of the smallest table that the input indexes, or None.
    """

    source: ir.Value
    mask: ir.Value | None
    crossing: tuple[ir.Value, ...]
    length: int
    fixed: frozenset[str]
    vocabulary: int | None

    @classmethod
    def of(cls, graph: ir.Graph, rules: GenerateRules, name: str) -> Self | None:
        """Returns a model's encoder; None for a decoder alone. Raises CompileError where the decoder reads it in another way."""
        crossing = _crossing(graph)
        if not crossing:
            if rules.encoder_length is not None:
                fact = "the model has no encoder whose keys and values are outputs beside its caches"
                help_ = "leave out 'encoder_length'"
                raise CompileError(Problem(rules.where("encoder_length"), fact, help=help_))
            return None
        mask = next((value for value in graph.inputs if value.name == ENCODER_MASK), None)
        encoder_inputs = [value for value in _inputs_of(crossing) if value is not mask]
        if len(encoder_inputs) != 1:
            names = ", ".join(repr(value.name) for value in encoder_inputs)
            fact = f"the keys and values that cross to the decoder are made of {len(encoder_inputs)} inputs: {names}"
            law = f"an encoder has one input, beside '{ENCODER_MASK}'"
            raise CompileError(Problem(name, fact, law))
        others = [value for value in graph.outputs if value not in crossing]
        if encoder_inputs[0] in _inputs_of(others, crossing):
            fact = f"the decoder reads what is made of '{encoder_inputs[0].name}', and not through its keys and values alone"
            law = "keys and values of an encoder's output are outputs of the model, and all that a decoder reads of it"
            help_ = "export the model with these keys and values as outputs, as `partc export --cache` does"
            raise CompileError(Problem(name, fact, law, help_))
        dims = [
            dim
            for value in (encoder_inputs[0], *crossing)
            for dim in value.shape or ()
            if isinstance(dim, ir.SymbolicDim)
        ]
        fixed = frozenset(str(dim.value) for dim in dims)
        tables = [node.inputs[0] for node, k in encoder_inputs[0].uses() if node.op_type == "Gather" and k == 1]
        known = [table.shape[0] for table in tables if table is not None and table.shape is not None]
        vocabulary = min((size for size in known if isinstance(size, int)), default=None)
        return cls(
            encoder_inputs[0], mask, crossing, _length(encoder_inputs[0], crossing, rules, name), fixed, vocabulary
        )

    def leave(self, build: NodeBuilder, form: StepForm) -> dict[ir.Value, ir.Value | None]:
        """Removes the encoder from a model, whose decoder then reads caches; maps each cache to None, since a step replaces none."""
        graph, replaced = build.graph, dict[ir.Value, ir.Value | None]()
        for value in self.crossing:
            graph.outputs.remove(value)
            cache = self._cache(build, value, form)
            ir.convenience.replace_all_uses_with(value, cache)
            replaced[cache] = None
        self._mask(build, form)
        self._measured(build, self.source, form)
        drop_unread(graph)
        return replaced

    def encode(self, build: NodeBuilder, form: StepForm) -> dict[ir.Value, ir.Value | None]:
        """Reduces a model to its encoder, which writes caches; maps each cache to the value that replaces it."""
        graph, replaced = build.graph, dict[ir.Value, ir.Value | None]()
        begin = build.constant("begin_of_each", np.zeros(form.rows))
        graph.outputs.clear()
        for value in self.crossing:
            cache = self._cache(build, value, form)
            following = build.op("encoded", "TensorScatter", [cache, value, begin], axis=_GROWS)
            following.type = cache.type
            replaced[cache] = following
        build.put()
        self._mask(build, form)
        for value in [value for value in graph.inputs if value not in (self.source, self.mask)]:
            self._measured(build, value, form)
        drop_unread(graph, [value for value in replaced.values() if value is not None])
        for value in (value for node in graph for value in node.outputs):
            value.shape = None  # its sizes change: the pass `shapes` infers them
        self.source.shape = ir.Shape([form.rows, *self._sizes()])
        return replaced

    def record(self, rules: GenerateRules, start: Collection[int]) -> EncoderRecord:
        """Returns the encoder's record for the manifest."""
        length = "" if self.mask is None else ENCODER_LENGTH
        assert self.source.dtype is not None
        return EncoderRecord(
            input=name_of(self.source),
            type=f"tensor({BY_CODE[self.source.dtype.value].name})",
            shape=self._sizes(),
            vocabulary=self.vocabulary,
            count=length,
            length=self.length,
            start=[*(rules.start or start)],
        )

    def _sizes(self) -> list[int]:
        """Returns the dims of one sequence's input."""
        return [dim if isinstance(dim, int) else self.length for dim in (self.source.shape or ())[1:]]

    def _cache(self, build: NodeBuilder, value: ir.Value, form: StepForm) -> ir.Value:
        """Adds the cache for keys or values, under their name."""
        assert value.shape is not None
        assert value.dtype is not None
        _, heads, _, size = value.shape
        shape = [form.rows, int(str(heads)), self.length, int(str(size))]
        name, value.name = name_of(value), f"{name_of(value)}.made"
        zeros = ir.tensor(np.broadcast_to(np.zeros((), value.dtype.numpy()), shape), name=name)
        cache = ir.Value(name=name, type=value.type, shape=ir.Shape(shape), const_value=zeros)
        build.graph.register_initializer(cache)
        return cache

    def _mask(self, build: NodeBuilder, form: StepForm) -> None:
        """Replaces the model's mask by one that is computed from the sequences' lengths, a new input."""
        if self.mask is None or not self.mask.uses():
            return
        count = ir.Value(name=ENCODER_LENGTH, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([form.rows]))
        build.graph.inputs.append(count)
        ends = build.op("encoder_ends", "Unsqueeze", [count, build.constant("axis", [1])])
        entries = build.constant("encoder_entries", np.arange(self.length))
        kind = self.mask.dtype or ir.DataType.INT64
        mask = build.op("encoder_mask", "Cast", [build.op("is_meant", "Less", [entries, ends])], to=kind.value)
        build.put(before=build.graph[0])
        ir.convenience.replace_all_uses_with(self.mask, mask)
        build.graph.inputs.remove(self.mask)

    def _measured(self, build: NodeBuilder, value: ir.Value, form: StepForm) -> None:
        """Replaces each Shape of an input that is removed by constants."""
        sizes = [form.rows, *(self._sizes() if value is self.source else [*(value.shape or ())][1:])]
        for node in [node for node, _ in value.uses() if node.op_type == "Shape"]:
            begin, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(sizes))
            wanted = sizes[begin:end]
            if all(isinstance(size, int) for size in wanted):
                word = "_".join(map(str, wanted))
                ir.convenience.replace_all_uses_with(node.outputs[0], build.constant(f"sizes_{word}", wanted))


def takes_any_length(graph: ir.Graph) -> bool:
    """Whether a model has an encoder whose input has a dynamic dim, so that a plan must set its `encoder_length`."""
    given = _inputs_of(_crossing(graph))
    return any(not isinstance(dim, int) for value in given for dim in (value.shape or ())[1:])


def _crossing(graph: ir.Graph) -> tuple[ir.Value, ...]:
    """Returns the outputs of a model with a past that are keys and values and depend on no past."""
    appends = [node for value in graph.outputs if (node := value.producer()) and node.op_type == "Concat"]
    pasts = {value for node in appends if (value := node.inputs[0]) is not None and value.is_graph_input()}
    pasts |= states_of(graph).keys()
    outputs = [value for value in graph.outputs if pasts and value.shape is not None and len(value.shape) == 4]
    return tuple(value for value in outputs if pasts.isdisjoint(_inputs_of([value])))


def _length(encoder_input: ir.Value, crossing: Collection[ir.Value], rules: GenerateRules, name: str) -> int:
    """Returns the most entries of the encoder's keys and values. Raises CompileError where their shapes or the plan do not fit."""
    dynamic = [dim for dim in (encoder_input.shape or ())[1:] if not isinstance(dim, int)]
    if len(dynamic) > 1:
        fact = f"the encoder's input '{encoder_input.name}' has {len(dynamic)} dynamic dims behind the batch"
        raise CompileError(Problem(name, fact, help="export the model with numbers for all but one of them"))
    for value in crossing:
        _, heads, entries, size = (normal_dim(dim, {}) for dim in value.shape or ())
        same = entries == dynamic[0] if dynamic else isinstance(entries, int)
        if not isinstance(heads, int) or not isinstance(size, int) or not same:
            fact = f"'{value.name}', which crosses to the decoder, has the shape {value.shape}"
            law = f"it is [batch, heads, entries, size], with numbers for heads and size, and the entries of '{encoder_input.name}'"
            raise CompileError(Problem(name, fact, law))
    if dynamic:
        if rules.encoder_length is None:
            fact = f"the plan says no most entries of the encoder's input '{encoder_input.name}'"
            law = "ranks keep keys and values of every entry of each slot"
            raise CompileError(Problem(rules.where(), fact, law, "write generate: {encoder_length: 512, ...}"))
        return rules.encoder_length
    size = next(int(str(normal_dim((value.shape or ())[_GROWS], {}))) for value in crossing)
    if rules.encoder_length not in (None, size):
        fact = f"'encoder_length' is {rules.encoder_length}, and the model's encoder gives {size} entries"
        law = f"its input '{encoder_input.name}' has one size"
        raise CompileError(Problem(rules.where("encoder_length"), fact, law, "leave out 'encoder_length'"))
    return size


def _inputs_of(values: Collection[ir.Value], behind: Collection[ir.Value] = ()) -> list[ir.Value]:
    """Returns the inputs that `values` depend on, without paths through `behind` or through a Shape."""
    return [value for value in _ancestors(values, behind) if value.is_graph_input()]


def _ancestors(values: Collection[ir.Value], behind: Collection[ir.Value]) -> Iterator[ir.Value]:
    seen, waiting = {*behind}, [*values]
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        yield value
        node = value.producer()
        if node is not None and node.op_type != "Shape":
            waiting += [operand for operand in node.inputs if operand is not None]
