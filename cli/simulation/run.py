"""`partc simulate` with a machine or a trace: simulates a step of an artifact, or of a plan that it compiles first."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx import NodeProto
from partc.cli.output import console
from partc.cli.output.table import Table
from partc.compiler.cost.actions import shown
from partc.compiler.cost.machine import Curve, Link, Machine, Processor
from partc.compiler.cost.machine_file import read_machine
from partc.compiler.cost.node import Known, products
from partc.compiler.cost.sizes import FileSizes
from partc.compiler.cost.step import Simulation, simulated
from partc.compiler.cost.traced import Traced, read_traced
from partc.runtime.artifact.byte_count import ZERO, ByteCount, of_value
from partc.runtime.artifact.dim_expression import parse
from partc.runtime.artifact.format import CPU
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.tasks.task import parse as parse_task
from partc.runtime.errors import UsageError
from partc.runtime.program.steps import Segment, Send, StartCollective
from partc.runtime.units import count, operations_text, seconds, size_text

PLANS = (".yaml", ".yml")
_NO_TIME = Curve(((1.0, 1e-12),))


@dataclass(frozen=True)
class Request:
    """The options: the machine's file, a trace, sizes of symbols, hosts, the program, and the number of rows of the critical path."""

    machine: Path | None
    trace: Path | None
    sizes: Mapping[str, int]
    hosts: int = 1
    program: str = ""
    top: int = 15


def simulate_step(target: Path, model: Path | None, request: Request, as_json: bool) -> int:
    """Simulates a step of the artifact in a folder, or of a plan with its model, and prints it; returns the exit code."""
    machine = read_machine(request.machine) if request.machine is not None else instant()
    traced = read_traced(request.trace) if request.trace is not None else None
    if target.suffix in PLANS:
        if model is None:
            help = f"name it: partc simulate {target} --model model.py --machine machine.yaml"
            raise UsageError(f"{target}: a plan is simulated with its model\n  help: {help}")
        from partc.compiler.pipeline import compile_model

        with tempfile.TemporaryDirectory(prefix="partc-simulate-") as name:
            folder = Path(name) / "build"
            compile_model(model, target, folder)
            simulation = _of(folder, machine, request, traced)
    else:
        if model is not None:
            help = "leave out --model, or give the plan in place of the folder"
            raise UsageError(f"{target}: an artifact has its model\n  help: {help}")
        simulation = _of(target, machine, request, traced)
    if as_json:
        console.echo(json.dumps(document(str(target), simulation, traced), indent=1))
    else:
        show(str(target), simulation, traced, request.top)
    return 0


def _of(folder: Path, machine: Machine, asked: Request, traced: Traced | None) -> Simulation:
    artifact = open_artifact(folder, trust=True, program=asked.program)
    return simulated(artifact, machine, asked.sizes, asked.hosts, traced)


def instant() -> Machine:
    """Returns a machine whose work takes no time, for a trace that has all times."""
    processor = Processor(0.0, 0.0, {"matmul": _NO_TIME}, {"elementwise": _NO_TIME})
    return Machine("", 0, {CPU: processor}, [Link("default", 2, 1, 1.0, 0.0, _NO_TIME, _NO_TIME)])


_ROWS = 32
"""The most classes of ranks that are printed."""


def show(where: str, simulation: Simulation, traced: Traced | None, top: int) -> None:
    """Prints the step, a row for each class of ranks, and the critical path by source names."""
    played = simulation.played
    ranks = sum(len(one.ranks) for one in played.classes)
    at = f" at {', '.join(f'{name}={size}' for name, size in simulation.sizes.items())}" if simulation.sizes else ""
    console.echo(f"{where}: {count(ranks, 'rank')}, a step takes {seconds(played.seconds)}{at}")
    if traced is not None:
        ratio = played.seconds / traced.step if traced.step else float("nan")
        console.echo(
            f"{traced.where}: {count(traced.steps, 'step')}, median {seconds(traced.step)}, simulated/measured {ratio:.3f}"
        )
    console.echo()
    table = Table(["ranks", ">compute", ">idle", ">under way", ">operations", ">bytes given", ">peak memory"])
    rows = zip(played.classes, played.busy, played.communication, simulation.operations, simulation.bytes, strict=True)
    for one, busy, under_way, computed, bytes in itertools.islice(rows, _ROWS):
        memory = simulation.memory[one.ranks[0]]
        peak = size_text(memory.peak) + ("+?" if memory.unknown else "")
        idle = seconds(max(0.0, played.seconds - busy))
        cells = (seconds(busy), idle, seconds(under_way), operations_text(computed), size_text(bytes), peak)
        table.add(ranks_text(one.ranks), *cells)
    table.show()
    if len(played.classes) > _ROWS:
        console.echo(f"and {len(played.classes) - _ROWS:,} more classes of ranks, which --json lists")
    console.echo()
    way, listed = simulation.critical, Table(["on the critical path", ">time", ">share"])
    for name, time in way[:top]:
        listed.add(name or "(no name)", seconds(time), f"{time / played.seconds:.1%}")
    if len(way) > top:
        rest = sum(time for _, time in way[top:])
        listed.add(f"{len(way) - top} more", seconds(rest), f"{rest / played.seconds:.1%}")
    listed.show()
    if simulation.unknown:
        console.echo(f"\nwithout {count(simulation.unknown, 'value')} whose size is known only at run time")


