"""Random models that learn, with random plans: ops between parameters and a loss, cut, placed and put into stages as it is drawn.

`cases()` draws a `Case`: a model of ONNX whose values are [batch, 12] and [batch, 6, 12], a plan with `train:`, and batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

WIDTH, LENGTH, WORDS = 12, 6, 12
UNARY = ("Relu", "Neg", "Tanh", "Sigmoid", "Gelu", "Identity")
BINARY = ("Add", "Sub", "Mul", "Max")
KINDS = (
    "unary",
    "binary",
    "matmul",
    "bias",
    "softmax",
    "norm",
    "reshape",
    "attention",
    "mean",
    "concat",
    "gemm",
    "dropout",
    "embedding",
    "split",
    "sum",
    "scale",
    "batch_norm",
    "conv",
    "where",
    "slice",
    "expand",
    "largest",
)
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A model, the text of its plan and the batches of the steps."""

    model: onnx.ModelProto
    plan: str
    batches: tuple[int, ...]
    inputs: tuple[str, ...]

    def steps(self) -> list[dict[str, np.ndarray]]:
        """Numbers for the inputs."""
        random = np.random.default_rng(3)
        drawn = [
            {
                "x": random.standard_normal((b, WIDTH), dtype=np.float32),
                "z": random.standard_normal((b, LENGTH, WIDTH), dtype=np.float32),
                "ids": random.integers(0, WORDS, (b, LENGTH)),
                "t": random.standard_normal((b, WIDTH), dtype=np.float32),
                "labels": random.integers(0, WIDTH, b),
            }
            for b in self.batches
        ]
        return [{name: step[name] for name in self.inputs} for step in drawn]


