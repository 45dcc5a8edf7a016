"""The states of the values of a batch that runs in microbatches, one after another: time is one more axis of the mesh.

The law is that of sharding along the batch, `ops/rule.py`. In each microbatch a value is

    REPLICATE        the same as in the whole batch: weights, and values computed from them
    Shard(d)         the records of the microbatch along dim d, perhaps strided (`analysis/records.py`)
    Partial("sum")   a partial sum: the whole batch's value is the sum over the microbatches
    Partial("mean")  a partial mean: the whole batch's value is the mean over the microbatches
    OWN              the microbatch's own value, from which the whole batch's does not follow: the number of its records, its largest loss

A node takes records along one factor, by which all its operands that have the factor must be sharded, and passes them to its outputs. A
node that needs all records at once, or needs to know which of them it has, is `mixing`: its result is not that of the whole batch.

A training has the sizes of a microbatch, and adds up partial sums. A loss over labels of which each microbatch has another number is a sum
divided by a sum, and quotients of sums cannot be added up. But the divisor follows from the labels alone, so that the whole batch's divisor
can be computed before the first microbatch (`totals`): then every microbatch has its exact share of the loss.

A stream, of a program that does not train, has the sizes of the whole batch: its nodes get their local form (`cut`), and nodes that reduce
over records are `mixing`. A value that is the same in all microbatches, but is read along the factor of the records, is sharded where all
its records are equal, as those of an Expand, a ConstantOfShape or a constant of zeros.

The local form of a node in a microbatch: the form that its rule gives for one of `count` shards of the batch, which follow in time.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import onnx_ir as ir
from onnx_shape_inference import SYM_DATA_KEY
from partc.compiler.analysis.infer_shapes import infer_shapes
from partc.compiler.analysis.records import KEEPS_ORDER, OF_PIECES, Shard, batch_symbols, dim_of, reshaped, together
from partc.compiler.dims.facts import ANY_DIM
from partc.compiler.dims.reading import read, symbol
from partc.compiler.ir.graph import operand_name, operands_of
from partc.compiler.ir.program import Typed
from partc.compiler.ops.families.images.pool import scaled
from partc.compiler.ops.registry import draws, rule_of
from partc.compiler.ops.rule import OWN as OWN_OPS
from partc.compiler.ops.rule import WHOLE, Local, Rule

_LIGHT_ELEMENTS = 1 << 16
"""The most elements of a frozen weight from which values may be computed twice: once more before the microbatches."""
_LOOKUPS = ("Gather", "GatherElements", "GatherND")
_TYPE_ALONE: Mapping[str, int] = {"CastLike": 1}
"""Maps each op to the operand of which it reads only the type."""
_SCATTERS = ("ScatterElements", "ScatterND")
_LARGEST = 1 << 20
"""The most elements of a constant whose records are compared."""
_RECORDS = "r"
_FIXED = "_records"
"""The symbol that replaces a fixed size of the batch."""
_MIXES = "may bring records of the batch together"
_REDUCED = {"sum": "a sum", "max": "the largest", "min": "the smallest"}


class Alone(enum.Enum):
    """The states without further data: replicated, and a microbatch's own value."""

    REPLICATE = "replicate"
    OWN = "own"


@dataclass(frozen=True)
class Partial:
    """A partial value: the whole batch's value is the sum or the mean over all microbatches."""

    how: Literal["sum", "mean"]


State: TypeAlias = Alone | Shard | Partial
REPLICATE, OWN, SUM, MEAN = Alone.REPLICATE, Alone.OWN, Partial("sum"), Partial("mean")


