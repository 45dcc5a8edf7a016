"""A GPT in a stage per MPI rank, with microbatches: against one rank, PyTorch's pipelining, the simulation, and in size.

    python tests/benchmarks/train_pipeline.py [--only a,b,c,d] [--layers 12 --width 512 --batch 8 --seq 64]

a    1f1b and zb_h1 against one rank without microbatches, and against the same stages without; the ideal beside the ratio
b    1f1b against `torch.distributed.pipelining` (1F1B over gloo), the same network, stages and microbatches
c    the measured step against the simulation with measured task times (`train_pipeline_times.py`, `partc simulate`)
d    rank files and seconds of a compile by the number of microbatches; memory of a rank by 1f1b and gpipe

One thread a rank. A step is from the batch in hand to the loss in hand on rank 0, with the update by SGD with momentum. The sides of a and
b are measured in one run, in turns, and their first losses compared. The ideal is that of tasks F, B and W of one time, with messages and
updates of none. In d the arena has the values between segments; what lies within a segment (of F and B that run in one) is onnxruntime's,
so the most resident memory stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from partc.cli.output.pipeline import read_profile
from train_cases import CROSS_ENTROPY, Case, gpt, train, write
from train_data_parallel import free_port, in_turns, partc_side
from train_pipeline_simulated import compared
from transformer import HERE, ROOT, available, mpi_command
from turns import Side

SCHEDULES = ("1f1b", "zb_h1")
SIZES = (1, 4, 16, 64)
WHOLE, STAGES, TORCH = "one rank", "stages alone", "torch 1F1B"
CLOSE = 1e-5


def case_of(options: argparse.Namespace) -> Case:
    """The network of the options, with the sizes of its batch."""
    context = max(128, options.seq)
    return Case(
        lambda: gpt(options.width, options.layers, options.heads, options.vocabulary, context),
        {"batch": options.batch, "seq": options.seq},
    )


def plan(layers: int, ranks: int, count: int = 1, schedule: str = "") -> str:
    """Equal numbers of layers on each rank, the head on the last one; with a schedule in so many microbatches."""
    if ranks == 1:
        return f"ranks: 1\n{train(CROSS_ENTROPY)}"
    homes = {"tokens": 0, "positions": 0, "norm": ranks - 1, "head": ranks - 1}
    homes |= {f"layers.{k}": ((k + 1) * ranks - 1) // layers for k in range(layers)}
    placement = "".join(f"  {name}: {rank}\n" for name, rank in homes.items())
    pipeline = ""
    if schedule:
        pipeline = (
            f"symbols: {{batch: {{divisor: {count}}}}}\npipeline: {{microbatches: {count}, schedule: {schedule}}}\n"
        )
    return f"ranks: {ranks}\nplacement:\n{placement}{pipeline}{train(CROSS_ENTROPY)}"


def ideal(schedule: str, options: argparse.Namespace) -> float:
    """How many times as fast as one rank a schedule is where F, B and W take the same time, and messages and updates none."""
    from partc.compiler.schedule.costs import unit_costs
    from partc.compiler.schedule.simulate import simulate
    from partc.compiler.schedule.stages import chain
    from partc.compiler.schedulers.choose import choose

    stages, count = chain(range(options.ranks)), options.microbatches
    return 3 * count * options.ranks / simulate(choose(stages, count, schedule), unit_costs(stages)).total


def folder_of(place: Path, name: str, first: str) -> Path:
    """A folder for a side, with the weights and feeds of the first one."""
    folder = place / name
    folder.mkdir()
    for file in (place / first).glob("*.npz"):
        os.link(file, folder / file.name)
    return folder


def torch_side(folder: Path, options: argparse.Namespace) -> Side:
    """PyTorch, a process for each stage."""
    sizes = {name: getattr(options, name) for name in ("layers", "width", "heads", "vocabulary", "microbatches")}
    sizes["context"] = max(128, options.seq)
    command = [sys.executable, str(HERE / "train_pipeline_torch.py"), str(folder)]
    command += [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    common = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = str(free_port())
    return Side(TORCH, [command] * options.ranks, [common | {"RANK": str(rank)} for rank in range(options.ranks)])


def speeds(place: Path, options: argparse.Namespace) -> None:
    """Parts a and b."""
    count = options.microbatches
    plans = {"1f1b": plan(options.layers, options.ranks, count, "1f1b")}
    if "a" in options.only:
        plans |= {WHOLE: plan(options.layers, 1), STAGES: plan(options.layers, options.ranks)}
        plans["zb_h1"] = plan(options.layers, options.ranks, count, "zb_h1")
    sides: dict[str, Side] = {}
    for name, text in plans.items():
        write(folder_of(place, name, "1f1b"), case_of(options), text, 1)
        sides[name] = partc_side(place / name, 1 if name == WHOLE else options.ranks)
    if "b" in options.only and available(sys.executable, "torch.distributed.pipelining", "this one"):
        sides[TORCH] = torch_side(folder_of(place, TORCH, "1f1b"), options)
    in_turns([*sides.values()], options.steps, options.turns)
    first = np.load(place / "1f1b" / "partc.npy")
    print(f"{'':14}{'median ms':>11} {'fastest':>10} {'losses by':>10}")
    for name, side in sides.items():
        losses = np.load(place / name / ("torch.npy" if name == TORCH else "partc.npy"))
        apart = float(np.abs(losses / first - 1).max())
        print(f"  {name:12}{1e3 * statistics.median(side.times):11.3f} {1e3 * min(side.times):10.3f} {apart:10.1e}")
        assert apart < CLOSE, f"{name}: losses differ by {apart:.1e}"
        side.close()
    if "a" in options.only:
        for name in SCHEDULES:
            print(f"a  {name}: {over(sides, WHOLE, name)} times as fast as one rank, ideal {ideal(name, options):.2f}")
            print(f"a  {name}: {over(sides, STAGES, name)} times as fast as the stages without microbatches")
    if TORCH in sides:
        print(f"b  1f1b: {over(sides, '1f1b', TORCH)} of PyTorch's time", flush=True)


def over(sides: dict[str, Side], one: str, other: str) -> str:
    """The median of a side over another's, and the fastest steps likewise."""
    middle = statistics.median(sides[one].times) / statistics.median(sides[other].times)
    return f"{middle:.3f} (fastest {min(sides[one].times) / min(sides[other].times):.3f})"


