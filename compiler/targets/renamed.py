"""An op on its target, by the names that its operands have there; those that its kernel reads on the host have the host's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx_ir as ir
from partc.compiler.ir.graph import captured_by
from partc.compiler.ir.rank_program import ComputeOp
from partc.compiler.ops.registry import host_inputs
from partc.compiler.targets.of_ops import Scope, is_of_shape
from partc.runtime.artifact.format import CPU


def renamed_op(step: ComputeOp, scope: Scope, at: Callable[[str, str], str], there: Callable[[str], str]) -> ComputeOp:
    """The op with its target; `at` gives the name of a value on a target, `there` a target on which it is without a copy."""
    node, target = step.node, scope.targets[step]
    host = host_inputs(node)
    if is_of_shape(step) and (operand_name := node.inputs[0]) is not None:
        target = there(operand_name.name or "") or target

    def operand(k: int, value: ir.Value | None) -> str | None:
        if value is None or not value.name:
            return None if value is None else value.name
        return at(value.name, CPU if k in host else target)

    inputs = [operand(k, value) for k, value in enumerate(node.inputs)]
    made = [at(value.name, scope.lying[value.name]) if value.name else value.name for value in node.outputs]
    captured = {
        name: at(there, target)
        for value in captured_by(node)
        for name in [value.name or ""]
        for there in [step.captured.get(name, name)]
        if at(there, target) != there or name in step.captured
    }
    before = [None if value is None else value.name for value in node.inputs]
    if inputs != before or made != [value.name for value in node.outputs]:
        renamed = {value.name: name for value, name in zip(node.outputs, made, strict=True)}
        node = ir.Node(
            node.domain,
            node.op_type,
            inputs=[
                None if value is None else ir.Value(name=name, type=value.type, shape=value.shape)
                for value, name in zip(node.inputs, inputs, strict=True)
            ],
            attributes=list(node.attributes.values()),
            outputs=[
                ir.Value(name=name, type=value.type, shape=value.shape)
                for value, name in zip(node.outputs, made, strict=True)
            ],
            name=renamed.get(node.name, node.name),
            overload=node.overload,
            version=node.version,
        )
    return replace(step, node=node, captured=captured, target=target)
