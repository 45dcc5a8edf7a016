"""Checks that the ranks' communication matches: every Send has its Recv, in an order that terminates.

The proof of the order is a simulated run in which every transfer waits for both its ends, and every collective for all its ranks (a
rendezvous): it happens when it is the next one on each of them. Buffered sends can only allow more, so an order that terminates here
terminates everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import ModelProto, ValueInfoProto
from partc.runtime.artifact.comm.collective_node import peer_of
from partc.runtime.artifact.comm.collectives import GROUP_OPS
from partc.runtime.artifact.dim_expression import symbols_in
from partc.runtime.artifact.format import (
    DOMAIN,
    MANIFEST,
    RECV,
    SEND,
    TAG,
    Manifest,
    Port,
    Transfer,
)
from partc.runtime.artifact.graph.onnx_graph import integer_of, node_title, path_of, read_for_sizes_alone
from partc.runtime.artifact.tasks.rows import Row
from partc.runtime.artifact.tasks.task import marked
from partc.runtime.checker.across.call_node import CallNode
from partc.runtime.checker.across.collectives import call_nodes, check_collectives
from partc.runtime.checker.across.expert_rows import check_expert_rows
from partc.runtime.checker.across.layouts import check_layouts
from partc.runtime.checker.across.lookups import check_pushed, check_routed
from partc.runtime.checker.graph.declared import ValueType, declared_types, type_of
from partc.runtime.checker.graph.symbols import local_shape, same_dims
from partc.runtime.errors import Violation

_SHOWN = 2
"""The number of ranks in a deadlock whose rows are shown."""


@dataclass(frozen=True)
class CommNode:
    """A Send or Recv of a rank file: its transfer, and the type that the file declares."""

    kind: str
    rank: int
    peer: int
    tag: int
    value: str
    declared: ValueType | None
    title: str
    path: str

    file: str

    def violation(self, fact: str, help: str = "") -> Violation:
        """Returns a violation at this node."""
        return Violation(self.file, fact, self.title, self.path, help)

    @property
    def ends(self) -> tuple[int, int]:
        """Source and target rank."""
        return (self.rank, self.peer) if self.kind == SEND else (self.peer, self.rank)

    def __str__(self) -> str:
        side = f"to rank {self.peer}" if self.kind == SEND else f"from rank {self.peer}"
        return f"{self.title} {side}, tag {self.tag}"


def comm_nodes(
    rank: int, file: str, model: ModelProto, types: Mapping[str, ValueType], groups: Mapping[str, Sequence[int]]
) -> list[CommNode]:
    """Returns the Send and Recv nodes of a rank, in order; `types`: its file's declarations, `groups`: the lists that contain the rank."""
    nodes = []
    for node in model.graph.node:
        if node.domain != DOMAIN or node.op_type not in (SEND, RECV):
            continue
        value = next(iter(node.input if node.op_type == SEND else node.output), "")
        peer, tag = peer_of(node, groups), integer_of(node, TAG, -1)
        title, path = node_title(node), path_of(node)
        nodes.append(CommNode(node.op_type, rank, peer, tag, value, types.get(value), title, path, file))
    return nodes


def check_order(
    manifest: Manifest,
    models: Mapping[int, ModelProto],
    rows: Mapping[int, Row] | None = None,
    traffic: Mapping[int, ModelProto] | None = None,
    shared: Manifest | None = None,
) -> list[Violation]:
    """Returns every disagreement between the ranks, and with the manifest; `models`: the readable rank files, `rows`: their tasks.

    `traffic`: the communication of all calls, where `models` has fewer. `shared`: the manifest with one file for equal programs.
    """
    shared, traffic = shared or manifest, traffic or models
    files = {shared.program(rank): rank for rank in reversed(models)}
    types = {file: declared_types(traffic[rank]) for file, rank in files.items()}
    programs = {
        rank: comm_nodes(rank, manifest.program(rank), model, types[shared.program(rank)], manifest.groups_of(rank))
        for rank, model in traffic.items()
    }
    violations = [*_check_ports(manifest, models), *_check_nodes(manifest, programs)]
    read = {file: call_nodes(rank, file, traffic[rank], types[file]) for file, rank in files.items()}
    violations += [violation for _, unread in read.values() for violation in unread]
    calls = {rank: [one.on(rank, manifest.program(rank)) for one in read[shared.program(rank)][0]] for rank in models}
    unmatched = [*_check_matching(manifest, programs), *check_collectives(manifest, calls)]
    if violations or unmatched or len(models) < manifest.ranks:
        return [*dict.fromkeys([*violations, *unmatched])]
    by_file = {file: models[rank] for file, rank in files.items()}
    routed = check_routed(by_file, types, {file: one[0] for file, one in read.items()})
    if violations := [*check_layouts(manifest, calls), *check_pushed(manifest, calls), *routed]:
        return violations
    for file, one in by_file.items():
        violations += check_expert_rows(file, one, types[file], read[file][0], manifest.symbols)
    if violations:
        return violations
    kinds = {file: _are_messages(traffic[rank]) for file, rank in files.items()}
    events = {rank: _events(kinds[shared.program(rank)], programs[rank], calls[rank]) for rank in models}
    return [*_check_sequence(manifest, programs), *_check_rendezvous(events, manifest, rows or {})]


