"""What annotations give the cutting of nodes: per factor its axes, and outputs that are spread otherwise than they are made.

The inputs' spreads decide: each must be the layout of one mesh that they have in common. An output that is spread in another
way than the cut node makes it is resharded where it is made. Rules of the plan and `shard` calls of the model win over
annotations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
from partc.compiler.annotations.check import Followed
from partc.compiler.annotations.spread import Spread, any_layout, layout_on, meshes
from partc.compiler.errors import Problem
from partc.compiler.frontend import annotation_keys as keys
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding, Pinned
from partc.compiler.ir.program import Group, Program
from partc.compiler.layout.layout import Layout, Mesh
from partc.compiler.layout.mesh import normal
from partc.compiler.ops.rule import WHOLE
from partc.compiler.plan.rules import FULL_BATCH

_LAW = "the cuts of a node's operands are layouts of one grid of its ranks"


def seed_annotations(
    program: Program, choices: Mapping[NodeOnGroup, NodeSharding], given: Pinned, decided: Mapping[ir.Node, object]
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
            settle_outputs(instance, choice, followed, given)
        elif instance.group == followed.group:
            problems += cut_by_operands(instance, choice, followed)
            if not problems:
                settle_outputs(instance, choice, followed, given)
    problems += _arriving(program, given)
    return problems


def cut_by_operands(instance: NodeOnGroup, choice: NodeSharding, followed: Followed) -> list[Problem]:
    """Cuts the factors of a node as its operands' spreads tell; closes it where every tensor input has one."""
    node, rule, group = instance.node, choice.rule, instance.group
    inputs = {k: spread for k, spread in followed.inputs.items() if spread.count > 1}
    outputs = {k: spread for k, spread in followed.outputs.items() if spread.count > 1}
    problems = [
        Problem(
            followed.where,
            f"'{_name(node.inputs, k)}' is sharded, but {node.op_type} cannot shard it",
            help="leave it whole",
        )
        for k in inputs
        if _letters(rule.inputs, k) is None
    ]
    if problems:
        return problems
    mesh = _common(choice.mesh, [*inputs.values()], [*outputs.values()], group)
    if mesh is None:
        listed = ", ".join(f"'{_name(node.inputs, k)}' {list(spread.shards)}" for k, spread in inputs.items())
        return [
            Problem(followed.where, f"no grid of ranks {_ranks(group)} has the shards of {listed} where they are", _LAW)
        ]
    axes: dict[str, tuple[int, ...]] = {}
    first: dict[str, tuple[str, int]] = {}
    for k, spread in followed.inputs.items():
        layout = layout_on(mesh, spread, group)
        assert layout is not None
        for dim, (letter, cut) in enumerate(zip(_letters(rule.inputs, k) or "", layout.cuts, strict=False)):
            at = f"'{_name(node.inputs, k)}' dim {dim}"
            if letter == WHOLE or letter not in rule.factors:
                if cut:
                    problems.append(
                        Problem(
                            followed.where,
                            f"{at} is cut into {spread.shards[dim]}, but {node.op_type} needs it whole",
                            help="leave it whole",
                        )
                    )
            elif letter not in axes:
                axes[letter], first[letter] = cut, (at, spread.shards[dim])
            elif axes[letter] != cut:
                other, count = first[letter]
                how = f"into {count}" if count != spread.shards[dim] else "over other ranks"
                fact = f"{at} is cut into {spread.shards[dim]}, but {other}, which corresponds to it, {how}"
                problems.append(
                    Problem(followed.where, fact, "dims that correspond are cut alike, over the same ranks")
                )
    used = [axis for cut in axes.values() for axis in cut]
    if not problems and len(used) != len(set(used)):
        fact = f"the same ranks cut dims of {node.op_type} that do not correspond"
        problems.append(
            Problem(
                followed.where,
                fact,
                "along one axis of the ranks' grid one factor is cut",
                "see `partc ops` for its factors",
            )
        )
    if problems:
        return problems
    for k, spread in followed.outputs.items():
        layout = layout_on(mesh, spread, group)
        for letter, cut in zip(_letters(rule.outputs, k) or "", layout.cuts if layout else (), strict=False):
            if letter in rule.factors and letter not in axes and not set(cut) & set(used):
                axes[letter] = cut
                used += cut
    choice.mesh, choice.axes = mesh, axes
    choice.why.update(dict.fromkeys(axes, followed.where))
    tensors = [k for k, letters in enumerate(rule.inputs) if letters is not None and k < len(node.inputs)]
    choice.open = any(k not in followed.inputs for k in tensors)
    return []


def settle_outputs(instance: NodeOnGroup, choice: NodeSharding, followed: Followed, given: Pinned) -> None:
    """Pins outputs whose annotated layout differs from what the sharded node makes, or that are reduced at once."""
    for k, spread in followed.outputs.items():
        made = choice.output(k)
        if made is None:
            continue
        wanted = layout_on(choice.mesh, spread, instance.group) or any_layout(spread, instance.group)
        if wanted is None:
            continue
        reduced = Layout(made.mesh, made.cuts)
        both_whole = (
            wanted.is_replicated and reduced.is_replicated
        )  # also where the spec alone tells how many dims there are
        unlike = normal(wanted) != normal(reduced) and not both_whole
        if unlike or instance.node.outputs[k].name in followed.reduced:
            given.outputs[instance, k] = (wanted, followed.where)


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


def _arriving(program: Program, given: Pinned) -> list[Problem]:
    """Pins how inputs arrive, from metadata, unless the plan says it."""
    annotations = program.declared.annotations
    if annotations is None or program.plan.dataset.where or program.plan.dataset.style != FULL_BATCH:
        return []
    problems = []
    for value in program.model.graph.inputs:
        try:
            for one in keys.records(keys.decode(value.metadata_props, keys.ARRIVES), keys.ARRIVES):
                group, mesh = (
                    keys.integers(one.get("ranks"), keys.ARRIVES),
                    keys.integers(one.get("mesh"), keys.ARRIVES),
                )
                cuts = one.get("cuts")
                if not isinstance(cuts, list) or value.shape is None or len(cuts) != len(value.shape):
                    raise keys.BrokenKey(
                        f"the metadata '{keys.ARRIVES}' wants one list of axes for each dim, but has {cuts!r}"
                    )
                layout = Layout(mesh, tuple(keys.integers(each, keys.ARRIVES) for each in cuts))
                if layout.size != len(group):
                    raise keys.BrokenKey(
                        f"the metadata '{keys.ARRIVES}' has {len(group)} ranks on a mesh of {layout.size}"
                    )
                given.arriving[value, group] = (layout, program.name)
        except ValueError as error:
            problems.append(Problem(program.name, f"input '{value.name}': {error}", help="remove the metadata"))
    return problems


def _letters(operands: tuple[str | None, ...], k: int) -> str | None:
    return operands[k] if k < len(operands) else None


def _name(values: Sequence[ir.Value | None], k: int) -> str:
    value = values[k]
    return (value.name or "") if value is not None else ""


def _ranks(group: Group) -> str:
    return ", ".join(map(str, group)) if len(group) <= 8 else f"{group[0]}..{group[-1]}"