def times_side(folder: Path, ranks: int) -> Side:
    """A side that writes the times of its ranks' actions and their memory when it ends."""
    return Side("partc", [mpi_command(ranks, str(HERE / "train_pipeline_times.py"), str(folder))], [ROOT])


def simulations(place: Path, options: argparse.Namespace) -> None:
    """Part c."""
    for name in SCHEDULES:
        folder = folder_of(place, f"times_{name}", f"times_{SCHEDULES[0]}")
        write(folder, case_of(options), plan(options.layers, options.ranks, options.microbatches, name), 1)
    sides = [times_side(place / f"times_{name}", options.ranks) for name in SCHEDULES]
    in_turns(sides, options.steps, options.turns)
    for side, name in zip(sides, SCHEDULES, strict=True):
        side.close()
        print(f"c  {name}: {compared(place / f'times_{name}')}", flush=True)


def sizes(place: Path, options: argparse.Namespace) -> None:
    """Part d."""
    from partc.compiler.pipeline import compile_source
    from partc.compiler.plan.read import parse_plan
    from training_equivalence import source_of

    compile_source(source_of(gpt(16, 2, 2, 20)), parse_plan(plan(2, 2, 2, "1f1b"), "plan.yaml"), place / "warm")
    base = (0.0, 0.0)
    for count in SIZES:
        source, said = source_of(case_of(options).model()), plan(options.layers, options.ranks, count, "1f1b")
        begin = time.perf_counter()
        compile_source(source, parse_plan(said, "plan.yaml"), place / f"m{count}")
        seconds = time.perf_counter() - begin
        files = [path.stat().st_size for path in sorted((place / f"m{count}").glob("rank_*.onnx"))]
        found = float(sum(files)), seconds
        base = base if base[0] else found
        kilobytes = ", ".join(f"{size / 1e3:.0f}" for size in files)
        more = f"{found[0] / base[0]:.2f} times the bytes and {found[1] / base[1]:.2f} times the seconds of m = 1"
        print(f"d  m = {count:2}: rank files {kilobytes} kB, compiled in {seconds:.2f} s; {more}", flush=True)
    found_arenas = {}
    for name in ("gpipe", "1f1b"):
        folder = folder_of(place, f"memory_{name}", "memory_gpipe")
        write(folder, case_of(options), plan(options.layers, options.ranks, options.microbatches, name), 1)
        side = times_side(folder, options.ranks)
        side.turn(2)
        side.close()
        found_arenas[name] = [one.arena for one in read_profile(folder / "times.json").ranks]
        peaks = [json.loads((folder / f"memory_{rank}.json").read_text())["peak"] for rank in range(options.ranks)]
        some = zip(found_arenas[name], peaks, strict=True)
        text = "; ".join(f"rank {k} {arena / 1e6:.2f}, {peak:.1f}" for k, (arena, peak) in enumerate(some))
        print(f"d  {name}: MB of arena, and of resident memory at its peak: {text}", flush=True)
    ratios = [one / other for one, other in zip(found_arenas["1f1b"], found_arenas["gpipe"], strict=True)]
    print(f"d  1f1b/gpipe, arenas by rank: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="a,b,c,d", help="the parts, with commas between them")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="of a side in a turn")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := [part for part in options.only if part not in ("a", "b", "c", "d")]:
        parser.error(f"no part {', '.join(unknown)}; there are a, b, c and d")
    if not 1 < options.ranks <= options.layers or options.batch % options.microbatches or options.width % options.heads:
        parser.error(
            "a pipeline has two ranks or more, each stage needs a layer, microbatches divide the batch, and heads the width"
        )
    print(f"GPT of {options.layers} layers, width {options.width}, batch {options.batch} x {options.seq}", end="")
    print(
        f" in {options.microbatches} microbatches; {options.ranks} ranks on {os.cpu_count()} cores, one thread a rank"
    )
    with tempfile.TemporaryDirectory() as place:
        if {"a", "b"}.intersection(options.only):
            speeds(Path(place), options)
        if "c" in options.only:
            simulations(Path(place), options)
        if "d" in options.only:
            sizes(Path(place), options)


if __name__ == "__main__":
    main()