def _check_ports(manifest: Manifest, models: Mapping[int, ModelProto]) -> Iterator[Violation]:
    """Yields violations of inputs and outputs that the manifest lists differently; the state is checked elsewhere."""
    files = {manifest.program(rank): model for rank, model in models.items()}
    alone_in = {file: read_for_sizes_alone(model.graph) for file, model in files.items()}
    agreeing = dict[tuple[str, str, str, str], bool]()
    for rank, model in models.items():
        graph = model.graph
        records_there = [record for record in manifest.state if rank in record.ranks]
        kept, following = {record.value for record in records_there}, {record.next for record in records_there}
        sides = (("input", graph.input, manifest.inputs, kept), ("output", graph.output, manifest.outputs, following))
        for side, ports, records, state in sides:
            listed = {record.name: record for record in records}
            alone = alone_in[manifest.program(rank)] if side == "input" and manifest.training is None else set()
            for port in ports:
                if port.name in state and port.name not in listed:
                    continue
                record = listed.get(port.name)
                if record is not None and rank not in record.ranks and port.name in alone:
                    yield from _check_sized(manifest, rank, port, record)
                    continue
                if record is None or rank not in record.ranks:
                    fact = f"{MANIFEST} lists no {side} '{port.name}' for rank {rank}"
                    yield Violation(manifest.program(rank), fact, f"graph {side} '{port.name}'")
                    continue
                box = record.box(rank)
                key = side, port.name, repr(box), _text(type_of(port.type))
                if key not in agreeing:
                    agreeing[key] = _port_agrees(type_of(port.type), record, rank, manifest)
                if not agreeing[key]:
                    wanted = (record.type, local_shape(record.shape, box))
                    fact = f"it is {_text(type_of(port.type))}; {MANIFEST} says {_text(wanted)}"
                    yield Violation(manifest.program(rank), fact, f"graph {side} '{port.name}'")
            there = {port.name for port in ports}
            for record in records:
                if rank in record.ranks and record.name not in there:
                    yield Violation(
                        manifest.program(rank), f"{MANIFEST} gives it the {side} '{record.name}', and the file has none"
                    )


def _check_sized(manifest: Manifest, rank: int, port: ValueInfoProto, record: Port) -> Iterator[Violation]:
    """Yields violations of an input that is not fed because only its sizes are read: the symbols of fed inputs must determine them."""
    told = {dim for one in manifest.inputs if one.ranks for dim in one.shape or () if isinstance(dim, str)}
    type, shape = type_of(port.type)
    names = {name for dim in shape or () for name in symbols_in(dim, manifest.symbols)}
    if type != record.type or shape is None or not names <= told:
        fact = f"it is {_text((type, shape))}, read for its sizes alone, and no input that is fed determines them"
        yield Violation(manifest.program(rank), fact, f"graph input '{port.name}'")


def _check_nodes(manifest: Manifest, programs: Mapping[int, Sequence[CommNode]]) -> Iterator[Violation]:
    for rank, nodes in programs.items():
        seen: dict[tuple[str, int], CommNode] = {}
        for node in nodes:
            if not 0 <= node.peer < manifest.ranks or node.peer == rank:
                yield node.violation(
                    f"its peer is rank {node.peer}; it must be another one of 0 to {manifest.ranks - 1}"
                )
            if (first := seen.setdefault((node.kind, node.tag), node)) is not node:
                yield node.violation(f"its tag {node.tag} is already that of {first.title}")


def _check_matching(manifest: Manifest, programs: Mapping[int, Sequence[CommNode]]) -> Iterator[Violation]:
    sides = {(node.kind, node.rank, node.tag): node for nodes in programs.values() for node in nodes}
    listed = {(one.tag, one.source, one.target): one for one in manifest.messages}
    if (tags := len({one.tag for one in manifest.transfers})) != len(manifest.transfers):
        yield Violation(MANIFEST, f"it has {len(manifest.transfers)} transfers with {tags} different tags")
    for node in (node for nodes in programs.values() for node in nodes):
        other = RECV if node.kind == SEND else SEND
        match = sides.get((other, node.peer, node.tag))
        if node.peer in programs and (match is None or match.peer != node.rank):
            yield node.violation(f"tag {node.tag} has no {other} on rank {node.peer}", "compile the model again")
        elif match is not None and node.kind == SEND:
            yield from _check_pair(node, match)
        transfer = listed.get((node.tag, *node.ends))
        if transfer is None or transfer.value != node.value:
            source, target = node.ends
            transfer_text = f"transfer {node.tag} of '{node.value}' from rank {source} to rank {target}"
            fact = f"{MANIFEST} lists no {transfer_text}"
            yield node.violation(fact)
        elif node.declared is not None and not _agree(node.declared, transfer):
            fact = f"its value is {_text(node.declared)}; {MANIFEST} says {_text((transfer.type, transfer.shape))}"
            yield node.violation(fact)
    for transfer in manifest.messages:
        for kind, rank in ((SEND, transfer.source), (RECV, transfer.target)):
            if (rank in programs or not 0 <= rank < manifest.ranks) and (kind, rank, transfer.tag) not in sides:
                fact = f"transfer {transfer.tag} of '{transfer.value}' has no {kind} on rank {rank}"
                yield Violation(MANIFEST, fact, help="compile the model again")


