"""What becomes of every value when a batch is run in parts, one after the other.

The law is that of a cut along the batch, `ops/rule.py`, in time instead of over ranks. In each part a value is

    EVERY      the same as in the whole batch: weights, and what is made of them
    Rows(d)    the records of the part along dim d, maybe apart from each other (`analysis/record_dims.py`)
    SUM        a term of the whole batch's: those of the parts are added
    MEAN       a term where each part counts alike: the mean of those of the parts
    OWN        the part's own, which the whole batch's does not follow from: the number of its records, its largest loss

A loss of labels that count unevenly is a SUM over a SUM, and a quotient of sums is no sum. But what it is divided by follows from the
labels alone, so that the whole batch's can be made before the first part (`totals`): then every part has its exact share of the loss.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import onnx_ir as ir
from onnx_shape_inference import SYM_DATA_KEY
from partc.compiler.analysis.record_dims import KEEPS_ORDER, Rows, dim_of, reshaped, together
from partc.compiler.analysis.records import OF_PIECES, batch_symbols
from partc.compiler.dims.reading import read
from partc.compiler.ir.program import Program
from partc.compiler.ops.families.loss import local_mean
from partc.compiler.ops.families.pool import scaled
from partc.compiler.ops.registry import draws, rule_of
from partc.compiler.ops.rule import OWN as OWN_OPS
from partc.compiler.ops.rule import WHOLE, Rule
from partc.compiler.sharding.records import passes

_LIGHT_ELEMENTS = 1 << 16
"""The largest weight of which something may be made twice: once before the parts."""
_LOOKUPS = ("Gather", "GatherElements", "GatherND")


class Lies(enum.Enum):
    """How a value in one part of a batch relates to the value of the whole batch."""

    EVERY = "every"
    SUM = "sum"
    MEAN = "mean"
    OWN = "own"


State: TypeAlias = Lies | Rows
EVERY, SUM, MEAN, OWN = Lies.EVERY, Lies.SUM, Lies.MEAN, Lies.OWN


@dataclass
class Spread:
    """What `spread` finds.

    `totals`: values of which the parts are given the whole batch's. `shares`: operands, by node and place, that count once for every part
    and stand among terms. `mixing`: nodes that bring records of different parts together, which they then do not.
    """

    states: dict[ir.Value, State] = field(default_factory=dict)
    totals: dict[ir.Value, None] = field(default_factory=dict)
    shares: dict[tuple[ir.Node, int], None] = field(default_factory=dict)
    mixing: dict[ir.Node, str] = field(default_factory=dict)

    def state(self, value: ir.Value) -> State:
        """How a value lies."""
        return EVERY if value in self.totals else self.states.get(value, EVERY)


def spread(program: Program, records: Mapping[ir.Value, None]) -> Spread:
    """Maps every value to how it relates to the whole batch's, where `records` are split along their first dim."""
    found = _Walk(program, frozenset(batch_symbols(records)))
    for value in records:
        found.states[value] = Rows(0, dim_of(value, 0))
    for node in program.model.graph:
        found.node(node)
    return Spread(found.states, found.totals, found.shares, found.mixing)