class Flow:
    """The states of a program's values, starting from its `batch_dims`, in `count` microbatches.

    `totals`: values whose whole-batch value is fed to microbatches. `shares`: operands, by node and position, that count once for every
    microbatch and are added to partial sums. `mixing`: maps each node whose result is not that of the whole batch to the reason. `cut`:
    maps each node with records to its rule and the factor of the records. `same_records`: values that are sharded for a reader.
    """

    def __init__(self, program: Typed, count: int) -> None:
        self.program, self.count, self.streams = program, count, program.training is None
        self.known = {name: info.facts for name, info in program.symbols.items()}
        self.given = {value: Shard(dim, dim_of(value, dim)) for value, dim in program.batch_dims.items()}
        self.same_records: dict[ir.Value, Shard] = {}
        self._batch = frozenset(batch_symbols(program.batch_dims))
        self._by_symbol = _by_symbol(program) if not self.streams and not self._batch and count > 1 else {}
        while not self._walk():
            pass

    def state(self, value: ir.Value) -> State:
        """The state of a value: its relation to the value of the whole batch."""
        return REPLICATE if value in self.totals else self.states.get(value, REPLICATE)

    def shard(self, value: ir.Value) -> Shard | None:
        """The dim of the records in a value, as a `Shard`; None where the value has no records."""
        return state if isinstance(state := self.state(value), Shard) else None

    def follows_from_inputs(self, value: ir.Value) -> bool:
        """Whether the whole batch's value can be computed before the first microbatch: from inputs alone and with a size known there."""
        known = value.shape is not None and not any(self._speaks(value, dim) for dim, _ in enumerate(value.shape))
        return value in self._light and known and (bool(self._batch) or self.state(value) is not OWN)

    def _walk(self) -> bool:
        """Walks through the graph once; returns False as soon as it has found another value to shard: the walk must then start again."""
        self.states: dict[ir.Value, State] = {
            **self.given,
            **{value: one for value, one in self.same_records.items() if value.producer() is None},
        }
        self.totals: dict[ir.Value, None] = {}
        self.shares: dict[tuple[ir.Node, int], None] = {}
        self.mixing: dict[ir.Node, str] = {}
        self.cut: dict[ir.Node, tuple[Rule, str]] = {}
        self._light = self._inputs_alone()
        self._counts: dict[ir.Value, ir.Node] = {}
        before = len(self.same_records)
        for node in self.program.model.graph:
            self._node(node)
            if len(self.same_records) > before:
                return False
        return True

    def _inputs_alone(self) -> set[ir.Value]:
        """The inputs and small frozen weights; the walk adds the values that are computed from these alone."""
        training, graph = self.program.training, self.program.model.graph
        if training is None:
            return set()
        changing = {*training.parameters, *training.statistics}
        weights = (value for value in graph.initializers.values() if value not in changing)
        light = (one for one in weights if one.const_value is None or one.const_value.size <= _LIGHT_ELEMENTS)
        return {*(value for value in graph.inputs if value.name not in training.scalars), *light}

    def _node(self, node: ir.Node) -> None:
        """Sets the states of a node's outputs."""
        is_plain = node.domain != OWN_OPS or node.op_type in KEEPS_ORDER
        if is_plain and not draws(node) and self._light.issuperset(self.program.reads[node]):
            self._light.update(node.outputs)
        typed = _TYPE_ALONE.get(node.op_type)
        operands = {k: value for k, value in enumerate(node.inputs) if value is not None and k != typed}
        around = self.program.around[node]
        if all(self.state(value) is REPLICATE for value in (*operands.values(), *around)):
            self._shard_for_reader(node)
            return
        self._count(node)
        rule = rule_of(node)
        for value in around:
            self._settle(value, node)
        passing = self._partial(node, rule, operands)
        if passing is not None:
            self.states.update(dict.fromkeys(node.outputs, passing))
            return
        for value in operands.values():
            self._settle(value, node)
        at, within = {k: one for k, v in operands.items() if (one := self.shard(v))}, any(map(self.shard, around))
        if not at and not within:
            own = any(self.state(value) is OWN for value in (*operands.values(), *around))
            self._guess(node, OWN if own else REPLICATE)
        elif why := "has a body that reads records of the batch" if within else self._passed(node, rule, at):
            told = self.streams or not all(_is_integer(out) for out in node.outputs)
            if told:
                self.mixing.setdefault(node, why)
            if not self.streams:
                self._guess(node, REPLICATE if told and at else OWN)
        for out in node.outputs:
            if self.states.get(out) is OWN:
                self._sized(out)

    def _passed(self, node: ir.Node, rule: Rule, at: Mapping[int, Shard]) -> str:
        """Passes records on along the one factor that they shard; returns the reason why it cannot, or ''."""
        if node.meta.get(OF_PIECES):
            self.states[node.outputs[0]] = Shard(1)
            return ""
        if node.op_type in KEEPS_ORDER and 0 in at and self._reshaped(node, rule, at[0]):
            return ""
        letters = {_letter(rule.inputs[k] if k < len(rule.inputs) else None, one.dim) for k, one in at.items()}
        letter, shard = letters.pop(), together(at.values())
        if letters or letter == WHOLE or letter in rule.replicated or letter in rule.units or shard is None:
            return _MIXES
        if not _stand_alike(node, rule, letter, shard):
            return _MIXES
        for k, value in enumerate(node.inputs[: len(rule.inputs)]) if self.streams else ():
            have = (rule.inputs[k] or "").count(letter)
            if value is None or not have or (k in at and have == 1):
                continue
            wanted = replace(shard, dim=(rule.inputs[k] or "").index(letter))
            needed = [*self._alike(value, wanted)] if k not in at and shard.stride == 1 else [(value, None)]
            if any(how is None for _, how in needed):
                return f"takes '{value.name}', which is the same for all microbatches, by records of the batch"
            self.same_records.update((one, how) for one, how in needed if how is not None)
            return ""
        counts_from_zero = node.op_type in _SCATTERS and rule.reduce.get(letter) == "sum" and _is_zeros(node.inputs[0])
        is_known = node.domain == OWN_OPS or counts_from_zero
        if not is_known and depends_on_shard(self.program, node, rule, letter, self.count):
            return "needs to know which records of the batch it has"
        return self._through_factor(node, rule, letter, shard)

    def _through_factor(self, node: ir.Node, rule: Rule, letter: str, shard: Shard) -> str:
        """Sets the states of the outputs of a node that is sharded along a factor; returns the reason why it cannot, or ''."""
        how = rule.reduce.get(letter)
        for out, made in zip(node.outputs, rule.outputs, strict=False):
            if made is not None and letter in made:
                self.states[out] = replace(shard, dim=made.index(letter))
            elif self.streams and out.name and made is None:
                return _MIXES
            elif self.streams and out.name and how != "":  # as of Shape and Size, whose local form gives the whole
                return f"takes {_REDUCED.get(how or '', 'something')} over the records of the batch"
            elif not self.streams:
                term = MEAN if rule.local is scaled else SUM
                self.states[out] = term if how == "sum" else OWN
        self.cut[node] = rule, letter
        return ""

    def _reshaped(self, node: ir.Node, rule: Rule, shard: Shard) -> bool:
        """Passes records on through a node that regroups elements into dims in order; False if no dim of the output holds the records."""
        source, out = node.inputs[0], node.outputs[0]
        made = reshaped(shard, source, out, self.known)
        if made is None or source is None or source.shape is None or out.shape is None:
            return False
        self.states[out] = made
        sides = ((source.shape, shard.dim), (out.shape, made.dim))
        given, given_out = ("".join(_RECORDS if k == dim else WHOLE for k in range(len(shape))) for shape, dim in sides)
        inputs = (given, *(WHOLE for _ in rule.inputs[1:]))
        self.cut[node] = replace(rule, inputs=inputs, outputs=(given_out,)), _RECORDS
        return True

    def _shard_for_reader(self, node: ir.Node) -> None:
        """Shards a node whose operands have no records, but whose output is read along records."""
        made = next(
            ((k, self.same_records[out]) for k, out in enumerate(node.outputs) if out in self.same_records), None
        )
        if made is None:
            return
        k, shard = made
        if node.op_type == "Constant":
            self.states[node.outputs[0]] = shard
            return
        rule = rule_of(node)
        self._through_factor(node, rule, _letter(rule.outputs[k], shard.dim), shard)

    def _alike(self, value: ir.Value, shard: Shard) -> Iterator[tuple[ir.Value, Shard | None]]:
        """Yields the values to shard along with this one, each with its `Shard`; with None instead for a value whose records differ."""
        node, there = value.producer(), self.shard(value) or self.same_records.get(value)
        if there is not None or dim_of(value, shard.dim) != shard.size:
            yield value, shard if there == shard else None
            return
        yield value, shard
        if node is None or node.op_type == "Constant":
            if not value.is_graph_input() and not _same_records(value, shard.dim, self.count):
                yield value, None
            return
        rule = rule_of(node)
        letter = _letter(rule.outputs[value.index() or 0] if rule.outputs else None, shard.dim)
        whole = letter == WHOLE or letter in rule.replicated or letter in rule.units
        if whole or depends_on_shard(self.program, node, rule, letter, self.count):
            yield value, None
            return
        for operand, letters in zip(node.inputs, rule.inputs, strict=False):
            if operand is not None and letters and letter in letters:
                yield from self._alike(operand, replace(shard, dim=letters.index(letter)))

    def _count(self, node: ir.Node) -> None:
        """Follows record numbers: a microbatch counts its own records from 0, so the numbers are only valid to look up its own records."""
        if node.op_type == "Range" and any(self.state(value) is OWN for value in node.inputs if value is not None):
            self._counts[node.outputs[0]] = node
        numbers = {
            k: self._counts[value] for k, value in enumerate(node.inputs) if value is not None and value in self._counts
        }
        data = node.inputs[0] if node.inputs else None
        if node.op_type in _LOOKUPS and data is not None and self.shard(data) is not None:
            numbers.pop(1, None)
        if not numbers or node.op_type in ("Shape", "Size"):
            return
        origin = next(iter(numbers.values()))
        if node.op_type in _LOOKUPS or not all(_is_integer(out) for out in node.outputs):
            self.mixing.setdefault(origin, "numbers the records of the batch")
        else:
            self._counts.update(dict.fromkeys(node.outputs, origin))

    def _partial(self, node: ir.Node, rule: Rule, operands: Mapping[int, ir.Value]) -> State | None:
        """Returns the state of the outputs where partial values pass through a node."""
        terms = {k for k, value in operands.items() if isinstance(self.state(value), Partial)}
        for group in rule.partial_inputs if terms else ():
            group = tuple(k for k in group if k in operands)
            others = [value for k, value in operands.items() if k not in group]
            if terms.isdisjoint(group) or any(self.shard(operands[k]) is not None for k in group):
                continue
            if any(self.shard(value) is not None for value in others):
                continue
            for value in (*others, *(operands[k] for k in group if self.state(operands[k]) is OWN)):
                self._settle(value, node)
            states = [self.state(operands[k]) for k in group]
            if SUM not in states:
                return MEAN if MEAN in states else None
            for k, state in zip(group, states, strict=True):
                if state != SUM:
                    self.shares[node, k] = None
            return SUM
        return None

    def _settle(self, value: ir.Value, node: ir.Node) -> None:
        """Handles an operand that must be the whole batch's: computes it before the microbatches if possible, else the node is `mixing`."""
        state = self.state(value)
        if isinstance(state, Shard) or state is REPLICATE or value.dtype is None:
            return
        if not value.dtype.is_floating_point() and state is OWN:
            return
        if self.follows_from_inputs(value):
            self.totals[value] = None
            return
        producer = value.producer()
        self.mixing.setdefault(node if producer is None else producer, "reduces over the records of a batch")
        self.states[value] = REPLICATE

    def _guess(self, node: ir.Node, otherwise: State) -> None:
        """Sets the states of the outputs of a node without a rule: a dim whose size contains the batch symbol holds records."""
        for out in node.outputs:
            dims = [dim for dim, _ in enumerate(out.shape or ()) if self._speaks(out, dim)]
            self.states[out] = Shard(dims[0]) if dims else otherwise

    def _sized(self, value: ir.Value) -> None:
        """Sets the state of a value of shape arithmetic whose entries are known: `Shape(x)[1]` is `seq`, which does not depend on the
        batch.

        A number computed from the size of a fixed batch counts records: it is partial, like the sum that it divides."""
        held = self._by_symbol.get(value, value).metadata_props.get(SYM_DATA_KEY)
        entries = [read(str(one)) for one in json.loads(held)] if held is not None else [None]
        if all(one is not None and self._names.isdisjoint(map(str, one.free_symbols)) for one in entries):
            self.states[value] = REPLICATE
        elif self._by_symbol and not _is_integer(value):
            each = [None if one is None else one / symbol(_FIXED) for one in entries]
            self.states[value] = SUM if all(one is not None and one.is_number for one in each) else OWN

    @property
    def _names(self) -> frozenset[str]:
        """The symbols in the batch's size."""
        return self._batch or frozenset({_FIXED})

    def _speaks(self, value: ir.Value, dim: int) -> bool:
        """Whether the size of a dim may depend on that of the batch."""
        shape = self._by_symbol.get(value, value).shape
        size = shape[dim] if shape is not None and dim < len(shape) else None
        return isinstance(size, ir.SymbolicDim) and (
            size.value is None or not self._names.isdisjoint(size.free_symbols())
        )