def _check_pair(send: CommNode, recv: CommNode) -> Iterator[Violation]:
    if send.value != recv.value:
        yield send.violation(
            f"it sends '{send.value}', and {recv.title} on rank {recv.rank} makes '{recv.value}' of it"
        )
    if send.declared is not None and recv.declared is not None and send.declared != recv.declared:
        yield send.violation(f"it sends {_text(send.declared)}, and rank {recv.rank} expects {_text(recv.declared)}")
    for node in (send, recv):
        if node.declared is None:
            yield node.violation(f"its file declares no type for '{node.value}'")


def _check_sequence(manifest: Manifest, programs: Mapping[int, Sequence[CommNode]]) -> Iterator[Violation]:
    for rank, nodes in programs.items():
        wanted = [transfer.tag for transfer in manifest.messages_of(rank)]
        for node, tag in zip(nodes, wanted, strict=True):
            if node.tag != tag:
                fact = f"it is where {MANIFEST} has transfer {tag}; its own is {node.tag}"
                yield node.violation(fact, "compile the model again: the order of communication has been changed")
                break


def _are_messages(model: ModelProto) -> list[bool]:
    """Returns, for each communication node of a file in order, whether it is a message; the others are of groups."""
    there = (node.op_type for node in model.graph.node if node.domain == DOMAIN)
    return [op_type in (SEND, RECV) for op_type in there if op_type in (SEND, RECV, *GROUP_OPS)]


def _events(
    are_messages: Sequence[bool], nodes: Sequence[CommNode], calls: Sequence[CallNode]
) -> list[CommNode | CallNode]:
    """Returns the communication nodes of a rank in the order of its file."""
    messages, collectives = iter(nodes), iter(calls)
    return [next(messages) if is_message else next(collectives) for is_message in are_messages]


def _check_rendezvous(
    programs: Mapping[int, Sequence[CommNode | CallNode]], manifest: Manifest, rows: Mapping[int, Row]
) -> Iterator[Violation]:
    position = dict.fromkeys(programs, 0)
    members = _members(programs, manifest)
    ready = list(programs)
    while ready:
        rank = ready.pop()
        while position[rank] < len(programs[rank]):
            ranks = members[rank][position[rank]]
            tag = _tag(programs[rank][position[rank]])
            if any(
                position[other] == len(programs[other]) or _tag(programs[other][position[other]]) != tag
                for other in ranks
            ):
                break
            for other in ranks:
                position[other] += 1
            ready.extend(other for other in ranks if other != rank)
    stuck = {rank: programs[rank][at] for rank, at in position.items() if at < len(programs[rank])}
    if stuck:
        cells = {rank: max(0, rows[rank].places.get(_tag(node), 0)) for rank, node in stuck.items() if rank in rows}
        waits = "; ".join(
            f"rank {rank} waits at {node}{f' beside {rows[rank].cells[cells[rank]]}' if rank in cells else ''}"
            for rank, node in sorted(stuck.items())
        )
        first = stuck[min(stuck)]
        shown = "".join(
            f"\n  rank {rank}:\n{marked(rows[rank].cells, at)}" for rank, at in sorted(cells.items())[:_SHOWN]
        )
        yield first.violation(f"a deadlock of {len(stuck)} ranks: {waits}{shown}", "compile the model again")


def _members(
    programs: Mapping[int, Sequence[CommNode | CallNode]], manifest: Manifest
) -> dict[int, list[tuple[int, ...]]]:
    """Maps each rank and communication node to the ranks that must take part; a rank of the list without such a node need not."""
    there = {(_tag(node), rank) for rank, nodes in programs.items() for node in nodes}
    groups = {rank: manifest.groups_of(rank) for rank in programs}
    return {
        rank: [
            tuple(other for other in groups[rank][node.call.group] if (node.call.tag, other) in there)
            if isinstance(node, CallNode)
            else node.ends
            for node in nodes
        ]
        for rank, nodes in programs.items()
    }


def _tag(node: CommNode | CallNode) -> int:
    return node.call.tag if isinstance(node, CallNode) else node.tag


def _port_agrees(declared: ValueType, record: Port, rank: int, manifest: Manifest) -> bool:
    if record.boxes is None:
        return _agree(declared, record)
    return declared[0] == record.type and same_dims(declared[1], local_shape(record.shape, record.box(rank)), manifest)


def _agree(declared: ValueType, record: Transfer | Port) -> bool:
    type, shape = declared
    return type == record.type and (shape is None or record.shape is None or shape == record.shape)


def _text(type: ValueType) -> str:
    name, shape = type
    return name if shape is None else f"{name} [{', '.join(map(str, shape))}]"
