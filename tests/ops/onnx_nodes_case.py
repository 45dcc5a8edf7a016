"""The node tests of the onnx package by name, and a session's options that print nothing."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from functools import cache
from unittest import mock

import onnxruntime
from fast_pool import all_windows_at_once
from onnx.backend.test.case.test_case import TestCase
from partc.compiler.ir.graph import NEWEST_OPSET, OLDEST_OPSET


@cache
def cases() -> dict[str, TestCase]:
    """ONNX's node tests whose opset onnxruntime loads and partc takes; of the expanded ones, of ops that have their own, each eighth.

    Their sources, which ONNX's documentation shows, are not read.
    """
    from onnx.backend.test.case import base
    from onnx.backend.test.loader import load_model_tests

    with (
        all_windows_at_once(),
        warnings.catch_warnings(),
        mock.patch.object(base, "process_snippet", return_value=("", "")),
    ):
        warnings.simplefilter("ignore")
        found = load_model_tests(kind="node")
    expanded = [case.name for case in found if "_expanded" in case.name]
    left_out = {name for k, name in enumerate(expanded) if k % 8}
    return {
        case.name: case
        for case in found
        if case.name not in left_out
        and all(OLDEST_OPSET <= e.version <= NEWEST_OPSET for e in case.model.opset_import if e.domain == "")
    }


def distinct() -> list[str]:
    """Names of cases no two of which have the same nodes, but for the values of attributes, over operands of the same types and ranks.

    Values of attributes decide shapes, which `test_shape_promises.py` holds for all cases, and what a kernel computes.
    """
    found: dict[tuple[Hashable, ...], str] = {}
    for name, case in sorted(cases().items()):
        graph = case.model.graph
        nodes = [
            (
                one.domain,
                one.op_type,
                *sorted(attr.name for attr in one.attribute),
                *map(bool, one.input),
                len(one.output),
            )
            for one in graph.node
        ]
        types = [port.type.tensor_type for port in (*graph.input, *graph.output)]
        kinds = [str(port.type) for port in (*graph.input, *graph.output) if not port.type.HasField("tensor_type")]
        ranks = [(one.elem_type, len(one.shape.dim), any(dim.dim_value == 0 for dim in one.shape.dim)) for one in types]
        opsets = [(one.domain, one.version) for one in case.model.opset_import]
        found.setdefault((*nodes, *ranks, *kinds, *opsets), name)
    return [*found.values()]


def quiet() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return options
