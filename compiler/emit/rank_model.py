"""A rank's program as an ONNX model: nodes of ONNX and of partc's own domains, functions, types, weights and constants."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from partc.compiler.emit.choice_text import cut_text
from partc.compiler.emit.helper_types import HelperTypes
from partc.compiler.emit.weights import Location, Stored, is_inline, shard_of, shard_text, stored
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import (
    CommOp,
    ComputeOp,
    CopyOp,
    LocalTensor,
    RankConstant,
    RankProgram,
    TaskBody,
    TaskCall,
    TaskKind,
    made_names,
    read_names,
)
from partc.compiler.ir.value_info import Shape
from partc.compiler.training.optimizer_functions import functions as optimizer_functions
from partc.runtime.artifact import format as fmt
from partc.runtime.artifact.release import release

_OLDEST_IR, _NEWEST_IR = 11, 13
_PHASES = {TaskKind.BACKWARD: "backward", TaskKind.UPDATE: "update"}
_BODIES = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


@dataclass
class RankModels:
    """The rank files of a program; nodes and types that several of them have are made once."""

    program: Program
    locations: Mapping[Stored, Location]
    helpers: HelperTypes
    _nodes: dict[ComputeOp, onnx.NodeProto] = field(default_factory=dict)
    _types: dict[Hashable, onnx.ValueInfoProto] = field(default_factory=dict)

    def of(self, part: RankProgram) -> onnx.ModelProto:
        """The rank file of a rank's program: its nodes, in order, with functions, types and weights."""
        program = self.program
        graph = onnx.GraphProto(name="program")
        graph.node.extend(_rank_constant(name, one) for name, one in _by_rank(part))
        self._add_nodes(graph, part)
        self._add_ports(graph, part)
        _add_constants(graph, part, self.locations)
        imports = dict(program.model.opset_imports)
        imports.setdefault("", imports.pop("ai.onnx", 21))
        bodies = part.bodies
        if any(
            isinstance(step, CommOp | CopyOp)
            for steps in (part.steps, *(body.steps for body in bodies))
            for step in steps
        ):
            imports[fmt.DOMAIN] = fmt.DOMAIN_VERSION
        imports |= {fmt.DOMAIN: fmt.DOMAIN_VERSION} if any(node.domain == fmt.DOMAIN for node in graph.node) else {}
        computed = (step.node for step in part.steps if isinstance(step, ComputeOp))
        functions = optimizer_functions(
            {node.op_type for node in computed if node.domain == fmt.OPTIMIZER}, imports[""]
        )
        if functions:
            imports[fmt.OPTIMIZER] = 1
        functions = [*functions, *(self._function(part, body, imports) for body in bodies)]
        if bodies:
            imports[fmt.TASKS] = 1
        return onnx.ModelProto(
            functions=functions,
            ir_version=min(_NEWEST_IR, max(_OLDEST_IR, program.model.ir_version or 0)),
            producer_name="partc",
            producer_version=release(),
            graph=graph,
            opset_import=[
                onnx.OperatorSetIdProto(domain=domain, version=number) for domain, number in sorted(imports.items())
            ],
        )

    def _add_nodes(self, graph: onnx.GraphProto, part: RankProgram) -> None:
        """The ops of a rank, each under a name of its own."""
        named = {node.name for node in graph.node}
        for step in part.steps:
            if isinstance(step, TaskCall):
                graph.node.append(_task_call(step))
            elif isinstance(step, CommOp):
                graph.node.append(_comm_node(self.program, step))
            elif isinstance(step, CopyOp):
                graph.node.append(_copy_node(step))
            else:
                if step not in self._nodes:
                    self._nodes[step] = _node(self.program, step)
                graph.node.append(self._nodes[step])
            _name_apart(graph.node[-1], named)

    def _function(self, part: RankProgram, body: TaskBody, imports: Mapping[str, int]) -> onnx.FunctionProto:
        """The function of a task; constants that are no operands of it are nodes there."""
        made = {name for step in body.steps for name in made_names(step)}
        reads = dict.fromkeys(name for step in body.steps for name in read_names(step) if name)
        function = onnx.FunctionProto(
            name=body.name,
            domain=fmt.TASKS,
            input=body.inputs,
            output=body.outputs,
            attribute=[fmt.MICROBATCH],
            opset_import=[
                onnx.OperatorSetIdProto(domain=domain, version=number) for domain, number in sorted(imports.items())
            ],
        )
        for name in reads:
            constant = part.constants.get(name) if name not in made and name not in body.inputs else None
            if isinstance(constant, np.ndarray):
                value = onnx.numpy_helper.from_array(constant, name)
                function.node.append(onnx.helper.make_node("Constant", [], [name], name, value=value))
        named = {node.name for node in function.node}
        for step in body.steps:
            match step:
                case CommOp():
                    function.node.append(_comm_node(self.program, step))
                case CopyOp():
                    function.node.append(_copy_node(step))
                case _:
                    function.node.append(_node(self.program, step))
            _name_apart(function.node[-1], named)
        typed = (name for name, (value, _) in body.types.items() if value.type)
        function.value_info.extend(self._type(body.types, name) for name in typed)
        helpers = self.helpers.of(part, body).items()
        function.value_info.extend(onnx.ValueInfoProto(name=name, type=kind) for name, kind in helpers)
        return function

    def _add_ports(self, graph: onnx.GraphProto, part: RankProgram) -> None:
        """The inputs and outputs, with what is kept from step to step, and the types of all else."""
        inputs = [*(held.name for held in part.inputs), *(one.name for one in part.kept)]
        outputs = [*(held.name for held in part.outputs), *(one.next for one in part.kept if one.next)]
        graph.input.extend(self._type(part.types, name) for name in inputs)
        for port, target in zip(graph.input[len(part.inputs) :], (one.target for one in part.kept), strict=True):
            if target:
                port.metadata_props.add(key=fmt.TARGET, value=target)
        graph.input.extend(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, []) for name in part.scalars
        )
        graph.output.extend(self._type(part.types, name) for name in outputs)
        listed = {*inputs, *outputs, *(held.name for held in part.weights)}
        listed.update(name for step in part.steps if isinstance(step, TaskCall) for name in step.outputs)
        graph.value_info.extend(
            self._type(part.types, name) for name, (value, _) in part.types.items() if name not in listed and value.type
        )
        helpers = self.helpers.of(part).items()
        graph.value_info.extend(
            onnx.ValueInfoProto(name=name, type=kind) for name, kind in helpers if name not in listed
        )

    def _type(self, types: Mapping[str, tuple[ir.Value, Shape | None]], name: str) -> onnx.ValueInfoProto:
        """A value's type; passes make values of one name and type anew for each rank."""
        value, shape = types[name]
        own = value if shape is None or value.shape is None or not isinstance(value.type, ir.TensorType) else None
        key = name, own, value.dtype, shape, value.doc_string
        if key not in self._types:
            self._types[key] = _value_info(value, name, shape)
        return self._types[key]


