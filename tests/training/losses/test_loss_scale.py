"""The loss scale: its course is that of a reference in numpy, and a step whose gradients overflow anywhere changes nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nonfinite_case import LOSS, batch, fed, kept, source
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import Trainer
from partc.runtime.checker.check import check
from trainer_case import on_all
from training_equivalence import from_text

SCALES = ("loss_scale", "loss_scale.steps")
LINEAR = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 6] x) => (float[batch, 4] y)
<float[6, 4] w> { [one] y = MatMul (x, w) }"""
PLANS = {
    "shared": (
        "ranks: 2\nmesh: {dp: 2}\ndataset: data_parallel\nsymbols: {batch: {divisor: 8}}\n",
        "optimizer: {type: adam, lr: 0.1, shard: dp}\n  clip: {norm: 1}",
    ),
    "cut": (
        "ranks: 2\nmesh: {tp: 2}\nsharding: {down: {parameters: {v: [tp, null]}}}\n",
        "optimizer: {type: lamb, lr: 0.1}\n  clip: {value: 0.5}",
    ),
    "in parts": (
        "ranks: 2\ndataset: data_parallel\nsymbols: {batch: {divisor: 8}}\n",
        "optimizer: {type: momentum, lr: 0.1, momentum: 0.9}\n  accumulate: 2",
    ),
    "piped": (
        "ranks: 2\nplacement: {up: 0, bn: 0, down: 1}\nsymbols: {batch: {divisor: 4}}\n"
        "pipeline: {microbatches: 4, statistics: microbatch}\n",
        "optimizer: {type: adam, lr: 0.1}\n  schedule: {type: step, every: 1, factor: 0.5}",
    ),
}


def scales(trainer: Trainer) -> tuple[float, int]:
    found = {record.tensor: array.item() for record, array in trainer.program.state.arrays() if not record.shape}
    return found[SCALES[0]], found[SCALES[1]]


def built(folder: Path, name: str, scale: str = "{first: 1024, interval: 2}") -> Path:
    plan, more = PLANS[name]
    text = f"{plan}precision: {{compute: float16, loss_scale: {scale}}}\n{LOSS}  {more}\n"
    compile_source(source(), parse_plan(text, "plan.yaml"), folder, check=False)
    assert check(folder).violations == []
    return folder


@pytest.mark.parametrize("name", PLANS)
def test_a_step_with_an_overflow_changes_the_scale_alone(name: str, tmp_path: Path) -> None:
    def act(trainer: Trainer) -> list[tuple[bool, bool, tuple[float, int]]]:
        found = []
        for bad in (None, np.inf, None, None, np.inf, np.inf, None):
            before, skipped = kept(trainer), trainer.skipped
            trainer.train(fed(trainer, batch(len(found), bad)))
            after = kept(trainer)
            same = all(after[tensor] == value for tensor, value in before.items() if tensor not in SCALES)
            found.append((trainer.skipped > skipped, same, scales(trainer)))
        assert trainer.last_rate == pytest.approx(0.1 * 0.5**3 if name == "piped" else 0.1), (
            "of the fourth step that counts"
        )
        return found

    first, *others = on_all(built(tmp_path / "build", name), 2, act)
    assert all(other == first for other in others)
    course = [(1024.0, 1), (512.0, 0), (512.0, 1), (1024.0, 0), (512.0, 0), (256.0, 0), (256.0, 1)]
    assert first == [(k in (1, 4, 5), k in (1, 4, 5), one) for k, one in enumerate(course)]


def reference(steps: list[dict[str, np.ndarray]], w: np.ndarray) -> tuple[list[tuple[float, int]], np.ndarray]:
    """The course of the scale, and the weight after the last step of SGD."""
    half, scale, count, found = np.float16, 2.0**22, 0, []
    for step in steps:
        x = step["x"].astype(half).astype(np.float32)
        y = (x @ w.astype(half).astype(np.float32)).astype(half).astype(np.float32)
        dy = (np.float32(scale) * 2 / y.size * (y - step["t"])).astype(half).astype(np.float32)
        dw = (x.T @ dy).astype(half).astype(np.float32)
        if np.isfinite(dw).all():
            w, count = w - np.float32(0.1) * dw / np.float32(scale), count + 1
            scale, count = (scale * 2, 0) if count == 3 else (scale, count)
        else:
            scale, count = scale * 0.5, 0
        found.append((scale, count))
    return found, w


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
def test_its_course_is_that_of_numpy(tmp_path: Path) -> None:
    steps = [batch(k) for k in range(20)]
    plan = "ranks: 1\nprecision: {compute: float16, loss_scale: {first: 4194304, interval: 3}}\n"
    plan += f"{LOSS}  optimizer: {{type: sgd, lr: 0.1}}\n"
    start = from_text(LINEAR, {"w": (6, 4)})
    w = start.model.graph.initializers["w"].const_value.numpy()
    compile_source(start, parse_plan(plan, "plan.yaml"), tmp_path / "build")

    def act(trainer: Trainer) -> tuple[list[tuple[float, int]], np.ndarray]:
        found = [(trainer.train(step), scales(trainer))[1] for step in steps]
        return found, next(a.copy() for record, a in trainer.program.state.arrays() if record.tensor == "w")

    ((course, after),) = on_all(tmp_path / "build", 1, act)
    want, known = reference(steps, w)
    assert course == want
    assert len({scale for scale, _ in course}) > 3
    np.testing.assert_allclose(after, known, rtol=0, atol=1e-6)


def test_a_run_goes_on_bit_by_bit_and_with_checkpoints_in_float32(tmp_path: Path) -> None:
    folder = built(tmp_path / "half", "shared")
    plan, more = PLANS["shared"]
    compile_source(source(), parse_plan(f"{plan}{LOSS}  {more}\n", "plan.yaml"), tmp_path / "single")
    runs: dict[str, Callable[[Trainer], Any]] = {
        "save": lambda trainer: (train(trainer, 0, 3), trainer.save(tmp_path / "runs"), train(trainer, 3, 5))[2],
        "load": lambda trainer: (trainer.load(tmp_path / "runs"), trainer.skipped, train(trainer, 3, 5))[1:],
        "single": lambda trainer: (
            trainer.load(tmp_path / "runs"),
            train(trainer, 3, 4),
            trainer.save(tmp_path / "more"),
        )[1],
        "back": lambda trainer: (trainer.load(tmp_path / "more"), scales(trainer), train(trainer, 4, 5))[1],
    }

    def train(trainer: Trainer, begin: int, end: int) -> dict[str, bytes]:
        for k in range(begin, end):
            trainer.train(fed(trainer, batch(k, np.inf if k == 1 else None)))
        return kept(trainer)

    want = on_all(folder, 2, runs["save"])
    assert on_all(folder, 2, runs["load"]) == [(1, one) for one in want]
    single = on_all(tmp_path / "single", 2, runs["single"])
    assert all(not {*SCALES} & one.keys() for one in single)
    assert on_all(folder, 2, runs["back"]) == [(1024.0, 0)] * 2


def test_a_dynamic_scale_skips_steps() -> None:
    plan = (
        f"ranks: 1\nprecision: {{compute: float16}}\n{LOSS}  optimizer: {{type: sgd, lr: 0.1}}\n  on_nonfinite: stop\n"
    )
    with pytest.raises(CompileError, match="'on_nonfinite' is stop, and the loss scale is dynamic"):
        parse_plan(plan, "plan.yaml")
