"""A copy of a value made from another one: the moves of `layout/reshard.py` as messages, collectives and local nodes in ranks' programs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from partc.compiler.emit.transfer_bytes import whole_bytes
from partc.compiler.ir.program import CommOp, ComputeOp, Constant, Event, Group, Program, RankOp, Shape, ShardedValue
from partc.compiler.layout import moves as mv
from partc.compiler.layout.exchange import ExchangeBox, Routes, Span, span_of, within
from partc.compiler.layout.layout import Layout, Mesh
from partc.compiler.layout.reshard import lower, lower_unknown
from partc.compiler.lower.builders import ProgramBuilders
from partc.compiler.lower.local_moves import keep, pad, slice_out
from partc.compiler.lower.rooted import broadcast, has_size, reduce_to, share_of_shard
from partc.compiler.lower.versions import proven_divisors
from partc.compiler.tasks.localize import local_shape, local_value
from partc.runtime.artifact import format as fmt

Sent: TypeAlias = "tuple[int, Span]"
"""The rank at the other end, and the box in the own shard."""


_NAMED = 8
"""So many ranks of a group are named one by one."""


@dataclass
class CommLowering:
    """Writes copies into drafts; `events` and `groups` list what was written, `names` are the copies' names."""

    program: Program
    drafts: ProgramBuilders
    names: dict[ShardedValue, str]
    events: list[Event] = field(default_factory=list)
    groups: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    _known: dict[tuple[Mesh, tuple[int, ...], Group], tuple[tuple[Group, ...], str]] = field(default_factory=dict)
    _copies: dict[ir.Value, list[ShardedValue]] = field(default_factory=dict)
    kept: dict[tuple[ShardedValue, ShardedValue], str] = field(default_factory=dict)
    """What is called that one rank of each set keeps of a copy, by that and its layout as terms (`kept.py`)."""
    derived: bool = False

    def make(self, source: ShardedValue, target: ShardedValue, cause: str, derived: bool = False) -> None:
        """Turns one copy into the other, on all ranks that take part."""
        self.derived = derived
        if self.program.values[source.value].shape is None:
            steps = lower_unknown(source.layout, target.layout, source.group, target.group)
        else:
            steps = lower(
                source.layout, target.layout, source.group, target.group, proven_divisors(self.program, source.value)
            )
        name, final = self.names[source], self.names[target]
        if not steps:
            self.names[target] = name
            return
        at = source
        for k, move in enumerate(steps):
            last = k == len(steps) - 1 and move.group == target.group
            after = target if last else ShardedValue(source.value, move.group, move.after)
            ranks = tuple(dict.fromkeys((*source.group, *move.group)))
            out = final if last else self.drafts.free(ranks, f"{final}.{type(move).__name__.lower()}")
            self._write(move, at, after, name, out, cause)
            name, at = out, after
        if name != final:  # more ranks have it than the target's
            self._rename(target, name, final)

    def alike(self, there: ShardedValue, wanted: ShardedValue) -> None:
        """Gives what ranks hold already, as part of a larger copy, its own name."""
        name, out = self.names[there], self.names[wanted]
        if name != out:
            self._rename(wanted, name, out)

    def _rename(self, copy: ShardedValue, name: str, out: str) -> None:
        """Gives a copy that its ranks have as `name` the name `out`."""
        self.identity_on(copy.group, name, out)
        self.type_of(copy, out)

    def type_of(self, copy: ShardedValue, name: str) -> None:
        """Lists what a copy's ranks have under a name."""
        typed = local_value(self.program, copy), local_shape(self.program, copy)
        for draft in self.drafts.of(copy.group):
            draft.types[name] = typed

    def _write(self, move: mv.Move, before: ShardedValue, after: ShardedValue, name: str, out: str, cause: str) -> None:
        match move:
            case mv.Slice(dim=dim, axes=axes):
                slice_out(self, move, before, after, name, out, dim, axes)
            case mv.Exchange() | mv.Transfer():
                self._exchange(move, before, after, name, out, cause)
            case mv.Reduce():
                reduce_to(self, move, before, after, name, out, cause)
            case mv.ZeroPad(dim=dim, axes=axes):
                pad(self, move, before, name, out, dim, axes)
            case mv.MaskReplicas(axes=axes):
                keep(self, move, name, out, axes)
            case _:
                self._collective(move, before, after, name, out, cause)
        self.type_of(after, out)

    def _collective(
        self, move: mv.Move, before: ShardedValue, after: ShardedValue, name: str, out: str, cause: str
    ) -> None:
        attributes: dict[str, int | str | tuple[int, ...]]
        match move:
            case mv.AllReduce(reduce=reduce, axes=axes):
                op_type, attributes = fmt.ALL_REDUCE, {fmt.REDUCE: reduce}
            case mv.AllGather(dim=dim, axes=axes):
                op_type, attributes = fmt.ALL_GATHER, {fmt.AXIS: dim}
            case mv.ReduceScatter(dim=dim, axes=axes, reduce=reduce):
                op_type, attributes = fmt.REDUCE_SCATTER, {fmt.AXIS: dim, fmt.REDUCE: reduce}
            case mv.AllToAll(split_dim=split, concat_dim=concat, axes=axes):
                op_type, attributes = fmt.ALL_TO_ALL, {fmt.SPLIT_AXIS: split, fmt.CONCAT_AXIS: concat}
            case _:
                raise AssertionError(move)
        sets, group = self.circles(move.after.mesh, axes, move.group)
        amount = self.amount(after.value, mv.received(move)[0])
        shape = local_shape(self.program, before)
        way = (before.group, before.layout), (after.group, after.layout)
        event = Event(len(self.events), op_type, after.value, out, sets, group, shape, amount, cause, self.derived, way)
        self.events.append(event)
        step = CommOp(op_type, (name,), (out,), {fmt.GROUP: group, **attributes}, event.tag, after.value, cause, amount)
        self.append(move.group, step)

    def together(
        self,
        move: mv.AllReduce | mv.ReduceScatter | mv.AllGather,
        values: Sequence[ir.Value],
        terms: Sequence[str],
        made: Sequence[str],
        elements: int,
        cause: str,
    ) -> None:
        """One collective of several values of one type, as one message; `made` are the names of what comes of them.

        A rank gives `elements` in all. What is scattered or gathered is cut along axis 0.
        """
        sets, group = self.circles(move.after.mesh, move.axes, move.group)
        ranks = len(sets[0])
        item = self.program.values[values[0]].item_bytes or 1
        attributes: dict[str, int | str | tuple[int, ...]] = {fmt.GROUP: group}
        match move:
            case mv.AllReduce(reduce=reduce):
                op_type, share = fmt.ALL_REDUCE, Fraction(2 * (ranks - 1), ranks)
                attributes[fmt.REDUCE] = reduce
            case mv.ReduceScatter(reduce=reduce):
                op_type, share = fmt.REDUCE_SCATTER, Fraction(ranks - 1, ranks)
                attributes |= {fmt.AXIS: 0, fmt.REDUCE: reduce}
            case _:
                op_type, share = fmt.ALL_GATHER, Fraction(ranks - 1)
                attributes[fmt.AXIS] = 0
        amount = str(math.ceil(share * elements * item))
        shape: Shape | None = (elements,)
        if len(terms) == 1:
            shape = self.drafts.of(move.group)[0].types[terms[0]][1]
        way = (move.group, _before(move)), (move.group, move.after)
        event = Event(len(self.events), op_type, values[0], made[0], sets, group, shape, amount, cause, way=way)
        self.events.append(event)
        step = CommOp(op_type, tuple(terms), tuple(made), attributes, event.tag, values[0], cause, amount)
        self.append(move.group, step)

    def append(self, ranks: Group, step: RankOp) -> None:
        for draft in self.drafts.of(ranks):
            draft.steps.append(step)

    def circles(self, mesh: Mesh, axes: tuple[int, ...], ranks: Group) -> tuple[tuple[Group, ...], str]:
        """The sets of ranks that differ along some axes only, and their name."""
        key = mesh, axes, ranks
        if key not in self._known:
            sets = tuple(tuple(ranks[index] for index in one) for one in Layout(mesh, ()).groups(axes))
            self._known[key] = sets, self.group(sets)
        return self._known[key]

    def group(self, sets: tuple[tuple[int, ...], ...]) -> str:
        """The name of disjoint sets of ranks, made from their members: `0-1-2-3`, `0-4+3` for four sets like the first.

        Of more than eight members it is a row: `0..28:4+3`.
        """
        first = sets[0]
        name = fmt.order_text(first).replace("-", "..") if len(first) > _NAMED else "-".join(map(str, first))
        name += f"+{len(sets) - 1}" if len(sets) > 1 else ""
        while self.groups.get(name, sets) != sets:
            name += "'"
        self.groups[name] = sets
        return name

    def amount(self, value: ir.Value, share: Fraction) -> str:
        whole = whole_bytes(self.program.values[value])
        if whole is None:
            return "unknown"
        found = mv.share_of(share, whole)
        return str(found) if isinstance(found, int) else str(found.value)

    def _exchange(
        self,
        move: mv.Exchange | mv.Transfer,
        before: ShardedValue,
        after: ShardedValue,
        name: str,
        out: str,
        cause: str,
    ) -> None:
        """Messages where all that is moved are shards as ranks have them, else one Exchange."""
        parts = move.routes.parts()
        given, got = _boxes(move.routes, len(before.layout.cuts))
        full = tuple((Fraction(0), Fraction(1)) for _ in before.layout.cuts)
        if isinstance(move, mv.Transfer) and all(box == full for box in (*given, *got)):
            self._messages(parts, before, after, name, out, cause)
            return
        ranks = tuple(sorted({p.source for p in parts} | {p.target for p in parts}))
        group = self.group((ranks,))
        amount = self.amount(after.value, max(mv.received(move), default=Fraction(0)))
        shape = local_shape(self.program, before)
        way = (before.group, before.layout), (after.group, after.layout)
        sets = (ranks,)
        event = Event(
            len(self.events), fmt.EXCHANGE, after.value, out, sets, group, shape, amount, cause, self.derived, way
        )
        self.events.append(event)
        leaving = _grouped((p.source, (p.target, box)) for p, box in zip(parts, given, strict=True))
        coming = _grouped((p.target, (p.source, box)) for p, box in zip(parts, got, strict=True))
        for rank in ranks:
            sends, receives = leaving.get(rank, []), coming.get(rank, [])
            attributes: dict[str, int | str | tuple[int, ...]] = {
                fmt.GROUP: group,
                fmt.SEND_PEERS: tuple(peer for peer, _ in sends),
                fmt.SEND_BOXES: _numbers([box for _, box in sends]),
                fmt.RECV_PEERS: tuple(peer for peer, _ in receives),
                fmt.RECV_BOXES: _numbers([box for _, box in receives]),
                fmt.RANK: len(full),
            }
            inputs, outputs = ((name,) if sends else ()), ((out,) if receives else ())
            self.append(
                (rank,), CommOp(fmt.EXCHANGE, inputs, outputs, attributes, event.tag, after.value, cause, amount)
            )

    def _messages(
        self, parts: Sequence[ExchangeBox], before: ShardedValue, after: ShardedValue, name: str, out: str, cause: str
    ) -> None:
        """A rank's shard to others as it is: a Broadcast of one rank to several, else messages."""
        apart = [part for part in parts if part.source != part.target]
        if len(apart) > 1 and len({part.source for part in apart}) == 1 and has_size(self.program, after.value):
            self.identity_on(tuple(part.source for part in parts if part.source == part.target), name, out)
            broadcast(self, (apart[0].source, *(part.target for part in apart)), before, after, name, out, cause)
            return
        for part in parts:
            if part.source == part.target:
                self._identity(part.source, name, out)
            else:
                self._message(part.source, part.target, before, after, name, out, cause)

    def _message(
        self, source: int, target: int, before: ShardedValue, after: ShardedValue, name: str, out: str, cause: str
    ) -> None:
        """One message; both ends name the value alike, so where they cannot, it gets its last name behind the receive."""
        shape = local_shape(self.program, after)
        amount = self.amount(after.value, share_of_shard(after.layout))
        way = name
        if name != out and (name in self._types(target) or self._will_have(target, name, after)):
            way = self.drafts.free((source, target), f"{name}.to.{target}")
            self._identity(source, name, way)
            self._types(source)[way] = (before.value, shape)
        if way != out:
            self._types(target)[way] = (after.value, shape)
        event = Event(
            len(self.events), fmt.SEND, after.value, way, ((source,), (target,)), "", shape, amount, cause, self.derived
        )
        self.events.append(event)
        sent = {fmt.PEER: target}
        self.append((source,), CommOp(fmt.SEND, (way,), (), sent, event.tag, after.value, cause, amount))
        received = {fmt.PEER: source}
        self.append((target,), CommOp(fmt.RECV, (), (way,), received, event.tag, after.value, cause, amount))
        self._identity(target, way, out)

    def _will_have(self, rank: int, name: str, copy: ShardedValue) -> bool:
        """Whether another copy of the value has a name on a rank."""
        if not self._copies:
            for one in self.names:
                self._copies.setdefault(one.value, []).append(one)
        return any(
            self.names.get(one) == name and rank in one.group for one in self._copies.get(copy.value, ()) if one != copy
        )

    def _types(self, rank: int) -> dict[str, tuple[ir.Value, Shape | None]]:
        (draft,) = self.drafts.of((rank,))
        return draft.types

    def _identity(self, rank: int, name: str, out: str) -> None:
        if name != out:
            self.emit((rank,), "Identity", [name], out, None)

    def identity_on(self, ranks: Group, name: str, out: str) -> None:
        for rank in ranks if name != out else ():
            self._identity(rank, name, out)

    def constant(self, ranks: Group, out: str, word: str, numbers: list[int] | Constant) -> str:
        name = self.drafts.free(ranks, f"{out}.{word}")
        for draft in self.drafts.of(ranks):
            draft.constants[name] = np.array(numbers, np.int64) if isinstance(numbers, list) else numbers
        return name

    def beside(self, ranks: Group, op_type: str, inputs: Sequence[str], wanted: str, **attributes: int) -> str:
        """A node that makes what is no copy of a value, under a name that is free."""
        return self.emit(ranks, op_type, inputs, self.drafts.free(ranks, wanted), None, **attributes)

    def emit(
        self, ranks: Group, op_type: str, inputs: Sequence[str], out: str, source: ir.Node | None, **attributes: Any
    ) -> str:
        node = ir.Node(
            "",
            op_type,
            inputs=[ir.Value(name=name) if name else None for name in inputs],
            attributes=ir.convenience.convert_attributes(attributes),
            outputs=[ir.Value(name=out)],
            name=f"{out}.{op_type.lower()}",  # a value's last copy has the name of the node that makes the first
        )
        self.append(ranks, ComputeOp(node, source or node))
        return out


