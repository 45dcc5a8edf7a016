"""Puts a model's BatchNormalization and Dropout nodes into their form for training, or for evaluation.

Exporters write models in inference form, where BatchNormalization uses the running statistics and Dropout does nothing. Training changes
the single-device model, before anything is placed or sharded: normalizations use the statistics of the batch and return new running ones,
dropouts draw masks (`ops/families/neural/dropout.py`). Nodes keep their paths, so that patterns match as before; a node that becomes
several is the module of these.

    modes = to_training(model, cut=True, seed=7, frozen=lambda name: False)
    modes.statistics    [(bn1.running_mean, bn1.running_mean.next), (bn1.running_var, bn1.running_var.next)]
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import infer_shapes
from partc.compiler.analysis.shape_rules import Known
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.names import ONNXSCRIPT_SCOPES, TORCH_SCOPES, node_paths
from partc.compiler.ir.graph import FROZEN_STATISTICS, UNBIASED, bodies, name_of
from partc.compiler.ops.families.neural.dropout import DROPOUT
from partc.compiler.ops.node import single
from partc.compiler.ops.rule import OWN
from partc.compiler.rewrite.batch_norm import (
    BatchSplit,
    decompose,
    decompose_each,
    infer_in_place,
    train_in_place,
    unbiased,
)

STEP = "step"
"""The graph's input that determines the masks: an int64 number, different for each draw of one training."""
_BATCH_NORM = "BatchNormalization"
_STANDARD = ("", "ai.onnx")


@dataclass(frozen=True)
class Modes:
    """The states that training changes besides parameters: pairs of `statistics` and their new values, and the input `step` or None.

    A step of several microbatches must feed each its own number as `step`, else they would have the same masks.
    """

    statistics: list[tuple[ir.Value, ir.Value]] = field(default_factory=list)
    step: ir.Value | None = None

    @property
    def needs_step(self) -> bool:
        """Whether the graph has the input `step`."""
        return self.step is not None


