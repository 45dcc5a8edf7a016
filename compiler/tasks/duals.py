"""Layouts of cotangents, the duals of their primals', and values of the backward pass as programs list them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.ir.choice import NodeSharding
from partc.compiler.ir.program import Program, Shape, ValueInfo
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import on_common_mesh


@dataclass(frozen=True)
class Passing:
    """Terms of a sum that pass through a node, on the mesh of `layout`."""

    layout: Layout
    terms: tuple[tuple[int, str], ...]

    def through(self, layout: Layout) -> Layout:
        """The layout of an input's cotangent, with these terms."""
        common = on_common_mesh(layout, self.layout)
        assert common is not None
        own = common[0]
        return Layout(own.mesh, own.cuts, tuple(sorted({*own.partial, *self.terms})))


def typed(program: Program, value: ir.Value) -> tuple[ir.Value, Shape | None]:
    """A value of the backward pass as programs list it: its shape where the symbols tell it."""
    dims: list[int | str] | None = None if value.shape is None else []
    for dim in value.shape.dims if value.shape is not None else ():
        if isinstance(dim, int):
            assert dims is not None
            dims.append(dim)
        elif dim.value is not None and dims is not None and dim.free_symbols() <= program.symbols.keys():
            dims.append(str(dim.value))
        else:
            dims = None
            break
    shape = None if dims is None else tuple(dims)
    copy = ir.Value(name=value.name, type=value.type, shape=None if shape is None else ir.Shape(shape))
    bits = value.dtype.bitwidth if value.dtype is not None else None
    assert isinstance(program.values, dict)
    program.values[copy] = ValueInfo(type_text(value.type), shape, bits // 8 if bits and bits % 8 == 0 else None)
    return copy, shape


def dual(choice: NodeSharding, cuts: tuple[tuple[int, ...], ...], summed: Collection[int]) -> Layout:
    """Cuts stay; an axis that cuts the node, but not this operand, leaves terms of a sum, unless it is `summed` itself."""
    used = {axis for axes in (*choice.axes.values(), choice.passing) for axis in axes}
    here = {axis for axes in cuts for axis in axes}
    return Layout(choice.mesh, cuts, tuple((axis, "sum") for axis in sorted(used.difference(here, summed))))
