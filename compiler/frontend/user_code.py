"""Runs a user's Python file: its folder is importable, its imports stay separate, and its errors are reported at its own lines.

model.py:14: ValueError: in_channels 3 is not divisible by groups 2
  self.conv = nn.Conv2d(3, 6, 5, groups=2)
"""

from __future__ import annotations

import ast
import importlib
import linecache
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

from partc.compiler.directives.recorder import Recorder
from partc.compiler.errors import CompileError, Problem
from partc.runtime.files.regular import read_regular
from partc.runtime.files.user_modules import IMPORTING, is_imported_from, module_names

# The name under which the file runs.
MODEL_MODULE = "__partc_model__"


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """A context in which modules next to the file can be imported; afterwards they are removed from `sys.modules`.

    So two models may both have a `layers.py`. The standard library and installed packages keep their names. Threads take turns.
    """
    with IMPORTING:
        path, own = list(sys.path), module_names(folder)
        aside = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in own}
        sys.path.insert(0, str(folder))
        try:
            importlib.invalidate_caches()
            yield
        finally:
            sys.path[:] = path
            below = os.path.join(folder, "")
            for name, module in list(sys.modules.items()):
                if name == MODEL_MODULE or is_imported_from(module, below):
                    del sys.modules[name]
            sys.modules.update(aside)


@dataclass(frozen=True)
class UserFile:
    """A file that has run: its globals, and the lines that bind them."""

    path: Path
    globals: Mapping[str, object]
    lines: Mapping[str, int]

    @classmethod
    def run(cls, path: Path) -> UserFile:
        """Runs the file; `__name__` is not `__main__` in it. Its exceptions are not caught."""
        source = read_regular(path)
        module = ModuleType(MODEL_MODULE)
        module.__file__ = str(path)
        sys.modules[MODEL_MODULE] = module
        exec(_code(source, path), module.__dict__)
        return cls(path, vars(module), dict(_bindings(ast.parse(source).body)))

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return self.path.name

    def line(self, *names: str) -> str:
        """Returns a text such as `model.py:12`: the line that binds the first existing one of these globals; `model.py` without any."""
        found = next((self.lines[name] for name in names if name in self.lines), None)
        return f"{self.name}:{found}" if found is not None else self.name


def _code(source: bytes, path: Path) -> CodeType:
    try:
        return compile(source, str(path), "exec")
    except (SyntaxError, ValueError) as error:  # Python does not name the file where its bytes are not text
        if isinstance(error, SyntaxError) and error.filename:
            raise
        raise SyntaxError(str(error), (str(path), 1, 0, "")) from error


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    """The names that top-level statements bind, with their lines."""
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name, statement.lineno
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name, statement.lineno) for alias in statement.names)
            case _:
                for inner in ast.walk(statement):
                    if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                        yield inner.id, inner.lineno


@contextmanager
def errors_by_line(path: Path, recorder: Recorder) -> Iterator[None]:
    """A context that turns an error of the user's code into a CompileError; an error without any line of that code passes through."""
    try:
        yield
    except CompileError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code has raised it, even `exit()` or GeneratorExit
        problem = _problem(error, path, recorder)
        if problem is None:
            raise
        raise CompileError(problem) from error


def user_frames(error: BaseException, recorder: Recorder) -> list[traceback.FrameSummary]:
    """Returns the traceback's frames in the user's own files, the innermost last."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if recorder.owns(frame.filename)]


def _problem(error: BaseException, path: Path, recorder: Recorder) -> Problem | None:
    if isinstance(error, SyntaxError) and error.filename and recorder.owns(error.filename):
        line = recorder.line(error.filename, error.lineno or 0)
        return Problem(line, f"{type(error).__name__}: {error.msg}", (error.text or "").strip())
    frames = user_frames(error, recorder)
    if not frames:
        return None
    inner = frames[-1]
    lines = [linecache.getline(inner.filename, inner.lineno or 0).strip()]
    reached = [frame for frame in frames if frame.filename == str(path)]
    if inner.filename != str(path) and reached:
        lines.append(f"reached from {recorder.line(str(path), reached[-1].lineno or 0)}")
    return Problem(
        recorder.line(inner.filename, inner.lineno or 0), _fact(error), "\n  ".join(filter(None, lines)), _help(error)
    )


def _fact(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the file ends the program: SystemExit({error.code!r})"
    try:
        text = str(error).strip()
    except Exception:  # the user's class may fail to make its text
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _help(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "guard what is not the model with `if __name__ == '__main__':`"
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.split(".")[0] == "torch":
        return 'pip install "partc[torch]"'
    return ""
