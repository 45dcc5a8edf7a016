"""The gradient of one node on its ranks: its local form is differentiated, and the backward ops are appended to the ranks' programs.

forward    %h = MatMul(%x, %w)
backward   %x.grad = MatMul(%h.grad, Transpose(%w)), %w.grad = MatMul(Transpose(%x), %h.grad)

The names of intermediate values begin with the cotangent of the node's output (`%h.grad.Transpose`).

Local forms that are equal except for the handles of their values, such as those of equal layers: their gradients are computed once.

In a gradient that is kept, places stand for handles, in the order in which the key meets them:

    h = MatMul(x, w)    <2> = MatMul(<0>, <1>)    <0>.grad = MatMul(<2>.grad, <2>.grad.Transpose)

The law: the key has all that `differentiate_nodes` reads of a form and of what it is asked; names it reads only to make others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import onnx_ir as ir
from partc.compiler.autodiff.builder import NoGradient
from partc.compiler.autodiff.engine import Backward as Found
from partc.compiler.autodiff.engine import RowGradient, differentiate_nodes
from partc.compiler.autodiff.scope import Scope
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.computed import is_absent
from partc.compiler.ir.graph import name_of, operand_name
from partc.compiler.ir.local_form import LocalForm, over_values
from partc.compiler.ir.program import Targeted
from partc.compiler.ir.programs import Compute, Value
from partc.compiler.ir.sharded import Group, Ranks, ShardedValue, facts_of, ranks_of
from partc.compiler.ir.value_info import Array, Shape
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.job import Placed
from partc.compiler.lower.masked_replicas import operand, operand_as
from partc.compiler.ops.registry import has_gradient_rule
from partc.compiler.ops.rule import OWN
from partc.compiler.sharding.values.operands import input_layout_of, output_layout_of, replicated_on
from partc.compiler.tasks.duals import typed
from partc.compiler.tasks.local_forms import renamed
from partc.runtime.spellings import first_free


@dataclass(frozen=True)
class NodeGradient:
    """The gradient of a node in one of its local forms, on the form's ranks, with `places` in place of handles.

    `values`: maps places to values that exist already.
    """

    form: LocalForm
    ranks: Group
    backward: Found
    values: Mapping[str, Value]
    places: Places

    @cached_property
    def cotangent_places(self) -> dict[str, str]:
        """Maps each operand's handle to the place of its cotangent; a gradient by rows has two places, by its `row_keys`."""
        handles = self.places.handles
        given = {handles[name]: dx for name, dx in self.backward.gradients.items()}
        for name, one in self.backward.by_rows.items():
            keys = row_keys(handles[name])
            given |= {keys.ids: one.ids, keys.rows: one.rows}
        return given

    @cached_property
    def backward_places(self) -> set[str]:
        """The places of the backward nodes' results."""
        return {operand_name(out) for node in self.backward.nodes for out in node.outputs}

    @cached_property
    def constants(self) -> dict[str, Array]:
        """The constants that the forward form does not have."""
        known = {self.places[name] for name in self.form.constants}
        return {name: one for name, one in self.backward.constants.items() if name not in known}


