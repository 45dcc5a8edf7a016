"""Finds the checkpoint that a path refers to: the path itself, or the newest intact checkpoint in a folder of checkpoints.

A checkpoint is known to be intact only after all of it was read and hashed. So `take_newest_intact` tries the newest one in a folder and,
if that is damaged, the next. Only rank 0 looks into the folder, and all ranks try the same checkpoint.
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
    """The `Share` of a job of one rank: returns this rank's text alone."""
    return [text]


def candidates(path: Path) -> Iterator[Path]:
    """Yields the checkpoints that a path may refer to, the best first: the path itself, or those in a folder, the newest first.

    Checkpoints marked as containing non-finite numbers come last. UsageError where there is no checkpoint.
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
            is_nonfinite = False  # `take_newest_intact` reports the error when it is tried
        if is_nonfinite:
            wrong.append(place)
        else:
            yield place
    yield from wrong


def latest(folder: str | Path) -> Path | None:
    """Returns the newest checkpoint in a folder whose index and file sizes are in order; nothing is hashed. None where there is none."""
    if not steps(Path(folder)):
        return None
    return next((place for place in candidates(Path(folder)) if not _first_sight(place)), None)


def take_newest_intact(
    path: Path, act: Callable[[Path], Result], option: str = "", rank: int = 0, share: Share = alone
) -> tuple[Path, Result]:
    """Calls `act` with the newest intact checkpoint that a path refers to; returns that checkpoint and the result.

    `act` must raise DamagedError on all ranks where a checkpoint is damaged: then the next one in the folder is tried, and rank 0 prints a
    warning to stderr. If `path` is itself a checkpoint it is not replaced by another: the error suggests another one, to be passed by
    `option`.
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
    """Yields the candidates, listed anew each time: a running job may meanwhile save another checkpoint and remove older ones."""
    tried: set[Path] = set()
    while (place := next((one for one in candidates(path) if one not in tried), None)) is not None:
        tried.add(place)
        yield place


def _agreed(path: Path, places: Iterator[Path], damaged: Sequence[DamagedError], share: Share) -> Path:
    """Returns the next checkpoint to try, as rank 0 chooses it; raises the same error on all ranks where there is no further one."""
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
    """Returns the help text for a damaged checkpoint: the newest intact one in the same folder."""
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
