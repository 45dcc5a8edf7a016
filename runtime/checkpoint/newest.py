"""Finds the checkpoint that a path means: itself, or the newest complete one of a folder of checkpoints.

A checkpoint is known to be whole only when all of it was read and hashed. So of a folder the newest is tried, and where it turns out
to be damaged the next: `take_newest_intact`. Of ranks, rank 0 alone looks into the folder, and all try the same one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

from ..errors import CheckpointError, DamagedError, UsageError, printable
from .index import NONFINITE, is_step, read_index, steps
from .shard_files import ShardFiles
from .verification import Verification

Share: TypeAlias = Callable[[str], Sequence[str]]
"""A collective: takes this rank's text and gives the texts of all ranks, in their order."""
Result = TypeVar("Result")
_PLACE, _WRONG_USE, _DAMAGED = "place", "usage", "damaged"
_GONE = "gone"


def alone(text: str) -> list[str]:
    """What a rank shares with no other."""
    return [text]


def candidates(path: Path) -> Iterator[Path]:
    """The checkpoints that a path may mean, the best first: itself, or those of a folder, the newest first.

    Those that hold numbers which are not finite come last. UsageError where there is none.
    """
    if is_step(path):
        yield path
        return
    found = [place for _, place in reversed(steps(path))]
    if not found:
        fact = "is not a checkpoint and contains none" if path.exists() else "there is no such folder"
        raise UsageError(f"{printable(str(path))}: {fact}\n  help: give a folder that `partc train` wrote")
    wrong = []
    for place in found:
        try:
            is_nonfinite = bool(read_index(place).meta.get(NONFINITE))
        except CheckpointError:
            is_nonfinite = False  # whoever takes it says what is wrong with it
        if is_nonfinite:
            wrong.append(place)
        else:
            yield place
    yield from wrong


def latest(folder: str | Path) -> Path | None:
    """The newest checkpoint in a folder that is whole at first sight, before anything is hashed. None: there is none."""
    if not steps(Path(folder)):
        return None
    return next((place for place in candidates(Path(folder)) if not _first_sight(place)), None)


def take_newest_intact(
    path: Path, act: Callable[[Path], Result], option: str = "", rank: int = 0, share: Share = alone
) -> tuple[Path, Result]:
    """Calls `act` with the newest intact checkpoint that a path means; returns that checkpoint and the result.

    `act` raises DamagedError, on all ranks alike, where one turns out not to be whole: then the next of the folder is taken, and rank 0
    says so on stderr. One that was asked for by its own path is not replaced: the error offers another, to be given to `option`.
    """
    places = _untried(path) if rank == 0 else iter(())
    damaged: list[DamagedError] = []
    while True:
        place = _agreed(path, places, damaged, share)
        try:
            result = act(place)
        except DamagedError as error:
            if place == path:
                offered = share(_offer(path, option) if rank == 0 else "")[0]
                raise DamagedError(error.problems, help=offered) from None
            if not share("" if os.path.lexists(place) else _GONE)[0]:
                damaged.append(error)
            continue
        if damaged and rank == 0:
            lines = []
            for one in damaged:
                more = f", and {len(one.problems) - 1} more" if len(one.problems) > 1 else ""
                lines.append(f"damaged and skipped: {one.problems[0]}{more}")
            print(printable(f"warning: {place} is used, the newest intact one; {'; '.join(lines)}"), file=sys.stderr)
        return place, result


def _untried(path: Path) -> Iterator[Path]:
    """The candidates, looked up each time: a job that trains may save another one meanwhile, and remove what it has saved."""
    tried: set[Path] = set()
    while (place := next((one for one in candidates(path) if one not in tried), None)) is not None:
        tried.add(place)
        yield place


def _agreed(path: Path, places: Iterator[Path], damaged: Sequence[DamagedError], share: Share) -> Path:
    """The next checkpoint to try, as rank 0 finds it; where there is none the same error on all ranks."""
    try:
        found = next(places, None)
        word = (_DAMAGED, "") if found is None else (_PLACE, str(found))
    except UsageError as error:
        word = (_WRONG_USE, str(error))
    kind, text = json.loads(share(json.dumps(word))[0])
    if kind == _PLACE:
        return Path(text)
    if kind == _WRONG_USE:
        raise UsageError(text)
    problems = [problem for error in damaged for problem in error.problems]
    problems.append(f"{path}: none of its checkpoints is intact")
    raise DamagedError(problems, help="copy an intact one here, or start over")


def _offer(path: Path, option: str) -> str:
    """The remedy for a damaged checkpoint: the newest whole one beside it."""
    try:
        for place in candidates(path.parent):
            if place != path and not _problems_of(place):
                return f"the newest intact one is {place}" + (f": {option} {place}" if option else "")
    except UsageError:
        pass
    return f"no other checkpoint in {path.parent} is intact; copy the whole folder again, or start over"


def _problems_of(place: Path) -> list[str]:
    try:
        with Verification(ShardFiles.at(place)) as proof:
            return proof.problems()
    except CheckpointError as error:
        return [str(error)]


def _first_sight(place: Path) -> list[str]:
    try:
        ShardFiles.at(place)
    except CheckpointError as error:
        return [str(error)]
    return []
