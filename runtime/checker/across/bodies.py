"""Proves that ranks run the bodies of If and Loop in which they communicate together, from the files with these bodies between borders.

    one way     a condition and a count are the same on all ranks of the body's list: made of values that each of them has whole, by nodes
                that draw nothing, or received by a collective that gives all the same. So all take one branch, and as many turns
    one list    ranks that communicate in a body are in its list
    one type    a state has one type and shape as it begins, in each turn, and at the end; both branches give what the node gives

That each collective is in the body of one node on all of its ranks follows from the order of communication, of which borders are a part.
That a state has one layout is proven with the places of shards (`places.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import ModelProto, NodeProto, TensorProto
from partc.runtime.artifact.comm.border_node import IF, LOOP, BorderCall
from partc.runtime.artifact.comm.collective_node import peer_of, read_call
from partc.runtime.artifact.format import (
    ALL_GATHER,
    ALL_REDUCE,
    BEGIN,
    BROADCAST,
    DOMAIN,
    END,
    PIECE,
    RANK_CONSTANT,
    RECV,
    SEND,
    Collective,
    Manifest,
)
from partc.runtime.artifact.graph.bodies import is_border
from partc.runtime.artifact.graph.onnx_graph import integer_of, metadata_of, node_title, path_of, reads
from partc.runtime.artifact.graph.targets import is_copy
from partc.runtime.checker.across.call_node import AGAIN
from partc.runtime.checker.across.rank_shards import ShardLayout, layout_of
from partc.runtime.checker.graph.declared import ValueType, declared_types
from partc.runtime.checker.graph.symbols import same_dims
from partc.runtime.errors import Violation

_DRAWING = ("Bernoulli", "Multinomial", "Random")
"""The beginnings of the names of ops that draw."""
_SAME = (ALL_GATHER, ALL_REDUCE, BROADCAST)
"""Collectives that give all ranks of a list one value."""


def check_bodies(manifest: Manifest, models: Mapping[int, ModelProto]) -> Iterator[Violation]:
    """Yields violations of the laws of bodies; the files' communication is already checked."""
    for file, ranks in manifest.by_file(models).items():
        model = models[ranks[0]]
        borders = [node for node in model.graph.node if is_border(node)]
        calls = [call for node in borders if isinstance(call := read_call(node, file), BorderCall)]
        if not calls:
            continue
        types = declared_types(model)
        yield from _check_types(manifest, file, model.graph.node, types)
        yield from _check_lists(manifest, file, ranks[0], model.graph.node)
        reported = set[str]()
        for group in dict.fromkeys(call.group for call in calls):
            there = manifest.groups_of(ranks[0]).get(group, ())
            differing = _differing(manifest, models, ranks[0], there)
            for node, call in zip(borders, calls, strict=True):
                for word, name in (("condition", call.condition), ("number of turns", call.count)):
                    if call.group == group and name in differing and node.name not in reported:
                        reported.add(node.name)
                        made = f" is made of '{differing[name]}', which" if differing[name] != name else ""
                        fact = f"its {word} '{name}'{made} is not the same on ranks {', '.join(map(str, there))}"
                        law = "all ranks of a body take the same branch, and the same turns"
                        yield Violation(file, f"{fact}; {law}", node_title(node), path_of(node), AGAIN)


def _pairs(nodes: Iterable[NodeProto]) -> Iterator[tuple[NodeProto, BorderCall, BorderCall, tuple[str, ...]]]:
    """Yields each border with its call, that of its Begin, and for an End of an If what the first branch gave."""
    open_ = list[tuple[BorderCall, tuple[str, ...]]]()
    for node in nodes:
        if not is_border(node):
            continue
        call = read_call(node, "")
        assert isinstance(call, BorderCall)
        if call.op == BEGIN:
            open_.append((call, ()))
        first, given = open_[-1]
        yield node, call, first, given
        open_[-1] = first, call.states
        if call.op == END:
            open_.pop()


def _check_types(
    manifest: Manifest, file: str, nodes: Iterable[NodeProto], types: Mapping[str, ValueType]
) -> Iterator[Violation]:
    for node, call, first, other_branch in _pairs(nodes):
        pairs = list[tuple[str, str, str]]()
        if call.kind == LOOP and call.op == BEGIN:
            pairs = [(one, two, "begins as") for one, two in zip(call.carried, call.states, strict=True)]
        elif call.kind == LOOP and call.op == END:
            pairs = [(one, two, "is given by a turn as") for one, two in zip(first.carried, call.states, strict=False)]
            pairs += [
                (one, two, "has in a turn the form of") for one, two in zip(call.carried, first.carried, strict=False)
            ]
        elif call.op == END:
            pairs = [(one, two, "is of a branch") for one, two in zip(call.results, call.operands, strict=True)]
            pairs += [(one, two, "is of a branch") for one, two in zip(call.results, other_branch, strict=False)]
            if len(other_branch) != len(call.operands):
                fact = f"one branch gives {len(other_branch)} values, and the other {len(call.operands)}"
                yield Violation(file, fact, node_title(node), path_of(node), AGAIN)
        for name, other, how in pairs:
            one, two = types.get(name), types.get(other)
            if name and one is not None and two is not None:
                alike = call.kind == IF or same_dims(one[1], two[1], manifest)
                if one[0] != two[0] or not alike:
                    fact = f"'{name}', {_text(one)}, {how} '{other}', {_text(two)}"
                    yield Violation(file, fact, node_title(node), path_of(node), AGAIN)
        for word, name, wanted in (
            ("condition", call.condition, "tensor(bool)"),
            ("number of turns", call.count, "tensor(int64)"),
        ):
            there = types.get(name)
            if there is not None and (there[0] != wanted or any(dim != 1 for dim in there[1] or ())):
                fact = f"its {word} '{name}' is {_text(there)}, and has to be one {wanted}"
                yield Violation(file, fact, node_title(node), path_of(node), AGAIN)


