"""Decides whether the model is at fault when a pass fails: it is where onnx or onnxruntime refuse the model as it was loaded.

Passes take the model for sound ONNX. To prove that before each compile would cost every user for a few models that are not, and would
refuse some that onnxruntime runs; so a model is looked at when a pass has stumbled over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from partc.compiler.emit.prove import without_weights
from partc.compiler.errors import CompileError, InternalError, Problem
from partc.compiler.frontend import load
from partc.runtime.artifact.format import Manifest
from partc.runtime.artifact.graph.bodies import read_model
from partc.runtime.artifact.graph.half_kernels import compute_in_float32
from partc.runtime.checker.structures import check_model
from partc.runtime.errors import PartcError, out_of_memory
from partc.runtime.program.ort import can_load, version


@contextmanager
def as_user_error(path: Path) -> Iterator[None]:
    """Turns an internal error into a CompileError if the model at `path` proves invalid."""
    try:
        yield
    except Exception as error:
        expected = isinstance(error, CompileError | PartcError | OSError) and not isinstance(error, InternalError)
        if expected or out_of_memory(error):
            raise
        if reason := unsound(path):
            help = "see onnx.checker.check_model and onnxruntime.InferenceSession, and export the model again"
            raise CompileError(Problem(path.name, f"is not a valid ONNX model: {reason}", help=help)) from error
        raise


def unsound(path: Path) -> str:
    """What onnx's checker or onnxruntime say against a model; '' where they take it."""
    built = None if path.suffix == ".onnx" else load(path).model
    try:
        # weights of a folder may be in files of any place
        model = read_model(path) if built is None else without_weights(built)
        violations = check_model(path.name, model, Manifest.model_construct(symbols={}))  # type: ignore[call-arg]
    except Exception as error:  # of a model that cannot even be looked at
        if out_of_memory(error):
            raise
        return " ".join(f"{type(error).__name__}: {error}".split())
    if violations:
        return f"{violations[0].node}: {violations[0].fact}" if violations[0].node else violations[0].fact
    compute_in_float32(model, bfloat16=True)
    refused = can_load(model.SerializeToString(), str(path.parent.resolve()), optimized=False)
    return f"onnxruntime {version()} does not load it: {refused}" if refused else ""
