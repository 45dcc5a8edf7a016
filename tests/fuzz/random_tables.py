"""Random models with tables that are looked up, and random plans: what rows teach is what dense gradients teach on one rank.

    python tests/fuzz/random_tables.py 100 --seed 1 [--laws]

One to three tables, each looked up once to three times by ids of one to three dims, which count from both ends, stand several times, and
may be the same for two tables; some tables are tied to a head. Plans cut the batch, columns and rows of tables, place look-ups on ranks,
run microbatches in stages or one after the other, clip, skip, share the optimizer's work, scale the loss, and compute or send in 16 bits.
The plain SGD of the plan is held against momentum 0, which has dense gradients, on one rank, or in 16 bits by the same plan; the checker
must accept every artifact, and all copies of a tensor must be the same bits. With --laws other optimizers, most of them of rows, are held
against themselves on one rank.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

import numpy as np
from partc.compiler.errors import CompileError
from partc.compiler.frontend.source import Source
from partc.runtime.checker.check import check_artifact
from training_equivalence import from_text, run, same_tensors

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
LAWS = (
    "type: lazy_adam, lr: 0.05, eps: 0.01",
    "type: row_adagrad, lr: 0.1, eps: 0.01",
    "type: lazy_ftrl, lr: 0.1, l1: 0.0001",
    "type: lazy_momentum, lr: 0.2, weight_decay: 0.1",
    "type: adagrad, lr: 0.1, eps: 0.01",
    "type: adafactor, lr: 0.05, d: 2.0",
    "type: lars, lr: 1.0, trust_coefficient: 0.05",
)
LOW = 2.0**-6
"""What 16 bits may do to the change of a tensor, of its size."""


@dataclass(frozen=True)
class Case:
    """A model of ONNX text, the shapes of its weights, its inputs of ids with their tables' rows, and the plan with `OPTIMIZER`."""

    text: str
    weights: dict[str, tuple[int, ...]]
    ids: dict[str, tuple[tuple[int, ...], int, str]]
    plan: str
    batches: tuple[int, ...]
    tolerance: float

    def source(self) -> Source:
        """The model anew."""
        return from_text(self.text, self.weights)

    def steps(self) -> list[dict[str, np.ndarray]]:
        """What every step is given."""
        rng = np.random.default_rng(5)
        found = []
        for batch in self.batches:
            step = {}
            for name, (dims, rows, kind) in self.ids.items():
                few = rng.integers(1, rows + 1)
                step[name] = (rng.integers(-rows, rows, (batch, *dims)) % few - rng.choice([0, few])).astype(kind)
                step[name] = np.clip(step[name], -rows, rows - 1)
            found.append({**step, "t": rng.standard_normal((batch, 5)).astype(np.float32)})
        return found


def drawn(choose: random.Random) -> Case:
    """A case."""
    ranks = choose.choice([1, 1, 2, 2, 3, 4])
    lines, parts, weights, ids, looks = [], [], {}, {}, []
    for at in range(choose.randint(1, 3)):
        rows, width = 12 * choose.choice([5, 20, 60, 90, 150]), choose.choice([4, 12, 12])
        weights[f"table{at}"] = (rows, width)
        table = f"table{at}"
        if choose.random() < 0.15:
            lines.append(f"[same{at}] same{at} = Identity({table})")
            table = f"same{at}"
        for k in range(choose.randint(1, 3)):
            known = [name for name, (_, size, _) in ids.items() if size <= rows]
            name = choose.choice(known) if known and choose.random() < 0.3 else f"ids{at}_{k}"
            if name not in ids:
                dims = tuple(choose.choice([2, 3, 4]) for _ in range(choose.choice([0, 1, 1, 2])))
                ids[name] = dims, rows, choose.choice(["int64", "int64", "int32"])
            dims = ids[name][0]
            look, total = f"look{at}_{k}", int(np.prod(dims)) * width
            lines.append(f"[{look}] e{at}_{k} = Gather({table}, {name})")
            lines.append(f"shape{at}_{k} = Constant <value_ints = [0, {total}]> ()")
            lines.append(
                f"[flat{at}_{k}] f{at}_{k} = Reshape(e{at}_{k}, shape{at}_{k})"
                if dims
                else f"[flat{at}_{k}] f{at}_{k} = Tanh(e{at}_{k})"
            )
            parts.append((f"f{at}_{k}", total))
            looks.append((look, dims))
    lines.append(f"[join] joined = Concat <axis = 1> ({', '.join(name for name, _ in parts)})")
    weights["head"] = (sum(size for _, size in parts), 5)
    lines.append("[head] low = MatMul(joined, head)")
    if choose.random() < 0.2:
        lines.append("[sum] norm = ReduceMean <keepdims = 0> (table0)")
        lines.append("[tied] y = Add(low, norm)")
    else:
        lines.append("[tied] y = Tanh(low)")
    kinds = {"int64": "int64", "int32": "int32"}
    given = ", ".join(
        f"{kinds[kind]}[{', '.join(map(str, ('batch', *dims)))}] {name}" for name, (dims, _, kind) in ids.items()
    )
    text = f"{HEAD}main ({given}) => (float[batch, 5] y) {{\n" + "\n".join(lines) + "\n}"
    plan, tolerance = _plan(choose, ranks, looks)
    sizes = tuple(12 * choose.randint(1, 2) for _ in range(3))
    return Case(text, weights, ids, plan, sizes, tolerance)


