"""Pass: the caches of a decoder, which come in as past and go out as present, become tensors that ranks keep.

    present = Concat(past, new)     ->  next = TensorScatter(cache, new, position); its readers get Slice(next, 0, max(position) + tokens)
    Shape(past)[2]                  ->  max(position)
    Range(0, tokens) + that         ->  a row for each sequence, by its own position
    position_ids, attention_mask    ->  made of the position, where the model has them as inputs

A cache has the plan's `slots` as its first dim and its `length` where it grew, so no step has another shape; how many entries are valid is
an input, `position` [slots], the number of tokens before those that a step is given. What lies behind a sequence's position is never read:
the mask of the model ends there.

The law. A cache is an input whose readers are one Concat, as its first operand, which gives an output of the graph, and Shapes. All of them
grow along one dim by as many entries as the step has tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from partc.compiler.dims.symbol import Symbol
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.names import node_paths
from partc.compiler.ir.graph import drop_unread, name_of
from partc.compiler.ir.program import Loaded
from partc.compiler.plan.generate import GenerateRules
from partc.compiler.plan.pattern import literal_pattern
from partc.compiler.plan.rules import OutputRule, SymbolRule
from partc.compiler.rewrite.opset import converted
from partc.runtime.artifact.generation import GenerationRecord

POSITION, COUNT, NEXT = "position", "count", "next_token"
"""The inputs [slots] and the output [slots] of the program beside the model's."""
_OPSET = 24
"""The first one with TensorScatter."""
_MASK, _ROWS = "attention_mask", "position_ids"
_ELEMENTWISE = ("Add", "Cast", "Div", "Identity", "Mul", "Tanh")
_COPIES = ("Squeeze", "Unsqueeze", "Reshape", "Identity", "Cast")


def caches_as_state(program: Loaded) -> Loaded:
    """The program with `caches`; itself where the plan does not generate. CompileError where the model has no caches, or others."""
    rules = program.plan.generate
    if rules is None:
        return program
    model = converted(program.model, program.name, _OPSET)
    model.opset_imports[""] = max(_OPSET, model.opset_imports.get("", _OPSET))
    work = _Caches(model, rules, program.name)
    work.rewrite()
    symbols = {**program.plan.dims.symbols}
    tokens = symbols.get(work.tokens)
    own = tokens.symbol if tokens is not None else Symbol()
    most = min(own.max or rules.chunk, rules.chunk)
    symbols[work.tokens] = SymbolRule(
        replace(own, max=most), tokens.where if tokens is not None else rules.where("chunk")
    )
    for name in work.fixed:
        symbols.pop(name, None)
    everyone = OutputRule(literal_pattern(NEXT), tuple(range(program.plan.ranks)), rules.where())
    plan = replace(
        program.plan,
        dims=replace(program.plan.dims, symbols=symbols),
        outputs=(*program.plan.outputs, everyone),
    )
    record = GenerationRecord(
        tokens=name_of(work.ids),
        position=POSITION,
        count=COUNT,
        next=NEXT,
        logits=name_of(work.logits) if rules.sampling else "",
        slots=rules.slots,
        length=rules.length,
        chunk=most,
        stop=rules.stop,
    )
    return replace(program, model=model, plan=plan, paths=node_paths(model), caches=work.found, generation=record)


@dataclass(frozen=True)
class _Pair:
    """A cache: the input, the node that appends to it, and the dim along which it grows."""

    past: ir.Value
    append: ir.Node
    axis: int

    @property
    def present(self) -> ir.Value:
        """What the node makes."""
        return self.append.outputs[0]


