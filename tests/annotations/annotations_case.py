"""Compiles a model, writes it as annotations of ONNX, and prints the programs of its ranks for a comparison."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import onnx.checker
import onnx.compose
import onnx.utils
import onnx_ir as ir
from onnx_ir._multi_device import _check_device_configurations
from partc.compiler.emit.annotated import annotated
from partc.compiler.emit.dump import end_text
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.pipeline import step_program
from partc.compiler.plan.read import parse_plan


def compiled(
    proto: onnx.ModelProto, plan: str | None, name: str = "m.onnx", configuration: str | None = None
) -> Complete:
    chosen = parse_plan(plan, "plan.yaml") if plan is not None else None
    return step_program(Source(from_proto(proto, Path(name))), chosen, name, configuration=configuration)


def written(program: Complete) -> onnx.ModelProto:
    """The annotated model of a program, accepted by both checkers."""
    model = annotated(program)
    assert _check_device_configurations(model) == []
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    assert _check_device_configurations(ir.from_proto(proto)) == []
    return proto


def programs(program: Complete) -> str:
    """All ranks' programs with their communication, without the reasons: these name lines of the plan."""
    return re.sub(
        r"(?m)   (Rule: |Cause: | ?\d+ bytes   ).*$|^#   \d+: .*$|^      # Sharded: .*$", "", end_text(program)
    )
