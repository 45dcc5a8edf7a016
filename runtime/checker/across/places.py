"""Proves the positions of shards and that partial sums are reduced: ranks that run one node on shards of values must agree on both.

A rank's shard of a value begins, along each dim, at some element. That is known for inputs, weights, state, and results of collectives;
nodes pass it on, by the letters that the file has for their operands (`partc.factors`). The letters are trusted: the tests of the op table
prove them for each op. Three facts follow:

    places   if two values meet in a node, element by element or in a sum of products, their distance is the same on all ranks that run the
             node; so is that of an output and its box, and of a collective's operand and its layout
    whole    an output that all ranks have replicated is not made of sharded outputs, except through communication
    terms    a sum over a dim that is sharded over ranks is a partial sum. Partial sums may be added, scaled and moved; one that goes
             through another function, is added to a complete value, or is an output, has missed its reduction; so has one that a
             collective adds over other ranks than those that have its terms

    %h [0:4, 0:6] . %w [0:6, 0:5] on rank 0, %h [0:4, 6:12] . %w [6:12, 0:5] on rank 1     makes partial sums; the file has to reduce them

Only nodes with sharded factors (`partc.cut`) pass places on and make partial values: in a local map a value is each rank's own.

A node without letters is unknown, and never causes a violation. A value's places are, for each dim, the elements at which the shards of a
file's ranks begin, or None if they are not known.

Divisions of partial sums: the ranks that have different terms of a sum, compared with the ranks whose terms a collective adds.

A sum over a sharded dim is divided over ranks by the elements at which their shards of the dim begin. A partial value has the divisions of
its sums. On a mesh of dp 2 and tp 2 a weight's gradient has the division 0, 0, 8, 8, of the batch, and also 0, 6, 0, 6 if a cotangent has
missed its sum over tp. The layout of an AllReduce over dp says that ranks 0 and 1 have one term; by the second division they have two,
which no collective adds.

A division is made with a partial value and passed on with it, also by messages (`places.py`). Of a collective's result the layout says it.
Divisions that are not known are left out: a value may have more terms than its divisions say.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from onnx import ModelProto, NodeProto, TensorProto
from partc.runtime.artifact.comm.border_node import LOOP, BorderCall
from partc.runtime.artifact.comm.collective_node import CollectiveCall, read_call
from partc.runtime.artifact.format import (
    BEGIN,
    CUT,
    DOMAIN,
    END,
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
from partc.runtime.artifact.port import one_by_one
from partc.runtime.checker.across.rank_shards import ShardLayout, layout_of
from partc.runtime.checker.graph.declared import declared_types
from partc.runtime.checker.graph.symbols import numbers, samples
from partc.runtime.errors import Violation, one_line

Division: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""Pairs each file with the elements at which the shards of the summed dim begin, in the order of the file's ranks."""


class Divisions:
    """Divisions of the values of a program; `ranks` maps each file to its ranks."""

    def __init__(self, manifest: Manifest, ranks: Mapping[str, Sequence[int]]) -> None:
        self.manifest, self.ranks = manifest, ranks
        self._received: dict[tuple[str, Division], Division] = {}
        self._terms: dict[tuple[int, str, Division], dict[int, tuple[int, int]]] = {}
        """Maps each operand of a collective and its division to the first rank that has a term of its layout, and that rank's begin."""

    def of_layout(self, layout: ShardLayout) -> Division:
        """Returns the division of a value that is partial as a layout says."""
        return self._of_ranks({rank: shard.term for rank, shard in layout.shards.items()})

    def received(self, value: str, division: Division) -> Division:
        """Returns the division of a value on the ranks that receive it; `division`: its division on the ranks that send it."""
        if (value, division) not in self._received:
            begins = {rank: begin for file, own in division for rank, begin in zip(self.ranks[file], own, strict=True)}
            messages = one_by_one([one for one in self.manifest.transfers if one.value == value], self.manifest.groups)
            sent = {one.target: begins[one.source] for one in messages if one.source in begins}
            self._received[value, division] = self._of_ranks(sent)
        return self._received[value, division]

    def _of_ranks(self, begins: Mapping[int, int]) -> Division:
        files = {file: ranks for file, ranks in self.ranks.items() if begins.keys() >= {*ranks}}
        return tuple([(file, tuple([begins[rank] for rank in ranks])) for file, ranks in files.items()])

    def fault(self, tag: int, operand: str, division: Division, file: str, layout: ShardLayout) -> str:
        """Returns the reason why the operand of a collective has more terms than its layout says; '' if none is known.

        The ranks of `file` are compared with each other, and with the ranks of the files that were asked about before.
        """
        terms = self._terms.setdefault((tag, operand, division), {})
        for rank, begin in zip(self.ranks[file], dict(division).get(file, ()), strict=False):
            if rank in layout.shards:
                first, other = terms.setdefault(layout.shards[rank].term, (rank, begin))
                if other != begin:
                    where = f"at {other} on rank {first}, and at {begin} on rank {rank}"
                    return (
                        f"its layout says that ranks {first} and {rank} have one term of '{operand}', and they have two, which no "
                        f"collective adds: their shards of a summed dim begin {where}"
                    )
        return ""


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
    """The effect of a node: the places of its outputs, the pairs of dims that meet in it, the begins of each reduced dim by
    its reduction, operand and axis.
    """

    made: list[Places]
    meetings: list[tuple[Met, Met, int]]
    reduced: dict[tuple[str, int, int], Begins]


