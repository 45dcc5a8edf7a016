"""Symbols, facts, and the facts of dim expressions: sound by enumeration, precise in named cases."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import onnx_ir as ir
import pytest
import sympy
from partc.compiler.dims.expression import facts_of
from partc.compiler.dims.facts import ANY, ANY_DIM, Facts, maximum, meet, minimum
from partc.compiler.dims.symbol import Symbol
from rows import of_today, rows

KNOWN = {
    "batch": Symbol(divisor=64).facts(),
    "eight": Symbol(divisor=8, max=515).facts(),
    "odd": Symbol(divisor=8, remainder=1).facts(),
    "n": Symbol().facts(),
    "h": Symbol(min=3, max=100).facts(),
}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max": "8"}, TypeError, "For 'Symbol', the argument 'max' must be int, but got <class 'str'>"),
        ({"min": True}, TypeError, "For 'Symbol', the argument 'min' must be int, but got <class 'bool'>"),
        ({"divisor": 2.0}, TypeError, "For 'Symbol', the argument 'divisor' must be int, but got <class 'float'>"),
        (
            {"remainder": None},
            TypeError,
            "For 'Symbol', the argument 'remainder' must be int, but got <class 'NoneType'>",
        ),
        ({"unique": 1}, TypeError, "For 'Symbol', the argument 'unique' must be bool, but got <class 'int'>"),
        ({"min": 0}, ValueError, "For 'Symbol', the 'min' value should be positive, but got 0"),
        ({"divisor": -2}, ValueError, "For 'Symbol', the 'divisor' value should be positive, but got -2"),
        (
            {"divisor": 8, "remainder": 8},
            ValueError,
            "For 'Symbol', the 'remainder' value should be in the range '[0, 8)', but got 8",
        ),
        ({"max": -1}, ValueError, "For 'Symbol', the 'max' value should be 0 (no maximum) or positive, but got -1"),
        (
            {"max": 16, "min": 10, "divisor": 8, "remainder": 1},
            ValueError,
            "For 'Symbol', the 'max' value should be 0 (no maximum) or at least 17, the smallest size that min=10, "
            "divisor=8 and remainder=1 allow, but got 16",
        ),
    ],
)
def test_symbol_refuses(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        Symbol(**arguments)  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("symbol", "text"),
    [
        (Symbol(), "[1,inf]"),
        (Symbol(divisor=8), "[8,inf]|8N"),
        (Symbol(divisor=8, remainder=1), "[9,inf]|8N+1"),
        (Symbol(divisor=8, max=515), "[8,512]|8N"),
        (Symbol(divisor=8, remainder=3, min=12, max=30), "[19,27]|8N+3"),
        (Symbol(min=7, max=7), "7"),
        (Symbol(max=1), "1"),
        (Symbol(divisor=6, max=6), "6"),
    ],
)
def test_facts_of_a_symbol(symbol: Symbol, text: str) -> None:
    assert str(symbol.facts()) == text


@pytest.mark.parametrize("divisor", [1, 2, 5])
@pytest.mark.parametrize("least", [1, 4, 11])
@pytest.mark.parametrize("most", [0, 12, 23])
def test_facts_of_a_symbol_are_just_its_sizes(divisor: int, least: int, most: int) -> None:
    for remainder in range(divisor):
        facts = (
            Symbol(max=most, min=least, divisor=divisor, remainder=remainder).facts()
            if most != 12 or least < 11
            else None
        )
        if facts is None:
            continue
        sizes = {divisor * n + remainder for n in range(1, 50)}
        legal = {size for size in sizes if size >= least and (most == 0 or size <= most)}
        assert {value for value in range(50) if facts.contains(value)} == {size for size in legal if size < 50}


def test_symbols_load_without_heavy_libraries() -> None:
    code = "import sys, partc.compiler.dims.symbol as s; s.Symbol().facts(); print({'sympy', 'onnx_ir'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


SMALL = [
    Facts.constant(0),
    Facts.constant(5),
    Facts.constant(-4),
    ANY_DIM,
    ANY,
    Facts(3, 1, 1, 13),
    Facts(4, 0, -8, 8),
    Facts(6, 2, None, 14),
    Facts(1, 0, 2, 3),
    Facts(5, 3, 3, None),
]

PAIRS = list(itertools.product(SMALL, SMALL))


def values(facts: Facts) -> list[int]:
    return [value for value in range(-20, 21) if facts.contains(value)]


@rows("a, b", PAIRS)
def test_arithmetic_of_facts_holds_for_every_pair_of_values(a: Facts, b: Facts) -> None:
    total, difference, product, quotient, rest = a + b, a - b, a * b, a // b, a % b
    most, least = maximum([a, b]), minimum([a, b])
    for v, w in itertools.product(values(a), values(b)):
        assert total.contains(v + w)
        assert difference.contains(v - w)
        assert product.contains(v * w)
        assert most.contains(max(v, w))
        assert least.contains(min(v, w))
        if w:
            assert quotient.contains(v // w), (v, w, quotient)
            assert rest.contains(v % w), (v, w, rest)


@rows("a, b", PAIRS)
def test_meet_is_just_the_common_values(a: Facts, b: Facts) -> None:
    common = sorted(set(values(a)) & set(values(b)))
    try:
        both = meet(a, b)
    except ValueError:
        assert common == []
    else:
        assert values(both) == common


@rows("a, k", [*itertools.product(SMALL, (1, 2, 3, 4, 12))])
def test_exact_division_and_divisors(a: Facts, k: int) -> None:
    multiples = [value for value in values(a) if value % k == 0]
    try:
        quotient = a.exactly_divided(k)
    except ValueError:
        assert multiples == []
    else:
        assert all(quotient.contains(value // k) for value in multiples)
    assert all(value % k == 0 for value in values(a)) or not a.divisible_by(k)
    assert a.divisible_by(k) == (a.real_divisor() % k == 0)


@pytest.mark.parametrize(
    ("facts", "text", "divisor"),
    [
        (Facts(64, 0, 1, 515), "[64,512]|64N", 64),
        (Facts(8, 9, 2), "[9,inf]|8N+1", 1),
        (Facts(12, 8, None, 30), "[-inf,20]|12N+8", 4),
        (ANY_DIM, "[0,inf]", 1),
        (ANY, "[-inf,inf]", 1),
        (Facts(1, 0, 3, 3), "3", 3),
        (Facts.constant(-6), "-6", 6),
    ],
)
def test_text_and_real_divisor(facts: Facts, text: str, divisor: int) -> None:
    assert (str(facts), facts.real_divisor()) == (text, divisor)


@pytest.mark.parametrize(
    "wrong", [(0, 5, 6, 9), (4, 0, 1, 3), (1, 0, 5, 4), (-2, 0, 0, 9)], ids=["outside", "between", "empty", "negative"]
)
def test_facts_of_no_integer_are_refused(wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"no integer|not negative"):
        Facts(*wrong)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("784", "784"),
        ("batch", "[64,inf]|64N"),
        ("free", "[0,inf]"),
        ("784*batch/49", "[1024,inf]|1024N"),
        ("floor(eight/2)", "[4,256]|4N"),
        ("floor(batch/2) + 1", "[33,inf]|32N+1"),
        ("((batch//2)//2)//2", "[8,inf]|8N"),
        ("batch*eight/(8*eight)", "[8,inf]|8N"),
        ("(batch*free + 2*free)//(batch + 2)", "[0,inf]"),
        ("(batch*odd + batch)//(odd + 1)", "[64,inf]|64N"),
        ("odd//4", "[2,inf]|2N"),
        ("(odd - 1)/2", "[4,inf]|4N"),
        ("batch/3", "[64,inf]|64N"),
        ("n/2", "[1,inf]"),
        ("(odd + 1)//2 + batch", "[69,inf]|4N+1"),
        ("n*(n + 1)", "[2,inf]|2N"),
        ("n*n - n", "[0,inf]|2N"),
        ("(h - 1)//32 + 1", "[1,4]"),
        ("Max(h - 3, 0)", "[0,97]"),
        ("Max(batch//2, batch//4)", "[32,inf]|32N"),
        ("Max(batch, eight)", "[64,inf]|8N"),
        ("Min(batch, 512)", "[64,512]|64N"),
        ("Max(batch/2, eight/2)", "[32,inf]|4N"),
        ("Mod(batch, 64)", "0"),
        ("Mod(batch, 24)", "[0,16]|8N"),
        ("Mod(odd, 4)", "1"),
        ("Mod(h, 200)", "[3,100]"),
        ("Mod(h, 100)", "[0,99]"),
        ("Min(batch//2, batch//4)", "[16,inf]|16N"),
        ("Min(8, batch)", "8"),
        ("1000 - batch", "[-inf,936]|64N+40"),
        ("16*floor(sqrt(n))", "[-inf,inf]|16N"),
        ("2**n", "[-inf,inf]"),
        ("n // free", "[0,inf]"),
    ],
)
def test_precision(expression: str, text: str) -> None:
    assert str(facts_of(expression, KNOWN)) == text
    if not expression.isdecimal():
        assert str(facts_of(ir.SymbolicDim(expression), KNOWN)) == text
        parsed = ir.SymbolicDim(expression) * 1
        assert str(facts_of(sympy.sympify(parsed._expr), KNOWN)) == text


def test_dims_that_are_no_expression() -> None:
    assert facts_of(28, KNOWN) == Facts.constant(28)
    assert facts_of(ir.SymbolicDim(None), KNOWN) == ANY_DIM
    assert facts_of("a b", KNOWN) == ANY_DIM
    assert facts_of("a-b", {"a-b": Facts(8)}) == Facts(8)
    assert facts_of("f(n)", KNOWN) == ANY_DIM
    assert facts_of(sympy.Function("f")(sympy.Symbol("n")) * 4, KNOWN) == ANY
    assert facts_of(sympy.Float(0.5) * sympy.Symbol("n"), KNOWN) == ANY


def test_large_expressions_are_answered() -> None:
    names = [f"d{i}" for i in range(9)]
    product = "*".join(f"({name} + 3)" for name in names)
    known = dict.fromkeys(names, Facts(8, 1))
    assert facts_of(product, known).divisible_by(4**9)
    assert facts_of("*".join(f"({a} + {b} + {a}*{b} + 1)" for a, b in itertools.pairwise(names)), known).contains(4**8)


def test_the_same_text_under_other_knowledge() -> None:
    assert facts_of("n*3", {"n": Facts(8)}) == Facts(24)
    assert facts_of("n*3", {"n": Facts(4)}) == Facts(12)


LETTERS = [sympy.Symbol(name, integer=True, positive=True) for name in "abc"]


def random_expression(r: random.Random, depth: int) -> sympy.Expr:
    if depth == 0 or r.random() < 0.15:
        return r.choice([*LETTERS, sympy.Integer(r.randint(1, 9))])
    a, b = random_expression(r, depth - 1), random_expression(r, depth - 1)
    k = sympy.Integer(r.randint(2, 6))
    match r.randrange(9):
        case 0:
            return a + b
        case 1:
            return a - b
        case 2:
            return a * b
        case 3:
            return a * k
        case 4:
            return sympy.floor(a / k)
        case 5:
            return sympy.floor(a / (random_expression(r, 0) * random_expression(r, 0) + k))
        case 6:
            return sympy.Max(a, b)
        case 7:
            return sympy.Min(a, b)
        case _:
            return sympy.Mod(a, k)


@rows("seed", of_today(range(60), 20), 20)
def test_facts_hold_for_every_legal_binding(seed: int) -> None:
    r = random.Random(seed)
    known = {
        name: Symbol(divisor=d, remainder=r.randrange(d), min=r.randint(1, 9)).facts()
        for name, d in zip("abc", r.sample([1, 2, 3, 4, 6, 8], 3), strict=True)
    }
    expression = random_expression(r, 3)
    facts = facts_of(expression, known)
    rational = expression / r.choice([2, 3, 4])
    exact = facts_of(rational, known)
    legal = {name: [value for value in range(64) if of.contains(value)][:4] for name, of in known.items()}
    checked = 0
    for binding in itertools.product(*(legal[name] for name in "abc")):
        value = expression.subs(dict(zip(LETTERS, binding, strict=True)))
        if value.is_Integer:
            checked += 1
            assert facts.contains(int(value)), (expression, binding, value, str(facts))
            part = value / (expression / rational)
            if part.is_Integer:
                assert exact.contains(int(part)), (rational, binding, part, str(exact))
    assert checked
