"""Dims as expressions: what they mean, what is refused, and that no text is executed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from partc.runtime.artifact.dim_expression import parse


@pytest.mark.parametrize(
    ("text", "bindings", "value"),
    [
        ("batch", {"batch": 7}, 7),
        ("floor(seq/2) + 1", {"seq": 7}, 4),
        ("2*h*w", {"h": 3, "w": 5}, 30),
        ("Max(1, s - 3)", {"s": 2}, 1),
        ("Min(61, seq, t)", {"seq": 70, "t": 9}, 9),
        ("Mod(s, 2)", {"s": 5}, 1),
        ("s % 4", {"s": 7}, 3),
        ("(((h - 1)//32)) + 1", {"h": 100}, 4),
        ("s**2", {"s": 3}, 9),
        ("ceiling(3*s/4)", {"s": 3}, 3),
        ("0.5*h", {"h": 4}, 2),
        ("h/3*3", {"h": 7}, 7),
        ("-(-h//2)", {"h": 3}, 2),
        ("Abs(2 - h)", {"h": 5}, 3),
        ("trunc(-h/2) + 4", {"h": 3}, 3),
        (" n ", {"n": 2}, 2),
        (11, {}, 11),
    ],
)
def test_values(text: str | int, bindings: dict[str, int], value: int) -> None:
    expression = parse(text)
    assert expression(bindings) == value
    assert isinstance(expression(bindings), int)
    assert expression.names == bindings.keys()


def test_a_symbol_may_have_any_name() -> None:
    expression = parse("batch size?", {"batch size?"})
    assert expression({"batch size?": 3}) == 3
    assert expression.names == {"batch size?"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("__import__('os')", "'__import__('os')' is not an expression over dims"),
        ("a.b", "'a.b' is not known"),
        ("x if y else z", "'x if y else z' is not known"),
        ("1 << 3", "'1 << 3' is not known"),
        ("f(x)", "f with 1 arguments is not known"),
        ("floor(x, y)", "floor with 2 arguments is not known"),
        ("Max(x, key=y)", "'Max(x, key=y)' is not known"),
        ("True", "'True' is not known"),
        ("1e999", "is not known"),
        ("x +", "'x +' is not an expression over dims"),
        ("", "'' is not an expression over dims"),
        ("lambda: 1", "is not known"),
        ("(" * 9000 + "x", "is not an expression over dims"),
        ("x" * 20_000, "a dim of 20000 characters is longer than 10000"),
    ],
)
def test_refused_when_read(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match="dim") as caught:
        parse(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h/2", "'h/2' is 3/2, not a whole number"),
        ("h/(h - 3)", "'h/(h - 3)' divides by 0"),
        ("Mod(h, 0)", "'Mod(h, 0)' divides by 0"),
        ("h**h**h**h", "is too large for a dim"),
        ("h**-1", "the exponent -1 is not a whole number of at least 0"),
        ("h + k", "'h + k' needs 'k', which is not bound"),
    ],
)
def test_refused_when_computed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="'") as caught:
        parse(text)({"h": 3})
    assert message in str(caught.value)


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_division_is_exact(size: int, divisor: int) -> None:
    assert parse("floor(n/d)*d + Mod(n, d)")({"n": size, "d": divisor}) == size
    assert parse("n/d*d")({"n": size, "d": divisor}) == size
    assert parse("ceiling(n/d)")({"n": size, "d": divisor}) == -(-size // divisor)
