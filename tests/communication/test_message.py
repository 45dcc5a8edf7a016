"""Messages: every kind of value comes back as it went, and a broken message is an error."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from partc.runtime.artifact.tensors.dtypes import BY_NAME, by_numpy
from partc.runtime.artifact.tensors.tensor import ALIGNMENT, Tensor, aligned
from partc.runtime.communication.message import HEADER, decode, encode, payload_size
from rows import rows


def there_and_back(value: Any) -> Any:
    header, payload = encode(value)
    assert header.nbytes == HEADER
    assert payload.nbytes == payload_size(header)
    back = decode(header.copy(), payload.copy())
    return back.array() if isinstance(back, Tensor) else back


@rows("name, shape", [*itertools.product(sorted(BY_NAME), [(), (7,), (3, 0, 2), (5, 3)])])
def test_tensors(name: str, shape: tuple[int, ...]) -> None:
    dtype = BY_NAME[name]
    codes = np.random.default_rng(len(name)).integers(0, 2, shape)
    array = codes.astype(dtype.numpy)
    tensor = Tensor.of(array, dtype)
    assert tensor.data.nbytes == dtype.bytes_of(shape)
    assert tensor.array().dtype == array.dtype
    back = there_and_back(tensor)
    assert back.dtype == array.dtype
    assert back.shape == shape
    np.testing.assert_array_equal(back.astype(np.complex128), array.astype(np.complex128))


@rows("name, count", [*itertools.product(["int4", "uint4", "int2", "uint2", "float4e2m1"], [1, 2, 3, 4, 5, 16])])
def test_every_code_of_a_packed_type(name: str, count: int) -> None:
    dtype = BY_NAME[name]
    codes = np.arange(count) % (1 << dtype.bits)
    signed = codes - ((codes >> (dtype.bits - 1)) << dtype.bits)
    array = codes.astype(np.uint8).view(dtype.numpy) if name.startswith("float") else signed.astype(dtype.numpy)
    if name.startswith("u"):
        array = codes.astype(dtype.numpy)
    back = Tensor.of(array, dtype).array()
    assert back.astype(np.float32).tolist() == array.astype(np.float32).tolist()
    packed = Tensor.of(array, dtype).data
    assert int(packed[0]) & ((1 << dtype.bits) - 1) == 0
    if count > 1:
        assert int(packed[0]) >> dtype.bits & ((1 << dtype.bits) - 1) == 1


def test_strings() -> None:
    texts = np.array([["", "a"], ["grün", "日本" * 500], ["x\0y", "\n"]], object)
    assert there_and_back(texts).tolist() == texts.tolist()
    assert there_and_back(texts[:0]).shape == (0, 2)
    assert there_and_back(np.array("one", object)).tolist() == "one"
    assert there_and_back(np.array(["fixed", "width"])).tolist() == ["fixed", "width"]


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [None],
        [np.arange(3, dtype=np.int16), np.ones((2, 0), np.float64), np.array(5, np.uint8)],
        [[np.array(["a"], object)], []],
        [{3: 1.5, 5: -2.0}, {}],
        [{"cat": 1.0, "dog": 0.25}],
        {7: np.ones(2, np.float32)},
        [np.array([1, 2], ml_dtypes.bfloat16)],
    ],
)
def test_sequences_optionals_and_maps(value: Any) -> None:
    assert plain(there_and_back(value)) == plain(value)


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, list):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def test_a_tensor_of_many_axes() -> None:
    array = np.arange(4, dtype=np.float32).reshape((1,) * 14 + (4,))
    assert there_and_back(Tensor.of(array, BY_NAME["float"])).shape == array.shape


def test_a_tensor_is_sent_from_where_it_lies() -> None:
    array = np.arange(6, dtype=np.float32)
    assert np.shares_memory(encode(Tensor.of(array, BY_NAME["float"]))[1], array)


def test_a_message_that_ends_too_early() -> None:
    header, payload = encode(["abc", np.arange(3)])
    with pytest.raises(ValueError, match=r"a message of \d+ bytes ends too early"):
        decode(header, payload[:-1])


def test_numpy_types() -> None:
    for row in BY_NAME.values():
        assert by_numpy(row.numpy) == row
    assert by_numpy(np.dtype(">f4")) is None
    assert by_numpy(np.dtype(object)) is None


@pytest.mark.parametrize("size", [1, 63, 64, 1000])
def test_memory_is_aligned(size: int) -> None:
    memory = aligned(size)
    assert memory.nbytes == size
    assert memory.ctypes.data % ALIGNMENT == 0
