"""Pass: writes the forward task: every node in its local form on the ranks of its groups, and every reshard after the node that makes its
value.

The global order is the model's own topological order; the ops that make other versions of a value come right after the node that makes it,
as one event that all its ranks see: a message's Send in one program and its Recv in the other, a collective in the programs of all its
ranks. Since every rank follows this one order, and waits for an event no earlier than its place in it, the programs cannot deadlock, even
if a send waited for its receiver.

    order:   conv1.Conv@3   h: 3->4   conv2.Conv@4
    rank 3:  conv1.Conv  Send(h, 4)
    rank 4:  Recv(h, 3)  conv2.Conv

The module also decides into how many pieces the records of a batch are dealt; each microbatch has a share of each (`pipelines/records.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.computed import tensor_of
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.local_form import LocalForm, over_values
from partc.compiler.ir.program import Targeted
from partc.compiler.ir.programs import RankTensor, State
from partc.compiler.ir.sharded import Group, ShardedValue, ranks_of
from partc.compiler.ir.training import ProgramKind
from partc.compiler.ir.values import ValueTable
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import on_common_mesh
from partc.compiler.lower.bodies import write_border
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.job import Job
from partc.compiler.lower.local_view import Localized, LocalView
from partc.compiler.lower.masked_replicas import keep_operands
from partc.compiler.lower.model_collectives import is_written, write_forward
from partc.compiler.lower.pulls import is_pulled, write_pull
from partc.compiler.lower.reshard import reshard
from partc.compiler.lower.ring import write_ring
from partc.compiler.lower.routes import write_route
from partc.compiler.matching import output_ranks
from partc.compiler.ops.families.control.bodies import is_border
from partc.compiler.ops.families.neural.ring import is_ring
from partc.compiler.sharding.values.versions import (
    ValueVersions,
    can_share,
    find_versions,
    replicated_outputs,
    undivided_units,
)
from partc.compiler.tasks.local_forms import local_forms
from partc.runtime.artifact.format import ROUTE


def pieces_of(program: Targeted, inputs: Iterable[ShardedValue]) -> int:
    """Returns the number of pieces into which an accumulated batch is dealt: a common multiple of the shards of all inputs on all ranks."""
    training, rules = program.training, program.plan.pipeline
    if training is None or training.rules.accumulate == 1:
        return 1
    dims = program.batch_dims
    shards = (one.layout.num_shards(dims[one.value]) for one in inputs if one.value in dims)
    return math.lcm(training.records.shards, rules.pieces if rules is not None else 1, *shards)


def localize(program: Targeted) -> Localized:
    """Fills `local` with the forward task of every rank; warns of outputs that cannot stay sharded."""
    delivered, _ = output_ranks(program)
    versions = find_versions(program, delivered)
    job = Job(program.plan.ranks, {*program.own_names, *versions.names.values()})
    comm = CommLowering(program, job, ValueTable(program.values, versions.names))
    graph, stacks = program.model.graph, program.generation.stacks if program.generation else ()
    for value in graph.initializers.values():
        for home in versions.defs.get(value, ()):
            comm.declare(home, comm.values.at[home])
            if value in program.caches:  # ranks keep it (`_keep_caches`)
                continue
            if (name := tensor_of(value)) in stacks:
                at = comm.values.at[home]
                comm.job.state.add(home.group, at, State(at, home, None, name, "adapter"))
                if program.kind is not ProgramKind.STEP or not program.plan.adapters:  # else it has first values
                    continue
            for place, ranks in home.holders:  # ranks with the same shard share one record
                job.weights.add(ranks, comm.values.at[home], RankTensor(comm.values.at[home], home, place))
    done = {home for defs in versions.defs.values() for home in defs}
    for value in graph.inputs:
        for home in versions.defs.get(value, ()):
            comm.declare(home, comm.values.at[home])
            job.inputs.add(home.group, comm.values.at[home], home)
        _make_versions(versions, comm, value, done)
    comm.pieces = pieces_of(program, [home for _, home, _ in job.inputs])
    for value in graph.initializers.values():
        _make_versions(versions, comm, value, done)
    forms: dict[NodeOnGroup, tuple[tuple[LocalForm, Group], ...]] = {}
    for node in graph:
        for group in program.placement[node].groups:
            instance = NodeOnGroup(node, group)
            forms[instance] = _write(comm, versions, instance)
        for value in node.outputs:
            _make_versions(versions, comm, value, done)
    _keep_caches(program, versions, comm)
    _refuse_unsent_rows(comm)
    told = undivided_units(program, versions) if program.kind is ProgramKind.STEP else []
    told += replicated_outputs(program, versions, [value for value, (_, cut) in delivered.items() if cut])
    local = LocalView(versions, comm, forms)
    return program.into(Localized, local=local, warnings=(*program.warnings, *told))


def _refuse_unsent_rows(comm: CommLowering) -> None:
    """Raises CompileError if the plan says how rows travel to their experts, and none do."""
    messages = comm.program.plan.messages
    asked = messages is not None and messages.rows is not None and comm.program.kind is ProgramKind.STEP
    if messages is not None and asked and all(event.op_type != ROUTE for event in comm.events):
        fact = "no rows are sent to experts, and the plan says that they travel in eight bits"
        law = "a row is sent where the axis of the experts shards the tokens, too, and has two ranks or more"
        help_ = "leave out 'messages.rows', or shard the tokens along that axis"
        raise CompileError(Problem(messages.where("rows"), fact, law, help_))


def _keep_caches(program: Targeted, versions: ValueVersions, comm: CommLowering) -> None:
    """Lists the caches in the job; raises CompileError if one would have to be sent to be kept."""
    at, problems = comm.values.at, list[Problem]()
    for cache, following in program.caches.items():
        for home in versions.defs.get(cache, ()):
            if following is None:  # another program writes it
                comm.job.state.add(home.group, at[home], State(at[home], home, None, name_of(cache), "cache"))
                continue
            made = ShardedValue(following, home.group, home.layout)
            if made in at:
                comm.job.state.add(home.group, at[home], State(at[home], home, at[made], name_of(cache), "cache"))
                continue
            fact = f"the cache '{cache.name}' is read in one layout and made in another"
            where = program.name if program.plan.generate is None else program.plan.generate.where()
            problems.append(Problem(where, fact, "a cache stays where it is", "shard what writes it as what reads it"))
    if problems:
        raise CompileError(problems)


def _write(comm: CommLowering, versions: ValueVersions, instance: NodeOnGroup) -> tuple[tuple[LocalForm, Group], ...]:
    """Writes a node on a group; returns its local forms, each with the ranks that run it."""
    if is_pulled(comm.program, instance):
        choice = comm.program.choices.get(instance)
        (write_route if choice is not None and choice.rule.dealt else write_pull)(comm, instance)
        return ()
    if is_border(instance.node):
        write_border(comm, instance)
        return ()
    if is_ring(instance.node):
        write_ring(comm, instance)
        return ()
    if is_written(instance.node):
        write_forward(comm, instance)
        return ()
    keep_operands(comm, instance)
    forms = local_forms(comm, versions, instance)
    return tuple([(_put(comm, versions.definitions[instance], form, ranks), ranks) for form, ranks in forms])


def _put(comm: CommLowering, defined: Sequence[ShardedValue], form: LocalForm, ranks: Group) -> LocalForm:
    """Writes the local form of a node that makes `defined` on its ranks; returns the form as written, or that of a larger group."""
    node, job = form.source, comm.job
    written = job.forms.setdefault(node, [])
    outputs = {form.values[name] for name in form.outputs}
    there = [(one, some) for one, some in written if outputs and outputs <= {one.values[name] for name in one.outputs}]
    new = ranks_of(ranks)
    for _, some in there:
        new &= ~some
    if not new:
        return next(one for one, some in there if some & ranks_of(ranks[:1]))
    values = {**form.values, **{name: job.value(new, name) for name in form.inner}}
    form = replace(form, values=values, ops=over_values(form.nodes, node, values, form.captured))
    written.append((form, new))
    job.append(new, form.ops)
    for name, constant in form.constants.items():
        job.constant(new, values[name], constant)
    for version in [one for one in defined if one.value.name]:
        job.declare(new, comm.values.at[version], comm.values.local_value(version), comm.values.local_shape(version))
    return form


def _make_versions(versions: ValueVersions, comm: CommLowering, value: ir.Value, done: set[ShardedValue]) -> None:
    """Makes all versions of a value that are not its definitions, the canonical ones first."""
    at, uses, defs = comm.values.at, versions.uses.get(value, {}), versions.defs.get(value, ())
    known = [*defs, *[versions.canonical[home] for home in defs if home in versions.canonical], *uses]
    for home in defs:
        if (canonical := versions.canonical.get(home)) and canonical not in done:
            cause = uses.get(canonical) or next(iter(uses.values()), "as the plan says")
            comm.values.bind(canonical, reshard(comm, home, at[home], canonical, at[canonical], cause))
            done.add(canonical)
    stored = value in comm.program.pinned.units
    for version in sorted(uses, key=lambda one: (-len(one.group), -math.prod(one.layout.shards) if stored else 0)):
        if version in done:
            continue
        here = {*version.group}
        there = next((one for one in known if one in done and here <= {*one.group} and can_share(one, version)), None)
        if there is None:
            source = _gathered(versions, version, done) if stored else versions.definition_for(version)
            derived = version in versions.derived
            comm.values.bind(version, reshard(comm, source, at[source], version, at[version], uses[version], derived))
        elif version in versions.delivered.get(value, ()):
            comm.rename(version, at[there], at[version])  # an output has the name that the user knows
        else:
            comm.values.bind(version, at[there])
        done.add(version)


def _gathered(versions: ValueVersions, version: ShardedValue, done: set[ShardedValue]) -> ShardedValue:
    """Returns the version of which that of a parameter stored in shards is made: the least cut one that ranks gather and that has all cuts
    of `version`, so that the shards are gathered once; else the definition.
    """
    home = versions.definition_for(version)
    of_group = [one for one in versions.uses[version.value] if one in done and one.group == version.group == home.group]
    there = [
        one
        for one in of_group
        if _is_refinement(one.layout, version.layout) and _is_refinement(home.layout, one.layout)
    ]
    return min(there, key=lambda one: math.prod(one.layout.shards), default=home)


def _is_refinement(layout: Layout, other: Layout) -> bool:
    """Whether a layout has all cuts of another one."""
    common = on_common_mesh(layout, other)
    if common is None:
        return False
    return all({*axes} >= {*others} for axes, others in zip(common[0].cuts, common[1].cuts, strict=True))
