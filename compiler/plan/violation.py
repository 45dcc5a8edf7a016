"""What a plan or a model cannot say: the fact, the law and the remedy, before it is known where it stands."""

from __future__ import annotations

from partc.compiler.errors import Problem

_SHOWN = 80


class Violation(ValueError):
    """A value that the language of plans does not have; `key` where one key of a mapping is at fault."""

    def __init__(self, fact: str, law: str = "", help: str = "", key: str = "") -> None:
        super().__init__(fact)
        self.fact, self.law, self.help, self.key = fact, law, help, key

    def at(self, where: str, subject: str) -> Problem:
        """The problem of `subject` at `where`: `plan.yaml:8: placement of 'conv1': ...`."""
        return Problem(where, f"{subject}: {self.fact}", self.law, self.help)


def is_integer(value: object) -> bool:
    """Whether a value is an integer and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """A YAML value in YAML's words: `the text 'a'`, `a list`, `nothing`."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            return f"the string '{value}'" if len(value) <= _SHOWN else f"the string '{value[:_SHOWN]}...'"
        case list() | tuple():
            return "a list"
        case dict():
            return "a mapping"
        case int() | float():
            return f"the number {value}"
        case _:
            return f"{value!r} of type {type(value).__name__}"