class Learner:
    """Grows a model; every choice is drawn. `ops` remembers the ranks of the operands, `weights` are shared now and then."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.learned: list[str] = []
        self.values: dict[int, list[str]] = {2: ["x"], 3: ["z"]}
        self.ops: list[tuple[str, list[int]]] = []

    def pick(self, rank: int) -> str:
        fitting = self.values[rank]
        return fitting[max(0, len(fitting) - 1 - self.draw(st.integers(0, 2)))]

    def weight(self, *shape: int) -> str:
        known = [name for name in self.learned if self.weights[name].shape == shape]
        if known and self.draw(st.integers(0, 2)) == 0:
            return self.draw(st.sampled_from(known))
        array = np.random.default_rng(len(self.weights)).standard_normal(shape) / 3
        self.learned.append(self.constant(array.astype(np.float32)))
        return self.learned[-1]

    def constant(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = array
        return name

    def add(self, op: str, inputs: list[str], ranks: list[int], outputs: int = 1, **attributes: Any) -> list[str]:
        node = f"n{len(self.nodes)}"
        names = [f"v{len(self.nodes)}_{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, name=node, **attributes))
        self.ops.append((node, ranks))
        return names

    def put(self, op: str, inputs: list[str], out: int, ranks: list[int], **attributes: Any) -> str:
        (name,) = self.add(op, inputs, ranks, **attributes)
        self.values[out].append(name)
        return name

    def grow(self, kind: str = "") -> None:
        """Adds an op; one of a given kind is of the last value with positions."""
        draw, rank = self.draw, 3 if kind else self.draw(st.sampled_from([2, 3]))
        x, many = self.values[rank][-1] if kind else self.pick(rank), [rank, rank]
        integers = lambda *numbers: self.constant(np.array(numbers, np.int64))  # noqa: E731
        match kind or draw(st.sampled_from(KINDS)):
            case "unary":
                self.put(draw(st.sampled_from(UNARY)), [x], rank, [rank])
            case "binary":
                self.put(draw(st.sampled_from(BINARY)), [x, self.pick(rank)], rank, many)
            case "matmul":
                self.put("MatMul", [x, self.weight(WIDTH, WIDTH)], rank, [rank, 2])
            case "bias":
                self.put("Add", [x, self.weight(WIDTH)], rank, [rank, 1])
            case "softmax":
                self.put("Softmax", [x], rank, [rank], axis=draw(st.sampled_from([-1, rank - 2])))
            case "norm":
                self.put("LayerNormalization", [x, self.weight(WIDTH)], rank, [rank, 1], epsilon=1e-2)
            case "reshape":
                (flat,) = self.add("Reshape", [self.pick(3), integers(-1, LENGTH * WIDTH)], [3, 0])
                self.put("Reshape", [flat, integers(-1, LENGTH, WIDTH)], 3, [2, 0])
            case "attention":
                (turned,) = self.add("Transpose", [self.pick(3)], [3], perm=[0, 2, 1])
                (scores,) = self.add("MatMul", [self.pick(3), turned], [3, 3])
                (shares,) = self.add("Softmax", [scores], [3], axis=-1)
                self.put("MatMul", [shares, self.pick(3)], 3, [3, 3])
            case "mean":
                (mean,) = self.add("ReduceMean", [x, integers(draw(st.integers(0, rank - 1)))], [rank, 0], keepdims=1)
                self.put("Sub", [x, mean], rank, many)
            case "concat":
                (both,) = self.add("Concat", [x, self.pick(rank)], many, axis=rank - 1)
                self.put("MatMul", [both, self.weight(2 * WIDTH, WIDTH)], rank, [rank, 2])
            case "gemm":
                self.put("Gemm", [self.pick(2), self.weight(WIDTH, WIDTH), self.weight(WIDTH)], 2, [2, 2, 1], transB=1)
            case "dropout":
                self.put("Dropout", [x, self.constant(np.array(0.25, np.float32))], rank, [rank, 0])
            case "embedding":
                self.put("Gather", [self.weight(WORDS, WIDTH), "ids"], 3, [2, 2])
            case "split":
                parts = self.add("Split", [x], [rank], 2, axis=rank - 1, num_outputs=2)
                self.put("Concat", parts[::-1], rank, many, axis=rank - 1)
            case "sum":
                (total,) = self.add("ReduceSum", [self.pick(3), integers(1)], [3, 0], keepdims=0)
                self.put("Tanh", [total], 2, [2])
            case "scale":
                self.put("Mul", [self.weight(WIDTH), x], rank, [1, rank])
            case "batch_norm":
                names = [self.weight(LENGTH), self.weight(LENGTH)]
                names += [self.constant(np.full(LENGTH, value, np.float32)) for value in (0.1, 1.5)]
                self.put(
                    "BatchNormalization", [x if kind else self.pick(3), *names], 3, [3], momentum=0.8, epsilon=1e-2
                )
            case "conv":
                self.put("Conv", [self.pick(3), self.weight(LENGTH, LENGTH, 3)], 3, [3, 3], pads=[1, 1])
            case "where":
                other = self.pick(rank)
                (larger,) = self.add("Greater", [x, other], many)
                self.put("Where", [larger, other, self.weight(WIDTH)], rank, [rank, rank, 1])
            case "slice":
                begin = draw(st.sampled_from([0, 3, 6]))
                bounds = [integers(begin), integers(begin + 6), integers(rank - 1)]
                (shard,) = self.add("Slice", [x, *bounds], [rank, 0, 0, 0])
                self.put("Concat", [shard, shard], rank, many, axis=rank - 1)
            case "expand":
                (shape,) = self.add("Shape", [x], [rank])
                (rows,) = self.add("Expand", [self.weight(1, WIDTH), shape], [2, 0])
                self.put("Mul", [x, rows], rank, many)
            case "largest":
                (largest,) = self.add("ReduceMax", [x, integers(rank - 1)], [rank, 0], keepdims=1)
                self.put("Sub", [x, largest], rank, many)


@st.composite
def cases(draw: st.DrawFn, first: Sequence[str] = ()) -> Case:
    """`first`: the kinds of the ops with which a model begins."""
    learner = Learner(draw)
    for kind in first:
        learner.grow(kind)
    for _ in range(draw(st.integers(1, 8))):
        learner.grow()
    loss = _loss(learner)
    read = {name for node in learner.nodes for name in node.input}
    inputs = [
        helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in (
            ("x", TensorProto.FLOAT, ["batch", WIDTH]),
            ("z", TensorProto.FLOAT, ["batch", LENGTH, WIDTH]),
            ("ids", TensorProto.INT64, ["batch", LENGTH]),
        )
        if name in read
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y",)]
    weights = [numpy_helper.from_array(array, name) for name, array in learner.weights.items() if name in read]
    graph = helper.make_graph(learner.nodes, "random", inputs, outputs, weights)
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    ranks = draw(st.sampled_from([2, 3, 4, 6]))
    divisor = draw(st.sampled_from([12, 12, 12, 1]))
    learned = [name for name in learner.learned if name in read]
    lines = [
        f"ranks: {ranks}",
        f"symbols: {{batch: {{divisor: {divisor}}}}}",
        f"dataset: {draw(st.sampled_from(['full_batch', 'data_parallel']))}",
        *_rules(draw, ranks, learner, loss),
        *training(draw, loss, learned),
    ]
    fed = (*(one.name for one in inputs), *(name for name in ("t", "labels") if f": {name}}}" in loss))
    return Case(model, "\n".join([*lines, ""]), (12, 24) if divisor == 12 else (5, 12), fed)


def _loss(learner: Learner) -> str:
    """Makes the output `y` of what nobody reads, and says the plan's loss."""
    draw = learner.draw
    read = {name for node in learner.nodes for name in node.input}
    ends = {rank: [name for name in names if name not in read] for rank, names in learner.values.items()}
    rows = [name for name in ends[2] if name != "x"]
    for name in ends[3]:
        if name != "z":
            axes = learner.constant(np.array([1], np.int64))
            rows += learner.add("ReduceMean", [name, axes], [3, 0], keepdims=0)
    if not rows:
        rows = ["x"]
    (total,) = learner.add("Sum", rows, [2] * len(rows)) if len(rows) > 1 else rows
    kind = draw(st.sampled_from(["output", "mean_squared", "softmax_cross_entropy"]))
    weight = learner.weight(WIDTH, WIDTH)
    if kind == "output":
        (last,) = learner.add("MatMul", [total, weight], [2, 2])
        (bounded,) = learner.add("Tanh", [last], [2])
        (square,) = learner.add("Mul", [bounded, bounded], [2, 2])
        learner.nodes.append(helper.make_node("ReduceMean", [square], ["y"], name="mean", keepdims=0))
        return "y"
    learner.nodes.append(helper.make_node("MatMul", [total, weight], ["y"], name="last"))
    learner.ops.append(("last", [2, 2]))
    if kind == "mean_squared":
        return "{type: mean_squared, prediction: y, target: t}"
    return "{type: softmax_cross_entropy, logits: y, labels: labels}"