def _plan(choose: random.Random, ranks: int, looks: list[tuple[str, tuple[int, ...]]]) -> tuple[str, float]:
    lines = [f"ranks: {ranks}", "symbols: {batch: {divisor: 12, max: 24}}"]
    tolerance, parts = 1e-5, 1
    placed = ranks > 1 and choose.random() < 0.35
    if placed:
        groups = [choose.choice([[r] for r in range(ranks)] + [list(range(ranks))]) for _ in looks]
        rules = [f"{look}: {group}" for (look, _), group in zip(looks, groups, strict=True)]
        lines.append(
            f"placement: {{{', '.join([*rules, f'join: {ranks - 1}', f'head: {ranks - 1}', f'tied: {ranks - 1}'])}}}"
        )
    elif ranks > 1:
        if choose.random() < 0.6:
            lines.append("dataset: data_parallel")
        else:
            rules = []
            for look, dims in looks:
                cut = choose.choice(["columns", "columns", "rows", "batch", "none"])
                ones = [1] * len(dims)
                how = {
                    "columns": [[1, ranks], [1, *ones]],
                    "rows": [[ranks, 1], [1, *ones]],
                    "batch": [[1, 1], [ranks, *ones]],
                }
                rules += [f"{look}: {{in: {how[cut]}}}"] if cut in how else []
            lines += [f"sharding: {{{', '.join(rules)}}}"] if rules else []
    train = ["loss: {type: mean_squared, prediction: y, target: t}"]
    shard = ", shard: true" if ranks > 1 and choose.random() < 0.2 else ""
    train.append(f"optimizer: {{OPTIMIZER{shard}}}")
    clip = choose.choice(["", "", "", "clip: {norm: 0.05}", "clip: {value: 0.001}", "on_nonfinite: skip"])
    train += [clip] if clip else []
    if choose.random() < 0.3:
        parts = choose.choice([2, 3])
        if placed:
            lines.append(f"pipeline: {{microbatches: {parts}}}")
        else:
            train.append(f"accumulate: {parts}")
    if choose.random() < 0.2:
        kind = choose.choice(
            ["compute: bfloat16", "compute: bfloat16, messages: bfloat16", "compute: float16, loss_scale: 64"]
        )
        lines.append(f"precision: {{{kind}}}")
        tolerance = LOW
    lines.append(f"train: {{{', '.join(train)}}}")
    return "\n".join(lines) + "\n", tolerance


def outcome(case: Case, folder: Path) -> str:
    """What became of a case: how many tables have gradients by rows, the reason for which it was refused, or what is wrong."""
    steps = case.steps()
    try:
        have = run(case.source(), case.plan.replace("OPTIMIZER", "type: sgd, lr: 0.3"), folder / "rows", steps)
    except CompileError as error:
        return f"refused: {error.problems[0].fact[:70]}"
    if found := check_artifact(folder / "rows"):
        return f"WRONG: {found[0]}"
    dense = case.plan.replace("OPTIMIZER", "type: momentum, momentum: 0.0, lr: 0.3")
    if "precision" not in dense:  # rows may travel between ranks here, too
        sent = run(case.source(), dense, folder / "sent", steps)
        if found := check_artifact(folder / "sent"):
            return f"WRONG: {found[0]}"
    whole = "ranks: 1\n" + "\n".join(line for line in dense.splitlines() if line.startswith(("train", "symbols")))
    whole = dense if "precision" in dense else whole.replace(", shard: true", "")
    want = run(case.source(), whole, folder / "dense", steps)
    after = {name: one for name, one in want.after.items() if not name.endswith(".momentum")}
    for one, other in zip(
        have.outputs, want.outputs, strict=True
    ):  # 16 bits round otherwise where the batch is cut otherwise
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=max(case.tolerance, 1e-5), atol=1e-6)
    same_tensors(have.after, after, want.before, case.tolerance)
    if "precision" not in dense:
        kept = {name: sent.after[name] for name in after}  # a slot is the last gradient, in which terms cancel
        same_tensors(kept, after, want.before, case.tolerance)
    assert have.program.training is not None
    return f"equal, {sum('by rows' in line for line in have.program.training.notes.tables)} tables by rows"


def law(case: Case, folder: Path, optimizer: str) -> str:
    """What became of a case with an optimizer that on one rank, too, takes rows where it can."""
    plan, steps = case.plan.replace("OPTIMIZER", optimizer), case.steps()
    if "precision" in plan:
        return "left out: 16 bits"
    try:
        have = run(case.source(), plan, folder / "ranks", steps)
    except CompileError as error:
        return f"refused: {error.problems[0].fact[:70]}"
    if found := check_artifact(folder / "ranks"):
        return f"WRONG: {found[0]}"
    whole = "ranks: 1\n" + "\n".join(line for line in plan.splitlines() if line.startswith(("train", "symbols")))
    want = run(case.source(), whole.replace(", shard: true", ""), folder / "whole", steps)
    for one, other in zip(have.outputs, want.outputs, strict=True):
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-5, atol=1e-6)
    same_tensors(have.after, want.after, want.before, 1e-3)
    return f"equal, {optimizer.split(',')[0]}"


def main() -> int:
    """Runs so many cases; 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--laws", action="store_true", help="other optimizers than SGD")
    parser.add_argument("--first", type=int, default=0, help="begin with this case")
    options = parser.parse_args()
    counted: Counter[str] = Counter()
    wrong = 0
    for at in range(options.first, options.cases):
        case = drawn(random.Random(f"{options.seed} {at}"))
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = law(case, Path(folder), LAWS[at % len(LAWS)]) if options.laws else outcome(case, Path(folder))
            except Exception:
                found = f"WRONG: {traceback.format_exc(limit=-3)}"
        counted[found.splitlines()[0][:80]] += 1
        if found.startswith("WRONG"):
            wrong += 1
            print(f"case {at}: {found}\n{case.text}\n{case.plan}", flush=True)
    for text, count in counted.most_common():
        print(f"{count:5} {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("PARTC_FILL_FREED", "1")
    sys.exit(main())
