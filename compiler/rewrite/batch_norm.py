"""BatchNormalization in training: it normalizes by the statistics of the batch, and these move the running statistics.

The op in training mode works where the batch is not sharded. Where it may be sharded, the op becomes plain ops whose sums over the batch
are reduced over the ranks, so that the statistics are those of the whole batch:

    s = x - running mean          (m, q) = mean over the batch of the positions' (s, s**2)         variance = q - m**2
    y = s a + (bias - m a)        a = scale / sqrt(variance + epsilon)

Both moments go in one all_reduce; backward has two, of the cotangents of a and of bias - m a, from which those of scale and bias follow.
The mean of (x - mean)**2 would need two and three, one after the other. The difference q - m**2 loses digits only where m is large
compared with the deviation, and m is the distance to the running mean: near zero after the first steps, and in these a relative error
of about 2**-24 m**2 / variance. The shift is the same number on all ranks and cancels.

The running statistics move by ONNX's law, `running = running momentum + batch (1 - momentum)`, with the variance over n. Those of a torch
module (`UNBIASED`) move by torch's, with the variance over n - 1; n counts the batch of all ranks, or the microbatch of all ranks.

With `elastic: {statistics: part}` each part of a batch is normalized by its own statistics, with a dim of the parts, along which ranks and
microbatches are dealt: no position of one part meets another's. The new running statistics are a sum of the parts' terms, which is added up
like all sums over parts:

    x of part p: (p, records, channels, ..)       new running = sum over p of (running momentum + own of p (1 - momentum)) / parts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.graph import UNBIASED, name_of
from partc.compiler.ops.node import single

EXACT = "partc.exact"
"""The mark, in `meta`, of a node that computes in at least 32 bits at any precision of the plan: squares would overflow float16."""
_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def train_in_place(node: ir.Node, running: Sequence[ir.Value]) -> list[ir.Value]:
    """Puts the node into training mode with these running statistics; returns the values that replace them."""
    for k, value in enumerate(running):
        node.replace_input_with(3 + k, value)
    node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
    node.resize_outputs(3)
    for out, value in zip(node.outputs[1:], running, strict=True):
        out.type, out.shape = value.type, value.shape
    return list(node.outputs[1:])


def unbiased(
    node: ir.Node, old: ir.Value, new: ir.Value, x: ir.Value, scopes: dict[str, str], momentum: float
) -> ir.Value:
    """Returns the running variance as torch moves it, from `new`, to which ONNX's law moved `old` for the batch `x`.

    The batch's contribution is multiplied by n / (n - 1); where a channel has only one element, ONNX's law holds (torch refuses it).
    """
    producer = new.producer()
    assert producer is not None
    assert producer.graph is not None
    if not new.is_graph_output():
        new.name = f"{node.name}.biased_variance"
    plain = _Plain(f"{node.name}.unbiased", old.dtype or ir.DataType.FLOAT, dict(node.metadata_props) | scopes)
    begin, end = plain.widened(old), plain.widened(new)
    kept = plain.add("Mul", [begin, plain.number("momentum", momentum)], "kept")
    assert old.shape is not None
    each = plain.add("Div", [plain.add("Size", [x], "size"), plain.integers("channels", old.shape.numpy()[0])], "each")
    count = plain.add("Cast", [each], "count", to=plain.wide.value)
    one = plain.number("one", 1)
    rest = plain.add("Max", [plain.add("Sub", [count, one], "less"), one], "rest")
    grown = plain.add(
        "Mul", [plain.add("Sub", [end, kept], "came"), plain.add("Div", [count, rest], "factor")], "grown"
    )
    made = plain.narrowed(plain.add("Add", [kept, grown], "running_variance"), old.dtype, "narrow")
    made.type, made.shape = old.type, old.shape
    for constant in plain.constants:
        producer.graph.register_initializer(constant)
    producer.graph.insert_after(producer, plain.nodes)
    return made


def infer_in_place(node: ir.Node) -> None:
    """Puts the node into inference form, unless a node reads the statistics that only training gives."""
    if any(out.uses() or out.is_graph_output() for out in node.outputs[1:]):
        return
    node.attributes.pop("training_mode", None)
    node.resize_outputs(1)


def decompose(node: ir.Node, running: Sequence[ir.Value], x: ir.Value, scopes: dict[str, str]) -> list[ir.Value]:
    """Replaces the node by plain ops over a batch that may be sharded; returns the values that replace the running statistics.

    `x` has the rank and type of the node's input; `scopes` is metadata that names the node's path as the module of the new nodes.
    """
    assert x.shape is not None
    plain = _Plain(name_of(node), x.dtype or ir.DataType.FLOAT, dict(node.metadata_props) | scopes)
    data, scale, bias = (plain.widened(value) for value in node.inputs[:3])
    mean, variance = (plain.widened(value) for value in running)
    positions = list(range(2, len(x.shape)))
    shifted = plain.add("Sub", [data, plain.unsqueezed(mean, "shift", [k - 1 for k in positions])], "shifted")
    squares = plain.add("Mul", [shifted, shifted], "squares")
    first, second = (
        plain.averaged(value, word, positions) for value, word in ((shifted, "first"), (squares, "second"))
    )
    both = plain.add("Concat", [first, second], "both", axis=0)
    moments = plain.add("ReduceMean", [both, plain.integers("batch", [1])], "moments", keepdims=0)
    away, square = plain.split(moments, ["away", "square"])
    spread = plain.add("Sub", [square, plain.add("Mul", [away, away], "away2")], "difference")
    spread = plain.add("Relu", [spread], "variance")
    epsilon = plain.number("epsilon", single(node.attributes.get_float("epsilon", 1e-5)))
    deviation = plain.add("Sqrt", [plain.add("Add", [spread, epsilon], "above_zero")], "deviation")
    gain = plain.add("Div", [scale, deviation], "gain")
    offset = plain.add("Sub", [bias, plain.add("Mul", [away, gain], "lost")], "offset")
    scaled = plain.add("Mul", [shifted, plain.unsqueezed(gain, "wide_gain", positions)], "scaled")
    y = plain.add("Add", [scaled, plain.unsqueezed(offset, "wide_offset", positions)], "y")
    y = plain.narrowed(y, x.dtype, "narrow")
    momentum = single(node.attributes.get_float("momentum", 0.9))
    share = plain.number("share", 1 - momentum)
    channel = plain.integers("channel", [0])
    moved = plain.add("Mul", [plain.add("Squeeze", [away, channel], "drift"), share], "moved")
    new_mean = plain.add("Add", [mean, moved], "running_mean")
    kept = plain.add("Mul", [variance, plain.number("momentum", momentum)], "kept")
    grown = plain.add("Mul", [plain.add("Squeeze", [spread, channel], "flat_variance"), share], "grown")
    new_variance = plain.add("Add", [kept, grown], "running_variance")
    statistics = [
        plain.narrowed(value, old.dtype, f"narrow{k}")
        for k, (value, old) in enumerate(zip((new_mean, new_variance), running, strict=True))
    ]
    plain.replace(node, running, [y, *statistics])
    return statistics


@dataclass(frozen=True)
class BatchSplit:
    """The parts of a batch, each with the same number of records."""

    count: int
    records: int


def decompose_each(
    node: ir.Node, running: Sequence[ir.Value], x: ir.Value, scopes: dict[str, str], split: BatchSplit
) -> list[ir.Value]:
    """Replaces the node by plain ops that take the statistics of each part; arguments and result are those of `decompose`."""
    assert x.shape is not None
    plain = _Plain(name_of(node), x.dtype or ir.DataType.FLOAT, dict(node.metadata_props) | scopes)
    data, scale, bias = (plain.widened(value) for value in node.inputs[:3])
    positions = list(range(2, len(x.shape)))
    shape, sizes = plain.add("Shape", [data], "shape"), x.shape.dims[1:]
    if all(isinstance(size, int) for size in sizes):
        divided = plain.integers("divided", [-1, split.records, *(size for size in sizes if isinstance(size, int))])
    else:
        rest = plain.add("Shape", [data], "rest", start=1)
        divided = plain.add("Concat", [plain.integers("part", [-1, split.records]), rest], "divided", axis=0)
    records = plain.add("Reshape", [data, divided], "records")
    axes = [1, *(k + 1 for k in positions)]
    mean = plain.add("ReduceMean", [records, plain.integers("mean.axes", axes)], "mean", keepdims=1)
    centered = plain.add("Sub", [records, mean], "centered")
    squares = plain.add("Mul", [centered, centered], "squares")
    variance = plain.add("ReduceMean", [squares, plain.integers("variance.axes", axes)], "variance", keepdims=1)
    epsilon = plain.number("epsilon", single(node.attributes.get_float("epsilon", 1e-5)))
    deviation = plain.add("Sqrt", [plain.add("Add", [variance, epsilon], "above_zero")], "deviation")
    gain = plain.add("Div", [plain.unsqueezed(scale, "scale", [k - 1 for k in positions]), deviation], "gain")
    scaled = plain.add("Mul", [centered, gain], "scaled")
    normalized = plain.add("Add", [scaled, plain.unsqueezed(bias, "bias", [k - 1 for k in positions])], "normalized")
    y = plain.narrowed(plain.add("Reshape", [normalized, shape], "y"), x.dtype, "narrow")
    momentum = single(node.attributes.get_float("momentum", 0.9))
    statistics = []
    for old, new, word in zip(running, (mean, variance), ("mean", "variance"), strict=True):
        own = plain.add("Squeeze", [new, plain.integers(f"{word}.flat", axes)], f"{word}.of_part")
        if word == "variance" and UNBIASED in node.meta:
            own = plain.add("Mul", [own, plain.unbiased(records, axes)], f"{word}.unbiased")
        moved = plain.add("Mul", [own, plain.number(f"{word}.share", (1 - momentum) / split.count)], f"{word}.moved")
        kept = plain.add(
            "Mul", [plain.widened(old), plain.number(f"{word}.momentum", momentum / split.count)], f"{word}.kept"
        )
        each = plain.add("Add", [kept, moved], f"{word}.term")
        total = plain.add("ReduceSum", [each, plain.integers(f"{word}.parts", [0])], f"running_{word}", keepdims=0)
        statistics.append(plain.narrowed(total, old.dtype, f"narrow_{word}"))
    plain.replace(node, running, [y, *statistics])
    return statistics


@dataclass
class _Plain:
    """The nodes that replace the node at `path`; they compute in a type of at least 32 bits."""

    path: str
    dtype: ir.DataType
    metadata: dict[str, str]
    nodes: list[ir.Node] = field(default_factory=list)
    constants: list[ir.Value] = field(default_factory=list)

    @property
    def wide(self) -> ir.DataType:
        return ir.DataType.FLOAT if self.dtype in _HALF else self.dtype

    def replace(self, node: ir.Node, running: Sequence[ir.Value], results: Sequence[ir.Value]) -> None:
        """Puts the nodes in place of `node`; `results`: its output, and the new running statistics."""
        graph = node.graph
        assert graph is not None
        outputs = results[: len(node.outputs)]
        for old, new in zip(node.outputs, outputs, strict=True):
            new.name, new.type, new.shape = old.name, old.type, old.shape
        for value, old in zip(results[1:], running, strict=True):
            value.type, value.shape = old.type, old.shape
        for constant in self.constants:
            graph.register_initializer(constant)
        ir.convenience.replace_nodes_and_values(graph, node, [node], self.nodes, node.outputs, outputs)

    def unbiased(self, records: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Returns n / (n - 1), where n is the number of positions of a part and channel; 1 where it is one."""
        sizes = self.add("Gather", [self.add("Shape", [records], "sizes"), self.integers("places", axes)], "positions")
        count = self.add("ReduceProd", [sizes], "count", keepdims=0)
        wide, one = self.add("Cast", [count], "number", to=self.wide.value), self.number("one", 1)
        rest = self.add("Max", [self.add("Sub", [wide, one], "less"), one], "others")
        return self.add("Div", [wide, rest], "factor")

    def add(self, op_type: str, inputs: Sequence[ir.Value], word: str, **attributes: Any) -> ir.Value:
        return self._add(op_type, inputs, word, [ir.Value(name=f"{self.path}.{word}")], attributes)[0]

    def split(self, value: ir.Value, words: Sequence[str]) -> Sequence[ir.Value]:
        made = [ir.Value(name=f"{self.path}.{word}") for word in words]
        return self._add("Split", [value], "split", made, {"axis": 0, "num_outputs": len(words)})

    def _add(
        self, op_type: str, inputs: Sequence[ir.Value], word: str, made: list[ir.Value], attributes: dict[str, Any]
    ) -> Sequence[ir.Value]:
        given = ir.convenience.convert_attributes(attributes)
        node = ir.Node("", op_type, inputs, given, outputs=made, name=f"{self.path}.{word}")
        node.metadata_props.update(self.metadata)
        node.meta[EXACT] = True
        self.nodes.append(node)
        return node.outputs

    def unsqueezed(self, value: ir.Value, word: str, axes: Sequence[int]) -> ir.Value:
        return self.add("Unsqueeze", [value, self.integers(f"{word}.axes", axes)], word) if axes else value

    def averaged(self, value: ir.Value, word: str, positions: Sequence[int]) -> ir.Value:
        """Returns the mean over `positions`, with a dim of 1 added in front."""
        if positions:
            axes = self.integers(f"{word}.positions", positions)
            value = self.add("ReduceMean", [value, axes], f"{word}.mean", keepdims=0)
        return self.unsqueezed(value, word, [0])

    def widened(self, value: ir.Value | None) -> ir.Value:
        assert value is not None
        dtype = value.dtype or self.dtype
        return value if dtype == self.wide else self.add("Cast", [value], f"wide_{len(self.nodes)}", to=self.wide.value)

    def narrowed(self, value: ir.Value, dtype: ir.DataType | None, word: str) -> ir.Value:
        return value if dtype in (None, self.wide) else self.add("Cast", [value], word, to=int(dtype))

    def integers(self, word: str, numbers: Sequence[int] | int) -> ir.Value:
        return self._constant(word, np.array(numbers, np.int64))

    def number(self, word: str, number: float) -> ir.Value:
        return self._constant(word, np.array(number, self.wide.numpy()))

    def _constant(self, word: str, array: np.ndarray) -> ir.Value:
        name = f"{self.path}.{word}"
        self.constants.append(ir.val(name, const_value=ir.tensor(array, name=name)))
        return self.constants[-1]
