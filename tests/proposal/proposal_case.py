"""A transformer block of plain ONNX nodes, as an exporter writes it, for proposals of plans."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
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


def projections(g: Graph, layer: str, h: str, packed: bool) -> list[str]:
    """Queries, keys and values; `packed` of one product."""
    if not packed:
        return [g.linear(f"{layer}.attn.{name}", h, WIDTH, WIDTH) for name in "qkv"]
    made = [f"{layer}.attn.{name}.out" for name in "qkv"]
    both = g.linear(f"{layer}.attn.qkv", h, WIDTH, 3 * WIDTH)
    g.nodes.append(helper.make_node("Split", [both], made, f"{layer}.attn.split", axis=2, num_outputs=3))
    return made


def transformer(layers: int = 3, batch: int | str = "batch", packed: bool = False) -> onnx.ModelProto:
    g = Graph()
    split, joined = g.integers("split", 0, 0, HEADS, WIDTH // HEADS), g.integers("joined", 0, 0, WIDTH)
    x = g.node("embed.Gather", "Gather", g.weight("embed.weight", WORDS, WIDTH), "ids")
    for layer in (f"layers.{k}" for k in range(layers)):
        h = g.norm(f"{layer}.norm1", x)
        heads = []
        for name, order, made in zip(
            "qkv", ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)), projections(g, layer, h, packed), strict=True
        ):
            one = g.node(f"{layer}.{name}_split", "Reshape", made, split)
            heads.append(g.node(f"{layer}.{name}_heads", "Transpose", one, perm=order))
        scores = g.node(f"{layer}.attn.scores", "Softmax", g.node(f"{layer}.attn.qk", "MatMul", *heads[:2]))
        mixed = g.node(f"{layer}.attn.mix", "MatMul", scores, heads[2])
        back = g.node(f"{layer}.attn.back", "Transpose", mixed, perm=(0, 2, 1, 3))
        out = g.linear(f"{layer}.attn.out", g.node(f"{layer}.attn.join", "Reshape", back, joined), WIDTH, WIDTH)
        x = g.node(f"{layer}.add1", "Add", x, out)
        h = g.node(f"{layer}.act", "Relu", g.linear(f"{layer}.up", g.norm(f"{layer}.norm2", x), WIDTH, HIDDEN))
        x = g.node(f"{layer}.add2", "Add", x, g.linear(f"{layer}.down", h, HIDDEN, WIDTH))
    logits = g.node("head.MatMul", "MatMul", g.norm("norm", x), g.weight("head.weight", WIDTH, WORDS))
    graph = helper.make_graph(
        g.nodes,
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [batch, "seq"])],
        [helper.make_tensor_value_info(logits, TensorProto.FLOAT, [batch, "seq", WORDS])],
        g.weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def ids(batch: int, seq: int) -> dict[str, np.ndarray]:
    return {"ids": np.random.default_rng(seq).integers(0, WORDS, (batch, seq))}
