"""ONNX's own node tests: whatever stock onnxruntime passes also passes with its nodes spread over two in-process ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from equivalence import same
from fast_pool import pool
from onnx.backend.test.case.test_case import TestCase
from onnx.reference.ops import op_pool_common
from onnx_nodes_case import cases, distinct, quiet
from partc.compiler.frontend.names import node_paths
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from rows import of_today, rows

# tests that stock onnxruntime passes and partc does not, each with its reason
CANNOT: dict[str, str] = {}
NAMES = distinct()


def stock_outputs(case: TestCase, inputs: dict[str, Any], expected: list[Any]) -> dict[str, Any] | None:
    """What stock onnxruntime gives, or None where it refuses the model or fails the test."""
    try:
        session = onnxruntime.InferenceSession(
            case.model.SerializeToString(), quiet(), providers=["CPUExecutionProvider"]
        )
        outputs = session.run(None, inputs)
        for have, want in zip(outputs, expected, strict=True):
            close(have, want, case)
    except Exception:
        return None
    return dict(zip((out.name for out in session.get_outputs()), outputs, strict=True))


def close(have: Any, want: Any, case: TestCase) -> None:
    if want is None or isinstance(want, list):
        same(have, want, case.name, case.rtol, case.atol)
    elif np.asarray(want).dtype.kind in "OUSb":
        np.testing.assert_array_equal(have, want)
    else:
        np.testing.assert_allclose(have, want, rtol=case.rtol, atol=case.atol)


def spread(model: onnx.ModelProto) -> tuple[Source, str]:
    """The model and a plan that deals its nodes to two ranks in turn, the first one away from where outputs are wanted."""
    source = Source(from_proto(model, Path("model.onnx")))
    rules = [f"  {quoted(path)}: {(k + 1) % 2}" for k, path in enumerate(node_paths(source.model).values())]
    return source, "\n".join(["ranks: 2", "placement:" if rules else "", *rules, ""])


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@rows("name", of_today(NAMES, len(NAMES) // 4), 16)
def test_node(name: str, tmp_path: Path) -> None:
    case = cases()[name]
    names = [
        value.name
        for value in case.model.graph.input
        if value.name not in {w.name for w in case.model.graph.initializer}
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for values, expected in case.data_sets:
            inputs = dict(zip(names, values, strict=False))
            want = stock_outputs(case, inputs, expected)
            if want is None:
                pytest.skip("stock onnxruntime does not pass it")
            if name in CANNOT:
                return
            source, plan = spread(case.model)
            compile_source(source, parse_plan(plan, "plan.yaml"), tmp_path / "build")
            with load_local(tmp_path / "build", threads=1) as ranks:
                have = ranks(inputs)
            assert set(have) == set(want)
            for output, value in want.items():
                half = np.asarray(value).dtype == np.float16 if not isinstance(value, list) else False
                same(have[output], value, output, rtol=2e-3 if half else 1e-5, atol=1e-3 if half else 1e-6)


@pytest.mark.parametrize("kind", ["AVG", "LPPOOL", "MAX"])
@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("strides", [None, [2, 3]])
@pytest.mark.parametrize("dilations", [None, [2, 1]])
def test_the_reference_of_pools(kind: str, count: int, strides: list[int] | None, dilations: list[int] | None) -> None:
    """All windows at once are the windows in turn: else a node test of a pool would be left out, as one that stock onnxruntime fails."""
    pads = [1, 0, 2, 1]
    padded = np.full((2, 3, 5 + 1 + 2, 7 + 0 + 1), np.nan, np.float32)
    padded[:, :, 1:6, :7] = np.random.default_rng(4).standard_normal((2, 3, 5, 7))
    given = (padded, [2, 3, 5, 7], [3, 2], strides, [7, 8], kind, pads, pads, dilations, count, 2)
    np.testing.assert_allclose(pool(*given), op_pool_common.pool(*given), rtol=1e-6, atol=1e-6)