class NodeGradients:
    """Finds the gradients of nodes and writes them by `comm`, whose job has the forward pass."""

    def __init__(self, program: Targeted, comm: CommLowering) -> None:
        assert program.training is not None
        self.program, self.comm = program, comm
        self.job, self.values, self.at = comm.job, comm.values, comm.values.at
        self.known = {name: info.facts for name, info in program.symbols.items()}
        self.changing = {*program.training.parameters, *program.training.statistics}
        self.shapes: dict[Value, Value] = {}
        """Maps each value of the forward pass to its shape, if a gradient has requested it."""
        self._found: dict[Hashable, Found] = {}
        """Maps keys to the gradients of equal forms."""
        self._typed: dict[ir.Value, tuple[ir.Value, Shape | None]] = {}
        self._more: dict[tuple[Compute, int], Value] = {}
        """Maps forward ops and output numbers to outputs that gradients have requested."""

    def find(
        self,
        instance: NodeOnGroup,
        form: LocalForm,
        ranks: Group,
        dys: Mapping[Value, Value],
        wanted: Collection[Value],
        by_rows: Collection[Value] = (),
    ) -> NodeGradient:
        """Returns the gradient of a node's local form: the cotangents of the `wanted` operands from the cotangents `dys` of its outputs.

        Those of the tables `by_rows` are expressed as rows.
        """
        node, values = instance.node, [*self._operands(instance, form), *self._made(instance, form)]
        there, seeds = dict(form.values), dict[str, str]()
        for out, dy in dys.items():
            handle = str(dy)
            if there.get(handle) is not dy:
                handle = first_free(handle, there.__contains__)
            there[handle], seeds[form.handle(out)] = dy, handle
        nodes, own = form.nodes, node.domain == OWN and has_gradient_rule(node)
        if own:
            operands = [operand(self.comm, instance, k) for k in range(len(node.inputs))]
            nodes = [renamed(node, ["" if one is None else form.handle(one) for one in operands], [*form.outputs])]
        asked = Requested(
            nodes,
            values,
            [] if own else form.unknown,
            {} if own else form.fixed,
            [] if own else [{**form.fixed, **end} for end in form.ends],
            seeds,
            sorted(map(form.handle, wanted)),
            [*map(form.handle, by_rows)],
        )
        places = Places()
        key = asked.key(places)
        if key is None:
            places = Places({name: name for name in (*there, *form.inner)})
            backward = self._differentiated(asked, {name: one for name, one in form.captured.items() if name != one})
        else:
            if key not in self._found:
                try:
                    self._found[key] = self._differentiated(asked.over(places))
                except NoGradient as error:
                    raise NoGradient(places.text(str(error))) from None
            backward = self._found[key]
        if own:
            backward = replace(backward, forward=[*form.nodes])
        return NodeGradient(form, ranks, backward, {places[name]: one for name, one in there.items()}, places)

    def _differentiated(self, requested: Requested, around: Mapping[str, str] | None = None) -> Found:
        """Returns the requested gradient of some nodes; `around`: maps the outer names in their bodies to handles."""
        differentiated = partial(
            differentiate_nodes,
            requested.nodes,
            requested.seeds,
            requested.outputs,
            around=around,
            by_rows=requested.by_rows,
        )
        if requested.ends:
            # Shapes follow from constants, so those of a rank are shown; gradients must not.
            first, last = (
                differentiated(values=requested.values, constants=one, scope=self._scope()) for one in requested.ends
            )
            if first.is_like(last):
                return first
        return differentiated(
            values=[*requested.values, *requested.unknown], constants=requested.constants, scope=self._scope()
        )

    def _operands(self, instance: NodeOnGroup, form: LocalForm) -> list[ir.Value]:
        """Returns the operands of the node and its bodies with their local types; constants have their numbers unless these change."""
        program, node = self.program, instance.node
        read = [(k, input_layout_of(program, instance, k)) for k, value in enumerate(node.inputs) if value is not None]
        operands = [(version, operand_as(self.comm, instance, k, version)) for k, version in read]
        inner = [replicated_on(one, instance.group) for one in program.around[node]]
        operands += [(version, self.at[version]) for version in inner]
        return [self._operand(version, one, form.handle(one)) for version, one in operands]

    def _operand(self, version: ShardedValue, one: Value, handle: str) -> ir.Value:
        value = version.value
        tensor = ir.convenience.get_const_tensor(value) if value not in self.changing else None
        constant = tensor if version.layout.is_replicated and one is self.at[version] else None
        known = self.values.local_shape(version)
        dims = known if known is not None else self.values.local_value(version).shape
        shape = None if dims is None else ir.Shape(dims)
        return ir.Value(name=handle, type=value.type, shape=shape, const_value=constant)

    def _made(self, instance: NodeOnGroup, form: LocalForm) -> list[ir.Value]:
        """Returns the outputs of a node with their local types on its group."""
        outputs: list[ir.Value] = []
        for k in (k for k, out in enumerate(instance.node.outputs) if out.name):
            version = output_layout_of(self.program, instance, k)
            value, shape = self.values.local_value(version), self.values.local_shape(version)
            own_shape = value is not version.value or version.layout.is_replicated
            known = ir.Shape(shape) if shape is not None else value.shape if own_shape else None
            outputs.append(ir.Value(name=form.handle(self.at[version]), type=value.type, shape=known))
        return outputs

    def _scope(self) -> Scope:
        return Scope(reserved=self.job.reserved, known=self.known)

    def write(
        self, instance: NodeOnGroup, gradients: Sequence[NodeGradient], spellings: Mapping[str, Sequence[str]]
    ) -> dict[str, Value]:
        """Writes the gradients found for a node on all its ranks; maps each operand's handle to its cotangent.

        New values are named by one of the `spellings`. A cotangent is one value in all forms.
        """
        everywhere = 0
        for gradient in gradients:
            everywhere |= ranks_of(gradient.ranks)
        cotangents: list[dict[str, Value]] = [{} for _ in gradients]
        for name, hints in spellings.items():
            own = [
                (one.cotangent_places.get(name, ""), one, some) for one, some in zip(gradients, cotangents, strict=True)
            ]
            nameless = [(dx, some) for dx, one, some in own if dx in one.backward_places and dx not in some]
            if nameless:
                dx_value = self.job.value(everywhere, *hints)
                for dx, some in nameless:
                    some[dx] = dx_value
        made: dict[str, Value] = {}
        for gradient, some in zip(gradients, cotangents, strict=True):
            values = self._write(instance, gradient, some)
            made |= {name: values[dx] for name, dx in gradient.cotangent_places.items()}
        return made

    def _write(
        self, instance: NodeOnGroup, gradient: NodeGradient, cotangents: Mapping[str, Value]
    ) -> dict[str, Value]:
        """Writes the backward ops of one form, and adds to its forward ops the outputs that these read; maps handles to all values."""
        form, backward, ranks = gradient.form, gradient.backward, ranks_of(gradient.ranks)
        path, group = self.program.paths[instance.node], facts_of(instance.group).text
        values = {**gradient.values, **cotangents}
        texts = {
            gradient.places.text(name): name
            for name in (*gradient.backward_places, *gradient.constants)
            if name not in cotangents
        }
        for text in sorted(texts):
            values[texts[text]] = self.job.value(ranks, text, f"{text}.{path}", f"{text}.{path}@{group}")
        forward = [
            self._extended(op, node, ranks, values, gradient.places)
            for op, node in zip(form.ops, backward.forward, strict=True)
        ]
        tail = self._early(instance.node, gradient, ranks, values)
        for name, array in gradient.constants.items():
            self.job.constant(ranks, values[name], array)
        for k, (before, after) in enumerate(zip(form.ops, forward, strict=True)):
            rest = tail if k == len(form.ops) - 1 else []
            if after is not before or rest:
                self.job.replace(ranks, before, [(after, ranks), *rest])
        self.comm.append(ranks, *over_values(backward.nodes, instance.node, values))
        known = {*[gradient.places[name] for name in form.inner], *gradient.values}
        for name, value in backward.scope.values.items():
            if name in values and name not in known and ranks & ~self.job.listed.ranks(values[name]):
                if value not in self._typed:
                    self._typed[value] = typed(self.values, self.program.symbols, value)
                self.job.declare(ranks, values[name], *self._typed[value])
        return values

    def _extended(self, op: Compute, node: ir.Node, ranks: Ranks, values: dict[str, Value], places: Places) -> Compute:
        """Returns a forward op with the outputs of `node`; additional outputs get a place in `values`."""
        if [bool(value.name) for value in node.outputs] == [one is not None for one in op.outputs]:
            return op
        for k, out in enumerate(node.outputs):
            if out.name and out.name not in values:
                if (op, k) not in self._more:
                    self._more[op, k] = self.job.value(ranks, places.text(out.name))
                self.job.extend(ranks, self._more[op, k])
                values[out.name] = self._more[op, k]
        (found,) = over_values([node], op.source, {**values, **op.captured})
        return replace(found, captured=op.captured, label=op.label, task=op.task, target=op.target)

    def _early(self, source: ir.Node, gradient: NodeGradient, ranks: Ranks, values: dict[str, Value]) -> list[Placed]:
        """Writes the shapes of values of the forward pass on ranks that do not have them yet; all get a place in `values`."""
        tail: list[Placed] = []
        for node in gradient.backward.early:
            name = name_of(node.outputs[0])
            assert node.inputs[0] is not None
            given = values[name_of(node.inputs[0])]
            if given not in self.shapes:
                self.shapes[given] = self.job.value(
                    ranks, *[gradient.places.text(text) for text in (name, f"{name}.primal")]
                )
            made = values[name] = self.shapes[given]
            self.job.extend(ranks, made)
            if missing := ranks & ~self.job.listed.ranks(made):
                tail += [(op, missing) for op in over_values([node], source, values)]
        return tail


