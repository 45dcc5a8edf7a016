"""The builder of gradient rules: one function for every op, and the facts about the values that a rule reads.

g.MatMul(dy, g.mT(b))     emits a Transpose and a MatMul, and gives the name of what this makes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, overload

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.scope import Scope
from partc.compiler.ir.graph import name_of, operand_name
from partc.compiler.ops.node import Dim, single
from partc.runtime.spellings import first_free, numbered

Name = str | None


class NoGradient(Exception):
    """A node through which no gradient passes, with the reason."""


class Emit(Protocol):
    """Emits one op: the name of its output, or with `outputs` a tuple of names."""

    @overload
    def __call__(self, *inputs: Name, outputs: int, **attributes: Any) -> tuple[str, ...]: ...
    @overload
    def __call__(self, *inputs: Name, **attributes: Any) -> str: ...


class GradientBuilder:
    """What a rule builds with: `g.<Op>(*names, **attributes)` emits a standard op and gives its output's name.

    `outputs=2` gives a tuple of names. An input that is absent is None or "". An attribute of None is left out.
    """

    def __init__(self, scope: Scope, node: ir.Node, wanted: Sequence[bool]) -> None:
        self.scope = scope
        self.node = node
        self.handles: dict[int, str] = {}
        self._wanted = wanted
        self._path = next(value.name for value in node.outputs if value.name)

    def __getattr__(self, op_type: str) -> Emit:
        if not op_type[0].isupper():
            raise AttributeError(op_type)

        def emit(*inputs: Name, outputs: int = 1, **attributes: Any) -> Any:
            base = self._first_free(f"{self._path}.grad.{op_type}", self.scope.values.__contains__)
            names = [base] if outputs == 1 else [f"{base}.{k}" for k in range(outputs)]
            given = {key: _attribute(value) for key, value in attributes.items() if value is not None}
            arguments = [one or "" for one in inputs]
            while arguments and not arguments[-1]:
                arguments.pop()
            made = self.scope.node(op_type, arguments, names, ir.convenience.convert_attributes(given))
            self.scope.add(made)
            return names[0] if outputs == 1 else tuple(names)

        return emit

    def wants(self, k: int) -> bool:
        """Whether the gradient of input `k` is needed."""
        return k < len(self._wanted) and self._wanted[k]

    def output(self, k: int) -> str:
        """The node's output `k`; where the node does not make it, it is asked to."""
        if k < len(self.node.outputs) and self.node.outputs[k].name:
            return name_of(self.node.outputs[k])
        if k not in self.handles:
            self.handles[k] = self.scope.derived(f"{self._path}.output{k}")
            extended = extend(self.node, self.handles)
            copy = self.scope.node(
                extended.op_type,
                [*map(operand_name, extended.inputs)],
                [*map(operand_name, extended.outputs)],
                list(extended.attributes.values()),
                extended.domain,
            )
            self.scope.infer(copy)
            self.scope.values[self.handles[k]] = copy.outputs[k]
        return self.handles[k]

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute of the node: a number, text (not bytes), or a list of numbers."""
        attr = self.node.attributes.get(name)
        return single(default if attr is None else attr.value)

    def constant(self, number: Any, like: str | None = None) -> str:
        """A number or array as a constant, in the type of `like`; integers without one are int64."""
        array = np.asarray(number)
        if like is not None:
            array = array.astype(self.dtype(like).numpy())
        elif array.dtype.kind in "iu":
            array = array.astype(np.int64)
        flat = array.ravel()
        text = "_".join(str(one) for one in flat[:6].tolist()) + ("_" if array.ndim else "")
        wanted = f"{self._path}.grad.{array.dtype}_{text}"
        known = self.scope.constants

        def is_another(name: str) -> bool:
            return name in known and not (known[name].shape == array.shape and np.array_equal(known[name], array))

        return self.scope.constant(self._first_free(wanted, is_another), array)

    def dtype(self, x: str) -> ir.DataType:
        """The type of a value's elements."""
        found = self.scope.value(x).dtype
        if found is None:
            raise NoGradient(f"the type of {x!r} is not known")
        return found

    def shape(self, x: str) -> tuple[Dim, ...] | None:
        """The dims of a value, as far as they are known; None where not even the rank is."""
        shape = self.scope.value(x).shape
        return None if shape is None else tuple(shape.dims)

    def static(self, x: str) -> tuple[int, ...] | None:
        """The dims of a value where every one is a number."""
        shape = self.shape(x)
        if shape is None:
            return None
        known = tuple(dim for dim in shape if isinstance(dim, int))
        return known if len(known) == len(shape) else None

    def rank(self, x: str) -> int:
        """The rank of a value."""
        shape = self.shape(x)
        if shape is None:
            raise NoGradient(f"the rank of {x!r} is not known")
        return len(shape)

    def known(self, x: str | None) -> np.ndarray | None:
        """The numbers of a value that is a constant, else None."""
        if not x:
            return None
        tensor = self.scope.value(x).const_value
        return None if tensor is None else tensor.numpy()

    def shape_of(self, x: str) -> str:
        """A value's shape at run time, a constant where it is static; of a primal it is taken in the forward pass."""
        static = self.static(x)
        if static is not None:
            return self.constant(np.array(static, np.int64))
        if x not in map(operand_name, (*self.node.inputs, *self.node.outputs)):
            return self.Shape(x)
        name = self.scope.derived(f"{x}.shape")
        if name not in self.scope.values:
            self.scope.add(self.scope.node("Shape", [x], [name]), early=True)
        return name

    def size_of(self, x: str, axes: Sequence[int] | None = None, like: str | None = None) -> str:
        """The number of elements of a value along axes (all where None) as a scalar, in the type of `like` or int64."""
        shape = self.shape(x)
        chosen = None if shape is None else [shape[axis] for axis in (range(len(shape)) if axes is None else axes)]
        if chosen is not None and all(isinstance(dim, int) for dim in chosen):
            return self.constant(math.prod(dim for dim in chosen if isinstance(dim, int)), like)
        sizes = self.shape_of(x)
        if axes is not None:
            sizes = self.Gather(sizes, self.constant(np.array([a % self.rank(x) for a in axes], np.int64)))
        count = self.ReduceProd(sizes, keepdims=0)
        return count if like is None else self.Cast(count, to=self.dtype(like))

    def zeros(self, x: str) -> str:
        """Zeros in the shape and type of a value."""
        zero = ir.tensor(np.zeros(1, self.dtype(x).numpy()))
        return self.ConstantOfShape(self.shape_of(x), value=zero)

    def mask(self, condition: str, like: str) -> str:
        """A condition as 1 and 0 in the type of `like`."""
        return self.Cast(condition, to=self.dtype(like))

    def sum(self, x: str, axes: Sequence[int], keepdims: bool = False) -> str:
        """The sum along axes; `x` itself where there are none."""
        if not axes:
            return x
        return self.ReduceSum(x, self.constant(np.array(axes, np.int64)), keepdims=int(keepdims))

    def reshape(self, x: str, dims: Sequence[int]) -> str:
        """The value in a shape of which one dim may be -1, and 0 takes over the value's."""
        return self.Reshape(x, self.constant(np.array(dims, np.int64)))

    def unsqueeze(self, x: str, *axes: int) -> str:
        """The value with dims of 1."""
        return self.Unsqueeze(x, self.constant(np.array(axes, np.int64)))

    def mT(self, x: str) -> str:
        """A batch of matrices, each transposed."""
        rank = self.rank(x)
        return self.Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])

    def _first_free(self, name: str, is_taken: Callable[[str], bool]) -> str:
        """The first of `name`, `name2`, `name3` and so on, each with strokes where another value has it, that is not taken."""
        return first_free(self.scope.derived(name), is_taken, lambda _: map(self.scope.derived, numbered(name, "", 2)))


def extend(node: ir.Node, outputs: Mapping[int, str]) -> ir.Node:
    """The node with further outputs, by index; the node itself where there are none."""
    if not outputs:
        return node
    names = [*map(operand_name, node.outputs)]
    names += [""] * (max(outputs) + 1 - len(names))
    for k, name in outputs.items():
        names[k] = name
    extended = ir.Node(
        node.domain,
        node.op_type,
        [None if value is None else ir.Value(name=value.name) for value in node.inputs],
        list(node.attributes.values()),
        outputs=[ir.Value(name=name) for name in names],
        name=node.name,
        overload=node.overload,
        version=node.version,
    )
    extended.metadata_props.update(node.metadata_props)
    return extended


def _attribute(value: Any) -> Any:
    if isinstance(value, ir.DataType):
        return int(value)
    if isinstance(value, np.ndarray):
        return ir.tensor(value)
    return value
