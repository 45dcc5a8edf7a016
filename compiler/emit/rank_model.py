"""A rank's program as an ONNX model: nodes of ONNX and of partc's own domains, functions, types, weights and constants."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Hashable, Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnx
import onnx_ir as ir
from partc.compiler.emit.factors import NodeFactors
from partc.compiler.emit.helper_types import HelperTypes, node_proto
from partc.compiler.emit.names import Names
from partc.compiler.emit.rank_text import cut_text
from partc.compiler.emit.weights import Location, Stored, WeightShard, WeightShards
from partc.compiler.ir.constants import RankConstant
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import (
    Body,
    Call,
    Comm,
    Compute,
    Copy,
    Op,
    RankProgram,
    RankTensor,
    TaskKind,
    Value,
    constants_of,
)
from partc.compiler.ir.value_info import Shape
from partc.compiler.training.optimizer_functions import functions as optimizer_functions
from partc.runtime.artifact import format as fmt
from partc.runtime.artifact.format import release
from partc.runtime.artifact.graph.bodies import closed, is_border
from partc.runtime.artifact.graph.onnx_graph import graph_bodies
from partc.runtime.artifact.tasks.calls import rename_captured
from partc.runtime.artifact.tensors.dtypes import BY_CODE
from partc.runtime.spellings import first_free

_OLDEST_IR, _NEWEST_IR = 11, 13
_ORDER = {task: k for k, task in enumerate(TaskKind)}
"""The order of values in memory is that of their types: values of the forward task are adjacent, wherever its ops are."""
_PHASES = {TaskKind.BACKWARD: "backward", TaskKind.UPDATE: "update"}
_BODIES = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


_GRAPH = bytes([onnx.ModelProto.GRAPH_FIELD_NUMBER << 3 | 2])
"""The bytes before the length of a model's graph: the number of the field, and the wire type of a field with a length."""


@dataclass(frozen=True)
class _Frame:
    """The bytes of a rank file except its weights: fields of the model around its graph, and of the graph around the weights."""

    head: bytes
    nodes: bytes
    ports: bytes
    tail: bytes


