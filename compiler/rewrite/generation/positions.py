"""Gives each sequence of a decoder its own position, where a model takes positions from the shape of its past, or as an input.

Shape(past)[axis]                            ->  max(position)
Range(past, past + tokens)                   ->  Range(0, tokens) + past
Unsqueeze(Range(0, tokens) + past, [0, ..])  ->  Unsqueeze(rows, [..]), rows = position + min(Range(0, tokens), count - 1)
Slice(table [batch, past + tokens], past, ..)  ->  GatherElements(table, rows), where a model counts its mask, as OPT does
values computed from these, a bias        ->  computed from rows, with the batch as first dim
position_ids [batch, tokens]                 ->  rows
attention_mask [batch, past + tokens]        ->  1 for the entries before position + tokens

Padding tokens have the position of the last valid token, so that none is beyond a table of positions.

Gives values that an export computes from one position for all sequences the batch as an additional first dim, one position each.

    bias [1, heads, tokens, entries] = Unsqueeze(Transpose(Gather(table, bucket(Range(0, entries) - steps)), (2, 0, 1)), [0])
    ->  bias [slots, heads, tokens, entries] from steps [slots, tokens, 1] in place of [tokens, 1]: Transpose by (0, 3, 1, 2), no Unsqueeze

The dim is added from the steps on, through ops that compute element by element, look up rows, or move dims, up to the Unsqueeze or the
Reshape that would have added a first dim of 1: the batch takes its place. It also ends where another operand has the batch already:

    [tokens, size] + [batch, tokens, size]
    Expand([tokens], [batch, tokens])
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import onnx_ir as ir
from partc.compiler.analysis.shape_data import NAMED
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import PAST_ENTRIES
from partc.compiler.ops.registry import entry_of
from partc.compiler.rewrite.generation.node_builder import NodeBuilder
from partc.compiler.rewrite.generation.step_form import StepForm

POSITION, COUNT = "position", "count"
"""Inputs [slots] that a step gets in addition to the model's."""
MASK, ROWS = "attention_mask", "position_ids"
"""The names that exporters give to inputs for the mask and the positions."""
_NO_END = 2**31 - 1
"""From this number on, the end of a Slice is the tensor's end."""
_COPIES = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")


