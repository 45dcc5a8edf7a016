"""One node on the ranks of its group: as it is where nothing is cut, else rewritten for each rank's shard by the op's own rule.

Most nodes are the same on all ranks of a group; a rule that asks which shard a rank has may give constants that differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir
from partc.compiler.dims.normal import normal
from partc.compiler.dims.reading import read
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.program import Array, ComputeOp, Constant, Group, Program, RankConstant, Shape, ShardedValue
from partc.compiler.layout.layout import Layout, Mesh
from partc.compiler.lower.versions import input_layout_of, output_layout_of, replicated_on
from partc.compiler.ops.local import Local
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import OWN
from partc.compiler.tasks.by_place import Circles, by_place


@dataclass
class Localized:
    """What a node becomes on one rank, or on several that differ in constants by their place.

    `ends`: what constants by a rank's place are on the first and the last rank.
    """

    ops: list[ComputeOp] = field(default_factory=list)
    constants: dict[str, Constant] = field(default_factory=dict)
    types: dict[str, tuple[ir.Value, Shape | None]] = field(default_factory=dict)

    ends: tuple[Mapping[str, Array], ...] = ()

    @property
    def fixed(self) -> dict[str, Array]:
        """The constants that are the same on all of the ranks."""
        return {name: one for name, one in self.constants.items() if not isinstance(one, RankConstant)}

    @property
    def unknown(self) -> list[ir.Value]:
        """The constants that are not, of which a type is known."""
        laws = {name: one for name, one in self.constants.items() if isinstance(one, RankConstant)}
        return [
            ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(one.dtype)), shape=ir.Shape(one.shape))
            for name, one in laws.items()
        ]

    @property
    def inner(self) -> list[str]:
        """What it makes besides the node's outputs."""
        made = (out.name or "" for op in self.ops for out in op.node.outputs)
        return [name for name in dict.fromkeys([*self.constants, *made]) if name and name not in self.types]

    def renamed(self, names: Mapping[str, str]) -> Localized:
        """The same with other names inside."""
        if not names:
            return self
        ops = [replace(op, node=with_names(op.node, names)) for op in self.ops]
        constants = {names.get(name, name): one for name, one in self.constants.items()}
        ends = tuple({names.get(name, name): one for name, one in end.items()} for end in self.ends)
        return Localized(ops, constants, self.types, ends)


class _Shards(dict[str, int]):
    """Which shard of each factor the rank has; remembers of which ones somebody asked."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        super().__init__(numbers)
        self.asked: dict[str, int] = {}

    def get(self, key: str, default: int = 0) -> int:  # type: ignore[override]
        number = super().get(key, default)
        if key in self:
            self.asked[key] = number
        return number

    def __getitem__(self, key: str) -> int:
        self.asked[key] = super().__getitem__(key)
        return self.asked[key]


def local_shape(program: Program, copy: ShardedValue) -> Shape | None:
    """The shape of one shard of a copy: every dim over the number of its shards; None where the value's shape is not known."""
    shape = program.values[copy.value].shape
    if shape is None or len(shape) != len(copy.layout.cuts):
        return shape
    return tuple(_part(dim, copy.layout.num_shards(k)) for k, dim in enumerate(shape))


def local_value(program: Program, copy: ShardedValue) -> ir.Value:
    """The value with the type and the known dims of one shard of a copy: the value itself where it is whole, or its whole shape known."""
    value = copy.value
    if program.values[value].shape is not None or value.shape is None or copy.layout.is_replicated:
        return value
    dims = [
        dim
        if not isinstance(dim, int) and dim.value is None
        else _part(dim if isinstance(dim, int) else str(dim), shards)
        for dim, shards in zip(value.shape.dims, map(copy.layout.num_shards, range(len(value.shape))), strict=True)
    ]
    shard = ir.Value(name=value.name, type=value.type, shape=ir.Shape(dims))
    assert isinstance(program.values, dict)
    program.values[shard] = program.values[value]
    return shard


@functools.lru_cache(maxsize=4096)
def _part(dim: int | str, shards: int) -> int | str:
    if shards == 1:
        return dim
    if isinstance(dim, int):
        return dim // shards
    expression = read(dim)
    return f"({dim})/{shards}" if expression is None else str(normal(expression / shards, {}))


