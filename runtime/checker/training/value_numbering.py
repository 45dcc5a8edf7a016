"""Numbers the values of all ranks, in the order of the files, so that equal numbers are equal values.

A value's number depends on its origin:

    state             the tensor and the shard: equal before the step
    a gradients' sum  its class: those of one class are equal, and two classes may differ
    input             its name and the shard that the rank reads; for one that is not fed, since only its sizes are read, its type
    weight            its bytes; for a constant that differs by rank the bytes on the rank
    Recv, Identity    the number of the value that was sent
    Shape, Size       if the file states the input's shape, its dims: shards at other places of the same size have one shape
    Concat of sizes   the dims: one rank may ask the value for its shape, and another join the sizes of its inputs
    Add, Mul, ...     an operand that was expanded to the size of another one counts as unexpanded: the op broadcasts by itself
    AllReduce, ...    the op and the numbers of the operands of all ranks of the list, in its order; if each rank gets another shard, also
                      the rank's place; for an Exchange the boxes and the numbers of the values from which they are cut
    If, Loop          of the bodies in which ranks communicate: a result its branches or turns. A state is the number with which it begins;
                      if ranks that begin a state alike make it differently in a turn, all values are numbered again, with the state apart
    another node      op, attributes, function body, and the numbers of its inputs; a random one without a seed equals no other

Programs that are numbered with one `known` share their numbers: a value that both compute has one number.

It also proves that copies of a tensor stay equal: ranks that have the same shard replace it by the same value.

Equal values have equal numbers, under the assumption that copies were equal before the step. The proof is the step of an induction: copies
that are equal stay so, bit by bit, if equal ops make equal bits of equal inputs. That holds for ranks on one kind of machine, with the same
number of threads. The initial values of copies are compared, too. Shards that overlap without being the same are not compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from partc.runtime.artifact.comm.border_node import IF, BorderCall
from partc.runtime.artifact.comm.collective_node import AnyCall, CollectiveCall, peer_of, read_call
from partc.runtime.artifact.comm.lookup_node import LookupCall
from partc.runtime.artifact.format import (
    ALL_REDUCE,
    BEGIN,
    DOMAIN,
    OTHERWISE,
    PULL,
    RECV,
    SEND,
    SOURCE,
    STORED,
    TAG,
    Manifest,
    Shape,
    StateRecord,
)
from partc.runtime.artifact.graph.onnx_graph import integer_of, metadata_of, node_title, path_of, reads
from partc.runtime.artifact.graph.rank_constants import constant_of, group_of, is_rank_constant
from partc.runtime.checker.graph.declared import declared_types
from partc.runtime.checker.graph.symbols import numbers as dims_at
from partc.runtime.checker.graph.symbols import samples
from partc.runtime.checker.subject import Subject
from partc.runtime.errors import Violation
from partc.runtime.files.regular import open_regular

Items: TypeAlias = tuple[tuple[int, ...], ...]
"""The items of a list of sizes, at each of some sizes of the symbols."""

# The check proves the compiler's work by what it knows itself: this list is not the compiler's.
_RANDOM = (
    "Bernoulli",
    "Dropout",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
)


_OF_SHAPE = ("Shape", "Size")
"""Ops that read only the shape of their input."""

_MOST_DIMS = 16

_BROADCASTING = ("Add", "Div", "Mul", "Sub", "Sum")
"""Ops whose elements are each made of one element of every operand."""


@dataclass
class _Run:
    """One numbering of all values."""

    distinctions: dict[tuple[int, int, int], Hashable] = field(default_factory=dict)
    """Maps the tag of a Loop's Begin, the place and a rank of a state to a key that no rank has that begins alike and goes another way."""
    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    """Maps the tag and target of a message to the number of its value."""
    sources: dict[tuple[int, int], tuple[AnyCall, list[int]]] = field(default_factory=dict)
    bodies: dict[int, list[tuple[BorderCall, list[int]]]] = field(default_factory=dict)
    """Maps each rank to the bodies around its next node: the Begin, with the numbers of its states or of a branch's results."""
    states: dict[tuple[int, int], dict[int, tuple[int, int]]] = field(default_factory=dict)
    """Maps the tag of each Loop's Begin, with the place of a state, to the state's number on each rank, and to its number after a turn."""

    def distinguish(self) -> bool:
        """Distinguishes states that ranks begin alike and make differently in a turn; returns whether there are any."""
        parted = False
        for (tag, k), pairs in self.states.items():
            numbers: dict[int, set[int]] = {}
            for state, number in pairs.values():
                numbers.setdefault(state, set()).add(number)
            if any(len(different) > 1 for different in numbers.values()):
                self.distinctions.update({(tag, k, rank): pair for rank, pair in pairs.items()})
                parted = True
        return parted


