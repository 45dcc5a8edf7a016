"""Assigns the names of a program's values once, when its files are written: the hint, with primes where another value has the name.

    h            what an op makes, or ranks are given
    h.3          of the microbatch 3: after the value that it is named after
    h'           where a value of the same file is `h`

A value has one name in the files of all ranks. Values that are never in one file, nor in one body of a task, may share a name; two that
bodies of one file make do not. A value v of a body leaves room for `v.k` of every microbatch k, which is what it is in the row of calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Call, Compute, Op, Value
from partc.runtime.spellings import first_free


class Names(dict[Value, str]):
    """What the values of a program are called in its files; one that none of them has is called as it says itself."""

    def __init__(self, program: Complete) -> None:
        self._places: dict[Value, int] = {}
        """Maps each value to the files and bodies that have it, as the bits of a number."""
        self._taken: dict[str, int] = {}
        self._inside: dict[str, int] = {}
        """Maps each name to the files in which a body makes a value of that name."""
        inside: dict[Value, list[tuple[int, Sequence[int]]]] = {}
        """Maps each value that a body makes to the files that call it, each with its microbatches."""
        again: dict[int, int] = {}
        """Maps a list of steps to the files that have it besides the first one."""
        place = 1
        for part, _ in program.distinct_programs:
            row, key = place, id(part.steps)
            self._note(() if key in again else part.steps, (*part.live_in, *part.live_out), row)
            again[key] = again[key] | row if key in again else 0
            for body in part.bodies:
                place <<= 1
                numbers = [step.microbatch for step in part.steps if isinstance(step, Call) and step.body is body]
                self._note(body.steps, (*body.inputs, *body.outputs), place)
                for value in [value for step in body.steps for value in step.makes]:
                    inside.setdefault(value, []).append((row, numbers))
            place <<= 1
        for part, _ in program.distinct_programs:
            if places := again.pop(id(part.steps), 0):
                self._note(part.steps, (), places)
        for value in self._places:
            if value.base is None and value not in inside:
                self._give(value)
        for value, calls in inside.items():
            self._give(value, calls)
        for value in self._places:
            if value not in self:
                self._give(value)

    def __missing__(self, value: Value) -> str:
        return str(value)

    def of(self, values: Iterable[Value | None]) -> list[str]:
        """The names of operands, empty of one that is absent."""
        return ["" if one is None else self[one] for one in values]

    def shown(self, values: Iterable[Value | None]) -> str:
        """Operands as the dumps show them: `%x, _`."""
        return ", ".join(["_" if one is None else f"%{self[one]}" for one in values])

    def label(self, step: Compute) -> str:
        """The name of an op's node, empty of one that has none."""
        return step.label if isinstance(step.label, str) else self[step.label]

    def _note(self, steps: Iterable[Op], ends: Iterable[Value], place: int) -> None:
        places = self._places
        for some in (ends, *[(*step.reads, *step.makes) for step in steps]):
            for value in some:
                places[value] = places.get(value, 0) | place

    def _give(self, value: Value, calls: Sequence[tuple[int, Sequence[int]]] = ()) -> str:
        """Returns the name of a value; assigns one if it has none, after the value from which its name is derived."""
        if value in self:
            return self[value]
        hint = value.hint if value.base is None else self._give(value.base) + value.hint
        places, taken, inside = self._places.get(value, 0), self._taken, self._inside

        def is_taken(name: str) -> bool:
            return bool(taken.get(name, 0) & places) or any(
                inside.get(name, 0) & row or any(taken.get(f"{name}.{k}", 0) & row for k in numbers)
                for row, numbers in calls
            )

        name = first_free(hint, is_taken)
        if places:
            taken[name] = taken.get(name, 0) | places
        for row, _ in calls:
            inside[name] = inside.get(name, 0) | row
        self[value] = name
        return name
