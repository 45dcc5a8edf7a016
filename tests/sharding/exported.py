"""Blocks of models node by node as torch's exporter writes them: shapes read at run time, targets joined of dims, heads repeated."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


class Exported:
    """A graph in the making: `add` appends a node and gives its output's name, `weight` and `ints` initializers."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, onnx.TensorProto] = {}
        self.random = np.random.default_rng(seed)

    def add(self, op: str, inputs: list[str], name: str, outputs: int = 1, **attributes: Any) -> Any:
        made = [name] if outputs == 1 else [f"{name}.{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, made, name, **attributes))
        return made[0] if outputs == 1 else made

    def weight(self, name: str, *shape: int) -> str:
        array = (self.random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        self.weights[name] = numpy_helper.from_array(array, name)
        return name

    def ints(self, *numbers: int, scalar: bool = False) -> str:
        name = ("i" if scalar else "ints") + "_".join(map(str, numbers)).replace("-", "m")
        array = np.array(numbers[0] if scalar else numbers, np.int64)
        self.weights[name] = numpy_helper.from_array(array, name)
        return name

    def dim(self, value: str, k: int) -> str:
        name = f"{value}_dim{k}"
        if not any(name in node.output for node in self.nodes):
            self.add("Shape", [value], name, start=k, end=k + 1)
        return name

    def reshape(self, value: str, target: list[str | int], name: str) -> str:
        parts = [self.ints(part) if isinstance(part, int) else part for part in target]
        return str(self.add("Reshape", [value, self.add("Concat", parts, f"{name}_shape", axis=0)], name))

    def linear(self, value: str, rows: int, columns: int, name: str, bias: bool = False) -> str:
        made = self.add("MatMul", [value, self.weight(f"{name}.weight", rows, columns)], name)
        return str(self.add("Add", [made, self.weight(f"{name}.bias", columns)], f"{name}.add")) if bias else str(made)

    def attend(self, q: str, k: str, v: str, heads: int, key_heads: int, size: int, *, flat: bool = True) -> str:
        """Queries, keys and values (batch, seq, heads * size) to (batch, seq, heads * size); `flat`: K turned with its dims merged."""
        b, s = self.dim("x", 0), self.dim("x", 1)
        split = {}
        for value, count, name in ((q, heads, "q"), (k, key_heads, "k"), (v, key_heads, "v")):
            viewed = self.reshape(value, [b, s, -1, size], f"{name}_view")
            split[name] = self.add("Transpose", [viewed], f"{name}_heads", perm=[0, 2, 1, 3])
            if count < heads:
                apart = self.add("Unsqueeze", [split[name], self.ints(2)], f"{name}_apart")
                target = [b, self.ints(count), self.ints(heads // count), s, self.ints(size)]
                shape = self.add("Concat", target, f"{name}_times", axis=0)
                repeated = self.add("Expand", [apart, shape], f"{name}_repeated")
                split[name] = self.reshape(repeated, [b, heads, s, size], f"{name}_all")
        if flat:
            merged = self.reshape(split["k"], [-1, s, size], "k_merged")
            turned = self.add("Transpose", [merged], "k_turned", perm=[0, 2, 1])
            turned = self.reshape(turned, [b, heads, size, s], "k_apart_again")
        else:
            turned = self.add("Transpose", [split["k"]], "k_turned", perm=[0, 1, 3, 2])
        scores = self.add("Softmax", [self.add("MatMul", [split["q"], turned], "scores")], "shares", axis=-1)
        mixed = self.add("MatMul", [scores, split["v"]], "mixed")
        back = self.add("Transpose", [mixed], "mixed_back", perm=[0, 2, 1, 3])
        return self.reshape(back, [b, s, -1], "joined")

    def model(self, width: int, output: str, shape: list[str | int] | None = None, opset: int = 21) -> onnx.ModelProto:
        """The graph from `x` (batch, seq, width) to `output`."""
        graph = helper.make_graph(
            self.nodes,
            "exported",
            [helper.make_tensor_value_info("x", 1, ["batch", "seq", width])],
            [helper.make_tensor_value_info(output, 1, shape or ["batch", "seq", width])],
            list(self.weights.values()),
        )
        return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", opset)])


def steps(width: int, *sizes: tuple[int, int]) -> list[dict[str, np.ndarray]]:
    """Inputs of these batches and lengths."""
    random = np.random.default_rng(5)
    return [{"x": random.standard_normal((b, s, width), dtype=np.float32)} for b, s in sizes or ((2, 5), (3, 7))]
