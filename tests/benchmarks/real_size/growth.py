"""CPU seconds of commands by the number of ranks, with files: `compile`, `check` and `inspect` of a GPT, and `run` of LeNet on 5 ranks.

    python tests/benchmarks/real_size/growth.py [--ranks 8,64,512,4096] [--layers 24] [--turns 3] [--lenet]

The GPT has width 64, so that what is written is nodes and not weights; a mesh of data parallel ranks times 8 tensor parallel ones. Printed
are medians of the turns, each command in a process of its own with its imports, and ratios to the smallest number of ranks. `--lenet`
also runs `partc run` of LeNet, which 5 MPI ranks share, against the same in one process (`--in-process`).
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from network import Sizes, generate, plan  # noqa: E402

TENSOR = 8
LENET = HERE.parents[2] / "samples/lenet"


def seconds_of(*command: str) -> float:
    """CPU seconds of a command of partc and of the processes that it starts."""
    process = subprocess.Popen([sys.executable, "-m", "partc.cli", *command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"partc {' '.join(command)} failed")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,64,512,4096")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--lenet", action="store_true")
    options = parser.parse_args()
    counts = [int(one) for one in options.ranks.split(",")]
    commands = ("compile", "check", "inspect")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = generate(folder, Sizes(options.layers, 64, 8, 16, 64))
        found = {(command, ranks): list[float]() for command in commands for ranks in counts}
        for ranks in counts:
            mesh = f"dp: {ranks // TENSOR}, tp: {TENSOR}" if ranks > TENSOR else ""
            text = plan(ranks, mesh, head=True).replace("divisor: 64", f"divisor: {ranks // TENSOR}")
            (folder / f"{ranks}.yaml").write_text(text + 'outputs: {"**": cut}\n')
        for _ in range(options.turns):
            for ranks in counts:
                build = folder / f"build{ranks}"
                compiled = ["compile", str(model), "--plan", str(folder / f"{ranks}.yaml"), "-q", "-o", str(build)]
                found["compile", ranks].append(seconds_of(*compiled))
                for command in ("check", "inspect"):
                    found[command, ranks].append(seconds_of(command, str(build)))
        print(f"load {os.getloadavg()[0]:.1f}; CPU seconds, and times those of {counts[0]} ranks")
        print(f"{'ranks':10}" + "".join(f"{ranks:>16,}" for ranks in counts))
        for command in commands:
            medians = [statistics.median(found[command, ranks]) for ranks in counts]
            print(f"{command:10}" + "".join(f"{one:9.2f}{one / medians[0]:7.2f}" for one in medians), flush=True)
        if options.lenet:
            copy = shutil.copytree(LENET, folder / "lenet")
            build = folder / "lenet-build"
            compiled = ["compile", str(copy / "model.py"), "--plan", str(copy / "plan.yaml"), "-q", "-o", str(build)]
            seconds_of(*compiled)
            for title, given in (("5 MPI ranks", ()), ("one process", ("--in-process",))):
                took = [
                    seconds_of("run", str(build), "-q", "--random", "7", "--set", "batch=32", *given)
                    for _ in range(options.turns)
                ]
                print(f"run of LeNet, {title}: {statistics.median(took):.2f} s")


if __name__ == "__main__":
    main()
