"""Two independent branches on two targets: the time of a step over the sum of both branches alone.

    python tests/benchmarks/target_overlap.py [--steps 600] [--size 300] [--layers 4]

Both targets are the CPU, one thread each, so the share can be 0.5 at best where two cores are free; the goal is 0.65. Each branch alone is
the same artifact with the other branch cut down to one small layer. The shortest step counts, and beside it stands how many cores the
process had: with less than two in `both` the machine had other work, and the share says nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local

PLAN = 'ranks: 1\ntarget: {"**": cpu, "right*": cuda}\n'


def model(left: int, right: int, size: int) -> onnx.ModelProto:
    """Two chains of so many layers from one input."""
    nodes, weights = [], []
    random = np.random.default_rng(0)
    for name, layers in (("left", left), ("right", right)):
        before = "x"
        for k in range(layers):
            width = size if layers > 1 else 8
            shape = (size if k == 0 else width, width)
            array = (random.standard_normal(shape) / np.sqrt(size)).astype(np.float32)
            weights.append(onnx.numpy_helper.from_array(array, f"{name}{k}.w"))
            made = f"{name}_out" if k == layers - 1 else f"{name}{k}.y"
            nodes.append(onnx.helper.make_node("MatMul", [before, f"{name}{k}.w"], [made], name=f"{name}{k}"))
            before = made
    ports = [onnx.helper.make_tensor_value_info(name, 1, ["batch", None]) for name in ("left_out", "right_out")]
    x = onnx.helper.make_tensor_value_info("x", 1, ["batch", size])
    graph = onnx.helper.make_graph(nodes, "branches", [x], ports, weights)
    return onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 21)])


def measured(folder: Path, size: int, steps: int) -> tuple[float, float, float]:
    """The shortest step in seconds, the median of those in which both targets computed, and the cores that the process had."""
    x = np.random.default_rng(1).standard_normal((size, size)).astype(np.float32)
    times = []
    with load_local(folder, threads=1, devices={"cuda": "cpu"}) as program:
        profiler = program.ranks[0].record_times()
        program(x=x)
        used, begun = time.process_time(), time.perf_counter()
        for _ in range(steps):
            begin = time.perf_counter()
            program(x=x)
            times.append(time.perf_counter() - begin)
        cores = (time.process_time() - used) / (time.perf_counter() - begun)
        overlap = [one.overlap for one in profiler._steps]
    return min(times), statistics.median(overlap), cores


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--size", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, left, right in (("left", given.layers, 1), ("right", 1, given.layers), ("both", *[given.layers] * 2)):
            out = Path(scratch) / name
            source = Source(from_proto(model(left, right, given.size), Path("model.onnx")))
            compile_source(source, parse_plan(PLAN, "plan.yaml"), out)
            found[name] = measured(out, given.size, given.steps)
            step, overlap, cores = found[name]
            print(f"{name:5} {step * 1e3:8.2f} ms a step, both at once {overlap * 1e3:8.2f} ms, {cores:.2f} cores")
    share = found["both"][0] / (found["left"][0] + found["right"][0])
    print(f"time over the sum of both branches: {share:.3f} (goal: at most 0.65)")


if __name__ == "__main__":
    main()
