"""The numbers of a weight of a rank file; in its file they may be floats of 16 bits, which are widened exactly when they are read.

w: float[8, 4], partc.stored: bfloat16, 64 bytes of weights/rank_0000.safetensors
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from partc.runtime.artifact.format import STORED
from partc.runtime.artifact.graph.onnx_graph import metadata_of
from partc.runtime.artifact.tensors.dtypes import BY_CODE, BY_NAME, Array, Dtype
from partc.runtime.files.regular import open_regular

if TYPE_CHECKING:
    from onnx import TensorProto

WIDENED = {"float": ("float16", "bfloat16")}
"""By element type of a weight the narrower types in which its file may have it."""
_RUN = 1 << 22


def stored_type(tensor: TensorProto) -> Dtype | None:
    """The element type of a weight in its file; None of one that is not dense."""
    return BY_NAME.get(metadata_of(tensor, STORED)) if is_widened(tensor) else BY_CODE.get(tensor.data_type)


def is_widened(tensor: TensorProto) -> bool:
    """Whether a weight has another type in its file than in the program."""
    return bool(tensor.external_data and metadata_of(tensor, STORED))


def numbers(tensor: TensorProto, folder: Path) -> Array:
    """The elements of a weight; its file, in `folder`, is one that was checked."""
    from onnx import numpy_helper

    if not is_widened(tensor):
        found: Array = numpy_helper.to_array(tensor, base_dir=str(folder))
        return found
    entries = {entry.key: entry.value for entry in tensor.external_data}
    stored = BY_NAME[metadata_of(tensor, STORED)]
    wide = np.empty(tuple(tensor.dims), BY_CODE[tensor.data_type].numpy)
    flat = wide.reshape(-1)
    run = memoryview(bytearray(min(_RUN, stored.bytes_of(wide.shape))))
    with open_regular(folder / entries["location"]) as file:
        file.seek(int(entries.get("offset", 0)))
        for begin in range(0, flat.size, _RUN * 8 // stored.bits):
            into = flat[begin : begin + _RUN * 8 // stored.bits]
            part = run[: into.size * stored.bits // 8]
            if file.readinto(part) != len(part):
                raise EOFError(f"'{entries['location']}' was cut short while it was read")
            into[:] = _widened(np.frombuffer(part, stored.numpy))
    return wide


def _widened(array: Array) -> Array:
    """The same numbers in float32, NaN with its bits: a bfloat16 is the upper half of one."""
    if array.dtype.name != "bfloat16":
        return array.astype(np.float32)
    wide: Array = np.left_shift(array.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    return wide
