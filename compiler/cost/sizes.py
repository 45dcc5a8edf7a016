"""The types and sizes of the values of a rank's file, with the symbols bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from onnx import NodeProto, OperatorSetIdProto, TensorProto, TypeProto, defs, helper, numpy_helper, shape_inference
from onnx.checker import ValidationError
from partc.runtime.artifact.format import OPTIMIZER, ROUTE, Shape
from partc.runtime.artifact.graph.onnx_graph import graph_bodies, integer_of, reads
from partc.runtime.artifact.graph.row_function import MERGE
from partc.runtime.artifact.tasks.task import parse
from partc.runtime.artifact.tensors.dtypes import dense, type_proto
from partc.runtime.execution.memory.layout import at_sizes
from partc.runtime.program.rank_file import RankFile
from partc.runtime.program.steps import LookUp, Segment
from partc.runtime.program.value_table import types_from_manifest

_SOME = 4.0
"""The bytes of an element whose type is not known."""
_UNSTATED = "tensor(float)"
"""The type of a value without a stated one."""
_INTEGERS = (TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL)
_MOST_NUMBERS = 1 << 10
"""The most numbers of a value that is followed: shapes and axes have fewer, and experts have one length each."""


@dataclass(frozen=True)
class Operand:
    """The sizes of an operand, None where only a run tells them, the bytes of an element, and whether it is the same in each step."""

    sizes: tuple[int, ...] | None
    item: float
    constant: bool = False

    @property
    def bytes(self) -> float:
        """All of it; 0 where it is not known."""
        return 0.0 if self.sizes is None else math.prod(self.sizes) * self.item


class FileSizes:
    """The operands of a rank's file by name; `unknown` counts values whose size only a run tells."""

    def __init__(self, file: RankFile, sizes: Mapping[str, int]) -> None:
        self.file, self.sizes = file, sizes
        self.shapes: dict[str, Shape] = {name: list(one.dims) for name, one in file.tensors.items()}
        self.shapes |= file.declared_shapes
        segments = [step for step in file.steps if isinstance(step, Segment)]
        nodes = [node for one in segments for node in one.nodes if (node.domain, node.op_type) == (OPTIMIZER, MERGE)]
        self.merged = {made: source for node in nodes for source, made in zip(node.input, node.output, strict=True)}
        """Maps each result of a merge of rows to its operand, which has at least as many rows."""
        self.unknown = set[str]()
        self._known: dict[str, Operand] = {}
        self._bound: dict[tuple[int | str, ...], tuple[int, ...] | None] = {}
        self._names: dict[int, dict[str, str]] = {}
        self._fixed: dict[int, frozenset[str]] = {}
        self._followed = not any(isinstance(step, Segment) for step in file.steps)

    @cached_property
    def types(self) -> dict[str, str]:
        """The type of each value, as the file and the manifest state it without sessions."""
        file = self.file
        types = {**dict.fromkeys((*file.computed, *file.calls_by_output), _UNSTATED), **types_from_manifest(file)}
        types |= file.declared_types
        return types | {copy.result: types.get(copy.source, _UNSTATED) for copy in file.copies}

    def assume(self, name: str | None, sizes: tuple[int, ...], item: float) -> None:
        """Gives a value sizes that the file does not state."""
        if name:
            self._known[name] = Operand(sizes, item)

    def close(self, size: int) -> None:
        """Gives each dim that the file leaves open a size."""
        for name, value in self.file.declared.items():
            dims = value.type.tensor_type.shape.dim
            shape = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or size for dim in dims]
            if value.type.tensor_type.HasField("shape"):
                self.shapes[name] = shape

    def operand(self, name: str) -> Operand:
        """The sizes and the element's bytes of a value."""
        if name in self.merged and self.shapes.get(name) is None:
            return self.operand(self.merged[name])
        if name not in self._known:
            shape, dtype = self.shapes.get(name), dense(self.types.get(name, ""))
            shape_at_sizes = None if shape is None else self._at_sizes(tuple(shape))
            if shape_at_sizes is None and not self._followed:
                self._follow()
                return self.operand(name)
            if shape_at_sizes is None:
                self.unknown.add(name)
            self._known[name] = Operand(shape_at_sizes, _SOME if dtype is None else dtype.bits / 8)
        return self._known[name]

    def _follow(self) -> None:
        """Derives sizes that the file does not state, node by node, as if each expert had as many rows as the others.

        The sizes are those of onnx's shape inference, with the numbers of values that are made of sizes and constants. Two facts are put
        in the place of what only a run tells: a Route gives a rank as many rows as it sends, and a Split by such lengths makes parts that
        differ by one at most.
        """
        self._followed = True
        numbers, kinds, opsets = dict[str, TensorProto](), dict[str, int](), self.file.model.opset_import
        for step in self.file.steps:
            if isinstance(step, LookUp) and step.call.op == ROUTE and (sent := self._sizes(step.call.operand or "")):
                self._derive(step.call.result or "", (sent[0], *step.call.row))
                self._derive(step.call.numbers or "", sent[:1])
            if not isinstance(step, Segment):
                continue
            names, suffix = self.names(step), f".{parse(step.task).microbatch}" if step.task else ""
            for node in step.formal.nodes:
                operands, results = (
                    [names.get(one, one + suffix) if one else "" for one in some] for some in (node.input, node.output)
                )
                sizes = [self._sizes(name) for name in operands]
                data = [self._constant(name) or numbers.get(name) for name in operands]
                for name, tensor in zip(results, _numbers(node, sizes, data), strict=False):
                    numbers[name] = tensor
                    self._derive(name, tuple(tensor.dims))
                if all(self._sizes(name) is not None for name in results if name):
                    continue
                if node.op_type == "Split" and len(data) > 1 and data[1] is None and sizes[0] is not None:
                    size, count = sizes[0][integer_of(node, "axis", 0)], len(results)
                    data[1] = numpy_helper.from_array(
                        np.array([size // count + (k < size % count) for k in range(count)])
                    )
                types = [
                    helper.make_tensor_type_proto(kinds[name], one)
                    if name in kinds
                    else _type(self.types.get(name) or _UNSTATED, one)
                    for name, one in zip(operands, sizes, strict=True)
                ]
                for name, inferred in zip(results, _inferred(node, types, data, opsets), strict=False):
                    if inferred.tensor_type.elem_type:
                        kinds[name] = inferred.tensor_type.elem_type
                    self._derive(name, _sizes_of(inferred))

    def _constant(self, name: str) -> TensorProto | None:
        """The numbers of a small constant of the file."""
        tensor = self.file.tensors.get(name)
        return tensor if tensor is not None and _is_small(tensor) else None

    def _sizes(self, name: str) -> tuple[int, ...] | None:
        return self.operand(name).sizes if name else None

    def _derive(self, name: str, sizes: tuple[int, ...] | None) -> None:
        """Gives a value sizes if the file states none."""
        if sizes is not None and self._sizes(name) is None and name:
            self._known[name] = Operand(sizes, self.operand(name).item)
            self.unknown.discard(name)

    def _at_sizes(self, shape: tuple[int | str, ...]) -> tuple[int, ...] | None:
        """A shape with the symbols bound; None where they do not allow it."""
        if shape not in self._bound:
            try:
                self._bound[shape] = at_sizes([*shape], self.file.manifest.symbols, self.sizes)
            except ValueError:
                self._bound[shape] = None
        return self._bound[shape]

    def of_node(self, node: NodeProto, segment: Segment) -> tuple[list[Operand | None], list[Operand | None]]:
        """The operands of a node of a segment, and what it makes."""
        of = self.reader(segment)
        given, made = ([of(name) if name else None for name in some] for some in (node.input, node.output))
        return given, made

    def of_segment(self, segment: Segment) -> dict[str, Operand]:
        """Maps each name in a segment's body to the operands of all that its nodes read or make."""
        of = self.reader(segment)
        names = dict.fromkeys(name for node in segment.formal.nodes for name in (*reads(node), *node.output) if name)
        return {name: of(name) for name in names}

    def reader(self, segment: Segment) -> Callable[[str], Operand]:
        """What gives the operand of a name in a segment's body."""
        names, fixed = self.names(segment), self.fixed(segment)
        suffix = f".{parse(segment.task).microbatch}" if segment.task else ""

        def of(name: str) -> Operand:
            one = self.operand(names.get(name, name + suffix))
            return replace(one, constant=True) if name in fixed else one

        return of

    def fixed(self, segment: Segment) -> frozenset[str]:
        """The initializers of a segment's body."""
        if (known := self._fixed.get(id(segment.formal))) is None:
            known = self._fixed[id(segment.formal)] = frozenset(segment.formal.initializers)
        return known

    def names(self, segment: Segment) -> Mapping[str, str]:
        """Maps each name in a segment's body to the name in the program; what is read of the file as it is stays as it is."""
        if (known := self._names.get(id(segment))) is not None:
            return known
        names = dict([*segment.operands, *segment.output_pairs])
        names.update((name, name) for name in segment.formal.initializers)
        names.update((name, name) for node in segment.formal.nodes for name in reads(node) if name in self.file.tensors)
        self._names[id(segment)] = names
        return names


def _is_small(tensor: TensorProto) -> bool:
    few = math.prod(tensor.dims) <= _MOST_NUMBERS and not tensor.external_data
    return few and tensor.data_type in _INTEGERS


def _type(text: str, sizes: Sequence[int] | None) -> TypeProto:
    """A type with sizes."""
    dtype = dense(text)
    return type_proto(text) if dtype is None else helper.make_tensor_type_proto(dtype.code, sizes)


def _inferred(
    node: NodeProto,
    types: Sequence[TypeProto],
    data: Sequence[TensorProto | None],
    opsets: Sequence[OperatorSetIdProto],
) -> list[TypeProto]:
    """Returns the types of a node's results as onnx infers them, without sizes that it does not know; nothing where it fails."""
    if node.op_type == "MatMulNBits":  # onnx has no schema of it
        sizes = _sizes_of(types[0])
        kind = types[0].tensor_type.elem_type
        return [helper.make_tensor_type_proto(kind, sizes and (*sizes[:-1], integer_of(node, "N", 1)))]
    version = next((one.version for one in opsets if one.domain == node.domain), 0)
    if not defs.has(node.op_type, version, node.domain) or graph_bodies(node):
        return []
    try:
        inferred = shape_inference.infer_node_outputs(
            defs.get_schema(node.op_type, version, node.domain),
            node,
            dict(zip(node.input, types, strict=True)),
            {name: one for name, one in zip(node.input, data, strict=True) if one is not None},
            opset_imports=[*opsets],
        )
    except (shape_inference.InferenceError, ValidationError):
        return []
    return [inferred.get(name, TypeProto()) for name in node.output]


def _sizes_of(of: TypeProto) -> tuple[int, ...] | None:
    """Returns the sizes in a type, None if one is missing."""
    dims = of.tensor_type.shape.dim
    known = of.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims)
    return tuple(dim.dim_value for dim in dims) if known else None


def _numbers(
    node: NodeProto, sizes: Sequence[tuple[int, ...] | None], data: Sequence[TensorProto | None]
) -> Sequence[TensorProto]:
    """Returns the numbers of a node's results where they follow from sizes or from the numbers of its operands; else nothing."""
    if node.op_type == "Shape" and sizes[0] is not None:
        ends = slice(integer_of(node, "start", 0), integer_of(node, "end", len(sizes[0])))
        return [numpy_helper.from_array(np.array(sizes[0][ends], np.int64))]
    texts = [one.SerializeToString() for one in data if one is not None]
    if node.domain or graph_bodies(node) or not 0 < len(texts) == len(data):
        return []
    plain = helper.make_node(
        node.op_type, [f"x{k}" for k in range(len(texts))], [f"y{k}" for k in range(len(node.output))]
    )
    plain.attribute.extend(node.attribute)
    return _computed(plain.SerializeToString(), tuple(texts))


@cache
def _computed(text: bytes, inputs: tuple[bytes, ...]) -> Sequence[TensorProto]:
    """Returns the results of a node as its reference computes them; none if one of them is large or has no whole numbers."""
    from onnx.reference import ReferenceEvaluator

    node = NodeProto.FromString(text)
    arrays = [numpy_helper.to_array(TensorProto.FromString(one)) for one in inputs]
    results = ReferenceEvaluator(node).run(None, dict(zip(node.input, arrays, strict=True)))
    tensors = [numpy_helper.from_array(np.asarray(one)) for one in results]
    return tensors if all(map(_is_small, tensors)) else []
