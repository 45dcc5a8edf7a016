"""The theorem of training: after the same steps, a compiled model on all ranks has the losses and the tensors of the whole model on one.

The whole is compiled for one rank, whose programs have no communication; `test_training_torch.py` holds that against torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from partc.compiler.load.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.program import Program
from partc.runtime import load_local
from partc.runtime.cuts import merge
from partc.runtime.program import LocalProgram

Tensors = dict[str, np.ndarray]


def train_whole(plan: str) -> str:
    """The plan with the training of another one, on one rank."""
    return "ranks: 1\n" + plan[plan.index("train:") :]


def trained(
    source: Source, plan: str, out: Path, steps: Sequence[Mapping[str, Any]], start: Mapping[str, np.ndarray] | None = None
) -> tuple[list[dict[str, Any]], Tensors, Program]:
    """What every step gives, and all tensors after the last, whole, by their global names; `start` are weights to begin with."""
    program = compile_source(source, parse_plan(plan, "plan.yaml"), out).program
    with load_local(out) as ranks:
        if start is not None:
            put(ranks, start)
        given = [ranks({**fed(ranks, k), **step}) for k, step in enumerate(steps)]
        return given, tensors(ranks), program


def fed(ranks: LocalProgram, step: int) -> dict[str, np.ndarray]:
    """The numbers of a step that the loop gives."""
    from partc.runtime.training.schedule import scalars

    record = ranks.manifest.training
    assert record is not None
    hyper = {name: value for name, value in record.optimizer.items() if name != "type"}
    known = {port.name for port in ranks.inputs}
    found: dict[str, Any] = {n: np.array(v) for n, v in scalars(
        [name for name in record.scalars if name != "step"], step, hyper).items()}  # type: ignore[arg-type]
    found["step"] = np.array(step, np.int64)
    return {name: value for name, value in found.items() if name in known}


def tensors(ranks: LocalProgram) -> Tensors:
    """All tensors that ranks keep, whole; every copy of a piece must be the same bits."""
    pieces: dict[str, dict[tuple[tuple[int, ...], ...], np.ndarray]] = {}
    shapes: dict[str, list[int]] = {}
    for rank in ranks.ranks:
        for record, array in rank.state.arrays():
            box = record.box(rank.rank) or [[0, 1, 1] for _ in record.shape]
            key = tuple(tuple(cut) for cut in box)
            known = pieces.setdefault(record.tensor, {})
            shapes[record.tensor] = record.shape
            if key in known:
                assert known[key].tobytes() == array.tobytes(), f"{record.tensor}: replicas differ on rank {rank.rank}"
            known[key] = array.copy()
    found: Tensors = {}
    for name, boxes in pieces.items():
        whole = next((array for array in boxes.values() if list(array.shape) == shapes[name]), None)
        if whole is None:
            whole = merge([[list(cut) for cut in key] for key in boxes], list(boxes.values()))
        found[name] = whole
    return found


def put(ranks: LocalProgram, start: Mapping[str, np.ndarray]) -> None:
    """Gives every rank its pieces of some tensors."""
    from partc.runtime.cuts import local

    for rank in ranks.ranks:
        for record, array in rank.state.arrays():
            if record.tensor in start:
                box = record.box(rank.rank)
                whole = start[record.tensor]
                np.copyto(array, whole if box is None else whole[local(box, whole.shape)])


def same_training(
    source: Any, plan: str, folder: Path, steps: Sequence[Mapping[str, Any]], *, rtol: float, atol: float
) -> Program:
    """Trains whole and cut; losses and all tensors are compared. `source()` gives the model anew. Gives the compiled program."""
    want, whole, _ = trained(source(), train_whole(plan), folder / "whole", steps)
    have, cut, program = trained(source(), plan, folder / "cut", steps)
    for k, (one, other) in enumerate(zip(have, want, strict=True)):
        assert one.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_allclose(one[name], value, rtol=rtol, atol=atol, err_msg=f"step {k}: {name}")
    assert cut.keys() == whole.keys()
    for name, value in whole.items():
        scale = max(1e-3, float(np.abs(value).max(initial=0.0)))
        np.testing.assert_allclose(cut[name], value, rtol=rtol, atol=atol * scale, err_msg=name)
    return program
