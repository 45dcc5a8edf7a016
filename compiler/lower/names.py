"""The names of a job's values, given in one pass: from the hint of each, in the order in which they were made.

A value of the model and its versions have their own names. What is made beside them has a name that the model does not have (`h.shape` is
`h.shape'` where the model has an `h.shape` itself), and one that nothing else on its ranks has: a value on ranks 0-1 and another on
ranks 2-3 may have the same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from partc.compiler.ir.programs import Value
from partc.compiler.ir.sharded import Ranks
from partc.compiler.lower.job import Job
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
