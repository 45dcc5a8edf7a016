"""The distinct programs of a job: its filters by sets of ranks, over values that have their final names.

The names of a job's values, given in one pass: from the hint of each, in the order in which they were made.

A value of the model and its versions have their own names. What is made beside them has a name that the model does not have (`h.shape` is
`h.shape'` where the model has an `h.shape` itself), and one that nothing else on its ranks has: a value on ranks 0-1 and another on
ranks 2-3 may have the same one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

from partc.compiler.ir.constants import Constant
from partc.compiler.ir.programs import Comm, Compute, RankTensor, State, Value
from partc.compiler.ir.sharded import Group, Ranks, ShardedValue
from partc.compiler.lower.job import Job, Transfer
from partc.runtime.spellings import first_free, numbered


def names_of(job: Job) -> dict[Value, str]:
    """The names of the values that a job has made."""
    names: dict[Value, str] = {}
    taken: dict[str, Ranks] = {}
    for value, ranks in job.created.items():
        first = job.derived(value.hint if value.base is None else f"{names.get(value.base) or value.base}{value.hint}")

        def is_taken(name: str, ranks: Ranks = ranks) -> bool:
            return name in job.reserved or bool(taken.get(name, 0) & ranks)

        def others(first: str, value: Value = value) -> Iterable[str]:
            return chain(map(job.derived, value.others), numbered(first, ".", 2))

        name = names[value] = first_free(first, is_taken, others)
        taken[name] = taken.get(name, 0) | ranks
    return names


@dataclass
class DistinctProgram:
    """The ops and records that some ranks have, and no others."""

    ranks: Ranks
    steps: list[Compute | Comm] = field(default_factory=list)
    inputs: dict[Value, ShardedValue] = field(default_factory=dict)
    weights: dict[Value, RankTensor] = field(default_factory=dict)
    state: dict[Value, State] = field(default_factory=dict)
    scalars: dict[Value, None] = field(default_factory=dict)
    outputs: dict[Value, ShardedValue] = field(default_factory=dict)
    concatenated: dict[Value, None] = field(default_factory=dict)


T = TypeVar("T")
_RECORDS = ("inputs", "weights", "state", "scalars", "outputs", "concatenated")


class Finished:
    """A job whose values have their names: each is one that is called so, and ops are over these.

    A value that is a constant on some ranks is one of its own there, and so are ops that read it.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.names = job, names_of(job)
        self._values: dict[tuple[Value, int], Value] = {}
        self._ops: dict[Hashable, Compute | Comm] = {}

    def value(self, value: Value, constants: Mapping[Value, Constant] | None = None) -> Value:
        """The value with its name; a constant where it is one of the `constants`."""
        constant = constants.get(value) if constants else None
        key = value, id(constant)
        if key not in self._values:
            of, shape = (value.of, value.shape) if self.job.listed.ranks(value) else (None, None)
            self._values[key] = Value(self._name(value), of=of, shape=shape, constant=constant)
        return self._values[key]

    def _name(self, value: Value) -> str:
        own = value.hint if value.base is None else f"{self._name(value.base)}{value.hint}"
        return self.names.get(value, own)

    def programs(self, groups: Iterable[Group]) -> list[DistinctProgram]:
        """The distinct programs by their lowest rank; ranks that differ in being among one of `groups` are apart, too."""
        job, sharing = self.job, dict[Ranks, list[DistinctProgram]]()
        found = [DistinctProgram(ranks) for ranks in job.distinct(groups)]
        constants = {one.ranks: dict[Value, Constant]() for one in found}

        def those(ranks: Ranks) -> list[DistinctProgram]:
            if ranks not in sharing:
                sharing[ranks] = [one for one in found if one.ranks & ranks]
            return sharing[ranks]

        for value, constant, ranks in job.constants:
            for one in those(ranks):
                constants[one.ranks][value] = constant
        somewhere = {value for value, _, _ in job.constants}
        for step, ranks in job.program:
            if isinstance(step, Transfer):
                for one in those(ranks):
                    one.steps += [self._op(each, constants[one.ranks]) for each in step.seen_by(one.ranks)]
            elif somewhere.isdisjoint(step.reads) and somewhere.isdisjoint(step.makes):
                same = self._op(step, {})
                for one in those(ranks):
                    one.steps.append(same)
            else:
                for one in those(ranks):
                    one.steps.append(self._op(step, constants[one.ranks]))
        for records in _RECORDS:
            for value, item, ranks in getattr(job, records):
                differs = value in somewhere or (isinstance(item, State) and item.next in somewhere)
                shared = None if differs else self._listed(value, item, {})
                for one in those(ranks):
                    own, listed = shared or self._listed(value, item, constants[one.ranks])
                    getattr(one, records)[own] = listed
        return found

    def _listed(self, value: Value, item: T, constants: Mapping[Value, Constant]) -> tuple[Value, T]:
        """A value with its name, and what is listed of it over values with names."""
        own = self.value(value, constants)
        if isinstance(item, State):
            after = None if item.next is None else self.value(item.next, constants)
            return own, replace(item, value=own, next=after)
        return own, replace(item, value=own) if isinstance(item, RankTensor) else item

    def _op(self, step: Compute | Comm, constants: Mapping[Value, Constant]) -> Compute | Comm:
        """An op over values with names."""
        read = [constants[one] for one in (*step.reads, *step.makes) if one in constants]
        key = step, tuple(map(id, read))
        if key not in self._ops:
            inputs, outputs = (
                tuple([None if one is None else self.value(one, constants) for one in some])
                for some in (step.inputs, step.outputs)
            )
            if isinstance(step, Comm):
                self._ops[key] = replace(step, inputs=inputs, outputs=outputs)
            else:
                label = step.label if isinstance(step.label, str) else self.value(step.label)
                captured = {name: self.value(one, constants) for name, one in step.captured.items()}
                self._ops[key] = replace(step, inputs=inputs, outputs=outputs, captured=captured, label=label)
        return self._ops[key]
