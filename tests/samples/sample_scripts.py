"""A Python script of the samples, run in this process: an interpreter of its own imports numpy and onnx for half a second."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from partc.compiler.frontend.user_code import importable


def run_script(path: Path, arguments: Sequence[str] = ()) -> None:
    """Runs a script in its folder, as `python SCRIPT ARGUMENTS` does."""
    with importable(path.parent), contextlib.chdir(path.parent), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [path.name, *arguments])
        runpy.run_path(str(path), run_name="__main__")
