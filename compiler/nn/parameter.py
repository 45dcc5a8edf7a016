"""A module's parameter: its values come from data, or are drawn from the seed and its path when they are needed.

A value depends on the seed, the parameter's dotted path and its shape, on nothing else: adding a layer changes no other
layer's weights. Drawing waits until the artifact is written, and of a large weight until a rank has its shard
(`ir/computed.py`), so a model of any size is built without its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import ml_dtypes  # noqa: F401, makes bfloat16 and its like known to numpy
import numpy as np
import onnx_ir as ir
import onnxscript.nn
from numpy.typing import NDArray
from partc.compiler.ir.computed import DrawnTensor
from partc.compiler.nn.init import Initializer
from partc.runtime.artifact.format import Law

_seed: ContextVar[int] = ContextVar("partc_seed", default=0)


def seed(value: int) -> None:
    """The seed of all parameters made from here on; 0 before the first call in a model.py."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"a seed is an int, got {value!r} of type {type(value).__name__}")
    _seed.set(value)


@contextmanager
def seed_of_its_own() -> Iterator[None]:
    """Within, the seed is 0 until the model says otherwise; afterwards it is what it was."""
    token = _seed.set(0)
    try:
        yield
    finally:
        _seed.reset(token)


class Parameter(onnxscript.nn.Parameter):
    """A weight of this shape: `data` gives its values, or `init` draws them; without either it cannot be compiled.

    `dtype` is a name as numpy and ml_dtypes write it. `learned`: whether training changes it. Raises ValueError where data and
    shape disagree.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: str | ir.DataType | None = None,
        name: str | None = None,
        data: ir.TensorProtocol | NDArray[np.generic] | None = None,
        init: Initializer | None = None,
        *,
        learned: bool = True,
    ) -> None:
        if data is not None and init is not None:
            raise ValueError("a parameter takes its values from data or from init, not from both")
        if init is not None and not isinstance(init, Initializer):
            raise TypeError(f"init takes an initializer such as nn.init.normal(0.02), got {init!r}")
        sizes = tuple(shape)
        if bad := [
            size for size in sizes if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 0
        ]:
            raise ValueError(f"a parameter's shape is of ints of at least 0, got {bad[0]!r} in {list(sizes)}")
        tensor = ir.tensor(data) if isinstance(data, np.ndarray) else data
        if tensor is not None and tensor.shape != sizes:
            raise ValueError(f"the data's shape {list(tensor.shape)} is not the parameter's shape {list(sizes)}")
        kind = ir.DataType.from_numpy(np.dtype(dtype)) if isinstance(dtype, str) else dtype
        super().__init__(sizes, kind, name, tensor)
        self.init, self.seed, self.path, self.learned = init, _seed.get(), "", learned
        if init is not None:
            numbers = tuple(int(size) for size in sizes)
            self.const_value = DrawnTensor(self._law, self.dtype or ir.DataType.FLOAT, numbers)

    def _law(self) -> Law:
        if not self.path:
            raise RuntimeError(
                f"the values of the parameter '{self.name}' are drawn from its path in the model, which it has only "
                "when the model is compiled; give data= to know them earlier"
            )
        assert self.init is not None
        assert self.shape is not None
        shape = tuple(int(size) for size in self.shape.numpy())
        return self.init.law(f"{self.seed}/{self.path}", shape)
