"""Random models of any ops whose nodes are placed at random, for hypothesis."""

from __future__ import annotations

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

WIDTHS = (3, 5, 6)
UNARY = ("Relu", "Neg", "Tanh", "Abs", "Identity")
BINARY = ("Add", "Sub", "Mul", "Max")


class Builder:
    """Grows a model out of values of shape [batch, width]; every choice is drawn."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.values: list[tuple[str, int]] = [("x", 3), ("z", 5)]

    def pick(self, width: int | None = None) -> tuple[str, int]:
        fitting = [value for value in self.values if width is None or value[1] == width]
        # late values more often, so that graphs get deep
        return fitting[max(0, len(fitting) - 1 - self.draw(st.integers(0, 4)))]

    def constant(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def add(self, op: str, inputs: list[str], outputs: int = 1, **attributes: object) -> list[str]:
        k = len(self.nodes)
        names = [f"v{k}_{j}" for j in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, name=f"n{k}", **attributes))
        return names

    def grow(self) -> None:
        kind = self.draw(
            st.sampled_from(["unary", "binary", "matmul", "split", "concat", "shape", "expand", "if", "batch", "mask"])
        )
        name, width = self.pick()
        match kind:
            case "unary":
                out = self.add(self.draw(st.sampled_from(UNARY)), [name])
            case "binary":
                out = self.add(self.draw(st.sampled_from(BINARY)), [name, self.pick(width)[0]])
            case "matmul":
                other = self.draw(st.sampled_from(WIDTHS))
                weight = np.linspace(-0.5, 0.5, width * other, dtype=np.float32).reshape(width, other)
                out, width = self.add("MatMul", [name, self.constant(weight)]), other
            case "split" if width == 6:
                first, second = self.add("Split", [name], 2, axis=1, num_outputs=2)
                self.values.append((first, 3))
                out, width = [second], 3
            case "concat" if width == 3:
                out, width = self.add("Concat", [name, self.pick(3)[0]], axis=1), 6
            case "shape":
                (shape,) = self.add("Shape", [self.pick()[0]])
                (batch,) = self.add("Gather", [shape, self.constant(np.array([0], np.int64))])
                (target,) = self.add("Concat", [batch, self.constant(np.array([width], np.int64))], axis=0)
                out = self.add("Reshape", [name, target])
            case "expand":
                (shape,) = self.add("Shape", [name])
                out = self.add("Expand", [self.constant(np.full((1, width), 0.5, np.float32)), shape])
            case "if":
                (flag,) = self.add(
                    "Less", [*self.add("ReduceMax", [name], keepdims=0), self.constant(np.array(0.5, np.float32))]
                )
                other = self.pick(width)[0]
                out = self.add(
                    "If", [flag], then_branch=branch("Add", name, other), else_branch=branch("Sub", name, other)
                )
            case "mask":
                (square,) = self.add("MatMul", [name, *self.add("Transpose", [self.pick(width)[0]], perm=[1, 0])])
                out = self.add("MatMul", [*self.add("Trilu", [square], upper=self.draw(st.integers(0, 1))), name])
            case "batch":
                (mean,) = self.add("ReduceMean", [name, self.constant(np.array([0], np.int64))], keepdims=1)
                out = self.add("Sub", [name, mean])
            case _:
                out = self.add("Neg", [name])
        self.values.append((out[0], width))


def branch(op: str, a: str, b: str) -> onnx.GraphProto:
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    return helper.make_graph([helper.make_node(op, [a, b], ["out"], name="inner")], "branch", [], [out])


@st.composite
def cases(draw: st.DrawFn) -> tuple[onnx.ModelProto, str]:
    builder = Builder(draw)
    for _ in range(draw(st.integers(2, 14))):
        builder.grow()
    read = {name for node in builder.nodes for name in node.input}
    outputs = [value for value in builder.values[2:] if value[0] not in read or draw(st.integers(0, 5)) == 0]
    graph = helper.make_graph(
        builder.nodes,
        "random",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])
            for name, width in builder.values[:2]
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width]) for name, width in outputs],
        builder.weights,
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    ranks = draw(st.sampled_from([2, 3, 6]))
    share = draw(st.sampled_from([1, 2, 4]))
    rules = [
        f"  {node.name}: {draw(st.integers(0, ranks - 1))}"
        for node in builder.nodes
        if draw(st.integers(1, share)) == 1
    ]
    return model, "\n".join([f"ranks: {ranks}", "placement:", *rules, delivered(draw, ranks), ""])


def delivered(draw: st.DrawFn, ranks: int) -> str:
    """The line of a plan that says where outputs are delivered: nowhere, on one rank, or on ranks in any order."""
    order = draw(st.permutations(range(ranks)))[: draw(st.integers(1, ranks))]
    return draw(
        st.sampled_from(["", "outputs: cut", "outputs: producer", f"outputs: {ranks - 1}", f"outputs: {[*order]}"])
    )