def to_training(
    model: ir.Model,
    *,
    cut: bool,
    seed: int,
    frozen: Callable[[str], bool],
    known: Known = MappingProxyType({}),
    split: BatchSplit | None = None,
) -> Modes:
    """Changes `model`, of opset 21 or later, into its form for training.

    `cut`: whether any operator may run on several ranks. `seed`: the seed of all masks. `frozen`: whether the weight of a name is frozen:
    a normalization with frozen statistics, or with frozen scale and bias, stays in inference form. `known`: promised facts about dims.
    `split`: the parts of a batch of each of which normalizations take their own statistics.

    Raises CompileError with all violations, where randomness or statistics are used in a way that is not supported.
    """
    graph = model.graph
    paths = node_paths(model)
    norms = [node for node in graph if _is(node, _BATCH_NORM)]
    training = [node for node in norms if _has_state(node) and not _is_frozen(node, frozen)]
    dropouts = [node for node in graph if _is(node, DROPOUT)]
    drawing = {node: ratio for node in dropouts if (ratio := _ratio(node)) != 0}
    shaped = ranked(model, training, known) if cut else {}
    problems = [
        *_attributes(model, paths),
        *_inside(graph, paths, frozen),
        *_ratios(drawing, paths),
        *(_taken(graph) if drawing else ()),
        *(_unranked(node, paths) for node in training if cut and shaped[node].shape is None),
    ]
    if problems:
        raise CompileError(problems)
    if training or drawing:
        # A name of its own keeps a node's path where its neighbours' counters change.
        for node, path in paths.items():
            node.name = path
    for node in {*norms} - {*training}:
        infer_in_place(node)
    for node in {*dropouts} - {*drawing}:
        _undropped(node)
    statistics = _trained(model, training, shaped, split)
    if not drawing:
        return Modes(statistics, None)
    step = ir.Value(name=STEP, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    graph.inputs.append(step)
    for node, ratio in drawing.items():
        assert ratio is not None
        _seeded(node, ratio, step, seed)
    return Modes(statistics, step)


def to_evaluation(model: ir.Model) -> None:
    """Changes `model` into its form for evaluation: running statistics are used, and nothing is dropped."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if _is(node, _BATCH_NORM):
            infer_in_place(node)
        elif _is(node, DROPOUT):
            _undropped(node)


def _is(node: ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain in _STANDARD


def _has_state(node: ir.Node) -> bool:
    """Whether the running statistics are weights, or the node uses those of the batch anyway."""
    weights = all(value is not None and value.is_initializer() for value in node.inputs[3:5])
    return weights or bool(node.attributes.get_int("training_mode", 0))


def _is_frozen(node: ir.Node, frozen: Callable[[str], bool]) -> bool:
    scale, bias, *statistics = (value is not None and frozen(name_of(value)) for value in node.inputs[1:5])
    return any(statistics) or (scale and bias) or bool(node.meta.get(FROZEN_STATISTICS))


def ranked(model: ir.Model, nodes: list[ir.Node], known: Known) -> dict[ir.Node, ir.Value]:
    """Maps each node to a value with the shape and type of its input: as inferred, else as in the model."""
    inputs = {node: value for node in nodes if (value := node.inputs[0]) is not None}
    if not inputs:
        return {}
    copy = model.clone()
    infer_shapes(copy, known)
    found = {out.name: out for node in copy.graph for out in node.outputs if out.shape is not None}
    return {node: found.get(value.name, value) for node, value in inputs.items()}


def _trained(
    model: ir.Model, nodes: list[ir.Node], known: Mapping[ir.Node, ir.Value], split: BatchSplit | None
) -> list[tuple[ir.Value, ir.Value]]:
    """Puts normalizations into training form; returns each of their statistics with the value that replaces it.

    Nodes that share statistics update them one after the other.
    """
    module = modules(model)
    newest: dict[ir.Value, ir.Value] = {}
    for node in nodes:
        states = [value for value in node.inputs[3:5] if value is not None]
        running = [newest.get(value, value) for value in states]
        x, data = known.get(node), node.inputs[0]
        scopes, momentum = module(name_of(node)), single(node.attributes.get_float("momentum", 0.9))
        if split is not None and x is not None:
            made = decompose_each(node, running, x, scopes, split)
        else:
            made = decompose(node, running, x, scopes) if x else train_in_place(node, running)
        if UNBIASED in node.meta and data is not None and split is None:
            made[1] = unbiased(node, running[1], made[1], data, scopes, momentum)
        for state, old, new in zip(states, running, made, strict=True):
            if not state.is_initializer():
                continue
            if not new.is_graph_output():
                new.name = f"{state.name}.next"
            if old is not state:
                old.name = f"{state.name}.after.{node.name}"
            newest[state] = new
    return list(newest.items())


def modules(model: ir.Model) -> Callable[[str], dict[str, str]]:
    """Returns a function from a path to the metadata by which nodes belong to the module at that path, in the keys that the model uses."""
    scopes = {key for node in model.graph for key in (TORCH_SCOPES, ONNXSCRIPT_SCOPES) if key in node.metadata_props}

    def module(path: str) -> dict[str, str]:
        said = {TORCH_SCOPES: str(["", path, path]), ONNXSCRIPT_SCOPES: str(["", path])}
        return {key: text for key, text in said.items() if key in scopes}

    return module


def _ratio(node: ir.Node) -> float | None:
    """Returns the dropped share; None where it is known only at run time."""
    given = node.inputs[1] if len(node.inputs) > 1 else None
    if given is None:
        return 0.5
    tensor = ir.convenience.get_const_tensor(given)
    return None if tensor is None else float(tensor.numpy().ravel()[0])


def _seeded(node: ir.Node, ratio: float, step: ir.Value, seed: int) -> None:
    """Replaces a dropout by one whose masks depend on the seed, the node's path and the step."""
    graph = node.graph
    assert graph is not None
    key = hashlib.sha256(f"{seed}:{node.name}".encode()).digest()
    attributes = ir.convenience.convert_attributes({"ratio": ratio, "seed": int.from_bytes(key[:8], "big") >> 1})
    made = [ir.Value(name=out.name, type=out.type, shape=out.shape) for out in node.outputs]
    new = ir.Node(OWN, DROPOUT, [node.inputs[0], step], attributes, outputs=made, name=node.name, version=1)
    new.metadata_props.update(node.metadata_props)
    given = list(node.inputs[1:])
    ir.convenience.replace_nodes_and_values(graph, node, [node], [new], node.outputs, made)
    _forget(graph, given)


def _undropped(node: ir.Node) -> None:
    """Turns a dropout off."""
    given = list(node.inputs[2:3])
    if given and node.graph is not None:
        node.resize_inputs(2)
        _forget(node.graph, given)


def _forget(graph: ir.Graph | ir.Function, values: list[ir.Value | None]) -> None:
    """Removes weights that are no longer read."""
    for value in dict.fromkeys(values):
        if value is not None and value.is_initializer() and not value.uses() and isinstance(graph, ir.Graph):
            graph.initializers.pop(name_of(value), None)


def _attributes(model: ir.Model, paths: Mapping[ir.Node, str]) -> Iterator[Problem]:
    """Yields a problem for each op that drops elements inside of itself."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        drops = [
            f"{name} = {attr.value:g}"
            for name, attr in sorted(node.attributes.items())
            if "dropout" in name.lower() and isinstance(attr.value, int | float) and attr.value
        ]
        if "Dropout" in node.op_type and not _is(node, DROPOUT):
            drops.append(node.op_type)
        if drops:
            yield Problem(
                paths.get(node, node.name or node.op_type),
                f"{node.op_type} drops inside of the op ({', '.join(drops)})",
                "masks are drawn by Dropout nodes, so that they are the same on any number of ranks",
                "export the op with a dropout of 0 and a Dropout beside it, or attention as MatMul, Softmax and Dropout",
            )


def _inside(graph: ir.Graph, paths: Mapping[ir.Node, str], frozen: Callable[[str], bool]) -> Iterator[Problem]:
    """Yields a problem for each BatchNormalization or Dropout within the body of another node, which training does not reach."""
    for owner in graph:
        for body in bodies(owner):
            for node in ir.traversal.RecursiveGraphIterator(body):
                dropped = _is(node, DROPOUT) and _ratio(node) != 0
                moving = _is(node, _BATCH_NORM) and not _is_frozen(node, frozen)
                if not dropped and not moving:
                    continue
                yield Problem(
                    paths[owner],
                    f"has a {node.op_type} ('{node.name}') in a body",
                    f"a body of {owner.op_type} can neither keep statistics nor draw masks",
                    "unroll it, or freeze the weights of the normalization" if moving else "unroll it",
                )


def _ratios(drawing: Mapping[ir.Node, float | None], paths: Mapping[ir.Node, str]) -> Iterator[Problem]:
    for node, ratio in drawing.items():
        if ratio is None:
            value = node.inputs[1]
            assert value is not None
            fact = f"the ratio '{value.name}' is computed"
            yield Problem(paths[node], fact, "a mask's ratio is known when it is compiled", "make the ratio a constant")
        elif not 0 < ratio < 1:
            fact = f"the ratio is {ratio:g}"
            yield Problem(paths[node], fact, "a ratio is at least 0 and below 1", "use another ratio")


def _taken(graph: ir.Graph) -> Iterator[Problem]:
    every = [*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)]
    if any(value.name == STEP for value in every):
        yield Problem(
            f"'{STEP}'",
            "names a value of the model",
            f"with a Dropout, '{STEP}' is the input by which masks change from step to step",
            "rename the model's value",
        )


def _unranked(node: ir.Node, paths: Mapping[ir.Node, str]) -> Problem:
    value = node.inputs[0]
    assert value is not None
    return Problem(
        paths[node],
        f"the number of dims of '{value.name}' is not known",
        "statistics of a batch that may be cut are taken along known dims",
        "declare the shapes of the model's inputs, or freeze the weights of the normalization",
    )
