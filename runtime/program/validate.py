"""A rank file held against the manifest: messages, collectives, inputs and outputs must be those that are listed for the rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..artifact.comm_node import contradictions
from ..artifact.format import EXCHANGE, Collective, Manifest, Transfer
from ..errors import ArtifactError
from .segmentation import PostRecv, Send, StartCollective, Step

_CHANGED = "  help: the file was changed; compile again"


def transfers_of(steps: Sequence[Step], manifest: Manifest, rank: int, where: str) -> dict[int, Transfer]:
    """The record of each message of this rank, by tag; ArtifactError where the file tells otherwise."""
    records = {one.tag: one for one in manifest.transfers}
    used: set[int] = set()
    problems = []
    for step in steps:
        if isinstance(step, Send | PostRecv):
            ends = (rank, step.peer) if isinstance(step, Send) else (step.peer, rank)
            record = records.get(step.tag)
            if record is None or (record.value, record.source, record.target) != (step.value, *ends):
                problems.append(f"{where}: the manifest lists no transfer {step.tag} for the {step}")
            elif step.tag in used:
                problems.append(f"{where}: transfer {step.tag} stands twice in the file: {step}")
            used.add(step.tag)
    problems += [
        f"{where}: the manifest lists transfer {one.tag} of '{one.value}' ({one.source} to {one.target}), the file does not"
        for one in manifest.transfers
        if rank in (one.source, one.target) and one.tag not in used
    ]
    if problems:
        raise ArtifactError("\n".join([*problems, _CHANGED]))
    return {tag: records[tag] for tag in used}


def collectives_of(steps: Sequence[Step], manifest: Manifest, rank: int, where: str) -> dict[int, Collective]:
    """The record of each collective of this rank, by tag; ArtifactError where the file tells otherwise, or it cannot be run."""
    records = {one.tag: one for one in manifest.collectives}
    circles = manifest.circles(rank)
    used: set[int] = set()
    problems = []
    for step in steps:
        if isinstance(step, StartCollective):
            tag = step.call.tag
            record = records.get(tag)
            if record is None or not step.ranks or not _same(step, record):
                problems.append(f"{where}: the manifest lists no collective {tag} on rank {rank} for the {step}")
            elif tag in used:
                problems.append(f"{where}: collective {tag} stands twice in the file: {step}")
            else:
                problems += [
                    f"{where}: the {step}: {problem}" for problem in contradictions(step.call, record, step.ranks, rank)
                ]
            used.add(tag)
    problems += [
        f"{where}: the manifest lists collective {one.tag}, {one.op} of '{one.value}', the file does not"
        for one in manifest.collectives
        if one.group in circles and one.op != EXCHANGE and one.tag not in used
    ]
    if problems:
        raise ArtifactError("\n".join([*problems, _CHANGED]))
    return {tag: records[tag] for tag in used}


def _same(step: StartCollective, record: Collective) -> bool:
    call = step.call
    return (record.op, record.group) == (call.op, call.group) and (call.result is None or call.value == record.value)


def check_ports(manifest: Manifest, rank: int, listed: Mapping[str, Sequence[str]], where: str) -> None:
    """The file's `inputs` and `outputs` are those that the manifest gives to this rank; ArtifactError otherwise."""
    problems = []
    for kind, ports in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        wanted = {port.name for port in ports if rank in port.ranks}
        if wanted != set(listed[kind]):
            problems.append(f"{where}: the {kind} are {sorted(listed[kind])}, the manifest says {sorted(wanted)}")
    if problems:
        raise ArtifactError("\n".join([*problems, _CHANGED]))