class Positions:
    """The values that replace positions in nodes: `past` [1], the most entries before a step, and `length` [1], that plus its tokens."""

    def __init__(
        self,
        build: NodeBuilder,
        position: ir.Value,
        count: ir.Value,
        ids: ir.Value,
        form: StepForm,
        ranks: Mapping[ir.Value, int],
        batched: Container[ir.Value],
    ) -> None:
        self.build, self.position, self.count, self.ids, self.rules = build, position, count, ids, form.rules
        self.ranks, self.batched = ranks, batched
        """The number of dims of each value of the model, and the values whose first dim is the batch."""
        self.takes_one = isinstance([*(ids.shape or ())][1], int)
        self.rows: list[ir.Value] = []
        """The values with the positions of tokens."""
        first = build.graph[0]
        self.past = build.op("past", "ReduceMax", [position], keepdims=1)
        self.past.meta[NAMED] = PAST_ENTRIES
        self.tokens = build.op("tokens", "Shape", [ids], start=1, end=2)
        self.length = build.op("length", "Add", [self.past, self.tokens])
        self._feed({value.name: value for value in build.graph.inputs})
        build.put(before=first)

    @cached_property
    def ends(self) -> tuple[ir.Value, ir.Value]:
        """The int32 operands of fused attention: the index of each sequence's last entry, and the most entries of any sequence."""
        build = self.build
        last = build.op(
            "last_entry",
            "Sub",
            [build.op("entries_of_each", "Add", [self.position, self.tokens]), build.constant("one", 1)],
        )
        total = build.op("most_entries", "Squeeze", [self.length, build.constant("begin", [0])])
        kind = ir.DataType.INT32.value
        return tuple(build.op(f"{word}_32", "Cast", [one], to=kind) for word, one in (("last", last), ("most", total)))  # type: ignore[return-value]

    def measure(self, node: ir.Node, shape: Sequence[int], axis: int = -1) -> None:
        """Replaces a Shape of a past by the shape of the valid part of a cache, which has `shape` and grows along `axis`.

        With `axis` -1 the cache does not grow.
        """
        rank, name = len(shape), name_of(node.outputs[0])
        ends = (node.attributes.get_int("start", 0), node.attributes.get_int("end", rank))
        begin, end = (min(max(one + rank if one < 0 else one, 0), rank) for one in ends)
        slots = [self.build.op("slots", "Shape", [self.ids], start=0, end=1)] if begin == 0 < end else []
        sizes = slots + [
            self.past if dim == axis else self.build.constant(f"{name}.{dim}", [shape[dim]])
            for dim in range(max(begin, 1), end)
        ]
        made = sizes[0] if len(sizes) == 1 else self.build.op("shape", "Concat", sizes, axis=0)
        self.build.put(before=node)
        ir.convenience.replace_all_uses_with(node.outputs[0], made)
        self.build.graph.remove(node, safe=True)

    def give_rows(self) -> None:
        """Gives every sequence the positions of its own tokens, where an export counts from one length for all."""
        for node in [*self._from_past()]:
            self._count_apart(node)
        for node in [node for node, axis in self._behind() if axis == 1 and self.ranks.get(node.outputs[0]) == 2]:
            build = self.build
            slots = build.op("slots", "Shape", [self.ids], start=0, end=1)
            sizes = build.op("sizes", "Concat", [slots, self.length], axis=0)
            entries = build.op("of_each", "Expand", [node.inputs[0], sizes])
            made = build.op("of_rows", "GatherElements", [entries, self._rows_of(self.steps())], axis=1)
            build.put(before=node)
            ir.convenience.replace_all_uses_with(node.outputs[0], made)
            build.graph.remove(node, safe=True)
        for node, steps, axes in [*self._rows()]:
            counted = node.outputs[0]
            lifting = Lifting(self.build, self.ranks, self.batched)
            if 0 not in axes and not lifting.of(counted, 1 + len(axes)):
                continue
            rows = self._rows_of(steps)
            # the batch replaces a dim of 1 before the tokens, or is an additional dim
            left = [axis for axis in axes if axis] if 0 in axes else [axis + 1 for axis in axes]
            if left:
                word = f"rows_{'_'.join(map(str, left))}"
                rows = self.build.op("rows_apart", "Unsqueeze", [rows, self.build.constant(word, left)])
            self.build.put(after=node)
            for edit in lifting.edits:
                edit()
            ir.convenience.replace_all_uses_with(counted, rows)
            once(rows, self.build)

    @property
    def one_length(self) -> bool:
        """Whether, after `give_rows`, a node still uses the longest sequence's length for all sequences.

        Raises CompileError where that is so and the plan has several slots.
        """
        counting = (node for node, *_ in self._rows())
        node = next(itertools.chain(counting, (node for node, _ in self._behind()), self._from_past()), None)
        if node is not None and self.rules.slots > 1:
            fact = f"{node.op_type} '{node.name}' takes one length for all sequences, and 'slots' is {self.rules.slots}"
            help_ = "export the model with an input 'position_ids', or write slots: 1"
            raise CompileError(Problem(self.rules.where("slots"), fact, "each sequence has a length of its own", help_))
        return node is not None

    def _rows(self) -> Iterator[tuple[ir.Node, ir.Value, list[int]]]:
        """Yields the nodes that add the past to the numbers of a step's tokens, with these numbers and the axes of their dims of 1."""
        lengths = copies_of(self.past)
        for node in [node for node in self.build.graph if node.op_type == "Add"]:
            steps = [found for value in node.inputs if value is not None and (found := _steps(value, self.takes_one))]
            if len(steps) == 1 and any(value in lengths for value in node.inputs):
                yield node, *steps[0]

    def _behind(self) -> Iterator[tuple[ir.Node, int]]:
        """Yields the Slices that read other tensors from the past on, each with its axis; -1 where it is not the tensor's rest."""
        lengths = copies_of(self.past)
        for node in [node for node in self.build.graph if node.op_type == "Slice" and node.inputs[1] in lengths]:
            ends, axes, steps = (constant_of(value) for value in (*node.inputs[2:5], None, None)[:3])
            is_rest = ends is not None and ends[0] >= _NO_END and (steps is None or steps[0] == 1)
            yield node, axes[0] if is_rest and axes is not None and len(axes) == 1 else -1

    def _from_past(self) -> Iterator[ir.Node]:
        """Yields the Ranges that begin at the past's length."""
        lengths = copies_of(self.past)
        yield from (node for node in self.build.graph if node.op_type == "Range" and node.inputs[0] in lengths)

    def _count_apart(self, node: ir.Node) -> None:
        """Rewrites Range(past, past + tokens, 1) as Range(0, tokens, 1) + past; any other Range stays."""
        first, end, delta = node.inputs
        adder, lengths = _maker(end), copies_of(self.past)
        if adder is None or adder.op_type != "Add" or constant_of(delta) != [1]:
            return
        makers = [_maker(value) for value in adder.inputs if value not in lengths]
        if len(makers) != 1 or makers[0] is None or makers[0].op_type != "Shape" or makers[0].inputs[0] is not self.ids:
            return
        if (makers[0].attributes.get_int("start", 0), makers[0].attributes.get_int("end", 2)) != (1, 2):
            return
        counted = self.build.op("counted", "Add", [self.steps(), first])
        counted.type = node.outputs[0].type
        self.build.put(before=node)
        ir.convenience.replace_all_uses_with(node.outputs[0], counted)
        self.build.graph.remove(node, safe=True)

    def steps(self) -> ir.Value:
        """Returns the numbers of a step's tokens, from 0."""
        zero, one, first = (self.build.constant(name, n) for name, n in (("zero", 0), ("one", 1), ("begin", [0])))
        return self.build.op(
            "steps", "Range", [zero, self.build.op("count_of_tokens", "Squeeze", [self.tokens, first]), one]
        )

    def _rows_of(self, steps: ir.Value) -> ir.Value:
        """Returns the position of each token [slots, tokens]; `steps`: the tokens' numbers within the step."""
        build, axis = self.build, self.build.constant("axis", [1])
        before = build.op("before_last", "Sub", [self.count, build.constant("one", 1)])
        last = build.op("last_or_first", "Max", [before, build.constant("zero", 0)])
        column, end = (
            build.op(word, "Unsqueeze", [one, axis]) for word, one in (("column", self.position), ("end", last))
        )
        self.rows.append(build.op("rows", "Add", [column, build.op("steps_meant", "Min", [steps, end])]))
        return self.rows[-1]

    def _feed(self, inputs: dict[str | None, ir.Value]) -> None:
        """Replaces the model's inputs for positions and the attention mask by values computed from `position`."""
        build = self.build
        zero, unit, first, axis = (
            build.constant(name, n) for name, n in (("zero", 0), ("one", 1), ("begin", [0]), ("axis", [1]))
        )
        if ROWS in inputs:
            self._instead(inputs[ROWS], self._rows_of(self.steps()))
        if MASK in inputs:
            entries = build.op(
                "entries", "Range", [zero, build.op("count_of_entries", "Squeeze", [self.length, first]), unit]
            )
            valid = build.op("valid", "Unsqueeze", [build.op("ends", "Add", [self.position, self.tokens]), axis])
            kind = inputs[MASK].dtype or ir.DataType.INT64
            self._instead(
                inputs[MASK], build.op(MASK, "Cast", [build.op("is_valid", "Less", [entries, valid])], to=kind.value)
            )

    def _instead(self, given: ir.Value, made: ir.Value) -> None:
        ir.convenience.replace_all_uses_with(given, made)
        self.build.graph.inputs.remove(given)


