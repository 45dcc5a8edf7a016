"""The forms of a node on the ranks of its group: unchanged where nothing is sharded, else rewritten for each rank's shard by the op's rule.

Most nodes are the same on all ranks of a group; a rule that asks which shard a rank has may give constants that differ.

Merges the local forms of ranks that differ in constants alone, where each constant follows a law over the rank's place.

offset 0, 16, 32, 48 on the places 0 to 3    ->    16*place
once   1, 0, 0, 0                            ->    Max(1 - place, 0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.constants import Constant, RankConstant
from partc.compiler.ir.graph import COPIES_DIMS, name_of, operands_of
from partc.compiler.ir.local_form import LocalForm
from partc.compiler.ir.programs import Value
from partc.compiler.ir.sharded import Group
from partc.compiler.ir.value_info import Array, Shape
from partc.compiler.layout.layout import shards_along
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.masked_replicas import operand_as
from partc.compiler.ops.node import node_key
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import OWN, Local, Rule
from partc.compiler.sharding.values.operands import replicated_on
from partc.compiler.sharding.values.versions import ValueVersions
from partc.runtime.spellings import first_free


class _Shards(dict[str, int]):
    """Maps each factor to the index of the rank's shard; records in `requested` which factors the rule has looked up."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        super().__init__(numbers)
        self.requested: dict[str, int] = {}

    def get(self, key: str, default: int = 0) -> int:  # type: ignore[override]
        number = super().get(key, default)
        if key in self:
            self.requested[key] = number
        return number

    def __getitem__(self, key: str) -> int:
        self.requested[key] = super().__getitem__(key)
        return self.requested[key]


def local_forms(comm: CommLowering, versions: ValueVersions, instance: NodeOnGroup) -> list[tuple[LocalForm, Group]]:
    """The local forms of a node on its group, each with the ranks that run it; one form where all ranks do the same."""
    node, group, choice = instance.node, instance.group, comm.program.choices.get(instance)
    operands = _Operands.of(comm, versions, instance)
    unknown_to_runtimes = node.domain == OWN
    rule = choice.rule if choice is not None else rule_of(node) if unknown_to_runtimes else None
    cut = choice.cut if choice is not None else {}
    if (
        rule is None
        or rule.local is None
        or not (unknown_to_runtimes or cut or not (rule.factors or COPIES_DIMS in node.meta))
    ):
        return [(operands.form([renamed(node, operands.inputs, operands.outputs)]), group)]
    forms: list[tuple[LocalForm, Mapping[str, int], list[int]]] = []
    numbers = (
        {letter: shards_along(choice.mesh, axes) for letter, axes in choice.axes.items()} if choice is not None else {}
    )
    left = [*range(len(group))]
    while left:
        form, asked = _form(node, rule, cut, {letter: row[left[0]] for letter, row in numbers.items()}, operands)
        if not asked:
            return [(form, group)]
        rows = [(numbers[letter], number) for letter, number in asked.items()]
        alike = left
        for row, number in rows:
            alike = [index for index in alike if row[index] == number]
        forms.append((form, asked, [group[index] for index in alike]))
        those = {*alike}
        left = [index for index in left if index not in those]
    if choice is not None:
        letters = dict.fromkeys(letter for _, asked, _ in forms for letter in asked)
        axes = tuple(axis for letter in letters for axis in choice.axes[letter])
        # The sets of ranks that differ in what the rule has asked for, each in the order of shards.
        sets = comm.subgroups(choice.mesh, axes, group)
        if merged := by_place([(one, ranks) for one, _, ranks in forms], sets):
            return [(merged, group)]
    return [(form, tuple(ranks)) for form, _, ranks in forms]


@dataclass(frozen=True)
class _Operands:
    """The handles of a node's inputs and outputs on its group, their `values` and shapes; `captured`: those of what its bodies read."""

    node: ir.Node
    inputs: list[str]
    outputs: list[str]
    captured: dict[str, str]
    values: dict[str, Value]
    whole: dict[str, Shape | None]
    local: dict[str, Shape | None]
    pieces: int

    @staticmethod
    def of(comm: CommLowering, versions: ValueVersions, instance: NodeOnGroup) -> _Operands:
        """The operands of a node on a group."""
        program, table, node = comm.program, comm.values, instance.node
        handles: dict[Value, str] = {}
        taken: set[str] = set()

        def handle(value: Value | None) -> str:
            if value is None:
                return ""
            if value not in handles:
                handles[value] = first_free(str(value), taken.__contains__)
                taken.add(handles[value])
            return handles[value]

        read, defined = versions.read[instance], versions.definitions[instance]
        inputs = [handle(None if copy is None else operand_as(comm, instance, k, copy)) for k, copy in enumerate(read)]
        outputs = [handle(table.at[version]) if version.value.name else "" for version in defined]
        captured = {
            name_of(value): handle(table.at[replicated_on(value, instance.group)]) for value in program.around[node]
        }
        listed = dict(zip(inputs, read, strict=True)) | dict(zip(outputs, defined, strict=True))
        there = {name: version for name, version in listed.items() if version is not None and name}
        return _Operands(
            node,
            inputs,
            outputs,
            captured,
            {name: value for value, name in handles.items()},
            {name: table[version.value].shape for name, version in there.items()},
            {name: table.local_shape(version) for name, version in there.items()},
            comm.pieces,
        )

    def form(self, nodes: Sequence[ir.Node], constants: Mapping[str, Constant] | None = None) -> LocalForm:
        """The local form with these nodes and constants."""
        outputs = tuple(name for name in self.outputs if name)
        return LocalForm(self.node, nodes, self.values, outputs, self.captured, dict(constants or {}))


