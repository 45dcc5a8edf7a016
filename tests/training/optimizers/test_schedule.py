"""Schedules: their tables, torch's where torch has the same, a user's function, and what is told of wrong ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partc.compiler.errors import CompileError
from partc.runtime.artifact.training.lr_schedule import Rate, rate_of
from partc.runtime.artifact.training.scalars import scalars
from partc.runtime.errors import UsageError
from partc.runtime.user_code import UserCodeError
from plan_values import schedule

Options = Mapping[str, object]
PYTHON = {"type": "python", "function": "lr.py:rate"}


def rated(options: Options | None, base: float, where: str = "schedule", folder: Path = Path()) -> Rate:
    return rate_of(None if options is None else schedule(options), base, where, folder)


TABLES: list[tuple[Options | None, list[float]]] = [
    (None, [8, 8, 8, 8, 8, 8]),
    ({"type": "constant"}, [8, 8, 8, 8, 8, 8]),
    ({"type": "constant", "warmup": 4}, [2, 4, 6, 8, 8, 8]),
    ({"type": "step", "every": 2, "factor": 0.5}, [8, 8, 4, 4, 2, 2]),
    ({"type": "step", "every": 2, "factor": 0.5, "warmup": 2}, [4, 8, 4, 4, 2, 2]),
    ({"type": "step", "every": 2, "factor": 0.5, "warmup": 2, "after_warmup": True}, [4, 8, 8, 8, 4, 4]),
    (
        {"type": "step", "every": 2, "factor": 0.5, "warmup": 2, "after_warmup": True, "from_zero": True},
        [0, 4, 8, 8, 4, 4],
    ),
    ({"type": "multistep", "at": [1, 4], "factor": 0.25, "warmup": 2}, [4, 2, 2, 2, 0.5, 0.5]),
    ({"type": "multistep", "at": [1, 4], "factor": 0.25}, [8, 2, 2, 2, 0.5, 0.5]),
    ({"type": "linear", "steps": 4}, [8, 6, 4, 2, 0, 0]),
    ({"type": "linear", "steps": 4, "minimum": 4}, [8, 7, 6, 5, 4, 4]),
    ({"type": "polynomial", "steps": 4, "power": 2}, [8, 4.5, 2, 0.5, 0, 0]),
    ({"type": "polynomial", "steps": 2}, [8, 4, 0, 0, 0, 0]),
    ({"type": "cosine", "steps": 4}, [8, 4 + 4 * math.sqrt(0.5), 4, 4 - 4 * math.sqrt(0.5), 0, 0]),
    ({"type": "cosine", "steps": 3, "minimum": 2, "warmup": 1}, [8, 8, 5, 2, 2, 2]),
    ({"type": "cosine", "steps": 2, "minimum": 2, "warmup": 1, "after_warmup": True}, [8, 8, 5, 2, 2, 2]),
    ({"type": "linear", "steps": 5, "warmup": 1}, [8, 8, 6, 4, 2, 0]),
]


@pytest.mark.parametrize(("options", "rates"), TABLES, ids=str)
def test_tables(options: Options | None, rates: list[float]) -> None:
    rate = rated(options, 8)
    assert [rate(step) for step in range(len(rates))] == pytest.approx(rates, abs=1e-12)


TORCH: list[tuple[Options, str, dict[str, Any]]] = [
    ({"type": "step", "every": 3, "factor": 0.3}, "StepLR", {"step_size": 3, "gamma": 0.3}),
    ({"type": "multistep", "at": [2, 5], "factor": 0.3}, "MultiStepLR", {"milestones": [2, 5], "gamma": 0.3}),
    ({"type": "cosine", "steps": 9, "minimum": 0.02}, "CosineAnnealingLR", {"T_max": 9, "eta_min": 0.02}),
    (
        {"type": "linear", "steps": 6, "minimum": 0.01},
        "LinearLR",
        {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 6},
    ),
    ({"type": "polynomial", "steps": 7, "power": 1.7}, "PolynomialLR", {"total_iters": 7, "power": 1.7}),
    ({"type": "constant", "warmup": 5}, "LinearLR", {"start_factor": 0.2, "total_iters": 4}),
]


@pytest.mark.parametrize(("options", "name", "given"), TORCH, ids=str)
def test_rates_are_torchs(options: Options, name: str, given: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    wanted = getattr(torch.optim.lr_scheduler, name)(optimizer, **given)
    rate = rated(options, 0.1)
    for step in range(10):
        assert rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-15)
        optimizer.step()
        wanted.step()


def transformers(kind: str, step: int, warmup: int, steps: int, power: float, last: float) -> float:
    """The factors of get_{linear,cosine,polynomial_decay}_schedule_with_warmup, from the end of the warmup on, with a last factor."""
    progress = (step - warmup) / max(1, steps - warmup)
    if kind == "linear":
        return max(0.0, (steps - step) / max(1, steps - warmup))
    if kind == "cosine":
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress))) if progress <= 1 else 0.0
    return last if step > steps else (1 - last) * (1 - progress) ** power + last


@pytest.mark.parametrize("kind", ["linear", "cosine", "polynomial"])
def test_steps_hold_the_warmup_and_from_zero_they_are_hugging_faces(kind: str) -> None:
    steps, warmup, base = 37, 9, 3e-4
    more = {"power": 1.5, "minimum": base / 10} if kind == "polynomial" else {}
    rate = rated({"type": kind, "steps": steps, "warmup": warmup, **more}, base)
    wanted = [base * transformers(kind, step, warmup, steps, 1.5, 0.1) for step in range(warmup, 45)]
    assert [rate(step) for step in range(warmup, 45)] == pytest.approx(wanted, rel=1e-9, abs=1e-15)
    assert [rate(step) for step in range(warmup)] == pytest.approx([base * (k + 1) / warmup for k in range(warmup)])
    theirs = rated({"type": kind, "steps": steps, "warmup": warmup, "from_zero": True, **more}, base)
    assert [theirs(step) for step in range(45)] == pytest.approx([base * k / warmup for k in range(warmup)] + wanted)


def test_a_warmup_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(
        CompileError, match=r"'steps' 5 include 'warmup' 5, and none are left after it\n  help: raise 'steps', or say"
    ):
        rated({"type": "cosine", "steps": 5, "warmup": 5}, 0.1)
    rated({"type": "cosine", "steps": 5, "warmup": 5, "after_warmup": True}, 0.1)


def test_a_warmed_schedule_begins_after_its_warmup_where_it_says_so() -> None:
    given = {"type": "cosine", "steps": 10, "after_warmup": True}
    cold, warmed = (rated({**given, "warmup": steps}, 0.1) for steps in (0, 3))
    assert [warmed(step + 3) for step in range(12)] == [cold(step) for step in range(12)]


def test_scalars_are_rounded_once() -> None:
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999}
    found = scalars(("lr", "bias1", "bias2", "scale"), 6, hyper)
    assert found == {
        "lr": np.float32(0.1),
        "bias1": np.float32(1 - 0.9**7),
        "bias2": np.float32(1 - 0.999**7),
        "scale": np.float32(1),
    }
    assert {type(value) for value in found.values()} == {np.float32}
    assert scalars(("scale",), 0, {"scale": 0.25}) == {"scale": np.float32(0.25)}


def test_a_users_function(tmp_path: Path) -> None:
    (tmp_path / "lr.py").write_text("def rate(step):\n    return 2 / (1 + step)\n")
    plain = rated(PYTHON, 0.1, folder=tmp_path)
    assert [plain(step) for step in range(3)] == [2, 1, 2 / 3]
    warmed = rated({"type": "python", "function": "lr.py:rate", "warmup": 2}, 0.1, folder=tmp_path)
    assert [warmed(step) for step in range(4)] == [1, 1, 2 / 3, 1 / 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan.yaml:9: lr.py has no function 'rate'\n  help: def rate(step: int) -> float"),
        ("def rate(step):\n    return -1\n", "plan.yaml:9: lr.py:rate(0) gave -1\n  a rate is a number, at least 0"),
        (
            "def rate(step):\n    return float('nan')\n",
            "plan.yaml:9: lr.py:rate(0) gave nan\n  a rate is a number, at least 0",
        ),
        ("def rate(step):\n    return 'x'\n", "plan.yaml:9: lr.py:rate(0) gave 'x'\n  a rate is a number, at least 0"),
    ],
)
def test_a_users_function_that_fails(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "lr.py").write_text(text)
    with pytest.raises(UsageError) as raised:
        rated(PYTHON, 0.1, "plan.yaml:9", tmp_path)(0)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x =\n", "{0}:1: SyntaxError: invalid syntax\n  while running the file\n    x ="),
        (
            "import math\nmath.sqrt(-1)\n",
            "{0}:2: ValueError: math domain error\n  while running the file\n"
            '  File "{0}", line 2, in <module>\n    math.sqrt(-1)',
        ),
        (
            "import helper\ndef rate(step):\n    return helper.part(step)\n",
            "{1}:2: ZeroDivisionError: division by zero\n  while asking `rate` for the rate of step 0\n"
            '  File "{0}", line 3, in rate\n    return helper.part(step)\n'
            '  File "{1}", line 2, in part\n    return 1 / step',
        ),
        (
            "import sys\ndef rate(step): sys.exit(3)",
            "{0}:2: it ends the process: SystemExit(3)\n  while asking `rate` for the rate of step 0\n"
            '  File "{0}", line 2, in rate\n    def rate(step): sys.exit(3)',
        ),
        (
            "def rate():\n    return 1\n",
            "{0}: TypeError: rate() takes 0 positional arguments but 1 was given\n"
            "  while asking `rate` for the rate of step 0",
        ),
    ],
)
def test_a_users_own_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "lr.py").write_text(text)
    (tmp_path / "helper.py").write_text("def part(step):\n    return 1 / step\n")
    with pytest.raises(UserCodeError) as raised:
        rated(PYTHON, 0.1, "plan.yaml:9", tmp_path)(0)
    assert str(raised.value) == message.format(tmp_path / "lr.py", tmp_path / "helper.py")
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PYTHON, "schedule: there is no file lr.py\n  help: it is looked for in {folder}"),
        ({"type": "linear", "steps": 4, "minimum": 0.2}, "schedule: 'minimum' 0.2 is above the optimizer's rate 0.1"),
    ],
    ids=str,
)
def test_a_schedule_that_does_not_fit(tmp_path: Path, options: Options, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        rated(options, 0.1, folder=tmp_path)
    assert str(raised.value) == message.format(folder=tmp_path)


TYPES = "  the types are constant, step, multistep, linear, polynomial, cosine, python"


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"type": "cosin"}, ["schedule: there is no type 'cosin'", TYPES, "  help: the nearest is 'cosine'"]),
        ({"type": 3}, ["schedule: expected a name, but got the number 3"]),
        ({}, ["schedule: 'type' is missing"]),
        (
            {"type": "cosine", "step": 10, "minimum": -1, "warmup": 1.5, "zoom": 1},
            [
                "schedule.warmup: expected an integer, but got the number 1.5",
                "schedule: 'steps' is missing",
                "  help: steps: The step at which `minimum` is reached.",
                "schedule.minimum: expected at least 0, but got -1",
                "schedule: unknown key 'step'",
                "  help: the nearest is 'steps'",
                "schedule: unknown key 'zoom'",
                "  help: the keys here are type, warmup, after_warmup, from_zero, steps, minimum",
            ],
        ),
        ({"type": "linear", "steps": True}, ["schedule.steps: expected an integer, but got true"]),
        (
            {"type": "multistep", "at": [3, 3], "factor": 0},
            [
                "schedule.at: expected a rising list of steps",
                "  help: write each step once, the first one first: [30, 60]",
                "schedule.factor: expected a number above 0, but got 0",
            ],
        ),
        (
            {"type": "python", "function": "rate"},
            ["schedule.function: expected a text 'file.py:function', but got the string 'rate'"],
        ),
    ],
    ids=str,
)
def test_wrong_options_are_told_at_once(options: Options, lines: list[str]) -> None:
    with pytest.raises(CompileError) as raised:
        schedule(options)
    assert [line.removeprefix("plan.yaml: ") for line in str(raised.value).splitlines()] == lines
