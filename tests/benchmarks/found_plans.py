"""The plan that `partc plan --ranks` finds, against the plans that are usually chosen, all measured in turns in one run.

    python tests/benchmarks/found_plans.py [CASE...] [--ranks 2] [--try 6] [--turns 12] [--machine machine.yaml]

For each model the machine is measured with so many ranks, unless a file of it is given; the plan is searched as by `partc plan --try 6`
(`--try 0`: by the simulation alone), and it and each baseline of the search are compiled and run over MPI as by `partc run`. Each turn
runs some steps of every plan; printed are the median step, the median over turns of its ratio to the found plan's step in the same turn,
the CPU time of all its ranks together, and the simulated step.
Wanted: no baseline is faster than the found plan by more than 3 %. Mixtral is exported by torch, and left out where that is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from mpi4py import MPI
from partc.cli.job.inputs import open_inputs
from partc.cli.machine.trials import run_fastest
from partc.compiler.cost.machine import Machine
from partc.compiler.cost.machine_file import read_machine
from partc.compiler.errors import CompileError
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.search.base_plan import Base, base_of
from partc.compiler.search.candidate import Candidate, Fixed
from partc.compiler.search.search import Request, Search
from partc.compiler.search.search_state import SearchState, play_program, played
from partc.runtime import load, load_trainer, open_artifact
from partc.runtime.execution.inputs import shard
from train_cases import CASES
from transformer import ROOT, mpi_command
from transformer_partc import told_all
from turns import Side, serve

TRAIN = """ranks: 1
train:
  loss: {loss}
  optimizer: {{type: momentum, lr: 1.0e-9, momentum: 0.9}}
  batch: {batch}
"""
"""The inputs are random, so nothing is to be learned from them."""
WORST = 0.97
"""The least ratio of a baseline's step to that of the found plan."""
_LEAST, _SECONDS = 3, 0.5
"""Steps of a turn: so many at least, and as many as take so long."""


@dataclass(frozen=True)
class Case:
    """A model and the sizes of its symbols; of a training its loss in a plan's words."""

    source: Callable[[Path], Source]
    sizes: dict[str, int]
    loss: str = ""


def trained(name: str) -> Callable[[Path], Source]:
    """A model of the tests with its loss."""

    def source(folder: Path) -> Source:
        from training_equivalence import source_of

        return source_of(CASES[name].model())

    return source


def mixtral(folder: Path) -> Source:
    """Mixtral with four experts, as torch exports it."""
    from exported_models import export
    from partc.compiler.frontend import load as load_model

    return load_model(export("mixtral", 21, True, folder)[0])


MODELS = {
    "gpt": Case(trained("gpt256"), {"batch": 8, "seq": 64}, CASES["gpt256"].loss),
    "resnet": Case(trained("resnet"), {"batch": 8}, CASES["resnet"].loss),
    "dlrm": Case(trained("dlrm"), {"batch": 256}, CASES["dlrm"].loss),
    "mixtral": Case(mixtral, {"batch": 16, "seq": 32}),
}


@dataclass
class Measured:
    """A plan that runs: its name, the seconds of its simulated step, and of its turns the median step and the CPU time of a step."""

    name: str
    simulated: float
    ranks: int
    folder: Path
    side: Side | None = None
    steps: list[float] = field(default_factory=list)

    def start(self, sizes: dict[str, int]) -> None:
        script = [str(Path(__file__)), "--rank", str(self.folder), "--sizes", json.dumps(sizes)]
        self.side = Side(self.name, [mpi_command(self.ranks, *script)], [ROOT])

    def turn(self, count: int) -> None:
        assert self.side is not None
        self.steps.append(statistics.median(self.side.turn(count)))


def search_of(case: Case, folder: Path, machine: Machine, ranks: int, tries: int) -> SearchState:
    """The search for a plan, with all that it has simulated, and so many of the fastest run."""
    source, base, sizes = case.source(folder), Base(), dict(case.sizes)
    if case.loss:
        plan = folder / "train.yaml"
        plan.write_text(TRAIN.format(loss=case.loss, batch=sizes["batch"]))
        base, source = base_of(plan, source)
    search = Search.of(source, "model.onnx", Request(ranks, Fixed(), base, machine, sizes))
    plays = played(search, None, time.monotonic(), None, max(1, tries))
    if tries:
        run_fastest(plays)
    return plays


