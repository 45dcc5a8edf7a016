"""The forms of a node on the ranks of its group: unchanged where nothing is sharded, else rewritten for each rank's shard by the op's rule.

Most nodes are the same on all ranks of a group; a rule that asks which shard a rank has may give constants that differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.constants import Constant
from partc.compiler.ir.graph import COPIES_DIMS, name_of, operands_of
from partc.compiler.ir.local_form import LocalForm
from partc.compiler.ir.programs import Value
from partc.compiler.ir.sharded import Group
from partc.compiler.ir.value_info import Shape
from partc.compiler.layout.layout import shards_along
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.masked_replicas import operand_as
from partc.compiler.lower.rank_constants import by_place
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
