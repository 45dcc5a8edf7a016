"""The errors of the runtime: every message is complete, so that a command prints it and nothing else.

A `UsageError` is a mistake of the caller (exit 2); `ArtifactError` and `RankError` are failures (exit 1). The first line has the place and
the fact; a last line that begins with `help:` has the remedy.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

NO_MEMORY = "no memory is left"
NO_MEMORY_HELP = (
    "\n  help: `partc inspect` says what each rank takes; give it more memory, or the plan more ranks or smaller sizes"
)
"""The last line of a message about a rank without free memory."""


_NO_MEMORY = re.compile(
    "bad.alloc|failed to allocate|out of (?:dynamic )?memory"
    "|(?:cannot|can't|could not|unable to) allocate|failed to map segment|can't start new thread"
    # OpenBLAS and Rust, which end the process
    "|memory allocation (?:still |of [0-9]+ bytes )?failed|too many memory regions|pthread_create failed"
    # what CPython and onnxruntime say later, after an allocation has failed
    "|error return without exception set|Trying to add a domain to DomainToVersion map",
    re.IGNORECASE,
)


def speaks_of_memory(text: str) -> bool:
    """Whether a text is a message about memory that ran out: of C, C++, a loader of libraries, an allocator, a device."""
    return _NO_MEMORY.search(text) is not None


def chain_of(error: BaseException, contexts: bool = True) -> Iterator[BaseException]:
    """Yields an exception and those that led to it, each once, because the chain of a library's exception may be a circle.

    `contexts`: follow also `__context__`, the exceptions that were handled when it was raised, not only `__cause__`.
    """
    seen, reason = list[BaseException](), error
    while not any(reason is other for other in seen):
        yield reason
        seen.append(reason)
        context = reason.__context__ if contexts and not reason.__suppress_context__ else None
        if (cause := reason.__cause__ or context) is None:
            return
        reason = cause


def out_of_memory(error: BaseException) -> BaseException | None:
    """Returns the first exception in the chain of `error` that reports that memory ran out, or None.

    These are MemoryError, ENOMEM of the system (a mapping), and exceptions of libraries, recognized by their text: ImportError of a library
    that cannot be mapped, RuntimeError of std::bad_alloc or of a thread that cannot start, exceptions of onnxruntime and torch.
    """
    for reason in chain_of(error):
        if isinstance(reason, MemoryError) or (isinstance(reason, OSError) and reason.errno == errno.ENOMEM):
            return reason
        if not isinstance(reason, PartcError) and speaks_of_memory(str(reason)):
            return reason
    return None


def no_memory(reason: BaseException) -> str:
    """Returns the line of a message about an exception that `out_of_memory` returned."""
    text = " ".join(str(reason).split())
    if not isinstance(reason, MemoryError):
        text = f"{type(reason).__name__}: {text}"
    return NO_MEMORY + (f": {text}" if text else "")


def reason_of(error: BaseException) -> str:
    """Returns what an error says of a file or an address: the system's words for an OSError, else its text.

    Where memory ran out it raises the error again: the file is not at fault, and a job may be started again.
    """
    if out_of_memory(error):
        raise error
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


class PartcError(Exception):
    """A failure with a message for the user: no traceback is shown for it."""

    exit_code = 1

    def __init__(self, text: str = "") -> None:
        super().__init__(printable(text))


class UsageError(PartcError):
    """The call was wrong: a missing input, a wrong number of ranks, an unknown option."""

    exit_code = 2


class InputError(UsageError):
    """Every rank refused a step before any communication: an input is missing, or its shape breaks a promise."""


class ArtifactError(PartcError):
    """The folder is not as the compiler wrote it: a changed, truncated or missing file, another format version, a bad order."""


class RankError(PartcError):
    """A rank failed while a step ran; the message names the rank, the op and its source name."""


class StepError(RankError):
    """A step of a program that recovers from errors failed on a rank; all ranks have abandoned the step, and the next one can run."""


class NonFiniteError(PartcError):
    """The loss of a step, or a parameter, is not finite; raised by all ranks."""


class StoppedError(PartcError):
    """A training was asked to stop before its last step; raised by all ranks. The exit code, 75, is EX_TEMPFAIL: start it again."""

    exit_code = 75


class CheckpointError(PartcError):
    """A checkpoint is incomplete, or cannot be written, or does not fit; the message lists all its problems."""


class DamagedError(CheckpointError):
    """A checkpoint differs from what was written; each line of `problems` names the file and the tensor."""

    def __init__(
        self, problems: Sequence[str], help: str = "take another checkpoint, or copy the whole folder again"
    ) -> None:
        super().__init__("\n".join([*problems, f"  help: {help}"]))
        self.problems = tuple(problems)


@dataclass(frozen=True)
class Violation:
    """A broken promise of an artifact, as a check reports it.

    `file` is relative to the artifact; `node` is an op and its name, `path` its place in the model; both may be empty.

        rank_0001.onnx: Recv 'conv1.y' (conv1): tag 4 has no Send on rank 0
          help: compile the model again
    """

    file: str
    fact: str
    node: str = ""
    path: str = ""
    help: str = ""

    def __str__(self) -> str:
        source = f" ({self.path})" if self.path else ""
        where = one_line(f"{self.file}: {self.node}{source}" if self.node else f"{self.file}{source}")
        text = f"{where}: {self.fact}"
        return printable(f"{text}\n  help: {self.help}" if self.help else text)


def no_such_row(lookup: str, record: int, id: int, rows: int, rank: int | None = None) -> str:
    """Returns the message about an id that is not a row of a table; `rank` is the rank in whose record it is, None if not known."""
    there = "" if rank is None else f" on rank {rank}"
    law = f"the table has {rows} rows: ids are {-rows} to {rows - 1}"
    return f"{lookup}: record {record}{there} has the id {id}\n  {law}\n  help: look at the data, or give the table more rows"


def printable(text: str) -> str:
    """Returns the text with unsafe characters escaped, since messages contain names from files.

    These are control characters, characters that are invisible or turn the direction of writing, and all line ends but the plain one.
    """
    if text.isascii() and not text.encode().translate(None, _PLAIN):
        return text  # a fast path, for dumps of many megabytes
    return _RARE.sub(_escaped, text)


def one_line(text: str) -> str:
    """Returns a text on one line, so that no part of a name can be mistaken for a line of its message."""
    return printable(text).replace("\n", "\\n")


def breaks_lines(text: str) -> bool:
    """Whether a text has any line end, including those of Unicode."""
    return _LINE_END.search(text) is not None


def merged(texts: Iterable[str]) -> list[str]:
    """Merges the messages that differ only in the numbers of a path into the first of them, with a count of the others.

    `layers.0.up: ...`, `layers.1.up: ...`, `layers.2.up: ...` become one, with a line `and 2 more layers` before its help.
    """
    groups: dict[str, list[str]] = {}
    for text in dict.fromkeys(texts):
        groups.setdefault(_PATH.sub(_unnumbered, text), []).append(text)
    return [_counted(group) for group in groups.values()]


def _counted(texts: Sequence[str]) -> str:
    if len(texts) == 1:
        return texts[0]
    lines = texts[0].split("\n")
    more = f"and {len(texts) - 1} more {_whose(texts)}"
    if len(lines) == 1:
        return f"{lines[0]}; {more}"
    at = next((k for k, line in enumerate(lines) if line.startswith("  help: ")), len(lines))
    return "\n".join([*lines[:at], f"  {more}", *lines[at:]])


def _whose(texts: Sequence[str]) -> str:
    """Returns the noun for the number in which the messages differ: `layers`, where only that name's numbers differ; else `like it`."""
    places = [[(name, number) for path in _PATH.findall(text) for name, number in _numbers(path)] for text in texts]
    names = {row[0][0] for row in zip(*places, strict=False) if len(set(row)) > 1}
    return names.pop() if len(names) == 1 and min(names).endswith("s") else "like it"


