"""What a rank needs of memory on each of its targets at given sizes (`parts.py`), without a session or a step.

The target `cuda` has the same bytes wherever it runs; nodes on `device` count to the CPU. What collectives need beside their values is that
of ranks in one process; MPI may need other scratch, and buffers of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle
from math import prod
from typing import TYPE_CHECKING

from ...artifact.byte_count import of_tensor
from ...artifact.format import CACHE, CPU, EVALUATE, EVALUATE_STREAMED, OPTIMIZER, PULL, Manifest
from ...artifact.generation import binds_rows
from ...artifact.graph.row_function import MERGE
from ...artifact.liveness import Span, alive, peak
from ...artifact.manifest import Artifact
from ...artifact.tasks.task import parse
from ...artifact.tensors.dtypes import BY_NAME, dense
from ...communication.in_process import LocalWorld
from ...devices.devices import Devices
from ...program.lifetimes import in_place_aliases
from ...program.locations import locations, used_targets
from ...program.memory_plan import Lifetime
from ...program.rank_file import RankFile, read_rank_file
from ...program.session_memory import OwnArena, Place, SharedArena, inside
from ...program.steps import LookUp, Segment, Update
from ...program.value_table import Storage, declared_shapes, known_shapes, promised_shapes, types_from_manifest
from ..collective_plans import plan_collectives, scratch_lifetimes
from ..symbol_bindings import bound_symbols
from ..wire_tags import wire_tags
from .laid_out_weights import laid_out
from .layout import MOST_PLANS, arenas, at_sizes, lay_out
from .longest import longest
from .parts import RankMemory, TargetMemory
from .shared import shared_bytes

if TYPE_CHECKING:
    from ...artifact.generation import GenerationRecord

_UNSTATED = "tensor(float)"
"""Stands for the type of a value of unknown shape, which no arena holds."""
_READ_AHEAD = 2
"""Batches that wait for the steps of a training."""
_OF_NODE, _OF_VALUE = 16_500, 1_800
"""The bytes that sessions and the runtime hold for each node of a session, and in each plan of a step for each value of all microbatches;
of onnxruntime 1.31."""
_OF_TRAINING = 1_200_000
"""What the loop, the reader of batches and MPI take for themselves."""


def rank_memory(artifact: Artifact, rank: int, sizes: Mapping[str, int], file: RankFile | None = None) -> RankMemory:
    """The memory of a rank, with the symbols at these sizes; ValueError where a dim is not a whole number at them.

    `file`: that of the artifact's program, where it is read already.
    """
    main = _Program(file or read_rank_file(artifact, rank), sizes, artifact.generation)
    names = artifact.programs if artifact.manifest.is_main else ()
    beside = {
        name: _Program(read_rank_file(artifact.beside(name), rank), sizes, artifact.generation, main.targets)
        for name in names
        if name in (EVALUATE, EVALUATE_STREAMED) or binds_rows(name)
    }
    steps = [main, *(beside.pop(name) for name in [*beside] if binds_rows(name))]  # in turn, over the same weights
    found = {target: TargetMemory(target) for target in sorted(main.used)}
    here = found[CPU]

    for target, bytes in main.weights().items():
        found[target].resident.weights = bytes
    _keep(found, main, artifact.manifest, rank)

    arenas = {target: SharedArena() for target in found}
    for program in steps:
        between = program.between()
        for target, one in found.items():
            one.step.between += between.get(target, 0)
            one.step.inside = max(one.step.inside, program.inside(target, arenas[target]))
    here.unknown = sum(program.unknown for program in steps)
    here.step.inputs_outputs = main.input_output_bytes()

    here.resident.messages = max(shared_bytes(program.file, sizes) for program in (*steps, *beside.values()))

    here.resident.sessions = main.session_bytes()
    for target, one in found.items():
        one.loading = main.loading(target)

    training = artifact.manifest.training
    tests = training is not None and training.settings.test is not None
    for program in beside.values() if tests else ():  # else no step of theirs is run
        between = program.between()
        for target, one in found.items():
            needed = between.get(target, 0) + program.inside(target, arenas[target]) - one.step.inside
            one.step.evaluation = max(one.step.evaluation, needed)
    here.step.evaluation += sum(program.session_bytes() for program in beside.values())  # of both at once
    segments = [step for step in main.file.steps if isinstance(step, Segment)]
    return RankMemory(rank, len(segments), len(main.distinct()), tuple(found.values()))


def _keep(found: Mapping[str, TargetMemory], main: _Program, manifest: Manifest, rank: int) -> None:
    """Counts what the rank keeps from step to step where it lies; moving averages of parameters lie on the CPU."""
    training = manifest.training
    averaged = training is not None and training.settings.ema is not None
    trained = {record.tensor for record in main.file.state if record.next}
    for record in main.file.state:
        bytes, one = manifest.state_bytes_of(record, rank), found[main.targets.get(record.value, CPU)]
        if record.kind in ("parameter", "statistics"):
            one.resident.parameters += bytes
        elif record.kind == CACHE:
            one.resident.caches += bytes
        else:
            one.resident.optimizer += bytes
        if averaged and record.kind == "parameter" and record.tensor in trained:
            found[CPU].resident.optimizer += bytes


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a rank at one action of a step: of values between segments, and what the session that runs needs inside."""

    what: str
    task: str
    between: int
    inside: int


