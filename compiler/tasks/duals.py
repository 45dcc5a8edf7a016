"""The layouts of cotangents, which are the duals of their primals' layouts; and types of values of the backward pass.

The names of cotangents: derived from the primal's name, without counters.

    h read by one node                          h.grad
    h read by fc2.Gemm and skip.Add             h.grad.fc2.Gemm, h.grad.skip.Add, and their sum h.grad
    h made on two groups, each read by one      h.grad.fc2.Gemm there, h.grad.skip.Add here: one name is one node on all ranks
    each rank's term of a sum over ranks        h.grad.partial
    of the version h@[2, 1] of h                h@[2, 1].grad

A node that hands a cotangent on (an Add) makes none, and the name stays. What a gradient computes on its way begins with the name of the
output whose cotangent it takes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.autodiff.reach import flowing
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.graph import CONTEXT, SERVED, name_of
from partc.compiler.ir.program import Targeted
from partc.compiler.ir.programs import Value
from partc.compiler.ir.sharded import ShardedValue, facts_of
from partc.compiler.ir.value_info import Shape, ValueInfo
from partc.compiler.ir.values import ValueTable
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import on_common_mesh
from partc.compiler.sharding.values.operands import input_layout_of, replicated_on


@dataclass(frozen=True)
class Passing:
    """Partial sums that pass through a node, on the mesh of `layout`."""

    layout: Layout
    terms: tuple[tuple[int, str], ...]

    def through(self, layout: Layout) -> Layout:
        """Returns the layout of an input's cotangent, partial over the same axes."""
        common = on_common_mesh(layout, self.layout)
        assert common is not None
        own = common[0]
        return Layout(own.mesh, own.cuts, tuple(sorted({*own.partial, *self.terms})))


def typed(values: ValueTable, symbols: Collection[str], value: ir.Value) -> tuple[ir.Value, Shape | None]:
    """Returns a value of the backward pass in the form in which programs list it, with its shape if the symbols give it."""
    shape = _told(value, symbols)
    copy = ir.Value(name=value.name, type=value.type, shape=None if shape is None else ir.Shape(shape))
    bits = value.dtype.bitwidth if value.dtype is not None else None
    item_bytes = bits // 8 if bits and bits % 8 == 0 else None
    return values.add(copy, ValueInfo(type_text(value.type), shape, item_bytes)), shape


def _told(value: ir.Value, symbols: Collection[str]) -> Shape | None:
    if value.shape is None:
        return None
    known = [
        isinstance(dim, int) or (dim.value is not None and dim.free_symbols() <= {*symbols}) for dim in value.shape
    ]
    if not all(known):
        return None
    return tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)


def dual_layout(
    program: Targeted, instance: NodeOnGroup, k: int, cotangents: Mapping[ShardedValue, Sequence[object]]
) -> tuple[Layout, Passing | None]:
    """Returns the layout in which the cotangent of output `k` is required, and the partial sums that pass; `cotangents`: the cotangents by
    layout.

    A node that depends on parameters alone (a transposed weight) passes partial sums on, since the parameter's gradient is reduced anyway,
    together with others; so does the repetition of the heads of gathered keys. Not along an axis over which the node sums: there each rank
    needs the complete sum for its own addends.
    """
    wanted = _dual_of_output(program, instance, k)
    passes = program.placement[instance.node].follows or CONTEXT in instance.node.meta
    if not passes or len(cotangents) != 1 or len(instance.node.outputs) != 1:
        return wanted, None
    (version,) = cotangents
    common = on_common_mesh(wanted, version.layout) if version.group == instance.group else None
    if common is None or common[0].cuts != common[1].cuts or not {*common[0].partial} <= {*common[1].partial}:
        return wanted, None
    terms = tuple(term for term in common[1].partial if term not in common[0].partial)
    choice = program.choices.get(instance)
    made = on_common_mesh(layout, common[1]) if choice and (layout := choice.output(k)) else None
    if made and {axis for axis, _ in terms} & {axis for axis, _ in made[0].partial}:
        return wanted, None
    return common[1], Passing(common[1], terms)


def takes_extreme(program: Targeted, instance: NodeOnGroup, k: int) -> bool:
    """Whether output `k` is a maximum or minimum over ranks, which has no gradient."""
    choice = program.choices.get(instance)
    layout = choice.output(k) if choice else None
    return layout is not None and any(reduce != "sum" for _, reduce in layout.partial)