def _numbers(words: str) -> list[tuple[str, str]]:
    """Returns the numbers in a path as pairs (the preceding name, the number)."""
    parts = words.split(".")
    parts = parts[_begin(parts) :]
    return [(before, part) for before, part in zip(["", *parts], parts, strict=False) if part.isdecimal()]


def _unnumbered(words: re.Match[str]) -> str:
    parts = words[0].split(".")
    begin = _begin(parts)
    return ".".join([*parts[:begin], *("#" if part.isdecimal() else part for part in parts[begin:])])


def _begin(parts: Sequence[str]) -> int:
    """Returns the index of the first part of a path in words joined by dots: a name, or a number before a name; 0.5 is not a path."""
    for k, part in enumerate(parts):
        if _NAME.search(part) or (part.isdecimal() and k + 1 < len(parts) and _NAME.search(parts[k + 1])):
            return k
    return len(parts)


_PATH = re.compile(r"(?<!\w)\w++(?:\.\w++)+")
"""Matches words joined by dots, in time linear in the text."""
_NAME = re.compile("[A-Za-z_]")
_LINE_END = re.compile("[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")
_RARE = re.compile(r"[^ -~\n\t]")
_PLAIN = bytes(range(ord(" "), ord("~") + 1)) + b"\n\t"
"""The characters that `_RARE` does not match, as bytes."""


def _escaped(found: re.Match[str]) -> str:
    one = found[0]
    return one if one.isprintable() else one.encode("unicode_escape").decode()
