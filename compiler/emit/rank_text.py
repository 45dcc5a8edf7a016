"""The texts of dumps: ops of rank programs with the types that values have there, communication with its cause, bodies, layouts.

A node's text is its outputs, its op, its inputs and its attributes, sorted by name; a layout's is its type with the shape on a rank.

    %conv1.Conv = Conv(%x, %conv1.weight) {kernel_shape: [5, 5]}
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.emit.helper_types import HelperTypes, helper_type_text
from partc.compiler.emit.names import Names
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.computed import law_of
from partc.compiler.ir.constants import Constant, RankConstant
from partc.compiler.ir.graph import operand_name
from partc.compiler.ir.program import Complete, Sharded, Typed
from partc.compiler.ir.programs import Body, Call, Comm, Compute, Copy, Op, RankProgram, RankTensor, Value
from partc.compiler.ir.sharded import Group, GroupFacts, ShardedValue, facts_of
from partc.compiler.ir.value_info import Shape, bytes_text
from partc.compiler.layout.layout import Layout, shards_along
from partc.runtime.artifact.tensors.law import law_text


class RankTexts:
    """The texts of a program's rank programs; the lines of an op that several ranks have with the same types are written once."""

    def __init__(self, program: Complete, names: Names | None = None, helpers: HelperTypes | None = None) -> None:
        self.program = program
        self.names = names or Names(program)
        self.helpers = helpers or HelperTypes(program)
        self._written: dict[Hashable, list[str]] = {}
        self._groups_of: dict[tuple[Op, ...], Sequence[Group]] = {}
        self._ops: dict[Hashable, list[str]] = {}
        self._values: dict[tuple[ir.Value, Shape | None], str] = {}
        self._sizes: dict[Value, str] = {}
        """Maps each weight to its name, its type and its bytes on a rank."""
        self.types: dict[Value, str] = {}
        """The types of values that are versions of the model's, or constants, which all ranks have alike."""

    def of(self, part: RankProgram, ranks: Sequence[int]) -> str:
        """A program as the dumps show it, of the ranks that share it."""
        kinds, shown = _Kinds(self, part, None), self.names.shown
        lines = [f"program @rank_{part.rank:04d}({shown([held.value for held in part.inputs])}) {{"]
        lines += [self._weight_line(held, ranks) for held in part.weights]
        for one in part.state:
            after = f"   next: {shown([one.next])}" if one.next is not None else ""
            on = f"   on: {one.target}" if one.target else ""
            where = part_of(self.program, one.version, ranks)
            lines.append(f"  # State: {shown([one.value])} : {kinds[one.value]}{where}{after}{on}")
        if part.scalars:
            lines.append(f"  # Scalars: {shown(part.scalars)}")
        lines += self._step_lines(part, part.steps, kinds)
        lines += self._return_lines([held.value for held in part.outputs], kinds)
        for body in part.bodies:
            inside = _Kinds(self, part, body)
            lines += ["", f"task @{body.name}({shown(body.inputs)}) {{"]
            lines += self._step_lines(part, body.steps, inside)
            lines += self._return_lines(body.outputs, inside)
        return "\n".join(lines)

    def _return_lines(self, values: Sequence[Value], kinds: _Kinds) -> list[str]:
        return [f"  Return({self.names.shown(values)})", f"      : {kinds.of(values)}", "}"]

    def value(self, value: ir.Value, shape: Shape | None) -> str:
        """A value's type with its shape on a rank."""
        key = value, shape
        if key not in self._values:
            self._values[key] = value_text(self.program, value, shape)
        return self._values[key]

    def _weight_line(self, weight: RankTensor, ranks: Sequence[int]) -> str:
        """A weight, with the law of one whose numbers the artifact does not have."""
        law = law_of(weight.version.value)
        where = part_of(self.program, weight.version, ranks if law else ranks[:1])
        if weight.value not in self._sizes:
            of, shape = weight.value.of, weight.value.shape
            assert of is not None
            size = f"{bytes_text(self.program.values[of], shape)} bytes"
            self._sizes[weight.value] = f"{self.names[weight.value]} : {self.value(of, shape)}   {size}"
        initial = f"   Initial: {law_text(law)}" if law else ""
        return f"  # Parameter: %{self._sizes[weight.value]}{where}{initial}"

    def _step_lines(self, part: RankProgram, steps: tuple[Op, ...], kinds: _Kinds) -> list[str]:
        """The lines of ops, once for all programs that have them on ranks of the same groups."""
        key = steps, tuple([k for k, group in enumerate(self._groups(steps)) if part.rank in facts_of(group).places])
        if key not in self._written:
            self._written[key] = self._lines(part, steps, kinds)
        return self._written[key]

    def _groups(self, steps: tuple[Op, ...]) -> Sequence[Group]:
        """The groups of the nodes that ops stand for."""
        if steps not in self._groups_of:
            placed = [self.program.placement.get(step.source) for step in steps if isinstance(step, Compute)]
            groups = {id(group): group for one in placed if one is not None for group in one.groups}
            self._groups_of[steps] = [*groups.values()]
        return self._groups_of[steps]

    def _lines(self, part: RankProgram, steps: Sequence[Op], kinds: _Kinds) -> list[str]:
        shown = self.names.shown
        lines: list[str] = []
        for step in steps:
            match step:
                case Compute():
                    lines += self._op_lines(part, step, kinds)
                case Comm():
                    lines += self._comm_lines(step, kinds)
                case Copy():
                    lines.append(f"  {shown([step.output])} = Copy({shown([step.source])}) {{to: {step.target}}}")
                    lines.append(f"      : {kinds.of([step.source])} -> {kinds.of([step.output])}")
                    lines.append(f"      # Scope: {step.path}   Bytes: {step.bytes}   Cause: {step.cause}")
                case Call():
                    outs, ins = shown(step.outputs), shown(step.inputs)
                    lines.append(
                        f"  {outs + ' = ' if outs else ''}{step.body.name}({ins}) {{microbatch: {step.microbatch}}}"
                    )
                    lines.append(f"      # Task: {step.cell}")
        return lines

    def _op_lines(self, part: RankProgram, step: Compute, kinds: _Kinds) -> list[str]:
        """A node of a rank; strategy and cuts stand at the one that makes the outputs of the model's own node."""
        source, names = step.source, self.names
        signature = f"{kinds.of(step.inputs)} -> {kinds.of(step.outputs)}"
        placed = self.program.placement.get(source)
        groups = [k for k, group in enumerate(placed.groups) if part.rank in facts_of(group).places] if placed else []
        itself = not {*source.outputs}.isdisjoint([value.of for value in step.makes])
        key = step, signature, *groups, itself
        if key not in self._ops:
            target = f" {{target: {step.target}}}" if step.target else ""
            cut = "".join(strategies(self.program, source, part.rank)) if itself else ""
            again = f"   Recomputed: {step.again}" if step.again else ""
            path = self.program.paths.get(source, names.label(step))
            lines = [
                f"  {op_text(step.node, '  ', names.shown(step.inputs), names.shown(step.outputs))}{cut}{target}",
                f"      : {signature}",
                f"      # Scope: {path}" + (f"   Rule: {placed.rule}" if placed else "") + again,
            ]
            if itself:
                lines += [f"      # Sharded: {text}" for text in cut_text(self.program, source, part.rank)]
            self._ops[key] = lines
        return self._ops[key]

    def _comm_lines(self, step: Comm, kinds: _Kinds) -> list[str]:
        outs, ins = self.names.shown(step.outputs), self.names.shown(step.inputs)
        given = {**step.attributes, "tag": step.tag}.items()
        attributes = ", ".join([f"{key}: {[*one] if isinstance(one, tuple) else one}" for key, one in given])
        return [
            f"  {outs + ' = ' if outs else ''}{step.op_type}({ins}) {{{attributes}}}",
            f"      : {kinds.of(step.inputs)} -> {kinds.of(step.outputs)}",
            f"      # Scope: {self.program.path_of(step.value)}   Bytes: {step.bytes}   Cause: {step.cause}",
        ]


