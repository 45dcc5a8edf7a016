"""Refuses a training that torch does otherwise than by the graph: with hooks, changed buffers, a `torch.autograd.Function`.

What is not in the graph at all a loader writes into the model's metadata (`UNTRAINABLE`).

A loader notes on an Identity behind such a function what it is called (`OWN_BACKWARD`). The derivative of the function's own ops would be
another one: of `Round` it is zero, where a straight-through backward hands the cotangent on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import onnx_ir as ir
from partc.compiler.autodiff.reach import followed_values
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import OWN_BACKWARD, UNTRAINABLE, reads_of
from partc.compiler.ir.training import Training
from partc.compiler.ops.registry import stops_gradient

_LAW = "its backward is Python, and a gradient would be that of the ops of its forward"
_HELP = (
    "write it in torch's operators, straight through as `x + (f(x) - x).detach()`, or freeze the parameters before it"
)


def refuse_untrainable(model: ir.Model, training: Training, paths: Mapping[ir.Node, str]) -> None:
    """Raises CompileError, of all at once, where torch would train the model otherwise than by its graph."""
    problems = [*_noted(model), *_own_backward(model.graph, training, paths)]
    if problems:
        raise CompileError(problems)


def _noted(model: ir.Model) -> list[Problem]:
    """The problems that the model's loader has written into its metadata."""
    try:
        noted = json.loads(model.metadata_props.get(UNTRAINABLE, "[]"))
        return [Problem(*map(str, one)) for one in noted]
    except (ValueError, TypeError) as error:
        fact, law = f"its metadata '{UNTRAINABLE}' is broken", " ".join(str(error).split())
        raise CompileError(Problem("the model", fact, law, "export the model again with `partc export`")) from None


def _own_backward(graph: ir.Graph, training: Training, paths: Mapping[ir.Node, str]) -> list[Problem]:
    """A problem for each function of Python that a gradient flows through from the loss to a parameter."""
    if not any(OWN_BACKWARD in node.metadata_props for node in graph):
        return []
    reads = reads_of(graph)
    followed, reaching = followed_values(reads, training), {training.loss}
    problems: list[Problem] = []
    for node, read in reversed(reads.items()):
        if stops_gradient(node) or reaching.isdisjoint(node.outputs):
            continue
        reaching.update(read)
        if OWN_BACKWARD in node.metadata_props and not followed.isdisjoint(read):
            fact = f"a gradient flows through the torch.autograd.Function '{node.metadata_props[OWN_BACKWARD]}'"
            problems.append(Problem(paths[node], fact, _LAW, _HELP))
    return problems[::-1]
