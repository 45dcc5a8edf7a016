"""Compile errors: all violations of one kind are reported together, each with its place, the fact, the law and the remedy.

plan.yaml:14: 'conv9' matches nothing in the model
  help: the nearest names are 'conv1', 'conv2'

Of violations that differ in the numbers of a path alone, as one mistake in every layer, the first is shown with the number of the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from partc.runtime.errors import merged, printable
from partc.runtime.options import Refused

_MOST_TOLD = 100


@dataclass(frozen=True)
class Problem:
    """One violation: `where` is `file:line`, an op's path or a file; `fact` has the numbers; `law` and `help` may be empty."""

    where: str
    fact: str
    law: str = ""
    help: str = ""

    @staticmethod
    def of(refused: Refused, where: str, subject: str) -> Problem:
        """The problem of `subject` at `where`: `plan.yaml:8: placement of 'conv1': ...`."""
        fact = f"{subject}: {refused.fact}" if subject else refused.fact
        return Problem(where, fact, refused.law, refused.help)

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.fact}"]
        if self.law:
            lines.append(f"  {self.law}")
        if self.help:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)


class CompileError(Exception):
    """The model or the plan cannot be compiled; `problems` holds all that was found."""

    exit_code = 2

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        texts = merged(map(str, self.problems))
        more = len(texts) - _MOST_TOLD
        told = [*texts[:_MOST_TOLD], *([f"and {more:,} more problems"] if more > 0 else [])]
        super().__init__(printable("\n".join(told)))


class DifferentError(CompileError):
    """A model that was exported gives other numbers than what it was exported from."""

    exit_code = 1


class InternalError(CompileError):
    """What partc itself has done wrong, as far as it can tell; where the model is not sound, it is the model's."""
