"""A rank's file, divided into steps, with the manifest's records of its communication; file and manifest must agree.

If messages, collectives, inputs or outputs of the file differ from those that the manifest lists for the rank, an ArtifactError names every
difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from partc.runtime.artifact.comm.collective_node import AnyCall, CollectiveCall, contradictions
from partc.runtime.artifact.comm.lookup_node import LookupCall
from partc.runtime.artifact.graph.cache_append import appended
from partc.runtime.artifact.graph.onnx_graph import read_for_sizes_alone
from partc.runtime.artifact.run_list import BufferRow
from partc.runtime.artifact.tasks.calls import declared, tensors_of, unrolled
from partc.runtime.artifact.tasks.microbatches import refuse_left_out
from partc.runtime.artifact.tensors.dtypes import dense, element, type_text

from ..artifact.format import CACHE, EXCHANGE, SCALE, Collective, Dim, Manifest, Shape, StateRecord, Transfer
from ..artifact.manifest import Artifact
from ..errors import ArtifactError
from .default_list import default_list
from .listed_steps import listed_steps
from .steps import Border, Copy, LookUp, PostRecv, Segment, Send, StartCollective, Step, Update

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto, ValueInfoProto

_CHANGED = "  help: the file was changed; compile again"


@dataclass(frozen=True)
class RankFile:
    """A rank's file: its model, its steps, and by tag the records of its messages and collectives; `where` is its name in messages."""

    manifest: Manifest
    rank: int
    where: str
    model: ModelProto
    steps: list[Step]
    transfers: dict[int, Transfer]
    collectives: dict[int, Collective]
    state: list[StateRecord]
    """The records of the rank's state."""
    listed: bool = False
    """Whether the steps are from the file's run list, which was proven when the artifact was compiled."""
    buffers: Sequence[BufferRow] = ()
    """The values that are adjacent in memory."""

    @cached_property
    def inputs(self) -> list[str]:
        """The model's inputs that the rank reads, without its state."""
        kept = {record.value for record in self.state}
        return [value.name for value in self.model.graph.input if value.name not in kept]

    @cached_property
    def sized(self) -> list[str]:
        """The inputs that are not fed to the rank: it reads only their sizes, on which all ranks agree."""
        listed = {port.name: port for port in self.manifest.inputs}
        alone = read_for_sizes_alone(self.model.graph)
        return [
            name
            for name in self.inputs
            if name in alone and name in listed and self.rank not in listed[name].ranks and dense(listed[name].type)
        ]

    @cached_property
    def outputs(self) -> list[str]:
        """The model's outputs that are delivered to the rank, without the next values of its state."""
        following = {record.next for record in self.state if record.next}
        return [value.name for value in self.model.graph.output if value.name not in following]

    @cached_property
    def caches(self) -> frozenset[str]:
        """A decoder's caches and their next values: the part of them that sessions read grows from step to step."""
        return frozenset(name for one in self.state if one.kind == CACHE for name in (one.value, one.next) if name)

    @cached_property
    def calls(self) -> list[CollectiveCall]:
        """The collectives in the order in which they begin."""
        return [step.call for step in self.steps if isinstance(step, StartCollective)]

    @cached_property
    def lookups(self) -> list[LookupCall]:
        """The lookups in their order."""
        return [step.call for step in self.steps if isinstance(step, LookUp)]

    @cached_property
    def calls_by_output(self) -> dict[str, AnyCall]:
        """Maps each result of a collective or a lookup to its call; the result of a collective of several values is their common buffer."""
        calls: list[AnyCall] = [*self.calls, *self.lookups]
        return {call.result: call for call in calls if call.result}

    @cached_property
    def received(self) -> dict[str, Transfer]:
        """Maps each received value's name to its `Transfer`."""
        return {step.value: self.transfers[step.tag] for step in self.steps if isinstance(step, PostRecv)}

    @cached_property
    def sent(self) -> dict[str, Transfer]:
        """Maps each sent value's name to its `Transfer`."""
        return {step.value: self.transfers[step.tag] for step in self.steps if isinstance(step, Send)}

    @cached_property
    def computed(self) -> list[str]:
        """The values that are results of segments, copies and updates."""
        made = [name for step in self.steps if isinstance(step, Segment) for name in step.makes]
        given = [name for step in self.borders for name in step.makes]
        return [*made, *given, *(step.result for step in self.copies), *self._updated]

    @cached_property
    def borders(self) -> list[Border]:
        """The borders of bodies in which ranks communicate."""
        return [step for step in self.steps if isinstance(step, Border)]

    @cached_property
    def copies(self) -> list[Copy]:
        """The copies between targets."""
        return [step for step in self.steps if isinstance(step, Copy)]

    @cached_property
    def updated_in_place(self) -> list[StateRecord]:
        """The records of the state that are replaced in place, by a node of an optimizer or one that appends to a cache."""
        updated = {*self._updated, *(one.next for one in appended(self.model, self.state))}
        return [one for one in self.state if one.next in updated]

    @cached_property
    def replaced_by_copy(self) -> list[tuple[str, str]]:
        """The replacements at the end of the step: pairs of a value of the state and the value that is copied into it."""
        in_place = {record.next for record in self.updated_in_place}
        return [(one.value, one.next) for one in self.state if one.next and one.next not in in_place]

    @cached_property
    def replaced_always(self) -> list[tuple[str, str]]:
        """The pairs of `replaced_by_copy` that are replaced even by a step that replaces nothing else: scales."""
        return [(one.value, one.next) for one in self.state if one.next and one.kind == SCALE]

    @cached_property
    def tensors(self) -> dict[str, TensorProto]:
        """Maps names to weights, including those of tasks."""
        return tensors_of(self.model)

    @cached_property
    def named(self) -> set[str]:
        """The values that steps read or make, and the state: all values outside of sessions."""
        state = ((one.value, one.next) for one in self.state)
        return {*self.inputs, *self.outputs}.union(*((*step.reads, *step.makes) for step in self.steps), *state)

    @cached_property
    def declared(self) -> dict[str, ValueInfoProto]:
        """Maps each value to its type as the file declares it; the values of a function body once for each call."""
        return dict(declared(self.model, self.where))

    @cached_property
    def declared_shapes(self) -> dict[str, Shape]:
        """Maps values to the shapes that the file declares; None where a dim is unknown."""
        return self.shapes_of(self.declared)

    def shapes_of(self, names: Iterable[str]) -> dict[str, Shape]:
        """Maps those of `names` that have a declared shape to it."""
        shapes: dict[str, Shape] = {}
        known: dict[int, Shape] = {}
        for name in names:
            value = self.declared.get(name)
            if value is None or not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
                continue
            if id(value) not in known:
                dims = value.type.tensor_type.shape.dim
                stated: list[Dim] = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in dims]
                known[id(value)] = stated if "" not in stated else None
            shapes[name] = known[id(value)]
        return shapes

    @cached_property
    def declared_types(self) -> dict[str, str]:
        """Maps weights and declared values to their types."""
        types = {name: f"tensor({element(tensor.data_type)})" for name, tensor in self.tensors.items()}
        known: dict[int, str] = {}
        for name, value in self.declared.items():
            if id(value) not in known:
                known[id(value)] = type_text(value.type)
            if known[id(value)]:
                types[name] = known[id(value)]
        return types

    @cached_property
    def _updated(self) -> list[str]:
        return [name for step in self.steps if isinstance(step, Update) for name in step.makes]


