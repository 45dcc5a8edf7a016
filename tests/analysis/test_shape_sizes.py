"""Shapes of dynamic forms of ops: one compile, many sizes, 0 and 1 among them; what is promised is what onnxruntime yields."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
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
