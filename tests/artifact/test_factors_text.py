"""The text of a node's factors: what is written is read again, what is no such text is refused, and partial values pass by it."""

from __future__ import annotations

import onnx
import pytest
from partc.runtime.artifact.format import FACTORS
from partc.runtime.artifact.graph.factors import Factors, factors_of, partial_of, read_factors

PRODUCT = Factors(("mk", "kn", None), ("mn",), {"k": "sum"}, (0, 1))
ADDED = Factors(("ab", "ab"), ("ab",), {}, (0, 1), joint=True, rises=True)
LARGEST = Factors(("ax", "."), ("a",), {"x": "max"})


@pytest.mark.parametrize(
    ("factors", "text"),
    [
        (PRODUCT, "mk,kn,-->mn; sum k; linear 0, 1"),
        (ADDED, "ab,ab->ab; linear 0 + 1; rises"),
        (LARGEST, "ax,.->a; max x"),
        (Factors(("ab",), ("ba",), {}, (0,), moves=True), "ab->ba; linear 0; moves"),
        (Factors(("",), ("",)), "->"),
    ],
)
def test_what_is_written_is_read_again(factors: Factors, text: str) -> None:
    assert (str(factors), read_factors(text)) == (text, factors)


@pytest.mark.parametrize("text", ["ab", "a1->a", "a->a; prod a", "a->a; linear one", "a->a; rises much"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_factors(text)


def test_partial_values_pass_what_is_linear_or_rises() -> None:
    assert [partial_of(PRODUCT, terms) for terms in ({0: "sum"}, {0: "sum", 1: "sum"}, {1: "max"})] == ["sum", "", ""]
    assert [partial_of(ADDED, terms) for terms in ({0: "sum", 1: "sum"}, {0: "max"}, {0: "max", 1: "max"})] == [
        "sum",
        "max",
        "",
    ]
    assert [partial_of(LARGEST, {0: kind}) for kind in ("sum", "max", "min")] == ["", "max", ""]


def test_a_replicated_operand_may_have_any_rank() -> None:
    """Axes are a list, or one number without a dim."""
    metadata = onnx.StringStringEntryProto(key=FACTORS, value="ab,.->a.b; linear 0; moves")
    node = onnx.helper.make_node("Unsqueeze", ["x", "axes"], ["y"])
    node.metadata_props.append(metadata)
    sizes = {"x": [2, 3], "y": [2, 1, 3]}
    for axes, letters in (([1], "."), ([], "")):
        factors = factors_of(node, {**sizes, "axes": axes})
        assert factors is not None
        assert factors.inputs == ("ab", letters)
    with pytest.raises(ValueError, match="moves"):
        factors_of(node, {**sizes, "x": [2, 3, 4], "axes": [1]})
