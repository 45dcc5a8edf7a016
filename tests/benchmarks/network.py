"""The transformer that the benchmarks measure, as ONNX, and the plans that cut it; its weights come from a seed.

    Sizes(layers=6, width=512, heads=8, sequence=128)             an encoder: x[batch, sequence, width] -> y
    Sizes(layers=48, ..., vocabulary=50304, stored=False)         a GPT: ids[batch, sequence] -> logits, weights are a hole

A layer is norm, attention, sum, norm, two linears with a Gelu between them, sum. Weights are named `h.0.attention.query.weight`;
a linear's is [in, out]. Queries, keys and values are three linears, so that a cut over heads is a cut of their columns.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[np.float32]
_DATA = "model.data"
_WIDE, _NARROW = ("attention.query", "attention.key", "attention.value", "up"), ("attention.out", "down")


@dataclass(frozen=True)
class Sizes:
    """A network; with a `vocabulary` it begins with an embedding, masks what lies ahead, and ends with logits.

    Weights that are not `stored` are a file of the right length that is one hole: it takes no disk, and a compile reads none
    of it before it writes an artifact.
    """

    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int = 0
    stored: bool = True

    def weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes in the order in which the seed fills them."""
        if self.vocabulary:
            yield "tokens.weight", (self.vocabulary, self.width)
            yield "positions.weight", (self.sequence, self.width)
        for k in range(self.layers):
            for name in ("norm1", "norm2"):
                yield f"h.{k}.{name}.weight", (self.width,)
                yield f"h.{k}.{name}.bias", (self.width,)
            for name in (*_WIDE, *_NARROW):
                rows = self.width * (4 if name == "down" else 1)
                columns = self.width * (4 if name == "up" else 1)
                yield f"h.{k}.{name}.weight", (rows, columns)
                yield f"h.{k}.{name}.bias", (columns,)
        yield "norm.weight", (self.width,)
        yield "norm.bias", (self.width,)
        if self.vocabulary:
            yield "head.weight", (self.width, self.vocabulary)


def seeded(sizes: Sizes) -> dict[str, Array]:
    """The weights: normal, matrices over the root of their rows, norms around one."""
    random = np.random.default_rng(0)
    found = {}
    for name, shape in sizes.weights():
        values = random.standard_normal(shape, dtype=np.float32)
        if len(shape) > 1:
            values /= shape[0] ** 0.5
        else:
            values = values * np.float32(0.1) + np.float32(name.endswith("weight"))
        found[name] = values
    return found


def generate(folder: Path, sizes: Sizes) -> Path:
    """Writes `model.onnx` and, where weights are stored, `weights.npz`; gives the model's path."""
    build = _Build(sizes)
    if sizes.stored:
        weights = seeded(sizes)
        np.savez(folder / "weights.npz", **weights)
        tensors = [numpy_helper.from_array(values, name) for name, values in weights.items()]
    else:
        tensors = list(_holes(sizes))
        with (folder / _DATA).open("wb") as file:
            file.truncate(sum(4 * math.prod(shape) for _, shape in sizes.weights()))
    x = build.network()
    given = (
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", sizes.sequence])
        if sizes.vocabulary
        else helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", sizes.sequence, sizes.width])
    )
    made = helper.make_tensor_value_info(
        x, TensorProto.FLOAT, ["batch", sizes.sequence, sizes.vocabulary or sizes.width]
    )
    graph = helper.make_graph(build.nodes, "transformer", [given], [made], [*tensors, *build.constants.values()])
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, ir_version=11, opset_imports=[helper.make_opsetid("", 21)]), path)
    return path


def plan(ranks: int, mesh: str = "", head: bool = False) -> str:
    """Two collectives a layer: heads and the inner linear cut by columns, what follows by rows; batches by `dp` if there is."""
    lines = [f"ranks: {ranks}"]
    if mesh:
        lines += [f"mesh: {{{mesh}}}", "dataset: data_parallel", "symbols: {batch: {divisor: 64}}"]
    lines.append("sharding:")
    lines += [f'  "h.*.{name}": colwise' for name in _WIDE]
    lines += [f'  "h.*.{name}": rowwise' for name in _NARROW]
    lines += ['  "head": colwise'] * head
    return "\n".join([*lines, ""])


