"""Estimates the memory of a rank on each of its targets at given sizes from its file, without a session or a step.

    weights             read on the target; a weight counts on every target that reads it
    parameters          kept from step to step, with statistics
    optimizer           the optimizer's tensors, and moving averages of parameters, which are on the CPU
    caches              keys and values of tokens, of a decoder
    sessions            the memory of onnxruntime and the runtime for every session and node, by measurement, and the weights that it
                        packs for more than one product, such as frozen ones for the forward and the backward pass
    messages            slots of messages and rooms of collectives, which ranks of one host share
    inputs_outputs      those of two steps, in a training with the batches that are read ahead
    between             the arena of the values that pass between segments, copies and messages: exactly the bytes that a rank allocates
    inside              the values inside of sessions, which reuse memory (`Pool`)
    evaluation          `between`, `inside` and `sessions` of the program that evaluates a training, and the weights packed for it
    loading             the memory in which onnxruntime lays out the weights of convolutions, before the first step

Lifetimes of values are those of `runtime/artifact/liveness.py`. The target `cuda` has the same bytes on any device. The scratch memory of
collectives is that of ranks in one process; MPI may need other scratch.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil, lcm, prod
from mmap import PAGESIZE
from typing import TYPE_CHECKING

from onnx import NodeProto
from partc.compiler.cost.sizes import FileSizes, Operand
from partc.compiler.cost.turn import turn_of
from partc.compiler.errors import CompileError, Problem
from partc.runtime.artifact.byte_count import of_tensor
from partc.runtime.artifact.format import (
    ADAPTER,
    ALL_REDUCE,
    CACHE,
    CPU,
    EVALUATE,
    EVALUATE_STREAMED,
    PULL,
    RETURN,
    ROUTE,
    Manifest,
    Shape,
)
from partc.runtime.artifact.generation import GenerationRecord, binds_rows
from partc.runtime.artifact.graph.onnx_graph import reads
from partc.runtime.artifact.liveness import Span, Use, alive, peak, spans
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.artifact.tensors.dtypes import dense
from partc.runtime.communication.host.messages import SLOT, SLOTS
from partc.runtime.communication.host.rounds import ROOM, ROOMS
from partc.runtime.communication.in_process import LocalWorld
from partc.runtime.devices.devices import Devices
from partc.runtime.errors import UsageError
from partc.runtime.execution.collective_plans import plan_collectives, scratch_lifetimes, wire_tags
from partc.runtime.execution.memory.layout import MOST_PLANS, arenas, at_sizes, lay_out
from partc.runtime.execution.symbol_bindings import bound_symbols
from partc.runtime.program.lifetimes import in_place_aliases
from partc.runtime.program.memory_plan import Lifetime
from partc.runtime.program.rank_file import RankFile, read_rank_file
from partc.runtime.program.steps import LookUp, PostRecv, Segment, Send, StartCollective, Update
from partc.runtime.program.value_table import Storage, known_shapes, locations, promised_shapes, used_targets
from partc.runtime.units import size_text

if TYPE_CHECKING:
    from partc.compiler.plan.generate import GenerateRules

_READ_AHEAD = 2
"""The number of batches that wait for the steps of a training."""
_OF_NODE, _OF_VALUE = 16_500, 1_800
"""The bytes that sessions and the runtime take for each node of a session, and for each value of all microbatches in each plan of a step;
measured with onnxruntime 1.31.
"""
_OF_TRAINING = 1_200_000
"""The bytes that the training loop, the reader of batches and MPI take."""
_SIDE = "\n"
"""Separates the name of a Where from that of its operand; no name contains it."""
_INTO_CONV = ("BatchNormalization", "Clip", "HardSigmoid", "LeakyRelu", "Relu", "Sigmoid", "Tanh")
_NUMBER = 8
"""The bytes of a row's id."""
_PRODUCTS = {"MatMul", "Gemm", "FusedMatMul"}
"""The ops whose second operand onnxruntime packs where it is a constant matrix."""


