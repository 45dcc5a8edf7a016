"""Figures as the commands print them: sums of bytes, the comparison of outputs, tables, and numbers for people."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from artifact_text import write
from partc.cli.commands import compile as compile_command
from partc.cli.commands.compile import ranks_table
from partc.cli.job.rank import timing
from partc.cli.output.stats import moved
from partc.cli.output.table import Table
from partc.compiler.comparison.compare import compare
from partc.runtime.units import count, seconds, size_text


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["28*batch", "12*batch"], ("40*batch", 200, 0)),
        (["28*batch", "32", "batch"], ("29*batch + 32", 177, 0)),
        (["4*batch*seq", "8*seq*batch + 4"], ("12*batch*seq + 4", 184, 0)),
        (["4*floor(seq/2) + 4*batch", "unknown"], ("4*batch + 4*floor(seq / 2) + 1 unknown", 24, 1)),
        (["4*(batch - 1)*seq"], ("4*(batch - 1)*seq", 48, 0)),
        ([], ("0", 0, 0)),
    ],
)
def test_bytes_add_up_as_expressions(texts: list[str], expected: tuple[str, int, int]) -> None:
    total = moved(texts, {"batch": 5, "seq": 3})
    assert (total.text, total.bytes, total.unknown) == expected


def test_comparison_finds_the_worst_element_and_judges_by_dtype() -> None:
    whole = np.array([[1.0, 100.0, np.nan], [np.inf, 0.0, 5.0]], np.float32)
    compiled = whole.copy()
    compiled[0, 1] += 0.005
    compiled[1, 2] += 0.002
    (row,) = compare({"y": whole}, {"y": compiled}, None, None)
    assert not row.passed
    assert (row.absolute_at, row.relative_at) == ((0, 1), (1, 2))
    assert row.absolute == pytest.approx(0.005, rel=1e-2)
    assert compare({"y": whole}, {"y": compiled}, 1e-3, None)[0].passed
    compiled[0, 2] = 1.0
    assert compare({"y": whole}, {"y": compiled}, 1e-3, None)[0].absolute == np.inf


@pytest.mark.parametrize(
    ("whole", "compiled", "result"),
    [
        (np.array([3, 4]), np.array([3, 5]), "NOT EQUAL"),
        (np.array([3, 4]), np.array([3, 4]), "ok"),
        (np.array(["a"]), np.array(["b"]), "NOT EQUAL"),
        (np.zeros((2, 3)), np.zeros((3, 2)), "shape [3, 2] when compiled"),
        (np.zeros(2), np.zeros(2, np.float32), "float32 when compiled"),
        (np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32), "ok"),
        (np.array([True, False]), np.array([True, True]), "NOT EQUAL"),
    ],
)
def test_comparison_of_what_is_not_close_but_equal(whole: np.ndarray, compiled: np.ndarray, result: str) -> None:
    assert compare({"y": whole}, {"y": compiled}, None, None)[0].result == result


def test_an_output_that_only_one_side_has_fails() -> None:
    rows = compare({"a": np.zeros(2)}, {"b": np.zeros(2)}, None, None)
    assert [(row.name, row.passed) for row in rows] == [("a", False), ("b", False)]


def test_a_table_keeps_every_digit_and_wraps_words_only() -> None:
    table = Table([">bytes", "name", "cause"])
    table.add("123456789012345", "layers.10.mlp.up", "read by the layer that the plan places elsewhere")
    table.add(7, "x", "short")
    for width in (20, 60, 75):
        text = "\n".join(table.lines(width))
        assert "123456789012345  layers.10.mlp.up" in text
        assert " ".join(text.split()).count("elsewhere") == 1
    assert max(map(len, table.lines(60))) <= 60
    assert all(line == line.rstrip() for line in table.plain().splitlines())


def test_numbers_for_people() -> None:
    assert [size_text(number) for number in (0, 1023, 1024, 31_457_280, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "30.0 MiB",
        "5.00 TiB",
    ]
    assert [seconds(duration) for duration in (1.234, 0.0456, 7.89e-4)] == ["1.23 s", "45.6 ms", "789 us"]
    assert (count(1, "rank"), count(20_000, "node")) == ("1 rank", "20,000 nodes")
    assert timing(0.4, [0.012]) == "loaded in 400 ms, first step 12 ms"
    expected = "then 4 steps: median 2.5 ms, min 1 ms, p90 4 ms; 400 steps/s"
    assert timing(0.4, [0.012, 0.001, 0.004, 0.003, 0.002]).endswith(expected)


GRAPH = """rank (float[n, 2] x) => (float[2] total) <float[2] part, int64[1] axis = {0}>
{ part = ReduceSum <keepdims = 0> (x, axis)
  total = partc.comm.AllReduce <group = "all", tag = 0, reduce = "sum"> (part) }"""


def test_long_expressions_are_told_as_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write(tmp_path / "build", [GRAPH] * 2, groups={"all": [[0, 1]]})
    assert ranks_table(folder).plain().splitlines()[0].split()[:4] == ["rank", "nodes", "weights", "bytes"]
    monkeypatch.setattr(compile_command, "_READABLE", 0)
    title, _, first, _ = ranks_table(folder).plain().splitlines()
    assert title.startswith("bytes are for n=1;")
    assert first.split()[-2:] == ["0", "B+?"]  # this manifest says no bytes
