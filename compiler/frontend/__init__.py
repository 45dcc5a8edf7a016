"""Reads a model: an `.onnx` file, or a `model.py` that builds one."""

from __future__ import annotations

from pathlib import Path

from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.source import Known, Source, nothing


def load(path: Path, known: Known = nothing) -> Source:
    """The model in `path`, by its ending. Raises CompileError with all that is wrong with it.

    `known` is given the names of a torch module's parameters and buffers before it is exported, which may take minutes.
    """
    match path.suffix:
        case ".onnx":
            from partc.compiler.frontend.onnx_file import load_onnx

            return Source(load_onnx(path))
        case ".py":
            from partc.compiler.frontend.python import load_python

            return load_python(path, known)
        case other:
            raise CompileError(
                Problem(
                    str(path),
                    f"a model ends in .onnx or .py, not in '{other}'",
                    help="pass the path of a model.py or a .onnx file",
                )
            )