def row_keys(operand: str) -> RowGradient:
    """Returns the placeholders for the ids and the rows of a table's gradient, among handles of operands."""
    return RowGradient(f"{operand} ids", f"{operand} rows")


_FEW = 64
_PLACE = re.compile(r"<\d+>")
_WITHOUT_BODIES = frozenset(
    ir.AttributeType[name] for name in ("INT", "INTS", "FLOAT", "FLOATS", "STRING", "STRINGS", "TENSOR")
)


class Places(dict[str, str]):
    """Maps each handle to its place."""

    def __missing__(self, handle: str) -> str:
        place = self[handle] = f"<{len(self)}>" if handle else ""
        return place

    @cached_property
    def handles(self) -> dict[str, str]:
        """Maps each place to its handle."""
        return {place: handle for handle, place in self.items()}

    def text(self, name: str) -> str:
        """The name over handles that one over places stands for."""
        return _PLACE.sub(lambda place: self.handles.get(place[0], place[0]), name)


@dataclass(frozen=True)
class Requested:
    """What is asked of the gradient of some nodes, by handles: of the `seeds`, cotangents by output, those of what is `outputs`.

    `constants`: those that are the same on all ranks; `ends`: all of them on the first and the last rank, where some differ, which
    `unknown` shows as values. `by_rows`: the tables whose gradients are given as rows.
    """

    nodes: Sequence[ir.Node]
    values: Sequence[ir.Value]
    unknown: Sequence[ir.Value]
    constants: Mapping[str, Array]
    ends: Sequence[Mapping[str, Array]]
    seeds: Mapping[str, str]
    outputs: Sequence[str]
    by_rows: Sequence[str]

    def key(self, places: Places) -> Hashable | None:
        """Equal for what is alike; None where a node has a body. Fills in `places`."""
        key: list[Hashable] = []
        for value in (*self.values, *self.unknown):
            key += (places[name_of(value)], *_kind(value, value.const_value))
        key += [len(self.values), len(self.constants), len(self.ends)]
        for name, array in [pair for some in (self.constants, *self.ends) for pair in some.items()]:
            key += (places[name], array.dtype.str, array.shape, array.tobytes())
        for node in self.nodes:
            key += (node.op_type, node.domain, node.version, len(node.inputs))
            for name, attribute in node.attributes.data.items():
                if attribute.type not in _WITHOUT_BODIES:
                    return None
                key += (name, attribute.value)
            for end in (*node.inputs, *node.outputs):
                name = operand_name(end)
                if end is not None and name and name not in places:
                    key += _kind(end, ir.convenience.get_const_tensor(end))
                key.append(places[name])
        key += [places[name] for pair in self.seeds.items() for name in pair]
        key.append(len(self.seeds))
        key += [places[name] for name in self.outputs]
        key.append(len(self.outputs))
        key += [places[name] for name in self.by_rows]
        return tuple(key)

    def over(self, places: Places) -> Requested:
        """The same over places."""
        return Requested(
            [_node(node, places) for node in self.nodes],
            _values(self.values, places),
            _values(self.unknown, places),
            {places[name]: array for name, array in self.constants.items()},
            [{places[name]: array for name, array in some.items()} for some in self.ends],
            {places[out]: places[dy] for out, dy in self.seeds.items()},
            [places[name] for name in self.outputs],
            [places[name] for name in self.by_rows],
        )


