"""The backward pass, written behind the forward programs: every node's gradient runs where the node runs, on the same shards.

A cotangent has the dual of its primal's layout. Along a mesh axis:

    the node                      its output     the cotangent that comes     its input      the cotangent that it gives
    cut by the axis               cut            cut                          cut            cut
                                  to be summed   whole                        whole          to be summed
    not cut by the axis           whole          whole                        whole          whole

So the local nodes are differentiated as they are (`autodiff/engine.py`), nothing is propagated, and the change of layout or group that
brought a value to a reader is undone by one that brings cotangents back. Terms that reach a value in one layout are added before they
move. What a parameter's readers give is its gradient; `reduce_gradients.py` has it reduced.

    forward    x --> column-parallel MatMul --> row-parallel MatMul --AllReduce--> y
    backward   x.grad <--AllReduce-- MatMul <-- MatMul <-- y.grad
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.engine import Backward as Found
from partc.compiler.autodiff.engine import NoGradient, differentiate_nodes, is_differentiable
from partc.compiler.autodiff.scope import Scope
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.program import ComputeOp, Group, Program, Shape, ShardedValue
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal, on_common_mesh
from partc.compiler.lower.builders import ProgramBuilders, derived
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.kept import operand_name
from partc.compiler.lower.versions import ValueVersions, input_layout_of, output_layout_of, replicated_on
from partc.compiler.lower.written import is_written, write_backward
from partc.compiler.ops.rule import OWN
from partc.compiler.tasks.duals import Passing, dual, typed
from partc.compiler.tasks.localize import Localized, local_shape, local_value, renamed, with_names
from partc.compiler.tasks.reduce_gradients import GradientSums
from partc.compiler.training.gradient_reach import learned_from, stops

Emitted = Mapping[NodeOnGroup, Sequence[tuple[Localized, Group]]]
"""What the forward pass made of every node, and on which ranks."""


def with_cotangents(program: Program) -> tuple[Program, dict[ir.Value, ir.Value]]:
    """The program with a value for the cotangent of everything that has one, and these by their primals; none where nothing trains."""
    if program.training is None or not program.training.part.backward:
        return program, {}
    values = dict(program.values)
    found: dict[ir.Value, ir.Value] = {}
    for value, info in program.values.items():
        if value.name and value.dtype is not None and value.dtype.is_floating_point():
            found[value] = ir.Value(
                name=derived(f"{value.name}.grad", program.own_names), type=value.type, shape=value.shape
            )
            values[found[value]] = info
    return replace(program, values=values), found


class Backward:
    """Writes the backward pass of `program` into the drafts; `sums` then has every parameter's gradient."""

    def __init__(
        self,
        program: Program,
        cotangents: Mapping[ir.Value, ir.Value],
        copies: ValueVersions,
        writer: CommLowering,
        drafts: ProgramBuilders,
        emitted: Emitted,
        sums: GradientSums,
    ) -> None:
        self.program, self.copies, self.writer, self.drafts, self.emitted = program, copies, writer, drafts, emitted
        self.cotangents, self.sums = cotangents, sums
        assert program.training is not None
        self.needed = learned_from(program.reads, program.training)
        self.known = {name: info.facts for name, info in program.symbols.items()}
        self.contributions: dict[ShardedValue, dict[ShardedValue, list[str]]] = {}
        """Per copy that is read, what its readers gave, by the layout in which it lies."""
        self.unlisted = drafts.unlisted()
        self.routes: dict[ShardedValue, list[ShardedValue]] = {}
        """Per home of a value the copies that were made of it."""
        for value, uses in copies.uses.items():
            defs = copies.defs.get(value, [])
            for need in uses:
                source = copies.definition_for(need) if defs else need
                home = next((one for one in defs if copies.canonical.get(one, one) == source), source)
                self.routes.setdefault(home, []).append(need)

    def run(self) -> None:
        """Differentiates every node between the loss and a parameter; CompileError where one has no gradient."""
        self._seed()
        waiting = self._readers()
        for node in reversed(list(self.program.model.graph)):
            for group in reversed(self.program.placement[node].groups):
                self._node(NodeOnGroup(node, group))
            for value in self.program.reads[node]:
                if value in waiting:
                    waiting[value] -= 1
                    if not waiting[value]:
                        self._finish(value)

    def _readers(self) -> dict[ir.Value, int]:
        """Per parameter how many nodes read it."""
        assert self.program.training is not None
        found = {value: 0 for value in self.program.training.parameters if value in self.needed}
        for values in self.program.reads.values():
            for value in values:
                if value in found:
                    found[value] += 1
        return found

    def _seed(self) -> None:
        training = self.program.training
        assert training is not None
        loss = training.loss
        node = loss.producer()
        if node is None or loss not in self.needed:
            raise CompileError(Problem(loss.name or "loss", "no parameter that is learned changes the loss"))
        group = self.program.placement[node].groups[0]
        home = output_layout_of(self.program, NodeOnGroup(node, group), node.outputs.index(loss))
        seed = ShardedValue(self.cotangents[loss], home.group, normal(Layout(home.layout.mesh, home.layout.cuts)))
        assert loss.dtype is not None
        parts = 1 if loss.name in training.summed else training.accumulate
        number = (self._shards() if training.per_rank_mean else 1) / parts
        shape = [dim for dim in self.program.values[loss].shape or () if isinstance(dim, int)]
        name = self.drafts.free(group, "loss.seed")
        for draft in self.drafts.of(group):
            draft.constants[name] = np.full(shape, number, loss.dtype.numpy())
            draft.types[name] = (self.cotangents[loss], tuple(shape))
        here = self.copies.canonical.get(home, home)
        self.routes.setdefault(home, []).append(here)
        self.contributions.setdefault(here, {}).setdefault(seed, []).append(name)

    def _shards(self) -> int:
        """Into how many shards the batch arrives."""
        defs = [home for value in self.program.model.graph.inputs for home in self.copies.defs.get(value, ())]
        return max((home.layout.num_shards(0) for home in defs if home.layout.cuts), default=1)

    def _node(self, instance: NodeOnGroup) -> None:
        node = instance.node
        flows = [value is not None and value in self.needed for value in node.inputs]
        inner = [one for one in self.program.around[node] if one in self.needed]
        if not any(flows) and not inner:
            return
        dys: dict[str, str] = {}
        passing: Passing | None = None
        for k, value in enumerate(node.outputs):
            home = output_layout_of(self.program, instance, k)
            given = self._merged(self.routes.get(home, ())) if value in self.cotangents else {}
            if given:
                layout, passing = self._wanted(instance, k, given)
                target = ShardedValue(self.cotangents[value], home.group, normal(layout))
                dys[self.writer.names[home]] = self.sums.gathered(given, target)
        if not dys or stops(node):
            return
        if is_written(node):
            self._written(instance, dys)
            return
        around = {value: replicated_on(value, instance.group) for value in inner}
        read = {k: input_layout_of(self.program, instance, k) for k, flow in enumerate(flows) if flow}
        names = {k: operand_name(self.writer, instance, k) for k in read}
        wanted = {*names.values(), *(self.writer.names[copy] for copy in around.values())}
        found: list[tuple[Localized, Group, Found]] = []
        for local, ranks in self.emitted[instance]:
            try:
                found.append((local, ranks, self._local(instance, local, dys, wanted)))
            except NoGradient as error:
                self._refuse(node, str(error))
        made = self._write(instance, found)
        for k, copy in {names[k]: (k, copy) for k, copy in read.items()}.values():
            if names[k] in made:
                layout = self._dual_read(instance, k)
                layout = passing.through(layout) if passing else layout
                given_as = ShardedValue(self.cotangents[copy.value], copy.group, normal(layout))
                self._shaped(made[names[k]], given_as)
                self.contributions.setdefault(copy, {}).setdefault(given_as, []).append(made[names[k]])
        for value, copy in around.items():
            name = self.writer.names[copy]
            if name not in names.values() and (dx := made.get(name)) is not None:
                given_as = ShardedValue(self.cotangents[value], copy.group, copy.layout)
                self._shaped(dx, given_as)
                self.contributions.setdefault(copy, {}).setdefault(given_as, []).append(dx)

    def _written(self, instance: NodeOnGroup, dys: Mapping[str, str]) -> None:
        """The dual of a collective of the model."""
        copy, made = input_layout_of(self.program, instance, 0), output_layout_of(self.program, instance, 0)
        cotangent = self.cotangents[copy.value]
        dx = self.drafts.free(instance.group, f"{self.writer.names[made]}.grad.{instance.node.op_type}")
        names, values = (dys[self.writer.names[made]], dx), (self.cotangents[made.value], cotangent)
        write_backward(self.writer, instance, names, values)
        self.contributions.setdefault(copy, {}).setdefault(ShardedValue(cotangent, copy.group, copy.layout), []).append(
            dx
        )

    def _local(self, instance: NodeOnGroup, local: Localized, dys: Mapping[str, str], wanted: set[str]) -> Found:
        """The gradient of a node's local form."""
        values: list[ir.Value] = []
        shapes: dict[str, Shape | None] = {}
        node = instance.node
        operands = [
            (value, input_layout_of(self.program, instance, k), operand_name(self.writer, instance, k))
            for k, value in enumerate(node.inputs)
            if value is not None
        ]
        inner = [replicated_on(one, instance.group) for one in self.program.around[node]]
        operands += [(copy.value, copy, self.writer.names[copy]) for copy in inner]
        assert self.program.training is not None
        changing = {*self.program.training.parameters, *self.program.training.statistics}
        for value, copy, name in operands:
            tensor = ir.convenience.get_const_tensor(value) if value not in changing else None
            constant = tensor if copy.layout.is_replicated and name == self.writer.names[copy] else None
            shape = local_shape(self.program, copy)
            rank = shape if shape is not None else local_value(self.program, copy).shape
            values.append(
                ir.Value(
                    name=name, type=value.type, shape=None if rank is None else ir.Shape(rank), const_value=constant
                )
            )
        for name, (value, shape) in local.types.items():
            own_shape = value not in node.outputs or made_whole(self.program, instance, value)
            known = ir.Shape(shape) if shape is not None else value.shape if own_shape else None
            values.append(ir.Value(name=name, type=value.type, shape=known))
            shapes[name] = shape
        around = {old: new for op in local.ops for old, new in op.captured.items()}
        forward = [op.node for op in local.ops]
        if node.domain == OWN and is_differentiable(OWN, node.op_type):
            names = [operand_name(self.writer, instance, k) for k in range(len(node.inputs))]
            made = [self.writer.names[output_layout_of(self.program, instance, k)] for k in range(len(node.outputs))]
            whole = [renamed(node, names, made)]
            found = differentiate_nodes(whole, dys, sorted(wanted), values=values, scope=self._scope())
            return replace(found, forward=forward)

        differentiated = partial(differentiate_nodes, forward, dys, sorted(wanted), around=around)
        if local.ends:
            # Shapes follow from constants, so those of a rank are shown; gradients must not.
            constants = [{**local.fixed, **end} for end in local.ends]
            first, last = (differentiated(values=values, constants=one, scope=self._scope()) for one in constants)
            if first.is_like(last):
                return first
        return differentiated(values=[*values, *local.unknown], constants=local.fixed, scope=self._scope())

    def _scope(self) -> Scope:
        return Scope(reserved=self.drafts.reserved, known=self.known)

    def _write(self, instance: NodeOnGroup, found: Sequence[tuple[Localized, Group, Found]]) -> dict[str, str]:
        """Writes what was found for a node on all its ranks; by input the name of its cotangent."""
        everywhere = found[0][1] if len(found) == 1 else tuple(rank for _, ranks, _ in found for rank in ranks)
        early = {out.name or "" for _, _, one in found for node in one.early for out in node.outputs}
        outputs = {out.name or "" for _, _, one in found for node in one.nodes for out in node.outputs} - early
        constants = {name for local, _, one in found for name in one.constants if name not in local.constants}
        new = {name: self.drafts.derived(f"{name}.primal") for name in sorted(early & self.unlisted)}
        new |= self._renamed(instance, everywhere, sorted(outputs | constants))
        listed = early | outputs | constants
        made: dict[str, str] = {}
        for local, ranks, one in found:
            forward = [
                op if node is op.node or _same(node, op.node) else ComputeOp(node, op.source, op.captured)
                for op, node in zip(local.ops, one.forward, strict=True)
            ]
            nodes = [ComputeOp(with_names(node, new), instance.node) for node in one.nodes]
            types = {
                new.get(name, name): typed(self.program, value)
                for name, value in one.scope.values.items()
                if name in listed or name in _added(local, forward)
            }
            for draft in self.drafts.of(ranks):
                draft.replace(
                    local.ops, forward, [ComputeOp(with_names(node, new), instance.node) for node in one.early]
                )
                draft.steps += nodes
                draft.constants |= {new.get(n, n): a for n, a in one.constants.items() if n in constants}
                draft.types |= {name: typed for name, typed in types.items() if name not in draft.types}
            for name, dx in one.gradients.items():
                made[name] = new.get(dx, dx)
        return made

    def _renamed(self, instance: NodeOnGroup, ranks: Group, names: Sequence[str]) -> dict[str, str]:
        """New names for those that some rank has already: with the node's path, and where that is taken with its group."""
        found: dict[str, str] = {}
        for name in names:
            if not self.drafts.is_free(ranks, name):
                other = f"{name}.{self.program.paths[instance.node]}"
                if not self.drafts.is_free(ranks, other):
                    other = f"{other}@{'-'.join(map(str, instance.group))}"
                found[name] = self.drafts.free(ranks, other)
        return found

    def _shaped(self, name: str, copy: ShardedValue) -> None:
        """A cotangent has the shape of its primal's shard, also where inference could not tell."""
        shape = local_shape(self.program, copy)
        for draft in self.drafts.of(copy.group):
            if name in draft.types and draft.types[name][1] is None and shape is not None:
                draft.types[name] = (copy.value, shape)

    def _merged(self, uses: Sequence[ShardedValue]) -> dict[ShardedValue, list[str]]:
        """What the readers of some copies gave, by the layout in which it lies."""
        found: dict[ShardedValue, list[str]] = {}
        for need in uses:
            for copy, names in self.contributions.pop(need, {}).items():
                found.setdefault(copy, []).extend(names)
        return found

    def _finish(self, parameter: ir.Value) -> None:
        """All readers of a parameter have given what they have."""
        defs = self.copies.defs[parameter]
        given = self._merged([need for home in defs for need in self.routes.get(home, ())])
        if given:
            self.sums.parameter(parameter, given, defs)

    def _wanted(
        self, instance: NodeOnGroup, k: int, given: Mapping[ShardedValue, Sequence[str]]
    ) -> tuple[Layout, Passing | None]:
        """The layout in which the cotangent of an output is wanted.

        What a node makes of parameters alone (a transposed weight) takes terms of a sum and gives such, since the parameter's
        gradient is reduced in any case, together with others. Not along an axis over which the node sums up: there each rank needs
        the whole sum for its own addends.
        """
        wanted = self._dual_made(instance, k)
        if not self.program.placement[instance.node].follows or len(given) != 1 or len(instance.node.outputs) != 1:
            return wanted, None
        (copy,) = given
        common = on_common_mesh(wanted, copy.layout) if copy.group == instance.group else None
        if common is None or common[0].cuts != common[1].cuts or not {*common[0].partial} <= {*common[1].partial}:
            return wanted, None
        terms = tuple(term for term in common[1].partial if term not in common[0].partial)
        choice = self.program.choices.get(instance)
        made = on_common_mesh(layout, common[1]) if choice and (layout := choice.output(k)) else None
        if made and {axis for axis, _ in terms} & {axis for axis, _ in made[0].partial}:
            return wanted, None
        return common[1], Passing(common[1], terms)

    def _dual_made(self, instance: NodeOnGroup, k: int) -> Layout:
        """The layout in which the cotangent of an output is wanted."""
        choice = self.program.choices.get(instance)
        layout = choice.output(k) if choice else None
        if choice is None or layout is None:
            return replicated_on(instance.node.outputs[k], instance.group).layout
        if any(reduce != "sum" for _, reduce in layout.partial):
            self._refuse(
                instance.node,
                f"{instance.node.op_type} is cut along what it takes the extreme of, which has no gradient",
                "leave that dim whole",
            )
        made = choice.rule.outputs[k] or ""
        reduced = [axes for letter, axes in choice.axes.items() if letter in choice.rule.reduce and letter not in made]
        return dual(choice, layout.cuts, {axis for axes in (*reduced, choice.passing) for axis in axes})

    def _dual_read(self, instance: NodeOnGroup, k: int) -> Layout:
        """The layout in which a node gives the cotangent of an input."""
        choice = self.program.choices.get(instance)
        layout = choice.input(k) if choice else None
        if choice is None or layout is None:
            value = instance.node.inputs[k]
            assert value is not None
            return replicated_on(value, instance.group).layout
        if k in choice.rule.apart:
            return layout
        return dual(choice, layout.cuts, choice.passing if k in choice.terms | choice.kept else ())

    def _refuse(self, node: ir.Node, why: str, remedy: str = "") -> None:
        """Raises CompileError with the way from a parameter through the node."""
        way: list[str] = []
        value = next((one for one in self.program.reads[node] if one in self.needed), None)
        while value is not None:
            producer = value.producer()
            way.append(value.name or "" if producer is None else self.program.paths[producer])
            value = (
                next((one for one in self.program.reads[producer] if one in self.needed), None) if producer else None
            )
        path = " -> ".join([*reversed(way), self.program.paths[node], "the loss"])
        raise CompileError(
            Problem(
                self.program.paths[node],
                why,
                f"it lies between a parameter and the loss: {path}",
                remedy or "freeze the parameter under `train: parameters:`, or write the model without this op",
            )
        )


def made_whole(program: Program, instance: NodeOnGroup, value: ir.Value) -> bool:
    """Whether a node makes an output whole on every rank of its group."""
    return output_layout_of(program, instance, instance.node.outputs.index(value)).layout.is_replicated


def _same(one: ir.Node, other: ir.Node) -> bool:
    """Whether a node makes no more than another."""
    return [value.name for value in one.outputs] == [value.name for value in other.outputs]


def _added(local: Localized, forward: Sequence[ComputeOp]) -> set[str]:
    """The outputs that the backward pass asked forward nodes for."""
    before = {value.name for op in local.ops for value in op.node.outputs}
    return {value.name or "" for op in forward for value in op.node.outputs} - before