def document(where: str, simulation: Simulation, traced: Traced | None) -> dict[str, object]:
    """Returns all results of the simulation, for other programs: seconds, bytes, operations."""
    played = simulation.played
    rows: Sequence[dict[str, object]] = [
        {
            "ranks": ranks_text(one.ranks),
            "compute": played.busy[k],
            "idle": max(0.0, played.seconds - played.busy[k]),
            "under_way": played.communication[k],
            "operations": simulation.operations[k],
            "bytes": simulation.bytes[k],
            "peak_memory": simulation.memory[one.ranks[0]].peak,
        }
        for k, one in enumerate(played.classes)
    ]
    path = [
        {"rank": played.classes[k].ranks[0], "what": action.what, "path": action.path, "seconds": time}
        for k, action, time in played.critical
    ]
    measured = {"trace": traced.where, "steps": traced.steps, "seconds": traced.step} if traced is not None else None
    return {
        "where": where,
        "sizes": dict(simulation.sizes),
        "seconds": played.seconds,
        "ranks": rows,
        "critical": [{"name": name, "seconds": time} for name, time in simulation.critical],
        "path": path,
        "unknown": simulation.unknown,
        "files": {
            name: {"operations": str(operations(file)), "bytes": str(payload(file))}
            for name, file in simulation.files.items()
        },
        **({"measured": measured} if measured else {}),
    }


_EACH = "tensor(uint8)"
"""A type with one byte for each element: its byte count is its number of elements."""


def operations(sizes: FileSizes) -> ByteCount:
    """Returns a rank's operations, two for each multiply-add; nodes whose dims are known only at run time are left out."""
    total, known = ZERO, dict[int, ByteCount]()
    for step in sizes.file.steps:
        if isinstance(step, Segment):
            key = id(step.formal)
            if key not in known:
                known[key] = sum((_node(node, step, sizes) for node in step.formal.nodes), start=ZERO)
            total += known[key]
    return total


def _node(node: NodeProto, segment: Segment, sizes: FileSizes) -> ByteCount:
    names = sizes.names(segment)
    suffix = f".{parse_task(segment.task).microbatch}" if segment.task else ""

    def dims(name: str) -> Known:
        return sizes.shapes.get(names.get(name, name + suffix)) if name else None

    given, made = ([dims(name) for name in some] for some in (node.input, node.output))
    total = ZERO
    for term in products(shown(node), given, made, lambda dim: _size(dim, sizes.sizes)):
        total += of_value(_EACH, [2, *term]) or ZERO
    return total


def _size(dim: int | str, sizes: Mapping[str, int]) -> int:
    try:
        return parse(dim, sizes)(sizes)
    except ValueError:
        return 0


def payload(sizes: FileSizes) -> ByteCount:
    """Returns the bytes that a rank passes to messages and collectives.

    Exchanges of boxes and lookups are left out: their bytes are known only at run time.
    """
    total = ZERO
    for step in sizes.file.steps:
        if isinstance(step, Send):
            record = sizes.file.transfers[step.tag]
            total += of_value(record.type, record.shape) or ZERO
        elif isinstance(step, StartCollective) and not step.call.kind.boxes and len(step.ranks) > 1:
            one = sizes.file.collectives[step.call.tag]
            gives = step.call.kind.root != "gives" or step.ranks[step.call.root] == sizes.file.rank
            total += (of_value(one.type, one.shape) or ZERO) if gives else ZERO
    return total
