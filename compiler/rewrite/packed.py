"""Pass: takes apart a packed weight, which is several weights in one, so that each rank gets its shard of every one of them.

Exporters keep queries, keys and values in one matrix, or the gate and the up projection, and split the product's result:

    y = x W + b;  q, k, v = Split(y)     ->     q = x W.0 + b.0;  k = x W.1 + b.1;  v = x W.2 + b.2

A contiguous shard of W would be mostly q, and the Split would gather y. The parts of W are followed forward through every op that treats
their elements alike, until a Split, Slice or Gather takes exactly these parts; for any other reader they are joined again. Each part is
then sharded separately, whatever its size: fewer keys than queries need no special case.

A part is a parameter of its own that knows its place in the whole (`PackedBox`): its state is listed under the name of the whole, as a box
of it, so that a checkpoint is the same for any plan.

The parts of a dim that the graph requests: those that Split, Slice and Gather take, through ops that treat the dim's elements alike.

A dim is followed through an op by its letter in the op's rule, if the plain op on a part gives that part of the result. Parts are fractions
of the dim, which a Reshape to (3, heads, size) preserves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.computed import PART, PackedBox, WidenedTensor, box_of, full_box
from partc.compiler.ir.graph import OF_TURNS, Reads, has_computed_target, name_of
from partc.compiler.ir.program import Typed
from partc.compiler.ir.training import ParameterOptions
from partc.compiler.matching import sharding_rules
from partc.compiler.ops.node import axes_of, axis_of, constant_ints, dims
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import WHOLE
from partc.compiler.plan.rules import ShardingRule
from partc.compiler.plan.training.optimizer import Optimizer
from partc.compiler.rewrite.rewriting import Rewriting
from partc.compiler.sharding.seeding.seeds import TENSOR_PARALLEL
from partc.compiler.sharding.seeding.styles import parameter_factor, source_of, styled

MOST_PARTS = 8
"""The most parts of a Split that are assumed to be packed weights: a Split into more is of heads or positions, unless a rule differs."""
_PARTS = "partc.parts"
"""Key of a tensor's meta: maps a dim, begin and end to the part that is a weight of its own."""
_EAGER = 1 << 16

Parts = tuple[int, list[ir.Value]]
"""The dim along which a value is taken apart, and the values of its parts."""


def unpack(program: Typed) -> Typed:
    """Returns the program with packed weights of colwise rules, and stacks of weights that turns read one by one, taken apart.

    Raises CompileError if a rule says `packed` and the weight has no such parts.
    """
    rules = {node: rule for node, rule in sharding_rules(program)[0].items() if rule.style == "colwise"}
    stacks = [node for node in program.paths if OF_TURNS in node.metadata_props]
    if not stacks and (program.plan.ranks == 1 or not rules):
        return program
    work = _Unpacking(program)
    for node in stacks:
        work.stack(node)
    for node, rule in rules.items() if program.plan.ranks > 1 else ():
        if node in work.paths and node not in work.constants:
            work.node(node, rule)
    if work.problems:
        raise CompileError(work.problems)
    return work.finished()


