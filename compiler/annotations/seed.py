"""Shardings from annotations: the axes of each factor, and outputs whose annotated layout differs from the one that the node produces.

The inputs' spreads decide: each must be the layout of one mesh that they have in common. An output that is spread in another way than the
cut node makes it is resharded where it is made. Rules of the plan and `shard` calls of the model win over annotations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.annotations.read import Followed
from partc.compiler.annotations.spread import Spread, any_layout, layout_on, meshes
from partc.compiler.errors import Problem
from partc.compiler.frontend import annotation_keys as keys
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding, Pinned, ValueOnGroup
from partc.compiler.ir.graph import operand_name
from partc.compiler.ir.program import Placed
from partc.compiler.ir.sharded import Group
from partc.compiler.layout.layout import Layout, Mesh
from partc.compiler.layout.mesh import normal
from partc.compiler.ops.rule import WHOLE, Rule
from partc.compiler.plan.rules import FULL_BATCH

_LAW = "the layouts of a node's operands are on one grid of its ranks"


def seed_annotations(
    program: Placed, choices: Mapping[NodeOnGroup, NodeSharding], pins: Pinned, decided: Mapping[ir.Node, object]
) -> list[Problem]:
    """Fills in the shardings that annotations pin, except those of `decided` nodes. Returns problems."""
    problems: list[Problem] = []
    for instance, choice in choices.items():
        followed = program.followed.get(instance.node)
        if followed is None or instance.node in decided:
            continue
        if instance.group in followed.cuts:
            mesh, axes = followed.cuts[instance.group]
            choice.mesh, choice.axes, choice.open = mesh, dict(axes), False
            choice.why.update(dict.fromkeys(axes, followed.where))
            settle_outputs(instance, choice, followed, pins)
        elif instance.group == followed.group:
            problems += sharded_by_operands(instance, choice, followed)
            if not problems:
                settle_outputs(instance, choice, followed, pins)
    problems += _arriving(program, pins)
    return problems


@dataclass(frozen=True)
class _InputDim:
    """A dim of an input: its letter in the op's rule, the mesh axes that shard it and its number of shards, its title in messages."""

    letter: str
    axes: tuple[int, ...]
    num_shards: int
    title: str


def sharded_by_operands(instance: NodeOnGroup, choice: NodeSharding, followed: Followed) -> list[Problem]:
    """Shards the factors of a node as its operands are spread, and closes it where every tensor input is annotated.

    Where that cannot be, the choice stays as it is, and the problems come back.
    """
    node, rule, group = instance.node, choice.rule, instance.group
    spread_inputs = {k: spread for k, spread in followed.inputs.items() if spread.count > 1}
    unknown = [_name(node.inputs, k) for k in spread_inputs if _letters(rule.inputs, k) is None]
    if unknown:
        facts = [f"'{name}' is sharded, but {node.op_type} cannot shard it" for name in unknown]
        return [Problem(followed.where, fact, help="leave it whole") for fact in facts]
    spread_outputs = [spread for spread in followed.outputs.values() if spread.count > 1]
    mesh = _common(choice.mesh, [*spread_inputs.values()], spread_outputs, group)
    if mesh is None:
        listed = ", ".join(f"'{_name(node.inputs, k)}' {list(spread.shards)}" for k, spread in spread_inputs.items())
        ranks = ", ".join(map(str, group)) if len(group) <= 8 else f"{group[0]}..{group[-1]}"
        fact = f"no grid of ranks {ranks} has the shards of {listed} where they are"
        return [Problem(followed.where, fact, _LAW)]
    axes, problems = _axes_of_factors(_input_dims(instance, rule, followed, mesh), rule, node.op_type, followed.where)
    if problems:
        return problems
    _add_factors_of_outputs(axes, instance, rule, followed, mesh)
    choice.mesh, choice.axes = mesh, axes
    choice.why.update(dict.fromkeys(axes, followed.where))
    tensors = [k for k, letters in enumerate(rule.inputs) if letters is not None and k < len(node.inputs)]
    choice.open = any(k not in followed.inputs for k in tensors)
    return []


def _input_dims(instance: NodeOnGroup, rule: Rule, followed: Followed, mesh: Mesh) -> Iterator[_InputDim]:
    """The dims of all annotated inputs, on a mesh that has a layout of each."""
    for k, spread in followed.inputs.items():
        layout = layout_on(mesh, spread, instance.group)
        assert layout is not None
        for dim, (letter, axes) in enumerate(zip(_letters(rule.inputs, k) or "", layout.cuts, strict=False)):
            yield _InputDim(letter, axes, spread.shards[dim], f"'{_name(instance.node.inputs, k)}' dim {dim}")


