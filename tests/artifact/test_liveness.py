"""How long values are in memory: views, results over operands, values from outside, and the most that is there at once."""

from __future__ import annotations

import pytest
from partc.runtime.artifact.byte_count import ZERO, of_value
from partc.runtime.artifact.liveness import Span, Use, alive, peak, spans

CHAIN = [
    Use(["x", "w"], ["a"], "MatMul"),
    Use(["a"], ["b"], "Reshape"),
    Use(["b"], ["c"], "Relu"),
    Use(["c", "c"], ["d"], "Add"),
    Use(["d", "a"], ["e"], "Mul"),
]
SIZES = dict.fromkeys("xabcde", 4) | {"w": 100}


def shown(uses: list[Use], apart: str = "", outputs: str = "") -> dict[str, tuple[int, int]]:
    return {one.value: (one.first, one.last) for one in spans(uses, SIZES.get, apart, outputs)}


def test_a_view_and_a_result_over_its_operand_have_one_place() -> None:
    """`a` is read at the end, so that Relu, which reads a view of it, must not write over it."""
    assert shown(CHAIN) == {"x": (0, 0), "w": (0, 0), "a": (0, 4), "c": (2, 3), "d": (3, 4), "e": (4, 4)}
    assert shown(CHAIN[:4]) == {"x": (0, 0), "w": (0, 0), "a": (0, 3), "d": (3, 3)}


def test_what_has_memory_elsewhere_is_not_counted() -> None:
    assert shown(CHAIN[:4], apart="xwa") == {"c": (2, 3), "d": (3, 3)}
    assert shown(CHAIN[:3], apart="xw", outputs="a") == {"a": (0, 3), "c": (2, 2)}


def test_a_result_of_another_size_has_a_place_of_its_own() -> None:
    cast = [Use(["x"], ["a"], "Abs"), Use(["a"], ["w"], "Cast")]
    assert shown(cast) == {"x": (0, 1), "w": (1, 1)}


def test_the_most_at_once_is_that_of_a_use() -> None:
    most, values = peak(spans(CHAIN, SIZES.get, "xw"))
    assert (most, [one.value for one in values]) == (12, ["a", "c", "d"])
    assert peak([]) == (0, [])
    assert peak([Span("a", 0, 1, (), None), Span("b", 0, 0, (), 3)]) == (3, [Span("b", 0, 0, (), 3)])


@pytest.mark.parametrize("batch", [1, 5])
def test_bytes_may_be_expressions(batch: int) -> None:
    found = spans(CHAIN, lambda name: of_value("tensor(float)", ["batch", 2]), "xw")
    assert max(one({"batch": batch}) for _, one in alive(found, ZERO)) == 3 * 8 * batch
