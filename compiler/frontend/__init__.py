"""Loads a model from an `.onnx` file, a `model.py` that builds one, or the folder of a model of `transformers`."""

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
    """Loads the model at `path`; the suffix, or a folder, decides how. Raises CompileError with all problems of the model.

    `known` is called with the names of a torch module's parameters and buffers before the module is exported, which may take minutes.
    With `cache` a decoder of `transformers` is exported with past and present as inputs and outputs. With `compare` the graph that torch
    exports runs on small inputs, and is refused where its outputs differ from the module's. `keep`: whether the export of a folder is
    stored for the next command. `weights`: True reads a folder's weights from the folder itself, False reads none, a path reads them from
    another folder.
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
