"""Compiles a generated graph of many nodes with dynamic shapes: the time by the number of nodes.

    python tests/benchmarks/compile_nodes.py [--nodes 20000] [--ranks 8]

Prints seconds (at most 15 wanted for 20,000 nodes) and the seconds per pass.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

BLOCK = 16


def generate(path: Path, nodes: int) -> int:
    """Blocks of attention-like ops with Shape, Gather, Concat and Reshape, as exporters write them; gives the number of blocks."""
    blocks = nodes // BLOCK
    made: list[onnx.NodeProto] = []
    weights = [
        numpy_helper.from_array(np.ones((16, 16), np.float32), "w"),
        numpy_helper.from_array(np.array([0], np.int64), "zero"),
        numpy_helper.from_array(np.array([1], np.int64), "one"),
        numpy_helper.from_array(np.array([4, 4], np.int64), "heads"),
        numpy_helper.from_array(np.array([16], np.int64), "width"),
    ]

    def add(block: int, op: str, inputs: list[str], output: str, **attributes: object) -> str:
        name = f"b{block}.{output}"
        made.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    x = "x"
    for k in range(blocks):
        shape = add(k, "Shape", [x], "shape")
        batch = add(k, "Gather", [shape, "zero"], "batch")
        seq = add(k, "Gather", [shape, "one"], "seq")
        split = add(k, "Concat", [batch, seq, "heads"], "split", axis=0)
        joined = add(k, "Concat", [batch, seq, "width"], "joined", axis=0)
        q = add(k, "MatMul", [x, "w"], "q")
        q = add(k, "Reshape", [q, split], "q4")
        q = add(k, "Transpose", [q], "qt", perm=[0, 2, 1, 3])
        kt = add(k, "Transpose", [q], "kt", perm=[0, 1, 3, 2])
        a = add(k, "MatMul", [q, kt], "scores")
        a = add(k, "Softmax", [a], "weights", axis=-1)
        a = add(k, "MatMul", [a, q], "mixed")
        a = add(k, "Transpose", [a], "back", perm=[0, 2, 1, 3])
        a = add(k, "Reshape", [a, joined], "flat")
        a = add(k, "Relu", [a], "relu")
        x = add(k, "Add", [x, a], "out")
    inputs = [helper.make_tensor_value_info("x", 1, ["batch", "seq", 16])]
    outputs = [helper.make_tensor_value_info(x, 1, None)]
    onnx.save(
        helper.make_model(
            helper.make_graph(made, "many", inputs, outputs, weights),
            ir_version=11,
            opset_imports=[helper.make_opsetid("", 21)],
        ),
        path,
    )
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20000)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        blocks = generate(folder / "model.onnx", options.nodes)
        rows = [
            f'  "b[{r * blocks // options.ranks}-{(r + 1) * blocks // options.ranks - 1}]": {r}'
            for r in range(options.ranks)
        ]
        (folder / "plan.yaml").write_text("\n".join([f"ranks: {options.ranks}", "placement:", *rows, ""]))
        command = [
            sys.executable,
            "-m",
            "partc.cli",
            "compile",
            str(folder / "model.onnx"),
            "--plan",
            str(folder / "plan.yaml"),
            "-o",
            str(folder / "build"),
        ]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        total = time.perf_counter() - start
        print(
            f"{blocks * BLOCK} nodes over {options.ranks} ranks: partc compile took {total:.1f} s (at most 15 wanted)"
        )
        from partc.compiler import pipeline
        from partc.compiler.plan.read import read_plan

        start = time.perf_counter()
        program = pipeline.start(pipeline.load(folder / "model.onnx"), read_plan(folder / "plan.yaml"), "model.onnx")
        print(f"  load       {time.perf_counter() - start:6.2f} s")
        for step in pipeline.PASSES:
            start = time.perf_counter()
            program = step(program)
            print(f"  {step.__name__:10s} {time.perf_counter() - start:6.2f} s")
        print(f"  {len(program.events)} transfers")


if __name__ == "__main__":
    main()
