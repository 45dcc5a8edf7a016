"""Checks written files before they replace the artifact: rank files are sound, and onnxruntime loads them.

What is wrong is told as whose fault it is. A model that onnx or onnxruntime refuses as it came is the user's to change: onnx's refusal is a
warning, since onnxruntime may well run it, onnxruntime's an error. All else is a bug in partc.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
from partc.compiler.errors import CompileError, InternalError, Problem
from partc.compiler.ir.computed import is_absent
from partc.runtime.artifact.format import Manifest
from partc.runtime.checker.structures import Structure, check_model, check_structures, refusal, structures
from partc.runtime.errors import Violation
from partc.runtime.program.ort import can_load, version

_INLINE_BYTES = 1024
_OWN_FAULT = "this is a bug in partc; please report it with the model and the plan"
_NO_CHECK = "--no-check writes it as it is"


def prove(folder: Path, model: ir.Model, name: str) -> list[str]:
    """Warnings of what is wrong with the user's model; raises CompileError where a rank's program is wrong or does not load.

    `model` is the unsharded one, `name` its file's.
    """
    programs = structures(folder)
    violations = check_structures(programs)
    refused = [(one, text) for one in programs if (text := refusal(one.model, can_load, one.folder, one.rest))]
    if not violations and not refused:
        return []
    whole = without_weights(model)
    told = _violated(violations, whole, name) if violations else []
    if refused:
        raise _refused(refused, whole, name)
    return told


def _refused(refused: Sequence[tuple[Structure, str]], whole: onnx.ModelProto, name: str) -> CompileError:
    if text := refusal(whole, can_load):
        fact = f"onnxruntime {version()} does not load the unsharded model: {text}"
        law = "what a rank runs, onnxruntime must load"
        help = f"change the model, its types or its opset; where it runs on another onnxruntime or device, {_NO_CHECK}"
        return CompileError(Problem(name, fact, law, help))
    return InternalError(
        Problem(one.file, f"onnxruntime {version()} does not load it: {text}", _OWN_FAULT, _NO_CHECK)
        for one, text in refused
    )


def _violated(violations: Sequence[Violation], whole: onnx.ModelProto, name: str) -> list[str]:
    """Warnings for violations that the unsharded model has, too; raises CompileError for all others."""
    own = check_model(name, whole, Manifest.model_construct(symbols={}))  # type: ignore[call-arg]
    known = {one.fact.split(":")[0] for one in own}
    faults = [one for one in violations if one.fact.split(":")[0] not in known]
    if faults:
        raise InternalError(
            Problem(one.file, f"{one.node}: {one.fact}" if one.node else one.fact, _OWN_FAULT, _NO_CHECK)
            for one in faults
        )
    return [f"{name}: {one.fact}{f' ({one.node})' if one.node else ''}" for one in own]


def without_weights(model: ir.Model) -> onnx.ModelProto:
    """The model with its large weights as inputs, and the others inside of it."""
    light = model.clone()
    for name, value in list(light.graph.initializers.items()):
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes <= _INLINE_BYTES:
            value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
        elif tensor is not None and (tensor.nbytes > _INLINE_BYTES or is_absent(tensor)):
            value.const_value = None
            light.graph.initializers.pop(name)
            if value not in light.graph.inputs:
                light.graph.inputs.append(value)
    return ir.serde.serialize_model(light)