class _Caches:
    """One rewrite. `found`: by cache what takes its place after a step. `tokens`: the name of the dim of a step's tokens."""

    def __init__(self, model: ir.Model, rules: GenerateRules, name: str) -> None:
        self.model, self.graph, self.rules, self.name = model, model.graph, rules, name
        self.found: dict[ir.Value, ir.Value] = {}
        self.tokens = ""
        self.fixed: tuple[str, ...] = ()
        """The names of dims that are numbers from now on."""
        self._new: list[ir.Node] = []
        self._made = 0

    def rewrite(self) -> None:
        """Edits the model."""
        pairs = self._pairs()
        self.ids = ids = self._ids(pairs)
        batch, self.tokens = (str(dim) for dim in ids.shape or ())
        grown = {str(pair.past.shape[pair.axis]) for pair in pairs if pair.past.shape is not None}
        self.fixed = (batch, *grown)
        kept = {*self.graph.outputs}
        for node in self.graph:
            for value in node.outputs:
                value.shape = None if value not in kept else value.shape
        position, count = (self._fed(name) for name in (POSITION, COUNT))
        first = self.graph[0]
        past = self._op("ReduceMax", [position], keepdims=1)
        tokens = self._op("Shape", [ids], start=1, end=2)
        length = self._op("Add", [past, tokens])
        self._feed_inputs(position, tokens, length)
        self.graph.insert_before(first, self._new)
        self._new = []
        for value in (*self.graph.inputs, *self.graph.outputs):
            if value not in (position, count) and value.shape is not None:
                value.shape = ir.Shape([self.rules.slots if str(dim) == batch else dim for dim in value.shape])
        for pair in pairs:
            self._keep(pair, position, past, length)
        if self.rules.slots > 1:
            self._give_rows(position, past)
        self.logits = self._choose(self._scores(), count)
        drop_unread(self.graph)
        self._refuse_one_length(past)

    def _fed(self, name: str) -> ir.Value:
        """A number for each sequence, which a step is given."""
        if any(value.name == name for value in self.graph.inputs):
            fact = f"the model has an input '{name}'"
            law = "a step is given position and count beside the model's inputs"
            raise CompileError(Problem(self.name, fact, law, "rename the input where the model is exported"))
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([self.rules.slots]))
        self.graph.inputs.append(value)
        return value

    def _scores(self) -> ir.Value:
        """The output that scores every token of the vocabulary for every token of the step; CompileError where there is not one."""
        found = [
            value
            for value in self.graph.outputs
            if value.shape is not None
            and len(value.shape) == 3
            and value.dtype is not None
            and value.dtype.is_floating_point()
        ]
        if len(found) == 1:
            return found[0]
        fact = f"{len(found)} outputs of the model are floats [batch, tokens, vocabulary]"
        raise CompileError(Problem(self.rules.where(), fact, "one of them has the logits of the tokens"))

    def _choose(self, scores: ir.Value, count: ir.Value) -> ir.Value:
        """Lets the model score the last token of each sequence alone, and takes the likeliest token; what scores."""
        assert scores.shape is not None
        width = scores.shape[2]
        if not isinstance(width, int):
            fact = f"the last dim of '{scores.name}' is {width}"
            raise CompileError(Problem(self.rules.where(), fact, "the number of tokens of the vocabulary is known"))
        at = _head(scores) or scores
        self._new = []
        one, zero, axis = (self._constant(f"{COUNT}.{name}", n) for name, n in (("one", 1), ("zero", 0), ("axis", [1])))
        last = self._op("Unsqueeze", [self._op("Max", [self._op("Sub", [count, one]), zero]), axis])
        row = self._op("GatherND", [at, last], batch_dims=1)
        reader = next((node for node, k in at.uses() if k == 0 and node.op_type == "MatMul"), None)
        if at is scores or reader is None:
            self._append()
            logits = row
        else:
            self.graph.insert_before(reader, self._new)
            reader.replace_input_with(0, row)
            logits = scores
        self._new = []
        vocabulary = self._constant(f"{NEXT}.vocabulary", np.arange(width))
        top = self._op("ReduceMax", [logits, axis], keepdims=1)
        likeliest = self._op(
            "Where", [self._op("Equal", [logits, top]), vocabulary, self._constant(f"{NEXT}.none", width)]
        )
        chosen = self._op("ReduceMin", [likeliest, axis], keepdims=0)
        self._append()
        position = self.graph.outputs.index(scores)
        name = scores.name
        if logits is not scores:
            scores.name, logits.name = None, name
        logits.type, logits.shape = scores.type, ir.Shape([self.rules.slots, width])
        chosen.name, chosen.type, chosen.shape = NEXT, ir.TensorType(ir.DataType.INT64), ir.Shape([self.rules.slots])
        self.graph.outputs[position] = chosen
        if self.rules.sampling:
            self.graph.outputs.append(logits)
        return logits

    def _append(self) -> None:
        """Puts the new nodes at the end."""
        for node in self._new:
            self.graph.append(node)
        self._new = []

    def _pairs(self) -> list[_Pair]:
        """The caches; CompileError where there are none, or one has another reader."""
        outputs, problems, found = {*self.graph.outputs}, list[Problem](), list[_Pair]()
        for value in self.graph.inputs:
            appends = [
                node for node, k in value.uses() if node.op_type == "Concat" and k == 0 and node.outputs[0] in outputs
            ]
            if not appends or value.shape is None:
                continue
            others = [node for node, _ in value.uses() if node is not appends[0] and node.op_type != "Shape"]
            if others or len(appends[0].inputs) != 2:
                reader = others[0] if others else appends[0]
                fact = f"'{value.name}' is also read by {reader.op_type} '{reader.name}'"
                law = "a cache is read by the one Concat that appends to it, and by Shape"
                problems.append(Problem(self.name, fact, law, "export the model with its cache as past and present"))
                continue
            axis = appends[0].attributes["axis"].as_int() % len(value.shape)
            found.append(_Pair(value, appends[0], axis))
        if problems:
            raise CompileError(problems)
        if not found:
            fact = "the model has no cache"
            law = "a cache is an input to which a Concat appends what becomes an output: present = Concat(past, new)"
            help_ = "export the decoder with past and present as inputs and outputs, or leave out 'generate'"
            raise CompileError(Problem(self.rules.where(), fact, law, help_))
        return found

    def _ids(self, pairs: Sequence[_Pair]) -> ir.Value:
        """The tokens of a step: an input of integers [batch, tokens]."""
        first = pairs[0].past.shape
        rows = [
            value
            for value in self.graph.inputs
            if value.dtype in (ir.DataType.INT64, ir.DataType.INT32)
            and value.name not in (_MASK, _ROWS)
            and value.shape is not None
            and len(value.shape) == 2
            and first is not None
            and value.shape[0] == first[0]
            and not isinstance(value.shape[1], int)
        ]
        if len(rows) == 1 and first is not None and not isinstance(first[0], int):
            return rows[0]
        fact = f"{len(rows)} inputs of the model are integers [batch, tokens] of two dynamic dims, with the batch of the caches"
        raise CompileError(
            Problem(
                self.rules.where(), fact, "one of them has the tokens of a step", "export the model with dynamic dims"
            )
        )

    def _feed_inputs(self, position: ir.Value, tokens: ir.Value, length: ir.Value) -> None:
        """Makes what the model is given of positions from the position."""
        inputs = {value.name: value for value in self.graph.inputs}
        zero, one = self._constant(f"{POSITION}.zero", 0), self._constant(f"{POSITION}.one", 1)
        axis = self._constant(f"{POSITION}.axis", [1])
        scalar = self._constant(f"{POSITION}.scalar", [0])
        if _ROWS in inputs:
            steps = self._op("Range", [zero, self._op("Squeeze", [tokens, scalar]), one])
            self._instead(inputs[_ROWS], self._op("Add", [self._op("Unsqueeze", [position, axis]), steps]))
        if _MASK in inputs:
            entries = self._op("Range", [zero, self._op("Squeeze", [length, scalar]), one])
            valid = self._op("Unsqueeze", [self._op("Add", [position, tokens]), axis])
            mask = self._op("Less", [entries, valid])
            kind = inputs[_MASK].dtype or ir.DataType.INT64
            self._instead(inputs[_MASK], self._op("Cast", [mask], to=kind.value))

    def _instead(self, given: ir.Value, made: ir.Value) -> None:
        """Lets the readers of an input read a value, and takes the input away."""
        ir.convenience.replace_all_uses_with(given, made)
        self.graph.inputs.remove(given)

    def _keep(self, pair: _Pair, position: ir.Value, past: ir.Value, length: ir.Value) -> None:
        """Makes a cache of an input, and of its Concat what writes the new entries into it."""
        value, node, present = pair.past, pair.append, pair.present
        assert value.shape is not None
        sizes = [self.rules.slots, *value.shape.dims[1:]]
        sizes[pair.axis] = (
            self.rules.length + self.rules.chunk - 1
        )  # a step writes so many entries, also where fewer are meant
        if wrong := [str(dim) for dim in sizes if not isinstance(dim, int)]:
            fact = f"'{value.name}' has the dim {wrong[0]}, which is neither the batch nor the one along which it grows"
            raise CompileError(Problem(self.name, fact, help=f"export the model with a number for {wrong[0]}"))
        shape = tuple(int(dim) for dim in sizes if isinstance(dim, int))
        for reader in [reader for reader, _ in value.uses() if reader.op_type == "Shape"]:
            self._measure(reader, shape, pair.axis, past)
        assert value.dtype is not None
        cache = ir.Value(
            name=value.name,
            type=ir.TensorType(value.dtype),
            shape=ir.Shape(shape),
            const_value=ir.tensor(np.broadcast_to(np.zeros((), value.dtype.numpy()), shape), name=value.name),
        )
        self.graph.inputs.remove(value)
        self.graph.register_initializer(cache)
        self._new = []
        following = self._op("TensorScatter", [cache, node.inputs[1], position], axis=pair.axis)
        begin, axis = (
            self._constant(f"{name_of(cache)}.begin", [0]),
            self._constant(f"{name_of(cache)}.axis", [pair.axis]),
        )
        read = self._op("Slice", [following, begin, length, axis])
        self.graph.insert_before(node, self._new)
        self._new = []
        following.name, present.name = f"{present.name}", None
        following.type = read.type = ir.TensorType(value.dtype)
        self.graph.outputs.remove(present)
        ir.convenience.replace_all_uses_with(present, read)
        self.graph.remove(node, safe=True)
        self.found[cache] = following

    def _measure(self, node: ir.Node, shape: Sequence[int], axis: int, past: ir.Value) -> None:
        """Lets the readers of a cache's shape read that of what is valid."""
        rank = len(shape)
        start = node.attributes.get_int("start", 0)
        end = node.attributes.get_int("end", rank)
        begin, stop = (min(max(one + rank if one < 0 else one, 0), rank) for one in (start, end))
        dims = range(begin, stop)
        if axis not in dims:
            made = self._constant(f"{name_of(node.outputs[0])}.sizes", [shape[dim] for dim in dims])
        else:
            parts = [
                past if dim == axis else self._constant(f"{name_of(node.outputs[0])}.{dim}", [shape[dim]])
                for dim in dims
            ]
            self._new = []
            made = parts[0] if len(parts) == 1 else self._op("Concat", parts, axis=0)
            self.graph.insert_before(node, self._new)
            self._new = []
        ir.convenience.replace_all_uses_with(node.outputs[0], made)
        self.graph.remove(node, safe=True)

    def _give_rows(self, position: ir.Value, past: ir.Value) -> None:
        """Gives every sequence positions of its own: `Unsqueeze(Range + past, [0, ..])` becomes a row for each."""
        lengths, found = _copies_of(past), 0
        for node in [node for node in self.graph if node.op_type == "Add"]:
            ranges = [value for value in node.inputs if value is not None and _is_range(value)]
            if len(ranges) != 1 or not any(value in lengths for value in node.inputs):
                continue
            readers = [(reader, reader.inputs[1]) for reader, _ in node.outputs[0].uses()]
            axes = [
                None if value is None or value.const_value is None else value.const_value.numpy().tolist()
                for _, value in readers
            ]
            if not all(
                reader.op_type == "Unsqueeze" and one and one[0] == 0
                for (reader, _), one in zip(readers, axes, strict=True)
            ):
                continue
            self._new = []
            column = self._op("Unsqueeze", [position, self._constant(f"{POSITION}.column.{found}", [1])])
            rows = self._op("Add", [column, ranges[0]])
            self.graph.insert_after(node, self._new)
            self._new = []
            for (reader, _), one in zip(readers, axes, strict=True):
                assert one is not None
                reader.replace_input_with(0, rows)
                if one[1:]:
                    reader.replace_input_with(1, self._constant(f"{name_of(reader.outputs[0])}.axes", one[1:]))
                else:
                    ir.convenience.replace_all_uses_with(reader.outputs[0], rows)
            found += 1

    def _refuse_one_length(self, past: ir.Value) -> None:
        """CompileError where a node takes the longest sequence's length for that of each."""
        if self.rules.slots > 1 and (
            left := [node for value in _copies_of(past) for node, _ in value.uses() if _reads_as_row(node, value)]
        ):
            fact = f"{left[0].op_type} '{left[0].name}' takes one length for all sequences, and 'slots' is {self.rules.slots}"
            help_ = "export the model with an input 'position_ids', or write slots: 1"
            raise CompileError(Problem(self.rules.where("slots"), fact, "each sequence has a length of its own", help_))

    def _op(self, kind: str, inputs: Sequence[ir.Value | None], **attributes: int) -> ir.Value:
        node = ir.node(kind, inputs, attributes=attributes)
        value = node.outputs[0]
        self._made += 1
        value.name = f"{POSITION}.{kind}.{self._made}"
        self._new.append(node)
        return value

    def _constant(self, name: str, numbers: npt.ArrayLike) -> ir.Value:
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        array = np.asarray(numbers, np.int64)
        value = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.INT64),
            shape=ir.Shape(array.shape),
            const_value=ir.tensor(array, name=name),
        )
        self.graph.register_initializer(value)
        return value


