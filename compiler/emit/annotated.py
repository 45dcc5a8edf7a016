"""Writes a compiled model back as one global model, in which every node is annotated with its ranks and its sharding.

Results are those of the original model: annotations are hints, and communication stays implicit. A node on one rank has that device in
every spec, and the rank as its pipeline stage; an output that is a partial sum is annotated with its layout after the reduction. Compiled
again without a plan, the file gives the same programs. Annotations that the model came with are replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx_ir as ir
from partc.compiler.annotations.read import Followed
from partc.compiler.annotations.seed import sharded_by_operands
from partc.compiler.annotations.spread import Spread, spec_of, spread_of
from partc.compiler.dims.facts import Facts
from partc.compiler.emit.whole import save_unsharded
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend import annotation_keys as keys
from partc.compiler.frontend.functions import CALLS
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Complete
from partc.compiler.ir.sharded import Group
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal
from partc.compiler.matching import output_ranks
from partc.compiler.ops.families.neural.ring import is_ring
from partc.compiler.ops.families.neural.sharded_cache_attention import is_sharded_attention
from partc.compiler.ops.families.shapes.joined import is_joined

IR_VERSION = 11
CONFIGURATION = "partc"


def write_annotated(program: Complete, path: Path) -> None:
    """Writes the annotated model to `path`, and large weights next to it to a file of that name with `.data`.

    Raises CompileError if that would overwrite weights that the model is read from, and for attention that no op of the standard is.
    """
    context = program.plan.context
    kinds = {
        "attention in a ring": is_ring,
        "tokens joined with the batch in an order of ranks": is_joined,
        "attention over caches whose entries ranks share": is_sharded_attention,
    }
    for kind, is_kind in kinds.items() if context is not None else ():
        if (node := next(filter(is_kind, program.model.graph), None)) is not None and context is not None:
            fact = f"'{program.paths[node]}' is {kind}, which --annotated cannot write"
            help_ = (
                "write attention: gather, or heads, or leave out --annotated"
                if is_ring(node)
                else "leave out --annotated"
                if is_sharded_attention(node)
                else "leave out --annotated, or cut `dataset` in place of 'context'"
            )
            raise CompileError(Problem(context.where("attention"), fact, "no op of the standard is one", help_))
    save_unsharded(annotated(program), path, "--annotated")


def annotated(program: Complete) -> ir.Model:
    """Returns a copy of the program's model with its choices as annotations; the program must have its shardings."""
    model = program.model.clone()
    model.device_configurations = ()
    model.ir_version = max(model.ir_version or 0, IR_VERSION)
    known = program.declared.annotations
    source = known.configuration if known is not None else None
    same = source is not None and source.num_devices == program.plan.ranks
    configuration = model.add_device_configuration(
        source.name if source is not None and source.name else CONFIGURATION,
        num_devices=program.plan.ranks,
        device_names=source.device_names if source is not None and same else (),
    )
    _forget(model)
    for old, new in zip(program.model.graph, model.graph, strict=True):
        if CALLS in old.meta:  # of what was inside of a function the file tells no module
            new.name = program.paths[old]
        _annotate(program, old, new, configuration)
    for value, copy in zip(program.model.graph.inputs, model.graph.inputs, strict=True):
        if records := list(_arrivals(program, value)):
            copy.metadata_props[keys.ARRIVES] = keys.encode(records)
    delivered, _ = output_ranks(program)
    for value, copy in zip(program.model.graph.outputs, model.graph.outputs, strict=True):
        ranks, cut = delivered[value]
        if (ranks, cut) != ((0,), False):
            copy.metadata_props[keys.DELIVERED] = keys.encode({"ranks": ranks, "cut": cut})
    if program.plan.mesh:
        model.metadata_props[keys.MESH] = keys.encode([list(axis) for axis in program.plan.mesh])
    if kept := _kept(program):
        model.metadata_props[keys.KEPT] = keys.encode(kept)
    symbols = {name: said for name, info in program.symbols.items() if (said := _symbol(info.facts))}
    if symbols:
        model.metadata_props[keys.SYMBOLS] = keys.encode(symbols)
    return model


