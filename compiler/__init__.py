"""The compiler: compiles one single-device model and a plan into one ONNX program per rank.

What a `model.py` needs: `from partc.compiler import Symbol, nn, place, shard`; communication of its own: `partc.compiler.collectives`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partc.compiler import nn
    from partc.compiler.dims.symbol import Symbol
    from partc.compiler.directives.input import Input
    from partc.compiler.directives.place_calls import place
    from partc.compiler.directives.shard_calls import shard
    from partc.compiler.pipeline import compile_model

__all__ = ["Input", "Symbol", "compile_model", "nn", "place", "shard"]

_HOME = {
    "Input": "partc.compiler.directives.input",
    "Symbol": "partc.compiler.dims.symbol",
    "compile_model": "partc.compiler.pipeline",
    "place": "partc.compiler.directives.place_calls",
    "shard": "partc.compiler.directives.shard_calls",
}


def __getattr__(name: str) -> Any:
    """Loads what is asked for only then: importing onnx and its kin takes most of a second."""
    if name == "nn":
        return import_module("partc.compiler.nn")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'partc.compiler' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
