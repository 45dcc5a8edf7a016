"""Losses: what training lessens, as nodes of the whole graph, so that a mean is over the whole batch whatever the cut.

    softmax_cross_entropy    -sum_c q_c log softmax(x)_c    q: 1 at the label, or probabilities; smoothed; weighted by class
    mean_squared             (x - t)^2
    l1                       |x - t|
    binary_cross_entropy     softplus(x) - t x, of logits; softplus(x) = log(1 + exp(x))
    output                   a scalar that the model makes itself

The logarithm of the softmax is (x - s) - log sum exp(x - s) with s = ceil(max x): any s close to the maximum will do, and no
gradient flows through Ceil. Unlike LogSoftmax this is made of reductions, so classes may be cut as well (a vocabulary over ranks):
each rank has its own terms, and three numbers a position are reduced. A mean with weights or ignored labels is a sum over a
sum, and both are terms on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.analysis.records import OF_PIECES
from partc.compiler.analysis.shape_rules import Known
from partc.compiler.plan.training.loss import Loss
from partc.compiler.training.graph_appender import DENOMINATOR, FLOATS, INTEGERS, Dims, GraphAppender


def add_loss(model: ir.Model, loss: Loss, where: str = "train.loss", known: Known = MappingProxyType({})) -> ir.Value:
    """The scalar that the loss is, in float32: an output `loss` appended to the graph, or the model's own output.

    `known` is what is promised of the inputs' dims. Raises CompileError where the model has not what the loss speaks of.
    """
    to = GraphAppender(model, "loss", where, known)
    match loss.type:
        case "softmax_cross_entropy":
            return _cross_entropy(to, loss)
        case "binary_cross_entropy":
            return _binary_cross_entropy(to, loss)
        case "mean_squared" | "l1":
            return distance(to, loss.output, loss.labels, loss.type, loss.reduction)
        case _:
            return own_scalar(to, loss.output)


def class_axis(to: GraphAppender, name: str, dims: Dims, axis: int | None) -> int:
    """The axis of the classes, from 0."""
    rank = len(dims)
    if rank == 0:
        raise to.error(f"the output '{name}' is a scalar", "logits have a number for each class")
    chosen = axis if axis is not None else 1 if rank > 3 else rank - 1
    if not -rank <= chosen < rank:
        raise to.error(f"'{name}' has no axis {chosen}", f"it has {rank} dims", f"say an axis of {-rank} to {rank - 1}")
    return chosen % rank


def own_scalar(to: GraphAppender, name: str) -> ir.Value:
    """The model's output of a name, which must be one float."""
    found = to.output(name)
    if (found.dtype is not None and found.dtype not in FLOATS) or (
        found.shape is not None and any(dim != 1 for dim in found.shape.dims)
    ):
        shape = "" if found.shape is None else str(found.shape)
        raise to.error(
            f"the output '{name}' is {found.dtype.name.lower() if found.dtype else ''}{shape}",
            "a loss or metric of the model's own is one float",
            "take its mean in the model, or say by `type` how it is compared with labels",
        )
    return _divided(to, found)


_PASSED = ("Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape")
_BOUNDS = ("Clip", "Max")


def _divided(to: GraphAppender, number: ir.Value) -> ir.Value:
    """A number of the model's own; where that is divided by a sum, as a mean over the labels that count is, the sum is its denominator."""
    node = _made(number)
    if node is None or node.op_type != "Div" or DENOMINATOR in number.meta:
        return number
    total = node.inputs[1]
    under = _made(total)
    while under is not None and under.op_type in _BOUNDS:  # a bound from below, for a batch without any
        total = under.inputs[0]
        under = _made(total)
    if total is None or under is None or under.op_type != "ReduceSum" or not _is_given(under, to.graph):
        return number
    return to.divided(number, to.op("total", "Reshape", total, to.constant("no_dims", np.zeros(0, np.int64))))


