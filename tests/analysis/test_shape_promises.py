"""A shape that is promised holds: ONNX's own node tests, with fixed and with dynamic dims, against what onnxruntime yields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.backend.test.case.test_case import TestCase
from partc.compiler.analysis.shapes import shapes
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.value_info import ValueInfo
from partc.compiler.pipeline import run_passes, start
from partc.runtime.artifact.dim_expression import parse
from test_onnx_nodes import cases, quiet

Promised: TypeAlias = tuple[dict[str, ValueInfo], dict[str, list[int | str]]]
"""What is known of the outputs, and the dims of the inputs."""
MOST = 3
"""So many node tests of an op."""


def promised(model: onnx.ModelProto) -> Promised:
    """What the compiler says of the outputs, and the dims of the inputs by its names."""
    source = Source(from_proto(model, Path("model.onnx")))
    program = run_passes(start(source, None, "model.onnx"), through=shapes)
    graph = program.model.graph
    values = {value.name or "": program.values[value] for value in graph.outputs if value in program.values}
    inputs = {
        v.name or "": [d if isinstance(d, int) else str(d.value) for d in v.shape.dims]
        for v in graph.inputs
        if v.shape is not None
    }
    return values, inputs


def broken(said: Promised, inputs: dict[str, Any], outputs: dict[str, Any]) -> list[str]:
    """The promises that a run breaks."""
    values, dims = said
    bindings = {
        str(dim): size
        for name, value in inputs.items()
        if name in dims and isinstance(value, np.ndarray)
        for dim, size in zip(dims[name], value.shape, strict=True)
    }
    found = []
    for name, info in values.items():
        if info.shape is None or not isinstance(outputs[name], np.ndarray):
            continue
        want = tuple(parse(dim)(bindings) for dim in info.shape)
        if want != outputs[name].shape:
            found.append(f"{name}: {info.shape} is {want} with {bindings}, and is {outputs[name].shape}")
    return found


def dynamic(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a symbol for every dim of every input, and outputs of which nothing is said."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    weights = {weight.name for weight in copy.graph.initializer}
    for port in copy.graph.input:
        if port.name not in weights and port.type.HasField("tensor_type"):
            for axis, dim in enumerate(port.type.tensor_type.shape.dim):
                dim.dim_param = f"{port.name}_{axis}"
    for port in copy.graph.output:
        if port.type.HasField("tensor_type"):
            port.type.tensor_type.ClearField("shape")
    return copy


def held(model: onnx.ModelProto, inputs: dict[str, Any]) -> onnx.ModelProto:
    """The model with its small integer inputs as constants: shapes, axes, indices."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for port in list(copy.graph.input):
        value = inputs.get(port.name)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iub" and value.size <= 16:
            copy.graph.input.remove(port)
            copy.graph.initializer.append(onnx.numpy_helper.from_array(value, port.name))
    return copy


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


def chosen() -> Iterator[TestCase]:
    """Some node tests of each op."""
    counts: Counter[tuple[str, ...]] = Counter()
    for _, case in sorted(cases().items()):
        ops = tuple(node.op_type for node in case.model.graph.node)
        counts[ops] += 1
        if counts[ops] <= MOST:
            yield case


@pytest.mark.filterwarnings("ignore")
def test_node_tests_keep_what_is_promised() -> None:
    """With shapes and axes as constants, and with all dims dynamic besides."""
    found, tried = [], 0
    for case in chosen():
        weights = {weight.name for weight in case.model.graph.initializer}
        names = [port.name for port in case.model.graph.input if port.name not in weights]
        inputs = dict(zip(names, case.data_sets[0][0], strict=False))
        outputs = outputs_of(session_of(case.model), inputs)
        if outputs is None:
            continue
        tried += 1
        constant = held(case.model, inputs)
        for model in (constant, dynamic(constant)):
            found += [f"{case.name}: {line}" for line in broken(promised(model), inputs, outputs)]
    assert tried > 300, tried
    assert not found, "\n".join(found)
