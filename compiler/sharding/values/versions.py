"""The versions of a value: the definition, and one on every other group or in every other layout in which it is read.

There is one version per (value, group, layout), for any number of readers. A version's name on its ranks is the value's own if that is
free: first for the delivered version of an output, then for the definition, then for the first version that is read; others are named by
their layout, `h@[2, 1]`, unless the model has a value of that name. A partial definition is `h.partial`, and its reduced version `h`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import onnx_ir as ir
from partc.compiler.analysis.lost import how_lost, unknown_dims
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.choice import NodeOnGroup, ValueOnGroup
from partc.compiler.ir.graph import name_of, operand_name
from partc.compiler.ir.program import Sharded
from partc.compiler.ir.sharded import Group, Ranks, ShardedValue, facts_of, members, ranks_of
from partc.compiler.ir.training import ProgramKind
from partc.compiler.layout.exchange import span_of
from partc.compiler.layout.layout import Layout, shards_along
from partc.compiler.layout.mesh import normal
from partc.compiler.plan.groups import ranks_text
from partc.compiler.sharding.values.operands import (
    input_layout_of,
    is_derived,
    output_layout_of,
    replicated_on,
    shared_out,
)
from partc.runtime.spellings import first_free, stroked
from partc.runtime.units import first_of


@dataclass
class ValueVersions:
    """All versions of each value.

    `defs`: as produced or fed. `canonical`: maps a partial definition to its reduced version, or an output to the plan's layout. `uses`:
    versions that are read, with the first reader as cause. `delivered`: versions of the model's outputs. `names`: the name of each version.
    `read` and `definitions`: map a node on a group to its operands, None for one that is absent, and to its outputs.
    """

    defs: dict[ir.Value, list[ShardedValue]] = field(default_factory=dict)
    canonical: dict[ShardedValue, ShardedValue] = field(default_factory=dict)
    uses: dict[ir.Value, dict[ShardedValue, str]] = field(default_factory=dict)
    delivered: dict[ir.Value, list[ShardedValue]] = field(default_factory=dict)
    names: dict[ShardedValue, str] = field(default_factory=dict)
    derived: set[ShardedValue] = field(default_factory=set)
    """Versions that only readers with a derived sharding need."""
    read: dict[NodeOnGroup, Sequence[ShardedValue | None]] = field(default_factory=dict)
    definitions: dict[NodeOnGroup, Sequence[ShardedValue]] = field(default_factory=dict)

    def definition_for(self, version: ShardedValue) -> ShardedValue:
        """Returns the version from which a used one is made: the definition on its group, else the first one; in its canonical layout."""
        defs = self.defs[version.value]
        home = next((one for one in defs if one.group == version.group), defs[0])
        return self.canonical.get(home, home)


def find_versions(program: Sharded, delivered: dict[ir.Value, tuple[tuple[int, ...] | None, bool]]) -> ValueVersions:
    """Returns all versions of all values, named. `delivered`: outputs' ranks (None: they stay), and whether they stay sharded."""
    versions = ValueVersions()
    graph = program.model.graph
    order = sorted(graph, key=lambda node: program.placement[node].follows)
    for node in graph:
        for group in program.placement[node].groups:
            instance = NodeOnGroup(node, group)
            versions.definitions[instance] = [output_layout_of(program, instance, k) for k in range(len(node.outputs))]
            for version in versions.definitions[instance]:
                versions.defs.setdefault(version.value, []).append(version)
    for node in order:
        placed = program.placement[node]
        cause = f"read by {program.paths[node]} ({placed.rule})"
        for group in placed.groups:
            instance = NodeOnGroup(node, group)
            versions.read[instance] = [
                None if value is None else input_layout_of(program, instance, k) for k, value in enumerate(node.inputs)
            ]
            wanted = [version for version in versions.read[instance] if version is not None]
            wanted += [replicated_on(value, group) for value in program.around[node]]
            derived = is_derived(program, instance)
            for version in wanted:
                known = versions.uses.setdefault(version.value, {})
                if derived and version not in known:
                    versions.derived.add(version)
                elif not derived:
                    versions.derived.discard(version)
                known.setdefault(version, cause)
    _arrivals(program, versions, delivered)
    _as_begun(program, versions)
    for value, (ranks, cut) in delivered.items():
        deliver(program, versions, value, ranks, cut and program.values[value].shape is not None)
    for value, defs in versions.defs.items():
        for home in defs:
            reduce_definition(program, versions, value, home)
    fed = program.training.fed if program.training else ()
    for value in {**versions.defs, **versions.uses}:
        _name(versions, value, program.own_names, fed)
    return versions