class _Unpacking(Rewriting[Typed]):
    def __init__(self, program: Typed) -> None:
        super().__init__(program)
        self.problems: list[Problem] = []
        self.parts: dict[ir.Value, Parts] = {}
        self.joined: dict[ir.Value, ir.Value] = {}
        self.split: dict[ir.Value, list[ir.Value]] = {}
        self.constants: set[ir.Node] = set()
        known = set(self.graph.initializers.values())
        for node in self.graph:
            if known.issuperset(program.reads[node]):
                known.update(node.outputs)
                self.constants.add(node)
        self.known = known
        self.apart = taken_apart(program.reads)
        mesh = dict(program.plan.mesh)
        self.ranks = mesh.get(TENSOR_PARALLEL, 1) if mesh else program.plan.ranks

    def finished(self) -> Typed:
        """Returns the program, with the parts of a parameter in its place among the trained parameters."""
        training = self.before.training
        if training is None:
            return self.done()
        parameters: dict[ir.Value, ParameterOptions] = {}
        for value, learned in training.parameters.items():
            parameters |= dict.fromkeys(self.split.get(value, [value]), learned)
        return self.done(training=replace(training, parameters=parameters))

    def stack(self, node: ir.Node) -> None:
        """Takes a weight apart into those of turns, unless another node reads it, or the optimizer uses norms of whole parameters."""
        operand = node.inputs[0]
        source = (
            source_of(operand, int(node.metadata_props[OF_TURNS]))
            if node in self.paths and operand is not None
            else None
        )
        if source is None:
            return
        weight, dim = source
        by_turns = all(OF_TURNS in use.node.metadata_props for use in weight.uses()) or len(list(weight.uses())) == 1
        if by_turns and weight.const_value is not None and self._taking_norms(weight) is None:
            self._take_apart(weight, dim, [1] * _extent(weight, dim))

    def node(self, node: ir.Node, rule: ShardingRule) -> None:
        """Takes the weight of a node apart, if the rule or the graph gives the parts."""
        said, subject, node = rule.packed, f"sharding of '{self.paths[node]}'", styled(node)
        own = rule_of(node)
        factor = parameter_factor(own, node, "colwise", self.known.__contains__)
        if factor is None:
            return
        k, letter = factor
        operand = node.inputs[k]
        assert operand is not None
        at = (own.inputs[k] or "").index(letter)
        source = source_of(operand, at)
        size = source[0].shape[source[1]] if source is not None and source[0].shape is not None else None
        if source is None or not isinstance(size, int) or len(list(source[0].uses())) > 1:
            if said is not None:
                law = "a packed weight is an initializer that one node reads, transposed or looked up at most"
                self.problems.append(Problem(rule.where, f"{subject}: the weight cannot be taken apart", law))
            return
        weight, dim = source
        sizes = self._sizes(weight, dim, size, rule, subject)
        if len(sizes) > 1:
            self._take_apart(weight, dim, sizes)

    def _sizes(self, weight: ir.Value, dim: int, size: int, rule: ShardingRule, subject: str) -> list[int]:
        """Returns the sizes of the parts; a single one if the weight stays as it is."""
        said, named = rule.packed, f"{subject}: '{weight.name}' dim {dim} ({size})"
        if isinstance(said, tuple):
            if sum(said) == size:
                return self._unless_full_norms(weight, list(said), rule, subject)
            shown = ", ".join(map(str, said))
            self.problems.append(
                Problem(rule.where, f"{named} cannot be packed as {shown}", f"they add up to {sum(said)}")
            )
            return []
        if said:
            if size % said == 0:
                return self._unless_full_norms(weight, [size // said] * said, rule, subject)
            help_ = "write the sizes of the parts: packed: [64, 16, 16]"
            self.problems.append(Problem(rule.where, f"{named} cannot be packed as {said} equal parts", help=help_))
            return []
        if weight not in self.apart:
            return [size]
        ends = requested_bounds(weight, dim)
        sizes = [int((end - begin) * size) for begin, end in itertools.pairwise(ends)]
        fits = all((end * size).denominator == 1 for end in ends) and all(part % self.ranks == 0 for part in sizes)
        if not fits or len(sizes) > MOST_PARTS:
            return [size]
        return self._unless_full_norms(weight, sizes, rule, "") if len(sizes) > 1 else sizes

    def _unless_full_norms(self, weight: ir.Value, sizes: list[int], rule: ShardingRule, subject: str) -> list[int]:
        """Returns the sizes; none for an optimizer that uses norms of whole parameters, and then a problem if a rule says `packed`."""
        optimizer = self._taking_norms(weight)
        if optimizer is None:
            return sizes
        if subject:
            fact = f"{subject}: the optimizer {optimizer.type} takes the norm of a parameter, not of its parts"
            self.problems.append(
                Problem(rule.where, fact, help="take another optimizer, or 'colwise' without 'packed'")
            )
        return []

    def _taking_norms(self, weight: ir.Value) -> Optimizer | None:
        """Returns the optimizer of a weight, if it needs the unsplit weight; else None."""
        training = self.before.training
        if training is None or weight not in training.parameters or training.parameters[weight].frozen:
            return None
        optimizer = training.optimizer_of(weight)
        return None if optimizer.is_elementwise else optimizer

    def _take_apart(self, weight: ir.Value, dim: int, sizes: list[int]) -> None:
        self.parts = {weight: (dim, self._shards(weight, dim, sizes))}
        self.joined = {}
        old: list[ir.Node] = []
        for node in list(self.graph):
            packed = [k for k, value in enumerate(node.inputs) if value in self.parts]
            if not packed:
                continue
            value = node.inputs[packed[0]]
            assert value is not None
            after = through(node, packed[0], self.parts[value][0])
            taken = len(packed) == 1 and self._take_out(node, packed[0])
            if taken or (after is not None and self._clone(node, packed, after)):
                old.append(node)
            else:
                for k in packed:
                    node.replace_input_with(k, self._joined(node, node.inputs[k]))
        for value in [output for output in self.graph.outputs if output in self.parts]:
            last = value.producer()
            assert last is not None
            self.take_place(self._joined(last, value), value, last)
        self.drop(old)
        for value in [value for value in self.split if value in self.values and not value.uses()]:
            del self.graph.initializers[name_of(value)]
            del self.values[value]

    def _shards(self, value: ir.Value, dim: int, sizes: Sequence[int]) -> list[ir.Value]:
        """Returns a weight's parts as weights of their own."""
        shards, begin = [], 0
        tensor, shape = value.const_value, tuple(value.shape.numpy()) if value.shape is not None else ()
        assert tensor is not None
        around = value.meta.get(PART)
        for k, size in enumerate(sizes):
            part = self.like(value, f"{value.name}.{k}", {dim: size})
            part.const_value = _slice_of(tensor, dim, begin, begin + size, part)
            part.meta.update(value.meta)
            if around is None:
                part.meta[PART] = PackedBox(name_of(value), shape, tuple((0, n) for n in shape)).within(
                    dim, begin, size
                )
            else:
                part.meta[PART] = around.within(dim, begin, size)
            self.graph.register_initializer(part)
            shards.append(part)
            begin += size
        self.split[value] = shards
        return shards

    def _take_out(self, node: ir.Node, k: int) -> bool:
        """Makes the readers of a Split, Slice or Gather read the parts that it takes; returns False if it takes others."""
        value = node.inputs[k]
        assert value is not None
        dim, parts = self.parts[value]
        found = outlets(node, k, dim)
        ends = _ends(parts, dim)
        if found is None or not all(outlet.begin in ends and outlet.end in ends for outlet in found):
            return False
        for outlet in found:
            some = parts[ends.index(outlet.begin) : ends.index(outlet.end)]
            self.take_place(self._outlet(node, outlet, some, dim), outlet.value, node)
        return True

    def _outlet(self, node: ir.Node, outlet: Outlet, parts: list[ir.Value], dim: int) -> ir.Value:
        if len(parts) == 1 and not outlet.drops:
            return parts[0]
        joined = self.like(outlet.value, name_of(outlet.value))
        if outlet.drops:
            axes = self.constant(f"{outlet.value.name}.axes", [dim])
            self.put(node, "Squeeze", [parts[0], axes], [joined])
        else:
            self.put(node, "Concat", parts, [joined], axis=dim)
        return joined

    def _clone(self, node: ir.Node, packed: Sequence[int], after: int) -> bool:
        """Writes the node once for each part; returns False if a part of its result is not a whole number of elements."""
        value, out = node.inputs[packed[0]], node.outputs[0]
        assert value is not None
        dim, parts = self.parts[value]
        rule = rule_of(node)
        letter = (rule.inputs[packed[0]] or "")[dim]
        extent = out.shape[after] if out.shape is not None else None
        total = sum(_extent(part, dim) for part in parts)
        if not isinstance(extent, int) or any(_extent(part, dim) * extent % total for part in parts):
            return False
        places = [
            None if not letters or letter not in letters or letter == WHOLE else letters.index(letter)
            for letters in rule.inputs
        ]
        if any(self.parts[v][0] != places[k] or _ends(self.parts[v][1], self.parts[v][0]) != _ends(parts, dim)
               for k in packed if (v := node.inputs[k]) is not None):  # fmt: skip
            return False
        sizes = [_extent(part, dim) for part in parts]
        operands = [
            [operand] * len(parts)
            if operand is None or place is None
            else self.parts[operand][1]
            if operand in self.parts
            else self._split_operand(node, operand, place, sizes)
            for operand, place in zip(node.inputs, [*places, *[None] * len(node.inputs)], strict=False)
        ]
        results = []
        for k, size in enumerate(sizes):
            inputs = [each[k] for each in operands]
            result = self.like(out, f"{out.name}.{k}", {after: size * extent // total})
            if node.op_type == "Reshape":
                inputs[1] = self._target(node, after, size * extent // total, k)
            attributes = list(node.attributes.values())
            self.put(node, node.op_type, inputs, [result], f".{k}", attributes, node.domain)
            results.append(result)
        self.parts[out] = (after, results)
        return True

    def _split_operand(self, node: ir.Node, value: ir.Value, dim: int, sizes: Sequence[int]) -> list[ir.Value]:
        """Returns the same parts of another operand: parts of a bias as weights, else parts of a value by a Split."""
        alone = value.is_initializer() and len(list(value.uses())) == 1 and value.const_value is not None
        if alone and self._taking_norms(value) is None:
            return self._shards(value, dim, sizes)
        lengths = self.constant(f"{self.paths[node]}.{value.name}.sizes", list(sizes))
        made = [self.like(value, f"{self.paths[node]}.{value.name}.{k}", {dim: n}) for k, n in enumerate(sizes)]
        self.put(node, "Split", [value, lengths], made, ".parts", axis=dim)
        return made

    def _target(self, node: ir.Node, after: int, size: int, k: int) -> ir.Value:
        """Returns a Reshape's target with the extent of a part."""
        old_target, name = node.inputs[1], f"{node.outputs[0].name}.{k}"
        assert old_target is not None
        numbers = constant_ints(node, 1)
        if numbers is not None and not has_computed_target(node):
            return self.constant(f"{name}.part_target", [size if at == after else n for at, n in enumerate(numbers)])
        places = self.constant(f"{name}.part_place", [after])
        sizes, made = self.constant(f"{name}.part_size", [size]), self.like(old_target, f"{name}.part_target")
        self.put(node, "ScatterElements", [old_target, places, sizes], [made], f".target.{k}")
        return made

    def _joined(self, node: ir.Node, value: ir.Value | None) -> ir.Value:
        """Returns the value joined from its parts, for a reader of the whole value."""
        assert value is not None
        if value not in self.joined:
            dim, parts = self.parts[value]
            self.joined[value] = self.like(value, name_of(value))
            self.put(node, "Concat", parts, [self.joined[value]], ".whole", axis=dim)
        return self.joined[value]


def _extent(value: ir.Value, dim: int) -> int:
    size = value.shape[dim] if value.shape is not None else None
    assert isinstance(size, int)
    return size


def _ends(parts: Sequence[ir.Value], dim: int) -> list[Fraction]:
    """Returns the bounds of parts, as fractions of their sum."""
    sizes = [_extent(part, dim) for part in parts]
    return [Fraction(sum(sizes[:k]), sum(sizes)) for k in range(len(sizes) + 1)]


def _slice_of(tensor: ir.TensorProtocol, dim: int, begin: int, end: int, part: ir.Value) -> ir.TensorProtocol:
    """Returns a part of a tensor, the same object for all programs of a plan; a part of a large tensor is read only when it is written."""
    known: dict[tuple[int, int, int], ir.TensorProtocol] = getattr(tensor, "meta", {}).setdefault(_PARTS, {})
    if (dim, begin, end) in known:
        return known[dim, begin, end]

    assert part.shape is not None
    box = full_box(part.shape.numpy())
    made = box_of(tensor, (*box[:dim], slice(begin, end), *box[dim + 1 :]), name_of(part))
    if tensor.nbytes <= _EAGER and not isinstance(made, WidenedTensor):
        made = ir.Tensor(np.ascontiguousarray(made.numpy()), dtype=made.dtype)
    return known.setdefault((dim, begin, end), made)


_PLAIN = ("ExpertMatMul", "ExpertMatMulNBits", "Gather", "GatherND", "Gemm", "Reshape")
"""Ops whose rule rewrites a node, except along a dim that passes through unchanged; a Reshape gets another target."""

_TAKING = frozenset({"Split", "Slice", "Gather", "If", "Loop", "Scan", "SequenceMap"})


@dataclass(frozen=True)
class Outlet:
    """An output that is just a part of a dim, from `begin` to `end`; `drops`: whether the output lacks the dim."""

    value: ir.Value
    begin: Fraction
    end: Fraction
    drops: bool = False


def through(node: ir.Node, k: int, dim: int) -> int | None:
    """Returns the dim of the node's only output whose parts are those of dim `dim` of operand `k`, or None."""
    if any(out.uses() or out.is_graph_output() for out in node.outputs[1:]):
        return None
    rule = rule_of(node)
    letters = rule.inputs[k] if k < len(rule.inputs) else None
    output_letters = rule.outputs[0]
    letter = letters[dim] if letters and dim < len(letters) else WHOLE
    if (
        letter == WHOLE
        or letter in rule.replicated
        or letter in rule.units
        or output_letters is None
        or letter not in output_letters
    ):
        return None
    if rule.local is not None and node.op_type not in _PLAIN:
        return None
    return output_letters.index(letter)


def outlets(node: ir.Node, k: int, dim: int) -> list[Outlet] | None:
    """Returns the parts that the node takes of dim `dim` of operand `k`; None if it does not take it apart."""
    shape = dims(node.inputs[k])
    size = shape[dim] if shape is not None else None
    if k or not isinstance(size, int) or shape is None:
        return None
    match node.op_type:
        case "Split" if axis_of(node, len(shape), 0) == dim:
            return _split(node, dim, size)
        case "Slice":
            return _slice(node, dim, size, len(shape))
        case "Gather" if axis_of(node, len(shape), 0) == dim:
            return _gather(node, size)
    return None


def taken_apart(reads: Reads) -> set[ir.Value]:
    """Returns the values of which a part may be requested: operands of Split, Slice, Gather and bodies, and all values before these."""
    found: set[ir.Value] = set()
    for node, values in reversed(reads.items()):
        if node.op_type in _TAKING or not found.isdisjoint(node.outputs):
            found.update(values)
    return found


def requested_bounds(value: ir.Value, dim: int) -> list[Fraction]:
    """Returns the bounds of all requested parts as fractions, ascending from 0 to 1; [0, 1] if no reader takes the dim apart."""
    return sorted({Fraction(0), Fraction(1), *_shard_ends(value, dim)})


def _shard_ends(value: ir.Value, dim: int) -> Iterator[Fraction]:
    for use in value.uses():
        found = outlets(use.node, use.idx, dim)
        if found is not None:
            for outlet in found:
                yield from (outlet.begin, outlet.end)
        elif (after := through(use.node, use.idx, dim)) is not None:
            yield from _shard_ends(use.node.outputs[0], after)


def _split(node: ir.Node, dim: int, size: int) -> list[Outlet] | None:
    parts_found, begin = [], 0
    for out in node.outputs:
        shape = dims(out)
        length = shape[dim] if shape is not None else None
        if not isinstance(length, int):
            return None
        parts_found.append(Outlet(out, Fraction(begin, size), Fraction(begin + length, size)))
        begin += length
    return parts_found if begin == size else None


def _slice(node: ir.Node, dim: int, size: int, rank: int) -> list[Outlet] | None:
    starts, ends = constant_ints(node, 1), constant_ints(node, 2)
    axes = axes_of(node, rank, 3) or tuple(range(len(starts or ())))
    strides = constant_ints(node, 4) if len(node.inputs) > 4 and node.inputs[4] is not None else (1,)
    if starts is None or ends is None or axes != (dim,) or strides != (1,):
        return None
    begin, end, _ = slice(starts[0], ends[0]).indices(size)
    return [Outlet(node.outputs[0], Fraction(begin, size), Fraction(end, size))] if begin < end else None


def _gather(node: ir.Node, size: int) -> list[Outlet] | None:
    index, shape = constant_ints(node, 1), dims(node.inputs[1])
    if index is None or shape is None or len(index) != 1 or len(shape) > 1 or not -size <= index[0] < size:
        return None
    at = index[0] % size
    return [Outlet(node.outputs[0], Fraction(at, size), Fraction(at + 1, size), drops=not shape)]