def _forget(model: ir.Model) -> None:
    graph = model.graph
    for node in ir.traversal.RecursiveGraphIterator(graph):
        node.device_configurations = ()
        _drop(node.metadata_props)
    for value in (*graph.inputs, *graph.outputs):
        _drop(value.metadata_props)
    _drop(model.metadata_props)


def _drop(metadata: dict[str, str]) -> None:
    for key in [key for key in metadata if key.startswith(keys.PREFIX)]:
        del metadata[key]


def _annotate(program: Complete, old: ir.Node, new: ir.Node, configuration: ir.ModelConfiguration) -> None:
    placed = program.placement[old]
    if placed.follows:
        new.metadata_props[keys.FOLLOWS] = keys.encode(True)
    if len(placed.groups) != 1:
        _cuts(program, old, new, placed.groups)
        return
    instance = NodeOnGroup(old, placed.groups[0])
    group, choice = instance.group, _choice(program, instance)
    inputs = {k: _read(choice, k, group) for k, value in enumerate(old.inputs) if value is not None and value.name}
    outputs = {k: _made(program, instance, k) for k, value in enumerate(old.outputs) if value.name}
    specs: dict[ir.Value, ir.ShardingSpec] = {}
    for values, spreads in ((new.inputs, inputs), (new.outputs, outputs)):
        for k, spread in spreads.items():
            value = values[k]
            assert value is not None
            specs.setdefault(value, spec_of(value, spread))
    stage = group[0] if len(group) == 1 else None
    new.device_configurations = (ir.NodeDeviceConfiguration(configuration, tuple(specs.values()), stage),)
    if list(group) != sorted(group):
        new.metadata_props[keys.GROUP] = keys.encode(group)
    if choice is None:
        return
    _sums(program, instance, choice, new, outputs)
    if _unlike(old, inputs) or not _told(instance, choice, Followed(group, inputs, outputs, "")):
        _cuts(program, old, new, placed.groups)


def _sums(program: Complete, instance: NodeOnGroup, choice: NodeSharding, new: ir.Node, outputs: Iterable[int]) -> None:
    """Notes the outputs that a node makes as partial results, and those that are reduced although the node could pass them on."""
    node, pinned = instance.node, program.pinned.outputs
    partial = {k: layout for k in outputs if (layout := choice.output(k)) is not None and layout.partial}
    if partial:
        terms = {node.outputs[k].name: _terms(layout, instance.group) for k, layout in partial.items()}
        new.metadata_props[keys.TERMS] = keys.encode(terms)
    reduced = [
        node.outputs[k].name
        for k in outputs
        if (instance, k) in pinned and (k in partial or _might_pass(choice, k, pinned[instance, k][0]))
    ]
    if reduced:
        new.metadata_props[keys.REDUCED] = keys.encode(reduced)


def _cuts(program: Complete, old: ir.Node, new: ir.Node, groups: tuple[Group, ...]) -> None:
    """Notes each factor's axes for every group that could shard the node: an unsharded node must not be sharded like its neighbours."""
    records = [
        {"ranks": group, "mesh": choice.mesh, "axes": {letter: axes for letter, axes in choice.axes.items() if axes}}
        for group in groups
        if (choice := _choice(program, NodeOnGroup(old, group))) is not None and choice.rule.factors and choice.mesh
    ]
    if records:
        new.metadata_props[keys.CUTS] = keys.encode(records)


def _might_pass(choice: NodeSharding, k: int, wanted: Layout) -> bool:
    """Whether a node could leave an output as a partial sum, and the wanted layout does not show that it must not."""
    made = choice.output(k)
    return bool(choice.rule.partial_inputs) and made is not None and normal(made) == normal(wanted)


