"""Cleans up an exported graph: folds constants, and removes nodes that change no bit of any value.

The law: the graph's results stay the same bit for bit. So no constant is compared with a tolerance (onnxscript's patterns take 1e-8 for 0
and 1.000005 for 1), and an op is folded only if the standard and IEEE 754 define its result to the last bit.

    Mul(x, 1), Div(x, 1), Sub(x, 0), Add(x, -0.0)     x    and not Add(x, 0.0), which turns -0.0 into 0.0
    Transpose(x) {perm: [0, 1, 2]}                    x
    Slice(x, 0, 9223372036854775807, axis, 1)         x
    Reshape(Squeeze(n), [-1])                         n, where it has one dim
    Unsqueeze(Unsqueeze(x, [1]), [0])                 Unsqueeze(x, [0, 2])
    Reshape(x, shape)                                 Reshape(x, [2, -1, 8]), where shapes determine it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common
from partc.compiler.ir.graph import nodes_of

_LARGEST_OPERAND, _LARGEST_RESULT = 8192, 1 << 18
"""The most elements of a folded op's operand and result: a larger constant would take more space in the file than its nodes."""
_TO_THE_END = np.iinfo(np.int64).max
_FOLDED = frozenset(
    (
        *("Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Concat", "Div", "Equal", "Expand", "EyeLike"),
        *("Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Identity", "IsNaN"),
        *("Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pad", "Range", "Reciprocal"),
        *("ReduceMax", "ReduceMin", "Reshape", "ScatterElements", "ScatterND", "Shape", "Sign", "Size", "Slice"),
        *("Split", "Sqrt", "Squeeze", "Sub", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor"),
        *("ReduceProd", "ReduceSum", "CumSum", "Pow"),
    )
)
"""Ops whose results are defined to the last bit, for some types at least."""
_OF_INTEGERS = frozenset(("ReduceProd", "ReduceSum", "CumSum", "Pow"))
"""The ops of `_FOLDED` whose results are defined to the last bit for integers alone: a sum of floats depends on its order."""
_DRAWING = frozenset(
    (
        *("Bernoulli", "Dropout", "Multinomial"),
        *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    )
)
_APART = "partc.frontend.apart"
"""The domain of nodes that must not be merged, while other nodes are."""


def clean_up(model: ir.Model, weights: Mapping[str, ir.Value]) -> None:
    """Folds shape arithmetic and constants; meanwhile the weights are inputs of the graph, so that they are not folded."""
    graph = model.graph
    contents = {name: value.const_value for name, value in weights.items()}
    declared = len(graph.inputs)
    for name, value in weights.items():
        del graph.initializers[name]
        value.const_value = None
        graph.inputs.append(value)
    _simplify(model)
    del graph.inputs[declared:]
    for name, value in weights.items():
        value.const_value = contents[name]
        if value.uses() or value in graph.outputs:
            graph.initializers[name] = value


def _simplify(model: ir.Model) -> None:
    from onnxscript.optimizer import fold_constants

    common.InlinePass()(model)
    changed = True
    while changed:  # each rule leaves fewer nodes, or a constant where a shape was computed
        fold_constants(
            model,
            onnx_shape_inference=True,
            input_size_limit=_LARGEST_OPERAND,
            output_size_limit=_LARGEST_RESULT,
            should_fold=lambda node: None if _is_fixed(node) else False,
        )
        changed = _take_out(model)
        common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    common.RemoveUnusedOpsetsPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    common.DeduplicateInitializersPass()(model)
    with _nodes_apart(model):
        common.CommonSubexpressionEliminationPass()(model)
    common.OutputFixPass()(model)
    common.NameFixPass()(model)


def _is_fixed(node: ir.Node) -> bool:
    """Whether a node's result is defined to the last bit."""
    if node.op_type not in _FOLDED:
        return False
    x = node.inputs[0] if node.inputs else None
    return node.op_type not in _OF_INTEGERS or (x is not None and x.dtype is not None and x.dtype.is_integer())


@contextmanager
def _nodes_apart(model: ir.Model) -> Iterator[None]:
    """A context in which the pass that merges equal nodes leaves some alone.

    These nodes look equal to that pass, but compute different values: random draws, and attributes that differ in the sign of a zero.
    """
    apart = [node for node in nodes_of(model.graph) if node.domain == "" and _is_apart(node)]
    for node in apart:
        node.domain = _APART
        node.attributes[_APART] = ir.AttrInt64(_APART, id(node))
    yield
    for node in apart:
        node.domain = ""
        del node.attributes[_APART]


def _is_apart(node: ir.Node) -> bool:
    return node.op_type in _DRAWING or any(
        attribute.type == ir.AttributeType.FLOAT and not attribute.is_ref() and str(attribute.as_float()) == "-0.0"
        for attribute in node.attributes.values()
    )


def _take_out(model: ir.Model) -> bool:
    """Applies the rules of this module once to every node; returns whether any changed the graph."""
    changed = False
    for node in list(nodes_of(model.graph)):
        rule = _RULES.get(node.op_type) if node.domain == "" and node.graph is not None else None
        made = rule(node) if rule is not None else None
        if made is None or node.graph is None:
            continue
        changed = True
        old = node.outputs[0]
        op_type, inputs = ("Identity", [made]) if isinstance(made, ir.Value) else made
        attributes = [] if op_type == "Identity" else list(node.attributes.values())
        new = ir.Node(
            "", op_type, inputs, attributes, outputs=[ir.Value(name=old.name, type=old.type, shape=old.shape)]
        )
        new.name = node.name
        new.metadata_props.update(node.metadata_props)
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], [new], [old], new.outputs)
    return changed


