"""Checks collectives: each node against the manifest, against the nodes of the other ranks, and against the law of shapes.

Dims are compared as numbers, at a few legal sizes of the symbols, because equal expressions may be written in many ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import zip_longest
from math import lcm, prod

from onnx import ModelProto
from partc.runtime.artifact.comm.border_node import BorderCall
from partc.runtime.artifact.comm.collective_node import CollectiveCall, PeerBox, contradictions, read_call, result_shape
from partc.runtime.artifact.comm.collectives import GROUP_OPS
from partc.runtime.artifact.comm.lookup_node import LookupCall
from partc.runtime.artifact.format import DOMAIN, EXCHANGE, MANIFEST, Collective, Manifest, Shape
from partc.runtime.artifact.graph.onnx_graph import node_title
from partc.runtime.artifact.tensors.boxes import overlapping, region, slices
from partc.runtime.checker.across.call_node import AGAIN, CallNode
from partc.runtime.checker.across.lookups import lookup_types, wrong_operands
from partc.runtime.checker.graph.declared import ValueType
from partc.runtime.checker.graph.symbols import Bindings, numbers, same_dims, samples
from partc.runtime.errors import ArtifactError, Violation


def call_nodes(
    rank: int, file: str, model: ModelProto, types: Mapping[str, ValueType]
) -> tuple[list[CallNode], list[Violation]]:
    """The collective nodes of a rank in file order, and violations for those that cannot be read."""
    calls: list[CallNode] = []
    problems: list[Violation] = []
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type in GROUP_OPS:
            try:
                call = read_call(node, file)
            except ArtifactError as error:
                problems.append(
                    Violation(file, str(error).splitlines()[0].split(": ", 2)[-1], node_title(node), help=AGAIN)
                )
                continue
            if isinstance(call, BorderCall):
                calls.append(CallNode(call, rank, file, node_title(node), None, None))
                continue
            if isinstance(call, LookupCall):
                looked_up = lookup_types(call, types)
                calls.append(CallNode(call, rank, file, node_title(node), None, None, looked_up=looked_up))
                continue
            parts = tuple((types.get(source), types.get(result)) for source, result in call.parts)
            given, made = types.get(call.source or ""), types.get(call.result or "")
            if parts:
                given, made = _as_one_vector([one for one, _ in parts]), _as_one_vector([one for _, one in parts])
            calls.append(CallNode(call, rank, file, node_title(node), given, made, parts))
    return calls, problems


def _as_one_vector(types: Sequence[ValueType | None]) -> ValueType | None:
    """The type of the vector in which several values are sent together; None if a shape is not fixed or the types differ."""
    shapes = [type[1] for type in types if type is not None and type[1] is not None]
    kinds = {type[0] for type in types if type is not None}
    numbers = [[dim for dim in shape if isinstance(dim, int)] for shape in shapes]
    if (
        len(shapes) < len(types)
        or len(kinds) != 1
        or any(len(a) < len(b) for a, b in zip(numbers, shapes, strict=True))
    ):
        return None
    return kinds.pop(), [sum(prod(dims) for dims in numbers)]


def check_collectives(manifest: Manifest, calls: Mapping[int, Sequence[CallNode]]) -> Iterator[Violation]:
    """Yields each disagreement of collective nodes with the manifest or between ranks; `calls` maps each readable rank to its nodes."""
    records = {one.tag: one for one in manifest.collectives}
    groups = {rank: manifest.groups_of(rank) for rank in range(manifest.ranks)}
    by_tag: dict[int, dict[int, CallNode]] = {}
    checked: set[tuple[str, int, tuple[int, ...]]] = set()
    laws: set[tuple[str, int, int]] = set()
    for rank, nodes in calls.items():
        for node in nodes:
            tag, record = node.call.tag, records.get(node.call.tag)
            if rank in by_tag.setdefault(tag, {}):
                yield node.violation(f"its tag {tag} is already that of {by_tag[tag][rank].title}")
                continue
            by_tag[tag][rank] = node
            if record is None:
                yield node.violation(f"{MANIFEST} lists no collective {tag}")
            elif node.call.group not in groups[rank]:
                yield node.violation(f"rank {rank} is in no list of group '{node.call.group}'")
            elif (key := (node.file, tag, groups[rank][node.call.group])) not in checked:
                checked.add(key)
                sound = not (problems := [*_check_node(manifest, node, record, key[2])])
                yield from problems
                if sound and (law := (node.file, tag, len(key[2]))) not in laws:
                    laws.add(law)
                    yield from _check_law(manifest, node, record, len(key[2]))
    for one in manifest.collectives:
        nodes_there = by_tag.get(one.tag, {})
        for ranks in manifest.groups.get(one.group, []):
            yield from _check_list(manifest, one, [rank for rank in ranks if rank in calls], nodes_there)
    for nodes in calls.values():
        own = {node.call.tag for node in nodes}
        wanted = [one.tag for one in manifest.collectives if one.tag in own]
        for node, tag in zip(nodes, wanted, strict=False):
            if node.call.tag != tag:
                yield node.violation(f"it is where {MANIFEST} has collective {tag}")
                break


def _check_node(manifest: Manifest, node: CallNode, record: Collective, ranks: tuple[int, ...]) -> Iterator[Violation]:
    call = node.call
    if (call.op, call.group) != (record.op, record.group) or (call.result and call.value != record.value):
        yield node.violation(
            f"{MANIFEST} has {record.op} of '{record.value}' in group '{record.group}' as {record.tag}"
        )
        return
    if record.sources and call.inputs and [*call.inputs] != record.sources:
        have, want = (", ".join(f"'{name}'" for name in names) for names in (call.inputs, record.sources))
        yield node.violation(f"it gives {have}; {MANIFEST} says {want}")
    yield from (node.violation(fact) for fact in contradictions(call, record, ranks, node.rank))
    if isinstance(call, BorderCall):
        return
    if isinstance(call, LookupCall):
        yield from (node.violation(fact) for fact in wrong_operands(call, record, node.looked_up, manifest))
        return
    for kind, name, declared in (("input", call.source, node.input), ("output", call.result, node.output)):
        if name and declared is None and not call.parts:
            yield node.violation(f"its file declares no type of its {kind} '{name}'")
        if declared is not None and declared[0] != record.type:
            yield node.violation(f"its {kind} is a {declared[0]}; {MANIFEST} says {record.type}")
    for (source, result), (source_type, result_type) in zip(call.parts, node.parts, strict=True):
        if (
            source_type is None
            or result_type is None
            or source_type[1] is None
            or not all(isinstance(dim, int) for dim in source_type[1])
        ):
            yield node.violation(
                f"the shape of '{source}' or of '{result}' is not fixed; values that travel as one have such"
            )
        elif (source_type[0], result_type) != (record.type, _result_type(call, source_type, len(ranks))):
            fact = f"'{source}' is {source_type[0]} {_text(source_type[1])}, and '{result}' {result_type[0]} {_text(result_type[1])}"
            yield node.violation(f"{fact}; all are one {record.type}, each what {call.op} makes of its input")
    if node.input is not None and not same_dims(node.input[1], record.shape, manifest):
        yield node.violation(f"its input is {_text(node.input[1])}; {MANIFEST} says {_text(record.shape)}")


def _result_type(call: CollectiveCall, given: ValueType, ranks: int) -> ValueType | None:
    """The result type of one value of a coalesced collective, from its fixed shape; None if it does not divide into equal shards."""
    try:
        return given[0], list(result_shape(call, tuple(dim for dim in given[1] or () if isinstance(dim, int)), ranks))
    except ValueError:
        return None


def _check_law(manifest: Manifest, node: CallNode, record: Collective, ranks: int) -> Iterator[Violation]:
    """Yields a violation if the declared output's shape is not the op's result for the input's shape, at one of the sample sizes."""
    call = node.call
    if not isinstance(call, CollectiveCall) or call.kind.boxes:
        return  # its output does not follow from its input and the number of ranks
    for sizes in samples(manifest) if record.shape is not None else ():
        given = numbers(record.shape or [], manifest, sizes)
        if None in given:
            continue
        try:
            wanted = result_shape(call, tuple(size or 0 for size in given), ranks)
        except ValueError as error:
            yield node.violation(f"with {sizes}: {error}" if sizes else str(error))
            return
        if node.output is not None and node.output[1] is not None:
            made = numbers(node.output[1], manifest, sizes)
            if len(made) != len(wanted) or any(one not in (None, two) for one, two in zip(made, wanted, strict=True)):
                yield node.violation(
                    f"its output is {_text(node.output[1])}; {call.op} of {_text(record.shape)} "
                    f"on {ranks} ranks makes {list(wanted)}" + (f" with {sizes}" if sizes else "")
                )
                return