def read_rank_file(artifact: Artifact, rank: int) -> RankFile:
    """Returns the file of a rank; ArtifactError where its messages or collectives differ from the manifest's, or cannot be run."""
    manifest = artifact.manifest
    where = str(artifact.folder / manifest.program(rank))
    model = artifact.model(rank)
    run = artifact.run_list(rank)
    listed = run is not None
    if run is None:
        refuse_left_out(model, manifest, where)
        model = unrolled(model, where)
        run = default_list(model, manifest.name, where)
    steps = listed_steps(model, run, manifest.name, where, manifest.groups_of(rank))
    transfers = transfers_of(steps, manifest, rank, where)
    collectives = collectives_of(steps, manifest, rank, where)
    there = {value.name for value in model.graph.input}
    kept = (record for record in manifest.state if rank in record.ranks)
    state = [record for record in kept if manifest.is_main or record.value in there]
    return RankFile(manifest, rank, where, model, steps, transfers, collectives, state, listed, run.buffers)


def transfers_of(steps: Sequence[Step], manifest: Manifest, rank: int, where: str) -> dict[int, Transfer]:
    """Returns the record of each message of this rank, by tag; ArtifactError if manifest and file disagree.

    A tensor of the state that is on another target is sent as a copy, which has a name of its own.
    """
    own = manifest.messages_of(rank)
    records = {one.tag: one for one in own}
    copied = {step.result: step.source for step in steps if isinstance(step, Copy)}
    used: set[int] = set()
    problems = []
    for step in steps:
        if isinstance(step, Send | PostRecv):
            ends = (rank, step.peer) if isinstance(step, Send) else (step.peer, rank)
            record = records.get(step.tag)
            value = step.value
            if isinstance(step, Send) and record is not None and copied.get(value) == record.value:
                value = record.value
            if record is None or (record.value, record.source, record.target) != (value, *ends):
                problems.append(f"{where}: the manifest lists no transfer {step.tag} for the {step}")
            elif step.tag in used:
                problems.append(f"{where}: transfer {step.tag} stands twice in the file: {step}")
            used.add(step.tag)
    problems += [
        f"{where}: the manifest lists transfer {one.tag} of '{one.value}' ({one.source} to {one.target}), the file does not"
        for one in own
        if one.tag not in used
    ]
    if problems:
        raise ArtifactError("\n".join([*problems, _CHANGED]))
    return {tag: records[tag] for tag in used}


