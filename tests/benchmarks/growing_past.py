"""A decoder's step whose `past` takes a new size every time, against one whose `past` has one size; one artifact, in process.

    python tests/benchmarks/growing_past.py [--layers 6] [--width 256] [--sizes 32] [--ranks 1]

Each layer appends a key and a value to its past. One side takes as many sizes as are said, one after the other and then once more
from the first (32 sizes twice: 1.15 times the other side is wanted); the other takes the middle one as often. Sides run in turns, on
one thread; prints the medians of a step in microseconds, first and second time apart, and the ratio. With more ranks these are
threads of this process, and the cut is over heads.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from partc.compiler import compile_model
from partc.runtime import load_local

_HEADS = 8


def model(layers: int, width: int) -> onnx.ModelProto:
    """One token through a decoder: `x` [1, 1, width], by layer `k_in` and `v_in` [1, 8, past, width/8]."""
    head = width // _HEADS
    inputs, outputs, nodes, weights = ["float[1, 1, W] x"], ["float[1, 1, W] y"], [], dict[str, np.ndarray]()
    chance, last = np.random.default_rng(0), "x"
    for n in range(layers):
        for one in "qkvo":
            weights[f"w{one}{n}"] = chance.normal(0, width**-0.5, (width, width)).astype(np.float32)
        weights[f"up{n}"] = chance.normal(0, width**-0.5, (width, 4 * width)).astype(np.float32)
        weights[f"down{n}"] = chance.normal(0, (4 * width) ** -0.5, (4 * width, width)).astype(np.float32)
        inputs += [f"float[1, 8, past, D] {one}_in{n}" for one in "kv"]
        outputs += [f"float[1, 8, P, D] {one}_out{n}" for one in "kv"]
        for one in "qkv":
            nodes += [
                f"[{one}{n}] {one}f{n} = MatMul ({last}, w{one}{n})",
                f"[{one}r{n}] {one}h{n} = Reshape ({one}f{n}, parted)",
                f"[{one}t{n}] {one}s{n} = Transpose <perm = [0, 2, 1, 3]> ({one}h{n})",
            ]
        nodes += [f"[{one}c{n}] {one}_out{n} = Concat <axis = 2> ({one}_in{n}, {one}s{n})" for one in "kv"]
        nodes += [
            f"[kT{n}] kT{n} = Transpose <perm = [0, 1, 3, 2]> (k_out{n})",
            f"[score{n}] score{n} = MatMul (qs{n}, kT{n})",
            f"[soft{n}] soft{n} = Softmax (score{n})",
            f"[mix{n}] mix{n} = MatMul (soft{n}, v_out{n})",
            f"[back{n}] back{n} = Transpose <perm = [0, 2, 1, 3]> (mix{n})",
            f"[flat{n}] flat{n} = Reshape (back{n}, whole)",
            f"[o{n}] o{n} = MatMul (flat{n}, wo{n})",
            f"[add{n}] a{n} = Add ({last}, o{n})",
            f"[up{n}] u{n} = MatMul (a{n}, up{n})",
            f"[act{n}] t{n} = Tanh (u{n})",
            f"[down{n}] d{n} = MatMul (t{n}, down{n})",
            f"[sum{n}] {'y' if n == layers - 1 else f'x{n}'} = Add (a{n}, d{n})",
        ]
        last = f"x{n}"
    ends = f"({', '.join(inputs)}) => ({', '.join(outputs)})".replace("W]", f"{width}]").replace("D]", f"{head}]")
    text = f'<ir_version: 10, opset_import: ["": 21]> decoder {ends} {{ {" ".join(nodes)} }}'
    proto = onnx.parser.parse_model(text)
    weights |= {"parted": np.array([1, 1, -1, head], np.int64), "whole": np.array([1, 1, -1], np.int64)}
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return proto


def plan(ranks: int, layers: int) -> str:
    """The cut over heads, of which each rank keeps the past of its own."""
    if ranks == 1:
        return "ranks: 1\n"
    styles = ", ".join(f"{name}?: colwise" for name in ("q", "k", "v", "up"))
    past = ", ".join(f"{one}_in{n}: [null, tp, null, null]" for one in "kv" for n in range(layers))
    return f"""ranks: {ranks}
mesh: {{tp: {ranks}}}
dataset: {{{past}}}
outputs: cut
sharding: {{{styles}, o?: rowwise, down?: rowwise}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("width", 256), ("sizes", 32), ("ranks", 1), ("turns", 5), ("first", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        onnx.save(model(options.layers, options.width), folder / "model.onnx")
        (folder / "plan.yaml").write_text(plan(options.ranks, options.layers))
        compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
        chance, head = np.random.default_rng(1), options.width // _HEADS
        sizes = [options.first + k for k in range(options.sizes)]

        def given(size: int) -> dict[str, np.ndarray]:
            shape = (1, _HEADS, size, head)
            past = {
                f"{one}_in{n}": chance.normal(size=shape).astype(np.float32)
                for one in "kv"
                for n in range(options.layers)
            }
            return {"x": chance.normal(size=(1, 1, options.width)).astype(np.float32), **past}

        batches = {size: given(size) for size in sizes}
        middle = [given(sizes[len(sizes) // 2]) for _ in range(2)]  # no step is given the arrays of the last one
        took: dict[str, list[float]] = {"one size": [], "a new size": [], "a size again": []}
        for _ in range(options.turns):
            with load_local(folder / "build", threads=1) as program:
                program(middle[0])
                for turn in ("one size", "a new size", "a size again"):
                    for size in sizes:
                        inputs = middle[size % 2] if turn == "one size" else batches[size]
                        start = time.perf_counter()
                        program(inputs)
                        took[turn].append(time.perf_counter() - start)
        medians = {turn: 1e6 * statistics.median(times) for turn, times in took.items()}
        both = 1e6 * statistics.median([*took["a new size"], *took["a size again"]])
        for turn, median in medians.items():
            print(f"{turn:14} {median:8.0f} us, {median / medians['one size']:.2f} times")
        print(f"{options.sizes} sizes twice against one: {both / medians['one size']:.2f} times (1.15 wanted)")


if __name__ == "__main__":
    main()
