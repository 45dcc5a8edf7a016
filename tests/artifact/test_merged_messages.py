"""Messages that differ in the numbers of a path alone are one, with their number."""

from __future__ import annotations

import time

import pytest
from partc.runtime.errors import merged

CASES: dict[str, tuple[list[str], list[str]]] = {
    "layers": (
        [f"p.yaml:3: 'layers.{k}.up' dim 1 (10)\n  10 is odd\n  help: cut it" for k in range(4)],
        ["p.yaml:3: 'layers.0.up' dim 1 (10)\n  10 is odd\n  and 3 more layers\n  help: cut it"],
    ),
    "without help": ([f"'h.{k}.up'\n  a law" for k in (7, 8)], ["'h.7.up'\n  a law\n  and 1 more like it"]),
    "on one line": ([f"blocks.{k}.norm: odd" for k in (0, 2, 5)], ["blocks.0.norm: odd; and 2 more blocks"]),
    "layers and experts": (
        [f"'layers.{k}.experts.{j}'" for k in range(2) for j in range(2)],
        ["'layers.0.experts.0'; and 3 more like it"],
    ),
    "a path that begins with a number": (["'0.weight'", "'2.weight'"], ["'0.weight'; and 1 more like it"]),
    "other sizes": (["'a.0.w' (10)", "'a.1.w' (12)"], ["'a.0.w' (10)", "'a.1.w' (12)"]),
    "a decimal in front": (["'0.5.w'", "'0.6.w'"], ["'0.5.w'; and 1 more like it"]),
    "decimals": (["lr 0.5", "lr 1.5", "0.5.", "1.5."], ["lr 0.5", "lr 1.5", "0.5.", "1.5."]),
    "lines of the plan and ranks": (["p.yaml:3: x", "p.yaml:4: x", "rank_0001.onnx: x", "rank_0002.onnx: x"],) * 2,
    "the same twice": (["'a.0.w'", "'a.0.w'"], ["'a.0.w'"]),
    "names": (["'layers.0.up'", "'layers.0.down'"],) * 2,
    "none": ([], []),
}


@pytest.mark.parametrize("case", CASES)
def test_what_differs_in_numbers_of_a_path(case: str) -> None:
    given, wanted = CASES[case]
    assert merged(given) == wanted


def test_long_words_take_linear_time() -> None:
    words = ["a" * 300_000, "1" * 300_000, "a." * 150_000, "1." * 150_000, "_1" * 150_000]
    begin = time.process_time()
    assert merged(words) == words
    assert time.process_time() - begin < 5  # a tenth of a second; a pattern that tries each begin anew takes hours