def localize(
    program: Program,
    instance: NodeOnGroup,
    name_of: Callable[[ShardedValue], str],
    operand: Callable[[NodeOnGroup, int], str],
    circles: Circles,
) -> list[tuple[Localized, Group]]:
    """What a node becomes, with the ranks of its group on which it becomes just this; `operand` names an input.

    `circles` gives the sets of ranks that differ along axes of a mesh, and their group's name.
    """
    node, group = instance.node, instance.group
    read = [None if value is None else input_layout_of(program, instance, k) for k, value in enumerate(node.inputs)]
    made = [output_layout_of(program, instance, k) for k in range(len(node.outputs))]
    inputs = ["" if copy is None else operand(instance, k) for k, copy in enumerate(read)]
    outputs = [name_of(copy) if copy.value.name else "" for copy in made]
    captured = {value.name or "": name_of(replicated_on(value, group)) for value in program.around[node]}
    captured = {old: new for old, new in captured.items() if old != new}
    types = {
        name: (local_value(program, copy), local_shape(program, copy))
        for name, copy in zip(outputs, made, strict=True)
        if name
    }
    choice = program.choices.get(instance)
    unknown_to_runtimes = node.domain == OWN
    rule = choice.rule if choice is not None else rule_of(node) if unknown_to_runtimes else None
    cut = choice.cut if choice is not None else {}
    if rule is None or rule.local is None or not (unknown_to_runtimes or cut or not rule.factors):
        one = Localized([ComputeOp(renamed(node, inputs, outputs), node, captured)], types=types)
        return [(one, group)]
    shapes = _Shapes(program, dict(zip(inputs, read, strict=True)) | dict(zip(outputs, made, strict=True)))
    found: list[tuple[Localized, Mapping[str, int], list[int]]] = []
    numbers = _numbers(choice) if choice is not None else {}
    for index, rank in enumerate(group):
        own = {letter: row[index] for letter, row in numbers.items()}
        alike = next((ranks for _, asked, ranks in found if asked.items() <= own.items()), None)
        if alike is not None:
            alike.append(rank)
            continue
        shards = _Shards(own)
        local = Local(node, rule, cut, shards, inputs, outputs, shapes.whole, shapes.local)
        rule.local(local)
        done = Localized([ComputeOp(each, node, captured) for each in local.nodes], dict(local.constants), types)
        if not shards.asked:
            return [(done, group)]
        found.append((done, shards.asked, [rank]))
    if choice is not None and (
        merged := by_place([(one, ranks) for one, _, ranks in found], _sets(choice, found, group, circles))
    ):
        return [(merged, group)]
    return [(done, tuple(ranks)) for done, _, ranks in found]


def _sets(
    choice: NodeSharding,
    found: Sequence[tuple[Localized, Mapping[str, int], list[int]]],
    group: Group,
    circles: Circles,
) -> tuple[tuple[Group, ...], str]:
    """The sets of ranks that differ in what a rule has asked for, each in the order of shards."""
    asked = dict.fromkeys(letter for _, letters, _ in found for letter in letters)
    return circles(choice.mesh, tuple(axis for letter in asked for axis in choice.axes[letter]), group)


def _numbers(choice: NodeSharding) -> dict[str, tuple[int, ...]]:
    """By factor which shard of it each rank of the group has."""
    return {letter: _shards_of(choice.mesh, axes) for letter, axes in choice.axes.items()}


@functools.lru_cache(maxsize=256)
def _shards_of(mesh: Mesh, axes: tuple[int, ...]) -> tuple[int, ...]:
    layout = Layout(mesh, (axes,))
    return tuple(layout.shard(index)[0] for index in range(layout.size))


def renamed(node: ir.Node, inputs: list[str], outputs: list[str]) -> ir.Node:
    """The node itself where its operands have their own names, else a copy with the names that they have here."""
    own = [value.name or "" if value is not None else "" for value in node.inputs]
    if own == inputs and [value.name or "" for value in node.outputs] == outputs:
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


def with_names(node: ir.Node, names: Mapping[str, str]) -> ir.Node:
    """A node with other names for some of its operands and outputs; the node itself where it has none of them."""
    if not any(value is not None and value.name in names for value in (*node.inputs, *node.outputs)):
        return node
    return ir.Node(
        node.domain,
        node.op_type,
        inputs=[None if one is None else ir.Value(name=names.get(one.name or "", one.name)) for one in node.inputs],
        attributes=list(node.attributes.values()),
        outputs=[ir.Value(name=names.get(one.name or "", one.name)) for one in node.outputs],
        name=names.get(node.name or "", node.name),
        overload=node.overload,
        version=node.version,
    )


class _Shapes:
    def __init__(self, program: Program, copies: Mapping[str, ShardedValue | None]) -> None:
        found = {name: copy for name, copy in copies.items() if copy is not None and name}
        self.whole: dict[str, Shape | None] = {n: program.values[c.value].shape for n, c in found.items()}
        self.local: dict[str, Shape | None] = {n: local_shape(program, c) for n, c in found.items()}
