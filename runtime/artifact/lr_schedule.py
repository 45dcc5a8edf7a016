"""Learning rates by step, and the other numbers that an optimizer's functions are fed each step.

A schedule gives the rate of a step, counted from 0. `base` is the optimizer's rate, `last` is `minimum`, 0 by default:

    constant                            base
    step        every, factor           base * factor^(step // every)
    multistep   at, factor              base * factor^(number of steps in `at` that are reached)
    linear      steps, minimum          last + (base - last) * left
    polynomial  steps, power, minimum   last + (base - last) * left^power
    cosine      steps, minimum          last + (base - last) * (1 + cos(pi * (1 - left))) / 2
    python      function                what `file.py:function` returns for the step

All types count the steps of the training, those of a warmup among them: with `warmup: w`, which is 0 by default, `left` goes from 1 at
step w to 0 at step `steps`, and stays there. The first w steps have (step + 1)/w of what the schedule gives; with `from_zero: true`
step/w, as in Hugging Face's schedules, whose first step changes nothing. With `after_warmup: true` the schedule counts from the
warmup's end instead, so that it ends w steps later, and the warmup leads to the rate of its step 0.

    rate = schedule({"type": "cosine", "steps": 1000, "warmup": 10}, 0.1)
    scalars(("lr", "bias1", "bias2"), 12, {"lr": rate(12), "beta1": 0.9, "beta2": 0.999})
"""

from __future__ import annotations

import bisect
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import UsageError
from ..user_code import run_file, user_code

if TYPE_CHECKING:
    import numpy as np

Rate: TypeAlias = Callable[[int], float]
Run: TypeAlias = Callable[[Path], ModuleType]
Option: TypeAlias = float | int | bool | tuple[int, ...] | str

SCALARS: Mapping[str, Callable[[int, Mapping[str, float]], float]] = {
    "lr": lambda step, hyper: hyper["lr"],
    "scale": lambda step, hyper: hyper.get("scale", 1.0),
    "bias1": lambda step, hyper: 1 - hyper["beta1"] ** (step + 1),
    "bias2": lambda step, hyper: 1 - hyper["beta2"] ** (step + 1),
    "forget": lambda step, hyper: (step + 1) ** hyper["beta2_decay"],
    "bound": lambda step, hyper: (step + 1) ** -0.5,
}
"""By name what an optimizer's function reads beside tensors; `hyper` are the optimizer's numbers and `lr`, the rate of the step."""


OTHERS = "others"
"""The key of a training's `optimizer` for those of parameters that have one of their own: their numbers, by name."""
_SHARED = ("lr", "scale")


def scalar_name(optimizer: str, scalar: str) -> str:
    """The name of a scalar of an optimizer, `adam.bias1`; those of the training's own, whose name is empty, have none before."""
    return f"{optimizer}.{scalar}" if optimizer and scalar not in _SHARED else scalar


def numbers(optimizer: Mapping[str, object]) -> dict[str, float]:
    """The numbers of a training's `optimizer`; those of others are named after these: `adam.beta1`."""
    found = {name: float(value) for name, value in optimizer.items() if _is_number(value)}  # type: ignore[arg-type]
    others = optimizer.get(OTHERS)
    for of, own in others.items() if isinstance(others, Mapping) else ():
        found |= {f"{of}.{name}": value for name, value in numbers(own).items()} if isinstance(own, Mapping) else {}
    return found


def optimizer_types(optimizer: Mapping[str, object]) -> str:
    """The types of a training's `optimizer` and of the others, as text: `adam, adagrad`."""
    others = optimizer.get(OTHERS)
    all_ = [optimizer, *(others.values() if isinstance(others, Mapping) else ())]
    return ", ".join(dict.fromkeys(str(one["type"]) for one in all_ if isinstance(one, Mapping) and "type" in one))


def scalars(names: Sequence[str], step: int, hyper: Mapping[str, float]) -> dict[str, np.float32]:
    """The scalars of a step, counted from 0: computed in float64, then rounded. `hyper` is as `numbers` makes it, with the step's `lr`."""
    import numpy as np

    return {name: np.float32(_scalar(name, step, hyper)) for name in names}


