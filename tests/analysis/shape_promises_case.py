"""What a model's declared shapes promise of its outputs, and which promises a run of onnxruntime breaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime
from onnx_nodes_case import quiet
from partc.compiler.analysis.shapes import shapes
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.value_info import SymbolInfo, ValueInfo
from partc.compiler.pipeline import run_passes, start
from partc.runtime.artifact.dim_expression import parse

Promised: TypeAlias = tuple[dict[str, ValueInfo], dict[str, list[int | str]], dict[str, SymbolInfo]]
"""What is known of the outputs, the dims of the inputs, and the symbols in these."""


def promised(model: onnx.ModelProto) -> Promised:
    """What the compiler says of the outputs, the dims of the inputs by its names, and which sizes are legal."""
    source = Source(from_proto(model, Path("model.onnx")))
    program = run_passes(start(source, None, "model.onnx"), shapes)
    graph = program.model.graph
    values = {value.name or "": program.values[value] for value in graph.outputs if value in program.values}
    inputs = {
        v.name or "": [d if isinstance(d, int) else str(d.value) for d in v.shape.dims]
        for v in graph.inputs
        if v.shape is not None
    }
    return values, inputs, dict(program.symbols)


def broken(said: Promised, inputs: dict[str, Any], outputs: dict[str, Any]) -> list[str]:
    """The promises that a run breaks; none where its sizes are not legal."""
    values, dims, symbols = said
    bindings = {
        str(dim): size
        for name, value in inputs.items()
        if name in dims and isinstance(value, np.ndarray)
        for dim, size in zip(dims[name], value.shape, strict=True)
    }
    if any(not symbols[name].facts.contains(size) for name, size in bindings.items() if name in symbols):
        return []
    found = []
    for name, info in values.items():
        if info.shape is None or not isinstance(outputs[name], np.ndarray):
            continue
        want = tuple(parse(dim)(bindings) for dim in info.shape)
        if want != outputs[name].shape:
            found.append(f"{name}: {info.shape} is {want} with {bindings}, and is {outputs[name].shape}")
    return found


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession | None:
    """onnxruntime's session; None where it refuses the model."""
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), quiet(), providers=["CPUExecutionProvider"])
    except Exception:
        return None


def outputs_of(session: onnxruntime.InferenceSession | None, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """What onnxruntime yields; None where it refuses."""
    try:
        return session and dict(
            zip((out.name for out in session.get_outputs()), session.run(None, inputs), strict=True)
        )
    except Exception:
        return None
