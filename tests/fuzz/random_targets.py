"""Random targets in random networks, stages and plans: with copies between a rank's devices ranks learn what one rank learns without.

    python tests/fuzz/random_targets.py --cases 300 --seed 1
    python tests/fuzz/random_targets.py --case 17 --seed 1       one, with its model and its plan

A case is one of `random_pipelines.py` (stages, tensor parallel, data parallel, ZeRO, schedules, recompute), often without microbatches,
whose nodes, blocks or all are on cpu or cuda by random patterns, and whose optimizer often has a target. All targets run on the CPU, with
their copies; losses and tensors are compared as there, and `partc check` must accept the artifact.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from pathlib import Path

import pool
from random_pipelines import SECONDS, Case, drawn, reason, worked
from staged_networks import Network

KINDS = ("cpu", "cuda")


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
        text = text.replace("optimizer: {", f"optimizer: {{target: {self.optimizer}, ") if self.optimizer else text
        return f"{self.targets}{text}"


def with_targets(chance: random.Random) -> TargetCase:
    """The case that chance says."""
    return targeted(chance, drawn(chance))


def targeted(chance: random.Random, case: Case) -> TargetCase:
    """A case with targets."""
    plain = chance.random() < 0.4 and not case.statistics and "stages" not in case.more and not case.accumulate
    optimizer = chance.choice(["", "", "cpu", "cuda"])
    said = {one.name: getattr(case, one.name) for one in fields(case)}
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


def work(chance: random.Random, folder: Path) -> str:
    """Runs a case in both ways; gives why it is refused, or ''."""
    return worked(with_targets(chance), folder)


if __name__ == "__main__":
    pool.main(work, (__doc__ or "").partition("\n")[0], seconds=SECONDS, reason=reason)
