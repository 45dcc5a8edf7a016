"""The local form of a node: the nodes that replace it on one rank, or on several ranks that differ only in constants by their place.

Within a form, values have handles: names of operands, outputs and intermediate values that are valid only in this form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
from partc.compiler.ir.constants import Constant, RankConstant
from partc.compiler.ir.graph import captured_by, name_of, operand_name
from partc.compiler.ir.programs import Compute, Value
from partc.compiler.ir.value_info import Array


@dataclass
class LocalForm:
    """The local form of a node on one rank, or on several that differ only in constants by their place: its local nodes and constants, by
    handle.

    `values`: maps the handle of each operand and output to its value; `outputs` lists the outputs' handles. `captured`: maps each name that
    the node's bodies read from outside to its handle. `ends`: the values of rank-dependent constants on the first and the last rank. `ops`:
    the nodes over values instead of handles, once they are built.
    """

    source: ir.Node
    nodes: Sequence[ir.Node]
    values: dict[str, Value]
    outputs: tuple[str, ...]
    captured: Mapping[str, str] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    ends: tuple[Mapping[str, Array], ...] = ()
    ops: Sequence[Compute] = ()

    @property
    def fixed(self) -> dict[str, Array]:
        """The constants that are the same on all of the ranks."""
        return {name: one for name, one in self.constants.items() if not isinstance(one, RankConstant)}

    @property
    def unknown(self) -> list[ir.Value]:
        """The constants that differ by rank, as values of known type."""
        laws = {name: one for name, one in self.constants.items() if isinstance(one, RankConstant)}
        return [
            ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(one.dtype)), shape=ir.Shape(one.shape))
            for name, one in laws.items()
        ]

    @property
    def inner(self) -> list[str]:
        """The handles of constants and intermediate values: all values but the operands and the node's outputs."""
        made = (operand_name(out) for node in self.nodes for out in node.outputs)
        return [name for name in dict.fromkeys([*self.constants, *made]) if name and name not in self.outputs]

    def handle(self, value: Value) -> str:
        """The handle of an operand or an output."""
        return next(name for name, one in self.values.items() if one is value)


def over_values(
    nodes: Sequence[ir.Node],
    source: ir.Node | None,
    values: Mapping[str, Value],
    captured: Mapping[str, str] | None = None,
) -> list[Compute]:
    """Converts nodes whose operands are handles to nodes over the values of these handles."""
    ops = []
    for node in nodes:
        inputs = tuple([None if one is None or not one.name else values[one.name] for one in node.inputs])
        outputs = tuple([values[one.name] if one.name else None for one in node.outputs])
        read = dict.fromkeys(map(name_of, captured_by(node)))
        inner = {name: values[(captured or {}).get(name, name)] for name in read}
        label = values.get(node.name, node.name) if node.name else ""
        ops.append(Compute(node, source or node, inputs, outputs, inner, label))
    return ops
