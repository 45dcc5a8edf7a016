"""Prints an error: only the message if it is meant for the user, else the traceback and a request to report it."""

from __future__ import annotations

from partc.cli.output import console

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ends."""


def report(error: Exception) -> int:
    """Prints an error to stderr; its exit code."""
    code, text = described(error)
    if console.verbose() and "Traceback" not in text:
        import traceback

        console.echo("".join(traceback.format_exception(error)), err=True)
    console.failure(text)
    return code


def described(error: Exception) -> tuple[int, str]:
    """An error's exit code and text: the message alone where it is made for the user, else the traceback too."""
    from partc.compiler.errors import CompileError
    from partc.runtime.errors import PartcError

    if isinstance(error, CompileError | PartcError):
        return error.exit_code, str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return 1, f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return 1, f"no memory is left{f': {error}' if str(error) else ''}"
    import traceback

    trace = "".join(traceback.format_exception(error))
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in the pass ")]
    where = "".join(f", {note}" for note in notes)
    return 1, f"{trace}partc: this is a bug in partc{where}; please report it with the text above"