def _by_symbol(program: Typed) -> dict[ir.Value, ir.Value]:
    """For a batch of fixed size, maps values to copies whose sizes name the batch by a symbol: a number does not tell what it counts."""
    model, graph = program.model.clone(), program.model.graph
    for value, twin in zip(graph.inputs, model.graph.inputs, strict=True):
        if value in program.batch_dims and twin.shape is not None:
            along = program.batch_dims[value]
            twin.shape = ir.Shape([_FIXED if dim == along else size for dim, size in enumerate(twin.shape.dims)])
    made = [out for node in model.graph for out in node.outputs]
    for twin in made:
        twin.metadata_props.pop(SYM_DATA_KEY, None)
        twin.const_value = None
    infer_shapes(model, {**{name: info.facts for name, info in program.symbols.items()}, _FIXED: ANY_DIM})
    return dict(zip((out for node in graph for out in node.outputs), made, strict=True))


def _stand_alike(node: ir.Node, rule: Rule, letter: str, shard: Shard) -> bool:
    """Whether records along a factor have one stride in inputs and outputs: strided records only where all dims have one size."""
    if shard.stride == 1:
        return True
    operands = (*zip(node.inputs, rule.inputs, strict=False), *zip(node.outputs, rule.outputs, strict=False))
    sizes = {dim_of(value, letters.index(letter)) for value, letters in operands if letters and letter in letters}
    return len(sizes) == 1 and None not in sizes


