"""What one compile takes and writes, for benchmarks that run each in a process of its own, so that imports and memory are its own."""

from __future__ import annotations

import cProfile
import json
import pstats
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SUFFIXES = {"rank file MB": ".onnx", "weights MB": ".safetensors", "dumps MB": ".ir", "manifest MB": ".json"}
COLUMNS = ("seconds", "CPU", "peak MB", "rank files", *SUFFIXES, "all MB")


def print_cost(model: Path, plan: Path, out: Path, profile: bool) -> None:
    """Compiles, and prints as JSON what it took and what was written, a number for each of `COLUMNS`; the profile goes to stderr."""
    from partc.compiler.pipeline import compile_model

    profiler = cProfile.Profile()
    begin, computed = time.perf_counter(), time.process_time()
    if profile:
        profiler.enable()
    compile_model(model, plan, out)
    profiler.disable()
    seconds, computed = time.perf_counter() - begin, time.process_time() - computed
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    if profile:
        stats = pstats.Stats(profiler, stream=sys.stderr)
        stats.sort_stats("tottime").print_stats(30)
        stats.sort_stats("cumtime").print_stats(60)
    sizes = {path: path.stat().st_size / 1e6 for path in out.rglob("*") if path.is_file()}
    kinds = {name: sum(sizes[path] for path in sizes if path.suffix == suffix) for name, suffix in SUFFIXES.items()}
    files = sum(path.suffix == ".onnx" for path in sizes)
    took = dict(zip(COLUMNS[:4], (seconds, computed, peak, files), strict=True))
    print(json.dumps({**took, **kinds, "all MB": sum(sizes.values())}))


def cost_of(script: str, *arguments: object, profile: bool) -> dict[str, float]:
    """What `print_cost` prints at the end of a script's `--once ARGUMENTS`, which runs in a process of its own."""
    command = [sys.executable, script, *["--profile"] * profile, "--once", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def shown(name: str, ranks: int, row: dict[str, float], columns: Sequence[str]) -> str:
    """A row of a table whose `header` has these columns."""
    return f"{name:11}{ranks:>7}" + "".join(f"{row[column]:>14.4g}" for column in columns)


def header(columns: Sequence[str]) -> str:
    """The line above rows."""
    return f"{'':18}" + "".join(f"{column:>14}" for column in columns)
