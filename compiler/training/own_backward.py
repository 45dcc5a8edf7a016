"""Refuses a gradient through a `torch.autograd.Function`, whose backward is Python that no graph has.

A loader notes on an Identity behind such a function what it is called (`OWN_BACKWARD`). The derivative of the function's own ops would be
another one: of `Round` it is zero, where a straight-through backward hands the cotangent on.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from partc.compiler.autodiff.reach import followed_values
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import OWN_BACKWARD, reads_of
from partc.compiler.ir.training import Training
from partc.compiler.ops.registry import stops_gradient

_LAW = "its backward is Python, and a gradient would be that of the ops of its forward"
_HELP = (
    "write it in torch's operators, straight through as `x + (f(x) - x).detach()`, or freeze the parameters before it"
)


def refuse_own_backward(graph: ir.Graph, training: Training, paths: Mapping[ir.Node, str]) -> None:
    """Raises CompileError, of all at once, where a gradient flows from the loss to a parameter through such a function."""
    if not any(OWN_BACKWARD in node.metadata_props for node in graph):
        return
    reads = reads_of(graph)
    followed, reaching = followed_values(reads, training), {training.loss}
    problems = []
    for node, read in reversed(reads.items()):
        if stops_gradient(node) or reaching.isdisjoint(node.outputs):
            continue
        reaching.update(read)
        if OWN_BACKWARD in node.metadata_props and not followed.isdisjoint(read):
            fact = f"a gradient flows through the torch.autograd.Function '{node.metadata_props[OWN_BACKWARD]}'"
            problems.append(Problem(paths[node], fact, _LAW, _HELP))
    if problems:
        raise CompileError(problems[::-1])
