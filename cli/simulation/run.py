"""`partc simulate` with a machine or a trace: a step of an artifact, or of what a plan compiles to."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from partc.cli.output import console
from partc.cli.simulation.shown import document, show
from partc.compiler.cost.machine import Curve, Link, Machine, Processor
from partc.compiler.cost.machine_file import read_machine
from partc.compiler.cost.step import Simulation, simulated
from partc.compiler.cost.traced import Traced, read_traced
from partc.runtime.artifact.format import CPU
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.errors import UsageError

PLANS = (".yaml", ".yml")
_NO_TIME = Curve(((1.0, 1e-12),))


@dataclass(frozen=True)
class Request:
    """What the options say: the machine's file, a trace, sizes of symbols, hosts, the program, and how many rows of the critical path."""

    machine: Path | None
    trace: Path | None
    sizes: Mapping[str, int]
    hosts: int = 1
    program: str = ""
    top: int = 15


def simulate_step(target: Path, model: Path | None, request: Request, as_json: bool) -> int:
    """Plays a step of the artifact in a folder, or of a plan with its model, and prints it."""
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
            found = _of(folder, machine, request, traced)
    else:
        if model is not None:
            help = "leave out --model, or give the plan in place of the folder"
            raise UsageError(f"{target}: an artifact has its model\n  help: {help}")
        found = _of(target, machine, request, traced)
    if as_json:
        console.echo(json.dumps(document(str(target), found, traced), indent=1))
    else:
        show(str(target), found, traced, request.top)
    return 0


def _of(folder: Path, machine: Machine, asked: Request, traced: Traced | None) -> Simulation:
    artifact = open_artifact(folder, trust=True, program=asked.program)
    return simulated(artifact, machine, asked.sizes, asked.hosts, traced)


def instant() -> Machine:
    """A machine that takes no time, where a trace has all times."""
    processor = Processor(0.0, 0.0, {"matmul": _NO_TIME}, {"elementwise": _NO_TIME})
    return Machine("", 0, {CPU: processor}, [Link("default", 2, 1, 1.0, 0.0, _NO_TIME, _NO_TIME)])
