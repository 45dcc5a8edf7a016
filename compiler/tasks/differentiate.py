"""Pass: writes the backward pass after the forward programs: every node's gradient runs on the node's ranks, on the same shards.

A cotangent has the dual of its primal's layout. Along a mesh axis:

    the node                      its output     its cotangent     its input      the cotangent of the input
    sharded by the axis           sharded        sharded           sharded        sharded
                                  partial        replicated        replicated     partial
    not sharded by the axis       replicated     replicated        replicated     replicated

So the local nodes are differentiated as they are (`autodiff/engine.py`) without another propagation, and the change of layout or group that
brought a value to a reader is undone by one that brings cotangents back. Terms for a value in one layout are added before they are moved.
The contributions of a parameter's readers are its gradient, which `reduce_gradients.py` reduces.

    forward    x --> column-parallel MatMul --> row-parallel MatMul --AllReduce--> y
    backward   x.grad <--AllReduce-- MatMul <-- MatMul <-- y.grad
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
import onnx_ir as ir
from partc.compiler.analysis.lost import how_lost
from partc.compiler.autodiff.builder import NoGradient
from partc.compiler.autodiff.reach import trained_values
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.graph import BY_EXPERT, FOLDED, PINNED, name_of
from partc.compiler.ir.programs import State, TaskKind, Value, ValueMap
from partc.compiler.ir.sharded import Group, ShardedValue
from partc.compiler.ir.training import Training
from partc.compiler.ir.values import ValueTable
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal
from partc.compiler.lower.local_view import Localized, LocalView
from partc.compiler.lower.masked_replicas import operand_as
from partc.compiler.lower.model_collectives import is_written, write_backward
from partc.compiler.lower.pulls import is_pulled, write_dense, write_push
from partc.compiler.lower.ring import write_ring_back
from partc.compiler.lower.routes import write_dual
from partc.compiler.ops.families.control.bodies import is_border
from partc.compiler.ops.families.neural.ring import is_ring
from partc.compiler.ops.registry import stops_gradient
from partc.compiler.sharding.values.operands import input_layout_of, output_layout_of, replicated_on
from partc.compiler.tasks.body_gradients import BodyGradients, Contributions
from partc.compiler.tasks.duals import CotangentNames, Passing, dual_layout, dual_of_input, takes_extreme, typed
from partc.compiler.tasks.node_gradients import NodeGradients, row_keys
from partc.compiler.tasks.reduce_gradients import GradientReduction
from partc.compiler.tasks.row_gradients import Rows, RowTerm, named_rows
from partc.compiler.tasks.tables import find_tables
from partc.compiler.training.loss_scale import STATE, seed_nodes
from partc.compiler.training.loss_scale import number as scalar
from partc.runtime.spellings import first_free

_RANK_LOST = (
    "write the model without that op, or freeze the parameter under `train: parameters:`; an EmbeddingBag, which torch exports as a Loop, "
    "is embedding(ids).mean(1)"
)


def differentiate(program: Localized) -> Localized:
    """Writes the backward tasks into `local`, with the gradient of every parameter; does nothing for a program without a backward pass."""
    if program.training is None or not program.kind.backward:
        return program
    local = program.local.begin(TaskKind.BACKWARD)
    cotangents = _cotangents(program, local.comm.values)
    sums = GradientReduction(program, cotangents, local.comm, program.training)
    backward = Backward(program, cotangents, local, sums)
    backward.run()
    sums.flush()
    named = {
        ShardedValue(cotangents[one.parameter], one.owner.group, one.share.layout): one.value
        for one in sums.gradients
        if one.ids is None
    }
    localized = replace(
        local,
        gradients=tuple(sums.gradients),
        accumulated=tuple(sums.accumulated),
        totals={**sums.totals, **named},
    )
    training = program.training
    training = replace(training, notes=replace(training.notes, tables=tuple(map(str, backward.tables))))
    return replace(program, local=localized, training=training)


def _cotangents(program: Localized, values: ValueTable) -> dict[ir.Value, ir.Value]:
    """Maps each primal that has a cotangent to the cotangent's value: `h` to `h.grad`."""
    cotangents: dict[ir.Value, ir.Value] = {}
    for value, info in program.values.items():
        if value.name and value.dtype is not None and value.dtype.is_floating_point():
            name = first_free(f"{value.name}.grad", program.own_names.__contains__)
            cotangents[value] = values.add(ir.Value(name=name, type=value.type, shape=value.shape), info)
            cotangents[value].meta.update({key: one for key, one in value.meta.items() if key in (BY_EXPERT, FOLDED)})
    return cotangents


