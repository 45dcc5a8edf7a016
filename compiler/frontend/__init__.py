"""Reads a model: an `.onnx` file, a `model.py` that builds one, or a folder of a model of `transformers`."""

from __future__ import annotations

from pathlib import Path

from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.source import Known, Source, Weights, compared, nothing
from partc.runtime.garbage_collection import uncollected


def load(
    path: Path,
    known: Known = nothing,
    *,
    cache: bool = False,
    compare: bool = False,
    keep: bool = True,
    weights: Weights = True,
) -> Source:
    """The model in `path`, by its ending. Raises CompileError with all that is wrong with it.

    `known` is given the names of a torch module's parameters and buffers before it is exported, which may take minutes. With `cache` a
    decoder of `transformers` is exported with past and present as inputs and outputs. With `compare` what torch exports is run on small
    inputs, and refused where its numbers are not those of the module. `keep`: whether the export of a folder
    is kept for the next command. `weights`: where those of a folder are.
    """
    if weights is not True and not path.is_dir():
        fact = "--weights and --no-weights are for the folder of a model of transformers"
        raise CompileError(Problem(str(path), fact, help="leave it out"))
    if path.is_dir():
        from partc.compiler.frontend.huggingface.folder import load_folder

        return load_folder(path, known, cache=cache, compare=compare, keep=keep, weights=weights)
    source = _loaded(path, known, cache)
    return compared(source) if compare and source.exported else source


def _loaded(path: Path, known: Known, cache: bool) -> Source:
    match path.suffix:
        case ".onnx":
            from partc.compiler.frontend.exported import read_declared
            from partc.compiler.frontend.onnx_file import load_onnx

            model = load_onnx(path)
            return Source(model, read_declared(model, path.name))
        case ".py":
            with uncollected():
                from partc.compiler.frontend.python import load_python

            return load_python(path, known, cache=cache)
        case other:
            raise CompileError(
                Problem(
                    str(path),
                    f"a model ends in .onnx or .py, not in '{other}'",
                    help="pass the path of a model.py, a .onnx file or a folder of a model of transformers",
                )
            )