@dataclass
class TargetMemory:
    """Bytes of a rank on one of its targets; `unknown`: the number of values left out because their size is known only at run time."""

    target: str
    weights: int = 0
    parameters: int = 0
    optimizer: int = 0
    caches: int = 0
    sessions: int = 0
    messages: int = 0
    inputs_outputs: int = 0
    between: int = 0
    inside: int = 0
    evaluation: int = 0
    loading: int = 0
    unknown: int = 0

    @property
    def resident(self) -> int:
        """The bytes that stay from step to step."""
        return self.weights + self.parameters + self.optimizer + self.caches + self.sessions + self.messages

    @property
    def activations(self) -> int:
        """The additional bytes of a step."""
        return self.inputs_outputs + self.between + self.inside + self.evaluation

    @property
    def peak(self) -> int:
        """The memory of a step, or of loading if that is more."""
        return self.resident + max(self.activations, self.loading)


@dataclass(frozen=True)
class RankMemory:
    """The memory of a rank on each target, and the numbers of its segments and of the sessions that run them."""

    rank: int
    segments: int
    sessions: int
    targets: tuple[TargetMemory, ...]

    @property
    def peak(self) -> int:
        """The sum of the targets' peaks, in bytes."""
        return sum(one.peak for one in self.targets)

    @property
    def inside(self) -> int:
        """The bytes inside of sessions, on all targets."""
        return sum(one.inside for one in self.targets)

    @property
    def unknown(self) -> int:
        """The number of values that are left out."""
        return sum(one.unknown for one in self.targets)

    def as_json(self) -> dict[str, object]:
        """All figures in bytes, for JSON."""
        targets = [{**asdict(one), "peak": one.peak} for one in self.targets]
        return {**asdict(self), "targets": targets, "peak": self.peak}


def rank_memory(
    artifact: Artifact, rank: int, sizes: Mapping[str, int], file: RankFile | None = None, alone: bool = False
) -> RankMemory:
    """Returns the memory of a rank, with the symbols at these sizes; raises ValueError if a dim is then not an integer.

    `file`: the rank file of the artifact's program, if it is already read. `alone`: leaves out the artifact's other programs.
    """
    main = _Program(file or read_rank_file(artifact, rank), sizes, artifact.generation)
    names = artifact.programs if artifact.manifest.is_main and not alone else ()
    others = {
        name: _Program(read_rank_file(artifact.program_named(name), rank), sizes, artifact.generation, main.targets)
        for name in names
        if name in (EVALUATE, EVALUATE_STREAMED) or binds_rows(name)
    }
    steps = [main, *(others.pop(name) for name in [*others] if binds_rows(name))]  # in turn, over the same weights
    memories = {target: TargetMemory(target) for target in sorted(main.used)}
    host = memories[CPU]

    weights = {key: bytes for program in steps for key, bytes in program.weights().items()}
    for (target, _), bytes in weights.items():
        memories[target].weights += bytes
    _add_state(memories, main, artifact.manifest, rank)

    pools = {target: Pool() for target in memories}
    for program in steps:
        between = program.between()
        for target, target_memory in memories.items():
            target_memory.between += between.get(target, 0)
            target_memory.inside = max(target_memory.inside, program.inside(target, pools[target]))
    host.unknown = sum(program.unknown for program in steps)
    host.inputs_outputs = main.input_output_bytes()
    host.messages = max(_messages(program.file, sizes) for program in (*steps, *others.values()))
    host.sessions = main.session_bytes() + main.packed_bytes(1)
    for target, target_memory in memories.items():
        target_memory.loading = main.loading(target)

    training = artifact.manifest.training
    tests = training is not None and training.settings.test is not None
    for program in others.values() if tests else ():  # else no step of theirs is run
        between = program.between()
        for target, target_memory in memories.items():
            target_memory.evaluation = max(
                target_memory.evaluation, between.get(target, 0) + program.inside(target, pools[target])
            )
    host.evaluation += sum(one.session_bytes() + one.packed_bytes(0) for one in others.values())  # of both at once
    segments = sum(isinstance(step, Segment) for step in main.file.steps)
    return RankMemory(rank, segments, len(main.distinct), tuple(memories.values()))


