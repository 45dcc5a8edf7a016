"""Random graphs with random strategies, groups and datasets: the ranks together give what the whole model gives."""

from __future__ import annotations

import numpy as np
import onnx
from equivalence import same_as_whole
from hypothesis import HealthCheck, given, settings
from partc.compiler.errors import CompileError
from random_sharding_case import WIDTH, cases


def test_random_graphs_with_random_strategies() -> None:
    tally = {"run": 0, "refused": 0}

    @settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases())
    def one(case: tuple[onnx.ModelProto, str]) -> None:
        model, plan = case
        random = np.random.default_rng(3)
        steps = [
            {
                "x": random.standard_normal((b, WIDTH), dtype=np.float32),
                "z": random.standard_normal((b, 6, WIDTH), dtype=np.float32),
            }
            for b in (12, 24)
        ]
        try:
            same_as_whole(model, plan, *steps, rtol=0, atol=2e-5, checked=True)
            tally["run"] += 1
        except CompileError:  # strategies that an op cannot have are refused, with their reason
            tally["refused"] += 1

    one()
    assert tally["run"] > 3, tally
