"""Reads a YAML file as plain data, with the line of each value.

Keys are always text, as they are written, so that a node may be named `1` or `on`. Values follow YAML 1.2: `yes` is a text. The line of a
value is that of its key, of a list's item that of the item; lines are looked up by path, `("placement", "conv1")`. An alias stands for the
value of its anchor, up to MOST_VALUES in the file, so that aliases of aliases do not fill the memory. An error that makes a file invalid
YAML is raised at once; features of YAML that plans do not have (repeated keys, aliases within themselves, merge keys, tags) are collected.

Keys of a plan that know their lines, with which messages about them begin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self, TypeAlias

from partc.compiler.errors import CompileError, Problem
from partc.runtime.errors import reason_of
from partc.runtime.files.regular import NotRegularError, read_regular
from partc.runtime.options import Options
from pydantic import PrivateAttr
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

Data: TypeAlias = "bool | int | float | str | list[Data] | dict[str, Data] | None"
Steps: TypeAlias = tuple[str | int, ...]

MOST_VALUES = 100_000
"""The most values that the aliases of a file may expand to, in addition to the file's own."""

LARGEST_PLAN = 1 << 19
MOST_ENTRIES, DEEPEST, LONGEST_TEXT, LARGEST_NUMBER = 100_000, 64, 10_000, (1 << 63) - 1
"""The most that a plan may have: bytes; commas, colons and lines; lists and mappings within each other; letters of one text; and what
its whole numbers may be, up and down. Beyond them reading alone would take minutes, or all of the memory."""
_TAG = "tag:yaml.org,2002:"
_KINDS = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp")

_HELP = {
    "undefined alias": "put quotes around a pattern that begins with '*': \"*.mlp\": 3",
    "'\\t'": "indent with spaces, YAML does not allow tabs",
    "but got '['": 'put quotes around a pattern with brackets: {"layers.[0-5]": 1}',
    "another document": "a plan is one document: remove the line '---'",
    "mapping values are not allowed": "look for a ':' too many, a missing quote, or a line indented otherwise",
    "could not find expected ':'": "a line is 'key: value', with a space after the ':'",
    "found character '@'": "quote a string that begins with '@'",
    "found character '`'": "quote a string that begins with '`'",
}