class ValueNumbering:
    """The numbers of the values of all ranks."""

    def __init__(self, folder: Path, manifest: Manifest, models: Mapping[int, ModelProto]) -> None:
        self.folder, self.manifest, self.models = folder, manifest, models
        self.known: dict[Hashable, int] = {}
        self.numbers: dict[int, dict[str, int]] = {rank: {} for rank in models}
        self.makers: dict[int, dict[str, NodeProto]] = {}
        for ranks in manifest.by_file(models).values():
            makers = {name: node for node in models[ranks[0]].graph.node for name in node.output}
            self.makers |= dict.fromkeys(ranks, makers)
        self.run = _Run()
        self._expanded: dict[int, int] = {}
        self._items: dict[int, Items] = {}
        self.groups = {rank: manifest.groups_of(rank) for rank in models}
        self.ops = {
            rank: {(one.domain, one.name): one.SerializeToString(deterministic=True) for one in model.functions}
            for rank, model in models.items()
        }
        self._texts: dict[int, tuple[bytes, ...]] = {}
        self._bytes: dict[Hashable, bytes] = {}
        self._shapes: dict[str, dict[str, Items | None]] = {}
        self._sizes = samples(manifest)
        while True:
            for rank in models:
                self._begin(rank)
            self.done = self._run()
            if not self.done or not self.run.distinguish():
                break
            self.numbers, self.run = {rank: {} for rank in models}, _Run(self.run.distinctions)

    def _number(self, *key: Hashable) -> int:
        return self.known.setdefault(key, len(self.known))

    def _begin(self, rank: int) -> None:
        """Numbers the values before the first node."""
        numbers, graph = self.numbers[rank], self.models[rank].graph
        for tensor in graph.initializer:
            number = numbers[tensor.name] = self._number("weight", self.content(tensor))
            short = tensor.data_type == TensorProto.INT64 and len(tensor.dims) == 1 and tensor.dims[0] <= _MOST_DIMS
            if short and tensor.data_location != TensorProto.EXTERNAL:
                self._items[number] = (tuple(numpy_helper.to_array(tensor).tolist()),) * len(self._sizes)
        for sparse in graph.sparse_initializer:
            numbers[sparse.values.name] = self._number("sparse", sparse.SerializeToString(deterministic=True))
        for port in self.manifest.inputs:
            if rank in port.ranks:
                numbers[port.name] = self._number("input", port.name, str(port.box(rank)))
        for record in self.manifest.state:
            if rank in record.ranks:
                numbers[record.value] = self._number("state", record.tensor, str(record.shard(rank)))
        for value in graph.input:
            if value.name not in numbers:
                numbers[value.name] = self._number("sized", value.type.SerializeToString(deterministic=True))

    def _run(self) -> bool:
        """Numbers all values; returns False if a rank waits for a message that never comes."""
        places, moved = dict.fromkeys(self.models, 0), True
        by_file = self.manifest.by_file(self.models).values()
        nodes_of = {ranks[0]: [*self.models[ranks[0]].graph.node] for ranks in by_file}
        nodes_of |= {rank: nodes_of[ranks[0]] for ranks in by_file for rank in ranks}
        while moved:
            moved = False
            for rank, nodes in nodes_of.items():
                while places[rank] < len(nodes) and self._visit(rank, nodes[places[rank]]):
                    places[rank] += 1
                    moved = True
        return all(places[rank] == len(nodes) for rank, nodes in nodes_of.items())

    def _visit(self, rank: int, node: NodeProto) -> bool:
        """Numbers a node's results; returns False if another rank must come first."""
        numbers = self.numbers[rank]
        if node.domain == DOMAIN and node.op_type == SEND:
            self.run.sent[integer_of(node, TAG, -1), peer_of(node, self.groups[rank])] = numbers[node.input[0]]
            return True
        if node.domain == DOMAIN and node.op_type == RECV:
            key = integer_of(node, TAG, -1), rank
            if key in self.run.sent:
                numbers[node.output[0]] = self.run.sent[key]
            return key in self.run.sent
        if is_rank_constant(node):
            array = constant_of(node, self.groups[rank][group_of(node)].index(rank))
            numbers[node.output[0]] = self._number("weight", self.content(numpy_helper.from_array(array)))
            return True
        if node.domain == DOMAIN:
            return self._visit_call(rank, node)
        if node.op_type == "Identity" and not node.domain:
            numbers[node.output[0]] = numbers[node.input[0]]
            return True
        inputs = tuple(numbers[name] if name else -1 for name in node.input)
        if (items := self._output_sizes(rank, node, inputs)) is not None:
            number = numbers[node.output[0]] = self._number("sizes", items)
            self._items[number] = items
            return True
        if node.op_type in _OF_SHAPE and not node.domain:
            inputs = (self._dims(rank, node.input[0], inputs[0]),)
        if node.op_type in _BROADCASTING and not node.domain:
            inputs = self._before_expanded(rank, node, inputs)
        captured = tuple(numbers[name] for name in list(reads(node))[sum(map(bool, node.input)) :])
        own = (rank, *node.output) if _is_random(node) else ()
        function_key = (
            "node",
            self.ops[rank].get((node.domain, node.op_type)),
            node.domain,
            node.op_type,
            self.attributes(node),
        )
        for place, name in enumerate(node.output):
            if name:
                numbers[name] = self._number(*function_key, inputs, captured, own, place)
        if node.op_type == "Expand" and not node.domain:
            self._expanded[numbers[node.output[0]]] = inputs[0]
        return True

    def _before_expanded(self, rank: int, node: NodeProto, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the operands' numbers; for an operand that was expanded to the size of another one, that of the unexpanded value."""
        if self._expanded.keys().isdisjoint(inputs):
            return inputs
        dims = [self._dims(rank, name, number) for name, number in zip(node.input, inputs, strict=True)]
        large = {size for size, number in zip(dims, inputs, strict=True) if number not in self._expanded}
        pairs = zip(dims, inputs, strict=True)
        return tuple(self._expanded.get(number, number) if size in large else number for size, number in pairs)

    def _output_sizes(self, rank: int, node: NodeProto, inputs: tuple[int, ...]) -> Items | None:
        """Returns the dims that a Shape returns, or a Concat of sizes; None for another node, or if they are not stated."""
        if node.domain or node.op_type not in ("Shape", "Concat"):
            return None
        if node.op_type == "Concat":
            parts = [self._items[one] for one in inputs if one in self._items]
            whole = zip(*parts, strict=True) if len(parts) == len(inputs) else ()
            return tuple(tuple(chain.from_iterable(some)) for some in whole) or None
        ends = {one.name: one.i for one in node.attribute}
        shape = self._shape(rank, node.input[0])
        return None if shape is None else tuple(dims[ends.get("start", 0) : ends.get("end")] for dims in shape)

    def _shape(self, rank: int, name: str) -> Items | None:
        """Returns the dims of a value at a few sizes of the symbols; None if the file does not state them."""
        file = self.manifest.program(rank)
        if file not in self._shapes:
            types = declared_types(self.models[rank])
            shapes = {name: tuple(shape) for name, (_, shape) in types.items() if shape is not None}
            known = {shape: self._at_sizes([*shape]) for shape in {*shapes.values()}}
            self._shapes[file] = {name: known[shape] for name, shape in shapes.items()}
        return self._shapes[file].get(name)

    def _at_sizes(self, shape: Shape) -> Items | None:
        """Returns a shape at a few sizes of the symbols; None where these do not determine it."""
        dims = [dims_at(shape, self.manifest, sizes) for sizes in self._sizes]
        known = tuple(tuple(dim for dim in row if dim is not None) for row in dims)
        return known if [*map(len, known)] == [*map(len, dims)] else None

    def _dims(self, rank: int, name: str, number: int) -> int:
        """Returns the number of a value's shape: that of its dims, or of the value if these are unknown."""
        shape = self._shape(rank, name)
        return number if shape is None else self._number("sizes", shape)

    def _visit_call(self, rank: int, node: NodeProto) -> bool:
        call, numbers = read_call(node, ""), self.numbers[rank]
        ranks = self.groups[rank][call.group]
        self.run.sources[call.tag, rank] = call, [numbers[name] for name in call.inputs]
        if isinstance(call, BorderCall):
            self._visit_border(rank, call)
            return True
        if isinstance(call, CollectiveCall) and call.kind.boxes:
            return self._visit_exchange(rank, call)
        if any((call.tag, other) not in self.run.sources for other in ranks):
            return False
        sources = [self.run.sources[call.tag, other][1] for other in ranks]
        if isinstance(call, LookupCall):
            return self._visit_lookup(rank, call, ranks)
        for place, name in enumerate(call.outputs):
            if call.kind.root == "gives":
                numbers[name] = sources[call.root][0]
                continue
            values = tuple(one[place] for one in sources)
            own = ranks.index(rank) if call.kind.splits else None
            made = ("collective", call.op, call.reduce, call.axis, call.concat_axis, values, own)
            numbers[name] = values[0] if call.op == ALL_REDUCE and len(ranks) == 1 else self._number(*made)
        return True

    def _visit_border(self, rank: int, call: BorderCall) -> None:
        """Numbers the values with which a turn begins, and the results of a body."""
        numbers, run = self.numbers[rank], self.run
        operands, open_ = [numbers[name] for name in call.states], run.bodies.setdefault(rank, [])
        if call.op == BEGIN:
            states = [
                self._number("state", call.tag, k, number, run.distinctions.get((call.tag, k, rank)))
                for k, number in enumerate(operands)
            ]
            turn = [self._number("turn", call.tag, k) for k in range(len(call.results) - len(states))]
            numbers |= {name: number for name, number in zip(call.results, turn + states, strict=True) if name}
            open_.append((call, states))
            return
        first, before = open_.pop()
        if call.op == OTHERWISE:
            open_.append((first, operands))
            return
        pairs = [*zip(before, operands, strict=False)]
        if call.kind == IF:
            results = [self._number("either", numbers[first.condition], *pair) for pair in pairs]
        else:
            results = [self._number("last", *pair) for pair in pairs]
            results += [self._number("stack", first.tag, number) for number in operands[len(before) :]]
            for k, pair in enumerate(pairs):
                run.states.setdefault((first.tag, k), {})[rank] = pair
        numbers |= {name: number for name, number in zip(call.carried, results, strict=True) if name}

    def _visit_lookup(self, rank: int, call: LookupCall, ranks: Sequence[int]) -> bool:
        """Numbers a lookup's results: rows by the rank's ids, requests by all givers' ids, and an owner's rows by all givers' rows."""
        others = (self.run.sources[call.tag, other][0] for other in ranks)
        calls = [other for other in others if isinstance(other, LookupCall)]
        known = [self.numbers[other] for other in ranks]
        place, own = ranks.index(rank), self.numbers[rank]
        if call.op == PULL:
            tables = tuple(known[owner][calls[owner].operand or ""] for owner in call.owners)
            ids = own.get(call.ids or "")
            asked = tuple(known[giver].get(calls[giver].ids or "") for giver in call.givers)
            if call.result:
                own[call.result] = self._number("pull", tables, ids)
            for k, name in enumerate(call.requests):
                if name:
                    own[name] = self._number("asked", call.owners, call.givers, call.rows, asked, place, k)
            return True
        given = tuple(tuple(map(there.get, one.inputs)) for there, one in zip(known, calls, strict=True))
        for k, name in enumerate(call.outputs):
            own[name] = self._number(call.op, call.owners, call.rows, given, place, k)
        return True

    def _visit_exchange(self, rank: int, call: CollectiveCall) -> bool:
        if any((call.tag, shard.peer) not in self.run.sources for shard in call.takes):
            return False
        taken: dict[int, int] = {}
        shards = []
        for shard in call.takes:
            other, values = self.run.sources[call.tag, shard.peer]
            assert isinstance(other, CollectiveCall)
            gives = [one for one in other.gives if one.peer == rank]
            at = taken[shard.peer] = taken.get(shard.peer, -1) + 1
            shards.append((shard.box, gives[at].box, values[0]))
        for name in call.outputs:
            whole = all(cut[0] == 0 and cut[1] == cut[2] for box in shards[0][:2] for cut in box)
            made = self._number("exchange", tuple(sorted(shards)))
            self.numbers[rank][name] = shards[0][2] if len(shards) == 1 and whole else made
        return True

    def attributes(self, node: NodeProto) -> tuple[bytes, ...]:
        """Returns the attributes of a node, in a fixed order."""
        if id(node) not in self._texts:
            texts = sorted(one.SerializeToString(deterministic=True) for one in node.attribute)
            self._texts[id(node)] = tuple(texts)
        return self._texts[id(node)]

    def content(self, tensor: TensorProto) -> Hashable:
        """Returns the type, shape and hash of a weight's bytes; their location if their file is absent or outside of the artifact."""
        copy = TensorProto()
        copy.CopyFrom(tensor)
        copy.name, copy.doc_string = "", ""
        if tensor.data_location != TensorProto.EXTERNAL:
            return hashlib.sha256(copy.SerializeToString(deterministic=True)).digest()
        entries = {entry.key: entry.value for entry in tensor.external_data}
        key = tuple(sorted(entries.items()))
        if (record := self.manifest.files.get(entries["location"])) is not None and (record.absent or record.path):
            return tensor.data_type, metadata_of(tensor, SOURCE), tuple(tensor.dims), key
        if key not in self._bytes:
            with open_regular(self.folder / entries["location"]) as file:
                file.seek(int(entries.get("offset", 0)))
                self._bytes[key] = hashlib.sha256(file.read(int(entries.get("length", -1)))).digest()
        return tensor.data_type, metadata_of(tensor, STORED), tuple(tensor.dims), self._bytes[key]


def _is_random(node: NodeProto) -> bool:
    """Whether a node may draw other numbers on each rank: one without a seed, except a Dropout outside training mode."""
    if node.op_type == "Dropout" and not "".join(node.input[2:3]):
        return False
    return node.op_type in _RANDOM and all(attribute.name != "seed" for attribute in node.attribute)


Holder: TypeAlias = tuple[int, StateRecord]

_AGAIN = "compile the model again"


def check_copies(subject: Subject) -> Iterator[Violation]:
    """Yields violations of copies of tensors that are not proven to stay equal."""
    copies = copies_of(subject.manifest)
    if not copies:
        return
    numbering = ValueNumbering(subject.folder, subject.shared, subject.models)
    if numbering.done:
        subject.counts.copies = len(copies)
        yield from check_replicas(numbering, copies)


def copies_of(manifest: Manifest) -> list[list[Holder]]:
    """Returns the shards that several ranks have, each with all its ranks."""
    found: dict[tuple[str, str], list[Holder]] = {}
    for record in manifest.state:
        for rank in record.ranks:
            found.setdefault((record.tensor, str(record.shard(rank))), []).append((rank, record))
    return [holders for holders in found.values() if len(holders) > 1]


def check_replicas(numbering: ValueNumbering, copies: Sequence[Sequence[Holder]]) -> list[Violation]:
    """Returns violations of the copies that may differ."""
    comparison = _Comparison(numbering)
    return [one for holders in copies for one in comparison.compare(holders)]


class _Comparison:
    """Compares values of ranks."""

    def __init__(self, numbering: ValueNumbering) -> None:
        self.numbering = numbering
        self.tensors: dict[int, dict[str, TensorProto]] = {}
        """Maps ranks to their initializers by name."""

    def compare(self, holders: Sequence[Holder]) -> Iterator[Violation]:
        """Violations for the copies of one shard that are not proven equal."""
        (rank, record), *others = holders
        first = self._first_value(rank, record)
        for other, copy in others:
            file = self.numbering.manifest.program(other)
            if self._first_value(other, copy) != first:
                fact = f"rank {other} begins with another value of '{copy.tensor}' than rank {rank}"
                yield Violation(file, fact, f"state '{copy.value}'", help=_AGAIN)
            if not copy.next or not record.next:
                continue
            if self.numbering.numbers[other].get(copy.next) != self.numbering.numbers[rank].get(record.next):
                node = self.numbering.makers[other].get(copy.next)
                title, path = (node_title(node), path_of(node)) if node else (f"state '{copy.value}'", "")
                fact = f"'{copy.tensor}' on rank {other} may become another one than on rank {rank}, which holds the same shard"
                reason = self._difference(rank, record.next, other, copy.next)
                yield Violation(file, f"{fact}: {reason}", title, path, _AGAIN)

    def _first_value(self, rank: int, record: StateRecord) -> Hashable:
        if rank not in self.tensors:
            self.tensors[rank] = {one.name: one for one in self.numbering.models[rank].graph.initializer}
        tensor = self.tensors[rank].get(record.value)
        return record.initial if tensor is None else self.numbering.content(tensor)

    def _difference(self, rank: int, name: str, other: int, twin: str) -> str:
        """Returns a text about the first difference of two values, found by going backward from them."""
        while True:
            maker, two = self.numbering.makers[rank].get(name), self.numbering.makers[other].get(twin)
            if maker is None or two is None or DOMAIN in (maker.domain, two.domain):
                return f"'{twin}' is not known to be the '{name}' of rank {rank}"
            if (maker.domain, maker.op_type) != (two.domain, two.op_type):
                return f"{node_title(two)} is {node_title(maker)} there"
            if self.numbering.attributes(maker) != self.numbering.attributes(two):
                return f"{node_title(two)} has {_text(two, maker)}, and there {_text(maker, two)}"
            pairs = zip(maker.input, two.input, strict=False)
            mine, own = self.numbering.numbers[rank], self.numbering.numbers[other]
            parted = [(a, b) for a, b in pairs if a and b and mine.get(a) != own.get(b)]
            if not parted:
                return f"{node_title(two)} is not known to make what it makes on rank {rank}"
            name, twin = parted[0]


def _text(node: NodeProto, other: NodeProto) -> str:
    """Returns the attributes in which a node differs from another, as text."""
    theirs = {one.name: one.SerializeToString(deterministic=True) for one in other.attribute}
    different = [one for one in node.attribute if theirs.get(one.name) != one.SerializeToString(deterministic=True)]
    values = (
        f"{one.f:g}" if one.type == AttributeProto.FLOAT else str(helper.get_attribute_value(one)) for one in different
    )
    return ", ".join(f"{one.name}={value}" for one, value in zip(different, values, strict=True)) or "nothing of that"
