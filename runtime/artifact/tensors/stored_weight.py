"""Reads the elements of a weight of a rank file; its file may store floats of 16 bits, which are widened exactly when they are read.

w: float[8, 4], partc.stored: bfloat16, 64 bytes of weights/rank_0000.safetensors

The file may be one outside of the artifact, which has the tensor of which the weight is a box: the location is that of the whole tensor.

w: float[8, 4], partc.source: fc1.weight[8:16/16, 0:4/4], 256 bytes of referenced/0/model.safetensors
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from partc.runtime.artifact.format import SOURCE, STORED, Manifest
from partc.runtime.artifact.graph.onnx_graph import metadata_of
from partc.runtime.artifact.tensors.dtypes import BY_CODE, BY_NAME, Array, Dtype
from partc.runtime.files.regular import open_regular

if TYPE_CHECKING:
    from onnx import TensorProto

WIDENED = {"float": ("float16", "bfloat16")}
"""Maps the element type of a weight to the narrower types that its file may have."""
_RUN = 1 << 22
_SPAN = re.compile(r"(\d+):(\d+)/(\d+)")


def stored_type(tensor: TensorProto) -> Dtype | None:
    """Returns the element type of a weight in its file; None if it is not dense."""
    return BY_NAME.get(metadata_of(tensor, STORED)) if is_widened(tensor) else BY_CODE.get(tensor.data_type)


def is_widened(tensor: TensorProto) -> bool:
    """Whether a weight has another type in its file than in the program."""
    return bool(tensor.external_data and metadata_of(tensor, STORED))


def is_in_another_file(tensor: TensorProto) -> bool:
    """Whether a weight is in a file outside of the artifact, which partc reads and onnxruntime does not."""
    return bool(tensor.external_data and metadata_of(tensor, SOURCE))


def is_read_here(tensor: TensorProto) -> bool:
    """Whether a weight is not read by onnxruntime as the rank file says: one that is widened, or in a file outside of the artifact."""
    return is_widened(tensor) or is_in_another_file(tensor)


def source_text(name: str, box: Sequence[tuple[int, int]], shape: Sequence[int]) -> str:
    """Returns a box of a file's tensor as text, with the tensor's sizes: `fc1.weight[0:8/16, 0:32/32]`."""
    spans = (f"{begin}:{end}/{size}" for (begin, end), size in zip(box, shape, strict=True))
    return f"{name}[{', '.join(spans)}]"


@dataclass(frozen=True)
class Origin:
    """The tensor of a file of which a weight is a box: its name there, its shape, and the begin and end of the box along each dim."""

    name: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]

    @staticmethod
    def of(tensor: TensorProto) -> Origin | None:
        """Returns the origin of a weight, or None; raises ValueError if its metadata are not a box of its shape."""
        if not (text := metadata_of(tensor, SOURCE)):
            return None
        name, bracket, rest = text.rpartition("[")
        spans = [_SPAN.fullmatch(one) for one in rest[:-1].split(", ")] if rest[:-1] else []
        numbers = [tuple(map(int, match.groups())) for match in spans if match]
        sound = bracket and rest.endswith("]") and len(numbers) == len(spans) == len(tensor.dims)
        if not sound or any(not begin <= end <= size for begin, end, size in numbers):
            raise ValueError(f"'{text}' is not a box of a tensor")
        if [end - begin for begin, end, _ in numbers] != [*tensor.dims]:
            raise ValueError(f"'{text}' is not of the shape {[*tensor.dims]}")
        return Origin(name, tuple(size for *_, size in numbers), tuple((begin, end) for begin, end, _ in numbers))


def numbers(tensor: TensorProto, folder: Path, manifest: Manifest) -> Array:
    """Returns the elements of a weight; its file, of the artifact in `folder`, must have been checked."""
    from onnx import numpy_helper

    # onnx reads no file that has a second name, as weights that artifacts share
    if not tensor.external_data or not (is_read_here(tensor) or BY_CODE[tensor.data_type].bits >= 8):
        found: Array = numpy_helper.to_array(tensor, base_dir=str(folder))
        return found
    entries = {entry.key: entry.value for entry in tensor.external_data}
    dtype, stored, origin = BY_CODE[tensor.data_type], stored_type(tensor), Origin.of(tensor)
    assert stored is not None
    shape, box = (origin.shape, origin.box) if origin is not None else (tuple(tensor.dims), None)
    rows, rest = (shape[0], shape[1:]) if shape else (1, ())
    (first, last), inner = (box[0], box[1:]) if box else ((0, rows), [(0, size) for size in rest])
    if not math.prod(tensor.dims):
        return np.empty(tuple(tensor.dims), dtype.numpy)
    row, columns = stored.bytes_of(rest), tuple(slice(*span) for span in inner)
    with open_regular(manifest.weights_path(folder, entries["location"])) as file:
        begin = int(entries.get("offset", 0))
        if stored is dtype and all(span == (0, size) for span, size in zip(inner, rest, strict=True)):
            return np.memmap(file, dtype.numpy, "r", begin + first * row, tuple(tensor.dims)).view(np.ndarray)
        wide = np.empty((last - first, *tensor.dims[1:]), dtype.numpy)
        count = max(1, _RUN // row)
        for at in range(first, last, count):  # what is mapped counts as memory of the process
            some = min(count, last - at)
            part = np.memmap(file, stored.numpy, "r", begin + at * row, (some, *rest))[:, *columns]
            wide[at - first : at - first + some] = part if stored is dtype else _widened(part)
    return wide.reshape(tuple(tensor.dims))


def _widened(array: Array) -> Array:
    """Returns the same numbers in float32, NaN with its bits: a bfloat16 is the upper half of a float32."""
    if array.dtype.name != "bfloat16":
        return array.astype(np.float32)
    wide: Array = np.left_shift(array.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    return wide
