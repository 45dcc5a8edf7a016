"""Values of every type on ranks: strings, sequences, optionals, maps, and element types that numpy lacks."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from artifact_text import write
from partc.runtime import load_local


def send(value: str, peer: int, tag: int) -> str:
    return f"= partc.comm.Send <peer = {peer}, tag = {tag}> ({value})"


def recv(value: str, peer: int, tag: int) -> str:
    return f"{value} = partc.comm.Recv <peer = {peer}, tag = {tag}> ()"


def test_strings(tmp_path: Path) -> None:
    graphs = [
        f"rank0 (string[n, 2] s) => () <string[n, 2] t> {{ t = Identity(s) {send('t', 1, 0)} {send('s', 1, 1)} }}",
        f"""rank1 () => (string[n, 2] t, bool[n, 2] same) <string[n, 2] s>
        {{ {recv("t", 0, 0)} {recv("s", 0, 1)} same = Equal(s, t) }}""",
    ]
    s = np.array([["a", "grün"], ["", "日本"], ["x\ty", "é" * 99]], object)
    with load_local(write(tmp_path, graphs)) as program:
        outputs = program(s=s)
        assert program(s=s[:0])["t"].shape == (0, 2)
    assert outputs["t"].tolist() == s.tolist()
    assert outputs["same"].all()
    assert outputs["same"].shape == (3, 2)


def test_sequences(tmp_path: Path) -> None:
    graphs = [
        f"""rank0 (float[n, 3] x, seq(float[m, 3]) q) => () <seq(float[m, 3]) s>
        {{ e = SequenceInsert(q, x) s = SequenceInsert(e, x) {send("s", 1, 0)} }}""",
        f"""rank1 () => (seq(float[m, 3]) s, float[k, 3] y, int64 count) {{ {recv("s", 0, 0)}
        y = ConcatFromSequence <axis = 0> (s)  count = SequenceLength(s) }}""",
    ]
    x = np.ones((2, 3), np.float32)
    with load_local(write(tmp_path, graphs)) as program:
        outputs = program(x=x, q=[x * 2])
        assert int(program(x=x, q=[])["count"]) == 2
    assert [item.tolist() for item in outputs["s"]] == [(x * 2).tolist(), x.tolist(), x.tolist()]
    assert outputs["y"].shape == (6, 3)
    assert int(outputs["count"]) == 3


def test_optionals(tmp_path: Path) -> None:
    graphs = [
        f"rank0 (optional(float[n]) o) => () <optional(float[n]) p> {{ p = Identity(o) {send('p', 1, 0)} }}",
        f"rank1 () => (optional(float[n]) p, bool has) {{ {recv('p', 0, 0)} has = OptionalHasElement(p) }}",
    ]
    with load_local(write(tmp_path, graphs)) as program:
        empty, full = program(o=None), program(o=np.array([1, 2], np.float32))
    assert empty["p"] is None
    assert not empty["has"]
    assert full["p"].tolist() == [1.0, 2.0]
    assert full["has"]


NARROW = [
    ("bfloat16", ml_dtypes.bfloat16),
    ("float16", np.float16),
    ("float8e4m3fn", ml_dtypes.float8_e4m3fn),
    ("float8e5m2", ml_dtypes.float8_e5m2),
    ("bool", np.bool_),
    ("int8", np.int8),
    ("uint64", np.uint64),
    ("double", np.float64),
]


@pytest.mark.parametrize(("name", "dtype"), NARROW)
@pytest.mark.parametrize("shape", [["n"], None])
def test_element_types(tmp_path: Path, name: str, dtype: type, shape: list[int | str] | None) -> None:
    graphs = [
        f"rank0 ({name}[n] x) => () <{name}[n] h> {{ h = Identity(x) {send('h', 1, 0)} }}",
        f"rank1 () => ({name}[n] h, {name}[n] y) {{ {recv('h', 0, 0)} y = Identity(h) }}",
    ]
    x = np.array([0, 1, 2, 5, 1], np.float32).astype(dtype)
    with load_local(write(tmp_path, graphs, shapes={"h": shape})) as program:
        outputs = program(x=x)
    for output in outputs.values():
        assert output.dtype == x.dtype
        np.testing.assert_array_equal(output.astype(np.float64), x.astype(np.float64))


@pytest.mark.parametrize(("name", "dtype", "low"), [("int4", ml_dtypes.int4, -8), ("uint4", ml_dtypes.uint4, 0)])
def test_four_bits(tmp_path: Path, name: str, dtype: type, low: int) -> None:
    """Seven elements in four bytes, given, sent, computed with and delivered."""
    graphs = [
        f"rank0 ({name}[n] x) => () {{ {send('x', 1, 0)} }}",
        f"""rank1 () => ({name}[n] z, float[n] y) <{name}[n] x, float s = {{0.5}}>
        {{ {recv("x", 0, 0)} y = DequantizeLinear(x, s) z = QuantizeLinear <output_dtype = {22 if low else 21}> (y, s) }}""",
    ]
    x = np.array([low, 1, low + 7, 2, 3, 0, 7]).astype(dtype)
    with load_local(write(tmp_path, graphs)) as program:
        outputs = program(x=x)
    assert outputs["y"].tolist() == (x.astype(np.float32) / 2).tolist()
    assert outputs["z"].dtype == x.dtype
    assert outputs["z"].tolist() == x.tolist()


def test_strings_beside_a_type_that_numpy_lacks(tmp_path: Path) -> None:
    graphs = [
        f"""rank0 (string[n] s, bfloat16[n] x) => () <bfloat16[n] h, string[n] t, bfloat16[n] u>
        {{ t = Identity(s) h = Identity(x) {send("t", 1, 0)} {send("h", 1, 1)} {recv("u", 1, 2)} }}""",
        f"""rank1 () => (bfloat16[n] u, string[n] v) <string[n] t, bfloat16[n] h>
        {{ {recv("t", 0, 0)} {recv("h", 0, 1)} u = Identity(h) v = Identity(t) {send("u", 0, 2)} }}""",
    ]
    x = np.array([1.5, -2, 3e38], ml_dtypes.bfloat16)
    with load_local(write(tmp_path, graphs)) as program:
        outputs = program(x=x, s=np.array(["a", "b", "c"]))
    assert outputs["u"].tolist() == x.tolist()
    assert outputs["v"].tolist() == ["a", "b", "c"]


def test_maps(tmp_path: Path) -> None:
    graphs = [
        f"""rank0 (float[n, 2] x) => () <seq(map(int64, float)) z>
        {{ z = ai.onnx.ml.ZipMap <classlabels_int64s = [3, 5]> (x) {send("z", 1, 0)} }}""",
        f"rank1 () => (seq(map(int64, float)) z) {{ {recv('z', 0, 0)} }}",
    ]
    with load_local(write(tmp_path, graphs)) as program:
        assert program(x=np.array([[1, 2], [0.5, 4]], np.float32))["z"] == [{3: 1.0, 5: 2.0}, {3: 0.5, 5: 4.0}]