def _rules(draw: st.DrawFn, ranks: int, learner: Learner, loss: str) -> list[str]:
    """Where nodes stand, how they are cut, and how some parameters are kept, however they are read."""
    ops = learner.ops
    read = {node.name: [name for name in node.input if name in learner.learned] for node in learner.nodes}
    groups: dict[str, Ranks] = {}
    everyone: Ranks = tuple(range(ranks))
    match draw(st.sampled_from(["together", "together", "stages", "anywhere"])):
        case "stages":
            at = draw(st.integers(1, ranks - 1))
            stages = [everyone[:at], everyone[at:]]
            turn = draw(st.integers(0, len(ops)))
            groups = {node: stages[k >= turn] for k, (node, _) in enumerate(ops)}
        case "anywhere":
            some = st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks)
            groups = {node: tuple(sorted(draw(some))) for node, _ in ops if draw(st.integers(0, 2)) == 0}
    cuts = []
    for node, operands in ops:
        size = len(groups.get(node, everyone))
        said = []
        if size > 1 and draw(st.integers(0, 2)) == 0:
            given = draw(st.sampled_from([k for k, rank in enumerate(operands) if rank]))
            asked = ["null"] * len(operands)
            asked[given] = str(_cut(draw, operands[given], size))
            said.append(f"in: [{', '.join(asked)}]")
        if size > 1 and read[node] and draw(st.integers(0, 3)) == 0:
            kept = draw(st.sampled_from(read[node]))
            said.append(f"parameters: {{{kept}: {_cut(draw, learner.weights[kept].ndim, size)}}}")
        if said:
            cuts.append(f"  {node}: {{{', '.join(said)}}}")
    lines = ["sharding:", *cuts] if cuts else []
    if groups:
        lines += ["placement:", *(f"  {node}: {list(group)}" for node, group in groups.items())]
        if loss != "y" and draw(st.booleans()):
            lines.append(f"  loss: {draw(st.integers(0, ranks - 1))}")
    if not cuts and not groups:
        lines.append(f"mesh: {{a: {ranks}}}")
    return lines


def _cut(draw: st.DrawFn, dims: int, size: int) -> list[int]:
    """Shards of one or two of the dims of a tensor, on as many ranks."""
    shards = [n for n in range(1, size + 1) if size % n == 0]
    cut = [1] * dims
    first, second = draw(st.integers(0, dims - 1)), draw(st.integers(0, dims - 1))
    cut[first] = draw(st.sampled_from(shards))
    if first != second:
        cut[second] = draw(st.sampled_from([n for n in shards if size // cut[first] % n == 0]))
    return cut


def training(draw: st.DrawFn, loss: str, weights: Sequence[str]) -> list[str]:
    """The plan's lines that train by a loss."""
    optimizer = draw(
        st.sampled_from(
            [
                "{type: sgd, lr: 0.5}",
                "{type: sgd, lr: 0.5}",
                "{type: momentum, lr: 0.5, weight_decay: 0.1}",
                "{type: lamb, lr: 0.05, eps: 0.01}",
                "{type: adam, lr: 0.05, eps: 0.01, shard: true}",
                "{type: lamb, lr: 0.05, eps: 0.01, shard: true}",
                "{type: lars, lr: 1.0, trust_coefficient: 0.05}",
                "{type: adafactor, lr: 0.05, d: 2.0, shard: true}",
            ]
        )
    )
    lines = ["train:", f"  loss: {loss}", f"  optimizer: {optimizer}"]
    lines.append(f"  bucket_mb: {draw(st.sampled_from([10.0, 0.0004]))}")
    if draw(st.integers(0, 3)) == 0:
        lines.append(f"  clip: {draw(st.sampled_from(['{norm: 0.05}', '{value: 0.01}']))}")
    if len(weights) > 1 and draw(st.integers(0, 3)) == 0:
        own = draw(
            st.sampled_from(["frozen: true", "optimizer: {type: adafactor, lr: 0.05, d: 2.0}", "optimizer: ftrl"])
        )
        lines.append(f"  parameters: {{{draw(st.sampled_from(weights))}: {{{own}}}}}")
    return lines