def _form(
    node: ir.Node, rule: Rule, cut: Mapping[str, int], own: Mapping[str, int], operands: _Operands
) -> tuple[LocalForm, Mapping[str, int]]:
    """The local form by the op's own rule on the rank with the shards `own`, and those of them that the rule asked for."""
    assert rule.local is not None
    shards = _Shards(own)
    names = operands.inputs, operands.outputs
    local = Local(node, rule, cut, shards, *names, operands.whole, operands.local, pieces=operands.pieces)
    rule.local(local)
    return operands.form(local.nodes, local.constants), shards.requested


def renamed(node: ir.Node, inputs: list[str], outputs: list[str]) -> ir.Node:
    """The node itself where its operands have their own names, else a copy with the names that they have here."""
    if operands_of(node) == (tuple(inputs), tuple(outputs)):
        return node
    return ir.Node(
        node.domain,
        node.op_type,
        inputs=[ir.Value(name=name) if name else None for name in inputs],
        attributes=list(node.attributes.values()),
        outputs=[ir.Value(name=name) for name in outputs],
        name=node.name,
        overload=node.overload,
        version=node.version,
    )


_MOST_ITEMS = 64
"""So many items of a constant are told one by one."""


def by_place(forms: Sequence[tuple[LocalForm, Sequence[int]]], sets: tuple[tuple[Group, ...], str]) -> LocalForm | None:
    """One form for all ranks, whose constants are laws over a rank's place; None where the forms differ otherwise.

    `forms`: each with its ranks. `sets`: the lists of ranks in which a rank has its place, and their name.
    """
    lists, group = sets
    form_of = {rank: form for form, ranks in forms for rank in ranks}
    rows = [[form_of[rank] for rank in ranks] for ranks in lists]
    row = rows[0]
    if len(row) < 2 or any(one is not two for other in rows[1:] for one, two in zip(row, other, strict=True)):
        return None
    first, *others = row
    nodes = [[node_key(node) for node in one.nodes] for one in row]
    names = first.constants.keys()
    if any(one != nodes[0] for one in nodes) or any(one.constants.keys() != names for one in others):
        return None
    constants: dict[str, Constant] = {}
    for name in first.constants:
        law = _law([one.constants[name] for one in row], group)
        if law is None:
            return None
        constants[name] = law
    laws = [name for name, one in constants.items() if isinstance(one, RankConstant)]
    ends = tuple({name: _array(one.constants[name]) for name in laws} for one in (first, row[-1]))
    return replace(first, constants=constants, ends=ends)


def _array(constant: Constant) -> Array:
    assert not isinstance(constant, RankConstant)
    return constant


def _law(row: Sequence[Constant], group: str) -> Constant | None:
    """The law of a constant that has one array per place; None where there is none."""
    arrays = [_array(one) for one in row]
    first = arrays[0]
    if any(one.dtype != first.dtype or one.shape != first.shape for one in arrays):
        return None
    if all(np.array_equal(one, first) for one in arrays):
        return first
    if first.size > _MOST_ITEMS or (first.dtype.kind not in "iufb" and first.dtype != ml_dtypes.bfloat16):
        return None
    columns = zip(*(one.reshape(-1).tolist() for one in arrays), strict=True)
    items = [item_of(column) for column in columns]
    if any(item is None for item in items):
        return None
    return RankConstant(group, first.dtype, first.shape, tuple(filter(None, items)))


def item_of(column: Sequence[float]) -> str | None:
    """Whole numbers by place as an expression: a multiple of it and a number, or one number on all but the first or last."""
    if not all(float(number).is_integer() for number in column):
        return None
    numbers = [int(number) for number in column]
    begin, step = numbers[0], numbers[1] - numbers[0]
    if all(number == begin + step * place for place, number in enumerate(numbers)):
        return _sum(step, "place", begin)
    if len({*numbers[1:]}) == 1:
        return _sum(-step, "Max(1 - place, 0)", numbers[1])
    if len({*numbers[:-1]}) == 1:
        return _sum(numbers[-1] - begin, f"Max(place - {len(numbers) - 2}, 0)", begin)
    return None


def _sum(times: int, term: str, number: int) -> str:
    """`16*place + 3`, without what is 0 or 1."""
    product = term if times == 1 else f"{times}*{term}" if times else ""
    return f"{product} + {number}" if product and number else product or str(number)
