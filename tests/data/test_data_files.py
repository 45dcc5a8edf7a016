"""Files of records: every form reads the same rows, nothing is copied that can be mapped, and faults are told by their file."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from partc.runtime.data.fields import Joined, Ragged, RaggedRows, Rows
from partc.runtime.data.files import open_field, open_fields
from partc.runtime.errors import UsageError

CODES = {"u1": 0x08, "i1": 0x09, ">i2": 0x0B, ">i4": 0x0C, ">f4": 0x0D, ">f8": 0x0E}


def idx(array: np.ndarray, code: str) -> bytes:
    head = bytes([0, 0, CODES[code], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(code).tobytes()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("code", list(CODES))
def test_idx(tmp_path: Path, code: str, packed: bool) -> None:
    array = np.arange(5 * 3 * 2).reshape(5, 3, 2)
    path = tmp_path / ("x.gz" if packed else "x-idx3")
    path.write_bytes(gzip.compress(idx(array, code)) if packed else idx(array, code))
    column = open_field("x", path)
    assert len(column) == 5
    assert column.field.shape == (3, 2)
    taken = column.take(np.array([4, 0, 4]))
    assert taken.dtype == np.dtype(code)
    np.testing.assert_array_equal(taken, array[[4, 0, 4]])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path: Path, save: type(np.savez)) -> None:  # type: ignore[valid-type]
    x, y = np.random.default_rng(0).normal(size=(7, 3)), np.array([1, 0, 1, 1, 0, 0, 1], np.uint8)
    t, f = np.array(list("abcdefg")), np.asfortranarray(x[:, :, None] * [1, 2])
    none = np.empty((7, 0), np.float32)
    save(tmp_path / "d.npz", x=x, y=y, t=t, f=f, none=none)
    fields = open_fields(tmp_path / "d.npz")
    indices = np.array([6, 2, 2])
    for name, array in {"x": x, "y": y, "t": t, "f": f, "none": none}.items():
        taken = fields[name].take(indices)
        assert taken.dtype == array.dtype
        np.testing.assert_array_equal(taken, array[indices])
        assert fields[name].take(indices[:0]).shape == (0, *array.shape[1:])
    assert isinstance(fields["x"]._array.base, np.memmap) is (save is np.savez)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(open_field("any", tmp_path / "d.npz:x").take(indices), x[indices])
    np.testing.assert_array_equal(open_field("x", tmp_path / "d.npz").take(indices), x[indices])


def test_npy_is_mapped_and_batches_own_their_memory(tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    np.save(tmp_path / "x.npy", x)
    column = open_field("x", tmp_path / "x.npy")
    taken = column.take(np.array([1, 5]))
    taken += 1
    np.testing.assert_array_equal(column.take(np.array([1, 5])), x[[1, 5]])
    np.save(tmp_path / "n.npy", x[:0])
    assert len(open_field("n", tmp_path / "n.npy")) == 0


def test_folder_with_shards(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 99, (11, 2, 3))
    y = np.arange(11)
    for number, (begin, end) in enumerate([(0, 4), (4, 4), (4, 9), (9, 11)]):
        np.save(tmp_path / f"x_{number:03}.npy", x[begin:end])
    np.save(tmp_path / "y_1.npy", y)
    fields = open_fields(tmp_path)
    assert sorted(fields) == ["x", "y_1"]
    assert isinstance(fields["x"], Joined)
    assert len(fields["x"]) == 11
    for indices in ([10, 3, 4, 8, 9, 0, 3], [5], []):
        np.testing.assert_array_equal(fields["x"].take(np.array(indices, np.int64)), x[indices])
    (tmp_path / "x_001.npy").unlink()
    with pytest.raises(UsageError, match="of the shards of 'x' number 1 is missing; there are 3, up to 3"):
        open_fields(tmp_path)


def test_ragged(tmp_path: Path) -> None:
    records = [[1, 2, 3], [], [4], [5, 6]]
    flat, offsets = np.concatenate(records).astype(np.int32), np.array([0, 3, 3, 4, 6])
    np.savez(tmp_path / "d.npz", ids=flat, **{"ids.offsets": offsets})
    np.save(tmp_path / "ids.npy", flat)
    np.save(tmp_path / "ids.offsets.npy", offsets)
    by_file = open_field("ids", tmp_path / "ids.npy", tmp_path / "ids.offsets.npy")
    for column in (open_fields(tmp_path / "d.npz")["ids"], open_fields(tmp_path)["ids"], by_file):
        assert isinstance(column, RaggedRows)
        assert column.lengths.tolist() == [3, 0, 1, 2]
        taken = column.take(np.array([3, 1, 0]))
        assert taken.padded(4, -7).tolist() == [[5, 6, -7, -7], [-7] * 4, [1, 2, 3, -7]]
    deep = Ragged.of([np.ones((2, 3)), np.full((1, 3), 2)])
    assert deep.padded(3, 0).sum(axis=2).tolist() == [[3, 3, 0], [6, 0, 0]]
    with pytest.raises(ValueError, match="its offsets go from 0 to 6; they must rise from 0 to 5"):
        RaggedRows(Rows(flat[:5]), offsets)
    with pytest.raises(ValueError, match="must rise"):
        RaggedRows(Rows(flat), np.array([0, 4, 3, 6]))


def test_faults_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "bad.npy").write_bytes(b"\x93NUMPY\x01\x00junk")
    (tmp_path / "bad.npz").write_bytes(b"junk")
    (tmp_path / "bad.idx").write_bytes(b"junk and more")
    (tmp_path / "short.idx").write_bytes(idx(np.zeros((4, 2)), "u1")[:-3])
    np.save(tmp_path / "scalar.npy", np.array(3))
    np.savez(tmp_path / "two.npz", a=np.zeros(2), b=np.zeros(2))
    np.save(tmp_path / "objects.npy", np.array([{}, []], object), allow_pickle=True)
    (tmp_path / "empty").mkdir()
    for name, told in {
        "none.npy": "there is no such file",
        "bad.npy": "bad.npy: ",
        "bad.npz": "not a zip file",
        "bad.idx": "it is not a .npy, .npz or IDX file",
        "short.idx": "it has 17 bytes, its header promises 20",
        "scalar.npy": "it is a single value",
        "two.npz": "it has no 'x', and not one array alone: 'a', 'b'",
        "two.npz:c": "it has no array 'c'; its arrays are 'a', 'b'",
        "objects.npy": "it holds Python objects",
        "empty": "there are no .npy files in this folder",
    }.items():
        with pytest.raises(UsageError) as caught:
            open_field("x", tmp_path / name)
        assert str(caught.value).startswith(str(tmp_path))
        assert told in str(caught.value)
    with pytest.raises(UsageError, match="it does not name its fields"):
        open_fields(tmp_path / "scalar.npy")
