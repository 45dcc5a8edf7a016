"""The command `partc ops`: the table, some of it, and how much of the standard it covers."""

from __future__ import annotations

import json
import re

import pytest
from partc.cli.main import invoke


def test_the_whole_table_ends_with_its_coverage(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["ops"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "op",
        "factors",
        "contracted",
        "replicated",
        "linear",
        "gradient",
        "precision",
        "remarks",
    ]
    words = r"ai.onnx, opset 23: (\d+) ops, (\d+) with an entry, (\d+) of them shardable, (\d+) with a gradient"
    coverage = re.fullmatch(words, lines[-1])
    assert coverage
    standard, there, shardable, differentiable = map(int, coverage.groups())
    assert standard == there > 190
    assert 140 < shardable < there
    assert 80 < differentiable < shardable


def test_some_ops(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["ops", "MatMul", "com.*.BiasGelu", "Loop"]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["Loop", "-", "all"], ["MatMul", "*mk,*kn->*mn", "k"], ["com.microsoft.BiasGelu", "*,*->*", "yes"]]


def test_json_tells_factors_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["ops", "--json", "ReduceMax", "Softmax"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["op"], first["factors"], first["contracted"], first["shardable"]) == (
        "ReduceMax",
        "ax->a",
        {"x": "max"},
        True,
    )
    assert (second["op"], second["replicated"]) == ("Softmax", "x")
    assert (first["kernel"], second["kernel"]) == ("reduction", "normalization")


def test_an_unknown_op_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["ops", "MatMull"]) == 2
    assert "no op matches 'MatMull'" in capsys.readouterr().err


def test_gradients_are_told_from_stops_and_from_no_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["ops", "--json", "Relu", "Equal", "QLinearConv"]) == 0
    found = {row["op"]: row["gradient"] for row in json.loads(capsys.readouterr().out)}
    assert found == {"Relu": "yes", "Equal": "stops", "QLinearConv": ""}
