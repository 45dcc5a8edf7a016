"""Prints an error: only the message if it is meant for the user, else the traceback and a request to report it."""

from __future__ import annotations

import errno
import os

from partc.cli.output import console
from partc.runtime.errors import NO_MEMORY, NO_MEMORY_HELP, PartcError, no_memory, out_of_memory
from partc.runtime.units import size_text

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ends."""


_SPACE, _FILES = "free space where it is written, or write elsewhere", "raise the number of open files (ulimit -n)"
_REFUSALS = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: _SPACE,
    errno.EIO: "look at the system's log: a disk or a terminal has failed",
    errno.EROFS: "write elsewhere: it can only be read",
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
}
"""System errors that are not a bug of partc, with their remedy, for files without a name: the standard output, a pipe."""
_NEAR = 0.8
"""The share of a process's memory limit beyond which an unknown error counts as memory that ran out."""


def report(error: Exception) -> int:
    """Prints an error to stderr; returns its exit code."""
    try:
        code, text = described(error)
        if console.verbose() and "Traceback" not in text:
            import traceback

            console.echo("".join(traceback.format_exception(error)), err=True)
        console.failure(text)
    except (MemoryError, OSError, ImportError) as another:
        if not out_of_memory(another):
            raise
        os.write(2, f"{NO_MEMORY}\n".encode())
        return 1
    return code


def described(error: Exception) -> tuple[int, str]:
    """Returns an error's exit code and text: the message alone where it is made for the user, else the traceback, too."""
    from partc.compiler.errors import CompileError

    if (reason := out_of_memory(error)) and not (isinstance(error, PartcError) and NO_MEMORY_HELP in str(error)):
        return 1, no_memory(reason) + _limit()
    if isinstance(error, CompileError | PartcError):
        return error.exit_code, str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return 1, f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        return 1, f"the system refused: {error.strerror}\n  help: {_REFUSALS[error.errno]}"
    if _is_near_limit():
        return 1, no_memory(error) + _limit()
    import traceback

    trace = "".join(traceback.format_exception(error))
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in the pass ")]
    where = "".join(f", {note}" for note in notes)
    return 1, f"{trace}partc: this is a bug in partc{where}; please report it with the text above"


def _limit() -> str:
    """Returns a text with the memory limit of the process; empty where there is none."""
    limit = _most_memory()
    return f"; the process may take {size_text(limit)} (ulimit -v)" if limit else ""


def _is_near_limit() -> bool:
    """Whether the process has used most of the memory that it may use: libraries then fail with errors of their own."""
    limit = _most_memory()
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            peak = next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmPeak:")), 0)
    except OSError:
        peak = limit
    return peak > _NEAR * limit > 0


def _most_memory() -> int:
    """Returns the bytes of memory that the process may map; 0 where there is no limit."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return 0 if limit == resource.RLIM_INFINITY else limit
