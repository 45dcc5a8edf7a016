"""The passes of plans that train or run by microbatches; their modules are imported when the first such plan is compiled.

These are a quarter of the compiler's modules, and importing them takes as long as compiling a small model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
from partc.compiler.ir.graph import CHANGED_BY_FORWARD
from partc.compiler.ir.program import Loaded, Lowered, Prepared, Scheduled
from partc.runtime.units import first_of

if TYPE_CHECKING:
    from partc.compiler.lower.local_view import Localized


def add_training(program: Loaded) -> Prepared:
    """Pass: `training/add_training.py`, if the plan trains."""
    if program.plan.train is None:
        return program.into(Prepared, training=None, warnings=(*program.warnings, *_changed_by_forward(program.model)))
    from partc.compiler.training.add_training import add_training as step

    return step(program)


def _changed_by_forward(model: ir.Model) -> list[str]:
    """Returns a warning for a model whose module's forward would change buffers from call to call."""
    names = model.metadata_props.get(CHANGED_BY_FORWARD, "")
    if not names:
        return []
    fact = f"the module's forward changes {first_of(names.split(', '))}, and its graph does not"
    return [
        f"{fact}: every run gives what the first call gives in torch; call eval() of the module, if it then changes nothing"
    ]


def differentiate(program: Localized) -> Localized:
    """Pass: `tasks/differentiate.py`, for a program that trains."""
    if program.training is None:
        return program
    from partc.compiler.tasks.differentiate import differentiate as step

    return step(program)


def update(program: Localized) -> Localized:
    """Pass: `tasks/update.py`, for a program that trains."""
    if program.training is None:
        return program
    from partc.compiler.tasks.update import update as step

    return step(program)


def pipeline(program: Lowered) -> Scheduled:
    """Pass: `pipelines/pipeline.py`, if the plan has microbatches, or stores parameters in shards."""
    if program.plan.pipeline is None and not program.pinned.units:
        return program.into(Scheduled, tasks=None)
    from partc.compiler.pipelines.pipeline import pipeline as step

    return step(program)
