"""Runs Python files of the user, each once for a rank; functions in them transform batches.

    def to_32(batch): return {"x": resize(batch["x"]), "label": batch["label"]}
    def augmented(batch, generator): ...         with an np.random.Generator of its own for each batch

The possible values of a `source` are in `sources/user_source.py`. An exception in a file or in one of its functions becomes a user's error
(`user_code.py`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array

from ..errors import UsageError
from ..user_code import run_file, user_code
from .sources.values import as_array
from .streams.child_signals import WithoutTorch

Batch: TypeAlias = dict[str, Array]


@dataclass
class Code:
    """The files that have run, each once for a rank: a source, a transform and a schedule in one file share its globals.

    If ranks are threads, each still has its own globals, as it would in its own process: so a generator or a counter there gives the same
    numbers.
    """

    ran: dict[Path, ModuleType | Exception] = field(default_factory=dict)

    def prepare(self, path: Path) -> None:
        """Runs a file now; an exception in it is raised later, when a value of the file is requested."""
        with contextlib.suppress(Exception):
            self.module(path)

    def module(self, path: Path) -> ModuleType:
        """Returns the module of a file, which runs at the first call; UserCodeError where it failed."""
        path = path.resolve()
        if path not in self.ran:
            with WithoutTorch():
                try:
                    self.ran[path] = run_file(path)
                except Exception as error:
                    self.ran[path] = error
        found = self.ran[path]
        if isinstance(found, Exception):
            raise found
        return found

    def value(self, path: Path, name: str) -> object:
        """Returns the value of a name that a file defines; UsageError where it does not define it, UserCodeError where the file fails."""
        if not path.is_file():
            raise UsageError(f"{path}: there is no such file")
        path, module = path.resolve(), self.module(path)
        if not hasattr(module, name):
            raise UsageError(f"{path}: it does not define `{name}`")
        return getattr(module, name)


@dataclass(frozen=True)
class Transform:
    """A user's function on batches; `random`: whether it takes a generator as well."""

    function: Callable[..., object]
    random: bool
    where: str

    @staticmethod
    def load(spec: str, code: Code) -> Transform:
        """Loads the function that `file.py:function` names; UsageError where there is none."""
        file, _, name = spec.rpartition(":")
        function = code.value(Path(file), name)
        if not callable(function):
            raise UsageError(f"{file}: `{name}` is a {type(function).__name__}, not a function")
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (ValueError, TypeError):  # a function written in C may have no signature
            parameters = []
        taken = [one for one in parameters if one.kind in kinds]
        random = any(one.default is inspect.Parameter.empty or one.name == "generator" for one in taken[1:2])
        return Transform(function, random, spec)

    def __call__(self, batch: Mapping[str, Array], rows: int, generator: np.random.Generator | None) -> Batch:
        """Returns the arrays that the function computes from a batch; UsageError where their rows are not the batch's records."""
        with user_code(self.where, f"transforming a batch of {rows} records"):
            made = self.function(dict(batch), generator) if self.random else self.function(dict(batch))
            arrays = {str(name): as_array(value) for name, value in made.items()} if isinstance(made, Mapping) else None
        if arrays is None:
            raise UsageError(f"{self.where} returns a {type(made).__name__}; it must return a dict of arrays")
        problems = [
            f"{self.where}: '{name}' is {list(value.shape)} for {rows} records\n  help: its first dim counts records"
            for name, value in arrays.items()
            if not value.ndim or len(value) != rows
        ]
        if problems:
            raise UsageError("\n".join(problems))
        return arrays