def _steps(value: ir.Value, takes_one: bool) -> tuple[ir.Value, list[int]] | None:
    """Returns the numbers of a step's tokens and the axes of the dims of 1 that a value adds to them; None for any other value.

    `takes_one`: a step has one token, whose number is a constant, [0].
    """
    node = value.producer()
    if node is None:
        is_first = takes_one and constant_of(value) == [0] and value.shape is not None and len(value.shape) == 1
        return (value, []) if is_first else None
    if node.op_type == "Range":
        return value, []
    axes = constant_of(node.inputs[1]) if node.op_type == "Unsqueeze" else None
    steps = node.inputs[0]
    if axes is None or steps is None or (maker := steps.producer()) is None or maker.op_type != "Range":
        return None
    return steps, sorted(axis % (1 + len(axes)) for axis in axes)


def _maker(value: ir.Value | None) -> ir.Node | None:
    """Returns the node that computes a value of one element, through ops that only copy it."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in _COPIES and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node


def copies_of(value: ir.Value) -> set[ir.Value]:
    """Returns the values that copy the one element of a value, whatever their shape."""
    copies, waiting = {value}, [value]
    while waiting:
        for node, k in waiting.pop().uses():
            if k == 0 and node.op_type in _COPIES and node.outputs[0] not in copies:
                copies.add(node.outputs[0])
                waiting.append(node.outputs[0])
    return copies


_AS_ONE = ("Cast", "Expand", "Identity", "Unsqueeze")
"""Ops that keep the first dim of their first operand where it is 1."""


def constant_of(value: ir.Value | None) -> list[int] | None:
    """Returns the integers of a constant; None for any other value."""
    if value is None or value.const_value is None:
        return None
    return [int(one) for one in value.const_value.numpy().reshape(-1)]


@dataclass
class Lifting:
    """Gives one value the batch as a new first dim. `edits` are changes of the graph, made after all are known to be possible.

    `batched`: the values whose first dim is the batch. `lifted`: maps each lifted value to its number of dims before. `sizes`: shapes of
    lifted values, which have one element more.
    """

    build: NodeBuilder
    ranks: Mapping[ir.Value, int]
    batched: Container[ir.Value]
    lifted: dict[ir.Value, int] = field(default_factory=dict)
    sizes: set[ir.Value] = field(default_factory=set)
    edits: list[Callable[[], None]] = field(default_factory=list)

    def of(self, value: ir.Value, rank: int) -> bool:
        """Follows a value of `rank` dims through its readers; returns whether every reader can take it with one more dim."""
        self.lifted[value] = rank
        waiting = [value]
        while waiting:
            for node in dict.fromkeys(node for node, _ in waiting.pop().uses()):
                made = node.outputs[0]
                if made in self.lifted or made in self.sizes:
                    continue
                reached = self._through(node)
                if reached is None:
                    return False
                waiting += reached
        return True

    def _through(self, node: ir.Node) -> list[ir.Value] | None:
        """Returns the outputs of a reader that get one more dim, too; None where the reader has no form for that."""
        output, data = node.outputs[0], node.inputs[0]
        if output.is_graph_output():
            return None
        if (entry := entry_of(node)) is not None and entry.is_elementwise:
            operands = [value for value in node.inputs if value is not None]
            rank = max(self.lifted.get(value, self.ranks.get(value, 99)) for value in operands)
            lower = [value for value in operands if value in self.lifted and self.lifted[value] < rank]
            if lower:  # [tokens, size] next to [batch, tokens, size]
                others = [value for value in operands if value not in lower and self.ranks.get(value, 99) == rank]
                meets = all(self.lifted[value] == rank - 1 for value in lower)
                return [] if meets and all(value in self.batched for value in others) else None
            self.lifted[output] = rank
        elif node.op_type == "Shape" and not node.attributes.get_int("start", 0) and "end" not in node.attributes:
            self.sizes.add(output)
        elif node.op_type == "Expand" and node.inputs[1] in self.sizes and data not in self.sizes:
            self.lifted[output] = self.ranks.get(output, 99)
        elif node.op_type == "Expand" and data in self.lifted and node.inputs[1] not in self.sizes:
            repeats = output in self.batched and self.ranks.get(output) == self.lifted[data] + 1
            return [] if repeats else None  # [tokens] for each sequence of a batch
        elif node.op_type == "Gather" and data not in self.lifted and not node.attributes.get_int("axis", 0):
            assert node.inputs[1] is not None
            self.lifted[output] = self.lifted[node.inputs[1]] + self.ranks.get(data, 99) - 1  # type: ignore[arg-type]
        elif node.op_type == "Transpose" and data in self.lifted:
            order = node.attributes.get_ints("perm") or [*range(self.lifted[data])][::-1]
            self.lifted[output] = self.lifted[data]
            perm = ir.AttrInt64s("perm", [0, *(dim + 1 for dim in order)])
            self.edits.append(lambda: node.attributes.add(perm))
        elif node.op_type == "Unsqueeze" and data in self.lifted and (axes := constant_of(node.inputs[1])) is not None:
            rank = self.lifted[data] + len(axes)
            axes = [axis % rank for axis in axes]
            if 0 in axes:
                self.edits.append(lambda: self._absorb(node, [axis for axis in axes if axis]))
                return []
            self.lifted[output] = rank
            self.edits.append(lambda: self._axes(node, [axis + 1 for axis in axes]))
        elif node.op_type == "Reshape" and data in self.lifted and _first_is_one(node.inputs[1]):
            self.edits.append(lambda: _copy_first(node, self.build))
            return []
        else:
            return None
        return [output]

    def _axes(self, node: ir.Node, axes: list[int]) -> None:
        word = f"lifted_{'_'.join(map(str, axes))}"
        node.replace_input_with(1, self.build.constant(word, axes))

    def _absorb(self, node: ir.Node, left: list[int]) -> None:
        """Puts the batch in place of the first dim of 1 that an Unsqueeze adds; the axes `left` are still added."""
        data = node.inputs[0]
        assert data is not None
        if left:
            self._axes(node, left)
        else:
            ir.convenience.replace_all_uses_with(node.outputs[0], data)
        once(data if not left else node.outputs[0], self.build)


def _copy_first(node: ir.Node, build: NodeBuilder) -> None:
    """Makes a Reshape copy its operand's first dim, the batch, where it made a dim of 1: a 0 in the target copies."""
    if (sizes := constant_of(node.inputs[1])) is not None:
        shape = build.constant(f"shape_{'_'.join(map(str, [0, *sizes[1:]]))}", [0, *sizes[1:]])
    else:
        maker = node.inputs[1].producer()  # type: ignore[union-attr]
        rest = maker.inputs[1:]  # type: ignore[union-attr]
        shape = build.op("shape_of_each", "Concat", [build.constant("same", [0]), *rest], axis=0)
    build.put(before=node)
    node.replace_input_with(1, shape)
    node.attributes.pop("allowzero", None)
    once(node.outputs[0], build)


