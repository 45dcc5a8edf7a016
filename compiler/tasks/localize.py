"""Pass: every node in its local form on the ranks of its groups, and every reshard where its value is made: the forward task.

The global order is the model's own topological order; what makes the other versions of a value stands right behind the node that makes
it, as one event that all its ranks see: a message's Send in one program and its Recv in the other, a collective in all of its
ranks'. Since every rank follows this one order, and waits for an event no earlier than it stands, the programs cannot deadlock, even
if a send waited for its receiver.

    order:   conv1.Conv@3   h: 3->4   conv2.Conv@4
    rank 3:  conv1.Conv  Send(h, 4)
    rank 4:  Recv(h, 3)  conv2.Conv
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.local_form import LocalForm
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import LocalTensor
from partc.compiler.ir.sharded import Group, ShardedValue
from partc.compiler.ir.values import ValueTable
from partc.compiler.lower.builders import ProgramBuilders
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.cutting import pieces_of
from partc.compiler.lower.kept import keep_operands
from partc.compiler.lower.local_view import LocalView
from partc.compiler.lower.pulls import is_pulled, write_pull
from partc.compiler.lower.reshard import reshard
from partc.compiler.lower.written import is_written, write_forward
from partc.compiler.matching import output_ranks
from partc.compiler.sharding.value_versions import ValueVersions
from partc.compiler.sharding.versions import can_share, find_versions, replicated_outputs
from partc.compiler.tasks.local_forms import local_forms


def localize(program: Program) -> Program:
    """Fills `local` with the forward task of every rank; warns of outputs that cannot stay sharded."""
    delivered, _ = output_ranks(program)
    versions = find_versions(program, delivered)
    builders = ProgramBuilders(program.plan.ranks, {*program.own_names, *versions.names.values()})
    comm = CommLowering(program, builders, ValueTable(program.values, versions.names))
    graph = program.model.graph
    for value in graph.initializers.values():
        for home in versions.defs.get(value, ()):
            _weight(comm, home)
    inputs: list[dict[str, LocalTensor]] = [{} for _ in range(program.plan.ranks)]
    done = {home for defs in versions.defs.values() for home in defs}
    for value in graph.inputs:
        for home in versions.defs.get(value, ()):
            _input(comm, home, inputs)
        _make_versions(versions, comm, value, done)
    comm.pieces = pieces_of(program, (held for given in inputs for held in given.values()))
    for value in graph.initializers.values():
        _make_versions(versions, comm, value, done)
    forms: dict[NodeOnGroup, tuple[tuple[LocalForm, Group], ...]] = {}
    for node in graph:
        for group in program.placement[node].groups:
            instance = NodeOnGroup(node, group)
            forms[instance] = _write(comm, instance)
        for value in node.outputs:
            _make_versions(versions, comm, value, done)
    told = replicated_outputs(program, versions, [value for value, (_, cut) in delivered.items() if cut])
    local = LocalView(versions, comm, tuple(inputs), forms)
    return replace(program, local=local, warnings=(*program.warnings, *told))


def _write(comm: CommLowering, instance: NodeOnGroup) -> tuple[tuple[LocalForm, Group], ...]:
    """Writes a node on a group; its local forms there, each with the ranks that run it."""
    if is_pulled(comm.program, instance):
        write_pull(comm, instance)
        return ()
    if is_written(instance.node):
        write_forward(comm, instance)
        return ()
    keep_operands(comm, instance)
    return tuple((_put(comm, instance.node, form, ranks), ranks) for form, ranks in local_forms(comm, instance))


def _put(comm: CommLowering, node: ir.Node, form: LocalForm, ranks: Group) -> LocalForm:
    """Writes a node's local form into the builders of ranks; the form as written, under names that are free there."""
    builders = comm.builders
    new = [
        builder
        for builder in builders.of(ranks)
        if not form.types or not form.types.keys() <= builder.made.get(node, {}).keys()
    ]
    if not new:  # these ranks have it of a larger group
        (first, *_) = builders.of(ranks)
        return form.renamed(first.made[node][next(iter(form.types))])
    names = {}
    for name in form.inner:
        free = builders.free(tuple(rank for builder in new for rank in builder.ranks), name)
        if free != name:
            names[name] = free
    form = form.renamed(names)
    for builder in new:
        builder.made.setdefault(node, {}).update(dict.fromkeys(form.types, names))
        builder.steps += form.ops
        builder.constants |= form.constants
        builder.types |= form.types
    return form


def _make_versions(versions: ValueVersions, comm: CommLowering, value: ir.Value, done: set[ShardedValue]) -> None:
    """Makes all versions of a value that its definitions do not give, the canonical ones first."""
    names, uses = comm.values.names, versions.uses.get(value, {})
    for home in versions.defs.get(value, ()):
        if (canonical := versions.canonical.get(home)) and canonical not in done:
            cause = uses.get(canonical) or next(iter(uses.values()), "as the plan says")
            comm.values.bind(canonical, reshard(comm, home, names[home], canonical, names[canonical], cause))
            done.add(canonical)
    for version in sorted(uses, key=lambda version: -len(version.group)):
        if version in done:
            continue
        there = next((one for one in _made(value, versions, done) if _has(one, version)), None)
        if there is None:
            source, derived = versions.definition_for(version), version in versions.derived
            name = reshard(comm, source, names[source], version, names[version], uses[version], derived)
            comm.values.bind(version, name)
        elif version in versions.delivered.get(value, ()):
            comm.rename(version, names[there], names[version])  # an output has the name that the user knows
        else:
            comm.values.bind(version, names[there])
        done.add(version)


def _made(value: ir.Value, versions: ValueVersions, done: set[ShardedValue]) -> list[ShardedValue]:
    """The versions of a value that exist by now."""
    defs = versions.defs.get(value, ())
    canonical = (versions.canonical[home] for home in defs if home in versions.canonical)
    return [one for one in (*defs, *canonical, *versions.uses.get(value, ())) if one in done]


def _has(there: ShardedValue, wanted: ShardedValue) -> bool:
    """Whether the ranks of `wanted` hold the same shards of it as part of `there`."""
    return set(wanted.group) <= set(there.group) and can_share(there, wanted)


def _weight(comm: CommLowering, home: ShardedValue) -> None:
    """Lists a weight on its ranks; ranks with the same shard of it share one record."""
    name = comm.values.names[home]
    comm.declare(home, name)
    for place, ranks in home.holders:
        held = LocalTensor(name, home, place)
        for builder in comm.builders.of(ranks):
            builder.weights.setdefault(name, held)


def _input(comm: CommLowering, home: ShardedValue, inputs: list[dict[str, LocalTensor]]) -> None:
    """Lists a model input on the ranks on which it arrives."""
    name = comm.values.names[home]
    comm.declare(home, name)
    for index, rank in enumerate(home.group):
        inputs[rank].setdefault(name, LocalTensor(name, home, index))