def _dual_of_output(program: Targeted, instance: NodeOnGroup, k: int) -> Layout:
    choice = program.choices.get(instance)
    layout = choice.output(k) if choice else None
    if choice is None or layout is None:
        return replicated_on(instance.node.outputs[k], instance.group).layout
    made = choice.rule.outputs[k] or ""
    reduced = [axes for letter, axes in choice.axes.items() if letter in choice.rule.reduce and letter not in made]
    return dual(choice, layout.cuts, {axis for axes in (*reduced, choice.passing) for axis in axes})


def dual_of_input(program: Targeted, instance: NodeOnGroup, k: int) -> Layout:
    """Returns the layout in which a node makes the cotangent of input `k`."""
    if k == 0 and SERVED in instance.node.meta:
        return input_layout_of(program, instance, k).layout
    choice = program.choices.get(instance)
    layout = choice.input(k) if choice else None
    if choice is None or layout is None:
        value = instance.node.inputs[k]
        assert value is not None
        return replicated_on(value, instance.group).layout
    if k in choice.rule.apart:
        return layout
    return dual(choice, layout.cuts, choice.passing if k in choice.partial | choice.masked else ())


def dual(choice: NodeSharding, cuts: tuple[tuple[int, ...], ...], summed: Collection[int]) -> Layout:
    """Returns the dual layout: sharded axes stay sharded; a mesh axis that shards the node but not this operand makes its cotangent
    partial.

    An exception are the axes over which the output itself was partial (`summed`).
    """
    used = {axis for axes in (*choice.axes.values(), choice.passing) for axis in axes}
    here = {axis for axes in cuts for axis in axes}
    return Layout(choice.mesh, cuts, tuple((axis, "sum") for axis in sorted(used.difference(here, summed))))


PARTIAL = ".partial"


class CotangentNames:
    """The names of what nodes contribute to cotangents; `at` has the primals, `homes` the definitions of versions that are read."""

    def __init__(
        self, program: Targeted, at: Mapping[ShardedValue, Value], homes: Mapping[ShardedValue, ShardedValue]
    ) -> None:
        assert program.training is not None
        self._program, self._at, self._homes = program, at, homes
        self._parameters = program.training.parameters
        self._contributions: dict[ir.Value | ShardedValue, int] = {}
        self._readers: dict[ir.Value, set[ir.Node]] = {}
        for node in flowing(program.reads, program.training):
            for group in program.placement[node].groups:
                operands = [k for k, value in enumerate(node.inputs) if value is not None]
                read = {input_layout_of(program, NodeOnGroup(node, group), k) for k in operands}
                for version in read | {replicated_on(value, group) for value in program.around[node]}:
                    whole = self._whole(version)
                    self._contributions[whole] = self._contributions.get(whole, 0) + 1
                    self._readers.setdefault(version.value, set()).add(node)

    def _whole(self, version: ShardedValue) -> ir.Value | ShardedValue:
        """The value to which the cotangent of a version contributes: that of a parameter, or of the definition of another value."""
        return version.value if version.value in self._parameters else self._homes.get(version, version)

    def spellings(self, instance: NodeOnGroup, version: ShardedValue, layout: Layout) -> list[str]:
        """The names that a node's contribution in a layout may have, in order: the next one where one is taken."""
        primal = name_of(version.value) if version.layout.partial else str(self._at[version])
        end = PARTIAL if layout.partial else ""
        path = f"{primal}.grad.{self._program.paths[instance.node]}"
        alone = self._contributions.get(self._whole(version), 0) <= 1 and len(self._readers.get(version.value, ())) <= 1
        short = [f"{primal}.grad{end}"] if alone else []
        return [*short, f"{path}{end}", f"{path}@{facts_of(instance.group).text}{end}"]


def sum_spellings(cotangent: str, version: ShardedValue, *, final: bool = True) -> list[str]:
    """The names of a sum of contributions, in order; `final`: it is the cotangent, nothing has to be added or brought elsewhere."""
    ranks = facts_of(version.group).text
    if version.layout.partial:
        return [f"{cotangent}{PARTIAL}", f"{cotangent}{PARTIAL}@{ranks}"]
    primal = cotangent.removesuffix(".grad")
    apart = [f"{primal}@{version.layout}.grad", f"{primal}@{version.layout}@{ranks}.grad"]
    return [cotangent, *apart] if final else apart


def brought_spellings(name: str, cotangent: str, version: ShardedValue) -> list[str]:
    """The names of a contribution in the layout in which it is added to others, in order: by the node that gave it where that is known."""
    primal, _, path = name.removesuffix(PARTIAL).partition(".grad")
    source = path.removeprefix(".") or ("reduced" if f"{primal}.grad" == cotangent else primal)
    return [f"{cotangent}.{source}", f"{cotangent}.{source}@{facts_of(version.group).text}"]