def _check_lists(manifest: Manifest, file: str, rank: int, nodes: Iterable[NodeProto]) -> Iterator[Violation]:
    """Yields communication in a body with ranks that are not in the body's list."""
    groups, open_ = manifest.groups_of(rank), list[tuple[NodeProto, frozenset[int]]]()
    for node in nodes:
        if node.domain != DOMAIN or node.op_type == RANK_CONSTANT or is_copy(node):
            continue
        if is_border(node) and node.op_type == END:
            open_.pop()
            continue
        if node.op_type in (SEND, RECV):
            ranks = frozenset({rank, peer_of(node, groups)})
        else:
            ranks = frozenset(groups.get(read_call(node, file).group, ()))
        if open_ and not ranks <= open_[-1][1]:
            outside = ", ".join(map(str, sorted(ranks - open_[-1][1])))
            fact = f"rank {outside} takes part in it, and does not run the body in which it is ({node_title(open_[-1][0])})"
            yield Violation(file, fact, node_title(node), path_of(node), AGAIN)
        if is_border(node) and node.op_type == BEGIN:
            open_.append((node, ranks))


@dataclass
class _Alike:
    """The known facts about what ranks have alike."""

    manifest: Manifest
    ranks: Sequence[int]
    records: Mapping[int, Collective]
    layouts: dict[str, ShardLayout]

    def is_same(self, node: NodeProto) -> bool:
        """Whether a node of communication gives all of the ranks one value."""
        if node.op_type == RECV:
            return True  # what is sent is checked where it is made
        record = self.records.get(integer_of(node, "tag", -1))
        if record is None:
            return False
        if record.made is not None:
            shards = layout_of(record.made, self.layouts).shards
            return len({shards[rank] for rank in self.ranks if rank in shards}) <= 1
        lists = self.manifest.groups.get(record.group, [])
        return record.op in _SAME and any({*self.ranks} <= {*one} for one in lists)


def _differing(manifest: Manifest, models: Mapping[int, ModelProto], rank: int, ranks: Sequence[int]) -> dict[str, str]:
    """Maps each value of a rank's file that may differ by rank to the first value of which it is made that does."""
    differing = dict[str, str]()
    tensors = [{tensor.name: tensor for tensor in models[one].graph.initializer} for one in ranks if one in models]
    for name in (tensor.name for tensor in models[rank].graph.initializer):
        contents = {None if (one := there.get(name)) is None else _content(one) for there in tensors}
        if len(contents) > 1:
            differing[name] = name
    for port in manifest.inputs:
        if len({repr(port.box(one)) for one in ranks if one in port.ranks}) > 1:
            differing[port.name] = port.name
    for record in manifest.state:
        if len({repr(record.shard(one)) for one in ranks if one in record.ranks}) > 1:
            differing[record.value] = record.value
    alike = _Alike(manifest, ranks, {one.tag: one for one in manifest.collectives}, {})
    nodes, before = models[rank].graph.node, -1
    while before != len(differing):  # a state may differ because of what a turn gives
        before = len(differing)
        for node in nodes:
            if not is_border(node):
                _follow(node, differing, alike)
        for _, call, first, given in _pairs(nodes):
            _pass_border(call, first, given, differing)
    return differing


def _content(tensor: TensorProto) -> tuple[str, bytes]:
    return metadata_of(tensor, PIECE), b"" if tensor.external_data else tensor.raw_data


def _follow(node: NodeProto, known: dict[str, str], facts: _Alike) -> None:
    """Adds the results of a node that may differ by rank."""
    source = next((known[name] for name in reads(node) if name in known), "")
    if node.domain == DOMAIN and not is_copy(node):
        names = [name for name in node.output if name and node.op_type != SEND]
        source = "" if names and node.op_type != RANK_CONSTANT and facts.is_same(node) else next(iter(names), "")
    elif node.op_type.startswith(_DRAWING) and not node.domain:
        source = node.output[0]
    elif node.op_type in ("Shape", "Size") and not node.domain:
        return
    if source:
        for name in filter(None, node.output):
            known.setdefault(name, source)


def _pass_border(call: BorderCall, first: BorderCall, before: Sequence[str], known: dict[str, str]) -> None:
    """Adds what a border hands on."""
    pairs = list[tuple[str, str]]()
    if call.kind == LOOP and call.op == BEGIN:
        pairs = list(zip(call.states, call.carried, strict=True))
    elif call.kind == LOOP and call.op == END:
        pairs = [*zip(call.states, first.carried, strict=False), *zip(call.states, call.carried, strict=True)]
        pairs += zip(first.carried, call.carried, strict=False)
    elif call.op == END:
        pairs = [*zip(call.operands, call.results, strict=True), *zip(before, call.results, strict=False)]
    for source, result in pairs:
        if source in known and result:
            known.setdefault(result, known[source])
    ends = [name for name in (first.condition, first.count, call.condition) if name in known]
    if call.op == END and ends:
        for name in filter(None, call.results):
            known.setdefault(name, known[ends[0]])


def _text(type: ValueType) -> str:
    return type[0] if type[1] is None else f"{type[0]} [{', '.join(map(str, type[1]))}]"
