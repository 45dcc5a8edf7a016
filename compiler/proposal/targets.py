"""Targets of a model for ranks with a GPU: `"**": cuda`, and `cpu` with a reason for nodes that are better there.

1. What CUDA has no kernel for.
2. Tables of which a step reads little: as many bytes as a look-up moves are a fraction of what the table would take.
3. Where the device has a given size, what does not fit: first the optimizer, then tables, then other parameters, each time the largest,
   until the estimate of every rank fits.

Each proposal is compiled, and the estimate is that of the compiled programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir
from partc.compiler.cost.memory import TargetMemory, rank_memory
from partc.compiler.emit.emit import Unwritten
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import name_of, nodes_of
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Value
from partc.compiler.placement.typical_sizes import TypicalSizes
from partc.compiler.proposal.names import among, patterns
from partc.compiler.proposal.starting_plan import key
from partc.runtime.artifact.format import CPU, CUDA
from partc.runtime.artifact.graph.kernels import FLOATS_ON_CUDA, NOT_ON_CUDA
from partc.runtime.artifact.legal_sizes import typical_sizes
from partc.runtime.units import size_text

LARGE = 16 * 10**6
"""Bytes of a table that is worth a copy of the rows that a step reads."""
SHARE = 16
"""How many times as large as these rows it is."""
LEAST = 1000
"""The part of the device's bytes below which a weight is not worth the copies of what is computed with it."""


@dataclass(frozen=True)
class Device:
    """The GPU of a rank: its bytes, None for no limit."""

    bytes: int | None = None


@dataclass(frozen=True)
class ProposedTargets:
    """The lines of `target:`, whether the optimizer goes to the CPU, and the memory of the ranks that need most of a target."""

    lines: tuple[str, ...] = (f'"**": {CUDA}',)
    optimizer: bool = False
    memory: tuple[TargetMemory, ...] = ()

    def section(self) -> Iterator[str]:
        """The section of a plan."""
        yield "target:   # the last match wins"
        for one in self.memory:
            sizes = [f"{name} {size_text(size)}" for name, size in _parts(one).items() if size]
            most = f"{one.target}: at most {size_text(one.peak)} on a rank"
            yield f"  # {most}{': ' if sizes else ''}{', '.join(sizes)}"
        yield from (f"  {line}" for line in self.lines)


Compile = Callable[[ProposedTargets], Complete]
"""Compiles the plan with these targets."""


@dataclass(frozen=True)
class _Need:
    """The memory that a rank needs on a target, and the bytes of all of its weights by name, on any target."""

    rank: int
    memory: TargetMemory
    weights: Mapping[str, int]


@dataclass
class _Group:
    reason: str
    paths: list[str] = field(default_factory=list)


def propose_targets(compiled: Compile, device: Device, name: str) -> tuple[ProposedTargets, Complete]:
    """The targets, and the program compiled with them. CompileError where a rank's part does not fit on its device."""
    proposed, limit = ProposedTargets(), device.bytes
    program = compiled(proposed)
    sizes = typical_sizes(Unwritten([program], name).manifest)
    groups = [*_without_kernels(program), *_tables(program, sizes)]
    offload = program.plan.train is not None and not program.plan.train.optimizer.target
    moved: set[str] = set()
    while True:
        proposed = replace(proposed, lines=tuple(_lines(program, groups)))
        program = compiled(proposed)
        needs = _needs(program, name, sizes)
        over = [need for need in needs if limit is not None and need.memory.target == CUDA and need.memory.peak > limit]
        if limit is None or not over:
            largest = {need.memory.target: need.memory for need in sorted(needs, key=lambda one: one.memory.peak)}
            return replace(proposed, memory=tuple(largest[one] for one in (CUDA, CPU) if one in largest)), program
        if offload and not proposed.optimizer:
            proposed = replace(proposed, optimizer=True)
            continue
        more = list(_not_fitting(program, over, limit, moved))
        if not more:
            raise CompileError([_too_large(need, limit, name) for need in over])
        groups += more


def _needs(program: Complete, name: str, sizes: Mapping[str, int]) -> list[_Need]:
    """The memory that each distinct rank program needs on each target."""
    artifact, needs = Unwritten([program], name), list[_Need]()
    for part, _ in program.distinct_programs:
        kept = (one for one in part.state if one.kind == "parameter")
        weights = {one.version.value.name or str(one.value): _bytes(one.value) for one in part.weights}
        weights |= {one.tensor: _bytes(one.value) for one in kept}
        targets = rank_memory(artifact, part.rank, sizes).targets
        needs += (_Need(part.rank, memory, weights) for memory in targets)
    return needs


def _bytes(value: Value) -> int:
    """The bytes of a weight."""
    item = 0 if value.of is None or value.of.dtype is None else value.of.dtype.bitwidth
    return math.prod(dim for dim in value.shape or () if isinstance(dim, int)) * item // 8


def _parts(memory: TargetMemory) -> dict[str, int]:
    """The parts of a target's memory, as they are called in a plan and in messages."""
    weights = memory.weights + memory.parameters
    others = memory.caches + memory.messages + memory.loading
    steps = {"values of a step": memory.activations, "sessions": memory.sessions, "other": others}
    return {"weights": weights, "optimizer": memory.optimizer, **steps}