def _arrivals(
    program: Sharded, versions: ValueVersions, delivered: Mapping[ir.Value, tuple[tuple[int, ...] | None, bool]]
) -> None:
    """Adds the versions in which inputs and weights arrive: inputs on every group that reads them, sharded as in the plan; weights as they
    are read, or as in a rule.

    Among groups with a rank in common the largest has a sharded input, which is sent to the others. An input that is also an output, and is
    delivered replicated, arrives replicated: on one rank it is one value.
    """
    graph = program.model.graph
    arriving = program.pinned.arriving
    for value in graph.inputs:
        groups = list(dict.fromkeys(version.group for version in versions.uses.get(value, ())))
        cut = [
            ShardedValue(value, group, normal(arriving[there][0]))
            for group in groups
            if (there := ValueOnGroup(value, group)) in arriving
        ]
        whole = [replicated_on(value, group) for group in groups]
        apart: list[ShardedValue] = []
        for version in sorted(cut, key=lambda version: -len(version.group)):
            if all(set(version.group).isdisjoint(other.group) for other in apart):
                apart.append(version)
        ranks, stays = delivered.get(value, ((), True))
        if not stays and any(ranks is None or not {*ranks}.isdisjoint(version.group) for version in apart):
            apart = []
        versions.defs[value] = apart or whole
    for value in graph.initializers.values():
        uses = versions.uses.get(value, ())
        versions.defs[value] = _homes(program, uses)
        versions.derived -= {
            version for version in uses if stored_for(program, version) != version
        }  # a rule asks for it


def _homes(program: Sharded, uses: Iterable[ShardedValue]) -> list[ShardedValue]:
    """Returns the versions of a weight that ranks store; of a parameter stored in shards one on each list of ranks, that of most shards."""
    homes = [*dict.fromkeys(stored_for(program, version) for version in uses)]
    if not homes or homes[0].value not in program.pinned.units:
        return homes
    most: dict[Group, ShardedValue] = {}
    for home in sorted(homes, key=lambda home: -math.prod(home.layout.shards)):
        most.setdefault(home.group, home)
    return [home for home in homes if most[home.group] == home]


def stored_for(program: Sharded, version: ShardedValue) -> ShardedValue:
    """Returns the version of a weight that is stored on the ranks which read `version`: that of a rule or unit, else `version` itself."""
    if unit := program.pinned.units.get(version.value):
        return shared_out(program, version, unit.rule.axis)
    there = ValueOnGroup(version.value, version.group)
    rule = program.pinned.stored.get(there) or program.pinned.arriving.get(there)
    return ShardedValue(version.value, version.group, normal(rule[0])) if rule else version


def _as_begun(program: Sharded, versions: ValueVersions) -> None:
    """Gives parameters, and the inputs of an accumulated microbatch, the layouts and names that they have in the program of the step."""
    step = program.other_programs.get(ProgramKind.STEP)
    graph, lying = program.model.graph, {} if step is None else step.input_locations
    inputs = graph.inputs if program.training else ()
    for value in (*inputs, *graph.initializers.values()):
        there = {ShardedValue(value, *key): name for key, name in lying.get(name_of(value), {}).items()}
        if there and versions.uses.get(value):
            names = {home: name for home in versions.defs[value] if (name := _name_there(home, there))}
            chosen = names if len(names) == len(versions.defs[value]) else there
            versions.defs[value] = [*chosen]
            versions.names |= chosen


def _name_there(home: ShardedValue, there: Mapping[ShardedValue, str]) -> str | None:
    """Returns the name of `home` in the program of the step. A replicated value on overlapping groups is listed for one of them."""
    if home in there or not home.layout.is_replicated:
        return there.get(home)
    whole = {rank: name for version, name in there.items() if version.layout.is_replicated for rank in version.group}
    names = {whole.get(rank) for rank in home.group}
    return names.pop() if len(names) == 1 else None


def deliver(
    program: Sharded, versions: ValueVersions, value: ir.Value, ranks: tuple[int, ...] | None, cut: bool
) -> None:
    """Lists the versions of an output of the model on the ranks to which it is delivered, as if read there."""
    producer = value.producer()
    defs = versions.defs.setdefault(value, [])
    if producer is None and not defs:
        defs.append(replicated_on(value, (0,)))
    if cut and not defs[0].layout.partial:
        versions.delivered[value] = [defs[0]]
        return
    groups = _delivered_to(program, ranks, defs[0].group) if ranks is not None else [defs[0].group]
    versions.delivered[value] = [replicated_on(value, group) for group in groups]
    if cut:
        home = defs[0]
        versions.delivered[value] = [
            ShardedValue(value, home.group, normal(Layout(home.layout.mesh, home.layout.cuts)))
        ]
    for version in versions.delivered[value]:
        where = (
            f"rank {version.group[0]}" if len(version.group) == 1 else f"ranks {version.group[0]}-{version.group[-1]}"
        )
        versions.uses.setdefault(value, {}).setdefault(version, f"output '{value.name}' is delivered to {where}")
    if producer is None and value.is_initializer():
        versions.defs[value] = _homes(program, versions.uses[value])
    elif producer is None and defs[0].layout.is_replicated:
        defs += [version for version in versions.delivered[value] if version.group not in [home.group for home in defs]]


