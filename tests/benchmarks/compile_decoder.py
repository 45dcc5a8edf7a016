"""What compiling a decoder's two programs costs by the number of ranks: a GPT of 48 layers over dp x tp with tp 8, and in 8 stages.

    python tests/benchmarks/compile_decoder.py [--ranks 8,64,512] [--layers 48] [--profile]

`replicas` are dp x tp; `stages` are pp x dp with 8 stages, whose groups of slots take turns. There are 512 slots in all. The network is
narrow (width 64, 8 heads), so that what is written is nodes and not weights. Each compile runs in a process of its own, imports left out.
Prints seconds by the clock and of CPU, peak memory, distinct rank files and bytes; and 512 ranks as a ratio to 8 (at most 1.6 wanted).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import onnx
from one_compile import cost_of, header, print_cost, shown

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
    generate(folder, layers)
    (folder / "plan.yaml").write_text(plan(kind, ranks, layers))
    print_cost(folder / "model.onnx", folder / "plan.yaml", folder / "build", profile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,64,512")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--once", nargs=4, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        folder, ranks, kind, layers = options.once
        compile_once(Path(folder), int(ranks), kind, int(layers), options.profile)
        return
    print(header(COLUMNS))
    for kind in options.kinds.split(","):
        rows: dict[int, dict[str, float]] = {}
        for ranks in map(int, options.ranks.split(",")):
            with tempfile.TemporaryDirectory() as name:
                rows[ranks] = cost_of(__file__, name, ranks, kind, options.layers, profile=options.profile)
            print(shown(kind, ranks, rows[ranks], COLUMNS), flush=True)
        if {8, 512} <= rows.keys():
            print(f"{kind}: 512 ranks take {rows[512]['CPU'] / rows[8]['CPU']:.2f} times the CPU seconds of 8")


if __name__ == "__main__":
    main()
