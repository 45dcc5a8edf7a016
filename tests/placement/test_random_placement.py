"""Random graphs with random placements: whatever stands where, the ranks together give what the whole model gives."""

from __future__ import annotations

import numpy as np
import onnx
from equivalence import same_as_whole
from hypothesis import HealthCheck, given, settings
from random_placement_case import cases


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_random_graphs_with_random_placements(case: tuple[onnx.ModelProto, str]) -> None:
    model, plan = case
    random = np.random.default_rng(3)
    steps = [
        {"x": random.standard_normal((b, 3), dtype=np.float32), "z": random.standard_normal((b, 5), dtype=np.float32)}
        for b in (4, 1, 7)
    ]
    same_as_whole(model, plan, *steps, rtol=1e-6, atol=1e-6, checked=True)


def test_a_message_takes_no_name_that_another_copy_gets_later() -> None:
    """On rank 3 the whole of `z` arrives as a message for one reader, and as shards for another."""
    proto = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["" : 21]>
        m (float[B, 3, 12] z) => (float[B, 12] a, float[B, 3, 12] c) <float[1, 12] w = {1,2,3,4,5,6,7,8,9,10,11,12}, int64[1] one = {1}> {
            [n0] a = ReduceSum <keepdims = 0> (z, one)
            [n3] s = Shape (z)
            [n4] b = Expand (w, s)
            [n5] c = Mul (z, b)
        }
        """
    )
    plan = """
ranks: 4
symbols: {B: {divisor: 12}}
dataset: {z: [3, 1, 1]}
placement: {n0: [0, 1, 2], n4: [0, 2, 3], n5: 3}
"""
    z = np.random.default_rng(0).standard_normal((12, 3, 12)).astype(np.float32)
    same_as_whole(proto, plan, {"z": z}, rtol=1e-5, atol=1e-5)


def test_an_input_that_overlapping_groups_read_has_one_name() -> None:
    proto = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["" : 21]>
        m (float[B, 3] z) => (float[B, 3] y) {
            [n1] a = Tanh (z)
            [n4] b = Neg (z)
            [n5] y = Add (a, b)
        }
        """
    )
    plan = "ranks: 3\nplacement: {n1: [0, 2], n4: [1, 2], n5: 0}\n"
    z = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    same_as_whole(proto, plan, {"z": z}, rtol=1e-6, atol=1e-6)