def _same_records(value: ir.Value, dim: int, count: int) -> bool:
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > _LARGEST or dim >= len(tensor.shape):
        return False
    array = tensor.numpy()
    size = array.shape[dim] // count
    first = array.take(range(size), dim)
    return all((array.take(range(k * size, (k + 1) * size), dim) == first).all() for k in range(1, count))


def _is_zeros(value: ir.Value | None) -> bool:
    """Whether the data to which updates are added are zeros, so that each microbatch may add its own: a count of records by class."""
    producer = None if value is None else value.producer()
    if producer is None or producer.op_type not in ("Constant", "ConstantOfShape"):
        return False
    number = producer.attributes.get("value")
    if number is None:
        return producer.op_type == "ConstantOfShape"
    tensor = number.as_tensor()
    return tensor.size <= _LARGEST and not tensor.numpy().any()


def _letter(letters: str | None, dim: int) -> str:
    return WHOLE if letters is None or dim >= len(letters) else letters[dim]


def _is_integer(value: ir.Value) -> bool:
    return value.dtype is not None and not value.dtype.is_floating_point()


class _ShardNumbers(dict[str, int]):
    """A mapping from factor to shard number; `was_read` is set once a rule has read a number."""

    was_read = False

    def get(self, key: str, default: int = 0) -> int:  # type: ignore[override]
        self.was_read = self.was_read or key in self
        return super().get(key, default)