class _Kinds:
    """The types of a rank's values, or of those in the body of a task: `(<tensor(float), (batch, 8)>, <>)`."""

    def __init__(self, texts: RankTexts, part: RankProgram, body: Body | None) -> None:
        self._of = texts
        self._texts: dict[Value | None, str] = {None: "<>", **dict.fromkeys(part.scalars, "<tensor(float), ()>")}
        self._texts |= {value: helper_type_text(kind) for value, kind in texts.helpers.of(part, body).items()}

    def __getitem__(self, value: Value | None) -> str:
        if value not in self._texts:
            assert value is not None
            shared = self._of.types
            if value not in shared:
                if value.of is not None:
                    shared[value] = self._of.value(value.of, value.shape)
                else:
                    shared[value] = "<>" if value.constant is None else f"<{_constant(value.constant)}>"
            self._texts[value] = shared[value]
        return self._texts[value]

    def of(self, values: Sequence[Value | None]) -> str:
        return f"({', '.join([self._texts.get(value) or self[value] for value in values])})"


def _constant(constant: Constant) -> str:
    if isinstance(constant, RankConstant):
        text = f"[{', '.join(constant.items)}]" if constant.shape else constant.items[0]
        return f"{constant.dtype}, {text} in {constant.group}"
    return f"{constant.dtype}, {constant.tolist()}"


