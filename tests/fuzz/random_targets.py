"""Random targets in random networks, stages and plans: with copies between a rank's devices ranks learn what one rank learns without.

    python tests/fuzz/random_targets.py --cases 300 --seed 1
    python tests/fuzz/random_targets.py --case 17 --seed 1       one, with its model and its plan

A case is one of `random_pipelines.py` (stages, tensor parallel, data parallel, ZeRO, schedules, recompute), often without microbatches,
or one of `random_tables.py` (tables of rows, cut, placed, by parts). Its nodes, blocks or all are on cpu or cuda by random patterns, and
its optimizer often has a target. Some parameters may be updated late, and half of the cases evaluate the batches behind their steps. All
targets run on the CPU, with their copies; in half of the cases messages go from target to target without copies. Losses, evaluations and
tensors are compared with those of one rank, those of tables with the same ranks' without targets, and `partc check` must accept the
artifact. Memory that no value has is filled with what is no number.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from unittest import mock

import numpy as np
import pool
import random_tables
from partc.runtime.execution.linked_file import VARIABLE
from random_pipelines import SECONDS, Case, checked, drawn, reason, refused_or_wrong, same, worked
from staged_networks import Network
from training_equivalence import run

KINDS = ("cpu", "cuda")
Step = dict[str, np.ndarray]


@dataclass(frozen=True)
class TargetCase(Case):
    """A case whose plan names targets; the whole runs without."""

    targets: str = ""
    optimizer: str = ""
    plain: bool = False
    """Whether the batch is not divided."""

    def plan(self, rows: list[str] | None = None) -> str:  # type: ignore[override]
        """The plan's text."""
        text = super().plan(rows or ())
        if self.plain:
            text = text[: text.index("pipeline:")]
        text = text.replace("optimizer: {", f"optimizer: {{target: {self.optimizer}, ", 1) if self.optimizer else text
        return f"{self.targets}{text}"


def with_targets(chance: random.Random) -> TargetCase:
    """The case that chance says."""
    return targeted(chance, drawn(chance))


def targeted(chance: random.Random, case: Case) -> TargetCase:
    """A case with targets."""
    plain = chance.random() < 0.4 and not case.statistics and "stages" not in case.more and not case.accumulate
    optimizer = chance.choice(["", "", "cpu", "cuda"])
    said = {one.name: getattr(case, one.name) for one in fields(case)}
    late = _late(chance, [*case.net.weights]) if "parameters:" not in case.training else ""
    said |= {"training": case.training + late, "taken": 4 if late else 2, "evaluates": chance.random() < 0.5}
    if plain:
        said |= {"count": 1, "more": "", "rows": False}
    targets = _targets(chance, case.net)
    if not targets and not optimizer:
        targets = "target: cuda\n"
    return TargetCase(**said, targets=targets, optimizer=optimizer, plain=plain)


def _targets(chance: random.Random, net: Network) -> str:
    """The section of the plan: all, blocks, single nodes, or several of these."""
    rules: dict[str, str] = {}
    if chance.random() < 0.4:
        rules["'**'"] = chance.choice(KINDS)
    blocks = [f"b{k}" for k in range(len(net.blocks))]
    if chance.random() < 0.5:
        rules |= {f"'{one}'": chance.choice(KINDS) for one in chance.sample(blocks, chance.randint(1, len(blocks)))}
    if chance.random() < 0.6:
        nodes = [f"b{k}.{name}" for k, block in enumerate(net.blocks) for name in block]
        rules |= {one: chance.choice(KINDS) for one in chance.sample(nodes, chance.randint(1, len(nodes)))}
    if chance.random() < 0.1:
        rules["'loss.**'"] = chance.choice(KINDS)
    return f"target: {{{', '.join(f'{pattern}: {kind}' for pattern, kind in rules.items())}}}\n" if rules else ""


def _late(chance: random.Random, weights: Sequence[str]) -> str:
    """A line of the training: parameters whose updates are late; often none."""
    if chance.random() < 0.65:
        return ""
    some = chance.sample(weights, min(len(weights), chance.randint(1, 3)))
    return f"  parameters: {{{', '.join(f'{name}: {{staleness: {chance.randint(1, 3)}}}' for name in some)}}}\n"


def table_work(chance: random.Random, folder: Path) -> str:
    """Runs a case with tables with targets and without; gives why it is refused, or ''."""
    case = random_tables.drawn(chance)
    optimizer = chance.choice(["type: sgd, lr: 0.3", "type: momentum, lr: 0.1", *random_tables.LAWS])
    plan = case.plan.replace("OPTIMIZER", optimizer)
    names = [*re.findall(r"\[(\w+)\]", case.text[case.text.index("{") :]), "loss.**"]
    rules = {"'**'": chance.choice(KINDS)} if chance.random() < 0.6 else {}
    rules |= {f"'{name}'": chance.choice(KINDS) for name in chance.sample(names, chance.randint(1, len(names)))}
    own = chance.choice(["", "", "target: cpu, ", "target: cuda, "])
    late = _late(chance, [*case.weights]).strip()
    plan = plan.replace("train: {", f"train: {{{late}, ") if late else plan
    targets = f"target: {{{', '.join(f'{pattern}: {kind}' for pattern, kind in rules.items())}}}\n"
    text = targets + plan.replace("optimizer: {", f"optimizer: {{{own}")
    steps, evaluates = case.steps(), chance.random() < 0.5
    return refused_or_wrong(
        lambda: _same_with_targets(case, text, plan, folder, steps, evaluates), f"{case.text}\n{text}"
    )


def _same_with_targets(
    case: random_tables.Case, text: str, plan: str, folder: Path, steps: list[Step], evaluates: bool
) -> None:
    have = run(case.source(), text, folder / "targets", steps, evaluates=evaluates)
    checked(folder / "targets")
    want = run(case.source(), plan, folder / "without", steps, evaluates=evaluates)
    same(have, want, max(case.tolerance, 1e-4))


def work(chance: random.Random, folder: Path) -> str:
    """Runs a case in both ways; gives why it is refused, or ''."""
    if chance.random() < 0.2:
        return table_work(chance, folder)
    case = with_targets(chance)
    with mock.patch.dict(os.environ, {VARIABLE: chance.choice("01")}):
        return worked(case, folder)


if __name__ == "__main__":
    pool.main(work, (__doc__ or "").partition("\n")[0], seconds=SECONDS, reason=reason)