def _delivered_to(program: Sharded, ranks: Group, source: Group) -> list[Group]:
    """Returns the groups that get an output: single ranks, or if all of its own group are among them that group, and runs of equal length.

    So a group gathers it by one collective, each of its ranks sends it to one rank of each run, and ranks of a run share a program.
    """
    if len(source) == 1 or not {*source} <= {*ranks}:
        return [(rank,) for rank in ranks]
    others = [rank for rank in ranks if rank not in {*source}]
    return [source, *(tuple(others[at : at + len(source)]) for at in range(0, len(others), len(source)))]


def reduce_definition(program: Sharded, versions: ValueVersions, value: ir.Value, source: ShardedValue) -> None:
    """Sets the canonical version of a partial definition: reduced on its own ranks, unless another layout is cheaper for its only reader.

    An output whose layout the plan gives takes that first. One that is passed on (`sharding/values/sums.py`), or not read, stays partial.
    """
    producer = value.producer()
    if producer is None:
        return
    key = (NodeOnGroup(producer, source.group), producer.outputs.index(value))
    if key in program.pinned.outputs:
        wanted = ShardedValue(value, source.group, normal(program.pinned.outputs[key][0]))
        if wanted != source:
            versions.canonical[source] = wanted
        return
    uses = versions.uses.get(value, {})
    kept = {*program.training.statistics.values()} if program.training else set()
    if not source.layout.partial or source in uses or not (uses or value in kept):
        return
    first = versions.defs[value][0]
    served = [version for version in uses if version != source and (version.group == source.group or source == first)]
    if len(served) != 1:
        versions.canonical[source] = ShardedValue(
            value, source.group, normal(Layout(source.layout.mesh, source.layout.cuts))
        )


def undivided_units(program: Sharded, versions: ValueVersions) -> list[str]:
    """Returns warnings of parameters to be stored in shards that stay unsharded, or that no message joins with others.

    Raises CompileError for a rule that divides none.
    """
    problems, warnings = list[Problem](), list[str]()
    for rule in program.plan.stored.rules:
        read = [value for value, unit in program.pinned.units.items() if unit.rule is rule and versions.uses.get(value)]
        whole = [value for value in read if all(home in versions.uses[value] for home in versions.defs[value])]
        apart = [value for value in read if value not in whole and _is_sharded_after_first(versions, value)]
        if not whole and not apart:
            continue
        group = versions.defs[(whole or apart)[0]][0].group
        along = len(group) if rule.axis is True else dict(program.plan.axes_of(group)).get(rule.axis, 0)
        if apart:
            names = first_of([f"'{value.name}' {list(value.shape or ())}" for value in apart])
            law = f"the first dim is not divisible by {along}, and a message joins what is cut along that one"
            have = "has messages of its own" if len(apart) == 1 else "have messages of their own"
            warnings.append(f"{rule.where}: {names} {have}: {law}")
        if not whole:
            continue
        names = first_of([f"'{value.name}' {list(value.shape or ())}" for value in whole])
        over = f"the {along} ranks" if rule.axis is True else f"the {along} ranks of '{rule.axis}'"
        law = f"no dim of {names} is divisible by {along}"
        if not along:
            over, law = f"ranks along '{rule.axis}'", f"{names} are read on {ranks_text(group)}"
        if len(whole) < len(read):
            warnings.append(f"{rule.where}: {names} {'stays' if len(whole) == 1 else 'stay'} whole on each rank: {law}")
        elif along != 1:
            help_ = "store them along another axis, or leave the line out"
            problems.append(Problem(rule.where, f"'{rule.pattern}': nothing can be shared by {over}", law, help_))
    if problems:
        raise CompileError(problems)
    return warnings


def _is_sharded_after_first(versions: ValueVersions, value: ir.Value) -> bool:
    """Whether a stored parameter is cut along another dim than the first, compared with how it is read."""
    stored, (used, *_) = versions.defs[value][0].layout.cuts, [one.layout.cuts for one in versions.uses[value]]
    return stored[0] == used[0] and stored != used