def _choice(program: Complete, instance: NodeOnGroup) -> NodeSharding | None:
    """Returns a node's sharding with partial sums reduced where they are made: the nodes that pass them on follow from the sharding."""
    choice = program.choices.get(instance)
    return choice.settled() if choice else None


def _read(choice: NodeSharding | None, k: int, group: Group) -> Spread:
    layout = choice.input(k) if choice else None
    return Spread((), (tuple(sorted(group)),)) if layout is None else spread_of(normal(layout), group)


def _made(program: Complete, instance: NodeOnGroup, k: int) -> Spread:
    """Returns the layout in which readers get an output: the plan's, else the reduced one."""
    choice = _choice(program, instance)
    layout = choice.output(k) if choice else None
    if layout is None:
        return Spread((), (tuple(sorted(instance.group)),))
    wanted = program.pinned.outputs.get((instance, k))
    settled = wanted[0] if wanted else Layout(layout.mesh, layout.cuts)
    return spread_of(normal(settled), instance.group)


def _unlike(node: ir.Node, inputs: dict[int, Spread]) -> bool:
    """Whether the node reads one value in two layouts, which one spec for the tensor cannot say."""
    first: dict[ir.Value, Spread] = {}
    return any(
        first.setdefault(value, inputs[k]) != inputs[k]
        for k, value in enumerate(node.inputs)
        if value is not None and k in inputs
    )


def _told(instance: NodeOnGroup, choice: NodeSharding, followed: Followed) -> bool:
    """Whether the node's sharding follows from its operands' spreads alone."""
    again = NodeSharding(choice.rule, choice.mesh)
    if sharded_by_operands(instance, again, followed) or again.open:
        return False
    return all(_same(again.input(k), choice.input(k)) for k in range(len(choice.rule.inputs))) and all(
        _same(again.output(k), choice.output(k)) for k in range(len(choice.rule.outputs))
    )


def _same(one: Layout | None, other: Layout | None) -> bool:
    return one is other if one is None or other is None else normal(one) == normal(other)


def _terms(layout: Layout, group: Group) -> dict[str, list[list[int]]]:
    kinds = dict.fromkeys(reduce for _, reduce in layout.partial)
    return {
        kind: [
            [group[index] for index in ranks]
            for ranks in layout.groups([axis for axis, reduce in layout.partial if reduce == kind])
        ]
        for kind in kinds
    }


def _arrivals(program: Complete, value: ir.Value) -> Iterator[dict[str, object]]:
    for there, (layout, _) in (program.pinned.arriving | program.pinned.stored).items():
        if there.value is value:
            yield {"ranks": there.group, "mesh": layout.mesh, "cuts": layout.cuts}


def _kept(program: Complete) -> dict[str, list[dict[str, object]]]:
    """Maps each weight that is read in another layout somewhere to the layouts in which it is kept."""
    layouts: dict[str, list[dict[str, object]]] = {}
    for there, (layout, _) in (program.pinned.arriving | program.pinned.stored).items():
        value = there.value
        if value.is_initializer() and any(
            (read := program.choices[instance].input(k)) is None or normal(read) != normal(layout)
            for instance, k in ((NodeOnGroup(use.node, there.group), use.idx) for use in value.uses())
            if instance in program.choices
        ):
            layouts[name_of(value)] = list(_arrivals(program, value))
    return layouts


def _symbol(facts: Facts) -> dict[str, int]:
    """Returns the arguments of a Symbol with these facts; empty if there are no facts."""
    if facts == Facts():
        return {}
    if facts.value is not None:
        return {"min": facts.value, "max": facts.value}
    said = {
        "divisor": facts.divisor,
        "remainder": facts.remainder,
        "min": max(1, facts.min or 1),
        "max": facts.max or 0,
    }
    return {name: number for name, number in said.items() if number}