_LONG = 16


def node_text(node: ir.Node, indent: str) -> str:
    """A node with its attributes on one line; bodies follow on lines of their own, deeper than `indent`."""
    return op_text(node, indent, _shown(node.inputs), _shown(node.outputs))


def op_text(node: ir.Node, indent: str, ins: str, outs: str) -> str:
    """A node over operands that are shown so: `%x, _`."""
    op = f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    given = sorted(node.attributes.data.items())
    attributes = ", ".join([f"{name}: {_attribute(attr, indent)}" for name, attr in given])
    return f"{outs} = {op}({ins})" + (f" {{{attributes}}}" if attributes else "")


def _shown(values: Sequence[ir.Value | None]) -> str:
    return ", ".join([f"%{name}" if (name := operand_name(value)) else "_" for value in values])


def _attribute(attr: ir.Attr, indent: str) -> str:
    match attr.type:
        case ir.AttributeType.GRAPH:
            return _body(attr.as_graph(), indent)
        case ir.AttributeType.GRAPHS:
            return f"[{', '.join(_body(graph, indent) for graph in attr.as_graphs())}]"
        case ir.AttributeType.TENSOR:
            return _tensor(attr.value)  # as_tensor() asks by a protocol, which takes longer than the text
        case ir.AttributeType.TENSORS:
            return f"[{', '.join(map(_tensor, attr.value))}]"
        case ir.AttributeType.TYPE_PROTO:
            return type_text(attr.value.type)
        case ir.AttributeType.STRING:
            return repr(attr.value)
        case ir.AttributeType.FLOAT:
            return _float(attr.value)
        case ir.AttributeType.FLOATS:
            return f"[{', '.join(map(_float, attr.value))}]"
        case ir.AttributeType.INTS | ir.AttributeType.STRINGS:
            return f"[{', '.join(map(repr, attr.value))}]"
        case _:
            return repr(attr.value)


def _float(value: float) -> str:
    """The shortest text of the float32 that ONNX keeps of an attribute."""
    return str(np.float32(value))


def _tensor(tensor: ir.TensorProtocol) -> str:
    """A short tensor by its items, a long one by its hash."""
    kind = type_text(ir.TensorType(tensor.dtype))
    shape = ", ".join(map(str, tensor.shape.numpy()))
    if tensor.size <= _LONG:
        return f"<{kind}, ({shape})> {tensor.numpy().tolist()}"
    return f"<{kind}, ({shape})> sha256:{hashlib.sha256(tensor.tobytes()).hexdigest()[:16]}"


