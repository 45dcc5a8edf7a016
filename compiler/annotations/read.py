"""Reads a model's annotations, bound to nodes and operands, before any pass replaces one of these.

The first configuration that the model declares is meant, or the one that the user names; `none` means none. Nothing is judged
here but which configuration it is; `check.py` does.

A node's annotation after it was checked against the graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir
from partc.compiler.annotations.spread import Spread
from partc.compiler.dims.symbol import Symbol
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend import annotation_keys as keys
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.sharded import Group
from partc.compiler.layout.layout import Mesh
from partc.compiler.plan.groups import Axes
from partc.compiler.plan.pattern import literal_pattern
from partc.compiler.plan.rules import OutputRule, Plan
from partc.runtime.spellings import nearest

NONE = "none"


@dataclass(frozen=True)
class Mark:
    """A sharding spec with the node's inputs and outputs that it describes; both empty if it describes none."""

    spec: ir.ShardingSpec
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class NodeMarks:
    """A node's annotation under the configuration; `entries`: the number of its entries."""

    marks: tuple[Mark, ...]
    stage: int | None
    entries: int


@dataclass(frozen=True)
class Annotations:
    """A model's annotations under one configuration. `dangling`: nodes by the configuration that they name and the model does not declare.

    `symbols`, `outputs` and `mesh` are what metadata says.
    """

    configuration: ir.ModelConfiguration
    nodes: Mapping[ir.Node, NodeMarks]
    dangling: Mapping[str, tuple[ir.Node, ...]] = field(default_factory=dict)
    symbols: Mapping[str, Symbol] = field(default_factory=dict)
    outputs: tuple[OutputRule, ...] = ()
    mesh: Axes = ()
    warnings: tuple[str, ...] = ()
    asked: str | None = None
    """The name by which the configuration was asked for."""

    @property
    def several(self) -> bool:
        """Whether any tensor or node lies on several devices."""
        return self.configuration.num_devices > 1 and any(
            spec.sharded_dims or len(spec.device) > 1 or spec.index_to_device_group_map
            for node in self.nodes.values()
            for spec in (mark.spec for mark in node.marks)
        )

    def plan(self) -> Plan:
        """The plan of a model that has annotations and no plan file."""
        ranks = self.configuration.num_devices
        mesh = self.mesh if math.prod(size for _, size in self.mesh) == ranks else ()
        return Plan(ranks=ranks, mesh=mesh)


def read(model: ir.Model, where: str, name: str | None = None) -> Annotations | None:
    """The annotations of a model under the configuration called `name`, or the first one; None where there are none.

    Raises CompileError for a name that no configuration has, several of one name, and metadata that is broken.
    """
    if name == NONE:
        return None
    configuration = _chosen(model, where, name)
    nodes, dangling = _marks(model, configuration)
    if configuration is None and not dangling:
        return None
    configuration = configuration or ir.ModelConfiguration("", 0)
    try:
        mesh = tuple((str(axis), int(size)) for axis, size in _pairs(model.metadata_props))
        outputs = tuple(_outputs(model, where))
        declared = keys.mapping(keys.decode(model.metadata_props, keys.SYMBOLS), keys.SYMBOLS)
        symbols = {
            name: Symbol(**keys.mapping(facts, keys.SYMBOLS))  # type: ignore[arg-type]
            for name, facts in declared.items()
        }
    except (keys.BrokenKey, TypeError, ValueError) as error:
        raise CompileError(
            Problem(where, str(error), help=f"remove the metadata that begins with '{keys.PREFIX}'")
        ) from None
    warnings = [_inside_bodies(model, where), _others(model, where, name)]
    told = tuple(warning for warning in warnings if warning)
    return Annotations(configuration, nodes, dangling, symbols, outputs, mesh, told, name)


