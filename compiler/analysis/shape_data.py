"""The contents of small integer tensors: the entries of shapes, indices and sizes, followed through the ops that compute them.

An entry is an expression over the symbols, or None where it is known only at run time. Booleans are 0 and 1. Numbers of float tensors are
followed while they are exact: whole numbers, and products with fractions of a power of two.

    Shape(x) = [batch, 2*seq, 64]    Gather(_, 1) = 2*seq    Div(_, 2) = seq    Equal(_, -1) = 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import sympy
from onnx_shape_inference import SYM_DATA_KEY, ShapeInferenceContext
from partc.compiler.dims.expression import facts_of
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.normal import as_dim, is_integral, normal
from partc.compiler.dims.reading import largest, read, smallest, symbol
from partc.compiler.ir.computed import is_absent

LARGEST = 256
FINEST = 1024
MOST_COMPARED = 16
"""A maximum of more symbolic entries than this is not followed: `normal` compares every pair."""
NAMED = "partc.named_entry"
"""Key of a tensor's meta: a name for its single entry, known only at run time, so that sizes equal to it are known to be equal."""
Entry: TypeAlias = "sympy.Expr | None"
Entries: TypeAlias = npt.NDArray[Any]
"""An array of entries."""
Known: TypeAlias = Mapping[str, Facts]

_INTEGERS = frozenset(
    getattr(ir.DataType, name) for name in ("INT64", "INT32", "INT16", "INT8", "UINT64", "UINT32", "UINT16", "UINT8")
)
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})
_WIDE = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL}) | _FLOATS
"""Types that can represent every size."""


def entries_of(ctx: ShapeInferenceContext, value: ir.Value | None) -> Entries | None:
    """The entries of a value in its shape; None where nothing is known of them."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None:
        if is_absent(tensor) or tensor.size > LARGEST or tensor.dtype not in _INTEGERS | _FLOATS | {ir.DataType.BOOL}:
            return None
        return _array([_number(one) for one in tensor.numpy().ravel().tolist()], tuple(tensor.shape.numpy()))
    held = ctx.get_symbolic_value(value) if SYM_DATA_KEY in value.metadata_props else None
    shape = _numbers(value)
    if held is None or shape is None or math.prod(shape) != len(held):
        return None
    return _array([sympy.Integer(one) if isinstance(one, int) else read(str(one.value)) for one in held], shape)


def may_have_entries(value: ir.Value | None) -> bool:
    """Whether `entries_of` can know entries of a value: it is a constant, or entries were recorded for it."""
    if value is None:
        return False
    return SYM_DATA_KEY in value.metadata_props or ir.convenience.get_const_tensor(value) is not None


def scalar_of(ctx: ShapeInferenceContext, value: ir.Value | None) -> Entry:
    """Returns the single entry of a value; None where it is unknown, or there is not exactly one."""
    entries = entries_of(ctx, value)
    return entries.ravel()[0] if entries is not None and entries.size == 1 else None


def integers_of(ctx: ShapeInferenceContext, value: ir.Value | None) -> list[int] | None:
    """Returns the entries of a value if all are integers; else None."""
    entries = entries_of(ctx, value)
    found = [] if entries is None else [one for one in entries.ravel() if isinstance(one, sympy.Integer)]
    return None if entries is None or len(found) != entries.size else [int(one) for one in found]


def follow(ctx: ShapeInferenceContext, node: ir.Node, known: Known) -> None:
    """Records the entries of a node's outputs, replacing those of the engine."""
    rule = FOLLOWED.get(node.op_type) if node.domain == "" else None
    found = rule(_Node(ctx, node, known)) if rule else None
    outputs = [found] if isinstance(found, np.ndarray) else found or []
    for k, out in enumerate(node.outputs):
        entries = outputs[k] if k < len(outputs) else None
        if entries is None and NAMED in out.meta:
            entries = _array([symbol(out.meta[NAMED])], (1,))
        shape = _numbers(out)
        if entries is None or entries.size > LARGEST or shape is None or math.prod(shape) != entries.size:
            out.metadata_props.pop(SYM_DATA_KEY, None)
            continue
        flat = [None if one is None else normal(one, known) for one in entries.ravel()]
        if out.dtype in _INTEGERS:
            flat = [one if one is not None and is_integral(one, known) else None for one in flat]
        ctx.set_symbolic_value(out, [ctx.new_symbolic_dim() if one is None else as_dim(one) for one in flat])