@dataclass
class RankModels:
    """Makes the rank files of a program; nodes and types that several files have are made once."""

    program: Complete
    names: Names
    shards: WeightShards
    locations: Mapping[Stored, Location]
    helpers: HelperTypes
    _nodes: dict[Compute, onnx.NodeProto] = field(default_factory=dict)
    _weights: dict[tuple[str, Stored], bytes] = field(default_factory=dict)
    """Maps the name and shard of a weight to the tensor as a field of a graph."""
    _frames: dict[Hashable, _Frame] = field(default_factory=dict)
    """Maps a key of ranks with the same ops to the rest of their file."""
    _types: dict[Hashable, onnx.ValueInfoProto] = field(default_factory=dict)
    _alike: dict[Hashable, onnx.ValueInfoProto] = field(default_factory=dict)
    """Maps each shape and kind to the first type made for it, under any name."""
    _kinds: dict[ir.Value, Hashable] = field(default_factory=dict)
    """Maps each value to a key that distinguishes its type from that of another value with the same name and shape."""
    _typed: dict[Value, onnx.ValueInfoProto] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._factors = NodeFactors(self.program.model.graph.opset_imports)
        sharded = any(choice.cut for choice in self.program.choices.values())
        self._says_factors = sharded or self.program.generation is not None
        self._folds = any(fmt.ORDER in node.metadata_props for node in self.program.model.graph)

    def of(self, part: RankProgram) -> bytes:
        """Returns the rank file of a rank's program as bytes: its nodes, in order, with functions, types and weights.

        Ranks whose programs differ only in weights share all other bytes. The fields are in the order of their numbers, as protobuf writes
        them deterministically: nodes of the graph, its weights, its other tensors and its ports.
        """
        key = structure(part)
        if key not in self._frames:
            self._frames[key] = self._frame(part)
        frame = self._frames[key]
        graph = b"".join([frame.nodes, *map(self._weight, part.weights), frame.ports])
        return b"".join([frame.head, _GRAPH, _varint(len(graph)), graph, frame.tail])

    def _weight(self, held: RankTensor) -> bytes:
        """Returns a weight as a serialized field of a graph."""
        name, shard = self.names[held.value], self.shards.of(held)
        key = name, shard.stored
        if key not in self._weights:
            place = None if shard.is_inline else self.locations[shard.stored]
            self._weights[key] = _bytes(onnx.GraphProto(initializer=[_tensor(name, shard, place)]))
        return self._weights[key]

    def _frame(self, part: RankProgram) -> _Frame:
        """Returns a rank file's bytes other than its weights."""
        program, ports = self.program, onnx.GraphProto()
        graph = onnx.GraphProto(name="program")
        self._add_constants(graph.node, ports, part)
        self._factors.types.update(self.helpers.of(part))
        named = {node.name for node in graph.node}
        for step in part.steps:
            graph.node.append(self._node(step))
            _name_apart(graph.node[-1], named)
        self._add_ports(ports, part)
        _close_bodies(graph, ports)
        imports = dict(program.model.opset_imports)
        imports.setdefault("", imports.pop("ai.onnx", 21))
        bodies = part.bodies
        if any(
            isinstance(step, Comm | Copy) for steps in (part.steps, *(body.steps for body in bodies)) for step in steps
        ):
            imports[fmt.DOMAIN] = fmt.DOMAIN_VERSION
        imports |= {fmt.DOMAIN: fmt.DOMAIN_VERSION} if any(node.domain == fmt.DOMAIN for node in graph.node) else {}
        updates = {node.op_type for node in graph.node if node.domain == fmt.OPTIMIZER}
        functions = optimizer_functions(updates, imports[""])
        if functions:
            imports[fmt.OPTIMIZER] = 1
        functions = [*functions, *(self._function(part, body, imports) for body in bodies)]
        if bodies:
            imports[fmt.TASKS] = 1
        head = onnx.ModelProto(
            ir_version=min(_NEWEST_IR, max(_OLDEST_IR, program.model.ir_version or 0)),
            producer_name="partc",
            producer_version=release(),
        )
        tail = onnx.ModelProto(
            functions=functions,
            opset_import=[
                onnx.OperatorSetIdProto(domain=domain, version=number) for domain, number in sorted(imports.items())
            ],
        )
        return _Frame(_bytes(head), _bytes(graph), _bytes(ports), _bytes(tail))

    def _node(self, step: Op) -> onnx.NodeProto:
        match step:
            case Call():
                inputs, outputs, name = self.names.of(step.inputs), self.names.of(step.outputs), step.body.name
                call = onnx.NodeProto(op_type=name, domain=fmt.TASKS, name=step.cell, input=inputs, output=outputs)
                call.attribute.append(_attribute(fmt.MICROBATCH, step.microbatch))
                return call
            case Comm():
                return self._comm(step)
            case Copy():
                return self._copy(step)
        if step not in self._nodes:
            self._nodes[step] = self._compute(step)
        return self._nodes[step]

    def _function(self, part: RankProgram, body: Body, imports: Mapping[str, int]) -> onnx.FunctionProto:
        """Returns the function of a task; constants that are not its operands become nodes in it."""
        names = self.names
        function = onnx.FunctionProto(
            name=body.name,
            domain=fmt.TASKS,
            input=names.of(body.inputs),
            output=names.of(body.outputs),
            attribute=[fmt.MICROBATCH],
            opset_import=[
                onnx.OperatorSetIdProto(domain=domain, version=number) for domain, number in sorted(imports.items())
            ],
        )
        for value in constants_of(body.steps):
            if isinstance(value.constant, np.ndarray) and value not in body.inputs:
                name = names[value]
                constant = onnx.numpy_helper.from_array(value.constant, name)
                function.node.append(onnx.helper.make_node("Constant", [], [name], name, value=constant))
        named = {node.name for node in function.node}
        self._factors.types.update(self.helpers.of(part, body))
        for step in body.steps:
            function.node.append(self._node(step))
            _name_apart(function.node[-1], named)
        every = dict.fromkeys([*body.inputs, *[one for step in body.steps for one in (*step.reads, *step.makes)]])
        function.value_info.extend([self._type(value) for value in every if value.of is not None])
        helpers = self.helpers.of(part, body).items()
        function.value_info.extend(onnx.ValueInfoProto(name=names[value], type=kind) for value, kind in helpers)
        return function

    def _add_ports(self, graph: onnx.GraphProto, part: RankProgram) -> None:
        """Adds the inputs and outputs, the state, and the types of all other values."""
        inputs = [*[held.value for held in part.inputs], *[one.value for one in part.state]]
        graph.input.extend(map(self._type, inputs))
        for port, target in zip(graph.input[len(part.inputs) :], (one.target for one in part.state), strict=True):
            if target:
                port.metadata_props.add(key=fmt.TARGET, value=target)
        graph.input.extend(
            onnx.helper.make_tensor_value_info(self.names[value], onnx.TensorProto.FLOAT, []) for value in part.scalars
        )
        graph.output.extend(map(self._type, part.live_out))
        listed = {*part.live_in, *part.live_out}
        listed.update([value for step in part.steps if isinstance(step, Call) for value in step.outputs])
        by_task = sorted(part.steps, key=lambda step: _ORDER[step.task])
        every = dict.fromkeys([value for step in by_task for value in (*step.reads, *step.makes)])
        graph.value_info.extend([self._type(one) for one in every if one.of is not None and one not in listed])
        helpers = self.helpers.of(part).items()
        graph.value_info.extend(
            [onnx.ValueInfoProto(name=self.names[one], type=kind) for one, kind in helpers if one not in listed]
        )

    def _type(self, value: Value) -> onnx.ValueInfoProto:
        """Returns a value's type; equal types that passes made anew for each rank are shared."""
        if value in self._typed:
            return self._typed[value]
        assert value.of is not None
        name, of, shape = self.names[value], value.of, value.shape
        if of not in self._kinds:
            is_own = of.shape is None or not isinstance(of.type, ir.TensorType)
            self._kinds[of] = (of,) if is_own else (of.dtype, of.doc_string)
        key = name, shape, of if shape is None else self._kinds[of]
        if key not in self._types:
            like = key[1:]
            if like in self._alike:  # a copy costs less than each dim anew
                self._types[key] = onnx.ValueInfoProto()
                self._types[key].CopyFrom(self._alike[like])
                self._types[key].name = name
            else:
                self._types[key] = self._alike[like] = _value_info(of, name, shape)
        self._typed[value] = self._types[key]
        return self._types[key]

    def _add_constants(self, nodes: MutableSequence[onnx.NodeProto], graph: onnx.GraphProto, part: RankProgram) -> None:
        """Adds the constants; a constant that differs by rank becomes a node and a type."""
        for value in constants_of(part.steps, part.live_out):
            name, constant = self.names[value], value.constant
            if isinstance(constant, RankConstant):
                nodes.append(_rank_constant(name, constant))
                code = ir.DataType.from_numpy(constant.dtype).value
                graph.value_info.append(onnx.helper.make_tensor_value_info(name, code, constant.shape))
            elif constant is not None:
                graph.initializer.append(onnx.numpy_helper.from_array(constant, name))

    def _compute(self, step: Compute) -> onnx.NodeProto:
        program, names = self.program, self.names
        outputs = names.of(step.outputs)
        proto = node_proto(step, names.of(step.inputs), outputs)
        _forget_annotations(proto)
        label = names.label(step)
        path = program.paths.get(step.source, label)
        is_own = (
            step.node.op_type == step.source.op_type
        )  # of several nodes that stand for one, each has a name of its own
        proto.name = label or (path if len(outputs) != 1 and is_own else outputs[0] or path)
        if any(name != names[value] for name, value in step.captured.items()):
            for body in graph_bodies(proto):
                rename_captured(body, {name: names[value] for name, value in step.captured.items()})
        placed = program.placement.get(step.source)
        cut = "; ".join(cut_text(program, step.source)) if placed else ""
        factors = self._factors.of(step) if self._says_factors else ""
        node = step.source if is_own else step.node
        order = node.metadata_props.get(fmt.ORDER, "") if self._folds and step.task not in _PHASES else ""
        said = {fmt.RULE: placed.rule if placed else "", fmt.CUT: cut, fmt.FACTORS: factors, fmt.ORDER: order}
        if hop := step.node.metadata_props.get(fmt.HOP):  # a ring proves its blocks itself
            said = {fmt.HOP: hop}
        _add_metadata(proto, {fmt.PATH: path, **{key: text for key, text in said.items() if text}})
        if step.again:
            _add_metadata(proto, {fmt.RECOMPUTED: step.again})
        if step.target:
            _add_metadata(proto, {fmt.TARGET: step.target})
        if step.task in _PHASES:
            _add_metadata(proto, {fmt.PHASE: _PHASES[step.task]})
        return proto

    def _comm(self, step: Comm) -> onnx.NodeProto:
        name = self.names[next(iter((*step.reads, *step.makes)))]
        proto = onnx.NodeProto(
            op_type=step.op_type, domain=fmt.DOMAIN, name=f"{name}.{step.op_type.lower()}.{step.tag}"
        )
        proto.input.extend(self.names.of(step.inputs))
        proto.output.extend(self.names.of(step.outputs))
        for key, value in (*step.attributes.items(), (fmt.TAG, step.tag)):
            proto.attribute.append(_attribute(key, value))
        cell = {fmt.TASK: step.cell} if step.cell else {}
        _add_metadata(
            proto, {fmt.PATH: self.program.path_of(step.value), fmt.CAUSE: step.cause, fmt.BYTES: step.bytes, **cell}
        )
        return proto

    def _copy(self, step: Copy) -> onnx.NodeProto:
        source, made = self.names[step.source], self.names[step.output]
        proto = onnx.NodeProto(op_type=fmt.COPY, domain=fmt.DOMAIN, name=f"{made}.copy", input=[source], output=[made])
        proto.attribute.append(_attribute(fmt.TO, step.target))
        _add_metadata(proto, {fmt.PATH: step.path, fmt.CAUSE: step.cause, fmt.BYTES: step.bytes})
        return proto