def _holes(sizes: Sizes) -> Iterator[TensorProto]:
    """The weights as external data in one file."""
    offset = 0
    for name, shape in sizes.weights():
        length = 4 * math.prod(shape)
        tensor = TensorProto(name=name, data_type=1, dims=shape, data_location=TensorProto.EXTERNAL)
        for key, text in (("location", _DATA), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.append(onnx.StringStringEntryProto(key=key, value=text))
        offset += length
        yield tensor


@dataclass
class _Build:
    sizes: Sizes
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, TensorProto] = field(default_factory=dict)

    def op(self, kind: str, path: str, *inputs: str, **attributes: int | float | list[int]) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [f"{path}.out"], name=path, **attributes))
        return f"{path}.out"

    def constant(self, name: str, value: npt.NDArray[np.generic]) -> str:
        self.constants.setdefault(name, numpy_helper.from_array(value, name))
        return name

    def network(self) -> str:
        x = "x"
        if self.sizes.vocabulary:
            tokens = self.op("Gather", "tokens.Gather", "tokens.weight", "ids")
            x = self.op("Add", "positions.Add", tokens, "positions.weight")
        for k in range(self.sizes.layers):
            x = self.layer(f"h.{k}", x)
        x = self.norm("norm", x)
        return self.op("MatMul", "head.MatMul", x, "head.weight") if self.sizes.vocabulary else x

    def layer(self, path: str, x: str) -> str:
        x = self.op("Add", f"{path}.sum1", x, self.attention(f"{path}.attention", self.norm(f"{path}.norm1", x)))
        inner = self.op("Gelu", f"{path}.gelu", self.linear(f"{path}.up", self.norm(f"{path}.norm2", x)))
        return self.op("Add", f"{path}.sum2", x, self.linear(f"{path}.down", inner))

    def norm(self, path: str, x: str) -> str:
        return self.op("LayerNormalization", path, x, f"{path}.weight", f"{path}.bias", axis=-1)

    def linear(self, path: str, x: str) -> str:
        product = self.op("MatMul", f"{path}.MatMul", x, f"{path}.weight")
        return self.op("Add", f"{path}.Add", product, f"{path}.bias")

    def attention(self, path: str, x: str) -> str:
        heads, width, sequence = self.sizes.heads, self.sizes.width, self.sizes.sequence
        apart = self.constant("apart", np.array([0, 0, heads, width // heads]))
        together = self.constant("together", np.array([0, 0, width]))
        scale = self.constant("scale", np.float32((width // heads) ** -0.5))
        turns = {"query": [0, 2, 1, 3], "key": [0, 2, 3, 1], "value": [0, 2, 1, 3]}
        turned = {}
        for name, order in turns.items():
            split = self.op("Reshape", f"{path}.{name}.heads", self.linear(f"{path}.{name}", x), apart)
            turned[name] = self.op("Transpose", f"{path}.{name}.turn", split, perm=order)
        scores = self.op("MatMul", f"{path}.scores", turned["query"], turned["key"])
        scores = self.op("Mul", f"{path}.scale", scores, scale)
        if self.sizes.vocabulary:
            ahead = self.constant("ahead", np.triu(np.ones((sequence, sequence), bool), 1))
            scores = self.op("Where", f"{path}.mask", ahead, self.constant("least", np.float32(-1e9)), scores)
        shares = self.op("Softmax", f"{path}.softmax", scores, axis=-1)
        mixed = self.op("MatMul", f"{path}.mix", shares, turned["value"])
        turned_back = self.op("Transpose", f"{path}.turn", mixed, perm=[0, 2, 1, 3])
        return self.linear(f"{path}.out", self.op("Reshape", f"{path}.join", turned_back, together))
