"""What is wrong with a run: nothing, if it ended equal to the undisturbed one, or refused with the right rank named."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from partc.runtime.checkpoint.checkpoint import Checkpoint
from partc.runtime.checkpoint.newest import latest
from partc.runtime.job.status_board import SLOT

from .faults import DIES, DISK, EXITS, NONE, NONFINITE, RAISES, REFUSED, SLEEPS, WORDS, Results
from .scheduler import Endless, Killed

if TYPE_CHECKING:
    from .session import Session


def judged(session: Session, outcomes: list[Any]) -> list[str]:
    """What is wrong with a run."""
    fault, world = session.fault, session.world
    problems = [*world.misuses]
    kind = fault.kind if session.hit else NONE
    for rank, outcome in enumerate(outcomes):
        problems += _judged_rank(session, rank, kind, outcome.value, outcome.error)
    ended = all(outcome.error is None for outcome in outcomes)
    if ended:
        problems += world.leftovers()
        if session.sample.trains:
            problems += _judged_state(session)
    texts = {tuple(outcome.value.refused) for outcome in outcomes if outcome.value}
    if ended and (len(texts) != 1 or (kind == REFUSED) != bool(next(iter(texts)))):
        problems.append(f"ranks were refused with unlike words, or none: {texts}")
    given_up = {tuple(outcome.value.given_up.items()) for outcome in outcomes if outcome.value}
    if ended and (len(given_up) != 1 or (len(next(iter(given_up))) > (kind == RAISES))):
        problems.append(f"ranks gave up unlike steps, or with unlike words: {given_up}")
    if kind == SLEEPS and not _reported(session, fault.rank):
        problems.append(f"rank {fault.rank} slept, and reports do not name it: {world.reports}")
    if session.sample.saves:
        problems += _judged_folder(session, ended)
    return problems


def _judged_state(session: Session) -> list[str]:
    """What is kept is what it is after the undisturbed run, and the same on all ranks that have it."""
    try:
        have = session.tensors()
    except AssertionError as error:
        return [str(error)]
    return [f"'{name}' differs" for name, want in session.after.items() if have[name].tobytes() != want.tobytes()]


def _judged_rank(
    session: Session, rank: int, kind: str, value: Results | None, error: BaseException | None
) -> list[str]:
    fault = session.fault
    if isinstance(error, Endless):
        return [str(error)]
    if error is None and value is not None:
        if value.given_up:
            text = next(iter(value.given_up.values()))
            right = session.sample.recovers and kind == RAISES and WORDS in text and f"rank {fault.rank} failed" in text
            wrong = "" if right else f"rank {rank} gave up a step, though {fault}: {text}"
        elif (rank == fault.rank or kind == NONFINITE) and kind in (DIES, RAISES, EXITS, DISK, NONFINITE):
            return [f"rank {rank} ended well, though {fault}"]
        else:
            wrong = ""
        want = [{} if k in value.given_up else one for k, one in enumerate(session.reference[rank].outputs)]
        wrong = wrong or _unlike(value.outputs, want)
        return [f"rank {rank}: {wrong}"] if wrong else []
    if kind == DIES:
        if not isinstance(error, Killed):
            return [f"rank {rank} raised {error!r} where rank {fault.rank} was killed"]
        return _judged_board(session, rank) if rank == fault.rank else []
    if kind in (RAISES, EXITS):
        text, own = str(error), rank == fault.rank
        right = own if kind == EXITS and isinstance(error, SystemExit) else f"rank {fault.rank} " in text or own
        right = right and (WORDS in text or "has left the job" in text)
        if kind == RAISES and session.sample.recovers and fault.at in session.computing[fault.rank]:
            return [f"rank {rank} has stopped, though the step could be given up: {error!r}"]
        return [] if right else [f"rank {rank} raised {error!r}, though {fault}"]
    if kind == NONFINITE:
        text = f"step {fault.at + 1}: the loss is nan\n  rank {fault.rank}: input "
        right = type(error).__name__ == "NonFiniteError" and str(error).startswith(text)
        return [] if right else [f"rank {rank} raised {error!r}, though {fault}"]
    if kind == DISK:
        right = f"rank {fault.rank}" in str(error) and type(error).__name__ == "CheckpointError"
        return [] if right else [f"rank {rank} raised {error!r}, though {fault}"]
    return [f"rank {rank} raised {error!r}, though {fault if kind != NONE else 'nothing went wrong'}"]


def _judged_board(session: Session, rank: int) -> list[str]:
    """The status board shows what a rank that has died was at."""
    if (at := session.at[rank]) is None:
        return []
    program, index = at
    step, action = SLOT.unpack_from(program._board.buffer, program._board.offset)
    shown = (program.describe(action), step)
    return [] if (action, step) == (index, program._step) else [f"the board says {shown}, not {index}"]


def _reported(session: Session, rank: int) -> bool:
    """Whether some report names a rank that sleeps, where others have waited at all."""
    words = [text for _, text in session.world.reports]
    return not words or any(f"{rank}" in text or "agreement" in text or "exchange" in text for text in words)


def _judged_folder(session: Session, ended: bool) -> list[str]:
    """The newest checkpoint is whole, and the last one where all went well."""
    problems = []
    try:
        newest = latest(session.kept) if session.kept.exists() else None
        step = 0 if newest is None else Checkpoint.at(newest).index.step
        if ended and step != len(session.steps):
            problems.append(f"the newest checkpoint is of step {step}")
    except Exception as error:
        problems.append(f"the newest checkpoint: {error!r}")
    shutil.rmtree(session.kept, ignore_errors=True)
    return problems


def _unlike(have: list[Mapping[str, Any]], want: list[Mapping[str, Any]]) -> str:
    """The first difference in bits between what two runs gave."""
    if len(have) != len(want):
        return f"{len(have)} results, and not {len(want)}"
    for k, (one, other) in enumerate(zip(have, want, strict=True)):
        if one.keys() != other.keys():
            return f"step {k} gives {sorted(one)}, and not {sorted(other)}"
        for name, value in other.items():
            a, b = np.asarray(one[name]), np.asarray(value)
            equal = a.shape == b.shape and (
                a.tolist() == b.tolist() if b.dtype == object else a.tobytes() == b.tobytes()
            )
            if not equal:
                return f"step {k}: '{name}' is {a.reshape(-1)[:4]}..., and not {b.reshape(-1)[:4]}..."
    return ""
