"""Types of values: the text of a type, its ONNX number, its width in bits and the numpy dtype in which users see it.

Types are written as onnxruntime writes them: `tensor(float)`, `seq(tensor(string))`, `optional(tensor(int64))`,
`map(int64,tensor(float))`. A dtype narrower than a byte is stored packed, first element in the low bits, as ONNX stores it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from onnx import TypeProto

Array: TypeAlias = npt.NDArray[np.generic]
Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Dtype:
    """An element type: `code` is its number in onnx.TensorProto, `shown` its numpy or ml_dtypes name.

    `wide` is the numpy dtype that holds its values exactly, where numpy itself lacks the type.
    """

    name: str
    code: int
    bits: int
    shown: str
    wide: str = ""

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy dtype; types that numpy lacks come from ml_dtypes."""
        return _numpy(self.shown, bool(self.wide))

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """The bytes that a tensor of this shape takes, packed."""
        count = 1
        for dim in shape:
            count *= dim
        return (count * self.bits + 7) // 8


_ROWS = (
    Dtype("float", 1, 32, "float32"),
    Dtype("uint8", 2, 8, "uint8"),
    Dtype("int8", 3, 8, "int8"),
    Dtype("uint16", 4, 16, "uint16"),
    Dtype("int16", 5, 16, "int16"),
    Dtype("int32", 6, 32, "int32"),
    Dtype("int64", 7, 64, "int64"),
    Dtype("bool", 9, 8, "bool"),
    Dtype("float16", 10, 16, "float16"),
    Dtype("double", 11, 64, "float64"),
    Dtype("uint32", 12, 32, "uint32"),
    Dtype("uint64", 13, 64, "uint64"),
    Dtype("complex64", 14, 64, "complex64"),
    Dtype("complex128", 15, 128, "complex128"),
    Dtype("bfloat16", 16, 16, "bfloat16", "float32"),
    Dtype("float8e4m3fn", 17, 8, "float8_e4m3fn", "float32"),
    Dtype("float8e4m3fnuz", 18, 8, "float8_e4m3fnuz", "float32"),
    Dtype("float8e5m2", 19, 8, "float8_e5m2", "float32"),
    Dtype("float8e5m2fnuz", 20, 8, "float8_e5m2fnuz", "float32"),
    Dtype("uint4", 21, 4, "uint4", "uint8"),
    Dtype("int4", 22, 4, "int4", "int8"),
    Dtype("float4e2m1", 23, 4, "float4_e2m1fn", "float32"),
    Dtype("float8e8m0", 24, 8, "float8_e8m0fnu", "float32"),
    Dtype("uint2", 25, 2, "uint2", "uint8"),
    Dtype("int2", 26, 2, "int2", "int8"),
)
STRING = 8
BY_CODE = {row.code: row for row in _ROWS}
BY_NAME = {row.name: row for row in _ROWS}


@cache
def _numpy(shown: str, extension: bool) -> np.dtype[np.generic]:
    if not extension:
        return np.dtype(shown)
    import ml_dtypes

    found: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, shown))
    return found


def by_numpy(dtype: np.dtype[np.generic]) -> Dtype | None:
    """The element type of a numpy dtype; None for strings, objects and other byte orders."""
    return next((row for row in _ROWS if row.shown == dtype.name and dtype.isnative), None)


def dense(text: str) -> Dtype | None:
    """The element type of `tensor(...)`; None for strings and for types other than a dense tensor."""
    if text.startswith("tensor(") and text.endswith(")"):
        return BY_NAME.get(text[len("tensor(") : -1])
    return None


def type_text(proto: TypeProto) -> str:
    """The text of a type; empty where the type is not given."""
    match proto.WhichOneof("value"):
        case "tensor_type":
            return f"tensor({element(proto.tensor_type.elem_type)})"
        case "sparse_tensor_type":
            return f"sparse_tensor({element(proto.sparse_tensor_type.elem_type)})"
        case "sequence_type":
            return f"seq({type_text(proto.sequence_type.elem_type)})"
        case "optional_type":
            return f"optional({type_text(proto.optional_type.elem_type)})"
        case "map_type":
            return f"map({element(proto.map_type.key_type)},{type_text(proto.map_type.value_type)})"
    return ""


def type_proto(text: str) -> TypeProto:
    """The type that a text names, without shape; ValueError where the text is not a type."""
    from onnx import TypeProto

    head, bracket, rest = text.partition("(")
    inner = rest[:-1]
    proto = TypeProto()
    if not bracket or not rest.endswith(")"):
        raise ValueError(f"'{text}' names no type")
    match head:
        case "tensor":
            proto.tensor_type.elem_type = _code(inner)
        case "sparse_tensor":
            proto.sparse_tensor_type.elem_type = _code(inner)
        case "seq":
            proto.sequence_type.elem_type.CopyFrom(type_proto(inner))
        case "optional":
            proto.optional_type.elem_type.CopyFrom(type_proto(inner))
        case "map":
            key, _, value = inner.partition(",")
            proto.map_type.key_type = _code(key)
            proto.map_type.value_type.CopyFrom(type_proto(value))
        case _:
            raise ValueError(f"'{text}' names no type")
    return proto


def element(code: int) -> str:
    """The name of an element type by its ONNX number."""
    return "string" if code == STRING else BY_CODE[code].name if code in BY_CODE else f"unknown {code}"


def _code(name: str) -> int:
    if name == "string":
        return STRING
    if name not in BY_NAME:
        raise ValueError(f"'{name}' names no element type")
    return BY_NAME[name].code