_Made = ir.Value | tuple[str, list[ir.Value]] | None
"""The result of a rule.

A value that replaces the node's output, or an op and its inputs that replace the node with its attributes, or None: the node stays.
"""


def _neutral_factor(node: ir.Node) -> _Made:
    return _where_neutral(node, (0, 1), 1.0)


def _neutral_divisor(node: ir.Node) -> _Made:
    return _where_neutral(node, (1,), 1.0)


def _neutral_subtrahend(node: ir.Node) -> _Made:
    return _where_neutral(node, (1,), 0.0)


def _neutral_addend(node: ir.Node) -> _Made:
    return _where_neutral(node, (0, 1), -0.0)


def _where_neutral(node: ir.Node, places: tuple[int, ...], number: float) -> _Made:
    """Returns the other operand where one at these places is a neutral constant, else None.

    The constant has one element, equal to `number` also in the sign of zero, and broadcasting it does not change the other operand's rank.
    """
    for k in places:
        constant, other = _constant(node, k), node.inputs[1 - k]
        if constant is None or other is None or other.shape is None or constant.ndim > len(other.shape):
            continue
        if constant.size != 1 or constant.dtype.kind not in "fiu" or constant.item() != number:
            continue
        if constant.dtype.kind != "f" or math.copysign(1, constant.item()) == math.copysign(1, number):
            return other
    return None


def _transpose(node: ir.Node) -> _Made:
    perm = node.attributes.get_ints("perm", None)
    return node.inputs[0] if perm is not None and [*perm] == [*range(len(perm))] else None


def _slice(node: ir.Node) -> _Made:
    x = node.inputs[0]
    starts, ends, axes, steps = (_constant(node, k) for k in range(1, 5))
    if x is None or x.shape is None or starts is None or ends is None or axes is None or starts.any():
        return None
    if len(node.inputs) > 4 and node.inputs[4] is not None and (steps is None or (steps != 1).any()):
        return None
    dims = [x.shape[axis] for axis in axes.ravel().tolist()]
    ends_ = ends.ravel().tolist()
    whole = (end == _TO_THE_END or (isinstance(dim, int) and end >= dim) for dim, end in zip(dims, ends_, strict=True))
    return x if all(whole) else None


def _unsqueeze(node: ir.Node) -> _Made:
    x = node.inputs[0]
    inner = None if x is None else x.producer()
    if inner is None or inner.op_type != "Unsqueeze" or inner.domain != "":
        return None
    first, second = _constant(inner, 1), _constant(node, 1)
    if first is None or second is None or first.size != 1 or second.size != 1:
        return None
    a, b = first.item(), second.item()
    source = inner.inputs[0]
    if a < 0 or b < 0 or source is None:
        return None
    return "Unsqueeze", [source, _integers(node, [a, b] if a < b else [b, a + 1])]


def _reshape(node: ir.Node) -> _Made:
    x, shape, target = node.inputs[0], _constant(node, 1), node.outputs[0].shape
    inner = None if x is None else x.producer()
    if shape is not None:
        is_flat = shape.ravel().tolist() == [-1] and inner is not None and inner.op_type == "Squeeze"
        source = inner.inputs[0] if is_flat and inner is not None and inner.domain == "" else None
        return source if source is not None and source.shape is not None and len(source.shape) == 1 else None
    if x is None or target is None or sum(not isinstance(dim, int) for dim in target) > 1 or 0 in target.dims:
        return None
    return "Reshape", [x, _integers(node, [dim if isinstance(dim, int) else -1 for dim in target])]


_RULES: dict[str, Callable[[ir.Node], _Made]] = {
    "Add": _neutral_addend,
    "Div": _neutral_divisor,
    "Mul": _neutral_factor,
    "Reshape": _reshape,
    "Slice": _slice,
    "Sub": _neutral_subtrahend,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}


def _constant(node: ir.Node, k: int) -> np.ndarray | None:
    """Returns the array of an operand that is a constant, else None."""
    value = node.inputs[k] if k < len(node.inputs) else None
    tensor = None if value is None else value.const_value
    return None if tensor is None else tensor.numpy()


def _integers(node: ir.Node, numbers: list[int]) -> ir.Value:
    """Inserts a constant before a node, and returns it."""
    tensor = ir.tensor(np.array(numbers, np.int64))
    constant = ir.node("Constant", [], {"value": tensor})
    assert isinstance(node.graph, ir.Graph)
    node.graph.insert_before(node, constant)
    out = constant.outputs[0]
    out.name, out.const_value, out.shape = f"{node.outputs[0].name}.dims", tensor, ir.Shape([len(numbers)])
    out.type = ir.TensorType(tensor.dtype)
    return out
