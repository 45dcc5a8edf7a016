"""Every gradient rule is proven: one random direction against central differences, and under every legal cut."""

from __future__ import annotations

import importlib
from pathlib import Path

from gradient_case import Proof, cut_faults, faults, placements
from partc.compiler.ops.registry import entries
from rows import first_and_of_today, of_today, rows

HERE = Path(__file__).parents[1]
MODULES = [importlib.import_module(path.stem) for path in sorted(HERE.glob("gradient_cases_*.py"))]
PROOFS: list[Proof] = [one for module in MODULES for one in module.CASES]


def said(one: tuple[Proof, bool]) -> str:
    return f"{one[0]}{' dynamic' if one[1] else ''}"


def op_of(one: tuple[Proof, bool]) -> tuple[str, str]:
    return one[0].case.domain, one[0].case.op_type


@rows("one", first_and_of_today([*placements(PROOFS)], op_of), ids=said)
def test_a_gradient_is_the_slope(one: tuple[Proof, bool]) -> None:
    assert faults(*one) == []


FIRST = {(one.case.domain, one.case.op_type): one for one in reversed(PROOFS)}
SHARDS = [
    (one, dynamic)
    for one, dynamic in placements(PROOFS)
    if one.cuts and (not dynamic or one is FIRST[one.case.domain, one.case.op_type])
]


@rows("one", of_today(SHARDS, len(SHARDS) // 4), 16, said)
def test_a_gradient_on_shards_is_the_dual(one: tuple[Proof, bool]) -> None:
    assert cut_faults(*one) == []


def test_every_differentiable_op_has_a_case() -> None:
    unproven = {name for module in MODULES for name in getattr(module, "UNPROVEN", {})}
    without = {entry.name for entry in entries() if entry.differentiable and (entry.domain, entry.op_type) not in FIRST}
    assert without == unproven | {"If", "Loop", "Scan"}, "test_gradient_bodies.py proves those of bodies"