def replicated_outputs(program: Sharded, versions: ValueVersions, outputs: list[ir.Value]) -> list[str]:
    """Returns warnings of outputs that should stay sharded, but cannot, since their shapes are not known."""
    warnings = []
    for value in outputs:
        home = next(iter(versions.defs.get(value, ())), None)
        if program.values[value].shape is None and home is not None and any(home.layout.cuts):
            law, remedy = how_lost(program, value, next(iter(unknown_dims(program, value)), None))
            warnings.append(
                f"output '{value.name}' is gathered, for only a value of known shape can stay sharded: {law}; {remedy}"
            )
    return warnings


def can_share(version: ShardedValue, other: ShardedValue) -> bool:
    """Whether two versions may have one name: they share no rank, or one's ranks are among the other's and have the same shards."""
    here, there = ranks_of(version.group), ranks_of(other.group)
    common = here & there
    if not common:
        return True
    if version.layout.partial or other.layout.partial or common not in (here, there):
        return False
    if version.layout.shards != other.layout.shards:
        return all(
            span_of(version.layout, version.places[rank]) == span_of(other.layout, other.places[rank])
            for rank in members(common)
        )
    return _shard_numbers(version, common) == _shard_numbers(other, common)


def _shard_numbers(version: ShardedValue, ranks: Ranks) -> list[tuple[int, ...]]:
    """Returns the indices of the shards, one for each dim, of these ranks of a version."""
    places = [version.places[rank] for rank in members(ranks)]
    rows = [shards_along(version.layout.mesh, axes) for axes in version.layout.cuts]
    return [tuple([row[place] for row in rows]) for place in places]


def _computes_both(versions: ValueVersions, version: ShardedValue, other: ShardedValue) -> bool:
    """Whether a rank makes both of two versions: one is a definition, the other is resharded from another definition, on more ranks."""
    defs = versions.defs.get(version.value, [])
    made = {*defs, *(versions.canonical[home] for home in defs if home in versions.canonical)}
    if (version in made) == (other in made):
        return False
    home, derived = (version, other) if version in made else (other, version)
    here, there = ranks_of(home.group), ranks_of(derived.group)
    return bool(here & there) and bool(there & ~here) and versions.definition_for(derived) != home


def _name(versions: ValueVersions, value: ir.Value, own: frozenset[str], fed: Collection[str]) -> None:
    """Names the versions of a value; no name is that of another value of the model (`own`), or of a scalar of a training step (`fed`)."""
    name = operand_name(value)
    allowed = "" if name in fed and not value.is_graph_input() else name
    defs, delivered = versions.defs.get(value, []), versions.delivered.get(value, ())
    if value.is_graph_input():  # nobody makes it: what is whole is one value, however groups overlap
        versions.names.update({home: name for home in defs if home.layout.is_replicated})
    for version in delivered:
        source = versions.definition_for(version) if defs else version
        replicated = source.layout.is_replicated and version.layout.is_replicated
        if replicated and not ranks_of(version.group) & ~ranks_of(source.group):
            versions.names[source] = versions.names[version] = name
    order = _by_claim(versions, value)
    for version in order:
        if version in versions.names:
            continue
        first, *others = _spellings(name, version)
        known = [one for one in order if one in versions.names]
        apart = (one for one in known if not can_share(one, version) or _computes_both(versions, one, version))
        taken = {versions.names[one] for one in apart}

        def is_taken(one: str, taken: Collection[str] = taken) -> bool:
            return one in taken or (one != allowed and (one in own or one in fed))

        def spellings(_: str, others: Sequence[str] = others) -> Iterable[str]:
            return chain(others, stroked(others[-1]))

        versions.names[version] = first_free(first, is_taken, spellings)


def _by_claim(versions: ValueVersions, value: ir.Value) -> list[ShardedValue]:
    """Returns the versions of a value by their priority for its name: delivered, reduced, made, read, partial."""
    defs = versions.defs.get(value, [])
    canonical = (versions.canonical[home] for home in defs if home in versions.canonical)
    made = (home for home in defs if not home.layout.partial)
    uses = versions.uses.get(value, ())
    return list(dict.fromkeys([*versions.delivered.get(value, ()), *canonical, *made, *uses, *defs]))


def _spellings(name: str, version: ShardedValue) -> list[str]:
    """Returns the possible names of a version, in order: `h`, `h@[2, 1]`, `h@[2, 1]@0-1`; for partial sums `h.partial` and so on."""
    apart = f"{name}.partial" if version.layout.partial else f"{name}@{version.layout}"
    plain = [] if version.layout.partial else [name]
    return [*plain, apart, f"{apart}@{facts_of(version.group).text}"]