class _Walk(Spread):
    def __init__(self, program: Program, batch: frozenset[str]) -> None:
        super().__init__()
        assert program.training is not None
        self.program, self.batch = program, batch
        self.known = {name: info.facts for name, info in program.symbols.items()}
        changing = {*program.training.parameters, *program.training.statistics}
        weights = program.model.graph.initializers.values()
        given = (value for value in program.model.graph.inputs if value.name not in program.training.scalars)
        self.light = {*given, *(one for one in weights if one not in changing and _elements(one) <= _LIGHT_ELEMENTS)}
        """What can be made of the inputs alone, without the model."""
        self.counts: dict[ir.Value, ir.Node] = {}
        """Values that tell the records of a part by their number in it, each with the Range that counts."""

    def node(self, node: ir.Node) -> None:
        """Finds how the outputs lie."""
        reads = self.program.reads[node]
        if not draws(node) and node.domain != OWN_OPS and all(value in self.light for value in reads):
            self.light.update(node.outputs)
        if all(self.state(value) is EVERY for value in reads):
            return
        self._counted(node)
        rule = rule_of(node)
        for value in self.program.around[node]:
            self._settle(value, node)
        passing = self._terms(node, rule)
        if passing is not None:
            self.states.update(dict.fromkeys(node.outputs, passing))
            return
        for value in reads:
            self._settle(value, node)
        self._rows(node, rule)
        for out in node.outputs:
            if self.states.get(out) is OWN and self._holds_no_batch(out):
                self.states[out] = EVERY

    def _counted(self, node: ir.Node) -> None:
        """Follows the numbers of records: a part counts its own from 0, which serve to look these up, and for nothing else."""
        if node.op_type == "Range" and any(self.state(value) is OWN for value in node.inputs if value is not None):
            self.counts[node.outputs[0]] = node
        found = {
            k: self.counts[value] for k, value in enumerate(node.inputs) if value is not None and value in self.counts
        }
        data = node.inputs[0] if node.inputs else None
        if node.op_type in _LOOKUPS and data is not None and isinstance(self.state(data), Rows):
            found.pop(1, None)
        if not found or node.op_type in ("Shape", "Size"):
            return
        origin = next(iter(found.values()))
        if node.op_type in _LOOKUPS or not all(_is_integer(out) for out in node.outputs):
            self.mixing.setdefault(origin, "numbers the records of the batch")
        else:
            self.counts.update(dict.fromkeys(node.outputs, origin))

    def _terms(self, node: ir.Node, rule: Rule) -> State | None:
        """How the outputs lie where terms pass through a node."""
        operands = {k: value for k, value in enumerate(node.inputs) if value is not None}
        terms = [k for k, value in operands.items() if self.state(value) in (SUM, MEAN)]
        for group in rule.partial_inputs if terms else ():
            group = tuple(k for k in group if k in operands)
            others = [value for k, value in operands.items() if k not in group]
            if not {*terms} & {*group} or any(isinstance(self.state(operands[k]), Rows) for k in group):
                continue
            if any(isinstance(self.state(value), Rows) for value in others):
                continue
            for value in others:
                self._settle(value, node)
            for k in group:
                if self.state(operands[k]) is OWN:
                    self._settle(operands[k], node)
            states = [self.state(operands[k]) for k in group]
            if SUM not in states:
                return MEAN if MEAN in states else None
            for k, state in zip(group, states, strict=True):
                if state is not SUM:
                    self.shares[node, k] = None
            return SUM
        return None

    def _settle(self, value: ir.Value, node: ir.Node) -> None:
        """Settles an operand that must be the whole batch's: it is computed before the parts if it can be, else it is the part's own."""
        state = self.state(value)
        if isinstance(state, Rows) or state is EVERY or value.dtype is None:
            return
        if not value.dtype.is_floating_point() and state is OWN:
            return
        if value in self.light and not self._has_batch(value) and (self.batch or state is not OWN):
            self.totals[value] = None
            return
        producer = value.producer()
        self.mixing.setdefault(node if producer is None else producer, "reduces over the records of a batch")
        self.states[value] = EVERY

    def _rows(self, node: ir.Node, rule: Rule) -> None:
        """How the outputs lie where records enter a node."""
        places = [(k, self.state(value)) for k, value in enumerate(node.inputs) if value is not None]
        at = {k: state for k, state in places if isinstance(state, Rows)}
        around = any(isinstance(self.state(value), Rows) for value in self.program.around[node])
        if not at and not around:
            own = any(self.state(value) is OWN for value in self.program.reads[node])
            self._guess(node, OWN if own else EVERY)
            return
        if node.meta.get(OF_PIECES):
            self.states[node.outputs[0]] = Rows(1)
            return
        if node.op_type in KEEPS_ORDER and 0 in at:
            grouped = reshaped(at[0], node.inputs[0], node.outputs[0], self.known)
            if grouped is not None:
                self.states[node.outputs[0]] = grouped
                return
        letters = {_letter(rule.inputs[k], rows.dim) for k, rows in at.items()}
        letter = letters.pop() if len(letters) == 1 and not around else WHOLE
        rows = together(at.values())
        if letter == WHOLE or letter in rule.replicated or rows is None or not passes(node, rule, letter, rows):
            if not all(_is_integer(out) for out in node.outputs):
                self.mixing.setdefault(node, "may bring records of a batch together")
            self._guess(node, EVERY if at else OWN)
            return
        for out, made in zip(node.outputs, rule.outputs, strict=False):
            if made is not None and letter in made:
                self.states[out] = replace(rows, dim=made.index(letter))
                continue
            reduce = rule.reduce.get(letter, "")
            self.states[out] = (MEAN if rule.local in (scaled, local_mean) else SUM) if reduce == "sum" else OWN

    def _guess(self, node: ir.Node, otherwise: State) -> None:
        """Without a rule: a dim whose size contains the batch symbol holds records."""
        for out in node.outputs:
            dims = [dim for dim, _ in enumerate(out.shape or ()) if self._speaks(out, dim)]
            self.states[out] = Rows(dims[0]) if dims else otherwise

    def _has_batch(self, value: ir.Value) -> bool:
        return value.shape is None or any(self._speaks(value, dim) for dim in range(len(value.shape)))

    def _holds_no_batch(self, value: ir.Value) -> bool:
        """Whether what a value of shape arithmetic holds is known, and says nothing of the batch: `Shape(x)[1]` is `seq`."""
        held = value.metadata_props.get(SYM_DATA_KEY)
        entries = [read(str(one)) for one in json.loads(held)] if held is not None else [None]
        return all(one is not None and self.batch.isdisjoint(map(str, one.free_symbols)) for one in entries)

    def _speaks(self, value: ir.Value, dim: int) -> bool:
        assert value.shape is not None
        size = value.shape[dim]
        return isinstance(size, ir.SymbolicDim) and (
            size.value is None or not self.batch.isdisjoint(size.free_symbols())
        )


def needed_for(values: Sequence[ir.Value], program: Program) -> Iterator[ir.Node]:
    """The nodes that some values depend on, from the last to the first."""
    wanted = {*values}
    for node in reversed(list(program.model.graph)):
        if not wanted.isdisjoint(node.outputs):
            wanted.update(program.reads[node])
            yield node


def _letter(letters: str | None, dim: int) -> str:
    return WHOLE if letters is None or dim >= len(letters) else letters[dim]


def _is_integer(value: ir.Value) -> bool:
    return value.dtype is not None and not value.dtype.is_floating_point()


def _elements(value: ir.Value) -> int:
    return 0 if value.const_value is None else value.const_value.size