def _before(move: mv.AllReduce | mv.ReduceScatter | mv.AllGather) -> Layout:
    """The layout that a collective of several values begins with."""
    mesh, cuts, partial = move.after.mesh, list(move.after.cuts), dict(move.after.partial)
    match move:
        case mv.AllGather(dim=dim, axes=axes):
            cuts[dim] = (*cuts[dim], *axes)
        case mv.ReduceScatter(dim=dim, axes=axes, reduce=reduce):
            cuts[dim] = cuts[dim][: len(cuts[dim]) - len(axes)]
            partial |= dict.fromkeys(axes, reduce)
        case mv.AllReduce(axes=axes, reduce=reduce):
            partial |= dict.fromkeys(axes, reduce)
    return Layout(mesh, tuple(cuts), tuple(sorted(partial.items())))


def _boxes(routes: Routes, dims: int) -> tuple[list[Span], list[Span]]:
    """Of each part that is moved its box in the shard of the rank that gives it, and in that of the rank that takes it."""
    source_span = {rank: span_of(routes.before, k) for k, rank in enumerate(routes.source_group)}
    target_span = {rank: span_of(routes.after, k) for k, rank in enumerate(routes.target_group)}
    parts = routes.parts()
    given = [within(part.span[:dims], source_span[part.source]) for part in parts]
    return given, [within(part.span[:dims], target_span[part.target]) for part in parts]


def _grouped(pairs: Iterable[tuple[int, Sent]]) -> dict[int, list[Sent]]:
    found: dict[int, list[Sent]] = {}
    for rank, sent in pairs:
        found.setdefault(rank, []).append(sent)
    return found


def _numbers(boxes: Sequence[Span]) -> tuple[int, ...]:
    """Boxes as integers: per dim begin numerator, end numerator, denominator."""
    found: list[int] = []
    for box in boxes:
        for begin, end in box:
            bottom = math.lcm(begin.denominator, end.denominator)
            found += [int(begin * bottom), int(end * bottom), bottom]
    return tuple(found)
