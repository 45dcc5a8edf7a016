"""A shape that is promised holds: ONNX's own node tests, with fixed and with dynamic dims, against what onnxruntime yields."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.backend.test.case.test_case import TestCase
from onnx_nodes_case import cases
from rows import first_and_of_today
from shape_promises_case import broken, outputs_of, promised, session_of

MOST = 3
"""So many node tests of an op at most."""


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


def ops_of(case: TestCase) -> tuple[str, ...]:
    return tuple(node.op_type for node in case.model.graph.node)


def chosen() -> list[TestCase]:
    """The first node test of each op, and a quarter of some others."""
    counts: Counter[tuple[str, ...]] = Counter()
    some = list[TestCase]()
    for _, case in sorted(cases().items()):
        counts[ops_of(case)] += 1
        some += [case] if counts[ops_of(case)] <= MOST else []
    return first_and_of_today(some, ops_of)


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
    assert tried > 200, tried
    assert not found, "\n".join(found)
