"""Shapes of dynamic forms of ops: one compile, many sizes, 0 and 1 among them; what is promised is what onnxruntime yields."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from partc.compiler.analysis.infer_shapes import infer_shapes
from shape_promises_case import broken, outputs_of, promised, session_of

HEAD = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'

FORMS = Path(__file__).with_name("dynamic_forms.txt")
SIZES = (0, 1, 2, 3, 5, 8)
LEAST = {"reshape to one dim and a quotient": 1, "norms of rows": 1, "a product divided by a dim": 1}
"""Sizes from which a case makes sense: below, onnxruntime reads an entry 0 as a copied dim.

Larger least sizes are derived: what is larger than 1 is not legal without a word of the plan."""


def forms() -> dict[str, tuple[str, int]]:
    """The graphs of the file, each with its opset."""
    blocks = re.findall(r"^== ([^\n]+), opset (\d+)\n(.+?)(?=^== |\Z)", FORMS.read_text(), re.DOTALL | re.MULTILINE)
    return {name: (text, int(opset)) for name, opset, text in blocks}


def text_model(text: str, opset: int) -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEAD.replace("{opset}", str(opset)) + "main " + text)
    for port in model.graph.output:
        port.type.tensor_type.ClearField("shape")
    return model


def fed(port: onnx.ValueInfoProto, sizes: dict[str, int]) -> np.ndarray:
    """A value for an input; an integer tensor holds ones."""
    shape = [sizes[dim.dim_param] if dim.dim_param else dim.dim_value for dim in port.type.tensor_type.shape.dim]
    kind = onnx.helper.tensor_dtype_to_np_dtype(port.type.tensor_type.elem_type)
    if kind.kind != "f":
        return np.ones(shape, kind)
    return np.random.default_rng(0).standard_normal(shape).astype(kind)


def steps(model: onnx.ModelProto, least: int) -> list[dict[str, Any]]:
    names = sorted(
        {dim.dim_param for port in model.graph.input for dim in port.type.tensor_type.shape.dim if dim.dim_param}
    )
    rows = [
        dict(zip(names, row, strict=True))
        for row in itertools.product([size for size in SIZES if size >= least], repeat=len(names))
    ]
    rows = [row for row in rows if row.get("p", 0) == row.get("n", 0) + row.get("m", 0) or "p" not in row]
    return [{port.name: fed(port, row) for port in model.graph.input} for row in rows]


@pytest.mark.parametrize("name", forms())
def test_what_is_promised_holds(name: str) -> None:
    model = text_model(*forms()[name])
    said, session, tried = promised(model), session_of(model), 0
    for inputs in steps(model, LEAST.get(name, 0)):
        outputs = outputs_of(session, inputs)
        if outputs is not None:
            tried += 1
            assert broken(said, inputs, outputs) == []
    assert tried, "onnxruntime refuses all sizes"


ROUNDED_UP = (
    "MaxPool<kernel_shape=[1, 2], strides=[2, 3], ceil_mode=1>",
    "MaxPool<kernel_shape=[2, 2], strides=[3, 2], pads=[1, 0, 1, 0], ceil_mode=1>",
    "AveragePool<kernel_shape=[2, 3], strides=[4, 2], ceil_mode=1>",
    'LpPool<kernel_shape=[2, 3], strides=[4, 2], auto_pad="VALID", ceil_mode=1>',
)


@pytest.mark.parametrize("op", ROUNDED_UP)
def test_a_pool_rounded_up_below_opset_22_has_the_windows_that_are_computed(op: str) -> None:
    for size in range(5, 11):
        model = text_model(f"(float[1, 2, {size}, {size + 1}] x) => (float[p] y) {{ y = {op}(x) }}", 21)
        written = ir.from_proto(model)
        infer_shapes(written, {})
        x = {"x": np.random.default_rng(size).standard_normal((1, 2, size, size + 1)).astype(np.float32) - 3}
        want, got = (outputs_of(session_of(one), x) for one in (model, ir.to_proto(written)))
        assert want is not None
        assert got is not None
        assert np.array_equal(want["y"], got["y"])
        assert written.graph.outputs[0].shape == want["y"].shape