def _check_list(
    manifest: Manifest, record: Collective, ranks: Sequence[int], nodes: Mapping[int, CallNode]
) -> Iterator[Violation]:
    """Yields violations where the nodes of one list's ranks do not fit together."""
    there = [nodes[rank] for rank in ranks if rank in nodes]
    if record.op != EXCHANGE:
        for rank in ranks:
            if rank not in nodes:
                fact = f"collective {record.tag}, {record.op} of '{record.value}', has no node on rank {rank}"
                yield Violation(MANIFEST, fact, help=AGAIN)
        for node in there[1:]:
            first, other = there[0].call, node.call
            if first.law != other.law:
                yield node.violation(f"it differs from the node of rank {there[0].rank} in {first.LAW}")
            elif isinstance(first, CollectiveCall) and (first.parts or node.collective.parts):
                yield from _check_coalesced(there[0], node)
        return
    nodes = {rank: node for rank, node in nodes.items() if node.call.op == EXCHANGE}
    for node in (nodes[rank] for rank in ranks if rank in nodes):
        for verb, shards in (("gives a box to", node.collective.gives), ("takes a box from", node.collective.takes)):
            for peer in dict.fromkeys(shard.peer for shard in shards):
                if peer in ranks and peer not in nodes:
                    yield node.violation(f"it {verb} rank {peer}, which has no such node")
        for peer in dict.fromkeys(shard.peer for shard in (*node.collective.gives, *node.collective.takes)):
            if peer in nodes:
                yield from _check_pair(manifest, node, nodes[peer])
        yield from _check_cover(node)


