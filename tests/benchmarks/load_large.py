"""What loading 2.4 GB of weights costs: 4 ranks of one process, one thread each, each time in a new process.

    python tests/benchmarks/load_large.py [--layers 12] [--width 2048] [--runs 3]

Prints the CPU seconds of a load, user and system, with the checksums of the weights compared and with `trust`, medians of the runs;
and the largest resident memory of the process, less what it had before the load, against the
weights. onnxruntime packs each weight for its kernels, which is the copy that a load cannot avoid.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from statistics import median

RANKS, HEADS, SEQUENCE, VOCABULARY = 4, 16, 128, 8192


def loaded(build: str, trust: bool) -> None:
    """Loads an artifact in this process and prints user and system seconds, and the growth of resident bytes at their highest."""
    from partc.runtime import load_local

    before, start, highest, ended = _resident(), os.times(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not ended.wait(0.01):
            highest = max(highest, _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with load_local(build, trust=trust):
        end = os.times()
        ended.set()
        watcher.join()
    print(end.user - start.user, end.system - start.system, max(highest, _resident()) - before)


def fill(data: Path) -> None:
    """Random numbers, one block again and again, in place of the hole; onnxruntime shares what is equal, so a block fits no weight."""
    import numpy as np

    block = np.random.default_rng(0).standard_normal((1 << 22) + 12345, dtype=np.float32).tobytes()
    left = data.stat().st_size
    with data.open("r+b") as file:
        while left:
            left -= file.write(block[:left])


def main() -> None:
    """Compiles once, then loads in new processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--trust", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        loaded(args.load, args.trust)
        return
    from network import Sizes, generate, plan
    from partc.compiler.pipeline import compile_model

    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model = generate(folder, Sizes(args.layers, args.width, HEADS, SEQUENCE, VOCABULARY, stored=False))
        fill(folder / "model.data")
        (folder / "plan.yaml").write_text(plan(RANKS, head=True))
        compile_model(model, folder / "plan.yaml", folder / "build")
        size = sum(file.stat().st_size for file in (folder / "build" / "weights").iterdir())
        print(f"{size / 1e9:.2f} GB in {RANKS} ranks")
        rows: dict[str, list[list[float]]] = {"compared": [], "trust": []}
        for _ in range(args.runs):
            for name, found in rows.items():
                command = [sys.executable, __file__, "--load", str(folder / "build"), *["--trust"] * (name == "trust")]
                run = subprocess.run(
                    command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
                )
                found.append([float(one) for one in run.stdout.split()])
        for name, found in rows.items():
            user, system, memory = (median(column) for column in zip(*found, strict=True))
            print(
                f"{name:9} {user + system:.2f} s of CPU (user {user:.2f}, system {system:.2f}), "
                f"memory {memory / size:.2f} of the weights"
            )


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