def memory_of_ranks(
    artifact: Artifact,
    sizes: Mapping[str, int],
    ranks: Sequence[int] | None = None,
    files: Mapping[str, RankFile] | None = None,
) -> list[RankMemory]:
    """Returns the memory of all ranks, or of `ranks`, computed once for each file; raises UsageError if a dim is not an integer at the
    sizes.

    `files`: maps names to rank files that are already read.
    """
    by_file: dict[str, RankMemory] = {}
    memories = []
    for rank in range(artifact.manifest.ranks) if ranks is None else ranks:
        file = artifact.manifest.program(rank)
        if file not in by_file:
            try:
                by_file[file] = rank_memory(artifact, rank, sizes, (files or {}).get(file))
            except ValueError as error:
                chosen = ", ".join(f"{name}={size}" for name, size in sizes.items())
                raise UsageError(f"{artifact.folder}: at {chosen}: {error}\n  help: --set other sizes") from None
        memories.append(replace(by_file[file], rank=rank))
    return memories


def most_slots(artifact: Artifact, rules: GenerateRules, runs: int) -> int:
    """Returns the most slots of a decoder that fit into the plan's `memory`, a multiple of `runs`, the number of runs of slots over ranks.

    Raises CompileError if the plan's own slots do not fit. Caches and the values of a decode step grow with the slots; memory inside of
    sessions grows once it is more than the other programs need there.
    """
    assert rules.memory is not None
    manifest, most, fitting = artifact.manifest, RankMemory(0, 0, 0, ()), list[int]()
    for ranks in manifest.by_file(range(manifest.ranks)).values():
        whole, decode = (rank_memory(artifact, ranks[0], {}, alone=alone) for alone in (False, True))
        others = (artifact.program_named(name) for name in artifact.programs if binds_rows(name))
        inside, inside_others = decode.inside, max(rank_memory(one, ranks[0], {}).inside for one in others)
        grows = sum(one.caches + one.inputs_outputs + one.between for one in decode.targets)
        left = rules.memory - (whole.peak - whole.inside - grows)
        fitting += [rules.slots * (left - inside_others) // grows, rules.slots * left // (grows + inside)]
        most = max(most, whole, key=lambda one: one.peak)
    step = lcm(runs, rules.groups)
    room = max(0, min(fitting) // step * step)
    if most.peak <= rules.memory:
        return room
    parts = ("weights", "caches", "activations", "messages", "sessions")
    sizes = [f"{part} {size_text(sum(getattr(one, part) for one in most.targets))}" for part in parts]
    fact = f"rank {most.rank} needs {size_text(most.peak, at_least=True)} of memory: {', '.join(sizes)}"
    law = f"'memory' allows {size_text(rules.memory)}"
    help_ = (
        f"write slots: {room}, the most that fit"
        if room
        else "not one slot fits: use more ranks, a smaller 'length', or more memory"
    )
    raise CompileError(Problem(rules.where("memory"), fact, law, help_))


def _add_state(memories: Mapping[str, TargetMemory], main: _Program, manifest: Manifest, rank: int) -> None:
    """Adds the rank's state to the target where it is kept; moving averages of parameters are on the CPU."""
    training = manifest.training
    averaged = training is not None and training.settings.ema is not None
    trained = {record.tensor for record in main.file.state if record.next}
    for record in main.file.state:
        bytes, target_memory = manifest.state_bytes_of(record, rank), memories[main.targets.get(record.value, CPU)]
        if record.kind in ("parameter", "statistics", ADAPTER):
            target_memory.parameters += bytes
        elif record.kind == CACHE:
            target_memory.caches += bytes
        else:
            target_memory.optimizer += bytes
        if averaged and record.kind == "parameter" and record.tensor in trained:
            memories[CPU].optimizer += bytes


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a rank at one action of a step: of values between segments, and inside of the session that runs."""

    what: str
    task: str
    between: int
    inside: int


def memory_over_step(
    artifact: Artifact, rank: int, sizes: Mapping[str, int]
) -> tuple[list[StepMemory], list[Lifetime]]:
    """Returns the memory that a rank uses besides its state at each action, on all targets together, and the values between segments.

    Values without a known size are left out. The arena of `rank_memory` is at least as large as the largest `between`; the difference is
    unused gaps between values. Memory inside of sessions stays with onnxruntime, so it counts there at its maximum.
    """
    program = _Program(read_rank_file(artifact, rank), sizes, artifact.generation)
    lives, actions = program.lifetimes(), []
    places = [Span(one.name, one.born, max([one.died, *one.sends]), (), one.bytes) for one in lives]
    totals = dict(alive(places, 0))
    between = totals.get(-1, 0)  # inputs are there before the first step
    inside = {id(segment.formal): peak(program.places(segment))[0] for segment in program.distinct}
    for at, step in enumerate(program.file.steps):
        between = totals.get(at, between)
        task, needed = (step.task, inside[id(step.formal)]) if isinstance(step, Segment) else ("", 0)
        actions.append(StepMemory(str(step), task, between, needed))
    return actions, lives


class Pool:
    """Memory that values reuse: each takes the smallest free place that is large enough, or new memory.

    If a place is at least twice as large as the value, the rest stays free; adjacent free places are merged.

        values of 2, 4, 8 bytes, one after another        grow the pool by 14: none has room in the memory of those before it
    """

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []
        """The begins and ends of free places."""
        self.end = 0

    def hold(self, places: Sequence[Span[str, int]]) -> int:
        """Returns the bytes by which the pool grows for these places; all are free in the end."""
        grown, held = 0, list[tuple[int, int, int]]()
        for place in sorted((one for one in places if one.bytes), key=lambda one: one.first):
            while held and held[0][0] < place.first:
                self._give_back(*held.pop(0)[1:])
            size = place.bytes or 0
            fitting = [(end - begin, begin) for begin, end in self.free if end - begin >= size]
            if fitting:
                room, begin = min(fitting)
                self.free.remove((begin, begin + room))
                if room >= 2 * size:
                    self.free.append((begin + size, begin + room))
                    room = size
            else:
                room, begin = size, self.end + 1  # what is asked for later is no neighbour
                self.end, grown = begin + size, grown + size
            insort(held, (place.last, begin, begin + room))
        for _, begin, end in held:
            self._give_back(begin, end)
        return grown

    def _give_back(self, begin: int, end: int) -> None:
        """Frees a place, and merges it with adjacent free places."""
        beside = [one for one in self.free if begin in one or end in one]
        self.free = [one for one in self.free if one not in beside]
        self.free.append((min([begin, *(one[0] for one in beside)]), max([end, *(one[1] for one in beside)])))


def session_places(segment: Segment, of: Callable[[str], Operand]) -> list[Span[str, int]]:
    """Returns the places that the nodes of a session need in addition to its inputs and outputs; `of` returns a value's operand by name.

    A constant that only one Transpose reads is transposed once, when the session is made. A convolution, its batch normalization and its
    activation are one kernel. A Where first selects from each side, broadcast to the condition, and then joins both. A turn of a Scan has
    the places of its body.
    """
    elsewhere = {*segment.inputs, *segment.outputs, *segment.initializers}
    return _places(segment.nodes, elsewhere, segment.initializers, of)


def _places(
    nodes: Sequence[NodeProto], elsewhere: set[str], initializers: Collection[str], of: Callable[[str], Operand]
) -> list[Span[str, int]]:
    readers, uses = Counter(name for node in nodes for name in reads(node)), []
    convolved, turns = dict[str, str](), dict[str, int]()
    for node in nodes:
        op, first = "" if node.domain else node.op_type, node.input[0] if node.input else ""
        if op == "Transpose" and first in initializers and readers[first] == 1:
            elsewhere.add(node.output[0])
        outputs = [name for name in node.output if name]
        if op == "Where":
            outputs = [*(f"{outputs[0]}{_SIDE}{side}" for side in node.input[1:]), *outputs]
        if op == "Scan":
            turn = turn_of(node, of)
            outside = {port.name for port in (*turn.body.input, *turn.body.output)}
            turns[f"{outputs[0]}{_SIDE}"] = peak(_places(turn.body.node, outside, (), turn.operand))[0]
            outputs = [*outputs, f"{outputs[0]}{_SIDE}"]
        if op == "Conv":
            convolved[outputs[0]] = ""
        elif op in _INTO_CONV and first in convolved and readers[first] == 1:
            convolved[outputs[0]], op, inner = first, "Relu", outputs[0]
            while outputs[0] in elsewhere and (inner := convolved[inner]):
                elsewhere.add(inner)
        uses.append(Use(list(reads(node)), outputs, op))
    return spans(
        uses, lambda name: turns[name] if name in turns else _known_bytes(of(name.partition(_SIDE)[0])), elsewhere
    )


def session_bytes(nodes: float, values: float) -> float:
    """Returns the bytes that sessions and the runtime take for `nodes` nodes, and for `values` values of all microbatches in each plan."""
    return _OF_NODE * nodes + _OF_VALUE * values


def laid_out(nodes: Iterable[NodeProto], weights: Mapping[str, int]) -> int:
    """Returns the bytes in addition to weights that onnxruntime needs to make a session; `weights`: maps constants to their bytes.

    Constant weights of convolutions are laid out in blocks one after another: a weight has four copies meanwhile, and in the end all have
    two. Weights into which a batch normalization is multiplied have one more copy.
    """
    nodes = list(nodes)
    normalized = {node.input[0] for node in nodes if node.op_type == "BatchNormalization"}
    of = [(node.output[0], weights.get(node.input[1], 0)) for node in nodes if node.op_type == "Conv"]
    total, largest = sum(bytes for _, bytes in of), max((bytes for _, bytes in of), default=0)
    return max(4 * largest, 2 * total) - total + sum(bytes for made, bytes in of if made in normalized)


class _Program:
    """One of the programs of a rank, with its values laid out. `state`: targets of the rank's state, if another program has laid it out."""

    def __init__(
        self,
        file: RankFile,
        sizes: Mapping[str, int],
        generation: GenerationRecord | None = None,
        state: Mapping[str, str] | None = None,
    ) -> None:
        self.file, self.generation = file, generation
        self.symbols, self.devices, self.of = file.manifest.symbols, Devices(), FileSizes(file, sizes)
        self.targets = locations(file, self.devices, state)
        self.used = {CPU, *used_targets(file.steps, self.devices), *self.targets.values()}
        bound, begins = bound_symbols(file.manifest), file.manifest.is_main
        promises = promised_shapes(file, bound)
        shapes = known_shapes(file, bound, promises)
        types = self.of.types
        self.values, self.updates = lay_out(file, types, shapes, promises, file.tensors, self.targets, begins)
        self.promises = {tag: at_sizes(shape, self.symbols, sizes) for tag, shape in promises.items()}
        self._bound_lookups()
        if generation is not None:
            self.of.close(generation.first_entries(generation.length) if begins else generation.room_for_entries)

    def weights(self) -> dict[tuple[str, str], int]:
        """Maps each target and weight that is read there to bytes; weights that are only sent or passed on are on the CPU."""
        readers: dict[str, set[str]] = {}
        for step in self.file.steps:
            if isinstance(step, Segment | Update):
                for name in (*step.reads, *(step.initializers if isinstance(step, Segment) else ())):
                    readers.setdefault(name, set()).add(self.devices.target(step.target))
        kept = {record.value for record in self.file.state}
        return {
            (target, name): of_tensor(tensor)
            for name, tensor in self.file.tensors.items()
            for target in readers.get(name, {CPU})
            if name not in kept
        }

    def packed_bytes(self, without: int) -> int:
        """Returns the bytes of constant matrices as onnxruntime packs them, once for each product; so many of each are left out."""
        products: Counter[str] = Counter()
        for segment in self.distinct:
            if self.devices.target(segment.target) != CPU:
                continue
            matrices = {name: name for name in segment.initializers if name in self.file.tensors}
            for node in segment.nodes:
                if node.op_type == "Transpose" and node.input[0] in matrices:
                    matrices[node.output[0]] = matrices[node.input[0]]
                elif node.op_type in _PRODUCTS and node.input[1] in matrices:
                    products[matrices[node.input[1]]] += 1
        sizes = {name: of_tensor(tensor) for name, tensor in self.file.tensors.items() if len(tensor.dims) == 2}
        return sum(sizes.get(name, 0) * max(number - without, 0) for name, number in products.items())

    def lifetimes(self) -> list[Lifetime]:
        """Returns the values that pass between segments, with their bytes, and the scratch memory of collectives."""
        file, values = self.file, self.values
        transport = LocalWorld(file.manifest.ranks).transport(file.rank)
        wire = wire_tags(file.manifest, transport.tags)
        shapes = {name: at_sizes(shape, self.symbols, self.of.sizes) for name, shape in values.shapes.items()}
        kept = {name: tuple(tensor.dims) for name, tensor in file.tensors.items()}
        kept |= {record.value: record.local_shape(file.rank) for record in file.state}
        works = plan_collectives(file.steps, values, kept, self.promises, shapes, transport, wire)
        aliases = in_place_aliases(
            file.steps, values.live_ranges, values.slots, (), values.have_one_type, self.updates.in_place
        )
        return [*values.lifetimes(aliases, shapes), *scratch_lifetimes(file.steps, works)]

    def between(self) -> dict[str, int]:
        """Maps each target to the bytes of its arena."""
        laid_out = arenas(self.lifetimes(), self.values.targets, self.used - {CPU})
        return {target: one.bytes for target, one in laid_out.items()}

    @cached_property
    def distinct(self) -> list[Segment]:
        """The segments, counted once for all calls of a body."""
        return list({id(s.formal): s for s in self.file.steps if isinstance(s, Segment)}.values())

    @property
    def trains(self) -> bool:
        """Whether a step changes parameters; a decoder's step changes only its caches."""
        return any(record.next and record.kind != CACHE for record in self.file.state)

    def session_bytes(self) -> int:
        """Returns the bytes that sessions and the runtime take for the file while they do not run."""
        nodes = sum(len(segment.nodes) for segment in self.distinct)
        plans = 1
        if self.generation is not None and not self.generation.padded and self.symbols:
            plans = min(self.generation.chunk, MOST_PLANS)
        return int(session_bytes(nodes, len(self.of.types) * plans)) + (_OF_TRAINING if self.trains else 0)

    def input_output_bytes(self) -> int:
        """Returns the bytes of two steps' inputs, of the batches that wait, and of two steps' outputs."""
        inputs, outputs = (
            sum(self._bytes(name) or 0 for name in names) for names in (self.file.inputs, self.file.outputs)
        )
        return inputs * (2 + (_READ_AHEAD if self.trains else 0)) + 2 * outputs

    def loading(self, target: str) -> int:
        """Returns the bytes, in addition to weights, of the session that takes the most to make."""
        own = [one for one in self.distinct if self.devices.target(one.target) == target]
        sizes = {name: of_tensor(tensor) for name, tensor in self.file.tensors.items()}
        return max((laid_out(one.nodes, {name: sizes[name] for name in one.initializers}) for one in own), default=0)

    @cached_property
    def sessions(self) -> dict[str, list[list[Span[str, int]]]]:
        """Maps each target to the places in each of its sessions; values outside of arenas count as one more session."""
        by_target: dict[str, list[list[Span[str, int]]]] = {}
        for segment in self.distinct:
            by_target.setdefault(self.devices.target(segment.target), []).append(self.places(segment))
        loose = [
            Span(name, span.born, max(span.ends), (), self._bytes(name))
            for name, span in self.values.live_ranges.items()
            if self.values.storage[name] in (Storage.TENSOR, Storage.OBJECT)
        ]
        by_target.setdefault(CPU, []).append(loose)
        return by_target

    @property
    def unknown(self) -> int:
        """The number of places in sessions and outside of arenas whose size is known only at run time."""
        return sum(place.bytes is None for own in self.sessions.values() for places in own for place in places)

    def inside(self, target: str, pool: Pool) -> int:
        """Returns the bytes inside of a target's sessions: the growth of the common `pool`, or of a decoder a pool for each session.

        Where ranks share the entries of caches, sessions have a common arena, which doubles.
        """
        sessions = self.sessions.get(target, ())
        if self.generation is not None and self.generation.cut > 1:
            return 2 * sum(pool.hold(places) for places in sessions)
        return sum((Pool() if self.file.caches else pool).hold(places) for places in sessions)

    def places(self, segment: Segment) -> list[Span[str, int]]:
        """Returns the places inside of a segment's session."""
        return session_places(segment.formal, self.of.reader(segment))

    def _bytes(self, name: str) -> int | None:
        """Returns the bytes of a value; None if they are known only at run time."""
        return _known_bytes(self.of.operand(name))

    def _bound_lookups(self) -> None:
        """Bounds the results of lookups, whose sizes only a run knows: a rank asks for a row once, and a Route brings at most all rows, or
        those of a capacity.
        """
        for step in self.file.steps:
            if not isinstance(step, LookUp) or (ids := self.promises.get(step.call.tag)) is None:
                continue
            call, asked = step.call, len(step.call.givers) * min(prod(ids), step.call.rows_of_owner)
            if call.op == ROUTE:
                most = len(step.ranks) * min(prod(ids), call.most(prod(ids)) * call.rows_of_owner)
                self.of.assume(call.result, (most, *call.row), self.values.dtype(call.result or "").bits / 8)
                self.of.assume(call.numbers, (most,), _NUMBER)
                for name, sizes in zip(call.requests if call.asks else (), (ids, (2 * len(step.ranks),)), strict=False):
                    self.of.assume(name, sizes, _NUMBER)
            if call.op in (ROUTE, RETURN):
                continue
            if call.op == PULL:
                for name, sizes in zip(call.requests, ((asked,), (len(step.ranks),), ids), strict=False):
                    self.of.assume(name, sizes, _NUMBER)
                continue
            self.of.assume(call.numbers, (asked,), _NUMBER)
            item = self.values.dtype(call.result).bits / 8 if call.result else 0
            self.of.assume(call.result, (asked, *call.row), item)


def _known_bytes(operand: Operand) -> int | None:
    return None if operand.sizes is None else ceil(operand.bytes)


def _messages(file: RankFile, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of the slots and rooms that a rank touches, which it shares with the others of its host, as if all ranks were on
    one.

    Slots and rooms are reused, so each has held the largest message, or block of a collective, that goes through it; a message whose size
    is known only at run time fills them.

        messages       for each peer and direction SLOTS times the largest message, at most SLOT bytes each
        collectives    for each list of ranks ROOMS times the largest block in the room of each, at most ROOM bytes each; an AllReduce
                       of three or more ranks also in the common room
    """
    slots, rooms = dict[tuple[int, bool], int](), dict[tuple[int, ...], int]()
    common = set[tuple[int, ...]]()

    def bytes_of(type: str, shape: Shape, most: int) -> int:
        dtype = dense(type)
        if dtype is None or shape is None:
            return most
        return -(-min(most, dtype.bytes_of(at_sizes(shape, file.manifest.symbols, sizes))) // PAGESIZE) * PAGESIZE

    def exchanged(ranks: Sequence[int]) -> Iterator[tuple[int, bool]]:
        return ((peer, sent) for peer in ranks if peer != file.rank for sent in (True, False))

    for step in file.steps:
        bytes, keys = SLOT, list[tuple[int, bool]]()
        if isinstance(step, Send | PostRecv):
            record = file.transfers[step.tag]
            bytes, keys = bytes_of(record.type, record.shape, SLOT), [(step.peer, isinstance(step, Send))]
        elif isinstance(step, LookUp):
            keys = [*exchanged(step.ranks)]
        elif isinstance(step, StartCollective):
            call = file.collectives[step.call.tag]
            if step.call.kind.boxes:  # each is a message of a part of the input
                bytes, keys = bytes_of(call.type, call.shape, SLOT), [*exchanged(step.ranks)]
            elif len(step.ranks) > 1:
                rooms[step.ranks] = max(rooms.get(step.ranks, 0), bytes_of(call.type, call.shape, ROOM))
                common |= {step.ranks} if step.call.op == ALL_REDUCE and len(step.ranks) > 2 else set()
        slots.update((key, max(slots.get(key, 0), bytes)) for key in keys)
    of_rooms = sum((len(ranks) + (ranks in common)) * bytes for ranks, bytes in rooms.items())
    return ROOMS * of_rooms + SLOTS * sum(slots.values())
