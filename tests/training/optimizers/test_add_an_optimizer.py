"""CONTRIBUTING.md's diff of a new optimizer is all that a new optimizer needs: its formula holds, plans and their schema know it."""

from __future__ import annotations

from pathlib import Path

from contributing import followed, output_of

FOLLOWED = r"""
import sys, tempfile
from pathlib import Path
sys.path += ["tests/support", "tests/training"]
from optimizer_case import CASES, assert_close, formula, trained
from partc.compiler.plan.schema import plan_schema
from plan_values import optimizer
from training_plans_case import CROSS_ENTROPY, batches, learns, sizes_of

for options in (options for type, options in CASES if type == "adadelta"):
    chosen = optimizer("adadelta", options)
    assert_close(trained(chosen, (4, 3), scale=0.5), formula(chosen, (4, 3), lambda g: 0.5 * g), 2e-6)
    print(chosen.hyper)
train = "train:\n  " + CROSS_ENTROPY + "\n  optimizer: {type: adadelta, lr: 0.5, eps: 0.01, weight_decay: 0.1}\n"
with tempfile.TemporaryDirectory() as folder:
    learns("mlp", "ranks: 2\n" + batches(2), sizes_of("mlp", 6, 4), Path(folder), train, atol=5e-4)
print(sorted(plan_schema()["$defs"]["TrainingAdadeltaOptions"]["properties"]))
"""


def test_an_optimizer_is_a_row_and_a_case(tmp_path: Path) -> None:
    copy = followed(tmp_path, "Add an optimizer")
    *chosen, schema = output_of(copy, "-c", FOLLOWED).splitlines()
    assert chosen == ["{'rho': 0.9, 'eps': 1e-06}", "{'rho': 0.8, 'eps': 0.001}"]
    assert schema == "['eps', 'lr', 'rho', 'shard', 'target', 'type', 'weight_decay']"