def _scalar(name: str, step: int, hyper: Mapping[str, float]) -> float:
    of, dot, scalar = name.rpartition(".")
    return SCALARS[scalar](
        step, {key.removeprefix(of + dot): value for key, value in hyper.items() if key.startswith(of + dot)}
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Law:
    """What an option must be, in words and as a JSON schema, and how a value is taken: None where it is not."""

    text: str
    form: Mapping[str, Any]
    take: Callable[[object], Option | None]
    default: Option | None = None


def _whole(least: int) -> Callable[[object], int | None]:
    def take(value: object) -> int | None:
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else None

    return take


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)


def _positive(value: object) -> float | None:
    return _number(value) or None


def _rising(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list | tuple) or not value:
        return None
    steps = tuple(step for step in map(_whole(1), value) if step is not None)
    return steps if len(steps) == len(value) and all(a < b for a, b in pairwise(steps)) else None


def _reference(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    file, _, name = value.rpartition(":")
    return value if file.endswith(".py") and name.isidentifier() else None


_COUNT = {"type": "integer", "minimum": 1}
_ABOVE_0 = {"type": "number", "exclusiveMinimum": 0}
_STEPS = {"steps": Law("a number of steps, at least 1,", _COUNT, _whole(1))}
_FACTOR = {"factor": Law("a number above 0", _ABOVE_0, _positive)}
_MINIMUM = {"minimum": Law("a rate, at least 0,", {"type": "number", "minimum": 0}, _number, 0.0)}
_BOOLEAN = Law("true or false", {"type": "boolean"}, lambda one: one if isinstance(one, bool) else None, False)
_WARMUP = {
    "warmup": Law("a number of steps, at least 0,", {"type": "integer", "minimum": 0}, _whole(0), 0),
    "after_warmup": _BOOLEAN,
    "from_zero": _BOOLEAN,
}
_RISING = Law("a rising list of steps, each at least 1,", {"type": "array", "items": _COUNT, "minItems": 1}, _rising)
_FUNCTION = Law("a text 'file.py:function'", {"type": "string", "pattern": r"\.py:\w+$"}, _reference)

SCHEDULES: Mapping[str, Mapping[str, Law]] = {
    "constant": _WARMUP,
    "step": {"every": _STEPS["steps"], **_FACTOR, **_WARMUP},
    "multistep": {"at": _RISING, **_FACTOR, **_WARMUP},
    "linear": {**_STEPS, **_MINIMUM, **_WARMUP},
    "polynomial": {**_STEPS, "power": Law("a number above 0", _ABOVE_0, _positive, 1.0), **_MINIMUM, **_WARMUP},
    "cosine": {**_STEPS, **_MINIMUM, **_WARMUP},
    "python": {"function": _FUNCTION, **_WARMUP},
}


def schedule(
    options: Mapping[str, object] | str | None,
    base: float,
    where: str = "schedule",
    folder: Path = Path(),
    run: Run = run_file,
) -> Rate:
    """The rate by step of `{"type": ..., option: ...}`; a text is a type without options, or `file.py:function`; None is constant.

    A file is looked for in `folder`, `run` once, now, and must give every rank the same numbers. Raises UsageError with all that is
    wrong, each at `where`; so does the rate itself, where the user's function gives no number; UserCodeError where it fails.
    """
    if options is None:
        options = {"type": "constant"}
    elif isinstance(options, str):
        options = {"type": "python", "function": options} if _reference(options) else {"type": options}
    kind = options.get("type")
    if not isinstance(kind, str) or kind not in SCHEDULES:
        fact = "'type' is missing" if "type" not in options else f"unknown schedule {_shown(kind)}"
        near = difflib.get_close_matches(kind, SCHEDULES, 1) if isinstance(kind, str) else []
        remedy = f"the nearest is '{near[0]}'" if near else f"choose from {', '.join(SCHEDULES)}"
        raise UsageError(f"{where}: {fact}\n  help: {remedy}")
    laws = SCHEDULES[kind]
    problems = [
        f"{where}: {kind}: unknown option '{key}'\n  help: {_remedy(key, kind)}"
        for key in options
        if key not in laws and key != "type"
    ]
    taken: dict[str, Any] = {}
    for key, law in laws.items():
        value = law.take(options[key]) if key in options else law.default
        if value is not None:
            taken[key] = value
        elif key in options:
            problems.append(f"{where}: {kind}: expected {law.text} as '{key}', but got {_shown(options[key])}")
        else:
            problems.append(f"{where}: {kind}: '{key}' is missing\n  help: it is {law.text.rstrip(',')}")
    minimum = taken.get("minimum")
    if isinstance(minimum, float) and minimum > base:
        problems.append(f"{where}: {kind}: 'minimum' {minimum:g} is above the optimizer's rate {base:g}")
    warmup, apart = taken.get("warmup", 0), taken.get("after_warmup", False)
    if "steps" in taken and warmup >= taken["steps"] and not apart:
        fact = f"'steps' {taken['steps']} include 'warmup' {warmup}, and none are left after it"
        problems.append(f"{where}: {kind}: {fact}\n  help: raise 'steps', or say 'after_warmup: true'")
    if problems:
        raise UsageError("\n".join(problems))
    rate = _unwarmed(kind, taken, 0 if apart else warmup, base, where, folder, run)
    first = 0 if taken.get("from_zero") else 1
    return _warmed_apart(rate, warmup, first) if apart else _warmed(rate, warmup, first)


def _unwarmed(kind: str, taken: Mapping[str, Any], begin: int, base: float, where: str, folder: Path, run: Run) -> Rate:
    """The rate without its warmup; what decays does so from the step `begin` on."""
    if kind == "python":
        return _python(taken["function"], where, folder, run)
    last: float = taken.get("minimum", 0.0)

    def left(step: int) -> float:
        steps: int = taken["steps"]
        return 1 - min(max(step - begin, 0) / (steps - begin), 1.0)

    shapes: dict[str, Rate] = {
        "constant": lambda step: base,
        "step": lambda step: base * taken["factor"] ** (step // taken["every"]),
        "multistep": lambda step: base * taken["factor"] ** bisect.bisect_right(taken["at"], step),
        "linear": lambda step: last + (base - last) * left(step),
        "polynomial": lambda step: last + (base - last) * left(step) ** taken["power"],
        "cosine": lambda step: last + (base - last) * (1 - math.cos(math.pi * left(step))) / 2,
    }
    return shapes[kind]


def _warmed(rate: Rate, steps: int, first: int) -> Rate:
    return (lambda step: rate(step) * min(1.0, (step + first) / steps)) if steps else rate


def _warmed_apart(rate: Rate, steps: int, first: int) -> Rate:
    if not steps:
        return rate
    return lambda step: rate(0) * (step + first) / steps if step < steps else rate(step - steps)


def _python(reference: str, where: str, folder: Path, run: Run) -> Rate:
    """The function that `file.py:function` names, every call of it checked; UserCodeError tells what fails by the user's own line."""
    file, _, name = reference.rpartition(":")
    path = folder / file
    if not path.is_file():
        raise UsageError(f"{where}: there is no file {file}\n  help: it is looked for in {folder}")
    function = getattr(run(path), name, None)
    if not callable(function):
        raise UsageError(f"{where}: {file} has no function '{name}'\n  help: def {name}(step: int) -> float")

    def rate(step: int) -> float:
        with user_code(str(path), f"asking `{name}` for the rate of step {step}"):
            given = function(step)
        try:
            number = float(given)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or number < 0:
            raise UsageError(f"{where}: {reference}({step}) gave {given!r}\n  a rate is a number, at least 0")
        return number

    return rate


def _shown(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


def _remedy(key: str, kind: str) -> str:
    near = difflib.get_close_matches(key, SCHEDULES[kind], 1)
    return f"the nearest is '{near[0]}'" if near else f"the options of {kind} are {', '.join(SCHEDULES[kind])}"
