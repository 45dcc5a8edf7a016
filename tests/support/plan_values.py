"""Values of keys of a plan's `train:`, read as the plan reads them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.groups import Frame
from partc.compiler.plan.training.losses import Loss, LossForm
from partc.compiler.plan.training.metrics import Metric, MetricsForm
from partc.compiler.plan.training.optimizer import Optimizer, OptimizerForm
from partc.runtime.artifact.training.lr_schedule import Schedule
from partc.runtime.options import refusals
from pydantic import TypeAdapter, ValidationError

_adapter = functools.cache(TypeAdapter)
"""pydantic takes 3 to 15 ms to make the validator of a form."""


def loss(options: Mapping[str, Any] | str, folder: Path = Path()) -> Loss:
    """The loss of these options; files of weights are in `folder`."""
    return _read(LossForm, dict(options) if isinstance(options, Mapping) else options, "loss", folder)


def metric(name: str, options: Mapping[str, Any]) -> Metric:
    """The metric of a name and its options."""
    return _read(MetricsForm, {name: dict(options)}, "metrics")[name]


def optimizer(type: object, options: Mapping[str, object]) -> Optimizer:
    """The optimizer of a type and its options."""
    return _read(OptimizerForm, {"type": type, **options}, "optimizer")


def schedule(options: Mapping[str, object]) -> Schedule:
    """The schedule of these options."""
    return _read(Schedule, dict(options), "schedule")


def _read(form: Any, value: object, key: str, folder: Path = Path()) -> Any:
    try:
        return _adapter(form).validate_python(value, context=Frame(folder=folder))
    except ValidationError as error:
        found = [(".".join(map(str, (key, *path))), refused) for path, refused, _ in refusals(error)]
        raise CompileError(Problem.of(refused, "plan.yaml", where) for where, refused in found) from None
