"""Proves the positions of shards and that partial sums are reduced: ranks that run one node on shards of values must agree on both.

A rank's shard of a value begins, along each dim, at some element. That is known for inputs, weights, state, and results of collectives;
nodes pass it on, by the letters that the file has for their operands (`partc.factors`). The letters are trusted: the tests of the op table
prove them for each op. Three facts follow:

    places   if two values meet in a node, element by element or in a sum of products, their distance is the same on all ranks that run the
             node; so is that of an output and its box, and of a collective's operand and its layout
    whole    an output that all ranks have replicated is not made of sharded outputs, except through communication
    terms    a sum over a dim that is sharded over ranks is a partial sum. Partial sums may be added, scaled and moved; one that goes
             through another function, is added to a complete value, or is an output, has missed its reduction

    %h [0:4, 0:6] . %w [0:6, 0:5] on rank 0, %h [0:4, 6:12] . %w [6:12, 0:5] on rank 1     makes partial sums; the file has to reduce them

Only nodes with sharded factors (`partc.cut`) pass places on and make partial values: in a local map a value is each rank's own.

A node without letters is unknown, and never causes a violation. A value's places are, for each dim, the elements at which the shards of a
file's ranks begin, or None if they are not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from onnx import ModelProto, NodeProto, TensorProto
from partc.runtime.artifact.comm.border_node import LOOP, BorderCall
from partc.runtime.artifact.comm.collective_node import CollectiveCall, read_call
from partc.runtime.artifact.format import (
    BEGIN,
    CUT,
    DOMAIN,
    MAX,
    MIN,
    OPTIMIZER,
    OTHERWISE,
    PIECE,
    PUSH,
    RECV,
    SEND,
    SUM,
    TAG,
    Collective,
    Dim,
    Manifest,
)
from partc.runtime.artifact.graph.bodies import is_border
from partc.runtime.artifact.graph.factors import WHOLE, Factors, factors_of, partial_of
from partc.runtime.artifact.graph.onnx_graph import integer_of, metadata_of, node_title, path_of
from partc.runtime.checker.across.rank_shards import ShardLayout, layout_of
from partc.runtime.checker.graph.declared import declared_types
from partc.runtime.checker.graph.symbols import numbers, samples
from partc.runtime.errors import Violation, one_line

Begins: TypeAlias = tuple[int, ...]
"""For each rank, in the order of a file's ranks, the element at which a shard begins along a dim."""
Places: TypeAlias = "Sequence[Begins | None] | None"
Sizes: TypeAlias = "Sequence[int | None]"

PARTIAL = {SUM: "a partial sum", MAX: "the largest of a shard", MIN: "the least of a shard"}
"""Descriptions of a value that still needs a reduction over ranks."""


@dataclass(frozen=True)
class Met:
    """A dim of an operand that corresponds to a dim of another operand."""

    name: str
    begins: Begins | None
    size: int | None


@dataclass(frozen=True)
class Ruled:
    """The effect of a node: the places of its outputs, the pairs of dims that meet in it, each reduction with the begins of its dim."""

    made: list[Places]
    meetings: list[tuple[Met, Met, int]]
    reduced: list[tuple[str, Begins]]


def apply(node: NodeProto, factors: Factors, places: Mapping[str, Places], sizes: Mapping[str, Sizes]) -> Ruled:
    """Returns the effect of a node on the places of its operands."""
    known: dict[str, Met] = {}
    effect = Ruled([], [], [])
    for name, letters in zip(node.input, factors.inputs, strict=False):
        there = places.get(name)
        if letters is None or there is None or len(there) != len(letters):
            continue
        for axis, (letter, begins) in enumerate(zip(letters, there, strict=True)):
            if letter == WHOLE:
                continue
            met = Met(name, begins, sizes[name][axis] if name in sizes else None)
            if letter not in known or known[letter].begins is None:
                known[letter] = met
            else:
                first = known[letter]
                effect.meetings.append((first, Met(name, _scaled(met, first.size), first.size), axis))
            if letter in factors.reductions and begins is not None:
                effect.reduced.append((factors.reductions[letter], begins))
    for name, letters in zip(node.output, factors.outputs, strict=False):
        if letters is None:
            effect.made.append(None)
            continue
        pairs = zip(letters, sizes.get(name) or [None] * len(letters), strict=True)
        effect.made.append([_scaled(known[letter], size) if letter in known else None for letter, size in pairs])
    return effect


