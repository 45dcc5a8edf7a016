"""Patterns over dotted paths, and the names that are nearest to a text."""

from __future__ import annotations

import random
import re
import time

import pytest
from partc.compiler.plan.pattern import compile_pattern, literal_pattern, wider
from partc.runtime.spellings import nearest


@pytest.mark.parametrize(
    ("pattern", "taken", "left"),
    [
        ("conv1", ["conv1", "conv1.Conv_0", "conv1.a.b"], ["conv10", "conv", "net.conv1", "conv1x.a"]),
        ("layers.*.up", ["layers.0.up", "layers.x.up.MatMul"], ["layers.up", "layers.0.1.up", "layers.0.upper"]),
        ("conv*", ["conv", "conv1", "conv1.a"], ["aconv", "a.conv"]),
        ("*norm.w", ["norm.w", "layernorm.w.x"], ["a.norm.w", "norm.v"]),
        ("*", ["a", "a.b"], []),
        ("*.b", ["a.b", "a.b.c"], ["a", "b", "a.c.b"]),
        ("**", ["a", "a.b", ""], []),
        ("**.norm", ["norm", "a.norm", "a.b.norm.Add"], ["anorm", "a.norms"]),
        ("a.**.b", ["a.b", "a.x.b", "a.x.y.b.z"], ["a", "ab", "xa.b", "a.xb"]),
        ("a.**", ["a", "a.b", "a.b.c"], ["ab", "b.a"]),
        ("a.**.**", ["a.b"], ["ab"]),
        ("layers.[0-5]", ["layers.0", "layers.5.x", "layers.03"], ["layers.6", "layers.50", "layers.-1", "layers.05x"]),
        ("layers.[0-5,7]", ["layers.7", "layers.4"], ["layers.6", "layers.57"]),
        ("layers.[10-19]", ["layers.10", "layers.19"], ["layers.1", "layers.0", "layers.9", "layers.20", "layers.100"]),
        ("l[8-112]x", ["l8x", "l9x", "l10x", "l99x", "l100x", "l112x"], ["l7x", "l113x", "l1120x", "lx"]),
        ("*[1-2]*", ["conv1", "1", "a2b"], ["conv12", "conv21", "conv3", "a"]),
        (
            "/layer.[3-4]/conv/*",
            ["/layer.3/conv/Conv", "/layer.4/conv/Relu_1"],
            ["/layer.5/conv/Conv", "/layer.3/conv"],
        ),
        (r"split\[0\]", ["split[0]", "split[0].x"], ["split0", r"split\[1\]"]),
        (r"a\*", ["a*"], ["ab"]),
        ("a+(b)|c", ["a+(b)|c", "a+(b)|c.d"], ["a", "c", "aab"]),
        ("a\nb", ["a\nb"], ["a", "ab"]),
        ("a.**.*", ["a.b", "a.b.c"], ["a"]),
        ("**.a.*.**.b", ["a.x.b", "x.a.a.b", "a.x.y.b.c"], ["a.b", "a.x", "x.a.b"]),
        ("*a*ab", ["aab", "xaxab", "aaab.c"], ["ab", "aba", "a.aab"]),
        ("conv?", ["conv1", "convx.Conv"], ["conv", "conv12", "conv."]),
        ("[qkv]_proj", ["q_proj", "v_proj.MatMul"], ["o_proj", "qk_proj", "_proj"]),
        ("l.[a-c-x]", ["l.a", "l.c", "l.-", "l.x"], ["l.d", "l.ab", "l."]),
        ("**.{q,k,v}_proj", ["q_proj", "a.0.v_proj.MatMul"], ["a.o_proj", "a.qk_proj"]),
        ("{encoder.*,head}.up", ["encoder.0.up", "head.up.x"], ["encoder.up", "encoder.0"]),
        ("h{,s}.{[0-1],x{a,b}}", ["h.0", "hs.1", "h.xa", "hs.xb.y"], ["h.2", "h.x", "hss.0"]),
        ("*{abcd,c}*d", ["abcd", "xcd", "abcdd"], ["abc", "abd"]),
        (r"a\{b\,c\?", ["a{b,c?", "a{b,c?.d"], ["ab", "a{b,cx"]),
        ("a,b", ["a,b"], ["a", "b"]),
    ],
)
def test_what_a_pattern_takes(pattern: str, taken: list[str], left: list[str]) -> None:
    matches = compile_pattern(pattern).matches
    assert [path for path in taken if not matches(path)] == []
    assert [path for path in left if matches(path)] == []


