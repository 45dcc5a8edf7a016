"""Random models of matrices whose ops are sharded at random, for hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from random_placement_case import delivered

WIDTH = 12
UNARY = ("Relu", "Neg", "Tanh", "Abs", "Identity")
BINARY = ("Add", "Sub", "Mul", "Max")


class Graph:
    """Grows a model of values [batch, 12] and [batch, 6, 12]; every choice is drawn. `ops` remembers the ranks of the operands."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.values: dict[int, list[str]] = {2: ["x"], 3: ["z"]}
        self.ops: list[tuple[str, list[int]]] = []

    def pick(self, rank: int) -> str:
        fitting = self.values[rank]
        return fitting[max(0, len(fitting) - 1 - self.draw(st.integers(0, 3)))]

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        array = np.random.default_rng(len(self.weights)).standard_normal(shape) / 4
        self.weights.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def integers(self, *numbers: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(numbers, np.int64), name))
        return name

    def add(self, op: str, inputs: list[str], out: int, ranks: list[int], **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        node = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=node, **attributes))
        self.values[out].append(name)
        self.ops.append((node, ranks))
        return name

    def grow(self) -> None:
        rank = self.draw(st.sampled_from([2, 3]))
        x = self.pick(rank)
        match self.draw(
            st.sampled_from(
                [
                    "unary",
                    "binary",
                    "matmul",
                    "bias",
                    "softmax",
                    "norm",
                    "reshape",
                    "transpose",
                    "mean",
                    "concat",
                    "gemm",
                ]
            )
        ):
            case "unary":
                self.add(self.draw(st.sampled_from(UNARY)), [x], rank, [rank])
            case "binary":
                self.add(self.draw(st.sampled_from(BINARY)), [x, self.pick(rank)], rank, [rank, rank])
            case "matmul":
                self.add("MatMul", [x, self.weight(WIDTH, WIDTH)], rank, [rank, 2])
            case "bias":
                self.add("Add", [x, self.weight(WIDTH)], rank, [rank, 1])
            case "softmax":
                self.add("Softmax", [x], rank, [rank], axis=self.draw(st.sampled_from([-1, rank - 2])))
            case "norm":
                self.add("LayerNormalization", [x, self.weight(WIDTH)], rank, [rank, 1])
            case "reshape":
                y = self.pick(3)
                flat = self.add("Reshape", [y, self.integers(-1, 72)], 2, [3, 1])
                self.values[2].remove(flat)
                back = self.add("Reshape", [flat, self.integers(-1, 6, WIDTH)], 3, [2, 1])
                assert back
            case "transpose":
                y = self.add("Transpose", [self.pick(3)], 3, [3], perm=[0, 2, 1])
                self.values[3].remove(y)
                z = self.add("MatMul", [self.pick(3), y], 3, [3, 3])
                self.values[3].remove(z)
                self.add("MatMul", [z, self.pick(3)], 3, [3, 3])
            case "mean":
                mean = self.add(
                    "ReduceMean", [x, self.integers(self.draw(st.integers(0, rank - 1)))], rank, [rank, 1], keepdims=1
                )
                self.values[rank].remove(mean)
                self.add("Sub", [x, mean], rank, [rank, rank])
            case "concat":
                both = self.add("Concat", [x, self.pick(rank)], rank, [rank, rank], axis=rank - 1)
                self.values[rank].remove(both)
                self.add("MatMul", [both, self.weight(2 * WIDTH, WIDTH)], rank, [rank, 2])
            case "gemm":
                self.add("Gemm", [self.pick(2), self.weight(WIDTH, WIDTH), self.weight(WIDTH)], 2, [2, 2, 1], transB=1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[onnx.ModelProto, str]:
    graph = Graph(draw)
    for _ in range(draw(st.integers(2, 9))):
        graph.grow()
    read = {name for node in graph.nodes for name in node.input}
    made = [node.output[0] for node in graph.nodes]
    outputs = [name for name in made if name not in read]
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "random",
            [
                helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH]),
                helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 6, WIDTH]),
            ],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            graph.weights,
        ),
        ir_version=10,
        opset_imports=[helper.make_opsetid("", 21)],
    )
    ranks = draw(st.sampled_from([2, 3, 4, 6]))
    shards = [n for n in range(1, ranks + 1) if ranks % n == 0]
    lines = [
        f"ranks: {ranks}",
        "symbols: {batch: {divisor: 12}}",
        f"dataset: {draw(st.sampled_from(['full_batch', 'data_parallel']))}",
        "sharding:",
    ]
    for node, operands in graph.ops:
        if draw(st.integers(0, 2)) == 0:
            given = draw(st.integers(0, len(operands) - 1))
            cut = [1] * operands[given]
            first, second = draw(st.integers(0, len(cut) - 1)), draw(st.integers(0, len(cut) - 1))
            cut[first] = draw(st.sampled_from(shards))
            if first != second:
                cut[second] = draw(st.sampled_from([n for n in shards if ranks // cut[first] % n == 0]))
            cuts = ["null"] * len(operands)
            cuts[given] = str(cut)
            lines.append(f"  {node}: {{in: [{', '.join(cuts)}]}}")
    if lines[-1] == "sharding:":
        lines[-1] = f"mesh: {{a: {ranks}}}"
    if draw(st.booleans()):
        some = sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks)))
        placed = draw(st.sampled_from([node for node, _ in graph.ops]))
        if f"  {placed}:" not in "\n".join(lines):
            lines += ["placement:", f"  {placed}: {some}"]
    lines.append(delivered(draw, ranks))
    return model, "\n".join([*lines, ""])