def _scaled(met: Met, size: int | None) -> Begins | None:
    """Returns the begins of shards along a dim of this size that corresponds to the dim `met`; None if one is within an element."""
    if met.begins is None or met.size == size:
        return met.begins
    if not met.size or not size or any(begin * size % met.size for begin in met.begins):
        return None
    return tuple([begin * size // met.size for begin in met.begins])


def passes_partial(node: NodeProto, factors: Factors | None, reductions: Mapping[str, str]) -> str:
    """Returns the reduction that a node's result still needs; '' if it needs none, or that is not known.

    `reductions`: maps partial values to their reductions.
    """
    terms = {k: reductions[name] for k, name in enumerate(node.input) if reductions.get(name)}
    return partial_of(factors, terms) if terms and factors is not None else ""


def misuse(node: NodeProto, factors: Factors | None, reductions: Mapping[str, str]) -> str:
    """Returns the reason for which a node must not read its partial operands; '' if it may, or nothing is known of it.

    `reductions`: maps values to their reductions, '' for values known not to be partial.
    """
    terms = {k: reductions[name] for k, name in enumerate(node.input) if reductions.get(name)}
    if not terms or factors is None or factors.stacks:
        return ""
    first, kind = next(iter(terms.items()))
    op, name = node.op_type, node.input[first]
    lost = f"'{name}' is {PARTIAL[kind]} that no collective has reduced"
    if kind != SUM:
        return "" if partial_of(factors, terms) else f"{lost}, and {op} reads it as that of all"
    if not terms.keys() <= {*factors.linear}:
        return f"{lost}, and {op} of a sum is not the sum of {op} of its parts"
    if not factors.joint and len(terms) > 1:
        return f"{lost}, nor is '{node.input[[*terms][1]]}', which it is multiplied by"
    whole = [node.input[k] for k in factors.linear if factors.joint and reductions.get(node.input[k]) == ""]
    return f"{lost}, and '{whole[0]}', which is replicated, would be added on every rank" if whole else ""


_AGAIN = "compile the model again"
_BOX = re.compile(r"\[([\d:, ]*)\]$")
_WHOLE = ""
"""The reduction of a value that is known not to be partial."""


@dataclass
class _File:
    """A rank file, its ranks, and the known facts about its values."""

    name: str
    model: ModelProto
    ranks: list[int]
    sizes: dict[str, Sizes]
    places: dict[str, Places] = field(default_factory=dict)
    factors: dict[tuple[str, ...], Factors] = field(default_factory=dict)
    """Maps each node to the letters of its operands."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Maps each value to the reduction that it still needs; other values are unknown."""
    received: set[int] = field(default_factory=set)
    """The tags of the messages that the file receives."""


def check_places(manifest: Manifest, models: Mapping[int, ModelProto]) -> list[Violation]:
    """Returns violations of shards at wrong positions, and of partial values that are not reduced; the files are already checked."""
    return _Places(manifest, models).check()


class _Places:
    """Places of shards, and partial values, in the programs of all ranks."""

    def __init__(self, manifest: Manifest, models: Mapping[int, ModelProto]) -> None:
        self.manifest = manifest
        self.symbols = samples(manifest)[-1]
        self.records = {one.tag: one for one in manifest.collectives}
        self.files: dict[str, _File] = {}
        self.known: dict[tuple[Dim, ...], Sizes] = {}
        """Maps each shape to its sizes."""
        for rank, model in models.items():
            name = manifest.program(rank)
            if name not in self.files:
                self.files[name] = _File(name, model, [], self._sizes(model))
            self.files[name].ranks.append(rank)
        self.layouts: dict[str, ShardLayout] = {}
        self.bodies: list[tuple[BorderCall, tuple[str, ...]]] = []
        """The bodies that have begun in a file, with what the first branch of an If has given."""
        self.begun: dict[tuple[object, ...], Places] = {}
        self.shifts: dict[tuple[object, ...], int] = {}
        self.sums: dict[tuple[str, ...], dict[str, set[int]]] = {}
        """Maps each node and reduction to the elements at which the reduced shards begin."""
        self.sent: dict[int, str | None] = {}
        self.violations: list[Violation] = []
        self.reported: set[tuple[object, ...]] = set()

    def check(self) -> list[Violation]:
        for file in self.files.values():
            self._begin(file)
            for node in file.model.graph.node:
                self._read_factors(file, node)
                self._place(file, node)
                if node.domain == DOMAIN and node.op_type == RECV:
                    file.received.add(integer_of(node, TAG, -1))
            self._end(file)
        due = [*self.files.values()]
        while due:  # a partial value may be sent to a rank whose file has been looked at before
            before = dict(self.sent)
            for file in due:
                for node in file.model.graph.node:
                    self._classify(file, node)
            changed = {tag for tag, kind in self.sent.items() if before.get(tag) != kind}
            due = [file for file in self.files.values() if not changed.isdisjoint(file.received)]
        for file in self.files.values():
            self._check_partials(file)
        return self.violations

    def _sizes(self, model: ModelProto) -> dict[str, Sizes]:
        shapes = {name: tuple(shape) for name, (_, shape) in declared_types(model).items() if shape is not None}
        for shape in {*shapes.values()} - self.known.keys():
            self.known[shape] = numbers([*shape], self.manifest, self.symbols)
        return {name: self.known[shape] for name, shape in shapes.items()}

    def _begin(self, file: _File) -> None:
        """Sets the places of the values before the first node."""
        for tensor in file.model.graph.initializer:
            if (begins := _shard(tensor)) is not None:
                file.places[tensor.name] = [(begin,) * len(file.ranks) for begin in begins]
                file.kinds[tensor.name] = _WHOLE
        for port in self.manifest.inputs:
            if {*file.ranks} <= {*port.ranks} and port.shape is not None:
                whole = numbers(port.shape, self.manifest, self.symbols)
                boxes = [port.box(rank) or [[0, 1, 1] for _ in whole] for rank in file.ranks]
                file.places[port.name] = _begins(boxes, whole)
                file.kinds[port.name] = _WHOLE
        for record in self.manifest.state:
            if {*file.ranks} <= {*record.ranks}:
                shards = [record.shard(rank) for rank in file.ranks]
                file.places[record.value] = _begins(shards, list(record.shape))
                file.kinds[record.value] = _WHOLE

    def _read_factors(self, file: _File, node: NodeProto) -> None:
        try:
            if (factors := factors_of(node, file.sizes)) is not None:
                file.factors[_key(node)] = factors
        except ValueError as error:
            fact = f"its factors '{one_line(str(error))}' are not those of its operands"
            self.violations.append(Violation(file.name, fact, node_title(node), path_of(node), _AGAIN))

    def _place(self, file: _File, node: NodeProto) -> None:
        """Finds the places of a node's results, and checks that its operands meet at the same places on all ranks."""
        if is_border(node):
            self._place_border(file, node)
            return
        if node.domain == DOMAIN:
            if (record := self.records.get(integer_of(node, TAG, -1))) is not None and node.op_type not in (SEND, RECV):
                self._place_call(file, node, record)
            return
        factors = file.factors.get(_key(node))
        if factors is None or not any(entry.key == CUT for entry in node.metadata_props):
            return
        ruled = apply(node, factors, file.places, file.sizes)
        for name, places in zip(node.output, ruled.made, strict=False):
            file.places[name] = places
        for at, (one, two, axis) in enumerate(ruled.meetings):
            fact = f"its operands '{one.name}' and '{two.name}' are at different offsets along dim {axis}"
            self._meet(("node", _key(node), at), file, node, fact, one.begins, two.begins)
        for reduction, begins in ruled.reduced:
            self.sums.setdefault(_key(node), {}).setdefault(reduction, set()).update(begins)

    def _place_call(self, file: _File, node: NodeProto, record: Collective) -> None:
        call = read_call(node, file.name)
        if (isinstance(call, CollectiveCall) and call.parts) or record.given is None or record.made is None:
            return
        source = call.typed
        if source and (given := self._begins_of(file, source, layout_of(record.given, self.layouts))):
            there = file.places.get(source) or ()
            for axis, (one, two) in enumerate(zip(there, given, strict=False)):
                fact = f"its input '{source}' does not lie along dim {axis} as the layout says that it is given"
                self._meet(("given", call.tag, axis), file, node, fact, one, two)
        if (
            call.result
            and call.op != PUSH
            and (made := self._begins_of(file, call.result, layout_of(record.made, self.layouts)))
        ):
            file.places[call.result] = made

    def _place_border(self, file: _File, node: NodeProto) -> None:
        """A state has one place in all turns, and a result of an If in both branches."""
        call, places = read_call(node, file.name), file.places
        assert isinstance(call, BorderCall)
        if call.op == BEGIN:
            self.bodies.append((call, ()))
            places |= {
                made: places[name] for name, made in zip(call.states, call.carried, strict=False) if name in places
            }
            return
        first, given = self.bodies.pop()
        if call.op == OTHERWISE:
            self.bodies.append((first, call.states))
            return
        before = first.carried if call.kind == LOOP else given
        for k, (one, two) in enumerate(zip(before, call.states, strict=False)):
            for axis, (here, there) in enumerate(zip(places.get(one) or (), places.get(two) or (), strict=False)):
                fact = f"'{one}' and '{two}', which takes its place, are at different offsets along dim {axis}"
                self._meet(("body", call.tag, k, axis), file, node, fact, here, there)
        for k, (name, made) in enumerate(zip(call.states, call.carried, strict=False)):
            lasting = places.get(before[k] if k < len(before) else name)
            if lasting is not None:
                stacked: list[Begins | None] = [(0,) * len(file.ranks), *lasting]
                places[made] = lasting if k < len(before) else stacked

    def _begins_of(self, file: _File, name: str, layout: ShardLayout) -> Places:
        """Returns the elements at which the shards of a layout begin on the ranks of a file."""
        sizes = file.sizes.get(name)
        if sizes is None:
            return None
        key = (id(layout), file.name, tuple(sizes))
        if key not in self.begun:
            self.begun[key] = _laid(layout, file.ranks, sizes)
        return self.begun[key]

    def _end(self, file: _File) -> None:
        """Checks that outputs have the places of the manifest."""
        nodes = {name: node for node in file.model.graph.node for name in node.output}
        for port in self.manifest.outputs:
            there = file.places.get(port.name)
            if there is None or port.boxes is None or port.name not in nodes or not {*file.ranks} <= {*port.ranks}:
                continue
            boxes = [port.box(rank) or [] for rank in file.ranks]
            wanted = _begins(boxes, numbers(port.shape, self.manifest, self.symbols))
            for axis, (one, two) in enumerate(zip(there, wanted or (), strict=False)):
                fact = f"the output '{port.name}' does not lie along dim {axis} where the box of its rank does"
                self._meet(("output", port.name, axis), file, nodes[port.name], fact, one, two)
        self._check_replicated(file, nodes)

    def _check_replicated(self, file: _File, nodes: Mapping[str, NodeProto]) -> None:
        """Checks that an output that all ranks have replicated is not made of a sharded output, except through communication."""
        boxes = {port.name: [port.box(rank) for rank in port.ranks] for port in self.manifest.outputs}
        sharded_source = {name: name for name, own in boxes.items() if any(box != own[0] for box in own)}
        for node in file.model.graph.node:
            source = next((sharded_source[name] for name in node.input if name in sharded_source), "")
            if source and node.domain != DOMAIN and node.op_type not in ("Shape", "Size"):
                sharded_source |= dict.fromkeys(filter(None, node.output), source)
        for port in self.manifest.outputs:
            source, own = sharded_source.get(port.name, ""), boxes[port.name]
            if source and len(own) > 1 and own.count(own[0]) == len(own) and {*file.ranks} <= {*port.ranks}:
                fact = (
                    f"all ranks have '{port.name}' whole, and it is made of '{source}', of which each has another shard"
                )
                self._report(file, nodes[port.name], fact)

    def _meet(
        self, key: tuple[object, ...], file: _File, node: NodeProto, fact: str, one: Begins | None, two: Begins | None
    ) -> None:
        """Compares the distance of two shards on each rank with that on the first rank visited."""
        for rank, first, second in zip(file.ranks, one or (), two or (), strict=False):
            shift = self.shifts.setdefault(key, first - second)
            if shift != first - second and key not in self.reported:
                self.reported.add(key)
                where = f"on rank {rank}: {fact}: {first - second} elements apart, and {shift} on other ranks"
                self.violations.append(Violation(file.name, where, node_title(node), path_of(node), _AGAIN))

    def _classify(self, file: _File, node: NodeProto) -> None:
        """Finds whether the outputs of a node are partial."""
        kinds = file.kinds
        if node.domain == DOMAIN and node.op_type == SEND:
            self.sent[integer_of(node, TAG, -1)] = kinds.get(node.input[0])
        elif node.domain == DOMAIN and node.op_type == RECV:
            self._know(kinds, node.output[0], self.sent.get(integer_of(node, TAG, -1)))
        elif is_border(node):
            kinds |= dict.fromkeys(filter(None, node.output), _WHOLE)
        elif node.domain == DOMAIN:
            record = self.records.get(integer_of(node, TAG, -1))
            made = record.made if record is not None else None
            left = [reduction for axis, reduction in made.partial if made.mesh[axis] > 1] if made is not None else []
            for name in filter(None, node.output):
                self._know(kinds, name, None if made is None else left[0] if left else _WHOLE)
        else:
            makes = [how for how, begins in self.sums.get(_key(node), {}).items() if len(begins) > 1]
            passed = passes_partial(node, file.factors.get(_key(node)), kinds)
            for name in filter(None, node.output):
                self._know(kinds, name, (makes[0] if makes else passed) or None)

    def _know(self, kinds: dict[str, str], name: str, kind: str | None) -> None:
        if kind is None:
            kinds.pop(name, None)
        else:
            kinds[name] = kind

    def _check_partials(self, file: _File) -> None:
        """Adds violations of partial values that are read where only reduced ones may be."""
        kinds = file.kinds
        for node in file.model.graph.node:
            terms = [name for name in node.input if kinds.get(name)]
            if not terms:
                continue
            if is_border(node):
                fact = f"it hands on '{terms[0]}', which is {PARTIAL[kinds[terms[0]]]} that no collective has reduced"
            elif node.domain == DOMAIN:
                fact = self._communicated_partial(node, PARTIAL[kinds[terms[0]]])
            elif node.domain == OPTIMIZER:
                fact = f"it updates a tensor by '{terms[0]}', which is {PARTIAL[kinds[terms[0]]]} that no collective has reduced"
            else:
                fact = misuse(node, file.factors.get(_key(node)), kinds)
            self._report(file, node, fact)
        outputs = {port.name for port in self.manifest.outputs}
        kept = {record.next for record in self.manifest.state if record.kind != "statistics"}
        for node in file.model.graph.node:
            for name in node.output:
                if kinds.get(name) and name in outputs | kept:
                    self._report(file, node, f"'{name}' is {PARTIAL[kinds[name]]} that no collective has reduced")

    def _communicated_partial(self, node: NodeProto, what: str) -> str:
        record = self.records.get(integer_of(node, TAG, -1))
        if (
            record is None
            or record.given is None
            or any(record.given.mesh[axis] > 1 for axis, _ in record.given.partial)
        ):
            return ""
        return f"it is given '{node.input[0]}' as a reduced value, and it is {what}"

    def _report(self, file: _File, node: NodeProto, fact: str) -> None:
        key = ("term", node.output[0] if node.output else integer_of(node, TAG, -1))
        if fact and key not in self.reported:
            self.reported.add(key)
            self.violations.append(Violation(file.name, fact, node_title(node), path_of(node), _AGAIN))


def _begins(boxes: Sequence[Sequence[Sequence[int]]], whole: Sizes) -> Places:
    """Returns the elements at which boxes begin along each dim; None along a dim whose size, or an edge in it, is unknown."""
    found: list[Begins | None] = []
    for axis, size in enumerate(whole):
        edges = [(size or 0) * box[axis][0] / box[axis][2] for box in boxes if axis < len(box)]
        known = size is not None and len(edges) == len(boxes) and all(edge == int(edge) for edge in edges)
        found.append(tuple(map(int, edges)) if known else None)
    return found


def _shard(tensor: TensorProto) -> list[int] | None:
    """Returns the elements at which a weight begins in its tensor; None if the file does not say."""
    text = metadata_of(tensor, PIECE)
    if not text:
        return None
    box = _BOX.search(text)
    if box is None:
        return [0] * len(tensor.dims)
    begins = [span.split(":")[0].strip() for span in box[1].split(",")]
    if len(begins) != len(tensor.dims) or not all(map(str.isdecimal, begins)):
        return None
    return [int(begin) for begin in begins]


def _key(node: NodeProto) -> tuple[str, ...]:
    """The key that identifies a node on all its ranks: disjoint groups may use one name for different values."""
    return (node.op_type, *node.output, "", *node.input)


def _laid(layout: ShardLayout, ranks: Sequence[int], sizes: Sizes) -> Places:
    """Returns the elements at which the shards of a layout begin on these ranks; `sizes`: the sizes of the value's dims."""
    if not all(rank in layout.shards for rank in ranks):
        return None
    begins: list[Begins | None] = []
    for axis, size in enumerate(sizes):
        spans = [layout.shards[rank].shard[axis] for rank in ranks]
        at = {(first, last): first / (last - first) * (size or 0) for first, last in {*spans}}
        whole = size is not None and all(begin.denominator == 1 for begin in at.values())
        begins.append(tuple(at[span].numerator for span in spans) if whole else None)
    return begins
