"""The names of a job's values, given in one pass: from the hint of each, in the order in which they were made.

A value of the model and its versions have their own names. What is made beside them has a name that the model does not have (`h.shape` is
`h.shape'` where the model has an `h.shape` itself), and one that nothing else on its ranks has: a value on ranks 0-1 and another on
ranks 2-3 may have the same one.
"""

from __future__ import annotations

from itertools import chain, count

from partc.compiler.ir.programs import Value
from partc.compiler.ir.sharded import Ranks
from partc.compiler.lower.job import Job


def names_of(job: Job) -> dict[Value, str]:
    """The names of the values that a job has made."""
    names: dict[Value, str] = {}
    taken: dict[str, Ranks] = {}
    for value, ranks in job.created.items():
        first = job.derived(value.hint if value.base is None else f"{names.get(value.base) or value.base}{value.hint}")
        numbered = (f"{first}.{number}" for number in count(2))
        for name in chain([first], map(job.derived, value.others), numbered):
            if name not in job.reserved and not taken.get(name, 0) & ranks:
                taken[name] = taken.get(name, 0) | ranks
                names[value] = name
                break
    return names