def _first_is_one(shape: ir.Value | None) -> bool:
    """Whether the first number of a target shape is 1; a constant shape must also have no 0."""
    if (sizes := constant_of(shape)) is not None:
        return sizes[:1] == [1] and 0 not in sizes
    maker = None if shape is None else shape.producer()
    return maker is not None and maker.op_type == "Concat" and constant_of(maker.inputs[0]) == [1]


def once(value: ir.Value, build: NodeBuilder) -> None:
    """Removes each Tile that repeats a first dim of 1 for each sequence, and changes Reshapes to 1: `value` has the batch there."""
    waiting, followed = [value], {value}
    while waiting:
        for node, k in [*waiting.pop().uses()]:
            if k == 0 and node.op_type == "Tile" and _repeats_first(node):
                ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])  # type: ignore[arg-type]
            elif node.outputs[0] not in followed and _keeps_first(node, k, followed):
                followed.update(node.outputs)
                if node.op_type == "Reshape":
                    _copy_first(node, build)  # it continues there
                else:
                    waiting += node.outputs


def _keeps_first(node: ir.Node, k: int, followed: set[ir.Value]) -> bool:
    """Whether a node whose operand `k` has the batch instead of a first dim of 1 has it in its output, too, or would reshape it to 1."""
    others = (value for value in node.inputs if value not in followed and value is not None)
    match node.op_type:
        case "Concat":
            return node.attributes["axis"].as_int() != 0 and not [*others]
        case "Reshape":
            return k == 0 and _first_is_one(node.inputs[1])
        case "Split":
            return k == 0 and node.attributes.get_int("axis", 0) != 0
        case "Slice":
            axes = constant_of(node.inputs[3]) if len(node.inputs) > 3 else None
            return k == 0 and axes is not None and 0 not in axes
        case "Transpose":
            order = node.attributes.get_ints("perm")
            return order is not None and order[0] == 0
        case kind if kind in _AS_ONE:
            return k == 0 and 0 not in (constant_of(node.inputs[-1]) or ())
    entry = entry_of(node)
    return entry is not None and entry.is_elementwise and all(value.is_initializer() for value in others)


def _repeats_first(node: ir.Node) -> bool:
    """Whether a Tile repeats along the first dim alone."""
    counts = node.inputs[1].producer() if node.inputs[1] is not None else None
    return (
        counts is not None and counts.op_type == "Concat" and all(constant_of(one) == [1] for one in counts.inputs[1:])
    )