def _body(graph: ir.Graph, indent: str) -> str:
    inner = indent + "    "
    lines = [f"graph({', '.join(f'%{value.name}' for value in graph.inputs)}) {{"]
    lines += [
        f"{inner}%{name} = {_tensor(value.const_value)}"
        for name, value in graph.initializers.items()
        if value.const_value is not None
    ]
    lines += [f"{inner}{node_text(node, inner)}" for node in graph]
    lines.append(f"{inner}Return({', '.join(f'%{value.name}' for value in graph.outputs)})")
    return "\n".join([*lines, f"{indent}}}"])


def value_text(program: Typed, value: ir.Value, shape: Shape | None) -> str:
    """A value's type in a given shape; where that is not known, with the dims that are numbers."""
    info = program.values[value]
    if not info.is_tensor:
        return f"<{info.type}>"
    if shape is not None:
        return f"<{info.type}, ({', '.join(map(str, shape))})>"
    if value.shape is None:
        return f"<{info.type}, ?>"
    dims = ", ".join([str(d) if isinstance(d, int) else "?" for d in value.shape.dims])
    return f"<{info.type}, ({dims})>"


@functools.lru_cache(maxsize=1024)
def _alike(layout: Layout, facts: GroupFacts, those: GroupFacts) -> bool:
    """Whether ranks of a group have the same shard."""
    row = shards_along(layout.mesh, tuple([axis for axes in layout.cuts for axis in axes]))
    return len({row[facts.places[rank]] for rank in those.group if rank in facts.places}) == 1


def part_of(program: Typed, copy: ShardedValue, ranks: Sequence[int]) -> str:
    """Which part of a tensor ranks have: `   Shard: [0:16, 32:64] of (64, 128)`; empty where it is all of it.

    Where they have each another one it is told how large these are: `   Shard: (16, 32) of (64, 128) by rank`.
    """
    shape = program.values[copy.value].shape if copy.value in program.values else None
    sizes = tuple([size for size in shape or () if isinstance(size, int)])
    if copy.layout.is_replicated or shape is None or len(sizes) != len(copy.layout.cuts):
        return ""
    together = _alike(copy.layout, facts_of(copy.group), facts_of(tuple(ranks)))
    return _shard_text(copy.layout, copy.places[ranks[0]], sizes, together)


@functools.lru_cache(maxsize=4096)
def _shard_text(layout: Layout, place: int, sizes: tuple[int, ...], together: bool) -> str:
    """Which part of a tensor of these sizes the rank at a place has; of ranks that do not have it `together` how large theirs are."""
    box = layout.box(place, sizes)
    if not together:
        return f"   Shard: ({', '.join([str(end - begin) for begin, end in box])}) of ({', '.join(map(str, sizes))}) by rank"
    return f"   Shard: [{', '.join([f'{begin}:{end}' for begin, end in box])}] of ({', '.join(map(str, sizes))})"


def strategies(program: Sharded, node: ir.Node, rank: int | None = None) -> Iterator[str]:
    """The sharding of a node's inputs, for each group, or for the groups of one rank: ` {in_strategy: ((2, 4), (4, 1))}`."""
    return (f" {{in_strategy: {choice.strategy()}}}" for choice in _choices(program, node, rank))


def _choices(program: Sharded, node: ir.Node, rank: int | None) -> Iterator[NodeSharding]:
    placed = program.placement.get(node)
    for group in placed.groups if placed else ():
        choice = program.choices.get(NodeOnGroup(node, group)) if rank is None or rank in group else None
        if choice is not None:
            yield choice


def cut_text(program: Sharded, node: ir.Node, rank: int | None = None) -> Iterator[str]:
    """Who decided each cut of a node, per group that cuts it: `m in 2 by plan.yaml:4, k in 4 by plan.yaml:4`.

    With `rank` of the groups that it is in.
    """
    for choice in _choices(program, node, rank):
        if cut := choice.cut:
            yield ", ".join(
                [f"{factor} in {shards} by {choice.why.get(factor, '?')}" for factor, shards in cut.items()]
            )
