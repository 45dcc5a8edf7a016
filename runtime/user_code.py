"""The only way to call a user's own Python while data are read and a model trains: its exceptions become errors for the user.

    with user_code("records.py", "reading record 17"):
        record = source[17]

    records.py:6: ZeroDivisionError: division by zero
      while reading record 17
      in batch 3 of epoch 0 on rank 1
      File "/home/me/records.py", line 6, in __getitem__
        return self.x[at] / self.scale

Only frames of the user's code, and of code that it calls, are shown. Every exception that ends a block is converted, also SystemExit and a
KeyboardInterrupt that no signal raised, because on one rank alone either would leave the others waiting. Exempt are GeneratorExit, by which
a reader is closed, and partc's own errors, whose messages are complete. The original exception is the `__cause__`.
"""

from __future__ import annotations

import contextlib
import importlib
import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, TracebackType

from .errors import PartcError
from .files.regular import read_regular
from .files.user_modules import IMPORTING, forget_namesakes
from .job.status_board import note_task
from .job.turn import count_user_code

_TOP = Path(__file__).parents[1]
_OWN = tuple(f"{_TOP / part}{os.sep}" for part in ("cli", "compiler", "runtime"))
_LIBRARIES = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("purelib", "platlib", "stdlib"))
_SHOWN = 12


class UserCodeError(PartcError):
    """The user's code failed: the place and the exception (`head`), its task, and its stack lines; `__cause__` is the exception."""

    def __init__(self, head: str, circumstances: tuple[str, ...] = (), lines: tuple[str, ...] = ()) -> None:
        super().__init__("\n".join([head, *(f"  {text}" for text in circumstances), *lines]))
        self.head, self.circumstances, self.lines = head, circumstances, lines

    def when(self, text: str) -> UserCodeError:
        """Returns the same error with one more circumstance."""
        found = UserCodeError(self.head, (*self.circumstances, text), self.lines)
        found.__cause__ = self.__cause__
        return found


class user_code:
    """A block that runs the user's code. `where` is named as the place of an error that has no line; `doing` is the task of the code."""

    __slots__ = ("doing", "where")

    def __init__(self, where: str, doing: str = "") -> None:
        self.where, self.doing = where, doing

    def __enter__(self) -> None:
        count_user_code(1)
        note_task(f"{self.where}, {self.doing}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        note_task("")
        count_user_code(-1)
        by_user = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
        if error is None or isinstance(error, GeneratorExit | PartcError) or by_user:
            return
        raise user_error(error, self.where, self.doing) from error


def user_error(error: BaseException, where: str, doing: str = "") -> UserCodeError:
    """Converts an exception of the user's code to a `UserCodeError`; the caller sets its cause."""
    circumstances = (f"while {doing}",) if doing else ()
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        text = (error.text or "").strip()
        head = f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
        return UserCodeError(head, circumstances, (f"    {text}",) if text else ())
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    last = frames[-1] if frames else None
    inner = next((frame for frame in reversed(frames) if not _is_library(frame.filename)), last)
    place = f"{inner.filename}:{inner.lineno}" if inner is not None else where
    return UserCodeError(f"{place}: {fact(error)}", circumstances, (*_lines(frames), *_causes(error)))


def fact(error: BaseException) -> str:
    """Describes an exception in one line."""
    if isinstance(error, SystemExit):
        return f"it ends the process: SystemExit({error.code!r})"
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _lines(frames: list[traceback.FrameSummary]) -> Iterator[str]:
    left = len(frames) - _SHOWN
    for index, frame in enumerate(frames):
        if left > 0 and index == _SHOWN // 3:
            yield f"  ... {left} calls more"
        if left <= 0 or not _SHOWN // 3 <= index < _SHOWN // 3 + left:
            yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
            line = linecache.getline(frame.filename, frame.lineno or 0).strip()
            yield from [f"    {line}"] if line else []


def _causes(error: BaseException) -> Iterator[str]:
    """Yields a line about the exception from which, or during whose handling, the user's code raised `error`; nothing if there is none."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None:
        return
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if not _is_ours(frame.filename)]
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    yield f"  after {fact(cause)}{at}"


def is_of_user(file: str) -> bool:
    """Whether a source file is the user's: neither partc's nor that of an installed library."""
    return not _is_ours(file) and not _is_library(file)


def _is_ours(file: str) -> bool:
    return file.startswith(_OWN) or file.startswith("<frozen ")


def _is_library(file: str) -> bool:
    return file.startswith((*_LIBRARIES, "<"))


def run_file(path: Path) -> ModuleType:
    """Runs a user's file once, now, and returns it as a module.

    While it runs it can import modules of its own folder, and they hide others of the same name. Threads that run files take turns.
    """
    module = ModuleType(f"__partc_data_{path.stem}__")
    module.__file__ = str(path)
    with IMPORTING:
        sys.modules[module.__name__] = module  # dataclasses look a class's module up
        forget_namesakes(path.parent)
        sys.path.insert(0, str(path.parent))
        try:
            importlib.invalidate_caches()
            with user_code(str(path), "running the file"):
                exec(compile(read_regular(path), str(path), "exec"), module.__dict__)
        finally:
            with contextlib.suppress(ValueError):
                sys.path.remove(str(path.parent))
    return module
