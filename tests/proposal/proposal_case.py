"""A transformer block of plain ONNX nodes, as an exporter writes it, for proposals of plans."""

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source

WIDTH, HEADS, HIDDEN, WORDS = 12, 6, 30, 42


class Graph:
    """Nodes with dotted names and seeded weights."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(6)

    def node(self, name: str, op: str, *inputs: str, **attributes) -> str:
        self.nodes.append(helper.make_node(op, inputs, [f"{name}.out"], name, **attributes))
        return f"{name}.out"

    def weight(self, name: str, *shape: int) -> str:
        array = (self.random.standard_normal(shape) / 4).astype(np.float32)
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def integers(self, name: str, *numbers: int) -> str:
        self.weights.append(numpy_helper.from_array(np.array(numbers, np.int64), name))
        return name

    def linear(self, name: str, x: str, rows: int, columns: int) -> str:
        made = self.node(f"{name}.MatMul", "MatMul", x, self.weight(f"{name}.weight", rows, columns))
        return self.node(f"{name}.Add", "Add", made, self.weight(f"{name}.bias", columns))

    def norm(self, name: str, x: str) -> str:
        return self.node(f"{name}.Norm", "LayerNormalization", x, self.weight(f"{name}.weight", WIDTH))


def source(proto: onnx.ModelProto) -> Source:
    return Source(from_proto(proto, Path("model.onnx")))