def _chosen(model: ir.Model, where: str, name: str | None) -> ir.ModelConfiguration | None:
    declared = model.device_configurations
    names = [one.name for one in declared]
    problems = [
        Problem(
            where, f"{names.count(each)} device configurations are called '{each}'", "names of configurations differ"
        )
        for each in dict.fromkeys(names)
        if names.count(each) > 1
    ]
    for configuration in declared:
        if configuration.num_devices < 1:
            problems.append(
                Problem(
                    where,
                    f"the device configuration '{configuration.name}' has {configuration.num_devices} devices",
                    "it has at least 1",
                )
            )
        elif configuration.device_names and len(configuration.device_names) != configuration.num_devices:
            named = f"devices, but names {len(configuration.device_names)}"
            fact = f"the device configuration '{configuration.name}' has {configuration.num_devices} {named}"
            problems.append(Problem(where, fact, "names are given to all devices or to none"))
    if name is not None and name not in names:
        listed = ", ".join(f"'{each}'" for each in nearest(name, names) or names)
        remedy = f"choose {listed}" if listed else "leave --configuration out: it declares none"
        problems.append(Problem(where, f"the model declares no device configuration '{name}'", help=remedy))
    if problems:
        raise CompileError(problems)
    if name is not None:
        return next(one for one in declared if one.name == name)
    return declared[0] if declared else None


def _marks(
    model: ir.Model, configuration: ir.ModelConfiguration | None
) -> tuple[dict[ir.Node, NodeMarks], dict[str, tuple[ir.Node, ...]]]:
    nodes: dict[ir.Node, NodeMarks] = {}
    dangling: dict[str, list[ir.Node]] = {}
    known = {one.name for one in model.device_configurations}
    for node in model.graph:
        mine = []
        for entry in node.device_configurations:
            called = entry.configuration.name if entry.configuration is not None else ""
            if called not in known:
                dangling.setdefault(called, []).append(node)
            elif configuration is not None and called == configuration.name:
                mine.append(entry)
        told = configuration is not None and any(key in node.metadata_props for key in (keys.FOLLOWS, keys.CUTS))
        if mine or told:
            marks = tuple(_mark(node, spec) for entry in mine for spec in entry.sharding_specs)
            nodes[node] = NodeMarks(marks, mine[0].pipeline_stage if mine else None, len(mine))
    return nodes, {called: tuple(found) for called, found in dangling.items()}


def _mark(node: ir.Node, spec: ir.ShardingSpec) -> Mark:
    if spec.value is None:
        return Mark(spec, (), ())
    inputs = tuple(k for k, value in enumerate(node.inputs) if value is spec.value)
    return Mark(spec, inputs, tuple(k for k, value in enumerate(node.outputs) if value is spec.value))


def _outputs(model: ir.Model, where: str) -> list[OutputRule]:
    rules = []
    for value in model.graph.outputs:
        said = keys.mapping(keys.decode(value.metadata_props, keys.DELIVERED), keys.DELIVERED)
        if said:
            ranks = None if said.get("ranks") is None else keys.integers(said["ranks"], keys.DELIVERED)
            rules.append(OutputRule(literal_pattern(name_of(value)), ranks, where, bool(said.get("cut"))))
    return rules


def _pairs(metadata: Mapping[str, str]) -> list[tuple[str, int]]:
    said = keys.decode(metadata, keys.MESH)
    if said is None:
        return []
    if not isinstance(said, list) or not all(isinstance(each, list) and len(each) == 2 for each in said):
        raise keys.BrokenKey(f"the metadata '{keys.MESH}' wants pairs of a name and a size, but has {said!r}")
    return [(name, size) for name, size in said]


def _inside_bodies(model: ir.Model, where: str) -> str:
    inside = [
        node
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        if node.graph is not model.graph and node.device_configurations
    ]
    if not inside:
        return ""
    return (
        f"{where}: the annotations of {len(inside)} nodes inside of bodies, the first '{inside[0].name}', are not followed: "
        "a body runs where its node runs"
    )


def _others(model: ir.Model, where: str, name: str | None) -> str:
    names = [one.name for one in model.device_configurations]
    if name is not None or len(names) < 2:
        return ""
    return (
        f"{where}: of the device configurations {', '.join(names)} the first is compiled; --configuration names another"
    )


@dataclass(frozen=True)
class Followed:
    """What a node's annotation asks for: its ranks in order, its operands' spreads, and what metadata adds.

    `cuts`: per group the mesh and the axes by factor; `reduced`: outputs that are reduced where they are made.
    """

    group: Group
    inputs: Mapping[int, Spread]
    outputs: Mapping[int, Spread]
    where: str
    follows: bool = False
    cuts: Mapping[Group, tuple[Mesh, Mapping[str, tuple[int, ...]]]] = field(default_factory=dict)
    reduced: frozenset[str] = frozenset()
