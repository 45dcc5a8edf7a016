"""Runs an exported graph in onnxruntime: returns any of its values by name, also with operands changed by units in the last place.

Large weights are fed from their own memory, so that onnxruntime neither copies nor folds them. Dropout is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from partc.compiler.comparison.rounding import perturb
from partc.compiler.frontend.names import module_of
from partc.compiler.ir.graph import nodes_of
from partc.runtime.artifact.tensors.dtypes import Array

_SMALL = 64
"""Weights with more elements are fed as inputs, so that onnxruntime neither copies nor folds them."""
_RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")
_PASSED_ON = (
    "Cast",
    "Reshape",
    "Unsqueeze",
    "Squeeze",
    "Slice",
    "Transpose",
    "Identity",
    "Expand",
    "Flatten",
    "Gather",
)


def one_line(error: Exception) -> str:
    """Returns an error's text in one line."""
    return " ".join(str(error).split())


def drawn_outputs(model: ir.Model) -> list[str]:
    """Returns the outputs of a model that depend on random numbers."""
    reached = set[ir.Value]()
    for node in model.graph:
        inside = [one.op_type for one in nodes_of([node])]
        if not reached.isdisjoint(node.inputs) or any(op in _RANDOM for op in inside):
            reached.update(node.outputs)
    return [value.name or "" for value in model.graph.outputs if value in reached]


class NotRunError(Exception):
    """onnxruntime's message where it cannot run a graph."""


class GraphSessions:
    """Sessions of one exported graph in onnxruntime, with large weights fed as inputs and dropout off."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self._fed: dict[str, Array] = {}
        self._proto = self._written()
        self._sessions: dict[tuple[int, tuple[str, ...]], Any] = {}
        self.drawn = drawn_outputs(model)

    def _written(self) -> onnx.ModelProto:
        """Serializes the model with its large weights as inputs."""
        graph = self.model.graph
        weights = {name: (value, value.const_value) for name, value in graph.initializers.items()}
        fed = {
            name: tensor
            for name, (value, tensor) in weights.items()
            if tensor is not None
            and tensor.size > _SMALL
            # in training onnxruntime writes new statistics into its feeds
            and all(node.op_type != "BatchNormalization" for node, _ in value.uses())
        }
        count = len(graph.inputs)
        try:
            for name, (value, tensor) in weights.items():
                if name in fed:
                    del graph.initializers[name]
                    value.const_value = None
                    graph.inputs.append(value)
                elif isinstance(tensor, ir.ExternalTensor):
                    value.const_value = ir.Tensor(tensor.numpy(), name=name)
            proto: onnx.ModelProto = ir.serde.serialize_model(self.model)
        finally:
            del graph.inputs[count:]
            graph.initializers.clear()
            for name, (value, tensor) in weights.items():
                value.const_value = tensor
                graph.initializers[name] = value
        self._fed = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in fed.items()}
        for node in proto.graph.node:
            if node.op_type == "Dropout" and not node.domain:
                del node.input[2:]
        return proto

    def has(self, ops: Sequence[str]) -> bool:
        """Whether the graph has one of these ops."""
        return any(node.op_type in ops for node in nodes_of(self.model.graph))

    def refused(self) -> str:
        """Returns the reason why onnxruntime does not load the graph; empty where it does."""
        try:
            self._session([value.name or "" for value in self.model.graph.outputs], 0)
        except Exception as error:
            return one_line(error)
        return ""

    def run(self, values: Mapping[str, Array], names: Sequence[str], seed: int = 0) -> dict[str, Array]:
        """Returns values of the graph by name; a nonzero seed changes operands by units in the last place."""
        if not names:
            return {}
        session = self._session(names, seed)
        taken = {one.name for one in session.get_inputs()}
        feeds = {name: array for name, array in {**values, **self._fed}.items() if name in taken}
        try:
            return dict(zip(names, session.run([*names], feeds), strict=True))
        except Exception as error:  # onnxruntime's errors have no common class
            raise NotRunError(one_line(error)) from error

    def _session(self, names: Sequence[str], seed: int) -> Any:
        from partc.runtime.program.ort import quiet_session

        outputs = [value.name or "" for value in self.model.graph.outputs]
        more = tuple(name for name in names if name not in outputs)
        if (seed, more) not in self._sessions:
            proto = self._proto
            if seed or more:
                proto = onnx.ModelProto()
                proto.CopyFrom(self._proto)
                if seed:
                    perturb(proto, seed)
                proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in more)
            # onnxruntime folds a BatchNormalization after a product into it, even in training mode
            self._sessions[seed, more] = quiet_session(proto.SerializeToString(), threads=0, optimized=False)
        return self._sessions[seed, more]

    def outputs_by_module(self) -> dict[str, list[tuple[str, int]]]:
        """Maps the path of each module to the values that its nodes make and others read, each with its number of dims."""
        by_module: dict[str, list[tuple[str, int]]] = {}
        scopes = {node: module_of(node) or "" for node in self.model.graph}
        outputs = set(self.model.graph.outputs)
        for node, scope in scopes.items():
            parts = scope.split(".")
            for out in node.outputs:
                if out.shape is None or not out.name:
                    continue
                readers = [scopes.get(reader, "") for reader, _ in out.uses()]
                for depth in range(len(parts), 0, -1):
                    path = ".".join(parts[:depth])
                    if out in outputs or any(f"{one}.".startswith(f"{path}.") is False for one in readers):
                        by_module.setdefault(path, []).append((out.name, len(out.shape)))
        return by_module

    def rows(self, name: str) -> int | None:
        """Returns the fewest rows of the tables that an input indexes; None where it indexes none."""
        value = next((one for one in self.model.graph.inputs if one.name == name), None)
        waiting, reached, sizes = [value] if value is not None else [], set[ir.Value](), list[int]()
        while waiting:
            source = waiting.pop()
            if source in reached:
                continue
            reached.add(source)
            for node, place in source.uses():
                data = node.inputs[0]
                if node.op_type == "Gather" and place == 1 and data is not None and data.shape is not None:
                    size = data.shape[node.attributes.get_int("axis", 0)]
                    sizes += [size] if isinstance(size, int) else []
                elif node.op_type in _PASSED_ON and place == 0:
                    waiting += node.outputs
        return min(sizes, default=None)