@dataclass
class Document:
    """The data of a file, the lines of its paths, and the problems of its conversion.

    A value that was refused is None in the data and its path in `refused`.
    """

    file: str
    data: Data = None
    lines: dict[Steps, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    refused: set[Steps] = field(default_factory=set)

    def where(self, *steps: str | int) -> str:
        """Returns `file:line` of a path, or of the nearest enclosing path that has a line."""
        while steps and steps not in self.lines:
            steps = steps[:-1]
        return f"{self.file}:{self.lines.get(steps, 1)}"


def read_text(path: Path) -> str:
    """The text of a plan file; CompileError where it cannot be read or is not UTF-8."""
    try:
        raw = read_regular(path, LARGEST_PLAN)
    except FileNotFoundError:
        fact, remedy = "no such plan file", "pass the path of a YAML file"
        raise CompileError(Problem(str(path), fact, help=remedy)) from None
    except OSError as error:
        fact, remedy = f"the plan cannot be read: it {reason_of(error)}", "pass the path of a YAML file"
        if not isinstance(error, NotRegularError):
            fact, remedy = f"the plan cannot be read: {reason_of(error)}", ""
        raise CompileError(Problem(str(path), fact, help=remedy)) from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        fact = f"the byte 0x{raw[error.start]:02x} is not UTF-8"
        raise CompileError(Problem(f"{path}:{line}", fact, help="save the plan as UTF-8 text")) from None


def parse_document(text: str, file: str) -> Document:
    """The data of a YAML text; CompileError where the text is not YAML."""
    if sum(map(text.count, ",:\n")) > MOST_ENTRIES:
        fact = f"the plan has more than {MOST_ENTRIES:,} entries"
        raise CompileError(Problem(f"{file}:1", fact, help='name many nodes by one pattern: "layers.*.mlp"'))
    try:
        root = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        fact = ": ".join(shard for shard in (error.context, error.problem) if shard)
        remedy = next((text for symptom, text in _HELP.items() if symptom in fact), "")
        where = f"{file}:{mark.line + 1 if mark else 1}"
        raise CompileError(Problem(where, f"this is not YAML: {fact}", help=remedy)) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        fact = f"the character U+{error.character:04X} is not allowed in YAML"
        raise CompileError(Problem(f"{file}:{line}", fact, help="remove it")) from None
    except YAMLError as error:
        raise CompileError(Problem(f"{file}:1", f"this is not YAML: {str(error).splitlines()[0]}")) from None
    except RecursionError:
        raise CompileError(Problem(f"{file}:1", "lists and mappings are nested too deeply to be read")) from None
    taken = _Taking(Document(file))
    if root is not None:
        taken.document.data = taken.data(root, ())
    return taken.document


class _Taking:
    """Converts YAML's nodes to plain data. An alias is its anchor's node again: not within itself, and in all not too often."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.taken: set[int] = set()
        self.open: set[int] = set()
        self.repeated = 0
        self.told = False

    def data(self, node: Node, steps: Steps) -> Data:
        line = node.start_mark.line + 1
        self.document.lines.setdefault(steps, line)
        tag = str(node.tag)
        kind = tag.removeprefix(_TAG)
        if kind not in _KINDS:
            self.problem(line, f"the tag '{tag.replace(_TAG, '!!')}' is not used in plans", "remove it")
        elif isinstance(node, ScalarNode):
            return self.scalar(str(node.value), kind, line, steps)
        elif len(steps) > DEEPEST:
            self.problem(
                line, "lists and mappings are nested too deeply", f"a plan has at most {DEEPEST} within each other"
            )
        elif id(node) in self.open:
            self.problem(self.document.lines[steps], "an alias is inside the value that it refers to", "write it out")
        elif not self.too_many(node, self.document.lines[steps]):
            self.taken.add(id(node))
            self.open.add(id(node))
            data = self.collection(node, steps)
            self.open.discard(id(node))
            return data
        self.document.refused.add(steps)
        return None

    def scalar(self, text: str, kind: str, line: int, steps: Steps) -> Data:
        if len(text) > LONGEST_TEXT:
            self.problem(line, f"a string of {len(text):,} characters", f"a string has at most {LONGEST_TEXT:,}")
        elif isinstance(found := _scalar(text, kind), int) and abs(found) > LARGEST_NUMBER:
            self.problem(
                line, f"the number {text[:20]}... of {len(text)} digits", f"a number is at most {LARGEST_NUMBER}"
            )
        else:
            return found
        self.document.refused.add(steps)
        return None

    def too_many(self, node: Node, line: int) -> bool:
        """Whether the aliases so far expand to more values than a plan may have; reports the first that does."""
        self.repeated += (len(node.value) + 1) * (id(node) in self.taken)
        if self.repeated <= MOST_VALUES:
            return False
        if not self.told:
            self.told = True
            self.problem(line, f"the aliases up to here expand to more than {MOST_VALUES} values", "write them out")
        return True

    def collection(self, node: Node, steps: Steps) -> Data:
        if isinstance(node, MappingNode):
            return self.mapping(node, steps)
        assert isinstance(node, SequenceNode)
        return [self.data(item, (*steps, i)) for i, item in enumerate(node.value)]

    def mapping(self, node: MappingNode, steps: Steps) -> dict[str, Data]:
        data: dict[str, Data] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, ScalarNode):
                self.problem(line, "a key is a string, not a list or a mapping", "put quotes around it")
            elif key.tag == "tag:yaml.org,2002:merge":
                self.problem(line, "'<<' is not used in plans", "write the keys out")
            elif len(key.value) > LONGEST_TEXT:
                self.problem(line, f"a key of {len(key.value):,} characters", f"a string has at most {LONGEST_TEXT:,}")
            elif key.value in data:
                first = self.document.lines[*steps, key.value]
                self.problem(line, f"'{key.value}' is given twice, first in line {first}", "keep one of them")
            else:
                self.document.lines[*steps, key.value] = line
                data[key.value] = self.data(value, (*steps, key.value))
        return data

    def problem(self, line: int, fact: str, help: str) -> None:
        self.document.problems.append(Problem(f"{self.document.file}:{line}", fact, help=help))


def _scalar(text: str, kind: str) -> Data:
    match kind:
        case "null":
            return None
        case "bool":
            return text.lower() in ("true", "yes", "on")
        case "int":
            return _integer(text)
        case "float":
            return _float(text)
        case _:
            return text


def _integer(text: str) -> int | str:
    """A YAML 1.2 integer: `012` is twelve, `0o14` and `0xc` too."""
    digits = text.replace("_", "").lower()
    sign, digits = (-1, digits[1:]) if digits.startswith("-") else (1, digits.removeprefix("+"))
    base = {"0x": 16, "0o": 8, "0b": 2}.get(digits[:2], 10)
    try:
        return sign * int(digits if base == 10 else digits[2:], base)
    except ValueError:
        return text


def _float(text: str) -> float | str:
    for candidate in (text.replace("_", ""), text.replace(".", "")):  # the second is for .inf and .nan
        try:
            return float(candidate)
        except ValueError:
            continue
    return text


class PlacedOptions(Options):
    """What a plan has under the key `KEY`."""

    KEY: ClassVar[str]
    _place: Callable[..., str] = PrivateAttr(default_factory=lambda: _nowhere)

    def placed(self, where: Callable[..., str]) -> Self:
        """Returns a copy with the places of its keys; `where` returns the place of a path, `where("train", "loss")`."""
        found = self.model_copy()
        found._place = where
        return found

    def where(self, *steps: str | int) -> str:
        """Returns the place of a key, `plan.yaml:4`; without steps, the place of the whole entry."""
        return self._place(self.KEY, *steps)


def _nowhere(*steps: str | int) -> str:
    """Returns the path itself as the place of options that are not from a file."""
    return ".".join(map(str, steps))
