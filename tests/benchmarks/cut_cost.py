"""What one cut costs on small tensors: a segment of its own, and a message to another rank.

    python tests/benchmarks/cut_cost.py [--layers 24] [--width 64] [--batch 8]

Rank 0 computes all layers. In one program every layer's value is sent to rank 1, so that rank 0 runs a segment and a send per
layer; in the other only the last one is. Both are measured on rank 0 in one run, in turns; the difference of the medians over the
cuts between them is the cost of a cut (at most 5 microseconds wanted).
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from mlp_placed import generate, launch
from onnx import helper


def add_readers(model: Path, layers: int) -> None:
    """A reader behind every layer, `read.k`, that gives an output."""
    proto = onnx.load(model)
    for k in range(1, layers + 1):
        proto.graph.node.append(helper.make_node("Neg", [f"h{k}"], [f"y{k}"], name=f"read.{k}"))
        proto.graph.output.append(helper.make_tensor_value_info(f"y{k}", 1, ["batch", None]))
    onnx.save(proto, model)


def plan(layers: int, sent: list[int]) -> str:
    rows = [f'  "read.{k}": {int(k in sent)}' for k in range(1, layers + 1)]
    return "\n".join(["ranks: 2", "placement:", '  "layer*": 0', *rows, "outputs:", '  "**": producer', ""])


def measure(folder: Path, options: argparse.Namespace) -> None:
    from mpi4py import MPI
    from partc.runtime import load

    comm = MPI.COMM_WORLD
    x = np.random.default_rng(1).standard_normal((options.batch, options.width), dtype=np.float32)
    times: dict[str, list[float]] = {"one": [], "all": []}
    programs = {side: load(str(folder / side), comm, threads=1) for side in times}
    for turn in range(options.turns + 1):
        for side, program in programs.items():
            for _ in range(options.steps):
                comm.Barrier()
                start = time.perf_counter()
                program({"h0": x} if program.inputs else {})
                if turn:
                    times[side].append(time.perf_counter() - start)
    for program in programs.values():
        program.close()
    if comm.rank == 0:
        one, every = (statistics.median(times[side]) * 1e6 for side in ("one", "all"))
        print(
            f"{options.layers} layers of width {options.width}, batch {options.batch}: "
            f"{one:.0f} us with 1 cut, {every:.0f} us with {options.layers}"
        )
        print(f"{(every - one) / (options.layers - 1):.2f} us a cut (at most 5 wanted)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 24), ("width", 64), ("batch", 8), ("steps", 100), ("turns", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        measure(options.folder, options)
        return
    with tempfile.TemporaryDirectory() as name:
        from partc.compiler import compile_model

        folder = Path(name)
        generate(folder, options.layers, options.width, 1)
        add_readers(folder / "model.onnx", options.layers)
        for side, sent in (("one", [options.layers]), ("all", list(range(1, options.layers + 1)))):
            (folder / "plan.yaml").write_text(plan(options.layers, sent))
            compile_model(folder / "model.onnx", folder / "plan.yaml", folder / side)
        launch(2, name)


if __name__ == "__main__":
    main()
