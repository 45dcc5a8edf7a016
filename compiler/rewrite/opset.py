"""Converts a model with sharded operators to the op table's forms: a later opset, and functions of a reduction separate from its sum.

A model that is only placed keeps its opset, since a conversion could change its numbers.

Some ops are split in two so that they can be sharded better: reductions that apply a function to a sum, and classifiers with text labels.

ReduceL2(x)                                Sqrt(ReduceSumSquare(x)); in training 0 and Sqrt(1) at a sum of 0, so the gradient is 0 there
ReduceLogSum(x)                            Log(ReduceSum(x))
LinearClassifier(x) {labels 'no', 'yes'}   CategoryMapper(LinearClassifier(x) {labels 0, 1})

A sum may be sharded even if the function of it may not. Texts are not sent between ranks, so a classifier that made them would run
unsharded on the rank that delivers them; instead numbers are sent there, and replaced by their texts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.preserved import preserving_by_output
from partc.compiler.ir.declared import Declared
from partc.compiler.ir.graph import WRITTEN, operands_of
from partc.compiler.plan.rules import FULL_BATCH, Plan
from partc.compiler.rewrite.class_losses import write_out_class_loss
from partc.compiler.rewrite.mixtures import write_out_mixture

TABULAR = "ai.onnx.ml"
NUMBERED = {
    "LinearClassifier": "classlabels_ints",
    "SVMClassifier": "classlabels_ints",
    "TreeEnsembleClassifier": "classlabels_int64s",
}
"""Maps each classifier to the attribute of its integer labels."""
BENT = {"ReduceL2": ("ReduceSumSquare", "Sqrt"), "ReduceLogSum": ("ReduceSum", "Log")}


def number_labels(node: ir.Node) -> ir.Node | None:
    """Replaces a classifier's text labels by numbers, and returns the node after it that makes the texts; None without text labels."""
    labels = node.attributes.get_strings("classlabels_strings") if node.domain == TABULAR else None
    graph, out = node.graph, node.outputs[0]
    if not labels or node.op_type not in NUMBERED or graph is None or not out.name:
        return None
    numbers = list(range(len(labels)))
    del node.attributes["classlabels_strings"]
    node.attributes[NUMBERED[node.op_type]] = ir.AttrInt64s(NUMBERED[node.op_type], numbers)
    name, out.name = out.name, f"{out.name}.number"
    made = ir.Value(name=name, shape=out.shape, type=out.type)
    out.type = ir.TensorType(ir.DataType.INT64)
    out.replace_all_uses_with(made, replace_graph_outputs=True)
    attributes = [ir.AttrInt64s("cats_int64s", numbers), ir.AttrStrings("cats_strings", list(labels))]
    mapper = ir.Node(TABULAR, "CategoryMapper", [out], attributes, outputs=[made], name=f"{node.name}.labels")
    mapper.metadata_props.update(node.metadata_props)
    graph.insert_after(node, mapper)
    return mapper


def decompose(node: ir.Node, trains: bool) -> None:
    """Replaces a node in its graph by the nodes that compute it, if its op is in `BENT`.

    The node's output keeps its value and name; the sum is named `<output>.sum` and has the output's shape and type.
    """
    parts = BENT.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    graph = node.graph
    if parts is None or graph is None:
        return
    out, nodes = node.outputs[0], list[ir.Node]()

    def add(op_type: str, inputs: list[ir.Value | None], word: str, of: list[ir.Attr] | None = None) -> ir.Value:
        made = ir.Value(name=f"{out.name}.{word}" if word else out.name, shape=out.shape, type=out.type)
        name = f"{node.name}.{word}" if word else node.name
        nodes.append(ir.Node(node.domain, op_type, inputs, of or [], outputs=[made], name=name))
        nodes[-1].metadata_props.update(node.metadata_props)
        return made

    total = add(parts[0], list(node.inputs), "sum", list(node.attributes.values()))
    if node.op_type == "ReduceL2" and trains:
        zero, one = (_number(k, total, add) for k in (0, 1))
        nothing = add("Equal", [total, zero], "is_zero")
        nothing.type = ir.TensorType(ir.DataType.BOOL)
        root = add("Sqrt", [add("Where", [nothing, one, total], "not_zero")], "root")
        made = add("Where", [nothing, zero, root], "")
    else:
        made = add(parts[1], [total], "")
    nodes[-1].meta[WRITTEN] = operands_of(node)
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [out], [made])


def _number(number: int, like: ir.Value, add: Callable[..., ir.Value]) -> ir.Value:
    """Adds a number as a scalar in the type of a value, which may be unknown."""
    tensor = ir.tensor(np.array(number, (like.dtype or ir.DataType.FLOAT).numpy()), dtype=like.dtype)
    scalar = add("Constant", [], f"number{number}", [ir.AttrTensor("value", tensor)])
    cast = scalar if like.dtype else add("CastLike", [scalar, like], f"number{number}.of_type")
    for value in {scalar, cast}:
        value.shape = ir.Shape([])
    if like.dtype is None:
        scalar.type = ir.TensorType(ir.DataType.FLOAT)
    return cast


OLDEST, TARGET = 18, 21
"""The oldest opset in whose forms rules emit ops, and the opset in whose forms gradients do; older models are converted to these only."""


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
    """Returns `model` decomposed, for a training if `trains`, and converted if it is older than `oldest`.

    Raises CompileError if the converter fails.
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
    for graph in model.graphs():
        for node in list(graph):
            write_out_class_loss(node)
            write_out_mixture(node)
    return model
