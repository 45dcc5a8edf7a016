"""The node tests of the onnx package by name, and a session's options that print nothing."""

from __future__ import annotations

import warnings
from functools import cache

import onnxruntime
from fast_pool import all_windows_at_once
from onnx.backend.test.case.test_case import TestCase
from partc.compiler.frontend.onnx_file import NEWEST_OPSET, OLDEST_OPSET


@cache
def cases() -> dict[str, TestCase]:
    """ONNX's node tests whose opset onnxruntime loads and partc takes; of the expanded ones, of ops that have their own, each fourth."""
    from onnx.backend.test.loader import load_model_tests

    with all_windows_at_once(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = load_model_tests(kind="node")
    expanded = [case.name for case in found if "_expanded" in case.name]
    left_out = {name for k, name in enumerate(expanded) if k % 4}
    return {
        case.name: case
        for case in found
        if case.name not in left_out
        and all(OLDEST_OPSET <= e.version <= NEWEST_OPSET for e in case.model.opset_import if e.domain == "")
    }


def quiet() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return options
