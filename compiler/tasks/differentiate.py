"""Pass: the backward pass, written behind the forward programs: every node's gradient runs where the node runs, on the same shards.

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
from partc.compiler.autodiff.builder import NoGradient
from partc.compiler.autodiff.engine import Backward as Found
from partc.compiler.autodiff.engine import differentiate_nodes
from partc.compiler.autodiff.reach import learned_from
from partc.compiler.autodiff.scope import Scope
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.program import Group, Program, Shape, ShardedValue
from partc.compiler.ir.rank_program import ComputeOp, TaskKind
from partc.compiler.ir.values import ValueTable, derived
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal
from partc.compiler.lower.kept import operand_name
from partc.compiler.lower.written import is_written, write_backward
from partc.compiler.ops.registry import is_differentiable, stops_gradient
from partc.compiler.ops.rule import OWN
from partc.compiler.sharding.operands import input_layout_of, output_layout_of, replicated_on
from partc.compiler.tasks.duals import Passing, dual_of_input, takes_extreme, typed, wanted_layout
from partc.compiler.tasks.local_form import LocalForm, renamed, with_names
from partc.compiler.tasks.local_view import LocalView
from partc.compiler.tasks.reduce_gradients import GradientReduction


def differentiate(program: Program) -> Program:
    """Writes the backward tasks into `local`, with the gradient of every parameter; does nothing for a program without a backward pass."""
    if program.training is None or not program.training.part.backward:
        return program
    assert program.local is not None
    local = program.local.begin(TaskKind.BACKWARD)
    cotangents = _cotangents(program, local.comm.values)
    sums = GradientReduction(program, cotangents, local.comm, program.training)
    Backward(program, cotangents, local, sums).run()
    sums.flush()
    named = {
        ShardedValue(cotangents[one.parameter], one.home.group, one.share.layout): one.name for one in sums.gradients
    }
    found = replace(
        local,
        gradients=tuple(sums.gradients),
        accumulated=tuple(sums.accumulated),
        totals={**sums.totals, **named},
    )
    return replace(program, local=found)


def _cotangents(program: Program, values: ValueTable) -> dict[ir.Value, ir.Value]:
    """By primal a value for its cotangent, of everything that has one: `h.grad` of `h`."""
    found: dict[ir.Value, ir.Value] = {}
    for value, info in program.values.items():
        if value.name and value.dtype is not None and value.dtype.is_floating_point():
            name = derived(f"{value.name}.grad", program.own_names)
            found[value] = values.add(ir.Value(name=name, type=value.type, shape=value.shape), info)
    return found


class Backward:
    """Writes the backward pass of `program` into `local`; `sums` then has every parameter's gradient."""

    def __init__(
        self, program: Program, cotangents: Mapping[ir.Value, ir.Value], local: LocalView, sums: GradientReduction
    ) -> None:
        self.program, self.cotangents, self.sums = program, cotangents, sums
        self.versions, self.comm, self.forms = local.versions, local.comm, local.forms
        self.builders, self.values, self.names = local.comm.builders, local.comm.values, local.comm.values.names
        assert program.training is not None
        self.needed = learned_from(program.reads, program.training)
        self.known = {name: info.facts for name, info in program.symbols.items()}
        self.contributions: dict[ShardedValue, dict[ShardedValue, list[str]]] = {}
        """Cotangent contributions of each version that is read, keyed by their layout, not yet added."""
        self.unlisted = self.builders.unlisted()
        self.routes: dict[ShardedValue, list[ShardedValue]] = {}
        """For each definition of a value: the resharded versions that readers use."""
        for value, uses in self.versions.uses.items():
            defs = self.versions.defs.get(value, [])
            for need in uses:
                source = self.versions.definition_for(need) if defs else need
                home = next((one for one in defs if self.versions.canonical.get(one, one) == source), source)
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
        name = self.builders.free(group, "loss.seed")
        self.builders.declare(group, name, self.cotangents[loss], tuple(shape))
        for builder in self.builders.of(group):
            builder.constants[name] = np.full(shape, number, loss.dtype.numpy())
        here = self.versions.canonical.get(home, home)
        self.routes.setdefault(home, []).append(here)
        self.contributions.setdefault(here, {}).setdefault(seed, []).append(name)

    def _shards(self) -> int:
        """Into how many shards the batch arrives."""
        defs = [home for value in self.program.model.graph.inputs for home in self.versions.defs.get(value, ())]
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
                if takes_extreme(self.program, instance, k):
                    fact = f"{node.op_type} is cut along what it takes the extreme of, which has no gradient"
                    self._refuse(node, fact, "leave that dim whole")
                layout, passing = wanted_layout(self.program, instance, k, given)
                target = ShardedValue(self.cotangents[value], home.group, normal(layout))
                dys[self.names[home]] = self.sums.total(given, target)
        if not dys or stops_gradient(node):
            return
        if is_written(node):
            self._written(instance, dys)
            return
        around = {value: replicated_on(value, instance.group) for value in inner}
        read = {k: input_layout_of(self.program, instance, k) for k, flow in enumerate(flows) if flow}
        names = {k: operand_name(self.comm, instance, k) for k in read}
        wanted = {*names.values(), *(self.names[copy] for copy in around.values())}
        found: list[tuple[LocalForm, Group, Found]] = []
        for local, ranks in self.forms[instance]:
            try:
                found.append((local, ranks, self._local(instance, local, dys, wanted)))
            except NoGradient as error:
                self._refuse(node, str(error))
        made = self._write(instance, found)
        for k, copy in {names[k]: (k, copy) for k, copy in read.items()}.values():
            if names[k] in made:
                layout = dual_of_input(self.program, instance, k)
                layout = passing.through(layout) if passing else layout
                given_as = ShardedValue(self.cotangents[copy.value], copy.group, normal(layout))
                self._shaped(made[names[k]], given_as)
                self.contributions.setdefault(copy, {}).setdefault(given_as, []).append(made[names[k]])
        for value, copy in around.items():
            name = self.names[copy]
            if name not in names.values() and (dx := made.get(name)) is not None:
                given_as = ShardedValue(self.cotangents[value], copy.group, copy.layout)
                self._shaped(dx, given_as)
                self.contributions.setdefault(copy, {}).setdefault(given_as, []).append(dx)

    def _written(self, instance: NodeOnGroup, dys: Mapping[str, str]) -> None:
        """The dual of a collective of the model."""
        copy, made = input_layout_of(self.program, instance, 0), output_layout_of(self.program, instance, 0)
        cotangent = self.cotangents[copy.value]
        dx = self.builders.free(instance.group, f"{self.names[made]}.grad.{instance.node.op_type}")
        names, values = (dys[self.names[made]], dx), (self.cotangents[made.value], cotangent)
        write_backward(self.comm, instance, names, values)
        self.contributions.setdefault(copy, {}).setdefault(ShardedValue(cotangent, copy.group, copy.layout), []).append(
            dx
        )

    def _local(self, instance: NodeOnGroup, local: LocalForm, dys: Mapping[str, str], wanted: set[str]) -> Found:
        """The gradient of a node's local form."""
        values: list[ir.Value] = []
        shapes: dict[str, Shape | None] = {}
        node = instance.node
        operands = [
            (value, input_layout_of(self.program, instance, k), operand_name(self.comm, instance, k))
            for k, value in enumerate(node.inputs)
            if value is not None
        ]
        inner = [replicated_on(one, instance.group) for one in self.program.around[node]]
        operands += [(copy.value, copy, self.names[copy]) for copy in inner]
        assert self.program.training is not None
        changing = {*self.program.training.parameters, *self.program.training.statistics}
        for value, copy, name in operands:
            tensor = ir.convenience.get_const_tensor(value) if value not in changing else None
            constant = tensor if copy.layout.is_replicated and name == self.names[copy] else None
            shape = self.values.local_shape(copy)
            rank = shape if shape is not None else self.values.local_value(copy).shape
            values.append(
                ir.Value(
                    name=name, type=value.type, shape=None if rank is None else ir.Shape(rank), const_value=constant
                )
            )
        for name, (value, shape) in local.types.items():
            own_shape = value not in node.outputs or _made_whole(self.program, instance, value)
            known = ir.Shape(shape) if shape is not None else value.shape if own_shape else None
            values.append(ir.Value(name=name, type=value.type, shape=known))
            shapes[name] = shape
        around = {old: new for op in local.ops for old, new in op.captured.items()}
        forward = [op.node for op in local.ops]
        if node.domain == OWN and is_differentiable(node):
            names = [operand_name(self.comm, instance, k) for k in range(len(node.inputs))]
            made = [self.names[output_layout_of(self.program, instance, k)] for k in range(len(node.outputs))]
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
        return Scope(reserved=self.builders.reserved, known=self.known)

    def _write(self, instance: NodeOnGroup, found: Sequence[tuple[LocalForm, Group, Found]]) -> dict[str, str]:
        """Writes what was found for a node on all its ranks; by input the name of its cotangent."""
        everywhere = found[0][1] if len(found) == 1 else tuple(rank for _, ranks, _ in found for rank in ranks)
        early = {out.name or "" for _, _, one in found for node in one.early for out in node.outputs}
        outputs = {out.name or "" for _, _, one in found for node in one.nodes for out in node.outputs} - early
        constants = {name for local, _, one in found for name in one.constants if name not in local.constants}
        new = {name: self.builders.derived(f"{name}.primal") for name in sorted(early & self.unlisted)}
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
                new.get(name, name): typed(self.values, self.program.symbols, value)
                for name, value in one.scope.values.items()
                if name in listed or name in _added(local, forward)
            }
            early_ops = [ComputeOp(with_names(node, new), instance.node) for node in one.early]
            self.comm.append(ranks, *nodes)
            for builder in self.builders.of(ranks):
                builder.replace(local.ops, forward, early_ops)
                builder.constants |= {new.get(n, n): a for n, a in one.constants.items() if n in constants}
                builder.types |= {name: typed for name, typed in types.items() if name not in builder.types}
            for name, dx in one.gradients.items():
                made[name] = new.get(dx, dx)
        return made

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

    def _shaped(self, name: str, copy: ShardedValue) -> None:
        """A cotangent has the shape of its primal's shard, also where inference could not tell."""
        shape = self.values.local_shape(copy)
        for builder in self.builders.of(copy.group):
            if name in builder.types and builder.types[name][1] is None and shape is not None:
                builder.types[name] = (copy.value, shape)

    def _merged(self, uses: Sequence[ShardedValue]) -> dict[ShardedValue, list[str]]:
        """What the readers of some copies gave, by the layout in which it lies."""
        found: dict[ShardedValue, list[str]] = {}
        for need in uses:
            for copy, names in self.contributions.pop(need, {}).items():
                found.setdefault(copy, []).extend(names)
        return found

    def _finish(self, parameter: ir.Value) -> None:
        """All readers of a parameter have given what they have."""
        defs = self.versions.defs[parameter]
        given = self._merged([need for home in defs for need in self.routes.get(home, ())])
        if given:
            self.sums.parameter(parameter, given, defs)

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


def _made_whole(program: Program, instance: NodeOnGroup, value: ir.Value) -> bool:
    """Whether a node makes an output whole on every rank of its group."""
    return output_layout_of(program, instance, instance.node.outputs.index(value)).layout.is_replicated


def _same(one: ir.Node, other: ir.Node) -> bool:
    """Whether a node makes no more than another."""
    return [value.name for value in one.outputs] == [value.name for value in other.outputs]


def _added(local: LocalForm, forward: Sequence[ComputeOp]) -> set[str]:
    """The outputs that the backward pass asked forward nodes for."""
    before = {value.name for op in local.ops for value in op.node.outputs}
    return {value.name or "" for op in forward for value in op.node.outputs} - before
