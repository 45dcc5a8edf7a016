"""Random models and plans in 16 bits: what is cut learns what one rank learns of it in the same precision.

    python tests/fuzz/random_precision.py 100 --seed 1

The cases are those of `random_training.py`, each in float16 or bfloat16, with a loss scale, and often with inputs whose squares overflow
float16; half of the models begin with a product and the normalization of a batch by its own statistics. The checker must accept every
artifact, all copies of a tensor must be the same bits, and losses must be those of one rank within a few units of the type's rounding;
larger differences are printed with the case, as a model may make much of a little. The first loss must be finite where that of one
rank is.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.runtime.checker.check import check_artifact
from random_training import Case, cases
from training_equivalence import run, train_whole

UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
MOST = 16
"""How many units losses may differ by."""


SIZES = (1, 300, 1, 1000, 40)
"""What the inputs of a case are multiplied by."""


def outcome(case: Case, kind: str, folder: Path, size: int = 1) -> str:
    """What became of a case: `equal`, the reason for which it was refused, or what is wrong."""
    steps = [{name: one * size if name in ("x", "z") else one for name, one in step.items()} for step in case.steps()]
    steps = [
        {name: one.astype(np.float32) if one.dtype.kind == "f" else one for name, one in step.items()} for step in steps
    ]

    def source() -> Source:
        return Source(from_proto(case.model, Path("model.onnx")))

    plan = f"{case.plan}\nprecision: {{compute: {kind}, loss_scale: 64}}\n"
    try:
        have = run(source(), plan, folder / "cut", steps)
    except CompileError as error:
        return f"refused: {error.problems[0].fact[:60]}"
    if found := check_artifact(folder / "cut"):
        return f"WRONG: {found[0]}"
    want = run(source(), train_whole(plan), folder / "one", steps)
    for k, (one, other) in enumerate(zip(have.outputs, want.outputs, strict=True)):
        a, b = np.asarray(one["loss" if "loss" in one else "y"]), np.asarray(other["loss" if "loss" in other else "y"])
        if k == 0 and np.isfinite(b).all() and not np.isfinite(a).all():
            return f"WRONG: {a} where one rank has {b}"
        same = np.isfinite(a) == np.isfinite(b)  # what overflows is infinite by one way, and no number by another
        counts = np.isfinite(a) & np.isfinite(b)
        bound = MOST * UNITS[kind]
        if not same.all() or not np.allclose(a[counts], b[counts], rtol=bound, atol=bound):
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
    @given(st.sampled_from([(), ("matmul", "batch_norm", "dropout")]).flatmap(cases))
    def each(case: Case) -> None:
        kind = ("float16", "bfloat16")[counted.total() % 2]
        size = SIZES[counted.total() % len(SIZES)]
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = outcome(case, kind, Path(folder), size)
            except Exception:
                found = f"WRONG: {traceback.format_exc(limit=-3)}"
        counted[found.partition(":")[0]] += 1
        if not found.startswith("equal"):
            print(f"case {counted.total()}, {kind}, inputs times {size}: {found}", flush=True)
        if found.startswith("WRONG"):
            print(case.plan)

    each()
    print(dict(counted))
    return 1 if counted["WRONG"] else 0


if __name__ == "__main__":
    os.environ.setdefault("PARTC_FILL_FREED", "1")
    sys.exit(main())
