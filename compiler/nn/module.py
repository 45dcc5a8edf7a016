"""Modules: onnxscript's own, which mirror torch's, with the switch between training and inference.

A forward gets the op builder first and calls ONNX ops and other modules with it:

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 32)

        def forward(self, op, x):
            return op.Relu(self.up(op, x))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import onnx.defs
import onnx_ir as ir
import onnxscript.nn
from onnxscript import OpBuilder
from partc.compiler.directives.place_calls import Ranks, place
from partc.compiler.directives.shard_calls import shard
from partc.compiler.directives.traced import note_call
from partc.runtime.spellings import nearest

if TYPE_CHECKING:
    Base = onnxscript.nn.Module
else:
    Base = object

Self = TypeVar("Self", bound="Switch")
Attribute = int | float | str | Sequence[int] | Sequence[float] | Sequence[str] | ir.TensorProtocol


class Switch(Base):
    """The mode that BatchNorm2d and Dropout look at: `training` is False until `train()` is called."""

    training: bool = False

    def train(self: Self, mode: bool = True) -> Self:
        """This module and all within it in training mode, or with `mode=False` in inference mode."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self: Self) -> Self:
        """This module and all within it in inference mode."""
        return self.train(False)

    def shard(
        self: Self,
        in_strategy: Sequence[Sequence[Any] | None] | None = None,
        out_strategy: Sequence[Sequence[Any] | None] | None = None,
        parameter_plan: Mapping[str, Sequence[Any]] | None = None,
        device: str | None = None,
        level: int = 0,
    ) -> Self:
        """Cuts this module over its group, as `partc.compiler.shard` does, and hands it back."""
        return shard(self, in_strategy, out_strategy, parameter_plan, device, level)

    def place(
        self: Self,
        *where: Ranks | str,
        role: str | None = None,
        rank: Ranks | None = None,
        rank_id: int | None = None,
        device: str | None = None,
    ) -> Self:
        """Runs this module where it is said, as `partc.compiler.place` does, and hands it back: `place("MS_WORKER", 0)`."""
        return place(self, *where, role=role, rank=rank, rank_id=rank_id, device=device)

    def __call__(self, op: OpBuilder, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(op, *args, **kwargs)
        note_call(self, [*args, *kwargs.values()], result)
        return result


class Module(Switch, onnxscript.nn.Module):
    """The base of all layers and models: attributes that are modules or parameters become its parts."""


class ModuleList(Switch, onnxscript.nn.ModuleList):
    """Modules in a list, to be called one by one: their paths are `layers.0`, `layers.1`."""


class Sequential(Switch, onnxscript.nn.Sequential):
    """Modules that are called in order, each with the result of the one before."""


class Op(Module):
    """An op that has a name in the model, so that it can be cut and placed where it is made.

        self.matmul1 = nn.Op("MatMul").shard(((2, 4), (4, 1)))        in forward: self.matmul1(op, x, weight)

    `attributes` are the op's own; it is called with the op builder and the op's inputs.
    """

    def __init__(self, op_type: str, /, **attributes: Attribute) -> None:
        super().__init__()
        if not onnx.defs.has(op_type):
            near = nearest(
                op_type, sorted({schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain})
            )
            listed = ", ".join(f"'{name}'" for name in near)
            raise ValueError(f"ONNX has no op '{op_type}'" + (f"; the nearest are {listed}" if near else ""))
        self.op_type, self.attributes = op_type, attributes

    def forward(self, op: OpBuilder, *inputs: ir.Value | float | None) -> ir.Value | tuple[ir.Value, ...]:
        made: ir.Value | tuple[ir.Value, ...] = getattr(op, self.op_type)(*inputs, **self.attributes)
        return made
