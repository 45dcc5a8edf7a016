"""Random models and plans in 16 bits: what is cut learns what one rank learns of it in the same precision.

    python tests/fuzz/random_precision.py 100 --seed 1

The cases are those of `random_training.py`, each in float16 or bfloat16, with a loss scale. The checker must accept every artifact, all
copies of a tensor must be the same bits, and losses must be those of one rank within a few units of the type's rounding; larger
differences are printed with the case, as a model may make much of a little.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.runtime.checker.check import check_artifact
from random_training import Case, cases
from training_equivalence import run, train_whole

UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
MOST = 16
"""How many units losses may differ by."""


def outcome(case: Case, kind: str, folder: Path) -> str:
    """What became of a case: `equal`, the reason for which it was refused, or what is wrong."""

    def source() -> Source:
        return Source(from_proto(case.model, Path("model.onnx")))

    plan = f"{case.plan}\nprecision: {{compute: {kind}, loss_scale: 64}}\n"
    try:
        have = run(source(), plan, folder / "cut", case.steps())
    except CompileError as error:
        return f"refused: {error.problems[0].fact[:60]}"
    if found := check_artifact(folder / "cut"):
        return f"WRONG: {found[0]}"
    want = run(source(), train_whole(plan), folder / "one", case.steps())
    for one, other in zip(have.outputs, want.outputs, strict=True):
        a, b = np.asarray(one["loss" if "loss" in one else "y"]), np.asarray(other["loss" if "loss" in other else "y"])
        if not np.allclose(a, b, rtol=MOST * UNITS[kind], atol=MOST * UNITS[kind], equal_nan=True):
            return f"differs: {a} and {b}"
    return "equal"


def main() -> int:
    """Runs so many cases; 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=int)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counted: Counter[str] = Counter()

    @seed(options.seed)
    @settings(
        max_examples=options.cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def each(case: Case) -> None:
        kind = ("float16", "bfloat16")[counted.total() % 2]
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = outcome(case, kind, Path(folder))
            except Exception:
                found = f"WRONG: {traceback.format_exc(limit=-3)}"
        counted[found.partition(":")[0]] += 1
        if not found.startswith("equal"):
            print(f"case {counted.total()}, {kind}: {found}", flush=True)
        if found.startswith("WRONG"):
            print(case.plan)

    each()
    print(dict(counted))
    return 1 if counted["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
