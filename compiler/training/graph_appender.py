"""Nodes that training appends to the whole model's graph: their names begin with one word, as if they were in a module `loss`.

Constants are nodes and no initializers, so that they are not taken for trainable weights. What is appended is standard and whole: it is
placed, cut and differentiated with the model's own nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.analysis.bindings import unnamed
from partc.compiler.analysis.infer_shapes import infer_shapes
from partc.compiler.analysis.records import OF_PIECES
from partc.compiler.analysis.shape_rules import Known
from partc.compiler.dims.facts import ANY_DIM
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.names import ONNXSCRIPT_SCOPES, TORCH_SCOPES
from partc.compiler.ir.graph import graphs_of, name_of
from partc.compiler.plan.training.graph_nodes import FLOATS, Dims
from partc.runtime.spellings import nearest

OLDEST_OPSET = 18
DENOMINATOR = "partc.denominator"
"""The key by which a number's value has that of what it is divided by."""

_PASSED = ("Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape")
_BOUNDS = ("Clip", "Max")


Inferred = dict[ir.Value, tuple[Dims | None, ir.DataType | None]]
"""The dims and the types of a model's outputs, as far as they have been inferred."""


class GraphAppender:
    """Appends nodes below `path` to a model; `where` stands in errors, and `known` is what is promised of the inputs' dims.

    Appenders of one model share what is `inferred`: what one of them appends changes nothing of the outputs that were there before.
    """

    def __init__(self, model: ir.Model, path: str, where: str, known: Known, inferred: Inferred | None = None) -> None:
        self.model, self.graph, self.path, self.where, self.known = model, model.graph, path, where, known
        self._outputs = {} if inferred is None else inferred
        self._names = {value.name for part in graphs_of(self.graph) for value in _values(part)}
        self._scopes = {
            key for node in self.graph for key in (TORCH_SCOPES, ONNXSCRIPT_SCOPES) if key in node.metadata_props
        }
        opset = model.graph.opset_imports.get("", 0)
        if opset < OLDEST_OPSET:
            raise self.error(
                f"the model has opset {opset}",
                f"losses and metrics are made of ops of opset {OLDEST_OPSET}",
                "export the model with opset 21",
            )

    def error(self, fact: str, law: str = "", help: str = "") -> CompileError:
        """The error of one fact."""
        return CompileError(Problem(self.where, fact, law, help))

    def op(self, word: str, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """One node that makes `<path>.<word>`, or `<path>` itself where there is no word."""
        name = f"{self.path}.{word}" if word else self.path
        if name in self._names:
            raise self.error(
                f"the model has a value '{name}' already",
                "the values of a loss and of metrics are named after them",
                f"name it otherwise in the model, or say '{name}' where an output of the model is meant",
            )
        self._names.add(name)
        node = ir.Node(
            "", op_type, inputs, ir.convenience.convert_attributes(attributes), outputs=[ir.Value(name=name)], name=name
        )
        module = name.rpartition(".")[0]
        if TORCH_SCOPES in self._scopes:
            node.metadata_props[TORCH_SCOPES] = repr(["", module, name])
        elif self._scopes:
            node.metadata_props[ONNXSCRIPT_SCOPES] = repr(["", module])
        self.graph.append(node)
        return node.outputs[0]

    def constant(self, word: str, array: Any, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        """A constant; integers where no type is said."""
        return self.op(word, "Constant", value=ir.tensor(np.asarray(array, dtype.numpy())))

    def scalar(self, op_type: str, *inputs: ir.Value, dtype: ir.DataType, **attributes: Any) -> ir.Value:
        """The node that makes `<path>`: a float32 scalar, which becomes an output of the graph."""
        if dtype == ir.DataType.FLOAT:
            made = self.op("", op_type, *inputs, **attributes)
        else:
            made = self.op("", "Cast", self.op("value", op_type, *inputs, **attributes), to=ir.DataType.FLOAT.value)
        made.type, made.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
        self.graph.outputs.append(made)
        return made

    def sums(self, size: int, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Appends the node that computes `<path>`: `size` float32 sums, which become an output of the graph."""
        made = self.op("", op_type, *inputs, **attributes)
        made.type, made.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([size])
        self.graph.outputs.append(made)
        return made

    def divided(self, number: ir.Value, denominator: ir.Value) -> ir.Value:
        """`number`, a mean; `<path>.denominator`, a float32 scalar, says what it divides by, so that several can be put together."""
        made = self.op("denominator", "Cast", denominator, to=ir.DataType.FLOAT.value)
        made.type, made.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
        number.meta[DENOMINATOR] = made
        return number

    def counted(self, number: ir.Value, each: ir.Value, dims: Dims) -> ir.Value:
        """`number`, the mean of all of `each`, whose dims are `dims`; where records may have unevenly many, it says how many there are."""
        records = {
            str(one.shape[0].value)
            for one in self.graph.inputs
            if one.shape and isinstance(one.shape[0], ir.SymbolicDim)
        }
        uneven = [
            dim for k, dim in enumerate(dims) if not isinstance(dim, int) and (k or str(dim.value) not in records)
        ]
        return self.divided(number, self.op("positions", "Size", each)) if uneven else number

    def by_shard(self, shards: int, x: ir.Value, word: str) -> ir.Value:
        """The sums of x over the records of each shard of the batch."""
        pieces = self.op(f"{word}.pieces", "Reshape", x, self.constant(f"{word}.by_rank", [shards, -1]))
        node = pieces.producer()
        assert node is not None
        node.meta[OF_PIECES] = True
        return self.op(word, "ReduceSum", pieces, self.constant(f"{word}.records", [1]), keepdims=0)

    def own_scalar(self, name: str) -> ir.Value:
        """The model's output of a name, which must be one float."""
        output = self.output(name)
        if (output.dtype is not None and output.dtype not in FLOATS) or (
            output.shape is not None and any(dim != 1 for dim in output.shape.dims)
        ):
            shape = "" if output.shape is None else str(output.shape)
            raise self.error(
                f"the output '{name}' is {output.dtype.name.lower() if output.dtype else ''}{shape}",
                "a loss or metric of the model's own is one float",
                "take its mean in the model, or say by `type` how it is compared with labels",
            )
        return self._divided(output)

    def _divided(self, number: ir.Value) -> ir.Value:
        """A number of the model's own; the sum that it is divided by, as a mean over the labels that count is, is its denominator."""
        node = _made(number)
        if node is None or node.op_type != "Div" or DENOMINATOR in number.meta:
            return number
        total = node.inputs[1]
        under = _made(total)
        while under is not None and under.op_type in _BOUNDS:  # a bound from below, for a batch without any
            total = under.inputs[0]
            under = _made(total)
        if total is None or under is None or under.op_type != "ReduceSum" or not _is_given(under, self.graph):
            return number
        return self.divided(number, self.op("total", "Reshape", total, self.constant("no_dims", np.zeros(0, np.int64))))

    def output(self, name: str) -> ir.Value:
        """The graph's output of a name. Raises CompileError with the nearest names where there is none."""
        by_name = {name_of(value): value for value in self.graph.outputs}
        if name not in by_name:
            close = nearest(name, by_name)
            have = ", ".join(map(repr, by_name))
            raise self.error(
                f"the model has no output '{name}'",
                f"its outputs are {have}",
                f"say '{close[0]}'" if close else "name one of them",
            )
        return by_name[name]

    def prediction(self, name: str) -> tuple[ir.Value, Dims]:
        """An output of floats, in float32 unless it is in float64, and its dims in names of the inputs' dims."""
        value = self.output(name)
        shape, dtype = self._inferred(value)
        if shape is None:
            raise self.error(
                f"the rank of the output '{name}' is not known",
                help="give the model's inputs shapes, or reshape the output",
            )
        if dtype not in FLOATS:
            raise self.error(
                f"the output '{name}' is of type {dtype.name if dtype else 'unknown'}", "a loss or metric is of floats"
            )
        if dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            value = self.op(name, "Cast", value, to=ir.DataType.FLOAT.value)
            value.type = ir.TensorType(ir.DataType.FLOAT)
        return value, shape

    def graph_input(self, name: str, dims: Dims, kinds: Sequence[ir.DataType]) -> ir.Value:
        """The graph's input of a name in the first of the types `kinds`; one is added, of these dims, where there is none."""
        port = next((value for value in self.graph.inputs if value.name == name), None)
        if port is None and name in self._names:
            raise self.error(
                f"'{name}' is no input of the model but a value inside of it", help="name the labels otherwise"
            )
        if port is None:
            self._names.add(name)
            known = self._named_dims()
            shape = [dim if isinstance(dim, int) or str(dim.value) in known else None for dim in dims]
            port = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kinds[0]))
            self.graph.inputs.append(port)
            return port
        if port.dtype is not None and port.dtype not in kinds:
            words = " or ".join(kind.name.lower() for kind in kinds)
            raise self.error(f"the input '{name}' is of type {port.dtype.name.lower()}", f"it must be of {words} here")
        have = None if port.shape is None else tuple(port.shape.dims)
        if have is not None and not _fits(have, dims):
            raise self.error(
                f"the input '{name}' is {_text(have)} in the model, and {_text(dims)} is expected",
                "labels have the shape of the logits without the classes, targets that of the prediction",
                "say which axis the classes are by `axis`, or change the input",
            )
        if port.dtype in (None, kinds[0]):
            return port
        word = f"{name}.{kinds[0].name.lower()}"
        if f"{self.path}.{word}" in self._names:
            return next(value for value in _values(self.graph) if value.name == f"{self.path}.{word}")
        return self.op(word, "Cast", port, to=kinds[0].value)

    def _inferred(self, value: ir.Value) -> tuple[Dims | None, ir.DataType | None]:
        """A value's dims and type by shape inference on a copy; input dims without a name get one, so that others can share it."""
        for one in self.graph.inputs:
            if one.shape is not None:
                dims = list(one.shape.dims)
                one.shape = ir.Shape(
                    [
                        unnamed(one, axis) if isinstance(dim, ir.SymbolicDim) and dim.value is None else dim
                        for axis, dim in enumerate(dims)
                    ]
                )
        if value not in self._outputs:
            copy = self.model.clone()
            infer_shapes(copy, {name: self.known.get(name, ANY_DIM) for name in self._named_dims()})
            for own, found in zip(self.graph.outputs, copy.graph.outputs, strict=True):
                shape = found.shape if found.shape is not None else own.shape
                inferred = None if shape is None else tuple(shape.dims)
                self._outputs.setdefault(own, (inferred, found.dtype or own.dtype))
        return self._outputs[value]

    def _named_dims(self) -> set[str]:
        dims = (dim for value in self.graph.inputs for dim in (value.shape.dims if value.shape is not None else ()))
        return {str(dim.value) for dim in dims if isinstance(dim, ir.SymbolicDim)}


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)]


def _fits(have: Dims, want: Dims) -> bool:
    pairs = zip(have, want, strict=False)
    return len(have) == len(want) and all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))


def _text(dims: Dims) -> str:
    return f"[{', '.join(str(dim) if isinstance(dim, int) else str(dim.value or '?') for dim in dims)}]"


def _made(value: ir.Value | None) -> ir.Node | None:
    """The node that makes a value, past those that change its form alone."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in _PASSED:
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    return node


def _is_given(node: ir.Node, graph: ir.Graph) -> bool:
    """Whether what a node makes depends on an input of the graph."""
    todo, seen, given = [node], {node}, {*graph.inputs}
    while todo:
        for value in todo.pop().inputs:
            if value in given:
                return True
            producer = None if value is None else value.producer()
            if producer is not None and producer not in seen:
                seen.add(producer)
                todo.append(producer)
    return False
