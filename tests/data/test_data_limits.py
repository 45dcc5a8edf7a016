"""Data that promise more than they have, or more than memory may take, are refused before anything is allocated for them."""

import errno
import gzip
import io
import os
import random
import signal
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from artifact_edit import chain_manifest
from partc.cli.commands.run import byte_count
from partc.cli.job.inputs import open_inputs
from partc.cli.output.failures import described
from partc.runtime.artifact.format import Manifest, Port
from partc.runtime.artifact.training.data_spec import Spec
from partc.runtime.data.dataset import open_data
from partc.runtime.data.files import open_field, open_fields, open_value
from partc.runtime.data.memory import Memory, default_bytes
from partc.runtime.errors import NO_MEMORY, UsageError

MOST, PEAK = 1 << 20, 16 << 20


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    """A test that waits, or that allocates what a header promises, fails."""
    signal.alarm(60)
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    signal.alarm(0)
    assert peak < PEAK


def header(shape: str, dtype: str = "<f4") -> bytes:
    """The beginning of an .npy file."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def archive(path: Path, content: bytes, how: int = zipfile.ZIP_DEFLATED, name: str = "x.npy") -> Path:
    with zipfile.ZipFile(path, "w", how) as made:
        made.writestr(name, content)
    return path


def said_to_be(path: Path, how: int) -> None:
    """An archive that says that its member is packed in another way."""
    data = bytearray(archive(path, npy(np.zeros(64)), zipfile.ZIP_STORED).read_bytes())
    index = data.index(b"PK\x01\x02")
    data[8:10] = data[index + 10 : index + 12] = how.to_bytes(2, "little")
    path.write_bytes(data)


def npy(array: np.ndarray) -> bytes:
    made = io.BytesIO()
    np.save(made, array)
    return made.getvalue()


def idx(shape: tuple[int, ...], content: bytes) -> bytes:
    return b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + content


def bomb(path: Path, member: str) -> Path:
    """Much in little; written piece by piece."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made, made.open(member, "w") as out:
        out.write(header(f"({1 << 25},)"))
        for _ in range(128):
            out.write(bytes(1 << 20))
    return path


HUGE = "(1000000000000, 4)"
MADE: dict[str, tuple[Callable[[Path], object], str]] = {
    "long.npy": (lambda p: p.write_bytes(header(HUGE) + bytes(64)), "its header promises float32 [1000000000000, 4]"),
    "empty.npy": (lambda p: p.write_bytes(header("(1000000000000, 0)")), "its header says float32 [1000000000000, 0]"),
    "minus.npy": (lambda p: p.write_bytes(header("(-4, -4)") + bytes(64)), "its header says float32 [-4, -4]"),
    "none.npy": (lambda p: p.write_bytes(header("(1000000000000,)", "|S0")), "its header says |S0"),
    "long.npz": (lambda p: archive(p, header(HUGE) + bytes(64)), "16,000,000,000,000 bytes, and there are 64"),
    "plain.npz": (lambda p: archive(p, header(HUGE) + bytes(64), zipfile.ZIP_STORED), "and there are 64"),
    "cut.npz": (lambda p: p.write_bytes(archive(p, npy(np.zeros(64))).read_bytes()[:-40]), "not a zip file"),
    "header.npz": (
        lambda p: archive(p, b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 30) + bytes(64)),
        "its header has 1,073,741,824 bytes",
    ),
    "lzma.npz": (lambda p: said_to_be(p, zipfile.ZIP_LZMA), "'x' is packed in a way that is not read"),
    "large.npz": (
        lambda p: archive(p, npy(np.zeros(2 * MOST, "u1"))),
        "'x' takes 2,097,152 bytes of memory and 1,048,576 are",
    ),
    "large.gz": (
        lambda p: p.write_bytes(gzip.compress(idx((2 * MOST,), bytes(2 * MOST)))),
        "decompressed it takes 2,097,152",
    ),
    "long.gz": (
        lambda p: p.write_bytes(gzip.compress(idx((99,), bytes(64)))),
        "it has 72 bytes, its header promises 107",
    ),
    "short.gz": (lambda p: p.write_bytes(gzip.compress(idx((9,), bytes(MOST)))), "it has more, its header promises 17"),
    "cut.gz": (lambda p: p.write_bytes(gzip.compress(idx((64,), os.urandom(64)))[:-40]), "ended before the end"),
    "long.idx": (lambda p: p.write_bytes(idx((4_000_000_000, 4_000_000_000), b"")), "promises 16000000000000000012"),
    "pipe.npy": (os.mkfifo, "is a pipe (FIFO), and no regular file"),
    "pipe.npz": (os.mkfifo, "is a pipe (FIFO), and no regular file"),
    "pipe.idx": (os.mkfifo, "is a pipe (FIFO), and no regular file"),
    "zero.npy": (lambda p: p.symlink_to("/dev/zero"), "is a device, and no regular file"),
}


@pytest.mark.parametrize("name", MADE)
def test_data(tmp_path: Path, name: str) -> None:
    make, fact = MADE[name]
    make(tmp_path / name)
    with pytest.raises(UsageError) as caught:
        open_field("x", tmp_path / name, memory=Memory(MOST))
    assert fact in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    with pytest.raises(UsageError):
        open_data(Spec(files={"x": tmp_path / name}, max_bytes=MOST))
    if name.endswith(".npy"):
        with pytest.raises(UsageError):
            open_fields(tmp_path)
    if not name.endswith((".idx", ".gz")):
        with pytest.raises(UsageError):
            open_value(tmp_path / name, "x", Memory(MOST))