class _Node:
    """A node, with access to its inputs' entries."""

    def __init__(self, ctx: ShapeInferenceContext, node: ir.Node, known: Known) -> None:
        self.ctx, self.node, self.known = ctx, node, known

    def entries(self, k: int = 0) -> Entries | None:
        return entries_of(self.ctx, self.value(k))

    def integers(self, k: int, name: str) -> list[int] | None:
        """Returns a list of integers that is an attribute in older opsets and an input in newer ones."""
        if name in self.node.attributes:
            return list(self.node.attributes[name].as_ints())
        return integers_of(self.ctx, self.value(k))

    def value(self, k: int) -> ir.Value | None:
        return self.node.inputs[k] if k < len(self.node.inputs) else None

    def axis(self, default: int = 0) -> int:
        return self.node.attributes.get_int("axis", default)

    def facts(self, entry: sympy.Expr) -> Facts:
        """Returns the facts about an entry; those of any integer if a name in it is not a symbol."""
        names = {str(name) for name in entry.free_symbols}
        return facts_of(entry, self.known) if names <= set(self.known) else Facts(1, 0, None, None)


def _number(value: float) -> Entry:
    if isinstance(value, bool | int):
        return sympy.Integer(int(value))
    exact = sympy.Rational(*value.as_integer_ratio()) if math.isfinite(value) else None
    return exact if exact is not None and exact.q <= FINEST else None


def _numbers(value: ir.Value) -> tuple[int, ...] | None:
    """Returns a shape if all dims are integers; else None."""
    dims = [] if value.shape is None else [dim for dim in value.shape.dims if isinstance(dim, int)]
    return None if value.shape is None or len(dims) != len(value.shape) else tuple(dims)


def _array(entries: Sequence[Entry], shape: Sequence[int]) -> Entries:
    found = np.empty(len(entries), object)
    found[:] = entries
    return found.reshape(shape)


def _each(rule: Callable[[_Node, list[Any]], Entry]) -> Callable[[_Node], Entries | None]:
    """Turns a rule for single entries into one that broadcasts; where an operand's entry is unknown, so is the result's."""

    def whole(at: _Node) -> Entries | None:
        if not all(
            map(may_have_entries, at.node.inputs)
        ):  # a bias becomes numbers only if what it is added to has some
            return None
        operands = [one for k in range(len(at.node.inputs)) if (one := at.entries(k)) is not None]
        if len(operands) < len(at.node.inputs):
            return None
        arrays = np.broadcast_arrays(*operands)
        rows = zip(*(array.ravel() for array in arrays), strict=True)
        return _array([None if None in row else rule(at, list(row)) for row in rows], arrays[0].shape)

    return whole


def _divide(at: _Node, row: list[Any]) -> Entry:
    """The quotient: of integers rounded towards 0, of floats only where it is exact; None otherwise."""
    above, below = row
    if at.node.outputs[0].dtype in _INTEGERS:
        return sympy.floor(above / below) if at.facts(above).low >= 0 and at.facts(below).low >= 0 else None
    return above / below if isinstance(below, sympy.Integer) and abs(int(below)).bit_count() == 1 else None


def _modulo(at: _Node, row: list[Any]) -> Entry:
    value, modulus = row
    fine = at.facts(modulus).low >= 0 and (at.facts(value).low >= 0 or not at.node.attributes.get_int("fmod", 0))
    return sympy.Mod(value, modulus) if fine else None


def _power(at: _Node, row: list[Any]) -> Entry:
    base, exponent = row
    return base**exponent if isinstance(exponent, sympy.Integer) and 0 <= exponent <= 4 else None


def _compare(least: float, most: float) -> Callable[[_Node, list[Any]], Entry]:
    """Returns a rule: whether the difference of two entries is within bounds; None where that depends on the symbols' values."""

    def rule(at: _Node, row: list[Any]) -> Entry:
        q = math.lcm(*(int(number.q) for one in row for number in one.atoms(sympy.Rational)))
        facts = at.facts(sympy.expand((row[0] - row[1]) * q))
        if least <= facts.low and facts.high <= most:
            return sympy.Integer(1)
        apart = facts.high < least or facts.low > most or (least == most == 0 and not facts.contains(0))
        return sympy.Integer(0) if apart else None

    return rule


