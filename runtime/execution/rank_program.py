"""Prepares a rank's program: everything that does not depend on the bindings of a step.

The rank's file is checked against the manifest and divided into steps; shapes, types, places and live ranges of its values are in one table
(`program/value_table.py`); sessions are built, and the rank's state is laid out in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from partc.runtime.artifact.tensors.dtypes import BY_CODE, Bytes, element
from partc.runtime.artifact.tensors.stored_weight import numbers
from partc.runtime.artifact.tensors.tensor import Tensor, Value, aligned

from ..artifact.format import CACHE, CUDA, Shape, StateRecord
from ..artifact.generation import binds_rows
from ..artifact.manifest import Artifact, open_artifact
from ..communication.nccl import NcclLinks
from ..communication.transport import Transport
from ..devices.device_memory import Block, Cell, DeviceMemory, Placed, memory_of, refuse_missing
from ..devices.devices import Devices, RequestedDevices, devices_from
from ..errors import ArtifactError, UsageError
from ..lookups.lookup import Lookup, Memory
from ..program.flat_buffers import copy_runs
from ..program.lifetimes import in_place_aliases
from ..program.ort import give_back_freed
from ..program.rank_file import RankFile, check_ports, read_rank_file
from ..program.sessions import Builder, SegmentSession, Settings
from ..program.steps import Copy, Segment, StartCollective, Step, Update, WaitCollective
from ..program.value_table import (
    Storage,
    ValueTable,
    check_results,
    check_types,
    known_shapes,
    locations,
    promised_shapes,
    sized_inputs,
    types_from_manifest,
    used_targets,
)
from ..units import count as units
from ..updates.fusion import FusedUpdate, RowUpdate
from ..updates.updater import RowUpdater, Updater
from .linked_file import LinkedFile
from .memory.layout import lay_out
from .state import State, check_same, make_state
from .symbol_bindings import Binder
from .targets.counts import TargetCounts, switches
from .targets.workers import Workers


@dataclass
class Replacement:
    """The replacement of a rank's state in a step: by updates in place, and by copies of values that nodes make."""

    records: Sequence[StateRecord]
    """The part of the state that the program reads or replaces: another program over the same state may replace other tensors."""
    updates: dict[int, list[Updater | RowUpdater]]
    guard: str
    """The output that must be finite for a step to replace the state; empty if there is none."""
    copies: list[tuple[str, str]]
    """The results that replace tensors of the state: each tensor, and the value that is copied into it."""
    always: list[tuple[str, str]]
    """Like `copies`, for the tensors that a step replaces even if it changes nothing else."""
    renewed: Mapping[str, str] = field(default_factory=dict)
    """Maps each shard that is cut out of a parameter in each step to its updated value."""
    in_place: Mapping[int, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """Maps each step to the places of such shards, each with the place of the new values."""


@dataclass
class Messages:
    """The facts about communication that are known before a step."""

    promises: dict[int, Shape]
    """Maps each tag to the shape of a message without a header, or of a collective's input; a message whose tag is missing has a header."""
    lookups: dict[int, Lookup] = field(default_factory=dict)
    """Maps each tag to its Pull or Push, and to the buffers that all of them use one after the other."""
    lookup_memory: Memory = field(default_factory=Memory)
    links: NcclLinks | None = None
    """The messages and collectives between GPUs, which are those with a target; without them these targets run on the CPU."""


@dataclass
class Targets:
    """The execution on the kinds of devices within the rank."""

    of_steps: dict[int, str] = field(default_factory=dict)
    """Maps each step that computes or copies to its target; empty if the rank has one target."""
    counts: TargetCounts = field(default_factory=TargetCounts)
    workers: Workers | None = None
    """The threads of the targets, once the rank has run a step."""


@dataclass
class Arenas:
    """The memory of step plans: one block on each target, shared by all plans for which it is large enough, since one runs at a time."""

    memories: dict[str, DeviceMemory] = field(default_factory=dict)
    """Maps each target except the host to its memory."""
    host: Bytes = field(default_factory=lambda: aligned(0))
    blocks: dict[str, Block] = field(default_factory=dict)
    """Maps each target except the host to its block."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Maps each output of a collective, or sum of gradients, to the value whose memory it reuses."""

    def on_host(self, size: int) -> Bytes:
        """Returns the host's block, of at least `size` bytes; it grows at least twofold: memory that no plan touches costs nothing."""
        if self.host.size < size:
            self.host = aligned(max(size, 2 * self.host.size))
        return self.host

    def on(self, target: str, size: int) -> Block:
        """Returns the block of a target other than the host, of at least `size` bytes."""
        block = self.blocks.get(target)
        if block is None or block.size < size:
            block = self.blocks[target] = self.memories[target].block(size)
        return block


@dataclass
class RankProgram:
    """Steps, sessions and values of one rank."""

    steps: list[Step]
    runners: dict[int, SegmentSession]
    values: ValueTable
    constants: dict[str, Cell]
    outputs: list[str]
    binder: Binder
    state: State
    replacement: Replacement
    messages: Messages
    targets: Targets
    arenas: Arenas
    rows: CacheRows | None = None
    """The rows of each cache that a step binds, if not all."""

    @cached_property
    def transient(self) -> list[str]:
        """The values whose cells are of no use after a step, and hold memory that is not the step plan's."""
        kinds = self.values.storage.items()
        fleeting = (Storage.TENSOR, Storage.OBJECT)
        return [name for name, kind in kinds if kind is Storage.INPUT or (kind in fleeting and name in self.outputs)]

    @cached_property
    def copies_at_once(self) -> dict[int, list[int]]:
        """Maps the last of each run of copies to the run, which is one action."""
        return {run[-1]: run for run in copy_runs(self.steps)}

    @cached_property
    def switches(self) -> int:
        """The changes of target in a step."""
        return switches(self.targets.of_steps, self.steps)

    @property
    def rank(self) -> int:
        """The rank."""
        return self.binder.rank

    def last_uses(self) -> dict[int, list[str]]:
        """Maps each step to the values with memory of their own that nothing reads after it."""
        found: dict[int, list[str]] = {}
        for name, span in self.values.live_ranges.items():
            if self.values.storage[name] in (Storage.TENSOR, Storage.OBJECT) and name not in self.outputs:
                found.setdefault(max(span.ends), []).append(name)
        return found

    def adjacent(self) -> set[int]:
        """Returns the tags of the collectives for which the rank waits as soon as they have begun."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return {
            first.call.tag
            for first, second in pairs
            if isinstance(first, StartCollective) and isinstance(second, WaitCollective) and first.call is second.call
        }

    def in_place(self, excluded: Collection[int] = ()) -> set[int]:
        """Makes collectives work in place if they can, except the `excluded` tags; returns the tags of those that do."""
        values = self.values
        aliases = self.arenas.aliases = in_place_aliases(
            self.steps, values.live_ranges, values.slots, excluded, values.have_one_type, self.replacement.in_place
        )
        calls = [step.call for step in self.steps if isinstance(step, StartCollective)]
        return {call.tag for call in calls if call.in_one_buffer or call.result in aliases}

    def explain(self, index: int, error: Exception) -> str:
        """Returns the text of a step's failure."""
        return (
            self.runners[index].explain(error) if index in self.runners else f"{describe(self.steps, index)}: {error}"
        )


def describe(steps: Sequence[Step], index: int) -> str:
    """Returns the text of a step for reports; negative indices stand for actions outside the steps."""
    if 0 <= index < len(steps):
        return str(steps[index])
    return "the agreement on the sizes of a step" if index == -2 else "nothing (between two steps)"


def describe_action(folder: str | Path, rank: int, action: int) -> str:
    """Returns the text of an action in a rank's slot of the status board; reads the manifest and the rank's file, without MPI."""
    return describe(read_rank_file(open_artifact(folder, trust=True), rank).steps, action)


def lower_rank_program(
    artifact: Artifact, rank: int, settings: Settings, state: State | None = None, linked: LinkedFile | None = None
) -> RankProgram:
    """Returns the program of a rank with its sessions built; raises ArtifactError if the file contradicts itself or the manifest.

    `state`: that of another program of the same model, with which this one shares its tensors. `linked`: the rank's file and links; without
    them all communication goes through the host.
    """
    artifact.refuse_without_weights()
    linked = linked or LinkedFile(read_rank_file(artifact, rank))
    file = linked.file
    _refuse_unsound(file, artifact.folder)
    if file.borders and len(used_targets(file.steps, settings.devices)) > 1:
        fact = f"{file.where}: the {file.borders[0]} is in a program of several targets"
        raise ArtifactError(
            f"{fact}\n  a body in which ranks communicate runs on one target\n  help: leave out the targets"
        )
    check_ports(file)
    binder = Binder(file.manifest, rank, frozenset(file.inputs) - {*file.sized})
    binder.sized = sized_inputs(file, binder.bound)
    promises = promised_shapes(file, binder.bound)
    shapes = known_shapes(file, binder.bound, promises)
    check_results(file, shapes, promises)
    # of several sessions idle threads of one that spin would take the cores from the next
    several = sum(isinstance(step, Segment) for step in file.steps) > 1
    spinning, keeps = settings.spinning and not several, bool(file.state)
    one_arena = artifact.generation is not None and artifact.generation.cut > 1
    settings = replace(settings, spinning=spinning, keeps=keeps, caches=file.caches, one_arena=one_arena)
    used = used_targets(file.steps, settings.devices)
    refuse_missing(settings.devices, used, str(artifact.folder))
    targets = locations(file, settings.devices, state.targets if state is not None else None)
    memories = {target: memory_of(settings.devices.of(target)) for target in sorted(set(targets.values()))}
    runners, types = _sessions(file, artifact.folder, settings)
    weights = _loose_weights(file, artifact.folder)
    types |= {name: type for name, (type, _) in weights.items()}
    check_types(file, types)
    updates: dict[int, list[Updater | RowUpdater]] = {}
    values, plan = lay_out(file, types, shapes, promises, weights, targets, begins=state is None)
    if state is None:
        begun = file.model if file.manifest.is_main else artifact.program_named().model(rank)
        there = {name: memories[target] for name, target in targets.items()}
        groups = file.manifest.generation.groups if file.manifest.generation is not None else 1
        state = make_state(file.state, rank, plan.state, begun, artifact, there, groups)
        updates = {
            index: [_updater(group, settings, types, state) for group in groups]
            for index, groups in plan.groups.items()
        }
    else:
        check_same(state, file.state, file.where)
    in_place = {record.next: state.tensors[record.value] for record in file.updated_in_place}
    rows = CacheRows.of(file, state)
    of_rows = rows.places() if rows is not None else {}
    program = RankProgram(
        steps=file.steps,
        runners=runners,
        values=values,
        constants={**{name: value for name, (_, value) in weights.items()}, **state.tensors, **in_place, **of_rows},
        outputs=file.outputs,
        binder=binder,
        state=state,
        replacement=Replacement(
            file.state,
            updates,
            guard=file.manifest.guard,
            copies=[pair for pair in file.replaced_by_copy if pair not in file.replaced_always],
            always=file.replaced_always,
            renewed=plan.renewed,
            in_place=plan.in_place,
        ),
        messages=Messages(promises, links=linked.links),
        targets=Targets(
            _targets(file.steps, settings.devices) if len(used) > 1 or file.copies else {},
            TargetCounts(device=str(settings.devices.cuda) if CUDA in used else ""),
        ),
        arenas=Arenas(memories),
        rows=rows,
    )
    program.in_place()
    return program


def _updater(
    group: FusedUpdate | RowUpdate, settings: Settings, types: Mapping[str, str], state: State
) -> Updater | RowUpdater:
    if isinstance(group, FusedUpdate):
        return Updater(group, settings, types[group.operands[0][0]])
    ranks = {name: len(one.shape) for name, one in state.tensors.items()}
    return RowUpdater(group, settings, types[group.node.input[0]], ranks)


def _targets(steps: Sequence[Step], devices: Devices) -> dict[int, str]:
    targets: dict[int, str] = {}
    for index, step in enumerate(steps):
        if isinstance(step, Segment | Update):
            targets[index] = devices.target(step.target)
        elif isinstance(step, Copy):
            targets[index] = devices.target(step.to)
    return targets


def _refuse_unsound(file: RankFile, folder: Path) -> None:
    """Runs those checks of `partc check` whose violation would make a step return wrong numbers without failing.

    They prove that the file is this rank's, each weight is stored where its tensor says, and the state is laid out as in its records.
    Compile has proven, together with the run list, that updates in place are safe; for a file without a list it is proven here.
    """
    from ..checker.graph.rank_file import check_ranks
    from ..checker.graph.weights import check_weights

    name = file.manifest.program(file.rank)
    problems = [
        *check_ranks(name, file.model, file.manifest),
        *check_weights(folder, name, file.model, file.manifest),
    ]
    if file.manifest.state:
        from ..checker.training.in_place import unsafe_state
        from ..checker.training.state import check_state_of_rank

        check = check_state_of_rank if file.listed else unsafe_state
        problems += check(file.manifest, file.rank, file.model)
    if problems:
        raise ArtifactError("\n".join(map(str, problems)))


def _sessions(file: RankFile, folder: Path, settings: Settings) -> tuple[dict[int, SegmentSession], dict[str, str]]:
    """Maps each step to its session, and returns the types of all values."""
    builder = Builder(file, folder, types_from_manifest(file), settings)
    runners: dict[int, SegmentSession] = {}
    for index, step in enumerate(file.steps):
        if isinstance(step, Segment):
            runners[index] = builder.build(step)
        elif isinstance(step, Copy):
            builder.copy(step.source, step.result)
    give_back_freed()
    return runners, builder.types


def _loose_weights(file: RankFile, folder: Path) -> dict[str, tuple[str, Value]]:
    """Maps weights that are sent, reduced, delivered, used in updates, or passed to tasks under another name, to their type and value."""
    loose = {*file.sent, *file.outputs, *(call.typed for call in (*file.calls, *file.lookups) if call.typed)}
    loose.update(name for call in file.calls for name in call.inputs)
    loose.update(name for border in file.borders for name in border.call.inputs)
    loose.update(name for step in file.steps if isinstance(step, Segment | Update) for name in step.reads)
    loose.difference_update(record.value for record in file.state)
    weights: dict[str, tuple[str, Value]] = {}
    for tensor in file.model.graph.initializer:
        if tensor.name in loose:
            array = numbers(tensor, folder, file.manifest)
            dtype = BY_CODE.get(tensor.data_type)
            value: Value
            if dtype:
                value = Tensor.of(array, dtype)
            else:
                texts = [text.decode() if isinstance(text, bytes) else str(text) for text in array.reshape(-1).tolist()]
                value = np.array(texts, object).reshape(array.shape)
            weights[tensor.name] = f"tensor({element(tensor.data_type)})", value
    return weights


@dataclass
class CacheRows:
    """The rows of a rank's caches that the next steps use: of one slot in a prefill, of one group of slots in a decode by groups.

        decode     past_k [4, heads, length, size]     all slots of the rank
        decode     past_k [2, heads, length, size]     the rows of one of two groups, in place
        prefill    past_k [1, heads, length, size]     the row of slot 2, in place; the next step binds another slot's; so does encode

    `records`: the record of each cache, and of each output that replaces it. `run`: the index of the rank's run of slots, of `runs` equal
    ones; `count`: the slots of a run; `size`: the slots of a step. `first`: the first slot of the next step, counted within the run.
    """

    state: State
    records: Mapping[str, StateRecord]
    run: int
    runs: int
    count: int
    size: int
    first: int = 0

    @classmethod
    def of(cls, file: RankFile, state: State) -> Self | None:
        """Returns the rows of a rank whose program binds those of some slots, such as a decode by groups; None for another program."""
        caches = [one for one in file.state if one.kind == CACHE]
        generation = file.manifest.generation
        if not binds_rows(file.manifest.name) and (generation is None or generation.groups == 1):
            return None
        records = {name: one for one in caches for name in (one.value, one.next) if name}
        if not caches:
            return cls(state, records, 0, 1, 0, 0)
        begin, _, of = caches[0].shard(file.rank)[0]
        size = caches[0].local_shape(file.rank)[0]
        runs = caches[0].shape[0] // size
        return cls(state, records, runs * begin // of, runs, state.tensors[caches[0].value].shape[0], size)

    def choose(self, slots: Sequence[int]) -> None:
        """Sets the slots of the next steps: the same number of each run, consecutive; UsageError where the rank has other slots."""
        if not self.records:
            return
        mine, begin = slots[self.run * self.size :][: self.size], self.run * self.count
        first = mine[0] - begin if len(slots) == self.runs * self.size else -1
        if not 0 <= first <= self.count - self.size or [*mine] != [*range(mine[0], mine[0] + self.size)]:
            fact, each = f"a step of the slots {[*slots]}", units(self.size, "slot")
            law = f"it computes {each} of each of {self.runs} runs of {self.count}"
            raise UsageError(f"{fact}\n  {law}\n  help: give {each} of {begin} and on for run {self.run}")
        self.first = first

    def places(self) -> dict[str, Placed]:
        """Maps names to the rows of the chosen slots."""
        return {name: self.state.rows(record, self.first, self.size) for name, record in self.records.items()}


def settings_for(
    transport: Transport, threads: int | None, devices: RequestedDevices | None, op_times: Path | None = None
) -> Settings:
    """Returns a rank's settings: by default its own cores, and the CPU. `op_times`: a folder, if the times of ops are to be measured."""
    profile = str(op_times / f"rank{transport.rank}") if op_times is not None else ""
    placed = devices_from(devices, transport.place)
    return Settings(threads or transport.cores, not transport.shares_host, placed, profile=profile)