@pytest.mark.parametrize("path", ["/layer.3/conv/Conv", "a[0-5]", "x*", "a.**.b", r"w\*", "batch/norm;1:0"])
def test_a_text_that_equals_the_path_matches(path: str) -> None:
    assert compile_pattern(path).matches(path)


@pytest.mark.parametrize(
    "path", ["conv1", "split[0]", "a*b", "a..b", ".a", "a.", "...", "]x", "w\\", "[", "a.[x]\\.b", "a?", "{a,b}"]
)
def test_the_literal_pattern_of_any_path(path: str) -> None:
    pattern = compile_pattern(literal_pattern(path))
    assert pattern.matches(path)
    assert pattern.matches(path + ".inside")
    assert not pattern.matches(path + "x")
    assert not pattern.matches("x" + path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a part of a pattern is not empty; '**' is any number of parts"),
        ("a..b", "a part of a pattern is not empty; '**' is any number of parts"),
        ("a.", "a part of a pattern is not empty; '**' is any number of parts"),
        ("a.b**", "'b**' has '**' inside a part, but '**' is a part of its own"),
        ("a.***", "'***' has '***' inside a part, but '**' is a part of its own"),
        ("a[0-5", "'[0-5' has no ']'; '\\[' is the character itself"),
        ("a0-5]", "a ']' has no '['; '\\]' is the character itself"),
        (
            "a[q1]",
            "'[q1]' is neither a range of numbers such as [0-5,7] nor characters such as [qkv] or [a-f]; "
            "{q,1} is one of several texts, '\\[' the character itself",
        ),
        (
            "a[!q]",
            "'[!q]' is neither a range of numbers such as [0-5,7] nor characters such as [qkv] or [a-f]; "
            "{q,1} is one of several texts, '\\[' the character itself",
        ),
        ("a[d-b]", "the range '[d-b]' runs from d down to b; write [b-d]"),
        ("a{q,k", "a '{' has no '}'; '\\{' is the character itself"),
        ("a}", "a '}' has no '{'; '\\}' is the character itself"),
        ("a.{,b}", "a part of a pattern is not empty; '**' is any number of parts"),
        ("{1,2}[3-4]", "'1[3-4]' puts digits beside a range, but a range is a whole number"),
        (
            "{0,1}{0,1}{0,1}{0,1}{0,1}{0,1}{0,1}{0,1}{0,1}{0,1}",
            "its braces leave more than 512 choices; write several patterns",
        ),
        ("{" * 2000 + "a", "its braces are nested more than 16 deep"),
        ("a[]", "'[]' is not a range of numbers such as [0-5,7]; '\\[' is the character itself"),
        (
            "layers.[01]",
            "'[01]' is the number 1 here, and as a glob 0 or 1; write [0-1] or {0,1} for the digits, 1 for the number",
        ),
        (
            "a[230]",
            "'[230]' is the number 230 here, and as a glob 0, 2 or 3; write {0,2,3} for the digits, 230 for the number",
        ),
        ("a[11]", "'[11]' is the number 11 here, and as a glob 1; write {1} for the digits, 11 for the number"),
        (
            "a[00-10]",
            "'[00-10]' has '00': numbers of a range have no leading zeros, and match those of a path that have; write 0",
        ),
        ("a[5-0]", "the range '[5-0]' runs from 5 down to 0; write [0-5]"),
        ("a1[0-5]", "'1[0-5]' puts digits beside a range, but a range is a whole number"),
        ("a[0-5]7", "'[0-5]7' puts digits beside a range, but a range is a whole number"),
        ("[0-5][1-2]", "'[0-5][1-2]' puts digits beside a range, but a range is a whole number"),
        ("a\\", "the pattern ends after a '\\', which takes the next character as it is"),
    ],
)
def test_malformed_patterns_say_the_law(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        compile_pattern(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("seed", range(12))
def test_ranges_are_ranges_of_numbers(seed: int) -> None:
    r = random.Random(seed)
    first = r.choice([0, 1, 7, 10, 99, 123, 1000])
    last = first + r.choice([0, 1, 8, 90, 905, 2345])
    pattern = compile_pattern(f"a[{first}-{last}].b")
    assert {n for n in range(4000) if pattern.matches(f"a{n}.b.c")} == set(range(first, min(last + 1, 4000)))
    assert pattern.matches(f"a00{last}.b")


def test_large_ranges_stay_small() -> None:
    pattern = compile_pattern("a[17-123456789]")
    assert pattern.matches("a9999999")
    assert not pattern.matches("a123456790")
    assert pattern.regex is not None
    assert len(pattern.regex.pattern) < 600


@pytest.mark.parametrize("pattern", ["*a" * 8 + "b", "**.a." * 8 + "b", "*{a,aa}" * 8 + "b", "*[1-9]a*[qa]?" * 4 + "b"])
def test_matching_takes_linear_time(pattern: str) -> None:
    """Eight stars on names of sixty letters took minutes. Of three tries the shortest counts, in seconds of this thread."""
    matches = compile_pattern(pattern).matches

    def seconds(length: int) -> float:
        names = ["a" * length, "a." * (length // 2), "1a" * (length // 2)]
        start = time.thread_time()
        assert not any(matches(name) for name in names)
        return time.thread_time() - start

    short, long = (min(seconds(length) for _ in range(3)) for length in (4000, 16000))
    assert long < 8 * short + 0.05


@pytest.mark.parametrize("seed", range(8))
def test_matching_is_what_the_plain_definition_says(seed: int) -> None:
    r = random.Random(seed)
    for _ in range(400):
        text = "".join(
            r.choice(["a", "b", ".", "*", "?", "{a,ab}", "[ab]", "[1-2]", "**."]) for _ in range(r.randint(1, 8))
        )
        path = "".join(r.choice("aab1.") for _ in range(r.randint(1, 9)))
        try:
            found = compile_pattern(text).matches(path)
        except ValueError:
            continue
        assert found == (_takes(text, path) or text == path), (text, path)


def _takes(text: str, path: str) -> bool:
    """Whether some choice of the pattern, written as one plain regular expression, matches a beginning of the path."""
    for choice in (["a", "ab"][k] for k in range(2)) if "{" in text else [""]:
        at = text.find("{")
        if at >= 0:
            if _takes(text[:at] + choice + text[at + len("{a,ab}") :], path):
                return True
            continue
        while text.endswith(".**"):
            text = text.removesuffix(".**")
        if text == "**":
            return True
        places = {"**.": r"(?:.*\.)?", "*": "[^.]*", "?": "[^.]", "[1-2]": "(?<![0-9])0*[12](?![0-9])", ".": r"\."}
        tokens = re.findall(r"\*\*\.|\[[^]]*\]|.", text)
        return re.match("".join(places.get(token, token) for token in tokens) + r"(?:\.|\Z)", path) is not None
    return False


def test_many_patterns_over_a_large_graph_are_fast() -> None:
    paths = [f"net.layers.{i}.{part}.MatMul_{i}" for i in range(2000) for part in ("q", "k", "v", "o", "up")]
    patterns = [compile_pattern(f"net.layers.[{i}-{i + 9}].*") for i in range(0, 500, 10)]
    start = time.thread_time()
    assert sum(pattern.matches(path) for pattern in patterns for path in paths) == 500 * 5
    assert time.thread_time() - start < 5


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("conv9", ["conv1", "conv2"]),
        ("Conv1", ["conv1", "conv2"]),
        ("layerz.*.mlp", ["layers.0.mlp", "layers.1.mlp"]),
        ("layers.[5-9].mlp", ["layers.0.mlp", "layers.1.mlp"]),
        ("hed", ["head"]),
        ("transformer", []),
        ("**", []),
    ],
)
def test_nearest(text: str, found: list[str]) -> None:
    names = ["conv1", "conv2", "layers.0.mlp", "layers.1.mlp", "head"]
    assert nearest(text, names, 2) == found


def test_nearest_of_no_names_and_of_repeated_ones() -> None:
    assert nearest("a", []) == []
    assert nearest("conv3", ["conv1", "conv1", "conv2"]) == ["conv1", "conv2"]


def test_nearest_among_many_names_is_fast() -> None:
    names = [f"encoder.layers.{i}.{part}" for i in range(2000) for part in ("attn.q", "attn.k", "mlp.up", "mlp.down")]
    start = time.thread_time()
    assert nearest("encoder.layer.1234.mlp.up", names)[0] == "encoder.layers.1234.mlp.up"
    assert time.thread_time() - start < 2


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("*.bias", "'**.bias' matches 'layers.0.fc.bias' and 1 more"),
        ("fc", "'**.fc' matches 'layers.0.fc.weight' and 3 more"),
        ("layers.*.bias", "'layers.**.bias' matches 'layers.0.fc.bias' and 1 more"),
        ("layers.*.norm", ""),
        ("**.norm", ""),
    ],
)
def test_a_pattern_that_would_match_deeper_is_told_so(pattern: str, said: str) -> None:
    names = [f"layers.{k}.fc.{one}" for k in (0, 1) for one in ("weight", "bias")]
    assert wider(pattern, names) == (f"'*' stays within a part of a path: {said}" if said else "")
