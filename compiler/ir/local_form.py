"""The local form of a node: the ops that stand for it on one rank, or on several that differ only in constants by their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir
from partc.compiler.ir.rank_program import ComputeOp, Constant, RankConstant, with_names
from partc.compiler.ir.value_info import Array, Shape


@dataclass
class LocalForm:
    """A node on one rank, or on several that differ only in constants by their place: its local ops, constants and types.

    `ends`: what constants by a rank's place are on the first and the last rank.
    """

    ops: list[ComputeOp] = field(default_factory=list)
    constants: dict[str, Constant] = field(default_factory=dict)
    types: dict[str, tuple[ir.Value, Shape | None]] = field(default_factory=dict)

    ends: tuple[Mapping[str, Array], ...] = ()

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
        """The names of constants and intermediate values: all but the node's outputs."""
        made = (out.name or "" for op in self.ops for out in op.node.outputs)
        return [name for name in dict.fromkeys([*self.constants, *made]) if name and name not in self.types]

    def renamed(self, names: Mapping[str, str]) -> LocalForm:
        """This form with other names for its inner values."""
        if not names:
            return self
        ops = [replace(op, node=with_names(op.node, names)) for op in self.ops]
        constants = {names.get(name, name): one for name, one in self.constants.items()}
        ends = tuple({names.get(name, name): one for name, one in end.items()} for end in self.ends)
        return LocalForm(ops, constants, self.types, ends)
