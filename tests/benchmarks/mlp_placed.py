"""A 24-layer MLP of width 1024 placed over 4 MPI ranks against the same model whole, batch 32, one thread a rank.

    python tests/benchmarks/mlp_placed.py [--layers 24] [--width 1024] [--batch 32] [--ranks 4]

Both sides are measured in one run, in turns, on rank 0: from the call to the outputs in hand. Prints medians and their ratio (at
most 1.10 wanted).
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper, numpy_helper

if TYPE_CHECKING:
    from mpi4py import MPI


def generate(folder: Path, layers: int, width: int, ranks: int) -> None:
    """model.onnx and plan.yaml: MatMul, Add, Relu per layer, in equal runs over the ranks."""
    random = np.random.default_rng(0)
    nodes, weights = [], []
    for k in range(layers):
        weights.append(
            numpy_helper.from_array((random.standard_normal((width, width)) / width**0.5).astype(np.float32), f"w{k}")
        )
        weights.append(numpy_helper.from_array(random.standard_normal(width).astype(np.float32), f"c{k}"))
        nodes.append(helper.make_node("MatMul", [f"h{k}", f"w{k}"], [f"m{k}"], name=f"layer{k}.matmul"))
        nodes.append(helper.make_node("Add", [f"m{k}", f"c{k}"], [f"a{k}"], name=f"layer{k}.add"))
        nodes.append(helper.make_node("Relu", [f"a{k}"], [f"h{k + 1}"], name=f"layer{k}.relu"))
    x = helper.make_tensor_value_info("h0", 1, ["batch", width])
    y = helper.make_tensor_value_info(f"h{layers}", 1, ["batch", width])
    graph = helper.make_graph(nodes, "mlp", [x], [y], weights)
    onnx.save(
        helper.make_model(graph, ir_version=11, opset_imports=[helper.make_opsetid("", 21)]), folder / "model.onnx"
    )
    rows = [f'  "layer[{r * layers // ranks}-{(r + 1) * layers // ranks - 1}]": {r}' for r in range(ranks)]
    (folder / "plan.yaml").write_text("\n".join([f"ranks: {ranks}", "placement:", *rows, ""]))


def idle_barrier(comm: "MPI.Comm") -> None:
    """A barrier that leaves the cores to the rank that is measured."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0005)


def launch(ranks: int, folder: str) -> None:
    """Starts this script again on every rank."""
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    launcher = Path(sys.executable).parent / "mpiexec"
    command = [str(launcher), "--oversubscribe", "-n", str(ranks), sys.executable, *sys.argv, "--folder", folder]
    subprocess.run(command, check=True, env=environment)


def measure(folder: Path, options: argparse.Namespace) -> None:
    """On every rank: the placed program and, on rank 0, the whole one, in turns."""
    import onnxruntime
    from mpi4py import MPI
    from partc.runtime import load

    comm = MPI.COMM_WORLD
    x = np.random.default_rng(1).standard_normal((options.batch, options.width), dtype=np.float32)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.inter_op_num_threads = 1
    whole = (
        onnxruntime.InferenceSession(str(folder / "model.onnx"), settings, providers=["CPUExecutionProvider"])
        if comm.rank == 0
        else None
    )
    times: dict[str, list[float]] = {"whole": [], "placed": []}
    difference = 0.0
    with load(str(folder / "build"), comm, threads=1) as program:
        for turn in range(options.turns + 1):
            for side in ("whole", "placed"):
                for _ in range(options.steps):
                    start = time.perf_counter()
                    if side == "placed":
                        outputs = program({"h0": x} if program.inputs else {})
                    elif whole:
                        want = whole.run(None, {"h0": x})
                    if turn:
                        times[side].append(time.perf_counter() - start)
                idle_barrier(comm)
            if comm.rank == 0:
                difference = max(difference, float(np.abs(outputs[f"h{options.layers}"] - want[0]).max()))
    if comm.rank == 0:
        whole_ms, placed_ms = (statistics.median(times[side]) * 1e3 for side in ("whole", "placed"))
        print(
            f"{options.layers} layers of width {options.width}, batch {options.batch}, {comm.size} ranks on "
            f"{os.cpu_count()} cores, one thread a rank"
        )
        print(
            f"whole {whole_ms:.2f} ms, placed {placed_ms:.2f} ms, ratio {placed_ms / whole_ms:.3f} (at most 1.10 wanted)"
        )
        print(f"largest difference {difference:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 24), ("width", 1024), ("batch", 32), ("ranks", 4), ("steps", 20), ("turns", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        measure(options.folder, options)
        return
    with tempfile.TemporaryDirectory() as name:
        from partc.compiler import compile_model

        folder = Path(name)
        generate(folder, options.layers, options.width, options.ranks)
        compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
        launch(options.ranks, name)


if __name__ == "__main__":
    main()
