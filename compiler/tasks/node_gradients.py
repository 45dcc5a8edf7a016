"""The gradient of one node on its ranks: its local form is differentiated, and the backward ops are appended to the ranks' programs.

forward    %h = MatMul(%x, %w)
backward   %x.grad = MatMul(%h.grad, Transpose(%w)), %w.grad = MatMul(Transpose(%x), %h.grad)

What is made on the way begins with the name of the node's output (`%h.grad.Transpose`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir
from partc.compiler.autodiff.engine import Backward as Found
from partc.compiler.autodiff.engine import RowGradient, differentiate_nodes
from partc.compiler.autodiff.scope import Scope
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.graph import bodies, captured
from partc.compiler.ir.local_form import LocalForm
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import ComputeOp, with_names
from partc.compiler.ir.sharded import Group, ShardedValue
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.kept import operand_name
from partc.compiler.ops.registry import is_differentiable
from partc.compiler.ops.rule import OWN
from partc.compiler.sharding.operands import input_layout_of, output_layout_of, replicated_on
from partc.compiler.tasks.cotangent_names import first_free
from partc.compiler.tasks.duals import typed
from partc.compiler.tasks.local_forms import renamed


@dataclass(frozen=True)
class _Names:
    """The names of what a node's backward ops make: `constants` among all that are `listed`, and the `new` ones of those not free."""

    new: Mapping[str, str]
    constants: set[str]
    listed: set[str]

    def of(self, name: str) -> str:
        """The name under which it is written."""
        return self.new.get(name, name)

    def op(self, node: ir.Node, source: ir.Node) -> ComputeOp:
        """A node under these names."""
        inner = {
            value.name: self.new[value.name]
            for body in bodies(node)
            for value in captured(body)
            if value.name and value.name in self.new
        }
        return ComputeOp(with_names(node, self.new), source, inner)