def compiled(search: Search, name: str, one: Candidate, folder: Path) -> Measured:
    """The artifact of a candidate."""
    proposal = search.proposal(one)
    seconds = play_program(search, proposal.done).played.seconds
    own = replace(search.source, model=search.source.model.clone())  # passes edit the model that they are given
    compile_source(own, parse_plan(proposal.text, "plan.yaml"), folder / "build")
    (folder / "plan.yaml").write_text(proposal.text)
    return Measured(name, seconds, one.degrees.ranks, folder)


def compare(name: str, case: Case, folder: Path, options: argparse.Namespace) -> bool:
    """Searches and measures; prints a row for each plan; whether the found one is as fast as is wanted."""
    machine = options.machine
    if machine is None:
        machine = folder / "machine.yaml"
        command = [sys.executable, "-m", "partc.cli", "measure", "-o", str(machine), "-n", str(options.ranks)]
        subprocess.run(command, check=True, capture_output=True)
    plays = search_of(case, folder, read_machine(machine), options.ranks, options.tries)
    assert plays.best is not None
    found = plays.best.candidate
    usual = {**{one: label for label, one in plays.search.baselines.items()}, found: "found"}
    plans = []
    for k, (one, label) in enumerate(sorted(usual.items(), key=lambda pair: pair[1] != "found")):
        own = folder / str(k)
        own.mkdir()
        try:
            plans.append(compiled(plays.search, f"{label}: {one}", one, own))
        except CompileError as error:
            print(f"  {label}: {one}: refused: {error.problems[0].fact}")
    for plan in plans:
        plan.start(case.sizes)
        plan.turn(_LEAST)
    counts = {plan.name: max(_LEAST, round(_SECONDS / plan.steps.pop())) for plan in plans}
    for _ in range(options.turns):
        for plan in plans:
            plan.turn(counts[plan.name])
    sizes = ", ".join(f"{symbol}={size}" for symbol, size in case.sizes.items())
    print(f"{name} at {sizes}, load {os.getloadavg()[0]:.1f}")
    ratios = {}
    for plan in plans:
        ratio = statistics.median(one / own for one, own in zip(plan.steps, plans[0].steps, strict=True))
        assert plan.side is not None
        cpu = float(plan.side.close().splitlines()[-1])
        ratios[plan.name] = ratio
        median = statistics.median(plan.steps)
        row = f"  {plan.name:58} {1e3 * median:9.2f} ms {ratio:7.3f} of found   CPU {1e3 * cpu:9.2f} ms"
        print(f"{row}   simulated {1e3 * plan.simulated:9.2f} ms", flush=True)
    others = {name: ratio for name, ratio in ratios.items() if name != plans[0].name}
    best = min(others, key=lambda one: others[one], default=plans[0].name)
    good = ratios[best] >= WORST
    print(
        f"  {'pass' if good else 'FAIL'}: the best baseline, {best}, takes {ratios[best]:.3f} of found; at least {WORST} is wanted"
    )
    return good


def run_rank(folder: Path, sizes: dict[str, int]) -> None:
    """A rank of a plan: steps in the turns that rank 0 is told, on numbers of a seed; the CPU time of a step at the end."""
    comm = MPI.COMM_WORLD
    manifest = open_artifact(folder / "build", trust=True).manifest
    trains = manifest.training is not None
    opened = load_trainer(folder / "build", comm) if trains else load(folder / "build", comm)
    with opened as one:
        scalars = {*manifest.training.scalars} if manifest.training is not None else set()
        ports = [port for port in manifest.inputs if comm.rank in port.ranks and port.name not in scalars]
        whole = open_inputs(manifest, [], 7, sizes).read([port.name for port in ports])
        batch = {port.name: shard(port, comm.rank, whole[port.name]) for port in ports}
        worked, steps = 0.0, 0

        def step() -> None:
            nonlocal worked, steps
            begin = time.process_time()
            one.train(batch) if trains else one(**batch)
            worked, steps = worked + time.process_time() - begin, steps + 1

        serve(step, told_all(comm), comm.rank == 0)
        total = comm.allreduce(worked / max(1, steps))
        if comm.rank == 0:
            print(total, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--try", type=int, default=6, dest="tries")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--machine", type=Path, help="a machine file; without one the machine is measured")
    parser.add_argument("--keep", type=Path, help="keep plans and artifacts here")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=json.loads, default={}, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.rank, options.sizes)
        return
    cases = options.cases or [one for one in MODELS if one != "mixtral" or importlib.util.find_spec("transformers")]
    slower = []
    for name in cases:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.keep / name if options.keep else Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            if not compare(name, MODELS[name], folder, options):
                slower.append(name)
    if slower:
        raise SystemExit(f"a baseline is faster than the found plan by more than {1 - WORST:.0%}: {', '.join(slower)}")


if __name__ == "__main__":
    main()
