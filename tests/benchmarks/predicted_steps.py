"""The step of a training or an inference as `partc simulate` predicts it, against the step that is measured, in one run.

    python tests/benchmarks/predicted_steps.py [CASE...] [--turns 40] [--keep FOLDER]

For each case: `partc measure --of build/` writes a machine file, the artifact runs over MPI, and `partc simulate` predicts its step, once
by the curves of the file alone, once with its segments too, and once by a trace of the same run. Measured are, in the turns in which other
processes had the least of the cores (their share is printed), and of equal ones in the fastest, since a virtual machine has neighbours that
it does not see, the median step and the tenth percentile, which is what a step takes where they leave it alone; `partc measure` measures
so, too, and errors are against this one. On a quiet machine both are about the same. On a busy one ranks that wait for each other are never
left alone: `alone` is the step with the tenth percentile of each action in the trace, and `work` the time that the busiest rank had a core,
which does not depend on others: about the step where ranks wait little for each other. The prediction by a trace is held against the steps
of that trace. Wanted: a median error of at most 10 %, and none above 25 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from partc.cli.simulation.run import instant
from partc.compiler.cost.step import simulated
from partc.compiler.cost.traced import read_traced
from partc.runtime import open_artifact
from train_cases import CASES, data_parallel, write
from transformer import HERE, ROOT, mpi_command

SAMPLES = HERE.parents[1] / "samples"
LONGEST = 300.0
"""Seconds that a run may take."""
QUIET = 0.25
"""The share of turns that counts: those in which others had the least of the cores."""
PIPELINE = """ranks: 2
symbols: {batch: {divisor: 8}}
stages: [tokens, positions, layers.0, layers.1]
"""


@dataclass(frozen=True)
class Case:
    """How an artifact is compiled, the sizes of its symbols, and its ranks."""

    compiled: Callable[[Path], object]
    sizes: dict[str, int]
    ranks: int


def sample(model: str, plan: str) -> Callable[[Path], object]:
    """Compiles a sample by one of its plans."""
    return lambda folder: partc(
        "compile", str(SAMPLES / model), "--plan", str(SAMPLES / plan), "-o", str(folder / "build")
    )


def stages(folder: Path) -> object:
    """Compiles the sample GPT in two stages, with 8 microbatches."""
    text = (SAMPLES / "gpt/train_pipeline.yaml").read_text().replace("ranks: 4", "ranks: 2")
    for name, rank in (("layers.1", 0), ("layers.2", 1), ("layers.3", 1), ("norm", 1), ("head", 1)):
        text = text.replace(
            f"  {name}: {1 if name == 'layers.1' else 2 if name == 'layers.2' else 3}", f"  {name}: {rank}"
        )
    plan = folder / "plan.yaml"
    plan.write_text(text.replace("source: sonnets.py", f"source: {SAMPLES / 'gpt/sonnets.py'}"))
    return partc("compile", str(SAMPLES / "gpt/model.py"), "--plan", str(plan), "-o", str(folder / "build"))


STEPS = {
    "lenet_placed": Case(sample("lenet/model.py", "lenet/train.yaml"), {"batch": 32}, 5),
    "mlp_dp2": Case(lambda folder: write(folder, CASES["mlp"], data_parallel(2), 2), {"batch": 128}, 2),
    "gpt_tp2": Case(sample("gpt/model.py", "gpt/plan.yaml"), {"batch": 8, "seq": 128}, 2),
    "gpt_1f1b": Case(stages, {"batch": 16, "seq": 128}, 2),
    "resnet_dp2": Case(lambda folder: write(folder, CASES["resnet"], data_parallel(2), 2), {"batch": 8}, 2),
    "wide_deep": Case(sample("wide_deep/model.py", "wide_deep/train.yaml"), {"batch": 256}, 2),
}


def partc(*arguments: str) -> str:
    """What a command prints; RuntimeError with its error where it fails."""
    done = subprocess.run([sys.executable, "-m", "partc.cli", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"partc {' '.join(arguments)}\n{done.stderr}")
    return done.stdout


def predicted(folder: Path, case: Case, *options: str) -> tuple[float, float | None]:
    """Seconds of a step by the simulation; with a trace those that it has measured."""
    sizes = [f"--set={name}={size}" for name, size in case.sizes.items()]
    found = json.loads(partc("simulate", str(folder / "build"), *options, *sizes, "--json"))
    return found["seconds"], found["measured"]["seconds"] if "measured" in found else None


def measured(folder: Path, case: Case, turns: int) -> tuple[float, float, float, float]:
    """The median and the tenth percentile of the seconds of a step in the quietest turns, the share of the cores that others had, and
    the seconds of a step in which the rank that works most has a core.
    """
    script = [str(HERE / "predicted_steps_rank.py"), str(folder), json.dumps(case.sizes), str(turns)]
    done = subprocess.run(
        mpi_command(case.ranks, *script), capture_output=True, text=True, env={**os.environ, **ROOT}, timeout=LONGEST
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    rows = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    ordered = sorted(rows, key=lambda row: (round(row["others"], 1), statistics.median(row["steps"])))
    quiet = ordered[: max(1, round(QUIET * len(rows)))]
    steps = sorted(seconds for row in quiet for seconds in row["steps"])
    others, work = (statistics.median(row[key] for row in some) for key, some in (("others", quiet), ("work", rows)))
    return statistics.median(steps), steps[len(steps) // 10], others, work


def undisturbed(folder: Path, case: Case) -> float:
    """Seconds of a step in which each action takes the tenth percentile of what the trace has of it."""
    traced = read_traced(folder / "x.trace.json", 0.1)
    return simulated(open_artifact(folder / "build", trust=True), instant(), case.sizes, traced=traced).played.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(STEPS))
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--keep", type=Path, help="keep what is compiled and measured here")
    options = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ms a step, predicted by curves, with segments, by a trace"
    )
    head = f"{'case':14} {'median':>9} {'tenth':>9} {'others':>7} {'alone':>9} {'work':>9}"
    print(head + "".join(f" {kind:>9} {'':>6}" for kind in ("curves", "segments", "trace")), flush=True)
    errors: dict[str, list[float]] = {"curves": [], "segments": [], "trace": []}
    for name in options.cases or STEPS:
        case = STEPS[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.keep / name if options.keep else Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "build").exists():
                case.compiled(folder)
            sizes = [f"--set={one}={size}" for one, size in case.sizes.items()]
            curves, machine = folder / "curves.yaml", folder / "machine.yaml"
            partc("measure", "-o", str(machine), "-n", str(case.ranks), "--of", str(folder / "build"), *sizes)
            curves.write_text(machine.read_text().partition("segments:")[0])
            median, seconds, others, work = measured(folder, case, options.turns)
            alone = undisturbed(folder, case)
            found = {
                "curves": predicted(folder, case, "--machine", str(curves)),
                "segments": predicted(folder, case, "--machine", str(machine)),
                "trace": predicted(folder, case, "--trace", str(folder / "x.trace.json")),
            }
        row = f"{name:14} {1e3 * median:9.3f} {1e3 * seconds:9.3f} {others:7.0%} {1e3 * alone:9.3f} {1e3 * work:9.3f}"
        for kind, (one, own) in found.items():
            errors[kind].append(one / (own or seconds) - 1)
            row += f" {1e3 * one:9.3f} {errors[kind][-1]:+6.0%}"
        print(row, flush=True)
    for kind, some in errors.items():
        sizes_of = sorted(map(abs, some))
        print(f"{kind}: median error {statistics.median(sizes_of):.1%}, largest {sizes_of[-1]:.1%}")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
