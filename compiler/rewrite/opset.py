"""The model as the op table speaks of it, where operators are sharded: a later opset, and a function of a reduction apart from its sum.

A model that is only placed stays as it is: every conversion is one more thing that can change numbers.
"""

from __future__ import annotations

import logging

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.preserved import preserving_by_output
from partc.compiler.ir.declared import Declared
from partc.compiler.plan.rules import FULL_BATCH, Plan
from partc.compiler.rewrite.decompose import decompose, number_labels

OLDEST, TARGET = 18, 21
"""Rules emit ops in forms of opset 18 and later, gradients in those of TARGET; older models are converted to these, and no further."""


def cuts(plan: Plan, declared: Declared) -> bool:
    """Whether the plan or the model shards any operator."""
    return bool(
        plan.sharding
        or declared.sharding
        or plan.mesh
        or plan.dataset.style != FULL_BATCH
        or plan.dataset.specs
        or any(len(rule.ranks) > 1 for rule in plan.placement)
        or any(not isinstance(placed.on, int) and placed.on for placed in declared.placements)
        or (declared.annotations is not None and declared.annotations.several)
    )


def converted(model: ir.Model, name: str, oldest: int = OLDEST, trains: bool = False) -> ir.Model:
    """`model` decomposed, for a training if it `trains`, and converted if it is older than `oldest`.

    Raises CompileError where the converter cannot.
    """
    if model.opset_imports.get("", TARGET) < oldest:
        import onnxscript.version_converter

        own = model.opset_imports[""]
        logging.getLogger("onnxscript.version_converter").setLevel(logging.ERROR)  # it tells which way it goes
        try:
            with preserving_by_output(model):
                onnxscript.version_converter.convert_version(model, oldest, fallback=True)
        except Exception as error:
            raise CompileError(
                Problem(
                    name,
                    f"opset {own} cannot be converted to {oldest}: {error}",
                    help=f"export it with opset {oldest} or later",
                )
            ) from error
    for node in list(model.graph):
        decompose(node, trains)
        number_labels(node)
    return model