def _made(value: ir.Value | None) -> ir.Node | None:
    """The node that makes a value, past those that change its form alone."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in _PASSED:
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    return node


def _is_given(node: ir.Node, graph: ir.Graph) -> bool:
    """Whether what a node makes depends on an input of the graph."""
    todo, seen, given = [node], {node}, {*graph.inputs}
    while todo:
        for value in todo.pop().inputs:
            if value in given:
                return True
            producer = None if value is None else value.producer()
            if producer is not None and producer not in seen:
                seen.add(producer)
                todo.append(producer)
    return False


def distance(to: GraphAppender, prediction: str, target: str, kind: str, reduction: str) -> ir.Value:
    """The mean or sum of squares or of absolute values of what a prediction is off its target."""
    x, dims = to.prediction(prediction)
    dtype = x.dtype or ir.DataType.FLOAT
    t = to.given(target, dims, [dtype, *FLOATS])
    off = to.op("difference", "Sub", x, t)
    norm = "ReduceL1" if kind == "l1" else "ReduceSumSquare"
    if reduction == "sum":
        return to.scalar(norm, off, dtype=dtype, keepdims=0)
    # A mean divides by a number that only a run tells; of dims that are known it is a sum, whose gradient is one multiplication.
    # Records are none of these: a part of a batch has fewer.
    known = [axis for axis, dim in enumerate(dims) if axis and isinstance(dim, int)]
    if not known:
        each = to.op("losses", "Abs", off) if kind == "l1" else to.op("losses", "Mul", off, off)
        return to.counted(to.scalar("ReduceMean", each, dtype=dtype, keepdims=0), off, dims)
    count = float(np.prod([dim for dim in dims[1:] if isinstance(dim, int)]))
    sums = to.op("sums", norm, off, to.constant("known_axes", known), keepdims=0)
    total = to.op("mean", "ReduceMean", sums, keepdims=0)
    return to.counted(to.scalar("Div", total, to.constant("count", count, dtype), dtype=dtype), off, dims)


def _binary_cross_entropy(to: GraphAppender, loss: Loss) -> ir.Value:
    """Each softplus(x) - t x; with a weight p of ones, (1 + (p - 1) t) softplus(x) - p t x.

    softplus(x) is max(x, 0) + log(1 + exp(-|x|)), and -|x| is x - 2 max(x, 0): onnxruntime's own Softplus takes 5 times as long as these,
    and its Abs has a slope that does. Its error is that of 1 + exp(-|x|), 6e-8 of an element's loss.
    """
    x, dims = to.prediction(loss.output)
    dtype = x.dtype or ir.DataType.FLOAT
    t = to.given(loss.labels, dims, [dtype, *FLOATS])
    one, above = to.constant("one", 1, dtype), to.op("above", "Relu", x)
    under = to.op("minus_size", "Add", x, to.op("twice_below", "Mul", above, to.constant("minus_two", -2, dtype)))
    logs = to.op("logs", "Log", to.op("sums", "Add", to.op("exponentials", "Exp", under), one))
    if loss.pos_weight is None:
        labelled = to.op("labelled", "Mul", x, to.op("minus_labels", "Neg", t))
        losses = to.op("losses", "Sum", above, logs, labelled)
    else:
        p = np.array(loss.pos_weight if len(loss.pos_weight) > 1 else loss.pos_weight[0])
        if p.ndim and (not dims or dims[-1] != p.size):
            raise to.error(f"`pos_weight` has {p.size} numbers", f"the last dim of '{loss.output}' is {_last(dims)}")
        counts = to.op("counts", "Add", to.op("more", "Mul", t, to.constant("pos_weight_less_1", p - 1, dtype)), one)
        soft = to.op("weighted", "Mul", to.op("softplus", "Add", above, logs), counts)
        labelled = to.op(
            "labelled", "Mul", x, to.op("minus_labels", "Mul", t, to.constant("minus_pos_weight", -p, dtype))
        )
        losses = to.op("losses", "Add", soft, labelled)
    if loss.reduction == "sum":
        return to.scalar("ReduceSum", losses, dtype=dtype, keepdims=0)
    return to.counted(to.scalar("ReduceMean", losses, dtype=dtype, keepdims=0), losses, dims)


def _last(dims: Dims) -> str:
    return "missing" if not dims else str(dims[-1] if isinstance(dims[-1], int) else dims[-1].value)


def _cross_entropy(to: GraphAppender, loss: Loss) -> ir.Value:
    x, dims = to.prediction(loss.output)
    axis = class_axis(to, loss.output, dims, loss.axis)
    classes, dtype = dims[axis], x.dtype or ir.DataType.FLOAT
    positions = dims[:axis] + dims[axis + 1 :]
    if loss.weights is not None and classes != len(loss.weights):
        size = classes if isinstance(classes, int) else classes.value
        raise to.error(
            f"`weights` has {len(loss.weights)} numbers, and '{loss.output}' has {size} classes on axis {axis}",
            "there is one weight for each class",
        )
    if loss.label_smoothing and loss.weights is None and loss.probabilities and not isinstance(classes, int):
        raise to.error(f"the number of classes on axis {axis} is not known", "smoothing divides by it")
    axes = to.constant("class_axis", [axis])
    shift = to.op("shift", "Ceil", to.op("largest", "ReduceMax", x, axes, keepdims=1))
    shifted = to.op("shifted", "Sub", x, shift)
    total = to.op("total", "ReduceSum", to.op("exponentials", "Exp", shifted), axes, keepdims=1)
    parts = _Parts(to, loss, axis, axes, shifted, to.op("log_total", "Log", total), dtype)
    if loss.probabilities:
        shares = to.given(loss.labels, dims, [dtype, *FLOATS])
        return _reduced(to, loss, parts.against(shares, classes, len(dims)), None, positions, dtype)
    labels = to.given(loss.labels, positions, INTEGERS)
    counted = None
    if loss.ignore_index is not None:
        ignored = to.op("ignored", "Equal", labels, to.constant("ignore_index", loss.ignore_index))
        labels = to.op("safe_labels", "Where", ignored, to.constant("no_label", 0), labels)
        counted = to.op("counted", "Not", to.op("ignored_there", "Unsqueeze", ignored, axes))
    return _reduced(to, loss, *parts.at(labels, counted, classes, len(dims)), positions, dtype)


def _reduced(
    to: GraphAppender, loss: Loss, losses: ir.Value, weights: ir.Value | None, positions: Dims, dtype: ir.DataType
) -> ir.Value:
    """The sum or the mean of losses; with weights their sum is what the mean divides by."""
    if loss.reduction == "sum":
        return to.scalar("ReduceSum", losses, dtype=dtype, keepdims=0)
    if weights is None:
        return to.counted(to.scalar("ReduceMean", losses, dtype=dtype, keepdims=0), losses, positions)
    if loss.pieces > 1:
        by_piece = _by_piece(to, loss, weights, "weight_sum")
        means = to.op("means", "Div", _by_piece(to, loss, losses, "sum"), by_piece)
        mean = to.scalar("ReduceMean", means, dtype=dtype, keepdims=0)
        return to.divided(mean, to.op("weight_sums", "ReduceSum", by_piece, keepdims=0))
    total = to.op("weight_sum", "ReduceSum", weights, keepdims=0)
    return to.divided(to.scalar("Div", to.op("sum", "ReduceSum", losses, keepdims=0), total, dtype=dtype), total)


def _by_piece(to: GraphAppender, loss: Loss, x: ir.Value, word: str) -> ir.Value:
    """The sums of x over the records of each piece of the batch."""
    pieces = to.op(f"{word}.pieces", "Reshape", x, to.constant(f"{word}.by_rank", [loss.pieces, -1]))
    node = pieces.producer()
    assert node is not None
    node.meta[OF_PIECES] = True
    return to.op(word, "ReduceSum", pieces, to.constant(f"{word}.records", [1]), keepdims=0)


@dataclass(frozen=True)
class _Parts:
    """What a cross entropy is made of: log softmax(x) is `shifted` - `log_total`."""

    to: GraphAppender
    loss: Loss
    axis: int
    axes: ir.Value
    shifted: ir.Value
    log_total: ir.Value
    dtype: ir.DataType

    def at(
        self, labels: ir.Value, counted: ir.Value | None, classes: int | ir.SymbolicDim, rank: int
    ) -> tuple[ir.Value, ir.Value | None]:
        """The loss of each position with its label, and its weight, None where every one is 1; both with the axis of classes as 1."""
        to, smoothing = self.to, self.loss.label_smoothing
        places = to.op("label_places", "Unsqueeze", labels, self.axes)
        chosen = to.op("at_label", "GatherElements", self.shifted, places, axis=self.axis)
        weight = None
        if self.loss.weights is not None:
            weight = to.op(
                "label_weights", "Gather", to.constant("class_weights", self.loss.weights, self.dtype), places
            )
        if smoothing and weight is None:
            mean = to.op("class_mean", "ReduceMean", self.shifted, self.axes, keepdims=1)
            chosen = to.op(
                "smooth", "Add", self._times("hard", chosen, 1 - smoothing), self._times("even", mean, smoothing)
            )
        losses = to.op("losses", "Sub", self.log_total, chosen)
        if weight is not None:
            losses = to.op("weighted", "Mul", losses, weight)
            if smoothing:
                share = self._aligned(
                    "smoothing_weights", smoothing * np.array(self.loss.weights) / len(self.loss.weights or ()), rank
                )
                even = self._expected(share, to.constant("smoothing_weight", _even(self.loss), self.dtype))
                losses = to.op("smooth", "Add", self._times("hard", losses, 1 - smoothing), even)
        if counted is not None:
            none = to.constant("nothing", 0, self.dtype)
            losses = to.op("counted_losses", "Where", counted, losses, none)
            if weight is None:
                weight = to.op("weights", "Cast", counted, to=self.dtype.value)
            else:
                weight = to.op("weights", "Where", counted, weight, none)
        return losses, weight

    def against(self, shares: ir.Value, classes: int | ir.SymbolicDim, rank: int) -> ir.Value:
        """The loss of each position whose label is a share of every class."""
        to, smoothing = self.to, self.loss.label_smoothing
        if smoothing:
            assert isinstance(classes, int)
            even = to.constant("even", smoothing / classes, self.dtype)
            shares = to.op("smooth_labels", "Add", self._times("hard", shares, 1 - smoothing), even)
        if self.loss.weights is not None:
            shares = to.op("weighted_labels", "Mul", shares, self._aligned("class_weights", self.loss.weights, rank))
        return self._expected(shares, to.op("shares", "ReduceSum", shares, self.axes, keepdims=1))

    def _expected(self, shares: ir.Value, total: ir.Value) -> ir.Value:
        """-sum_c share_c log softmax(x)_c, with the sum of the shares."""
        to = self.to
        part = to.op("share_of_logits", "Mul", self.shifted, shares)
        mean = to.op("expected", "ReduceSum", part, self.axes, keepdims=1)
        return to.op("expected_losses", "Sub", to.op("share_of_total", "Mul", self.log_total, total), mean)

    def _aligned(self, word: str, numbers: Any, rank: int) -> ir.Value:
        """One number a class, aligned with the axis of classes."""
        shape = [-1 if axis == self.axis else 1 for axis in range(self.axis, rank)]
        return self.to.constant(word, np.asarray(numbers).reshape(shape), self.dtype)

    def _times(self, word: str, x: ir.Value, number: float) -> ir.Value:
        return self.to.op(word, "Mul", x, self.to.constant(f"{word}_share", number, self.dtype))


def _even(loss: Loss) -> float:
    """The total weight that label smoothing gives to all classes."""
    return loss.label_smoothing * float(np.mean(loss.weights or (1.0,)))