def _copies_of(value: ir.Value) -> set[ir.Value]:
    """The values with the one element of a value, whatever their shape."""
    found, waiting = {value}, [value]
    while waiting:
        for node, k in waiting.pop().uses():
            if k == 0 and node.op_type in _COPIES and node.outputs[0] not in found:
                found.add(node.outputs[0])
                waiting.append(node.outputs[0])
    return found


def _is_range(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "Range"


def _reads_as_row(node: ir.Node, length: ir.Value) -> bool:
    """Whether a node adds the length to the numbers of a step's tokens."""
    return node.op_type == "Add" and any(
        value is not None and value is not length and _is_range(value) for value in node.inputs
    )


def _head(scores: ir.Value) -> ir.Value | None:
    """What the last product of a model multiplies with its weights, behind which nothing mixes tokens; None where there is no such product."""
    value = scores
    while (node := value.producer()) is not None:
        others = [one for one in node.inputs[1:] if one is not None]
        if node.op_type == "MatMul":
            return node.inputs[0] if _is_weight(others[0]) else None
        if (
            node.op_type not in _ELEMENTWISE
            or not all(_is_weight(one) for one in others)
            or len(value.uses()) > (value is not scores)
        ):
            return None
        first = node.inputs[0]
        assert first is not None
        value = first
    return None


def _is_weight(value: ir.Value) -> bool:
    """Whether a value is made of weights alone."""
    node = value.producer()
    if node is None:
        return value.const_value is not None
    return node.op_type in ("Transpose", "Cast", "Identity", "DequantizeLinear") and all(
        _is_weight(one) for one in node.inputs if one is not None
    )
