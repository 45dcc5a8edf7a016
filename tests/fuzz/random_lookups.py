"""Random look-ups on random ranks, pulled and served, trained and not, against one rank.

    python tests/fuzz/random_lookups.py --cases 200 --seed 1
    python tests/fuzz/random_lookups.py --case 17              one of them again, with its plan

A table has rows of any shape, ids any number of dims; owners are all ranks, those along an axis of a mesh, or servers. Batches are
whole, or microbatches in stages or not, of which some are computed again; updates may be late.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from random import Random

import numpy as np

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from equivalence import same
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from partc.runtime.checker.check import check_artifact
from training_equivalence import from_text, run, same_training, train_whole

ROWS = 120
OPTIMIZERS = (
    "{type: sgd, lr: 0.3}",
    "{type: momentum, lr: 0.1, momentum: 0.9}",
    "{type: adam, lr: 0.01, eps: 1.0e-3}",
    "{type: lazy_adam, lr: 0.01, eps: 1.0e-3}",
    "{type: adagrad, lr: 0.1}",
)


class Case:
    """A model, a plan and batches."""

    def __init__(self, number: int) -> None:
        random = self.random = Random(number)
        self.row = tuple(random.choice((1, 2, 3)) for _ in range(random.choice((0, 1, 1, 2))))
        self.ids = tuple(random.choice((1, 2, 3)) for _ in range(random.choice((0, 1, 2))))
        self.twice = random.random() < 0.4
        self.kind = random.choice(("int64", "int64", "int32"))
        self.trains = random.random() < 0.7
        self.ranks, where = self._placed()
        more = random.choice(("", "", ", clip: {norm: 0.1}", ", accumulate: 2", ", on_nonfinite: skip"))
        optimizer = random.choice(OPTIMIZERS)
        if random.random() < 0.2 and "lazy" not in optimizer and "nonfinite" not in more:
            more += ", parameters: {table: {staleness: 1}}"
        train = f"train: {{loss: {{type: mean_squared, prediction: y, target: t}}, optimizer: {optimizer}{more}}}\n"
        symbols = "symbols: {batch: {divisor: 48, max: 96}}\n"
        where += self._piped(where) if self.trains and "accumulate" not in train else ""
        self.plan = f"ranks: {self.ranks}\n{where}{symbols}" + (train if self.trains else "")

    def _piped(self, where: str) -> str:
        """Microbatches, in stages or not, and what is computed again."""
        random = self.random
        if random.random() < 0.5:
            return ""
        again = random.choice(("", "", ", recompute: [look]", ", recompute: ['**']"))
        said = f"pipeline: {{microbatches: {random.choice((1, 2, 4))}{again}}}\n"
        if "pull" in where and "mesh" not in where and self.ranks > 1 and random.random() < 0.5:
            everyone = [*range(self.ranks)]
            said += f"placement: {{look: {everyone}, {f'again: {everyone}, ' if self.twice else ''}end: {random.choice(everyone)}}}\n"
        return said

    def _placed(self) -> tuple[int, str]:
        random = self.random
        data = random.choice(("dataset: data_parallel\n", "dataset: data_parallel\n", ""))
        looks = ["look", "again"][: 1 + self.twice]
        match random.choice(("pull", "grid", "named", "served")):
            case "pull":
                return random.choice(
                    (1, 2, 3, 4, 6)
                ), f"{data}sharding: {{{', '.join(f'{one}: pull' for one in looks)}}}\n"
            case "grid":
                a, b = random.choice(((2, 2), (2, 3), (3, 2)))
                return (
                    a * b,
                    f"mesh: {{dp: {a}, tp: {b}}}\n{data}sharding: {{{', '.join(f'{one}: pull' for one in looks)}}}\n",
                )
            case "named":
                rows = ", ".join(["dp", *["null"] * len(self.row)])
                ids = ", ".join(["dp", *["null"] * len(self.ids)])
                one = f"{{in: [[{rows}], [{ids}]]}}"
                said = ", ".join(f"{name}: {one}" for name in looks)
                return 4, f"mesh: {{dp: 2, tp: 2}}\n{data}sharding: {{{said}}}\n"
            case _:
                ranks = random.choice((2, 3, 4, 5))
                servers = random.sample(range(ranks), random.choice((1, 1, min(2, ranks - 1))))
                said = ", ".join(f"{one}: {{role: ps}}" for one in looks)
                return ranks, f"roles: {{ps: {servers}}}\nplacement: {{{said}}}\n{data}"

    def source(self) -> Source:
        """The model: one look-up or two of one table, each element weighted, summed up to numbers a record."""
        ids = ", ".join(["batch", *map(str, self.ids)])
        again = (
            "[again] more = Gather(table, ids) less = Mul(more, half) both = Sub(rows, less) twice = Mul(both, both)"
        )
        text = f"""<ir_version: 10, opset_import: ["" : 21]>
        main ({self.kind}[{ids}] ids) => (float[batch, n] y) <float half = {{0.5}}> {{
            [look] rows = Gather(table, ids)
            {again if self.twice else "twice = Mul(rows, rows)"}
            shape = Constant <value_ints = [0, {int(np.prod((*self.ids, *self.row)))}]> ()
            [end] y = Reshape(twice, shape)
        }}"""
        width = int(np.prod((*self.ids, *self.row)))
        return from_text(text.replace("[batch, n]", f"[batch, {width}]"), {"table": (ROWS, *self.row)})

    def batches(self) -> list[dict[str, np.ndarray]]:
        """Batches of two sizes; ids are few, many, or all one owner's."""
        rng = np.random.default_rng(self.random.randrange(1 << 30))
        found = []
        for k in range(3):
            batch = 48 * (1 + k % 2)
            low, high = self.random.choice(((-4, 4), (-ROWS, ROWS), (0, 5), (7, 8)))
            ids = rng.integers(low, high, (batch, *self.ids)).astype(self.kind)
            one = {"ids": ids}
            if self.trains:
                one["t"] = rng.standard_normal((batch, int(np.prod((*self.ids, *self.row))))).astype(np.float32)
            found.append(one)
        return found

    def check(self, folder: Path) -> None:
        """Raises where the ranks have not what one rank has."""
        steps = self.batches()
        if self.trains:
            whole = run(self.source(), train_whole(self.plan), folder / "one", steps)
            same_training(self.source, self.plan, folder, steps, rtol=1e-5, atol=1e-5, whole=whole)
            return
        compile_source(self.source(), parse_plan(self.plan, "plan.yaml"), folder / "cut")
        compile_source(self.source(), parse_plan("ranks: 1", "plan.yaml"), folder / "one")
        assert check_artifact(folder / "cut") == []
        with load_local(folder / "cut") as cut, load_local(folder / "one") as one:
            for step in steps:
                same(cut(step)["y"], one(step)["y"], "y", 0, 0)


def main() -> int:
    """The exit code: 1 where a case is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int)
    options = parser.parse_args()
    numbers = (
        [options.case]
        if options.case is not None
        else range(options.seed * 10000, options.seed * 10000 + options.cases)
    )
    wrong = 0
    for number in numbers:
        case = Case(number)
        if options.case is not None:
            print(case.plan, case.ids, case.row, case.twice)
        with tempfile.TemporaryDirectory() as name:
            try:
                case.check(Path(name))
            except Exception as error:
                wrong += 1
                print(f"case {number}: {type(error).__name__}: {str(error)[:400]}\n{case.plan}", flush=True)
                if options.case is not None:
                    raise
    print(f"{len(numbers)} cases, {wrong} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    os.environ.setdefault("PARTC_FILL_FREED", "1")
    sys.exit(main())
