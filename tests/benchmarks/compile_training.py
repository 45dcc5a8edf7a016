"""What compiling a training costs by the number of ranks: a GPT of 24 layers over dp x tp with tp 8, with and without ZeRO.

    python tests/benchmarks/compile_training.py [--ranks 8,64,512,4096] [--profile]
    python tests/benchmarks/compile_training.py --stages 8 --layers 48

With `--stages` the ranks are pp x dp instead: so many stages in 1F1B, each over the ranks that are left, and 8 microbatches.
The network is narrow (width 64), so that what is written is nodes and not weights. Each compile runs in a process of its own, imports
left out. Prints seconds by the clock and of CPU, peak memory, distinct rank files and bytes; and 4,096 ranks as ratios to 8 (at most
2 in time and 1.5 in bytes wanted).
"""

import argparse
import tempfile
from pathlib import Path

from network import Sizes, generate, plan
from one_compile import COLUMNS, cost_of, header, print_cost, shown

TENSOR = 8
TRAIN = """train:
  loss: {type: softmax_cross_entropy, logits: head.MatMul.out, labels: labels, axis: 2}
  optimizer: OPTIMIZER
  clip: {norm: 1.0}
"""
OPTIMIZERS = {
    "replicated": "{type: adamw, lr: 0.001, weight_decay: 0.1}",
    "ZeRO": "{type: adamw, lr: 0.001, weight_decay: 0.1, shard: dp}",
}


def in_stages(ranks: int, layers: int, stages: int) -> str:
    """A plan with as many layers in each stage."""
    each, data = layers // stages, ranks // stages
    runs = [f'  "h.[{k * each}-{(k + 1) * each - 1}]": {{pp: {k}}}\n' for k in range(stages)]
    begin = plan(ranks, f"pp: {stages}, dp: {data}").partition("sharding")[0].replace(": 64", f": {8 * data}")
    last = f"  norm: {{pp: {stages - 1}}}\n  head: {{pp: {stages - 1}}}\n"
    placed = "".join(["placement:\n  tokens: {pp: 0}\n  positions: {pp: 0}\n", *runs, last])
    return f"{begin}{placed}pipeline: {{microbatches: 8, schedule: 1f1b}}\n"


def compile_once(folder: Path, ranks: int, kind: str, profile: bool, layers: int, stages: int) -> None:
    """In a process of its own: compiles, and prints what it took and what was written."""
    data = ranks // TENSOR
    text = plan(ranks, f"dp: {data}, tp: {TENSOR}", head=True).replace("divisor: 64", f"divisor: {data}")
    text = in_stages(ranks, layers, stages) if stages else text
    text = text.replace("dataset: data_parallel", "dataset: {ids: [dp, null], labels: [dp, null]}")
    (folder / f"{kind}.yaml").write_text(text + TRAIN.replace("OPTIMIZER", OPTIMIZERS[kind]))
    print_cost(folder / "model.onnx", folder / f"{kind}.yaml", folder / f"{kind}_{ranks}", profile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,64,512,4096")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--kinds", default=",".join(OPTIMIZERS))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--stages", type=int, default=0)
    parser.add_argument("--once", nargs=5, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        folder, ranks, kind, layers, stages = options.once
        compile_once(Path(folder), int(ranks), kind, options.profile, int(layers), int(stages))
        return
    print(header(COLUMNS))
    for kind in options.kinds.split(","):
        rows: dict[int, dict[str, float]] = {}
        for ranks in map(int, options.ranks.split(",")):
            with tempfile.TemporaryDirectory() as name:
                generate(Path(name), Sizes(options.layers, 64, 8, 16, 64))
                arguments = (name, ranks, kind, options.layers, options.stages)
                rows[ranks] = cost_of(__file__, *arguments, profile=options.profile)
            print(shown(kind, ranks, rows[ranks], COLUMNS), flush=True)
        if {8, 4096} <= rows.keys():
            time_ratio, bytes_ratio = (rows[4096][name] / rows[8][name] for name in ("CPU", "all MB"))
            print(f"{kind}: 4,096 ranks take {time_ratio:.2f} times the CPU seconds of 8 (at most 2 wanted)", end="")
            print(f" and {bytes_ratio:.2f} times the bytes (at most 1.5)")


if __name__ == "__main__":
    main()