class Backward:
    """Writes the backward pass of `program` into `local`; `sums` collects every parameter's gradient."""

    def __init__(
        self, program: Localized, cotangents: Mapping[ir.Value, ir.Value], local: LocalView, sums: GradientReduction
    ) -> None:
        self.program, self.cotangents, self.sums = program, cotangents, sums
        self.versions, self.comm, self.forms = local.versions, local.comm, dict(local.forms)
        self.job, self.values, self.at = local.comm.job, local.comm.values, local.comm.values.at
        assert program.training is not None
        self.needed = trained_values(program.reads, program.training)
        self.node_gradients = NodeGradients(program, local.comm)
        self.tables = find_tables(program, local, self.needed)
        self.row_terms: dict[ir.Value, list[RowTerm]] = {one.parameter: [] for one in self.tables if one.by_rows}
        """Maps each table whose gradient is a list of rows to the gradients of its lookups."""
        self.contributions: Contributions = {}
        """Maps each version that is read to its cotangent contributions by layout, which are not yet added."""
        self.routes: dict[ShardedValue, list[ShardedValue]] = {}
        """Maps each definition of a value to the resharded versions that readers use."""
        for value, uses in self.versions.uses.items():
            defs = self.versions.defs.get(value, [])
            for need in uses:
                source = self.versions.definition_for(need) if defs else need
                home = next((one for one in defs if self.versions.canonical.get(one, one) == source), source)
                self.routes.setdefault(home, []).append(need)
        homes = {need: home for home, needs in self.routes.items() for need in needs}
        self.cotangent_names = CotangentNames(program, self.at, homes)

    def run(self) -> None:
        """Differentiates every node between the loss and a parameter; raises CompileError if one has no gradient."""
        self._seed()
        waiting, complete, bodies = self._readers(), list[ir.Value](), BodyGradients(self)
        for node in reversed(list(self.program.model.graph)):
            for group in reversed(self.program.placement[node].groups):
                if is_border(node):
                    bodies.visit(NodeOnGroup(node, group))
                else:
                    self._node(NodeOnGroup(node, group), in_body=bool(bodies.open))
            for value in self.program.reads[node]:
                if value in waiting:
                    waiting[value] -= 1
                    if not waiting[value]:
                        complete.append(value)
            if not bodies.open:  # within a body contributions are those of one turn
                for value in complete:
                    self._finish(value)
                complete.clear()

    def _readers(self) -> dict[ir.Value, int]:
        """Returns the number of nodes that read each parameter."""
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
            raise CompileError(_unmoved(training))
        group = self.program.placement[node].groups[0]
        home = output_layout_of(self.program, NodeOnGroup(node, group), node.outputs.index(loss))
        seed = ShardedValue(self.cotangents[loss], home.group, normal(Layout(home.layout.mesh, home.layout.cuts)))
        assert loss.dtype is not None
        parts = 1 if loss.name in training.records.summed else training.rules.accumulate
        shards = 1
        if training.rules.loss.per_rank_mean:
            arriving = [home for value in self.program.model.graph.inputs for home in self.versions.defs.get(value, ())]
            shards = max((home.layout.num_shards(0) for home in arriving if home.layout.cuts), default=1)
        number = shards / parts
        shape = [dim for dim in self.program.values[loss].shape or () if isinstance(dim, int)]
        made = self.job.value(group, "loss.seed")
        self.job.declare(group, made, self.cotangents[loss], tuple(shape))
        self._write_seed(group, made, number, shape, loss.dtype)
        here = self.versions.canonical.get(home, home)
        self.routes.setdefault(home, []).append(here)
        self.contributions.setdefault(here, {}).setdefault(seed, []).append(made)

    def _write_seed(self, group: Group, seed: Value, number: float, shape: Sequence[int], kind: ir.DataType) -> None:
        """Makes the first cotangent: a number, times the loss scale if there is one."""
        scale = self.program.training.scale if self.program.training is not None else None
        if scale is None or not scale.dynamic:
            factor = scale.first if scale is not None else 1
            self.job.constant(group, seed, np.full(shape, number * factor, kind.numpy()))
            return
        state = self.job.number(STATE)
        state_value = typed(self.values, self.program.symbols, scalar(STATE, ir.DataType.FLOAT))
        values = ValueMap()
        own = values.of(seed, ir.TensorType(kind), ir.Shape(shape))
        written = seed_nodes(values.of(state), own, np.full(shape, number, np.float32))
        for one in (*written.constants, *(out for node in written.nodes for out in node.outputs)):
            if one not in values:
                values[one] = self.job.derived_on(group, seed, name_of(one).removeprefix(name_of(own)))
        for one, array in written.constants.items():
            self.job.constant(group, values[one], array)
        self.job.declare(group, state, *state_value)
        kept = State(state, replicated_on(state_value[0], group), None, STATE, "scale", initial=scale.first)
        self.job.state.add(group, state, kept)
        self.comm.append(group, *values.ops(written.nodes))

    def _node(self, instance: NodeOnGroup, *, in_body: bool) -> None:
        """Differentiates a node on a group, if an output has a cotangent and an input depends on a parameter."""
        node = instance.node
        flows = [value is not None and value in self.needed for value in node.inputs]
        inner = [one for one in self.program.around[node] if one in self.needed]
        if not any(flows) and not inner:
            return
        if PINNED in node.meta:
            self._served(instance)
            return
        written, pulled = is_written(node), is_pulled(self.program, instance)
        in_ring = is_ring(node)
        dys, passing = self.incoming(instance, passes=not written and not pulled and not in_ring)
        if not dys or stops_gradient(node):
            return
        if written:
            self._written(instance, dys)
        elif pulled:
            if in_body:
                self._refuse(node, "rows are pulled, or routed, in a body whose turns or branch only the run knows")
            self._pushed(instance, dys)
        elif in_ring:
            self._ring(instance, dys)
        else:
            self._by_rule(instance, dys, passing, flows, inner)

    def _by_rule(
        self,
        instance: NodeOnGroup,
        dys: Mapping[Value, Value],
        passing: Passing | None,
        flows: Sequence[bool],
        inner: Sequence[ir.Value],
    ) -> None:
        """Writes an op's gradient by its rule; `flows`: whether parameters change each input, `inner`: outer values that they change."""
        node = instance.node
        around = {value: replicated_on(value, instance.group) for value in inner}
        read = {k: input_layout_of(self.program, instance, k) for k, flow in enumerate(flows) if flow}
        operands = {k: operand_as(self.comm, instance, k, version) for k, version in read.items()}
        wanted = {*operands.values(), *(self.at[version] for version in around.values())}
        tables = {operands[k] for k, version in read.items() if version.value in self.row_terms}
        try:
            gradients = [
                self.node_gradients.find(instance, form, ranks, dys, wanted, tables)
                for form, ranks in self.forms[instance]
            ]
        except NoGradient as error:
            self._refuse(node, str(error))
        handle = gradients[0].form.handle
        versions: dict[str, tuple[ShardedValue, Layout]] = {}
        for k, version in {operands[k]: (k, version) for k, version in read.items()}.values():
            layout = dual_of_input(self.program, instance, k)
            versions[handle(operands[k])] = version, passing.through(layout) if passing else layout
        for version in around.values():
            versions.setdefault(handle(self.at[version]), (version, version.layout))
        spellings = {name: self.cotangent_names.spellings(instance, *one) for name, one in versions.items()}
        looked_up = [*map(handle, tables)]
        for name in looked_up:
            rows, keys = [named_rows(spelling) for spelling in spellings.pop(name)], row_keys(name)
            spellings |= {keys.ids: [one.ids for one in rows], keys.rows: [one.rows for one in rows]}
        results = self.node_gradients.write(instance, gradients, spellings)
        for name, (version, layout) in versions.items():
            if name in looked_up:
                keys, term = row_keys(name), ShardedValue(version.value, version.group, normal(layout))
                self.row_terms[version.value].append(RowTerm(term, Rows(results[keys.ids], results[keys.rows])))
            elif name in results:
                self.give(version, layout, results[name])

    def incoming(self, instance: NodeOnGroup, *, passes: bool) -> tuple[dict[Value, Value], Passing | None]:
        """Maps each output of a node to its cotangent, in the required layout; also returns the partial sums that pass through the node.

        Partial sums do not pass through communication: among ranks that have asked for the same rows, one sends gradients back.
        """
        dys: dict[Value, Value] = {}
        passing: Passing | None = None
        for k, value in enumerate(instance.node.outputs):
            home = output_layout_of(self.program, instance, k)
            cotangents = self._merged(self.routes.get(home, ())) if value in self.cotangents else {}
            if not cotangents:
                continue
            if takes_extreme(self.program, instance, k):
                fact = f"{instance.node.op_type} is cut along what it takes the extreme of, which has no gradient"
                self._refuse(instance.node, fact, "leave that dim whole")
            layout, passing = dual_layout(self.program, instance, k, cotangents if passes else {})
            target = ShardedValue(self.cotangents[value], home.group, normal(layout))
            dys[self.at[home]] = self.sums.total(cotangents, target)
        return dys, passing

    def _served(self, instance: NodeOnGroup) -> None:
        """Takes the cotangent terms of a served parameter's readers as its own: readers add them up over microbatches, and send once."""
        read, made = input_layout_of(self.program, instance, 0), output_layout_of(self.program, instance, 0)
        for term, values in self._merged(self.routes.get(made, ())).items():
            own = ShardedValue(self.cotangents[read.value], term.group, term.layout)
            self.contributions.setdefault(read, {}).setdefault(own, []).extend(values)

    def give(self, version: ShardedValue, layout: Layout, dx: Value) -> None:
        """Lists a contribution to the cotangent of a version that a node reads; it has the shape of the version's shard."""
        given = ShardedValue(self.cotangents[version.value], version.group, normal(layout))
        shape = self.values.local_shape(given)
        if shape is not None and dx.of is not None and dx.shape is None:
            dx.of, dx.shape = given.value, shape
        self.contributions.setdefault(version, {}).setdefault(given, []).append(dx)

    def _written(self, instance: NodeOnGroup, dys: Mapping[Value, Value]) -> None:
        """Writes the backward collective of a collective that is in the model itself."""
        read, made = input_layout_of(self.program, instance, 0), output_layout_of(self.program, instance, 0)
        cotangent = self.cotangents[read.value]
        spellings = self.cotangent_names.spellings(instance, read, read.layout)
        dx = self.job.value(instance.group, *spellings)
        values, of = (dys[self.at[made]], dx), (self.cotangents[made.value], cotangent)
        write_backward(self.comm, instance, values, of)
        given = ShardedValue(cotangent, read.group, read.layout)
        self.contributions.setdefault(read, {}).setdefault(given, []).append(dx)

    def _pushed(self, instance: NodeOnGroup, dys: Mapping[Value, Value]) -> None:
        """Writes the Push for a node's Pull: the table's gradient as rows, or added up; for experts' borders a Route or Return."""
        read, output = input_layout_of(self.program, instance, 0), output_layout_of(self.program, instance, 0)
        layout = dual_of_input(self.program, instance, 0)
        spellings = self.cotangent_names.spellings(instance, read, layout)
        choice = self.program.choices.get(instance)
        if choice is not None and choice.rule.dealt:
            dx, value = self.job.value(instance.group, *spellings), self.cotangents[read.value]
            ends = (
                ShardedValue(self.cotangents[output.value], output.group, output.layout),
                ShardedValue(value, read.group, layout),
            )
            write_dual(self.comm, instance, (dys[self.at[output]], dx), ends)
            self.give(read, layout, dx)
            return
        rows = [named_rows(spelling) for spelling in spellings]
        pushed = (
            self.job.value(instance.group, *(one.ids for one in rows)),
            self.job.value(instance.group, *(one.rows for one in rows)),
        )
        write_push(self.comm, instance, dys[self.at[output]], layout, pushed)
        if read.value in self.row_terms:
            term = ShardedValue(read.value, read.group, normal(layout))
            self.row_terms[read.value].append(RowTerm(term, Rows(*pushed)))
            return
        dx = self.job.value(instance.group, *spellings)
        write_dense(self.comm, instance, pushed, dx)
        given = ShardedValue(self.cotangents[read.value], read.group, normal(layout))
        self.job.declare(read.group, dx, given.value, self.values.local_shape(given))
        self.contributions.setdefault(read, {}).setdefault(given, []).append(dx)

    def _ring(self, instance: NodeOnGroup, dys: Mapping[Value, Value]) -> None:
        """Writes the backward pass of a ring attention."""
        read = [input_layout_of(self.program, instance, k) for k in range(3)]
        layouts = [normal(dual_of_input(self.program, instance, k)) for k in range(3)]
        operands = [
            ShardedValue(self.cotangents[version.value], version.group, layout)
            for version, layout in zip(read, layouts, strict=True)
        ]
        results = [
            self.job.value(instance.group, *self.cotangent_names.spellings(instance, version, layout))
            for version, layout in zip(read, layouts, strict=True)
        ]
        (dy,) = dys.values()
        write_ring_back(self.comm, instance, dy, results, [one.value for one in operands])
        for version, one, dx in zip(read, operands, results, strict=True):
            self.job.declare(version.group, dx, one.value, self.values.local_shape(one))
            self.contributions.setdefault(version, {}).setdefault(one, []).append(dx)

    def _merged(self, uses: Sequence[ShardedValue]) -> dict[ShardedValue, list[Value]]:
        """Removes and returns the cotangent contributions of some versions, keyed by their layout."""
        found: dict[ShardedValue, list[Value]] = {}
        for need in uses:
            for copy, values in self.contributions.pop(need, {}).items():
                found.setdefault(copy, []).extend(values)
        return found

    def _finish(self, parameter: ir.Value) -> None:
        """Reduces the gradient of a parameter, once all of its readers have contributed."""
        defs = self.versions.defs[parameter]
        given = self._merged([need for home in defs for need in self.routes.get(home, ())])
        if terms := self.row_terms.get(parameter):
            dense = any(one.parameter is parameter and one.dense_update for one in self.tables)
            self.sums.table(parameter, terms, defs, dense=dense)
        elif given:
            self.sums.parameter(parameter, given, defs)

    def _refuse(self, node: ir.Node, why: str, remedy: str = "") -> NoReturn:
        """Raises CompileError with the path from a parameter through the node to the loss, and with the node at which a rank was lost."""
        lost = next((one for one in node.inputs if one is not None and one.shape is None and one.producer()), None)
        if lost is not None and "is not known" in why:
            why = f"{why}: {how_lost(self.program, lost)[0]}"
            remedy = remedy or _RANK_LOST
        way: list[str] = []
        value = next((one for one in self.program.reads[node] if one in self.needed), None)
        while value is not None:
            producer = value.producer()
            way.append(self.program.path_of(value))
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


def _unmoved(training: Training) -> Problem:
    """Returns the problem of a training whose parameters do not change the loss: the rules that froze all, else the model."""
    where = training.rules.where("loss")
    frozen = {one.where.get("frozen", "") for one in training.parameters.values() if one.frozen}
    fact = "no trainable parameter changes the loss"
    if training.parameters and all(one.frozen for one in training.parameters.values()):
        lines = sorted(line for line in frozen if line)
        law = f"all {len(training.parameters)} parameters are frozen"
        help = "freeze fewer: a later rule wins, such as head.weight: {frozen: false}"
        return Problem(lines[0] if lines else where, fact, law, help)
    help = "name an output that depends on the model's weights, or make one of them trainable: {frozen: false}"
    return Problem(where, fact, f"the loss '{training.loss.name}' reads none of those that are trained", help)