def _check_cover(node: CallNode) -> Iterator[Violation]:
    """Yields a violation unless the boxes that a rank takes cover its output, each element once."""
    if not node.collective.result:
        return
    boxes = [shard.box for shard in node.collective.takes]
    scale = [lcm(*(cut[2] for cut in cuts)) for cuts in zip(*boxes, strict=True)]
    places = [region(box, scale) for box in boxes]
    covered = Fraction(sum(place.count for place in places), prod(scale))
    if covered != 1:
        yield node.violation(f"the boxes that it takes are {covered} of its output, not all of it once")
    elif twice := overlapping(places):
        one, two = (node.collective.takes[at] for at in twice)
        fact = f"the boxes that it takes from ranks {one.peer} and {two.peer} overlap, so a part of its output is never written"
        yield node.violation(fact)


def _check_coalesced(first: CallNode, node: CallNode) -> Iterator[Violation]:
    """Checks that two ranks coalesce the same values in the same order: only their positions identify them."""
    for place, (own_value, other) in enumerate(zip_longest(first.call.outputs, node.call.outputs)):
        if own_value != other:
            fact = f"its value {place} is '{other}', that of rank {first.rank} is '{own_value}': one would be added to the other"
            yield node.violation(
                fact
                if own_value and other
                else f"it has {len(node.parts)} values, rank {first.rank} {len(first.parts)}"
            )
            return


def _check_pair(manifest: Manifest, giver: CallNode, taker: CallNode) -> Iterator[Violation]:
    """Checks that the boxes that one rank gives to another have the shapes of those that the other takes from it, in order."""
    gives = [shard for shard in giver.collective.gives if shard.peer == taker.rank]
    takes = [shard for shard in taker.collective.takes if shard.peer == giver.rank]
    if len(gives) != len(takes):
        yield giver.violation(f"it gives {len(gives)} boxes to rank {taker.rank}, which takes {len(takes)} from it")
        return
    for sizes in samples(manifest):
        for give, take in zip(gives, takes, strict=True):
            try:
                given, taken = _size(give, giver.input, manifest, sizes), _size(take, taker.output, manifest, sizes)
            except ValueError as error:
                yield giver.violation(f"between ranks {giver.rank} and {taker.rank}: {error}")
                return
            if given is not None and taken is not None and given != taken:
                fact = f"it gives a box of {list(given)} to rank {taker.rank}, which takes one of {list(taken)}"
                yield giver.violation(fact + (f" with {sizes}" if sizes else ""))
                return


def _size(shard: PeerBox, declared: ValueType | None, manifest: Manifest, sizes: Bindings) -> tuple[int, ...] | None:
    shape = numbers(declared[1], manifest, sizes) if declared is not None and declared[1] is not None else [None]
    if None in shape:
        return None
    return tuple(at.stop - at.start for at in slices(shard.box, tuple(size or 0 for size in shape)))


def _text(shape: Shape) -> str:
    return "of unknown shape" if shape is None else f"[{', '.join(map(str, shape))}]"
