"""What the runtime raises: every message is whole, so that a command prints it and nothing else.

`UsageError` is the caller's to mend (exit 2); `ArtifactError` and `RankError` are failures (exit 1). The first line says where
and what; a last line that begins with `help:` says the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence


class PartcError(Exception):
    """A failure with a message made for the user: no traceback is shown for it."""

    exit_code = 1


class UsageError(PartcError):
    """The call was wrong: a missing input, a wrong number of ranks, an unknown option."""

    exit_code = 2


class InputError(UsageError):
    """A step was refused before any communication, by every rank alike: an input is missing, or its shape breaks a promise."""


class ArtifactError(PartcError):
    """The folder is not what the compiler wrote: a changed, truncated or missing file, another format version, a bad order."""


class RankError(PartcError):
    """A rank failed while a step ran; the message names the rank, the op and its source name."""


class StepError(RankError):
    """A step of a program that recovers has failed on a rank; all have given it up alike, and the next one can run."""


class NonFiniteError(PartcError):
    """The loss of a step is no finite number, or a parameter is none; raised by all ranks alike."""


class CheckpointError(PartcError):
    """A checkpoint is not whole, or cannot be written, or does not fit; the message says all that is wrong with it."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written; `problems` are lines, each with the file and the tensor."""

    def __init__(
        self, problems: Sequence[str], help: str = "take another checkpoint, or copy the whole folder again"
    ) -> None:
        super().__init__("\n".join([*problems, f"  help: {help}"]))
        self.problems = tuple(problems)


def printable(text: str) -> str:
    """The text with what a terminal would obey as escapes: names from files stand in messages. Line ends stay."""
    return "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)
