"""One graph that makes a model's loss and the gradients of its parameters, and its runs on bound buffers.

Parameters are inputs of the graph: they change every step, and onnxruntime merges initializers that are equal.

    step = Step(model);  step.bind(feeds);  step();  step.loss, step.gradients
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from partc.compiler.analysis.shapes import shapes
from partc.compiler.autodiff.engine import differentiate_nodes
from partc.compiler.frontend.names import node_paths
from partc.compiler.frontend.trace import trace
from partc.compiler.ir.declared import Declared
from partc.compiler.ir.program import Prepared
from partc.compiler.plan.rules import Plan
from training_models import Feeds, Model

OPSET = 23


def parameters_of(graph: ir.Graph) -> dict[str, np.ndarray]:
    """The initializers that a module learns: those with a fraction, which no running statistic is."""
    found = {}
    for name, value in graph.initializers.items():
        learned = name.endswith(("weight", "bias")) and "." in name
        if learned and value.const_value is not None:
            found[name] = value.const_value.numpy()
    return found


def joint(model: Model) -> tuple[onnx.ModelProto, dict[str, np.ndarray], dict[str, str]]:
    """The graph of loss and gradients, the parameters that it takes as inputs, and the gradients' names by parameter."""
    traced = trace(model.module, model.inputs, ["loss"], model.name)
    program = Prepared(
        name=model.name,
        model=traced,
        plan=Plan.whole(),
        declared=Declared(),
        paths=node_paths(traced),
        training=None,
    )
    graph = shapes(program).model.graph
    parameters = parameters_of(graph)
    values = [*graph.inputs, *graph.initializers.values()]
    # What changes from step to step is no constant of the program.
    for name in parameters:
        graph.initializers[name].const_value = None
    backward = differentiate_nodes(
        list(graph),
        {"loss": "loss.seed"},
        list(parameters),
        values=values,
        constants={"loss.seed": np.array(1, np.float32)},
    )
    constants = {name: value.const_value.numpy() for name, value in graph.initializers.items() if value.const_value}
    constants |= {"loss.seed": np.array(1, np.float32), **backward.constants}
    nodes = [ir.serde.serialize_node(node) for node in (*backward.forward, *backward.early, *backward.nodes)]
    inputs = [
        onnx.helper.make_tensor_value_info(value.name, value.dtype, [d if isinstance(d, int) else str(d) for d in dims])
        for value in (*graph.inputs, *(graph.initializers[name] for name in parameters))
        if value.name and value.dtype and (dims := list(value.shape or ())) is not None
    ]
    outputs = [ir.Value(name=name) for name in ("loss", *dict.fromkeys(backward.gradients.values()))]
    kinds = [onnx.helper.make_tensor_value_info(str(value.name), onnx.TensorProto.FLOAT, None) for value in outputs]
    read = {name for node in nodes for name in node.input}
    stored = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items() if name in read]
    made = onnx.helper.make_graph(nodes, model.name, inputs, kinds, stored)
    opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(made, opset_imports=opsets, ir_version=11), parameters, backward.gradients


class Step:
    """A model's joint graph in one session of one thread, with its parameters and gradients in buffers that are bound once."""

    def __init__(self, model: Model, profile: str = "", configuration: Mapping[str, str] | None = None) -> None:
        self.proto, self.parameters, self._names = joint(model)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        for key, value in (configuration or {}).items():
            options.add_session_config_entry(key, value)
        if profile:
            options.enable_profiling, options.profile_file_prefix = True, profile
        self.session = onnxruntime.InferenceSession(
            self.proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._made = {name: np.zeros_like(self.parameters[of]) for of, name in self._names.items()}
        self._made["loss"] = np.zeros((), np.float32)
        self._binding: Any = None
        self._held: list[Any] = []

    def bind(self, feeds: Feeds) -> None:
        """Takes the inputs of the steps that follow."""
        self._binding, self._held = self.session.io_binding(), []
        for name, array in {**feeds, **self.parameters}.items():
            self._binding.bind_ortvalue_input(name, self._hold(array))
        for name, array in self._made.items():
            self._binding.bind_ortvalue_output(name, self._hold(array))

    def __call__(self) -> None:
        self.session.run_with_iobinding(self._binding)

    @property
    def loss(self) -> float:
        return float(self._made["loss"])

    @property
    def gradients(self) -> dict[str, np.ndarray]:
        """By parameter, of the last step."""
        return {of: self._made[name] for of, name in self._names.items()}

    def _hold(self, array: np.ndarray) -> Any:
        self._held.append(onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C")))
        return self._held[-1]


def same_gradients(have: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], close: float) -> None:
    """Compares every gradient, to `close` of its largest value."""
    assert set(have) == set(want)
    far = {name: _far(have[name], dx) for name, dx in want.items()}
    assert not (wrong := {name: one for name, one in far.items() if not one <= close}), wrong


def _far(have: np.ndarray, want: np.ndarray) -> float:
    assert have.shape == want.shape
    return float(np.abs(have - want).max() / max(float(np.abs(want).max()), 1e-6))