def _task_call(step: TaskCall) -> onnx.NodeProto:
    proto = onnx.NodeProto(
        op_type=step.body.name, domain=fmt.TASKS, name=step.cell, input=step.inputs, output=step.outputs
    )
    proto.attribute.append(_attribute(fmt.MICROBATCH, step.microbatch))
    return proto


def _add_constants(graph: onnx.GraphProto, part: RankProgram, locations: Mapping[Stored, Location]) -> None:
    """Weights and constants, and the types of those that differ by rank."""
    graph.initializer.extend(_weight(held, locations) for held in part.weights)
    read = {name for step in part.steps for name in read_names(step)} | {held.name for held in part.outputs}
    for name, one in part.constants.items():
        if not isinstance(one, RankConstant) and (name in read or not part.bodies):
            graph.initializer.append(onnx.numpy_helper.from_array(one, name))
    for name, by_rank in _by_rank(part):
        code = ir.DataType.from_numpy(by_rank.dtype).value
        graph.value_info.append(onnx.helper.make_tensor_value_info(name, code, by_rank.shape))


def _by_rank(part: RankProgram) -> Iterator[tuple[str, RankConstant]]:
    return ((name, one) for name, one in part.constants.items() if isinstance(one, RankConstant))


def _rank_constant(name: str, one: RankConstant) -> onnx.NodeProto:
    node = onnx.NodeProto(op_type=fmt.RANK_CONSTANT, domain=fmt.DOMAIN, name=name, output=[name])
    dtype = ir.DataType.from_numpy(one.dtype).value
    attributes: dict[str, Any] = {fmt.GROUP: one.group, fmt.DTYPE: dtype, fmt.ITEMS: one.items}
    attributes |= {fmt.SHAPE: one.shape} if one.shape else {}
    node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in attributes.items())
    return node


def _node(program: Program, step: ComputeOp) -> onnx.NodeProto:
    proto = ir.serde.serialize_node(step.node)
    del proto.metadata_props[:]
    _forget_annotations(proto)
    proto.doc_string = ""
    path = program.paths.get(step.source, step.node.name or "")
    proto.name = proto.name or (path if len(step.node.outputs) != 1 else step.node.outputs[0].name or path)
    if step.captured:
        for attribute in proto.attribute:
            for body in (attribute.g, *attribute.graphs):
                _rename_captured(body, step.captured)
    placed = program.placement.get(step.source)
    cut = "; ".join(cut_text(program, step.source)) if placed else ""
    _add_metadata(
        proto, {fmt.PATH: path, **({fmt.RULE: placed.rule} if placed else {}), **({fmt.CUT: cut} if cut else {})}
    )
    if step.again:
        _add_metadata(proto, {fmt.RECOMPUTED: step.again})
    if step.target:
        _add_metadata(proto, {fmt.TARGET: step.target})
    if step.task in _PHASES:
        _add_metadata(proto, {fmt.PHASE: _PHASES[step.task]})
    return proto