def _axes_of_factors(
    dims: Iterable[_InputDim], rule: Rule, op_type: str, where: str
) -> tuple[dict[str, tuple[int, ...]], list[Problem]]:
    """Per factor the mesh axes that shard it; problems where dims of a factor differ, or one axis shards two factors."""
    first: dict[str, _InputDim] = {}
    problems: list[Problem] = []
    for dim in dims:
        if dim.letter == WHOLE or dim.letter not in rule.factors:
            if dim.axes:
                fact = f"{dim.title} is sharded into {dim.num_shards}, but {op_type} needs it replicated"
                problems.append(Problem(where, fact, help="leave it whole"))
            continue
        other = first.setdefault(dim.letter, dim)
        if other.axes != dim.axes:
            how = f"into {other.num_shards}" if other.num_shards != dim.num_shards else "over other ranks"
            fact = f"{dim.title} is sharded into {dim.num_shards}, but {other.title}, which corresponds to it, {how}"
            problems.append(Problem(where, fact, "dims that correspond are sharded alike, over the same ranks"))
    axes = {letter: dim.axes for letter, dim in first.items()}
    ids = {axis for letter in rule.ids for axis in axes.get(letter, ())}  # rows that are looked up may share these
    used = [axis for letter, some in axes.items() for axis in some if letter != rule.looked_up or axis not in ids]
    if not problems and len(used) != len(set(used)):
        fact = f"the same ranks shard dims of {op_type} that do not correspond"
        law = "along one axis of the ranks' grid one factor is sharded"
        problems.append(Problem(where, fact, law, "see `partc ops` for its factors"))
    return axes, problems


def _add_factors_of_outputs(
    axes: dict[str, tuple[int, ...]], instance: NodeOnGroup, rule: Rule, followed: Followed, mesh: Mesh
) -> None:
    """Factors that no annotated input has are sharded as the outputs are, over axes that are still free."""
    for k, spread in followed.outputs.items():
        layout = layout_on(mesh, spread, instance.group)
        for letter, cut in zip(_letters(rule.outputs, k) or "", layout.cuts if layout else (), strict=False):
            used = {axis for some in axes.values() for axis in some}
            if letter in rule.factors and letter not in axes and used.isdisjoint(cut):
                axes[letter] = cut


def settle_outputs(instance: NodeOnGroup, choice: NodeSharding, followed: Followed, pins: Pinned) -> None:
    """Pins outputs whose annotated layout differs from what the sharded node makes, or that are reduced at once."""
    for k, spread in followed.outputs.items():
        layout = choice.output(k)
        if layout is None:
            continue
        wanted = layout_on(choice.mesh, spread, instance.group) or any_layout(spread, instance.group)
        if wanted is None:
            continue
        reduced = Layout(layout.mesh, layout.cuts)
        both_whole = (
            wanted.is_replicated and reduced.is_replicated
        )  # also where only the spec says how many dims there are
        unlike = normal(wanted) != normal(reduced) and not both_whole
        if unlike or instance.node.outputs[k].name in followed.reduced:
            pins.outputs[instance, k] = (wanted, followed.where)


def _common(preferred: Mesh, inputs: list[Spread], outputs: list[Spread], group: Group) -> Mesh | None:
    """The first mesh on which all inputs have a layout, preferring one on which the outputs have, too; None if there is none."""
    able = [
        mesh
        for mesh in dict.fromkeys((preferred, *meshes(len(group))))
        if all(layout_on(mesh, spread, group) is not None for spread in inputs)
    ]
    return next(
        (mesh for mesh in able if all(layout_on(mesh, each, group) for each in outputs)), able[0] if able else None
    )


def _arriving(program: Placed, pins: Pinned) -> list[Problem]:
    """Pins how inputs arrive, unless the plan says it, and how weights are kept, from metadata."""
    annotations = program.declared.annotations
    if annotations is None:
        return []
    annotated: list[tuple[ir.Value, str, object]] = []
    problems: list[Problem] = []
    help = "remove the metadata"
    if not program.plan.dataset.where and program.plan.dataset.style == FULL_BATCH:
        for value in program.model.graph.inputs:
            try:
                annotated.append((value, keys.ARRIVES, keys.decode(value.metadata_props, keys.ARRIVES)))
            except keys.BrokenKey as error:
                problems.append(Problem(program.name, f"input '{value.name}': {error}", help=help))
    try:
        weights = keys.mapping(keys.decode(program.model.metadata_props, keys.KEPT), keys.KEPT)
        initializers = program.model.graph.initializers
        annotated += [(initializers[name], keys.KEPT, said) for name, said in weights.items() if name in initializers]
    except keys.BrokenKey as error:
        problems.append(Problem(program.name, str(error), help=help))
    for value, key, said in annotated:
        try:
            for group, layout in _layouts(value, key, said):
                pinned = pins.arriving if key == keys.ARRIVES else pins.stored
                pinned[ValueOnGroup(value, group)] = (layout, program.name)
        except ValueError as error:
            kind = "input" if key == keys.ARRIVES else "weight"
            problems.append(Problem(program.name, f"{kind} '{value.name}': {error}", help=help))
    return problems


def _layouts(value: ir.Value, key: str, said: object) -> Iterator[tuple[Group, Layout]]:
    """The groups that a record of metadata names, with the layout of a value there. ValueError where it does not fit."""
    for one in keys.records(said, key):
        group, mesh = (keys.integers(one.get(word), key) for word in ("ranks", "mesh"))
        cuts = one.get("cuts")
        if not isinstance(cuts, list) or value.shape is None or len(cuts) != len(value.shape):
            raise keys.BrokenKey(f"the metadata '{key}' wants one list of axes for each dim, but has {cuts!r}")
        layout = Layout(mesh, tuple(keys.integers(each, key) for each in cuts))
        if layout.size != len(group):
            raise keys.BrokenKey(f"the metadata '{key}' has {len(group)} ranks on a mesh of {layout.size}")
        yield group, layout


def _letters(operands: tuple[str | None, ...], k: int) -> str | None:
    return operands[k] if k < len(operands) else None


def _name(values: Sequence[ir.Value | None], k: int) -> str:
    value = values[k]
    return operand_name(value)