def _lines(program: Complete, groups: Sequence[_Group]) -> Iterator[str]:
    yield f'"**": {CUDA}'
    every = list(program.paths.values())
    written: set[str] = set()
    for group in groups:
        found = [one for one in patterns(group.paths, among(every, group.paths)) if one not in written]
        written.update(found)
        yield from [f"# {group.reason}"] if found else []
        yield from (f"{key(pattern)}: {CPU}" for pattern in found)


def _without_kernels(program: Complete) -> list[_Group]:
    """The nodes that CUDA has no kernel for, by what they do."""
    found: dict[str, _Group] = {}
    for node in program.targets:
        if what := without_kernel(node):
            reason = f"onnxruntime's CUDA provider has no kernel for {what}"
            found.setdefault(what, _Group(reason)).paths.append(program.paths[node])
    return list(found.values())


def _tables(program: Complete, sizes: Mapping[str, int]) -> Iterator[_Group]:
    """Large tables of which a step reads little."""
    at_sizes = TypicalSizes(program, sizes)
    for value in program.model.graph.initializers.values():
        readers = _readers(program, value)
        rows = [node.outputs[0] for node in readers]
        if not _is_table(value, readers) or not all(one in program.values for one in (value, *rows)):
            continue
        size, looked_up = at_sizes.bytes_of(value), sum(map(at_sizes.bytes_of, rows))
        if size >= max(LARGE, SHARE * looked_up) and looked_up:
            at = ", ".join(f"{symbol}={number}" for symbol, number in sizes.items())
            reason = f"{value.name}: a table of {size_text(size)}, of which a step reads {size_text(looked_up)}"
            yield _Group(reason + (f" ({at})" if at else ""), [program.paths[node] for node in readers])


def _is_table(value: ir.Value, readers: Sequence[ir.Node]) -> bool:
    """Whether a weight is read by rows alone."""
    return bool(readers) and all(
        node.op_type == "Gather" and node.inputs[0] is value and node.attributes.get_int("axis", 0) == 0
        for node in readers
    )


def _readers(program: Complete, value: ir.Value) -> list[ir.Node]:
    """The nodes that compute with a weight, as it is or cast, transposed and the like; none where one has no line of its own."""
    found: list[ir.Node] = []
    for node in value.consumers():
        follow = node not in program.targets or node.op_type == "Cast"
        inner = [one for out in node.outputs for one in _readers(program, out)] if follow else []
        found += inner if follow else [node]
    return list(dict.fromkeys(found))


def _not_fitting(program: Complete, over: Sequence[_Need], limit: int, moved: set[str]) -> Iterator[_Group]:
    """The next weights to take from the device: tables, then others, the largest first, until the excess is gone by their bytes."""
    graph = program.model.graph
    readers = {name_of(value): _readers(program, value) for value in graph.initializers.values()}
    tables = {name for name, some in readers.items() if _is_table(graph.initializers[name], some)}
    before = frozenset(moved)
    for need in over:
        excess, bytes = need.memory.peak - limit, need.weights
        there = [name for name in bytes if any(program.targets[one] != CPU for one in readers.get(name, ()))]
        worth = [name for name in there if bytes[name] * LEAST >= limit]
        open_ones = [(name, bytes[name]) for name in worth if name not in before]
        for name, size in sorted(open_ones, key=lambda one: (one[0] not in tables, -one[1], one[0])):
            if excess <= 0:
                break
            if name not in moved:
                moved.add(name)
                what = "a table" if name in tables else "a weight"
                reason = f"{name}: {what} of {size_text(size)} on a rank; with it {size_text(need.memory.peak)} of {size_text(limit)}"
                yield _Group(reason, [program.paths[node] for node in readers[name]])
            excess -= size


def _too_large(need: _Need, limit: int, name: str) -> Problem:
    parts = sorted(_parts(need.memory).items(), key=lambda part: -part[1])
    largest = ", ".join(f"{what} {size_text(size)}" for what, size in parts if size)
    fact = f"rank {need.rank} needs {size_text(need.memory.peak)} of its GPU, but has {size_text(limit)}"
    help = "propose more ranks or stages (--tp, --dp, --stages), bound the sizes of dynamic dims in the plan, or take a larger GPU"
    return Problem(
        name,
        fact,
        f"all weights that are worth it and the optimizer are on the CPU; what is left is {largest}",
        help,
    )


_INTEGERS = tuple(ir.DataType[f"{sign}INT{bits}"] for sign in ("", "U") for bits in (8, 16, 32, 64))


def without_kernel(node: ir.Node) -> str:
    """What a node, or one inside of it, does that CUDA has no kernel for: `Unique`, `MatMul of int32`; empty where there is nothing."""
    return next((found for one in nodes_of([node]) if (found := _missing(one))), "")


def _missing(node: ir.Node) -> str:
    if node.domain not in ("", "ai.onnx"):
        return ""
    if node.op_type in NOT_ON_CUDA:
        return node.op_type
    first = next((value.dtype for value in node.inputs if value is not None), None)
    if first is ir.DataType.STRING:
        return f"{node.op_type} of strings"
    if node.op_type in FLOATS_ON_CUDA and first in _INTEGERS:
        return f"{node.op_type} of {first.name.lower()}"
    return ""
