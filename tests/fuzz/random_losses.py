"""A loss and a `train:` for the random graphs of `random_cases.py`: the mean of what is bounded of some float outputs.

with_loss(draw, graph, ["v3_0", "x"])    adds nodes that make `y` of both, and gives the lines of the plan
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from hypothesis import strategies as st
from onnx import helper
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from random_training import training
from training_equivalence import same_training

if TYPE_CHECKING:
    from risky_graphs import Case, Risky

LOSS = "y"


def with_loss(draw: st.DrawFn, graph: Risky, ends: Sequence[str]) -> list[str]:
    """Adds the nodes of a loss that all the ends, values of floats, change; the plan's lines that train by it."""
    if draw(st.integers(0, 9)):
        width = draw(st.sampled_from([4, 6]))
        (made,) = graph.add("MatMul", ["x", graph.floats(3, width)])
        ends = [made, *ends]
    means = []
    for k, end in enumerate(dict.fromkeys(ends)):
        graph.nodes.append(helper.make_node("Tanh", [end], [f"bounded{k}"], name=f"bounded{k}"))
        graph.nodes.append(helper.make_node("Mul", [f"bounded{k}", f"bounded{k}"], [f"square{k}"], name=f"square{k}"))
        graph.nodes.append(helper.make_node("ReduceMean", [f"square{k}"], [f"mean{k}"], name=f"mean{k}", keepdims=0))
        means.append(f"mean{k}")
    graph.nodes.append(helper.make_node("Sum", means, [LOSS], name="sum"))
    read = {name for node in graph.nodes for name in node.input}
    weights = [tensor.name for tensor in graph.weights if len(tensor.dims) and tensor.data_type == 1]
    lines = training(draw, LOSS, [name for name in weights if name in read])
    return [*lines, *(["  accumulate: 2"] if draw(st.integers(0, 4)) == 0 else [])]


def train(case: Case) -> None:
    """Trains the case on its ranks and on one; AssertionError where they differ."""

    def source() -> Source:
        return Source(from_proto(case.model, Path("model.onnx")))

    known = changing(case.model.graph)
    steps = [{name: value for name, value in step.items() if name in known} for step in case.steps()]
    with tempfile.TemporaryDirectory() as folder:
        same_training(source, case.plan, Path(folder), steps, rtol=1e-4, atol=1e-3)


def changing(graph: onnx.GraphProto) -> set[str]:
    """The values that the loss is made of: inputs that are none of them are no inputs of a training."""
    found = {LOSS}
    for node in reversed(graph.node):
        if not found.isdisjoint(node.output):
            found.update(_read(node))
    return found


def _read(node: onnx.NodeProto) -> set[str]:
    inner = (each for attribute in node.attribute for each in attribute.g.node)
    return {*node.input, *(name for each in inner for name in _read(each))}