def local_in_time(program: Typed, node: ir.Node, rule: Rule, letter: str, count: int) -> Local:
    """Returns the nodes that replace a node sharded along the factor `letter` into `count` shards."""
    return _local(program, node, rule, {letter: count}, {letter: 0})


def depends_on_shard(program: Typed, node: ir.Node, rule: Rule, letter: str, count: int) -> bool:
    """Whether the local form of a node sharded along a factor depends on the index of its shard."""
    numbers = _ShardNumbers({letter: 0})
    _local(program, node, rule, {letter: count}, numbers)
    return numbers.was_read


def _local(program: Typed, node: ir.Node, rule: Rule, shards: Mapping[str, int], numbers: Mapping[str, int]) -> Local:
    inputs, outputs = map(list, operands_of(node))
    operands = (*zip(node.inputs, rule.inputs, strict=False), *zip(node.outputs, rule.outputs, strict=False))
    values = [value for value in (*node.inputs, *node.outputs) if value is not None and value in program.values]
    shapes = {operand_name(value): program.values[value].shape for value in values}
    smaller = dict(shapes)
    for value, letters in operands:
        shape = None if value is None else shapes.get(operand_name(value))
        if value is not None and shape is not None and letters is not None:
            dims = zip(shape, letters, strict=False)
            smaller[operand_name(value)] = tuple(
                dim // shards.get(one, 1) if isinstance(dim, int) else dim for dim, one in dims
            )
    made = Local(node, rule, shards, numbers, inputs, outputs, shapes, smaller)
    if rule.local is not None:
        rule.local(made)
    return made
