"""Where gradients flow: from the loss back to parameters that are learned."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ops.gradient import stops_gradient
from partc.compiler.program import Program


def learned_from(program: Program) -> set[ir.Value]:
    """The values that change with a parameter that is learned."""
    assert program.training is not None
    found = {value for value, how in program.training.parameters.items() if not how.frozen}
    for node in program.model.graph:
        if not stops(node) and any(value in found for value in program.reads[node]):
            found.update(value for value in node.outputs if value.dtype is None or value.dtype.is_floating_point())
    return found


def flowing(program: Program) -> set[ir.Node]:
    """The nodes through which a gradient flows; none where nothing trains."""
    if program.training is None or not program.training.part.backward:
        return set()
    learned, reaching = learned_from(program), {program.training.loss}
    found: set[ir.Node] = set()
    for node in reversed(list(program.model.graph)):
        if stops(node) or reaching.isdisjoint(node.outputs):
            continue
        reaching.update(program.reads[node])
        if not learned.isdisjoint(program.reads[node]):
            found.add(node)
    return found


def stops(node: ir.Node) -> bool:
    """Whether nothing flows back through a node."""
    return stops_gradient("" if node.domain == "ai.onnx" else node.domain, node.op_type)