def _kind(value: ir.Value, constant: ir.TensorProtocol | None) -> tuple[Hashable, ...]:
    """What is read of a value; a constant of many elements, or of texts, is itself alone."""
    kind: tuple[Any, ...] = (None if value.shape is None else value.shape.dims, value.type)
    if isinstance(value.type, ir.TensorType):  # by its parts, since a type is hashed by its text
        kind = (kind[0], "tensor", value.type.dtype)
    if constant is None:
        return kind
    dims: Sequence[Any] = constant.shape.dims
    few = math.prod(dims) <= _FEW and constant.dtype != ir.DataType.STRING and not is_absent(constant)
    return *kind, constant.dtype, dims, constant.tobytes() if few else constant


def _node(node: ir.Node, places: Places) -> ir.Node:
    return ir.Node(
        node.domain,
        node.op_type,
        [None if one is None else _value(one, places, ir.convenience.get_const_tensor(one)) for one in node.inputs],
        list(node.attributes.values()),
        outputs=[_value(one, places, None) for one in node.outputs],
        overload=node.overload,
        version=node.version,
        metadata_props=dict(node.metadata_props),
    )


def _values(values: Iterable[ir.Value], places: Places) -> list[ir.Value]:
    return [_value(one, places, one.const_value) for one in values]


def _value(value: ir.Value, places: Places, constant: ir.TensorProtocol | None) -> ir.Value:
    return ir.Value(name=places[operand_name(value)], type=value.type, shape=value.shape, const_value=constant)
