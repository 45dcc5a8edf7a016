"""What compiling a decoder's two programs costs by the number of ranks: a GPT of 48 layers over dp x tp with tp 8, and in 8 stages.

    python tests/benchmarks/compile_decoder.py [--ranks 8,64,512] [--layers 48] [--profile]

`replicas` are dp x tp; `stages` are pp x dp with 8 stages, whose groups of slots take turns. There are 512 slots in all. The network is
narrow (width 64, 8 heads), so that what is written is nodes and not weights. Each compile runs in a process of its own, imports left out.
Prints seconds by the clock and of CPU, peak memory, distinct rank files and bytes; and 512 ranks as a ratio to 8 (at most 1.6 wanted).
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import onnx

HEADS, STAGES, SLOTS = 8, 8, 512
COLUMNS = ("seconds", "CPU", "peak MB", "rank files", "all MB")
KINDS = ("replicas", "stages")


def generate(folder: Path, layers: int) -> None:
    """Writes the model."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "generation"))
    import decoders

    decoders.HEADS, decoders.WIDTH = HEADS, HEADS * decoders.SIZE
    onnx.save(decoders.decoder(layers), folder / "model.onnx")


def plan(kind: str, ranks: int, layers: int) -> str:
    """The plan of a kind over so many ranks."""
    inner = HEADS if kind == "replicas" else STAGES
    data = ranks // inner
    if kind == "replicas":
        mesh, lines = f"dp: {data}, tp: {inner}", "sharding:\n"
        for name in ("q", "k", "v", "up"):
            lines += f'  "layers.*.{name}": colwise\n'
        lines += '  "layers.*.o": rowwise\n  "layers.*.down": rowwise\n  head: colwise\n'
    else:
        mesh, lines, each = f"pp: {inner}, dp: {data}", "placement:\n", layers // STAGES
        lines += '  "embed.*": {pp: 0}\n'
        for stage in range(STAGES):
            lines += f'  "layers.[{stage * each}-{(stage + 1) * each - 1}]": {{pp: {stage}}}\n'
        lines += f"  head: {{pp: {STAGES - 1}}}\n"
    groups = f"groups: {STAGES}, " if kind == "stages" else ""
    return f"ranks: {ranks}\nmesh: {{{mesh}}}\ndataset: {{ids: [dp, null]}}\n{lines}generate: {{slots: {SLOTS}, {groups}length: 64}}\n"


def compile_once(folder: Path, ranks: int, kind: str, layers: int, profile: bool) -> None:
    """In a process of its own: compiles, and prints what it took and what was written."""
    from partc.compiler.pipeline import compile_model

    generate(folder, layers)
    (folder / "plan.yaml").write_text(plan(kind, ranks, layers))
    profiler = cProfile.Profile()
    begin, computed = time.perf_counter(), time.process_time()
    if profile:
        profiler.enable()
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    profiler.disable()
    seconds, computed = time.perf_counter() - begin, time.process_time() - computed
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    if profile:
        stats = pstats.Stats(profiler, stream=sys.stderr)
        stats.sort_stats("tottime").print_stats(30)
        stats.sort_stats("cumtime").print_stats(60)
    sizes = {path.name: path.stat().st_size / 1e6 for path in (folder / "build").rglob("*") if path.is_file()}
    files = sum(name.endswith(".onnx") for name in sizes)
    print(json.dumps(dict(zip(COLUMNS, (seconds, computed, peak, files, sum(sizes.values())), strict=True))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,64,512")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--once", nargs=3, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        folder, ranks, kind = options.once
        compile_once(Path(folder), int(ranks), kind, options.layers, options.profile)
        return
    print(f"{'':18}" + "".join(f"{name:>12}" for name in COLUMNS))
    for kind in options.kinds.split(","):
        rows: dict[int, dict[str, float]] = {}
        for ranks in map(int, options.ranks.split(",")):
            with tempfile.TemporaryDirectory() as name:
                script = [sys.executable, str(Path(__file__)), "--once", name, str(ranks), kind]
                script += ["--layers", str(options.layers), *["--profile"] * options.profile]
                done = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=True)
            row = rows[ranks] = json.loads(done.stdout.splitlines()[-1])
            print(f"{kind:11}{ranks:>7}" + "".join(f"{row[name]:>12.4g}" for name in COLUMNS), flush=True)
        if {8, 512} <= rows.keys():
            print(f"{kind}: 512 ranks take {rows[512]['CPU'] / rows[8]['CPU']:.2f} times the CPU seconds of 8")


if __name__ == "__main__":
    main()
