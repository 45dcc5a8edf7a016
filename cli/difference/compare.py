"""Two sets of facts become changes, and alike changes of numbered names become one row: `layers.*.mlp.in.MatMul`, 48 times."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .facts import KINDS, MEASURES, Fact, Facts

_NUMBER = re.compile(r"\d+")
_NONE = Fact("")


@dataclass(frozen=True)
class Change:
    """What is otherwise in the second artifact: `before` is empty where it is new, `after` where it is gone; `why` it is so there."""

    kind: str
    name: str
    before: str
    after: str
    why: str


@dataclass(frozen=True)
class Measured:
    """A measure of both artifacts."""

    name: str
    before: int
    after: int

    @property
    def grown(self) -> int:
        """How much larger it is in the second."""
        return self.after - self.before

    @property
    def percent(self) -> float:
        """The same in percent of the first; infinite where that is 0."""
        return 0.0 if not self.grown else 100 * self.grown / self.before if self.before else float("inf")


@dataclass(frozen=True)
class Difference:
    """What differs between two programs of one name; a program that one artifact lacks is one without facts."""

    program: str
    changes: tuple[Change, ...]
    measures: tuple[Measured, ...]

    def of(self, kind: str) -> list[Change]:
        """The changes of a kind."""
        return [one for one in self.changes if one.kind == kind]


def difference(program: str, first: Facts, second: Facts) -> Difference:
    """Every fact that one has and the other has not, or not so, in the order in which the programs have them."""
    changes = []
    for kind in KINDS:
        before: dict[str, Fact] = getattr(first, kind)
        after: dict[str, Fact] = getattr(second, kind)
        for name in dict.fromkeys([*before, *after]):
            old, new = before.get(name, _NONE), after.get(name, _NONE)
            if old.text != new.text:
                changes.append(Change(kind, name, old.text, new.text, new.why or old.why))
    known = [name for name in MEASURES if name in first.measures or name in second.measures]
    measures = [Measured(name, first.measures.get(name, 0), second.measures.get(name, 0)) for name in known]
    return Difference(program, tuple(changes), tuple(measures))


def grouped_changes(changes: Iterable[Change]) -> list[tuple[Change, int]]:
    """The changes, those whose names and reasons differ in numbers alone as one with `*` for these, and how many each row stands for."""
    rows: dict[tuple[str, str, str], list[Change]] = {}
    for one in changes:
        rows.setdefault((_NUMBER.sub("*", one.name), one.before, one.after), []).append(one)
    return [(some[0] if len(some) == 1 else _merged(some), len(some)) for some in rows.values()]


def _merged(some: Sequence[Change]) -> Change:
    """One change for several: where the names differ there is a `*`, and so in the reasons."""
    name, why = (_starred([getattr(one, key) for one in some]) for key in ("name", "why"))
    return Change(some[0].kind, name, some[0].before, some[0].after, why)


def _starred(texts: Sequence[str]) -> str:
    """A text with `*` for each number in which the texts differ; the first one, where they differ in more than numbers."""
    if len({_NUMBER.sub("*", text) for text in texts}) > 1:
        return texts[0]
    columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    shown = iter([numbers[0] if len(set(numbers)) == 1 else "*" for numbers in columns])
    return _NUMBER.sub(lambda _: next(shown), texts[0])
