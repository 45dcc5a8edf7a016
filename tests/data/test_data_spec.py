"""What a plan or a command line says of data, and everything that is wrong with it at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from partc.runtime import data
from partc.runtime.artifact.training.data_spec import Data, Spec, data_of_words
from partc.runtime.errors import UsageError

BASE = Path("plans")


def test_paths_are_relative_to_the_plan() -> None:
    assert Spec.parse("d.npz", BASE).source == BASE / "d.npz"
    assert Spec.parse("/d.npz", BASE).source == Path("/d.npz")
    spec = Spec.parse({"x": "x.npy", "label": "/y.npy", "transform": "t.py:f"}, BASE)
    assert spec.source is None
    assert spec.files == {"x": BASE / "x.npy", "label": Path("/y.npy")}
    assert spec.transform == str(BASE / "t.py") + ":f"


def test_a_command_line_says_the_same() -> None:
    words = ["corpus", "length=ids", "pad=labels:-100,w:0.5", "pad=ids:1", "multiple=16", "buckets=64,256", "window=8"]
    said = {
        "source": "corpus",
        "length": "ids",
        "pad": {"labels": -100, "w": 0.5, "ids": 1},
        "multiple": 16,
        "buckets": [64, 256],
        "window": 8,
    }
    assert Spec.of(data_of_words(words, BASE), "--data") == Spec.parse(said, BASE, "--data")
    assert data_of_words(["x=a.npy", "y=b.npy"]) == Data.model_validate({"x": "a.npy", "y": "b.npy"})
    with pytest.raises(UsageError, match="'x' is given twice: a and b"):
        data_of_words(["x=a", "x=b"])


def test_all_that_is_wrong_is_told() -> None:
    said = {
        "transform": "t.py",
        "pad": {"x": "a"},
        "multiple": 0,
        "buckets": [4, 4],
        "window": True,
        "length": "",
        "x": None,
    }
    with pytest.raises(UsageError) as caught:
        Spec.parse(said, BASE, "plan.yaml:3")
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[1] for line in lines if line.startswith("plan.yaml:3: ")] == [
        *("transform", "length", "pad.x", "multiple", "buckets", "window", "x")
    ]
    assert lines[1] == "  help: write file.py:function"
    for said, told in (
        ({}, "is neither a path nor a mapping"),
        (3, "is neither a path nor a mapping"),
        ({"length": "ids"}, "it names no data"),
        ({"x": "x.npy", "window": 3}, "there is no `length`"),
    ):
        with pytest.raises(UsageError) as caught:
            Spec.parse(said)
        assert told in str(caught.value)
    with pytest.raises(UsageError, match="--data: buckets: expected a list, but got the string 'a'"):
        data_of_words(["d.npz", "length=x", "buckets=a"])


def test_the_package_lists_its_files() -> None:
    listed = set(re.findall(r"\b(\w+\.py|\w+/)(?=\s)", data.__doc__ or ""))
    folder = Path(data.__file__).parent
    there = {f"{one.name}/" for one in folder.iterdir() if (one / "__init__.py").exists()}
    assert listed == there | {one.name for one in folder.glob("*.py") if one.name != "__init__.py"}


def test_fields_are_names_or_keys() -> None:
    assert Spec.parse({"source": "s.py", "fields": ["x", "label"]}).fields == ("x", "label")
    assert Spec.parse({"source": "s.py", "fields": {"label": "target"}}).fields == {"label": "target"}
    for word, wanted in (
        ("fields=x,label", ("x", "label")),
        ("fields=label:target,x:image", {"label": "target", "x": "image"}),
    ):
        assert Spec.of(data_of_words(["s.py", word], BASE), "--data").fields == wanted
    with pytest.raises(UsageError, match="fields"):
        Spec.parse({"source": "s.py", "fields": 3})
