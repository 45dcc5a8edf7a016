"""What goes into a run and comes out of it: files, random values, the sizes of symbols, and the .npz of outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from partc.cli.job.inputs import choose_sizes, open_inputs
from partc.cli.job.outputs import flatten, write
from partc.runtime.artifact.format import IdsRecord, LabelRecord, Manifest, Port, SymbolRecord
from partc.runtime.artifact.legal_sizes import smallest, typical_sizes
from partc.runtime.errors import UsageError


def small_manifest(ports: list[Port], **symbols: SymbolRecord) -> Manifest:
    return Manifest.model_validate(
        {
            "partc": "0",
            "ranks": 2,
            "symbols": symbols,
            "inputs": ports,
            "outputs": [],
            "transfers": [],
            "files": {},
            "model": {"name": "m.onnx", "sha256": ""},
            "plan": None,
        }
    )


@pytest.mark.parametrize(
    ("symbol", "least", "most"),
    [
        (SymbolRecord(min=0, max=None, divisor=1, remainder=0), 1, 1),
        (SymbolRecord(min=5, max=31, divisor=1, remainder=0), 5, 31),
        (SymbolRecord(min=0, max=30, divisor=8, remainder=0), 8, 24),
        (SymbolRecord(min=0, max=None, divisor=8, remainder=3), 11, 11),
        (SymbolRecord(min=20, max=50, divisor=8, remainder=3), 27, 43),
    ],
)
def test_sizes_that_a_symbol_allows(symbol: SymbolRecord, least: int, most: int) -> None:
    assert smallest(symbol) == least
    assert typical_sizes(small_manifest([], n=symbol)) == {"n": most}
    assert choose_sizes({"n": symbol}, {"n": least}) == ({"n": least}, [])
    assert choose_sizes({"n": symbol}, {"n": least - 1})[1] or least == 1


def test_random_inputs_depend_on_seed_and_name_alone() -> None:
    symbols = {"n": SymbolRecord(min=3, max=9, divisor=1, remainder=0)}
    types = ("tensor(float)", "tensor(int64)", "tensor(bool)", "tensor(string)", "tensor(bfloat16)", "tensor(float16)")
    ports = [Port(name=f"v{at}", type=type, shape=["n", 2 + at, "2*n"], ranks=[0]) for at, type in enumerate(types)]
    manifest = small_manifest(ports, **symbols)
    names = [port.name for port in ports]
    whole = open_inputs(manifest, [], 5, {}).read(names)
    alone = {name: open_inputs(manifest, [], 5, {}).read([name])[name] for name in names}
    other = open_inputs(manifest, [], 6, {}).read(["v0"])["v0"]
    for at, name in enumerate(names):
        value = np.asarray(whole[name])
        assert value.shape == (3, 2 + at, 6)
        np.testing.assert_array_equal(value, np.asarray(alone[name]))
    assert not np.array_equal(np.asarray(whole["v0"]), np.asarray(other))
    assert [np.asarray(whole[name]).dtype.name for name in names] == [
        "float32",
        "int64",
        "bool",
        "object",
        "bfloat16",
        "float16",
    ]


def test_what_numpy_has_no_file_form_for_goes_out_and_comes_in_again(tmp_path: Path) -> None:
    import ml_dtypes

    outputs = {
        "half": np.array([1.5, -2.0], ml_dtypes.bfloat16),
        "words": np.array(["a", "bcd"], dtype=object),
        "several": [np.arange(3), np.zeros((2, 0), np.float32)],
        "absent": None,
        "file": np.array(7),
    }
    write(tmp_path / "o.npz", flatten(outputs))
    with np.load(tmp_path / "o.npz") as found:
        assert sorted(found) == ["file", "half", "several.0", "several.1", "words"]
        assert found["half"].dtype == np.float32
    types = {"half": "tensor(bfloat16)", "words": "tensor(string)", "several": "seq(tensor(float))"}
    ports = [Port(name=name, type=type, shape=None, ranks=[0]) for name, type in types.items()]
    ports += [Port(name="absent", type="optional(tensor(float))", shape=None, ranks=[0])]
    manifest = small_manifest([*ports, Port(name="file", type="tensor(int64)", shape=[], ranks=[0])])
    again = open_inputs(manifest, [str(tmp_path / "o.npz")], None, {}).read(["half", "words", "several", "absent"])
    assert np.asarray(again["half"]).dtype == ml_dtypes.bfloat16
    assert np.asarray(again["words"]).tolist() == ["a", "bcd"]
    several = again["several"]
    assert isinstance(several, list)
    assert [item.shape for item in several] == [(3,), (2, 0)]
    assert again["absent"] is None


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "o.npz"
    write(path, {"a": np.arange(3)})
    before = path.read_bytes()
    with pytest.raises(ValueError, match="Object arrays"):
        write(path, {"a": np.arange(4), "b": np.array([{}], dtype=object)})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["o.npz"]


def test_feed_refuses_python_objects(tmp_path: Path) -> None:
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object))
    feed = open_inputs(
        small_manifest([Port(name="x", type="tensor(float)", shape=[1], ranks=[0])]), [f"{tmp_path}/o.npy"], None, {}
    )
    with pytest.raises(UsageError, match="it holds Python objects"):
        feed.read(["x"])


def test_a_number_is_given_as_it_is(tmp_path: Path) -> None:
    ports = [
        Port(name="t", type="tensor(float)", shape=[], ranks=[0]),
        Port(name="trips", type="tensor(int64)", shape=[1], ranks=[0]),
        Port(name="go", type="tensor(bool)", shape=[], ranks=[0]),
        Port(name="size", type="tensor(int32)", shape=["n"], ranks=[0]),
    ]
    manifest = small_manifest(ports)
    feed = open_inputs(manifest, ["t=0.5", "trips=3", "go=true", "size=[4, 5]"], None, {})
    found = {name: np.asarray(value) for name, value in feed.read(["t", "trips", "go", "size"]).items()}
    assert {name: (str(one.dtype), one.tolist()) for name, one in found.items()} == {
        "t": ("float32", 0.5),
        "trips": ("int64", [3]),
        "go": ("bool", True),
        "size": ("int32", [4, 5]),
    }
    with pytest.raises(
        UsageError, match=r"input 'trips': float64 \[\] is given|input 'trips': 0.5 is given|input 'trips': \[0.5\]"
    ):
        open_inputs(manifest, ["t=1", "trips=0.5", "go=false", "size=[1]"], None, {})


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_random_inputs_have_the_sizes_of_those_given(save: Callable[..., None], tmp_path: Path) -> None:
    """Random labels are among the classes, and ids among the rows."""
    any_size = SymbolRecord(min=1, max=None, divisor=1, remainder=0)
    labels = LabelRecord(classes=7)
    ports = [
        Port(name="x", type="tensor(float)", shape=["n", 3], ranks=[0]),
        Port(name="y", type="tensor(int64)", shape=["n", "m"], ranks=[0], labels=labels),
        Port(name="ids", type="tensor(int64)", shape=["n"], ranks=[0], ids=[IdsRecord(table="t", rows=1)]),
    ]
    manifest = small_manifest(ports, n=any_size, m=any_size)
    save(tmp_path / "x.npz", x=np.zeros((64, 3), np.float32))
    reader = open_inputs(manifest, [str(tmp_path / "x.npz")], 2, {"m": 5})
    assert reader.generated() == ["y", "ids"]
    found = {name: np.asarray(value) for name, value in reader.read(["y", "ids"]).items()}
    assert found["y"].shape == (64, 5)
    assert {*found["y"].ravel().tolist()} == {*range(7)}
    assert found["ids"].tolist() == [0] * 64
    with pytest.raises(UsageError, match="--set n=3: it is 64 by input 'x'"):
        open_inputs(manifest, [str(tmp_path / "x.npz")], 2, {"n": 3})
    assert open_inputs(manifest, ["x=[[1.0, 2.0, 3.0]]"], 2, {}).sizes["n"] == 1
