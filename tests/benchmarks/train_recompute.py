"""What recomputing layers of a GPT saves and costs: saved bytes, the arena, resident memory and time, in stages and on one rank.

    python tests/benchmarks/train_recompute.py [--layers 12 --width 512 --batch 8 --seq 64 --microbatches 8]

The sides run in turns, under MPI, with one thread a rank: two stages by 1f1b and one rank with a batch that is not divided, each with all
values kept, with the attention of every layer recomputed, and with all layers. `saved` is what a microbatch keeps of each stage at the
sizes of the run, `arena` the bytes planned for values between segments, `peak` the most resident memory beyond what the process had before
it loaded the artifact. Of one more forward pass a third more time is expected, less what needs no
repeating (the last product of a layer). On one rank without recomputing all values are inside of
one session, so that its arena says nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from partc.cli.output.pipeline import read_profile
from partc.compiler.ir.program import Complete
from train_pipeline import case_of, folder_of, plan, times_side, write
from turns import Side

PATTERNS = {"all kept": "", "attention": "'layers.*.attention'", "layers": "'layers.*'"}


def said(options: argparse.Namespace, ranks: int, patterns: str) -> str:
    """The plan of a side, whose symbols have the sizes of the run."""
    count = options.microbatches if ranks > 1 else 1
    base = plan(options.layers, ranks)
    again = f", recompute: {patterns}" if patterns else ""
    sizes = f"{{batch: {{divisor: {count}, max: {options.batch}}}, seq: {{max: {options.seq}}}}}"
    return f"{base}symbols: {sizes}\npipeline: {{microbatches: {count}{again}}}\n"


def saved(program: Complete) -> str:
    """MB of a microbatch by stage; "" where the batch is not divided."""
    stages = program.tasks.costs.stages if program.tasks is not None else ()
    return ", ".join(f"{stage.saved / 1e6:.2f}" for stage in stages)


def shown(folder: Path, ranks: int) -> str:
    """Arena and peak by rank, in MB."""
    arenas = [one.arena for one in read_profile(folder / "times.json").ranks]
    peaks = [json.loads((folder / f"memory_{rank}.json").read_text())["peak"] for rank in range(ranks)]
    return "; ".join(f"{arena / 1e6:.1f}, {peak:.0f}" for arena, peak in zip(arenas, peaks, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in {"layers": 12, "width": 512, "heads": 8, "vocabulary": 1000, "batch": 8, "seq": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="of a side in a turn")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    for ranks in (2, 1):
        with tempfile.TemporaryDirectory() as place:
            measured(Path(place), options, ranks)


def measured(place: Path, options: argparse.Namespace, ranks: int) -> None:
    """All sides on so many ranks."""
    sides: dict[str, Side] = {}
    kept = {}
    for name, patterns in PATTERNS.items():
        folder = folder_of(place, name, "all kept")
        kept[name] = saved(write(folder, case_of(options), said(options, ranks, patterns), 1).program)
        sides[name] = times_side(folder, ranks)
    for _ in range(options.turns):
        for side in sides.values():
            side.times += side.turn(options.steps)
    print(f"{ranks} {'stages by 1f1b' if ranks > 1 else 'rank'}: MB saved; MB of arena, peak by rank; ms of a step")
    first = next(iter(sides.values()))
    for name, side in sides.items():
        side.close()
        step, least = statistics.median(side.times), min(side.times)
        ratio = f"{step / statistics.median(first.times):.2f} (fastest {least / min(first.times):.2f})"
        print(f"  {name:10} {kept[name]:13} {shown(place / name, ranks):28} {1e3 * step:8.0f}, {ratio}", flush=True)


if __name__ == "__main__":
    main()