def _name_apart(node: onnx.NodeProto, named: set[str]) -> None:
    """Names a node by what it makes where another one of the program has its name: two of one name are no valid program."""
    if node.name in named:
        node.name = f"{node.name} -> {next(filter(None, node.output), '')}"
    while node.name in named:
        node.name += "'"
    named.add(node.name)


def _forget_annotations(proto: onnx.NodeProto) -> None:
    """A rank's program is not annotated: the model's annotations speak of devices, and of names, that it does not have."""
    del proto.device_configurations[:]
    for attribute in proto.attribute:
        for body in (attribute.g, *attribute.graphs) if attribute.type in _BODIES else ():
            for node in body.node:
                _forget_annotations(node)


def _rename_captured(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """In a body, gives outer values the names that they have on this rank; names that the body defines itself are kept."""
    own = {value.name for value in graph.input} | {out for node in graph.node for out in node.output}
    names = {old: new for old, new in names.items() if old not in own}
    for node in graph.node:
        for k, name in enumerate(node.input):
            node.input[k] = names.get(name, name)
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                _rename_captured(body, names)


def _comm_node(program: Program, step: CommOp) -> onnx.NodeProto:
    name = next(filter(None, (*step.inputs, *step.outputs)))
    proto = onnx.NodeProto(op_type=step.op_type, domain=fmt.DOMAIN, name=f"{name}.{step.op_type.lower()}.{step.tag}")
    proto.input.extend(step.inputs)
    proto.output.extend(step.outputs)
    for key, value in (*step.attributes.items(), (fmt.TAG, step.tag)):
        proto.attribute.append(_attribute(key, value))
    producer = step.value.producer()
    path = program.paths[producer] if producer is not None else step.value.name or ""
    cell = {fmt.TASK: step.cell} if step.cell else {}
    _add_metadata(proto, {fmt.PATH: path, fmt.CAUSE: step.cause, fmt.BYTES: step.bytes, **cell})
    return proto


def _copy_node(step: CopyOp) -> onnx.NodeProto:
    proto = onnx.NodeProto(op_type=fmt.COPY, domain=fmt.DOMAIN, name=f"{step.made}.copy", input=[step.source])
    proto.output.append(step.made)
    proto.attribute.append(_attribute(fmt.TO, step.target))
    _add_metadata(proto, {fmt.PATH: step.path, fmt.CAUSE: step.cause, fmt.BYTES: step.bytes})
    return proto


def _attribute(key: str, value: int | str | tuple[int, ...]) -> onnx.AttributeProto:
    kind = onnx.AttributeProto.INTS if isinstance(value, tuple) else None
    return onnx.helper.make_attribute(key, value, attr_type=kind)


def _add_metadata(proto: onnx.NodeProto, metadata: Mapping[str, str]) -> None:
    proto.metadata_props.extend(onnx.StringStringEntryProto(key=key, value=value) for key, value in metadata.items())


def _value_info(value: ir.Value, name: str, shape: Shape | None) -> onnx.ValueInfoProto:
    """A value's type with its local shape; dims that no symbol tells are left open."""
    proto = ir.serde.serialize_value(value)
    proto.name = name
    del proto.metadata_props[:]
    kind = proto.type.WhichOneof("value") if proto.HasField("type") else None
    if kind not in ("tensor_type", "sparse_tensor_type"):
        return proto
    field = getattr(proto.type, kind).shape
    for k, dim in enumerate(field.dim):
        if shape is not None:
            dim.Clear()
            size = shape[k]
            if isinstance(size, int):
                dim.dim_value = size
            else:
                dim.dim_param = size
        elif dim.HasField("dim_param"):
            dim.ClearField("dim_param")
    return proto


def _weight(held: LocalTensor, locations: Mapping[Stored, Location]) -> onnx.TensorProto:
    tensor = shard_of(held)
    if is_inline(tensor):
        proto = ir.serde.serialize_tensor(
            tensor
            if not isinstance(tensor, ir.ExternalTensor)
            else ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype)
        )
        proto.name = held.name
        del proto.metadata_props[:]
        proto.doc_string = ""
        digest = hashlib.sha256(proto.raw_data).hexdigest()[:16] if proto.raw_data else ""
        for key, text in ((fmt.PIECE, shard_text(held)), *(((fmt.DIGEST, digest),) if digest else ())):
            proto.metadata_props.append(onnx.StringStringEntryProto(key=key, value=text))
        return proto
    place = locations[stored(held)]
    proto = onnx.TensorProto(
        name=held.name,
        data_type=tensor.dtype.value,
        dims=tensor.shape.numpy(),
        data_location=onnx.TensorProto.EXTERNAL,
    )
    for key, text in (("location", place.file), ("offset", str(place.offset)), ("length", str(place.length))):
        proto.external_data.append(onnx.StringStringEntryProto(key=key, value=text))
    proto.metadata_props.append(onnx.StringStringEntryProto(key=fmt.PIECE, value=shard_text(held)))
    return proto