def collectives_of(steps: Sequence[Step], manifest: Manifest, rank: int, where: str) -> dict[int, Collective]:
    """Returns the record of each collective and lookup of this rank, by tag; ArtifactError if it contradicts the file's, or an op is
    unknown.
    """
    records = {one.tag: one for one in manifest.collectives}
    groups = manifest.groups_of(rank)
    used: set[int] = set()
    problems = []
    for step in steps:
        if isinstance(step, StartCollective | LookUp | Border):
            tag = step.call.tag
            call, record = step.call, records.get(tag)
            listed = record is not None and step.ranks and (record.op, record.group) == (call.op, call.group)
            if record is None or not listed or (call.result is not None and call.value != record.value):
                problems.append(f"{where}: the manifest lists no collective {tag} on rank {rank} for the {step}")
            elif tag in used:
                problems.append(f"{where}: collective {tag} stands twice in the file: {step}")
            else:
                wrong = contradictions(step.call, record, step.ranks, rank)
                problems += [f"{where}: the {step}: {problem}" for problem in wrong]
            used.add(tag)
    problems += [
        f"{where}: the manifest lists collective {one.tag}, {one.op} of '{one.value}', the file does not"
        for one in manifest.collectives
        if one.group in groups and one.op != EXCHANGE and one.tag not in used
    ]
    if problems:
        raise ArtifactError("\n".join([*problems, _CHANGED]))
    return {tag: records[tag] for tag in used}


def check_ports(file: RankFile) -> None:
    """Raises ArtifactError unless the file's inputs and outputs are those that the manifest lists for this rank."""
    problems = []
    sides = (("inputs", file.manifest.inputs, file.inputs), ("outputs", file.manifest.outputs, file.outputs))
    for kind, ports, there in sides:
        wanted = {port.name for port in ports if file.rank in port.ranks}
        there = [name for name in there if kind == "outputs" or name not in file.sized]
        if wanted != set(there):
            problems.append(f"{file.where}: the {kind} are {sorted(there)}, the manifest says {sorted(wanted)}")
    if problems:
        raise ArtifactError("\n".join([*problems, _CHANGED]))
