"""Patterns over dotted paths: which modules and nodes a rule of the plan speaks of.

A path is cut into parts at its dots. In a pattern

    *          is anything within one part: `layers.*.up`, `conv*`
    **         is any number of parts, also none: `**.norm`, `encoder.**.bias`
    [0-5,7]    is a whole number of this range, `[10-19]` ten to nineteen; leading zeros do not matter
    \\          takes the next character as it is: `split\\[0\\]`

and everything else is itself. A pattern that matches a path takes all that is inside too: `encoder` takes
`encoder.layers.0.up`. A text that equals a path matches it, whatever characters it has.
"""

from __future__ import annotations

import difflib
import heapq
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from partc.compiler.plan.violation import Violation

_TOKEN = re.compile(r"\\.?|\*+|\[[^\]]*\]?|.", re.DOTALL)
_NUMBERS = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", re.ASCII)
_SPECIAL = re.compile(r"\*+|\[[^\]]*\]|\\")


@dataclass(frozen=True)
class Pattern:
    """A pattern ready for matching; `compile_pattern` makes it."""

    text: str
    prefix: str = field(repr=False, compare=False)
    regex: re.Pattern[str] | None = field(repr=False, compare=False)

    def matches(self, path: str) -> bool:
        """Whether the pattern matches the path or a module that the path is in."""
        if path.startswith(self.prefix):
            if self.regex is None:
                if path[len(self.prefix) : len(self.prefix) + 1] in ("", "."):
                    return True
            elif self.regex.match(path):
                return True
        return path == self.text


def compile_pattern(text: str) -> Pattern:
    """The pattern that the text describes; ValueError, with the law, where it describes none."""
    tokens = _TOKEN.findall(text)
    parts: list[list[str]] = [[]]
    for token in tokens:
        if token == ".":
            parts.append([])
        else:
            parts[-1].append(token)
    if not all(parts):
        raise ValueError("a part of a pattern is not empty; '**' is any number of parts")
    prefix = ""
    for token in tokens:
        if token[0] in "*[":
            prefix = prefix.removesuffix(".") if token == "**" else prefix
            break
        prefix += token[-1]
    for before, after in itertools.pairwise(tokens):
        if "[" in (before[0], after[0]) and all(t[0] == "[" or t[-1] in "0123456789" for t in (before, after)):
            raise ValueError(f"'{before}{after}' puts digits beside a range, but a range is a whole number")
    expression = _expression(parts)
    literal = not any(token[0] in "*[" for token in tokens)
    return Pattern(text, prefix, None if literal else re.compile(expression, re.DOTALL))


def checked_pattern(text: str) -> str:
    """The text of a pattern as it is; Violation where it describes none."""
    try:
        compile_pattern(text)
    except ValueError as error:
        raise Violation(f"this is no pattern: {error}") from None
    return text


def literal_pattern(path: str) -> str:
    """The pattern of just this path (and of what is inside, if it is a module), whatever characters it has."""
    return re.sub(r"[*\[\]\\]|^\.|(?<=\.)\.|\.$", r"\\\g<0>", path)


def nearest(text: str, names: Iterable[str], n: int = 3) -> list[str]:
    """Up to `n` of the names that are most like the text, the most alike first; none that is less than half alike."""
    wanted = _SPECIAL.sub("", text).lower()
    pairs = {wanted[i : i + 2] for i in range(max(1, len(wanted) - 1))}
    scored = (
        (sum(pair in name.lower() for pair in pairs) / (len(pairs) + abs(len(name) - len(wanted))), -i, name)
        for i, name in enumerate(dict.fromkeys(names))
    )
    matcher = difflib.SequenceMatcher(b=wanted, autojunk=False)
    ranked: list[tuple[float, int, str]] = []
    for _, position, name in heapq.nlargest(50, scored):
        matcher.set_seq1(name.lower())
        ranked.append((matcher.ratio(), position, name))
    return [name for ratio, _, name in heapq.nlargest(n, ranked) if ratio >= 0.5]


def _expression(parts: list[list[str]]) -> str:
    """The regular expression of a pattern, for the beginning of a path up to the end of one of its parts."""
    while len(parts) > 1 and parts[-1] == ["**"]:
        parts = parts[:-1]
    if parts == [["**"]]:
        return ""
    before = "".join(r"(?:.*\.)?" if part == ["**"] else _part(part) + r"\." for part in parts[:-1])
    return rf"{before}{_part(parts[-1])}(?:\.|\Z)"


def _part(tokens: list[str]) -> str:
    expression = ""
    for token in tokens:
        match token[0]:
            case "*":
                if len(token) > 1:
                    raise ValueError(f"'{''.join(tokens)}' has '{token}' inside a part, but '**' is a part of its own")
                expression += "[^.]*"
            case "[":
                expression += _numbers(token)
            case "]":
                raise ValueError("a ']' has no '['; '\\]' is the character itself")
            case "\\":
                if len(token) == 1:
                    raise ValueError("the pattern ends after a '\\', which takes the next character as it is")
                expression += re.escape(token[1])
            case _:
                expression += re.escape(token)
    return expression


def _numbers(token: str) -> str:
    """The regular expression of a whole number of a range such as `[0-5,7]`."""
    if not token.endswith("]"):
        raise ValueError(f"'{token}' has no ']'; '\\[' is the character itself")
    choices: list[str] = []
    for piece in token[1:-1].split(","):
        found = _NUMBERS.fullmatch(piece)
        if not found:
            raise ValueError(f"'{token}' is no range of numbers such as [0-5,7]; '\\[' is the character itself")
        first, last = int(found[1]), int(found[2] or found[1])
        if first > last:
            raise ValueError(f"the range '{token}' runs from {first} down to {last}; write [{last}-{first}]")
        choices += _between(first, last)
    return rf"(?<![0-9])0*(?:{'|'.join(choices)})(?![0-9])"


def _between(first: int, last: int) -> list[str]:
    """Regular expressions that together match the decimals of first .. last without leading zeros."""
    longest = 10 ** len(str(first)) - 1
    if last > longest:
        return _between(first, longest) + _between(longest + 1, last)
    return _digits(str(first), str(last))


def _digits(first: str, last: str) -> list[str]:
    if first == last:
        return [first]
    if len(first) == 1:
        return [f"[{first}-{last}]"]
    rest = len(first) - 1
    if first[0] == last[0]:
        return [first[0] + inner for inner in _digits(first[1:], last[1:])]
    below = [] if first[1:] == "0" * rest else [first[0] + inner for inner in _digits(first[1:], "9" * rest)]
    above = [] if last[1:] == "9" * rest else [last[0] + inner for inner in _digits("0" * rest, last[1:])]
    whole = range(int(first[0]) + bool(below), int(last[0]) + (not above))
    return [*below, *([f"[{whole[0]}-{whole[-1]}][0-9]{{{rest}}}"] if whole else []), *above]