class NodeGradients:
    """Finds the gradients of nodes and writes them by `comm`, whose builders hold the forward pass."""

    def __init__(self, program: Program, comm: CommLowering) -> None:
        assert program.training is not None
        self.program, self.comm = program, comm
        self.builders, self.values, self.names = comm.builders, comm.values, comm.values.names
        self.known = {name: info.facts for name, info in program.symbols.items()}
        self.changing = {*program.training.parameters, *program.training.statistics}
        self.unlisted = self.builders.unlisted()

    def find(
        self,
        instance: NodeOnGroup,
        form: LocalForm,
        dys: Mapping[str, str],
        wanted: set[str],
        by_rows: Collection[str] = (),
    ) -> Found:
        """The gradient of a node's local form: of the cotangents `dys` of its outputs those of the `wanted` operands.

        Those of the tables `by_rows` are given as rows.
        """
        node, values = instance.node, [*self._operands(instance), *self._made(instance, form)]
        around = {old: new for op in form.ops for old, new in op.captured.items()}
        forward = [op.node for op in form.ops]
        if node.domain == OWN and is_differentiable(node):
            names = [operand_name(self.comm, instance, k) for k in range(len(node.inputs))]
            made = [self.names[output_layout_of(self.program, instance, k)] for k in range(len(node.outputs))]
            whole = [renamed(node, names, made)]
            found = differentiate_nodes(whole, dys, sorted(wanted), values=values, scope=self._scope())
            return replace(found, forward=forward)
        differentiated = partial(differentiate_nodes, forward, dys, sorted(wanted), around=around, by_rows=by_rows)
        if form.ends:
            # Shapes follow from constants, so those of a rank are shown; gradients must not.
            constants = [{**form.fixed, **end} for end in form.ends]
            first, last = (differentiated(values=values, constants=one, scope=self._scope()) for one in constants)
            if first.is_like(last):
                return first
        return differentiated(values=[*values, *form.unknown], constants=form.fixed, scope=self._scope())

    def _operands(self, instance: NodeOnGroup) -> list[ir.Value]:
        """What the node and its bodies read, as it is on the group; constants are shown where nothing changes them."""
        program, node = self.program, instance.node
        operands: list[tuple[ShardedValue, str]] = [
            (input_layout_of(program, instance, k), operand_name(self.comm, instance, k))
            for k, value in enumerate(node.inputs)
            if value is not None
        ]
        inner = [replicated_on(one, instance.group) for one in program.around[node]]
        operands += [(version, self.names[version]) for version in inner]
        return [self._operand(version, name) for version, name in operands]

    def _operand(self, version: ShardedValue, name: str) -> ir.Value:
        value = version.value
        tensor = ir.convenience.get_const_tensor(value) if value not in self.changing else None
        constant = tensor if version.layout.is_replicated and name == self.names[version] else None
        known = self.values.local_shape(version)
        dims = known if known is not None else self.values.local_value(version).shape
        shape = None if dims is None else ir.Shape(dims)
        return ir.Value(name=name, type=value.type, shape=shape, const_value=constant)

    def _made(self, instance: NodeOnGroup, form: LocalForm) -> list[ir.Value]:
        """The outputs of a node as it makes them on its group."""
        found: list[ir.Value] = []
        for name, (value, shape) in form.types.items():
            own_shape = value not in instance.node.outputs or _made_whole(self.program, instance, value)
            known = ir.Shape(shape) if shape is not None else value.shape if own_shape else None
            found.append(ir.Value(name=name, type=value.type, shape=known))
        return found

    def _scope(self) -> Scope:
        return Scope(reserved=self.builders.reserved, known=self.known)

    def write(
        self,
        instance: NodeOnGroup,
        found: Sequence[tuple[LocalForm, Group, Found]],
        spellings: Mapping[str, Sequence[str]],
    ) -> dict[str, str]:
        """Writes the gradients found for a node on all its ranks; by input the name of its cotangent, of the `spellings` a free one."""
        made: dict[str, str] = {}
        named = self._named(instance, found, spellings)
        for (form, ranks, one), names in zip(found, named, strict=True):
            self._write(instance.node, form, ranks, one, names)
            made |= {name: names.of(dx) for name, dx in _given(one).items()}
        return made

    def _write(self, node: ir.Node, form: LocalForm, ranks: Group, found: Found, names: _Names) -> None:
        """Writes the backward ops of one form, and extends its forward ops by the values that these read."""
        forward = [
            op if new is op.node or _same(new, op.node) else replace(op, node=new)
            for op, new in zip(form.ops, found.forward, strict=True)
        ]
        listed = names.listed | _added(form, forward)
        types = {
            names.of(name): typed(self.values, self.program.symbols, value)
            for name, value in found.scope.values.items()
            if name in listed
        }
        constants = {names.of(name): one for name, one in found.constants.items() if name in names.constants}
        early = [names.op(one, node) for one in found.early]
        self.comm.append(ranks, *(names.op(one, node) for one in found.nodes))
        for builder in self.builders.of(ranks):
            builder.replace(form.ops, forward, early)
            builder.constants |= constants
            builder.types |= {name: one for name, one in types.items() if name not in builder.types}

    def _named(
        self,
        instance: NodeOnGroup,
        found: Sequence[tuple[LocalForm, Group, Found]],
        spellings: Mapping[str, Sequence[str]],
    ) -> list[_Names]:
        """The names of what each form makes; a cotangent has one name in all of them."""
        everywhere = found[0][1] if len(found) == 1 else tuple(rank for _, ranks, _ in found for rank in ranks)
        early = {out.name or "" for _, _, one in found for node in one.early for out in node.outputs}
        outputs = {out.name or "" for _, _, one in found for node in one.nodes for out in node.outputs} - early
        constants = {name for form, _, one in found for name in one.constants if name not in form.constants}
        new = {name: self.builders.derived(f"{name}.primal") for name in sorted(early & self.unlisted)}
        cotangents: list[dict[str, str]] = [{} for _ in found]
        for operand, names in spellings.items():
            own = [(_given(one).get(operand, ""), some) for (_, _, one), some in zip(found, cotangents, strict=True)]
            nameless = [(dx, some) for dx, some in own if dx in outputs and dx not in some]
            if nameless:
                name = first_free(self.builders, everywhere, names)
                for dx, some in nameless:
                    some[dx] = name
        helpers = outputs.difference(*cotangents) if len(found) == 1 else outputs
        new |= self._renamed(instance, everywhere, sorted(helpers | constants))
        return [_Names({**new, **own}, constants, early | outputs | constants) for own in cotangents]

    def _renamed(self, instance: NodeOnGroup, ranks: Group, names: Sequence[str]) -> dict[str, str]:
        """New names for those that some rank has already: with the node's path, and where that is taken with its group."""
        found: dict[str, str] = {}
        for name in names:
            if not self.builders.is_free(ranks, name):
                other = f"{name}.{self.program.paths[instance.node]}"
                if not self.builders.is_free(ranks, other):
                    other = f"{other}@{'-'.join(map(str, instance.group))}"
                found[name] = self.builders.free(ranks, other)
        return found


def row_keys(operand: str) -> RowGradient:
    """What stands for the ids and the rows of a table's gradient, among names of operands."""
    return RowGradient(f"{operand} ids", f"{operand} rows")


def _given(found: Found) -> dict[str, str]:
    """By operand the name of its cotangent; of a gradient by rows there are two, by its `row_keys`."""
    given = dict(found.gradients)
    for operand, one in found.by_rows.items():
        keys = row_keys(operand)
        given |= {keys.ids: one.ids, keys.rows: one.rows}
    return given


def _made_whole(program: Program, instance: NodeOnGroup, value: ir.Value) -> bool:
    """Whether a node makes an output whole on every rank of its group."""
    return output_layout_of(program, instance, instance.node.outputs.index(value)).layout.is_replicated


def _same(one: ir.Node, other: ir.Node) -> bool:
    """Whether two nodes have the same outputs."""
    return [value.name for value in one.outputs] == [value.name for value in other.outputs]


def _added(local: LocalForm, forward: Sequence[ComputeOp]) -> set[str]:
    """The additional outputs of forward nodes that the backward pass reads."""
    before = {value.name for op in local.ops for value in op.node.outputs}
    return {value.name or "" for op in forward for value in op.node.outputs} - before
