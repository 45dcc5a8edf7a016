"""Every gradient rule is proven: one random direction against central differences, and under every legal cut."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import onnx_ir as ir
import partc.compiler.ops  # noqa: F401
import pytest
from gradient_case import Proof, cut_faults, evaluate, faults, placements
from partc.compiler.ops.gradient import NoGradient, differentiate_nodes
from partc.compiler.ops.table import entries

HERE = Path(__file__).parent
MODULES = [importlib.import_module(path.stem) for path in sorted(HERE.glob("gradient_cases_*.py"))]
PROOFS: list[Proof] = [one for module in MODULES for one in module.CASES]


def said(one: tuple[Proof, bool]) -> str:
    return f"{one[0]}{' dynamic' if one[1] else ''}"


@pytest.mark.parametrize("one", list(placements(PROOFS)), ids=said)
def test_a_gradient_is_the_slope(one: tuple[Proof, bool]) -> None:
    assert faults(*one) == []


@pytest.mark.parametrize("one", [one for one in placements(PROOFS) if one[0].cuts], ids=said)
def test_a_gradient_on_pieces_is_the_dual(one: tuple[Proof, bool]) -> None:
    assert cut_faults(*one) == []


def test_every_differentiable_op_has_a_case() -> None:
    proven = {(one.case.domain, one.case.op_type) for one in PROOFS}
    assert {entry.name for entry in entries() if entry.differentiable} == {
        entry.name for entry in entries() if entry.differentiable and (entry.domain, entry.op_type) in proven
    }