@pytest.mark.parametrize("name", [name for name in MADE if name.endswith((".npy", ".npz"))])
def test_inputs_of_a_run(tmp_path: Path, name: str) -> None:
    make, _ = MADE[name]
    make(tmp_path / name)
    manifest = small_manifest([Port(name="x", type="tensor(float)", shape=["n"], ranks=[0])])
    with pytest.raises(UsageError) as caught:
        open_inputs(manifest, [str(tmp_path / name)], None, {}, MOST).read(["x"])
    assert name in str(caught.value)


def small_manifest(inputs: list[Port]) -> Manifest:
    fields = {**chain_manifest(), "inputs": [port.model_dump() for port in inputs], "files": {}}
    return Manifest.model_validate({**fields, "symbols": {"n": {}}})


def test_a_bomb_takes_no_memory(tmp_path: Path) -> None:
    path = bomb(tmp_path / "d.npz", "x.npy")
    assert path.stat().st_size < MOST
    with pytest.raises(
        UsageError,
        match=r"d.npz: 'x' takes 134,217,728 bytes of memory and 1,048,576 are allowed\n  help: give --max",
    ):
        open_fields(path, memory=Memory(MOST))


def test_what_is_allowed_is_counted_over_all_files(tmp_path: Path) -> None:
    half = npy(np.arange(MOST // 8 - 64, dtype=np.float32))
    for name in ("a", "b", "c"):
        archive(tmp_path / f"{name}.npz", half, name=f"{name}.npy")
    files = {name: tmp_path / f"{name}.npz" for name in ("a", "b", "c")}
    assert open_data(Spec(files={name: files[name] for name in "ab"}, max_bytes=MOST)).records == MOST // 8 - 64
    with pytest.raises(UsageError, match=r"c.npz: 'c' takes .* bytes of memory, with .* of other data, and 1,048,576"):
        open_data(Spec(files=files, max_bytes=MOST))
    assert open_field("x", Path(f"{files['a']}:a"), memory=Memory(MOST // 2)).take(np.array([3])).tolist() == [3]


def test_random_inputs_and_sizes(tmp_path: Path) -> None:
    manifest = small_manifest([Port(name="x", type="tensor(float)", shape=["n", 10], ranks=[0])])
    with pytest.raises(
        UsageError,
        match=r"random 'x' of \[1000000000000, 10\] takes 80,000,000,000,000 bytes(.*\n)*.* or choose smaller sizes",
    ):
        open_inputs(manifest, [], 1, {"n": 10**12}).read(["x"])
    assert 1 << 26 < default_bytes() < 1 << 50
    said = ("7", "2K", "2KiB", "1.5GB", "3 mb")
    assert [byte_count(text) for text in said] == [7, 2000, 2048, 1_500_000_000, 3_000_000]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["f4", "i8", "U3", "?", "c8"])
def test_arrays_are_read_as_numpy_reads_them(tmp_path: Path, order: str, dtype: str) -> None:
    array = np.asarray(np.arange(24).reshape(2, 3, 4).astype(dtype), order=order)  # type: ignore[call-overload]
    np.savez(tmp_path / "plain.npz", x=array, none=array[:0], one=array[0, 0, 0])
    np.savez_compressed(tmp_path / "small.npz", x=array, none=array[:0], one=array[0, 0, 0])
    np.save(tmp_path / "x.npy", array)
    for file in ("plain.npz", "small.npz", "x.npy"):
        found = open_value(tmp_path / file, "x")
        assert found is not None
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype
    for file in ("plain.npz", "small.npz"):
        for name, expected in (("none", array[:0]), ("one", array[0, 0, 0])):
            found = open_value(tmp_path / file, name)
            assert found is not None
            np.testing.assert_array_equal(found, expected)
            assert found.shape == expected.shape


def test_any_bytes_are_read_or_refused(tmp_path: Path) -> None:
    draw = random.Random(5)
    array = np.arange(60.0).reshape(3, 4, 5)
    whole = {"d.npy": npy(array), "d.gz": gzip.compress(idx((3, 5), bytes(15)))}
    for number, how in enumerate((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)):
        whole[f"d{number}.npz"] = archive(tmp_path / "whole.npz", npy(array), how).read_bytes()
    told = []
    for _ in range(400):
        name = draw.choice(list(whole))
        data = bytearray(whole[name])
        for _ in range(draw.choice((1, 2, 5))):
            at = draw.randrange(len(data))
            data[at : at + draw.choice((0, 1, 4))] = draw.randbytes(draw.choice((1, 4)))
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).write_bytes(data[: draw.choice((None, None, None, draw.randrange(len(data))))])
        try:
            column = open_field("x", tmp_path / name, memory=Memory(MOST))
            column.take(np.arange(min(3, len(column))))
        except UsageError as error:
            told.append(str(error))
    assert 100 < len(told) < 400
    assert all(str(tmp_path) in one for one in told)


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_memory_that_runs_out_is_no_fault_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A rank that has no memory to open its data ends as it does anywhere else, so that `--restarts` starts the job again."""
    path = tmp_path / name
    np.save(path, np.zeros(4)) if name == "x.npy" else np.savez(path, x=np.zeros(4))

    def without_memory(path: Path) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path))

    monkeypatch.setattr("partc.runtime.data.npy.open_regular", without_memory)
    with pytest.raises(OSError, match=str(path)) as raised:
        open_field("x", path if name == "x.npy" else Path(f"{path}:x"), memory=Memory(MOST))
    code, text = described(raised.value)
    assert (code, text.partition("\n")[0].startswith(NO_MEMORY)) == (1, True)