def _close_bodies(graph: onnx.GraphProto, ports: onnx.GraphProto) -> None:
    """Makes bodies of the nodes between borders, with the types of the values inside."""
    if not any(map(is_border, graph.node)):
        return
    types = {one.name: one for one in (*ports.value_info, *ports.input, *ports.output, *graph.value_info)}
    nodes, inside = closed(graph.node, types)
    graph.ClearField("node")
    graph.node.extend(nodes)
    kept = [one for one in ports.value_info if one.name not in inside]
    ports.ClearField("value_info")
    ports.value_info.extend(kept)


def structure(part: RankProgram) -> Hashable:
    """A key that is equal for ranks whose files differ only in the bytes of weights."""
    ends = tuple([tuple([held.value for held in some]) for some in (part.inputs, part.weights)])
    kept = tuple([(one.value, one.target) for one in part.state])
    return part.steps, ends, kept, part.scalars, part.live_out


class _Message(Protocol):
    def SerializeToString(self, *, deterministic: bool) -> bytes: ...


def _bytes(message: _Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def _varint(number: int) -> bytes:
    """Encodes a length as protobuf does: seven bits a byte, the lowest first."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _rank_constant(name: str, one: RankConstant) -> onnx.NodeProto:
    node = onnx.NodeProto(op_type=fmt.RANK_CONSTANT, domain=fmt.DOMAIN, name=name, output=[name])
    dtype = ir.DataType.from_numpy(one.dtype).value
    attributes: dict[str, Any] = {fmt.GROUP: one.group, fmt.DTYPE: dtype, fmt.ITEMS: one.items}
    attributes |= {fmt.SHAPE: one.shape} if one.shape else {}
    node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in attributes.items())
    return node


def _name_apart(node: onnx.NodeProto, named: set[str]) -> None:
    """Renames a node after its result if another node of the program has its name, since names in a valid program are unique."""
    if node.name in named:
        node.name = f"{node.name} -> {next(filter(None, node.output), '')}"
    node.name = first_free(node.name, named.__contains__)
    named.add(node.name)


def _forget_annotations(proto: onnx.NodeProto) -> None:
    """Removes the model's annotations from a node: they name devices and values that a rank's program does not have."""
    del proto.device_configurations[:]
    for attribute in proto.attribute:
        for body in (attribute.g, *attribute.graphs) if attribute.type in _BODIES else ():
            for node in body.node:
                _forget_annotations(node)


def _attribute(key: str, value: int | str | tuple[int, ...]) -> onnx.AttributeProto:
    kind = onnx.AttributeProto.INTS if isinstance(value, tuple) else None
    return onnx.helper.make_attribute(key, value, attr_type=kind)


def _add_metadata(proto: onnx.NodeProto, metadata: Mapping[str, str]) -> None:
    for key, value in metadata.items():
        proto.metadata_props.add(key=key, value=value)


def _value_info(value: ir.Value, name: str, shape: Shape | None) -> onnx.ValueInfoProto:
    """Returns a value's type with its local shape; dims whose sizes no symbol gives are left open."""
    if not isinstance(value.type, ir.TensorType | ir.SparseTensorType):
        proto = ir.serde.serialize_value(value)
        proto.name = name
        del proto.metadata_props[:]
        return proto
    proto = onnx.ValueInfoProto(name=name, doc_string=value.doc_string or None)
    tensor = proto.type.tensor_type if isinstance(value.type, ir.TensorType) else proto.type.sparse_tensor_type
    tensor.elem_type = value.type.dtype.value
    if value.shape is not None:
        tensor.shape.SetInParent()
        for size in value.shape.dims if shape is None else shape:
            dim = tensor.shape.dim.add()
            if isinstance(size, int):
                dim.dim_value = size
            elif isinstance(size, str):
                dim.dim_param = size
    return proto


def _tensor(name: str, shard: WeightShard, place: Location | None) -> onnx.TensorProto:
    """Returns a weight's tensor, with its data at `place` in another file, or inline if `place` is None."""
    tensor, entry = shard.tensor, onnx.StringStringEntryProto
    piece = entry(key=fmt.PIECE, value=shard.text)
    if place is None:
        if isinstance(tensor, ir.ExternalTensor):  # a copy of it maps the file for no longer than it reads
            tensor = ir.Tensor(copy.copy(tensor).numpy().copy(), dtype=tensor.dtype)
        proto = ir.serde.serialize_tensor(tensor)
        proto.name = name
        del proto.metadata_props[:]
        proto.doc_string = ""
        proto.metadata_props.append(piece)
        if proto.raw_data:
            digest = hashlib.sha256(proto.raw_data).hexdigest()[:16]
            proto.metadata_props.append(entry(key=fmt.DIGEST, value=digest))
        return proto
    lies = (("location", place.file), ("offset", str(place.offset)), ("length", str(place.length)))
    kept = [] if shard.data is tensor else [entry(key=fmt.STORED, value=BY_CODE[shard.data.dtype.value].name)]
    kept += [entry(key=fmt.SOURCE, value=place.source)] if place.source else []
    return onnx.TensorProto(
        name=name,
        data_type=tensor.dtype.value,
        dims=tensor.shape.numpy(),
        data_location=onnx.TensorProto.EXTERNAL,
        external_data=[entry(key=key, value=text) for key, text in lies],
        metadata_props=[piece, *kept],
    )
