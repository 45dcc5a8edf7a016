"""Random models with random plans learn on their ranks what they learn whole: two steps, their losses and all tensors."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from random_training import Case, cases
from training_equivalence import same_training


def test_random_models_learn_as_the_whole_does() -> None:
    tally = {"run": 0, "refused": 0}

    @settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases())
    def one(case: Case) -> None:
        def source() -> Source:
            return Source(from_proto(case.model, Path("model.onnx")))

        with tempfile.TemporaryDirectory() as folder:
            try:
                same_training(source, case.plan, Path(folder), case.steps(), rtol=1e-4, atol=1e-3)
                tally["run"] += 1
            except CompileError:  # strategies that an op cannot have are refused, with their reason
                tally["refused"] += 1

    one()
    assert tally["run"] > 2, tally
