"""Patterns over dotted paths: they select the modules and nodes to which a rule of the plan applies.

A path is split into parts at its dots. In a pattern

    *          is anything within one part: `layers.*.up`, `conv*`
    ?          is one character within a part
    **         is any number of parts, also none: `**.norm`, `encoder.**.bias`
    [0-5,7]    is a whole number of this range, `[10-19]` ten to nineteen; leading zeros of a path do not matter
    [qkv]      is one of these characters, `[a-f]` one from a to f
    {up,gate}  is one of these texts, which may be patterns themselves: `**.{q,k,v}_proj`, `{encoder.*,head}.up`
    \\          takes the next character as it is: `split\\[0\\]`

and everything else is itself. A pattern that matches a path matches everything inside it too: `encoder` matches `encoder.layers.0.up`. A
text that equals a path matches it, whatever characters it has.

Matching takes linear time in the length of the path. Choices in braces are written out first; what is left between two `*` has a fixed
length, up to whole numbers, which are never parted. So the first place where it fits is the only one to try, and a group of the regular
expression that has matched is never entered again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from partc.runtime.options import Refused

_TOKEN = re.compile(r"\\.?|\*+|\[[^\]]*\]?|.", re.DOTALL)
_NUMBERS = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", re.ASCII)
_RANGE = re.compile(r"\[[\d\s,-]*\]", re.ASCII)
_WILD = "*[?"
Key = TypeVar("Key")

MOST_CHOICES = 512
"""The most alternatives without braces that a pattern may expand to; braces multiply."""
DEEPEST = 16


@dataclass(frozen=True)
class Pattern:
    """A pattern ready for matching; created by `compile_pattern`."""

    text: str
    prefix: str = field(repr=False, compare=False)
    regex: re.Pattern[str] | None = field(repr=False, compare=False)

    def matches(self, path: str) -> bool:
        """Whether the pattern matches the path or a module that contains it."""
        if path.startswith(self.prefix):
            if self.regex is None:
                if path[len(self.prefix) : len(self.prefix) + 1] in ("", "."):
                    return True
            elif self.regex.match(path):
                return True
        return path == self.text

    def among(self, paths: Mapping[Key, str]) -> list[Key]:
        """Returns the keys of the paths that the pattern matches; the same as `matches` for each, without a call for each."""
        text, prefix = self.text, self.prefix
        if self.regex is None:
            inside = f"{prefix}."
            return [key for key, path in paths.items() if path in (prefix, text) or path.startswith(inside)]
        match = self.regex.match
        return [key for key, path in paths.items() if (path.startswith(prefix) and match(path)) or path == text]


@functools.lru_cache(maxsize=1024)
def compile_pattern(text: str) -> Pattern:
    """Compiles a text to a pattern; ValueError, with the law, where the text is not a pattern."""
    choices = [_choice(tokens) for tokens in _alternatives(_TOKEN.findall(text), 0)[0]]
    starts = zip(*(prefix for prefix, _ in choices), strict=False)
    prefix = "".join(same[0] for same in itertools.takewhile(lambda column: len(set(column)) == 1, starts))
    if len(choices) == 1 and choices[0][1] is None:
        return Pattern(text, prefix, None)
    expressions = (rf"{re.escape(start)}(?:\.|\Z)" if regex is None else regex for start, regex in choices)
    return Pattern(text, prefix, re.compile("|".join(dict.fromkeys(expressions)), re.DOTALL))


def _alternatives(tokens: list[str], start: int, depth: int = 0) -> tuple[list[list[str]], int]:
    """Expands the tokens from `start` to the closing brace or the end into alternatives; returns these and the end's index.

    `depth`: the number of braces that are open.
    """
    if depth > DEEPEST:
        raise ValueError(f"its braces are nested more than {DEEPEST} deep")
    done: list[list[str]] = []
    current: list[list[str]] = [[]]
    at = start
    while at < len(tokens):
        token = tokens[at]
        if token == "{":
            inner, at = _alternatives(tokens, at + 1, depth + 1)
            current = [[*one, *more] for one in current for more in inner]
        elif token == "}":
            if not depth:
                raise ValueError("a '}' has no '{'; '\\}' is the character itself")
            return done + current, at
        elif token == "," and depth:
            done, current = done + current, [[]]
        else:
            current = [[*one, token] for one in current]
        if len(done) + len(current) > MOST_CHOICES:
            raise ValueError(f"its braces leave more than {MOST_CHOICES} choices; write several patterns")
        at += 1
    if depth:
        raise ValueError("a '{' has no '}'; '\\{' is the character itself")
    return current, at


def _choice(tokens: list[str]) -> tuple[str, str | None]:
    """The literal prefix of a pattern and the regular expression of the rest, None if the pattern is literal."""
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
        if token[0] in _WILD:
            prefix = prefix.removesuffix(".") if token == "**" else prefix
            break
        prefix += token[-1]
    for before, after in itertools.pairwise(tokens):
        ranges = [_RANGE.fullmatch(token) for token in (before, after)]
        if any(ranges) and all(r or t[-1] in "0123456789" for r, t in zip(ranges, (before, after), strict=True)):
            raise ValueError(f"'{before}{after}' puts digits beside a range, but a range is a whole number")
    expression = _expression(parts)
    literal = not any(token[0] in _WILD for token in tokens)
    return prefix, None if literal else expression


def checked_pattern(text: str) -> str:
    """Returns the text of a pattern unchanged; raises Refused where it is not a pattern."""
    try:
        compile_pattern(text)
    except ValueError as error:
        raise Refused(f"not a valid pattern: {error}") from None
    return text


def literal_pattern(path: str) -> str:
    """Returns the pattern of only this path (and of everything inside, if it is a module), whatever characters it has."""
    return re.sub(r"[*?{}\[\]\\]|^\.|(?<=\.)\.|\.$", r"\\\g<0>", path)


def wider(text: str, names: Iterable[str]) -> str:
    """Returns a hint with a pattern with '**' that matches some of the names where the text matches none; '' where there is none."""
    found = list(dict.fromkeys(names))
    deep = ".".join("**" if part == "*" else part for part in text.split("."))
    for one in dict.fromkeys((deep, f"**.{text}", f"**.{deep}")):
        with contextlib.suppress(ValueError):
            hit = [name for name in found if compile_pattern(one).matches(name)] if one != text else []
            if hit:
                more = f" and {len(hit) - 1:,} more" if len(hit) > 1 else ""
                return f"'*' stays within a part of a path: '{one}' matches '{hit[0]}'{more}"
    return ""


def _expression(parts: list[list[str]]) -> str:
    """The regular expression of a pattern; it matches the beginning of a path up to the end of one of its parts."""
    while len(parts) > 1 and parts[-1] == ["**"]:
        parts = parts[:-1]
    if parts == [["**"]]:
        return ""
    runs: list[list[list[str]]] = [[]]
    for part in parts:
        if part == ["**"]:
            runs.append([])
        else:
            runs[-1].append(part)
    expressions = [r"\.".join(_part(part) for part in run) for run in runs]
    first, *rest = expressions
    rest = [run for run in rest if run]
    ends = [r"\."] * len(rest) + [r"(?:\.|\Z)"]
    made = f"{first}{ends[0]}" if first else ""
    return made + "".join(rf"(?>(?:[^.]*\.)*?{run}{end})" for run, end in zip(rest, ends[1:], strict=True))


def _part(tokens: list[str]) -> str:
    """The regular expression of a whole part of a path."""
    shards = [""]
    for token in tokens:
        match token[0]:
            case "*":
                if len(token) > 1:
                    raise ValueError(f"'{''.join(tokens)}' has '{token}' inside a part, but '**' is a part of its own")
                shards.append("")
            case "?":
                shards[-1] += "[^.]"
            case "[":
                shards[-1] += _bracket(token)
            case "]":
                raise ValueError("a ']' has no '['; '\\]' is the character itself")
            case "\\":
                if len(token) == 1:
                    raise ValueError("the pattern ends after a '\\', which takes the next character as it is")
                shards[-1] += re.escape(token[1])
            case _:
                shards[-1] += re.escape(token)
    first, *rest = shards
    if not rest:
        return first
    between = "".join(rf"(?>[^.]*?{shard})" for shard in rest[:-1] if shard)
    return rf"{first}{between}(?>[^.]*?{rest[-1]}(?=\.|\Z))"


def _bracket(token: str) -> str:
    """The regular expression of a range of numbers, `[0-5,7]`, or of one of several characters, `[qkv]`, `[a-f]`."""
    if not token.endswith("]"):
        raise ValueError(f"'{token}' has no ']'; '\\[' is the character itself")
    if _RANGE.fullmatch(token):
        return _numbers(token)
    characters = token[1:-1]
    if re.search(r"[\d\s,.!^\\]", characters):
        law = "neither a range of numbers such as [0-5,7] nor characters such as [qkv] or [a-f]"
        raise ValueError(f"'{token}' is {law}; {{q,1}} is one of several texts, '\\[' the character itself")
    singles = re.sub(r"(.)-(.)", "", characters)
    for first, last in re.findall(r"(.)-(.)", characters):
        if first > last:
            raise ValueError(f"the range '{token}' runs from {first} down to {last}; write [{last}-{first}]")
    ranges = "".join(f"{re.escape(a)}-{re.escape(b)}" for a, b in re.findall(r"(.)-(.)", characters))
    return f"[{''.join(re.escape(c) for c in singles)}{ranges}]"


def _numbers(token: str) -> str:
    """The regular expression of a whole number of a range such as `[0-5,7]`."""
    choices: list[str] = []
    if re.fullmatch(r"\[\d\d+\]", token, re.ASCII):
        raise ValueError(_no_glob(token))
    for shard in token[1:-1].split(","):
        match = _NUMBERS.fullmatch(shard)
        if not match:
            raise ValueError(f"'{token}' is not a range of numbers such as [0-5,7]; '\\[' is the character itself")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise ValueError(f"the range '{token}' runs from {first} down to {last}; write [{last}-{first}]")
        if padded := [number for number in match.groups() if number and number != str(int(number))]:
            law = "numbers of a range have no leading zeros, and match those of a path that have"
            raise ValueError(f"'{token}' has '{padded[0]}': {law}; write {int(padded[0])}")
        choices += _between(first, last)
    return rf"(?<![0-9])0*(?:{'|'.join(choices)})(?![0-9])"


def _no_glob(token: str) -> str:
    """Returns the reason why a bracket of digits is refused: here it is a number, but in a glob it is one of its digits."""
    digits = sorted({*token[1:-1]})
    listed = f"{', '.join(digits[:-1])} or {digits[-1]}" if len(digits) > 1 else digits[0]
    runs = len(digits) > 1 and int(digits[-1]) - int(digits[0]) == len(digits) - 1
    remedy = f"{f'[{digits[0]}-{digits[-1]}] or ' if runs else ''}{{{','.join(digits)}}}"
    number = int(token[1:-1])
    return f"'{token}' is the number {number} here, and as a glob {listed}; write {remedy} for the digits, {number} for the number"


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