def memory_over_step(
    artifact: Artifact, rank: int, sizes: Mapping[str, int]
) -> tuple[list[StepMemory], list[Lifetime]]:
    """By action what a rank holds beside what it keeps, on all targets together; and the values between segments.

    Values without a known size are left out. The arena of `rank_memory` is at least as large as the most of `between`, by what lies unused
    between values; onnxruntime's arena keeps what it has asked for, so what is inside counts there at its most.
    """
    program = _Program(read_rank_file(artifact, rank), sizes, artifact.generation)
    lives = program.lifetimes()
    steps = program.file.steps
    places = [Span(one.name, one.born, max([one.died, *one.sends]), (), one.bytes) for one in lives]
    found, totals = [], dict(alive(places, 0))
    between = totals.get(-1, 0)  # inputs are there before the first step
    inside = program.session_peaks()
    for at, step in enumerate(steps):
        between = totals.get(at, between)
        task = step.task if isinstance(step, Segment) else ""
        needed = inside[id(step.formal)] if isinstance(step, Segment) else 0
        found.append(StepMemory(str(step), task, between, needed))
    return found, lives


class _Program:
    """One of the programs of a rank, laid out. `state`: where another one has laid out what the rank keeps."""

    def __init__(
        self,
        file: RankFile,
        sizes: Mapping[str, int],
        generation: GenerationRecord | None = None,
        state: Mapping[str, str] | None = None,
    ) -> None:
        self.file, self.generation = file, generation
        self.symbols, self.sizes, self.devices = file.manifest.symbols, sizes, Devices()
        self.targets = locations(file, self.devices, state)
        self.used = {CPU, *used_targets(file.steps, self.devices), *self.targets.values()}
        bound = bound_symbols(file.manifest)
        promises = promised_shapes(file, bound)
        shapes = known_shapes(file, bound, promises)
        begins = file.manifest.is_main
        self.types = self._types()
        self.values, self.updates = lay_out(file, self.types, shapes, promises, file.tensors, self.targets, begins)
        self.promises = {tag: at_sizes(shape, self.symbols, sizes) for tag, shape in promises.items()}
        self.shapes = declared_shapes(file)
        self.bounds: dict[str, Place] = {}
        self._bound_rows()
        if generation is not None:
            self.bounds |= longest(file, generation, file.tensors, self._place)

    def _types(self) -> dict[str, str]:
        """By value its type, as the file and the manifest say it without sessions."""
        file = self.file
        found = {**dict.fromkeys((*file.computed, *file.results), _UNSTATED), **types_from_manifest(file)}
        found |= file.declared_types
        for copy in file.copies:
            found[copy.result] = found.get(copy.source, _UNSTATED)
        return found

    def weights(self) -> dict[str, int]:
        """By target the bytes of the weights that are read there; those that are only sent or given are on the CPU."""
        readers: dict[str, set[str]] = {}
        for step in self.file.steps:
            if isinstance(step, Segment | Update):
                read = (*step.inputs, *(step.initializers if isinstance(step, Segment) else ()))
                for name in read:
                    readers.setdefault(name, set()).add(self.devices.target(step.target))
        found: dict[str, int] = {}
        kept = {record.value for record in self.file.state}
        for name, tensor in self.file.tensors.items():
            for target in readers.get(name, {CPU}) if name not in kept else ():
                found[target] = found.get(target, 0) + of_tensor(tensor)
        return found

    def lifetimes(self) -> list[Lifetime]:
        """The values that cross segments, with their bytes, and what collectives need beside them."""
        file, values = self.file, self.values
        transport = LocalWorld(file.manifest.ranks).transport(file.rank)
        wire = wire_tags(file.manifest, transport.tags)
        shapes = {name: at_sizes(shape, self.symbols, self.sizes) for name, shape in values.shapes.items()}
        kept = {record.value: record.local_shape(file.rank) for record in file.state}
        works = plan_collectives(file.steps, values, kept, self.promises, shapes, transport, wire)
        aliases = in_place_aliases(
            file.steps, values.live_ranges, values.slots, (), values.are_alike, self.updates.in_place
        )
        return [*values.lifetimes(aliases, shapes), *scratch_lifetimes(file.steps, works)]

    def between(self) -> dict[str, int]:
        """By target the bytes of its arena."""
        laid_out = arenas(self.lifetimes(), self.values.targets, self.used - {CPU})
        return {target: one.bytes for target, one in laid_out.items()}

    def distinct(self) -> list[Segment]:
        """The segments, one for all calls of a body."""
        return list({id(s.formal): s for s in self.file.steps if isinstance(s, Segment)}.values())

    @property
    def trains(self) -> bool:
        """Whether a step changes parameters; one of a decoder changes its caches alone."""
        return any(record.next and record.kind != CACHE for record in self.file.state)

    def session_bytes(self) -> int:
        """What sessions and the runtime hold of the file while they do not run."""
        nodes = sum(len(segment.nodes) for segment in self.distinct())
        plans = 1
        if self.generation is not None and not self.generation.padded and self.file.manifest.symbols:
            plans = min(self.generation.chunk, MOST_PLANS)
        return _OF_NODE * nodes + _OF_VALUE * len(self.types) * plans + (_OF_TRAINING if self.trains else 0)

    def input_output_bytes(self) -> int:
        """The bytes of the inputs of a step and the next one, and of the outputs of a step and the last one; with batches that wait."""
        inputs, outputs = (
            sum(place[0].bytes_of(place[1]) for name in names if (place := self._place(name)) is not None)
            for names in (self.file.inputs, self.file.outputs)
        )
        return inputs * (2 + (_READ_AHEAD if self.trains else 0)) + 2 * outputs

    def loading(self, target: str) -> int:
        """The bytes beside weights that making the session takes that takes most, of those with convolutions of constant weights."""
        own = [one for one in self.distinct() if self.devices.target(one.target) == target]
        sizes = {name: of_tensor(tensor) for name, tensor in self.file.tensors.items()}
        return max((laid_out(one.nodes, {name: sizes[name] for name in one.initializers}) for one in own), default=0)

    @cached_property
    def sessions(self) -> dict[str, list[list[Span[str, int]]]]:
        """By target what each session there needs inside; and what lies outside of arenas, as one that needs it all."""
        found: dict[str, list[list[Span[str, int]]]] = {}
        for segment in self.distinct():
            found.setdefault(self.devices.target(segment.target), []).append(self._inside(segment))
        loose = list[Span[str, int]]()
        for name, span in self.values.live_ranges.items():
            if self.values.storage[name] in (Storage.TENSOR, Storage.OBJECT):
                place = self._place(name)
                bytes = None if place is None else place[0].bytes_of(place[1])
                loose.append(Span(name, span.born, max(span.ends), (), bytes))
        found.setdefault(CPU, []).append(loose)
        return found

    @property
    def unknown(self) -> int:
        """How many places in sessions and outside of arenas have a size that only a run tells."""
        return sum(place.bytes is None for own in self.sessions.values() for places in own for place in places)

    def inside(self, target: str, common: SharedArena) -> int:
        """What the arenas of a target's sessions have used after two steps: of a decoder one each, else `common`."""
        sessions = self.sessions.get(target, [])
        arenas = [OwnArena() for _ in sessions] if self.file.caches else [common]
        for _ in range(2):
            for arena, places in zip(cycle(arenas), sessions, strict=False):
                arena.run(places)
        return sum(arena.bytes for arena in arenas)

    def session_peaks(self) -> dict[int, int]:
        """By the id of a segment's formal the most bytes that its nodes need at once inside of its session."""
        found: dict[int, int] = {}
        for segment in self.distinct():
            found[id(segment.formal)] = peak(self._inside(segment))[0]
        return found

    def _inside(self, segment: Segment) -> list[Span[str, int]]:
        """What the session of a segment needs inside."""
        names = dict([*segment.operands, *segment.results])
        suffix = f".{parse(segment.task).microbatch}" if segment.task else ""
        return inside(segment.formal, partial(self._place_in, names, suffix))

    def _place_in(self, names: Mapping[str, str], suffix: str, name: str) -> Place | None:
        """As `_place`, by a value's name in a session; a value inside a task has the suffix of the task's microbatch."""
        return self._place(names.get(name, name + suffix))

    def _place(self, name: str) -> Place | None:
        """The type of a value and its shape; None where only a run tells."""
        if name in self.bounds:
            return self.bounds[name]
        dtype, shape = dense(self.types.get(name, "")), self.shapes.get(name)
        if dtype is None or shape is None:
            return None
        try:
            return dtype, at_sizes(shape, self.symbols, self.sizes)
        except ValueError:
            return None

    def _bound_rows(self) -> None:
        """Bounds values whose sizes only a run tells: each giver asks for a row once, and rows that are merged are at most as many."""
        bounds, int64 = self.bounds, BY_NAME["int64"]
        for step in self.file.steps:
            if isinstance(step, LookUp):
                call, ids = step.call, self.promises.get(step.call.tag)
                if ids is None:
                    continue
                asked = len(call.givers) * min(prod(ids), call.rows_of_owner)
                if call.op == PULL:
                    sizes = zip(call.asked, ((asked,), (len(step.ranks),), ids), strict=False)
                    bounds |= {name: (int64, size) for name, size in sizes if name}
                    continue
                dtype = self.values.dtype(call.result) if call.result else BY_NAME["float"]
                bounds |= {call.numbers: (int64, (asked,))} if call.numbers else {}
                bounds |= {call.result: (dtype, (asked, *call.row))} if call.result else {}
            elif isinstance(step, Segment):
                for node in step.nodes:
                    if node.domain == OPTIMIZER and node.op_type == MERGE:
                        for source, made in zip(node.input, node.output, strict=True):
                            place = self._place(source)
                            bounds |= {made: place} if place else {}
