"""Runs an action on every rank with one outcome: if it fails on any rank, all ranks raise the same error."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..errors import ArtifactError, CheckpointError, DamagedError, PartcError, RankError, UsageError

Result = TypeVar("Result")
_KINDS: tuple[type[PartcError], ...] = (DamagedError, CheckpointError, ArtifactError, UsageError)


def together(action: Callable[[], Result], share: Callable[[str], Sequence[str]]) -> Result:
    """Returns the action's result if it succeeds on every rank; collective.

    Errors of partc are merged into one that all ranks raise: it has the class of the first failing rank's error, and each line of that
    class's errors once. Any other error is raised by the rank that had it, and the other ranks raise a RankError.
    """
    failure: Exception | None = None
    result: Result | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    outcomes = [json.loads(text) for text in share(json.dumps(_words(failure)))]
    if not any(outcomes):
        return result  # type: ignore[return-value]
    strange = [(rank, words) for rank, words in enumerate(outcomes) if words and words[0] is None]
    if strange:
        if failure is not None and _words(failure)[0] is None:
            raise failure
        rank, words = strange[0]
        raise RankError(f"rank {rank} failed: {words[1]}")
    first = next(words[0] for words in outcomes if words)
    texts = dict.fromkeys(text for words in outcomes if words and words[0] == first for text in words[1:])
    if first == DamagedError.__name__:
        raise DamagedError(list(texts))
    kind = next(one for one in _KINDS if one.__name__ == first)
    raise kind("\n".join(texts))


def _words(failure: Exception | None) -> list[str | None]:
    """Converts an error to the texts that ranks exchange: the name of its class, None if it is not partc's, and its text."""
    match failure:
        case None:
            return []
        case DamagedError():
            return [DamagedError.__name__, *failure.problems]
        case _:
            for kind in _KINDS:
                if type(failure) is kind:
                    return [kind.__name__, str(failure)]
            return [None, f"{type(failure).__name__}: {failure}"]