def _where(at: _Node) -> Entries | None:
    condition, a, b = (at.entries(k) for k in range(3))
    if a is None or b is None:
        return None
    arrays = np.broadcast_arrays(np.full((1,), None, object) if condition is None else condition, a, b)
    rows = zip(*(array.ravel() for array in arrays), strict=True)
    return _array([_chosen(*row) for row in rows], arrays[0].shape)


def _chosen(condition: Entry, a: Entry, b: Entry) -> Entry:
    if condition is None:
        return a if a == b else None
    return b if condition == 0 else a if isinstance(condition, sympy.Integer) else None


def _cast(at: _Node) -> Entries | None:
    entries, wanted = at.entries(), ir.DataType(at.node.attributes["to"].as_int())
    if entries is None or wanted not in _WIDE:
        return None
    return _array([None if one is None else _converted(at, one, wanted) for one in entries.ravel()], entries.shape)


def _converted(at: _Node, entry: Any, wanted: ir.DataType) -> Entry:
    if wanted == ir.DataType.BOOL:
        if isinstance(entry, sympy.Integer):
            return sympy.Integer(int(entry != 0))
        return None if at.facts(entry).contains(0) else sympy.Integer(1)
    if wanted in _FLOATS or is_integral(entry, at.known):
        return entry
    return sympy.floor(entry) if at.facts(entry).low >= 0 else None


def _shape(at: _Node) -> Entries | None:
    value = at.value(0)
    if value is None or value.shape is None:
        return None
    dims = [sympy.Integer(dim) if isinstance(dim, int) else read(str(dim.value)) for dim in value.shape.dims]
    chosen = dims[at.node.attributes.get_int("start", 0) : at.node.attributes.get_int("end", len(dims))]
    if at.node.op_type == "Shape":
        return _array(chosen, (len(chosen),))
    return _array([None if None in dims else sympy.Mul(*dims)], ())


def _same_order(at: _Node) -> Entries | None:
    entries, shape = at.entries(), _numbers(at.node.outputs[0])
    return entries.reshape(shape) if entries is not None and shape and math.prod(shape) == entries.size else entries


def _concat(at: _Node) -> Entries | None:
    """Concatenates entries; an operand of known length but unknown entries contributes unknown entries."""
    parts = []
    for k, value in enumerate(at.node.inputs):
        shape = None if value is None else _numbers(value)
        entries = at.entries(k)
        if entries is None and (shape is None or math.prod(shape) > LARGEST):
            return None
        parts.append(np.full(shape or (), None, object) if entries is None else entries)
    return np.concatenate(parts, axis=at.axis())


def _gather(at: _Node) -> Entries | None:
    entries, places = at.entries(), at.entries(1)
    if entries is None or places is None or not all(isinstance(one, sympy.Integer) for one in places.ravel()):
        return None
    return np.asarray(np.take(entries, places.astype(np.int64), axis=at.axis()), object)


def _slice(at: _Node) -> Entries | None:
    entries = at.entries()
    starts, ends = at.integers(1, "starts"), at.integers(2, "ends")
    if entries is None or starts is None or ends is None:
        return None
    absent = [at.value(k) is None for k in (3, 4)]
    axes = list(range(len(starts))) if absent[0] and "axes" not in at.node.attributes else at.integers(3, "axes")
    steps = [1] * len(starts) if absent[1] else at.integers(4, "steps")
    if axes is None or steps is None:
        return None
    chosen = [slice(None)] * entries.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        size = entries.shape[axis]
        beyond = None if step < 0 and end < -size else end
        chosen[axis] = slice(start, beyond, step)
    return entries[tuple(chosen)]


def _split(at: _Node) -> list[Entries]:
    entries, start, splits = at.entries(), 0, []
    for out in at.node.outputs:
        shape = _numbers(out)
        if entries is None or shape is None or entries.ndim != 1:
            return []
        splits.append(entries[start : start + shape[0]])
        start += shape[0]
    return splits


