"""CONTRIBUTING.md's diff of a new op is all that a new op needs: it is proven, printed, compiled and sharded."""

from __future__ import annotations

from pathlib import Path

from contributing import followed, output_of

FOLLOWED = r"""
import sys
sys.path += ["tests/support", "tests/ops"]
import numpy as np, onnx
from equivalence import same_as_whole
from gradient_case import cut_faults, faults
from gradient_cases_compute import CASES
from partc.cli.main import invoke
from rule_prover import unclaimed, violations
import partc.compiler.ops.families.arithmetic.linalg as family

assert family.__file__.startswith(sys.argv[1]), family.__file__
(proof,) = [one for one in CASES if one.case.op_type == "CDist"]
print(faults(proof, False), faults(proof, True), cut_faults(proof), violations(proof.case), sorted(unclaimed(proof.case)))
invoke(["ops", "CDist"])
model = onnx.parser.parse_model('''
    <ir_version: 8, opset_import: ["": 21, "com.microsoft": 1]>
    model (float[6, 4] a, float[9, 4] b) => (float[6, 9] y) {
        [dist] y = com.microsoft.CDist <metric = "sqeuclidean"> (a, b)
    }''')
feeds = {"a": np.arange(24, dtype=np.float32).reshape(6, 4), "b": np.ones((9, 4), np.float32)}
for strategy in ("[[2, 1], [3, 1]]", "[[1, 2], [1, 2]]"):
    plan = f"ranks: 6\nsharding: {{dist: {{in: {strategy}}}}}\n"
    program = same_as_whole(model, plan, feeds, rtol=1e-5, atol=1e-5)
    print(*(choice.cut for choice in program.choices.values()))
"""


def test_an_op_is_an_entry_and_a_case(tmp_path: Path) -> None:
    copy = followed(tmp_path, "Add an op")
    proven, _, row, *cut = output_of(copy, "-c", FOLLOWED, str(copy)).splitlines()
    assert proven == "[] [] [] [] []"
    assert row.split()[:4] == ["com.microsoft.CDist", "mk,nk->mn", "k", "yes"]
    assert cut == ["{'m': 2, 'n': 3}", "{'k': 2}"]
