"""Local forms that are equal except for the handles of their values, such as those of equal layers: their gradients are computed once.

In a gradient that is kept, places stand for handles, in the order in which the key meets them:

    h = MatMul(x, w)    <2> = MatMul(<0>, <1>)    <0>.grad = MatMul(<2>.grad, <2>.grad.Transpose)

The law: the key has all that `differentiate_nodes` reads of a form and of what it is asked; names it reads only to make others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnx_ir as ir
from partc.compiler.ir.computed import is_absent
from partc.compiler.ir.graph import name_of, operand_name
from partc.compiler.ir.value_info import Array

_FEW = 64
_PLACE = re.compile(r"<\d+>")
_WITHOUT_BODIES = frozenset(
    ir.AttributeType[name] for name in ("INT", "INTS", "FLOAT", "FLOATS", "STRING", "STRINGS", "TENSOR")
)


class Places(dict[str, str]):
    """Maps each handle to its place."""

    def __missing__(self, handle: str) -> str:
        place = self[handle] = f"<{len(self)}>" if handle else ""
        return place

    @cached_property
    def handles(self) -> dict[str, str]:
        """Maps each place to its handle."""
        return {place: handle for handle, place in self.items()}

    def text(self, name: str) -> str:
        """The name over handles that one over places stands for."""
        return _PLACE.sub(lambda place: self.handles.get(place[0], place[0]), name)


@dataclass(frozen=True)
class Requested:
    """What is asked of the gradient of some nodes, by handles: of the `seeds`, cotangents by output, those of what is `outputs`.

    `constants`: those that are the same on all ranks; `ends`: all of them on the first and the last rank, where some differ, which
    `unknown` shows as values. `by_rows`: the tables whose gradients are given as rows.
    """

    nodes: Sequence[ir.Node]
    values: Sequence[ir.Value]
    unknown: Sequence[ir.Value]
    constants: Mapping[str, Array]
    ends: Sequence[Mapping[str, Array]]
    seeds: Mapping[str, str]
    outputs: Sequence[str]
    by_rows: Sequence[str]

    def key(self, places: Places) -> Hashable | None:
        """Equal for what is alike; None where a node has a body. Fills in `places`."""
        key: list[Hashable] = []
        for value in (*self.values, *self.unknown):
            key += (places[name_of(value)], *_kind(value, value.const_value))
        key += [len(self.values), len(self.constants), len(self.ends)]
        for name, array in [pair for some in (self.constants, *self.ends) for pair in some.items()]:
            key += (places[name], array.dtype.str, array.shape, array.tobytes())
        for node in self.nodes:
            key += (node.op_type, node.domain, node.version, len(node.inputs))
            for name, attribute in node.attributes.data.items():
                if attribute.type not in _WITHOUT_BODIES:
                    return None
                key += (name, attribute.value)
            for operand in (*node.inputs, *node.outputs):
                name = operand_name(operand)
                if operand is not None and name and name not in places:
                    key += _kind(operand, ir.convenience.get_const_tensor(operand))
                key.append(places[name])
        key += [places[name] for pair in self.seeds.items() for name in pair]
        key.append(len(self.seeds))
        key += [places[name] for name in self.outputs]
        key.append(len(self.outputs))
        key += [places[name] for name in self.by_rows]
        return tuple(key)

    def over(self, places: Places) -> Requested:
        """The same over places."""
        return Requested(
            [_node(node, places) for node in self.nodes],
            _values(self.values, places),
            _values(self.unknown, places),
            {places[name]: array for name, array in self.constants.items()},
            [{places[name]: array for name, array in some.items()} for some in self.ends],
            {places[out]: places[dy] for out, dy in self.seeds.items()},
            [places[name] for name in self.outputs],
            [places[name] for name in self.by_rows],
        )


def _kind(value: ir.Value, constant: ir.TensorProtocol | None) -> tuple[Hashable, ...]:
    """What is read of a value; a constant of many elements, or of texts, is itself alone."""
    kind: tuple[Any, ...] = (None if value.shape is None else value.shape.dims, value.type)
    if isinstance(value.type, ir.TensorType):  # by its parts, since a type is hashed by its text
        kind = (kind[0], "tensor", value.type.dtype)
    if constant is None:
        return kind
    dims: Sequence[Any] = constant.shape.dims
    few = math.prod(dims) <= _FEW and constant.dtype != ir.DataType.STRING and not is_absent(constant)
    return *kind, constant.dtype, dims, constant.tobytes() if few else constant


def _node(node: ir.Node, places: Places) -> ir.Node:
    return ir.Node(
        node.domain,
        node.op_type,
        [None if one is None else _value(one, places, ir.convenience.get_const_tensor(one)) for one in node.inputs],
        list(node.attributes.values()),
        outputs=[_value(one, places, None) for one in node.outputs],
        overload=node.overload,
        version=node.version,
        metadata_props=dict(node.metadata_props),
    )


def _values(values: Iterable[ir.Value], places: Places) -> list[ir.Value]:
    return [_value(one, places, one.const_value) for one in values]


def _value(value: ir.Value, places: Places, constant: ir.TensorProtocol | None) -> ir.Value:
    return ir.Value(name=places[operand_name(value)], type=value.type, shape=value.shape, const_value=constant)