def apply(node: NodeProto, factors: Factors, places: Mapping[str, Places], sizes: Mapping[str, Sizes]) -> Ruled:
    """Returns the effect of a node on the places of its operands."""
    known: dict[str, Met] = {}
    effect = Ruled([], [], {})
    for at, (name, letters) in enumerate(zip(node.input, factors.inputs, strict=False)):
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
                effect.reduced[factors.reductions[letter], at, axis] = begins
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
    divisions: dict[str, frozenset[Division]] = field(default_factory=dict)
    """Maps each partial value to the known divisions of its sums."""
    turns: dict[str, str] = field(default_factory=dict)
    """Maps each state of a body, or result of a branch, to what takes its place: of a turn, or of the other branch."""
    received: set[int] = field(default_factory=set)
    """The tags of the messages that the file receives."""


def check_places(manifest: Manifest, models: Mapping[int, ModelProto]) -> list[Violation]:
    """Returns violations of shards at wrong positions, and of partial values that are not reduced; the files are already checked."""
    return _Places(manifest, models).check()


class _Places:
    """Places of shards, and partial values, in the programs of all ranks."""

    def __init__(self, manifest: Manifest, models: Mapping[int, ModelProto]) -> None:
        self.manifest, self.models = manifest, models
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
        self.sums: dict[tuple[str, ...], dict[tuple[str, int, int], dict[str, Begins]]] = {}
        """Maps each node and reduced dim (its reduction, operand and axis) to the begins of its shards by file."""
        self.divisions = Divisions(manifest, {file.name: file.ranks for file in self.files.values()})
        self.sent: dict[int, tuple[str | None, frozenset[Division]]] = {}
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
        for node, dims in self.sums.items():
            self.sums[node] = {dim: by_file for dim, by_file in dims.items() if len(set().union(*by_file.values())) > 1}
        due = [*self.files.values()]
        while due:  # a partial value may be sent to a rank whose file has been looked at before
            before = dict(self.sent)
            for file in due:
                for _ in range(1 + len(file.turns)):  # a state is what a turn makes of it
                    known = dict(file.kinds), dict(file.divisions)
                    for node in file.model.graph.node:
                        self._classify(file, node)
                    if known == (file.kinds, file.divisions):
                        break
            changed = {tag for tag, sent in self.sent.items() if before.get(tag) != sent}
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
        models = [self.models[rank] for rank in file.ranks]
        distinct = {id(one): one for one in models}
        by_model = {key: [_shard(tensor) for tensor in one.graph.initializer] for key, one in distinct.items()}
        for at, tensor in enumerate(file.model.graph.initializer):
            begins = [by_model[id(one)][at] for one in models]
            known = [one for one in begins if one is not None]
            if len(known) == len(models):
                file.places[tensor.name] = [*zip(*known, strict=True)]
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
        for dim, begins in ruled.reduced.items():
            self.sums.setdefault(_key(node), {}).setdefault(dim, {})[file.name] = begins

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
        file.turns.update(zip(before, call.states, strict=False))
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
        kinds, tag = file.kinds, integer_of(node, TAG, -1)
        if node.domain == DOMAIN and node.op_type == SEND:
            self.sent[tag] = kinds.get(node.input[0]), file.divisions.get(node.input[0], frozenset())
        elif node.domain == DOMAIN and node.op_type == RECV:
            kind, sent = self.sent.get(tag, (None, frozenset()))
            self._know(file, node.output[0], kind, {self.divisions.received(node.output[0], one) for one in sent})
        elif is_border(node):
            self._classify_border(file, node)
        elif node.domain == DOMAIN:
            record = self.records.get(tag)
            layout = record.made if record is not None else None
            left = [how for axis, how in layout.partial if layout.mesh[axis] > 1] if layout is not None else []
            kind = None if layout is None else left[0] if left else _WHOLE
            divisions = (
                {self.divisions.of_layout(layout_of(layout, self.layouts))} if layout is not None and left else ()
            )
            for name in filter(None, node.output):
                self._know(file, name, kind, divisions)
        else:
            sums = self.sums.get(_key(node), {})
            passed = passes_partial(node, file.factors.get(_key(node)), kinds)
            kind = next((reduction for reduction, *_ in sums), passed) or None
            divisions = {tuple(by_file.items()) for by_file in sums.values()}.union(
                *[file.divisions.get(name, ()) for name in node.input if passed]
            )
            for name in filter(None, node.output):
                self._know(file, name, kind, divisions)

    def _classify_border(self, file: _File, node: NodeProto) -> None:
        """A state is partial if it begins so, or if nothing is known of its beginning (zeros) and a turn makes a partial value; a result if
        a turn or a branch makes a partial value.
        """
        call, kinds = read_call(node, file.name), file.kinds
        assert isinstance(call, BorderCall)
        others = {two: one for one, two in file.turns.items()}
        for name, result in zip(call.states, call.carried, strict=False):
            if not result:
                continue
            if call.op == BEGIN:
                kind = kinds[name] if name in kinds else kinds.get(file.turns.get(result, ""))
            else:
                kind = kinds.get(name) or kinds.get(others.get(name, "")) or _WHOLE
            self._know(file, result, kind)
        kinds |= dict.fromkeys((name for name in node.output if name and name not in call.carried), _WHOLE)

    def _handed_on(self, file: _File, node: NodeProto) -> str:
        """Returns the partial value that a border hands on in place of a complete one, or that decides about turns; '' if there is none."""
        call, kinds = read_call(node, file.name), file.kinds
        assert isinstance(call, BorderCall)
        ways = [name for name in (call.condition, call.count) if kinds.get(name)]
        others = {two: one for one, two in file.turns.items()} if call.op == END else {}
        for name in call.states:
            one, two = kinds.get(name), kinds.get(others.get(name, ""))
            if one is not None and two is not None and one != two:
                ways.append(name if one else others[name])
        return (
            f"it hands on '{ways[0]}', which is {PARTIAL[kinds[ways[0]]]} that no collective has reduced"
            if ways
            else ""
        )

    def _know(self, file: _File, name: str, kind: str | None, divisions: Collection[Division] = ()) -> None:
        file.kinds.pop(name, None)
        file.divisions.pop(name, None)
        if kind is not None:
            file.kinds[name] = kind
        if divisions:
            file.divisions[name] = frozenset(divisions)

    def _check_partials(self, file: _File) -> None:
        """Adds violations of partial values that are read where only reduced ones may be."""
        kinds = file.kinds
        for node in file.model.graph.node:
            terms = [name for name in node.input if kinds.get(name)]
            if not terms:
                continue
            if is_border(node):
                fact = self._handed_on(file, node)
            elif node.domain == DOMAIN:
                fact = self._communicated_partial(file, node, terms)
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

    def _communicated_partial(self, file: _File, node: NodeProto, names: Sequence[str]) -> str:
        """Returns the fault of a collective that is given partial values, unlike its layout says; '' if it has none, or that is unknown."""
        tag = integer_of(node, TAG, -1)
        record = self.records.get(tag)
        if record is None or record.given is None:
            return ""
        if not any(record.given.mesh[axis] > 1 for axis, _ in record.given.partial):
            return f"it is given '{names[0]}' as a reduced value, and it is {PARTIAL[file.kinds[names[0]]]}"
        layout = layout_of(record.given, self.layouts)
        divisions = [(name, one) for name in names for one in sorted(file.divisions.get(name, ()))]
        faults = (self.divisions.fault(tag, name, one, file.name, layout) for name, one in divisions)
        return next(filter(None, faults), "")

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
