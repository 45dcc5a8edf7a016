"""The file of a profile: by rank the seconds of every task in every step, as `partc run --profile` and `partc train --profile` write it.

    {"profile": 1, "ranks": [{"rank": 0, "step": [0.031, ...], "tasks": {"0F0": [0.004, ...], ...}, "waits": {}, ...}, ...]}

What begins communication, what runs once, and the update count to the task before them, or to the first one. Waits for other ranks count
to none, but for those inside of a task, which are in `waits`.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, NonNegativeFloat, ValidationError

from ..errors import UsageError
from ..files.counted import PROFILE, read_json

Seconds = list[NonNegativeFloat]


class _Record(BaseModel):
    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", allow_inf_nan=False)


class RankTimes(_Record):
    """The seconds of each step of one rank: `step` from its first action to its last, `tasks` by cell, `waits` inside of a task.

    `kinds`: of `compute`, `update`, `begin` (of communication) and `wait`. `arena`: the bytes planned for values between segments.
    Where several targets compute, `targets`: the seconds in which each computed or copied; `overlap`: those in which more than one did.
    """

    rank: int = Field(ge=0)
    step: Seconds
    tasks: dict[str, Seconds]
    waits: dict[str, Seconds]
    kinds: dict[str, Seconds]
    arena: int = Field(ge=0)
    targets: dict[str, Seconds] = Field(default_factory=dict)
    overlap: Seconds = Field(default_factory=list)


class Profile(_Record):
    """A profile of all ranks, in the same steps."""

    profile: Literal[1]
    ranks: Annotated[list[RankTimes], FailFast()] = Field(min_length=1)

    @property
    def steps(self) -> int:
        """The number of steps."""
        return min(len(one.step) for one in self.ranks)

    def measured(self, step: int | None = None) -> float:
        """The seconds of a step on the rank that took longest, by default the median."""
        return max(_of(one.step, step) for one in self.ranks)

    def times(self, step: int | None = None) -> dict[str, float]:
        """Maps each task to its seconds in a step, by default the median.

        Of the ranks of a stage the slowest one counts. Where they wait for each other inside, their time together is that of the rank
        that came last, which waited least.
        """
        together: dict[str, float] = {}
        alone: dict[str, float] = {}
        for one in self.ranks:
            for cell, seconds in one.tasks.items():
                busy = _of(seconds, step)
                whole = busy + (_of(one.waits[cell], step) if cell in one.waits else 0.0)
                alone[cell] = max(alone.get(cell, 0.0), busy)
                together[cell] = min(together.get(cell, whole), whole)
        return {cell: max(busy, together[cell]) for cell, busy in alone.items()}


def _of(seconds: Seconds, step: int | None) -> float:
    return statistics.median(seconds) if step is None else seconds[step]


def read_profile(path: Path) -> Profile:
    """The profile in a file; UsageError where the file is not a profile."""
    try:
        found = Profile.model_validate(read_json(path, PROFILE))
    except OSError as error:
        raise UsageError(f"{path}: it {error.strerror}\n  help: use a file that --profile has written") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"{path}: it is not a profile: {place}: {first['msg']}\n  help: use a file that --profile has written"
        ) from None
    except ValueError as error:
        raise UsageError(
            f"{path}: it is not a profile: {error}\n  help: use a file that --profile has written"
        ) from None
    for one in found.ranks:
        columns = [one.step, *one.tasks.values(), *one.waits.values(), *one.kinds.values(), *one.targets.values()]
        columns += [one.overlap] if one.targets else []
        if not one.step or len({len(column) for column in columns}) > 1:
            raise UsageError(
                f"{path}: the times of rank {one.rank} are of different numbers of steps\n  help: measure again"
            )
    for step in range(found.steps):
        if not found.measured(step):
            raise UsageError(f"{path}: step {step} took no time on any rank\n  help: measure again")
    return found