def _expand(at: _Node) -> Entries | None:
    entries, shape = at.entries(), _numbers(at.node.outputs[0])
    if entries is None or shape is None or math.prod(shape) > LARGEST:
        return None
    return np.broadcast_to(entries, shape)


def _filled(at: _Node) -> Entries | None:
    shape = _numbers(at.node.outputs[0])
    if shape is None or math.prod(shape) > LARGEST:
        return None
    value = at.node.attributes["value"].as_tensor().numpy().item() if "value" in at.node.attributes else 0.0
    return _array([_number(value)] * math.prod(shape), shape)


def _range(at: _Node) -> Entries | None:
    bounds = [integers_of(at.ctx, value) for value in at.node.inputs]
    if any(bound is None or len(bound) != 1 for bound in bounds):
        return None
    numbers = range(*(bound[0] for bound in bounds if bound))
    return None if len(numbers) > LARGEST else _array([sympy.Integer(n) for n in numbers], (len(numbers),))


def _reduce(fold: Callable[..., Any]) -> Callable[[_Node], Entries | None]:
    def rule(at: _Node) -> Entries | None:
        entries, shape = at.entries(), _numbers(at.node.outputs[0])
        given = at.value(1) is not None or "axes" in at.node.attributes
        axes = at.integers(1, "axes") if given else []
        if entries is None or shape is None or axes is None or not entries.size:
            return None
        noop: int = at.node.attributes.get_int("noop_with_empty_axes", 0)
        if not axes and noop:
            return entries
        chosen = {axis % entries.ndim for axis in axes} or set(range(entries.ndim))
        order = [axis for axis in range(entries.ndim) if axis not in chosen] + sorted(chosen)
        rows = entries.transpose(order).reshape(math.prod(shape), -1)
        return _array([None if None in row else fold(*row) for row in rows.tolist()], shape)

    return rule


def _largest(*row: sympy.Expr) -> Entry:
    return _compared(largest(*row))


def _smallest(*row: sympy.Expr) -> Entry:
    return _compared(smallest(*row))


def _compared(extreme: sympy.Expr) -> Entry:
    return extreme if len(extreme.args) <= MOST_COMPARED else None


FOLLOWED: dict[str, Callable[[_Node], Entries | list[Entries] | None]] = {
    **dict.fromkeys(("Shape", "Size"), _shape),
    **dict.fromkeys(("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"), _same_order),
    "Cast": _cast,
    "Concat": _concat,
    "ConstantOfShape": _filled,
    "Expand": _expand,
    "Gather": _gather,
    "Range": _range,
    "Slice": _slice,
    "Split": _split,
    "Where": _where,
    "ReduceMax": _reduce(_largest),
    "ReduceMin": _reduce(_smallest),
    "ReduceProd": _reduce(sympy.Mul),
    "ReduceSum": _reduce(sympy.Add),
    "Abs": _each(lambda at, row: sympy.Abs(*row)),
    "Add": _each(lambda at, row: sympy.Add(*row)),
    "And": _each(lambda at, row: sympy.Mul(*row)),
    "Ceil": _each(lambda at, row: sympy.ceiling(*row)),
    "Div": _each(_divide),
    "Equal": _each(_compare(0, 0)),
    "Floor": _each(lambda at, row: sympy.floor(*row)),
    "Greater": _each(_compare(1, math.inf)),
    "GreaterOrEqual": _each(_compare(0, math.inf)),
    "Less": _each(_compare(-math.inf, -1)),
    "LessOrEqual": _each(_compare(-math.inf, 0)),
    "Max": _each(lambda at, row: _largest(*row)),
    "Min": _each(lambda at, row: _smallest(*row)),
    "Mod": _each(_modulo),
    "Mul": _each(lambda at, row: sympy.Mul(*row)),
    "Neg": _each(lambda at, row: -row[0]),
    "Not": _each(lambda at, row: 1 - row[0]),
    "Or": _each(lambda at, row: _largest(*row)),
    "Pow": _each(_power),
    "Sub": _each(lambda at, row: row[0] - row[1]),
    "Sum": _each(lambda at, row: sympy.Add(*row)),
}
"""Maps each op of ai.onnx to a function that computes what its outputs contain."""
