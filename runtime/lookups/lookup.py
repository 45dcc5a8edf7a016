"""A Pull or a Push of one step: ids and rows as messages between those who ask and the owners of rows.

    all to all     how many ids each rank has for each other, or which id is no row of the table, so that all refuse it alike
    to owners      ids, each once, that count from the owner's first row; of a Push the rows beside them
    to askers      of a Pull the rows, in the order of the ids

It begins and ends at its place in the file, as a collective on values of unknown shape does: an owner answers there. What a rank has for
itself is copied. Memory grows to what a step needed most, and is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from ..artifact.comm_node import Call
from ..artifact.dtypes import BY_NAME, Array, Bytes, Dtype
from ..artifact.format import ALL_TO_ALL, PULL
from ..artifact.tensor import Tensor, aligned
from ..communication.transport import CollectiveArgs, Request, Transport
from ..errors import StepError, no_such_row
from .distinct import Distinct, Ids, RowSums, counted_from_front, distinct

_COUNT, _STATE, _ID, _RECORD = range(4)
_FINE, _NO_ROW, _NOTHING = range(3)
_ITEM = 8


@dataclass
class Memory:
    """Memory by name, which grows; one lookup at a time uses it."""

    blocks: dict[str, Bytes] = field(default_factory=dict)

    def of(self, name: str, size: int) -> Bytes:
        """So many bytes, not cleared."""
        block = self.blocks.get(name)
        if block is None or block.size < size:
            block = self.blocks[name] = aligned(size + size // 4)
        return block[:size]


@dataclass
class Moved:
    """What a rank has looked up so far: steps, ids, distinct ids, and the bytes of ids and rows that came from other ranks."""

    steps: int = 0
    ids: int = 0
    distinct: int = 0
    received: int = 0


class Lookup:
    """A Pull or a Push among `ranks` for rows of `dtype`; `tag` is the transport's, and `what` names it in reports."""

    def __init__(
        self,
        call: Call,
        ranks: tuple[int, ...],
        dtype: Dtype,
        transport: Transport,
        tag: int,
        memory: Memory,
        what: Callable[[], str],
    ) -> None:
        self.call, self.ranks, self.dtype, self.transport, self.tag = call, ranks, dtype, transport, tag
        self.memory, self.what = memory, what
        self.owners = [ranks[place] for place in call.owners]
        self.row_bytes = dtype.bytes_of(call.row)
        self.moved = Moved()
        self._sums = RowSums(dtype.code)
        place = ranks.index(transport.rank)
        self._turn = [*ranks[place + 1 :], *ranks[:place]]
        """The other ranks, the next one first, so that not all begin with the same."""

    def pull(self, table: Tensor | None, ids: Tensor | None, result: Tensor | None) -> Tensor | None:
        """The rows for the ids, in `result` where there is one; StepError on all ranks where an id is no row."""
        asked, given, counts = self._ask(ids)
        mine = self.transport.rank
        came = {rank: self.memory.of(f"ids {rank}", _ITEM * counts[rank]) for rank in self._turn if counts[rank]}
        answers = self._rows("answers", asked.ids.size)
        bounds = self._bounds(asked)
        coming = {rank: self._receive(data, rank) for rank, data in came.items()}
        rows = {owner: answers[at] for owner, at in bounds.items() if owner != mine and at.start < at.stop}
        later = [self._receive(one.reshape(-1), owner) for owner, one in rows.items()]
        leaving = [self._send(given[owner].view(np.uint8), owner) for owner in rows]
        if table is not None:
            held = table.data.reshape(self.call.rows_of_owner, self.row_bytes)
            if mine in bounds:
                np.take(held, given[mine], axis=0, out=answers[bounds[mine]], mode="clip")
            for rank, request in coming.items():
                self._wait(request)
                leaving.append(self._send(self._answer(held, came[rank].view(np.int64), rank), rank))
        for request in later:
            self._wait(request)
        found = None
        if ids is not None:
            shape = (*ids.shape, *self.call.row)
            found = result if result is not None else Tensor.empty(self.dtype, shape)
            if found.data.size:
                np.take(answers, asked.inverse, axis=0, out=found.data.reshape(-1, self.row_bytes), mode="clip")
        for request in leaving:
            self._wait(request)
        self._count(asked, sum(one.size for one in (*came.values(), *rows.values())))
        return found

    def push(self, ids: Tensor | None, rows: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """At an owner the ids and sums that all ranks give it, in the order of ranks."""
        asked, given, counts = self._ask(ids)
        mine, bounds = self.transport.rank, self._bounds(asked)
        summed = np.empty((0, self.row_bytes), np.uint8)
        if rows is not None and ids is not None:
            width = prod(self.call.row)
            elements = rows.array().reshape(asked.inverse.size, width)
            total = self._sums(elements, asked.inverse, asked.ids.size)
            summed = np.ascontiguousarray(total).view(np.uint8).reshape(asked.ids.size, self.row_bytes)
        made = None
        coming: list[Request] = []
        received = 0
        if mine in self.owners:
            count = sum(counts.values())
            numbers = Tensor.empty(BY_NAME["int64"], (count,))
            made = numbers, Tensor.empty(self.dtype, (count, *self.call.row))
            places, values = numbers.data.view(np.int64), made[1].data.reshape(count, self.row_bytes)
            begin = 0
            for rank in self.ranks:
                at = slice(begin, begin + counts[rank])
                begin = at.stop
                if rank == mine:
                    places[at], values[at] = given[mine], summed[bounds[mine]]
                elif counts[rank]:
                    for part in (places[at].view(np.uint8), values[at].reshape(-1)):
                        coming.append(self._receive(part, rank))
                        received += part.size
        leaving = []
        for owner in self._turn:
            if owner in bounds and bounds[owner].start < bounds[owner].stop:
                for part in (given[owner].view(np.uint8), summed[bounds[owner]].reshape(-1)):
                    leaving.append(self._send(part, owner))
        for request in (*coming, *leaving):
            self._wait(request)
        self._count(asked, received)
        return made

    def give_up(self) -> None:
        """Takes part with nothing to give: it ends for all other ranks by a StepError."""
        header = np.zeros((len(self.ranks), 4), np.int64)
        header[:, _STATE] = _NOTHING
        self._told(header)

    def _ask(self, ids: Tensor | None) -> tuple[Distinct, dict[int, Ids], dict[int, int]]:
        """The rank's ids, each once; by owner what it is asked for; by rank how many ids come from there."""
        header = np.zeros((len(self.ranks), 4), np.int64)
        flat, wrong = np.empty(0, np.int64), -1
        if ids is not None:
            flat, wrong = counted_from_front(ids.array(), self.call.rows)
        if wrong >= 0 and ids is not None:
            record = wrong // max(prod(ids.shape[1:]), 1)
            header[:, 1:] = _NO_ROW, flat[wrong], record
            flat = flat[:0]
        asked = distinct(flat)
        given = {}
        for owner, at in self._bounds(asked).items():
            each = self.call.rows_of_owner
            given[owner] = asked.ids[at] - self.owners.index(owner) * each
            header[self.ranks.index(owner), _COUNT] = at.stop - at.start
        rows = self._meet(header)
        return asked, given, {rank: int(row[_COUNT]) for rank, row in zip(self.ranks, rows, strict=True)}

    def _meet(self, header: Array) -> list[list[int]]:
        """By place in the list what each rank says to this one; StepError on all where one refuses."""
        rows = self._told(header)
        lookup = f"{'Gather' if self.call.op == PULL else 'the gradient of Gather'} '{self.call.path}'"
        for rank, row in zip(self.ranks, rows, strict=True):
            if row[_STATE] == _NO_ROW:
                raise StepError(no_such_row(lookup, row[_RECORD], row[_ID], self.call.rows, rank))
        for rank, row in zip(self.ranks, rows, strict=True):
            if row[_STATE] == _NOTHING:
                raise StepError(f"rank {self.transport.rank} failed in {self.what()}: rank {rank} has nothing to give")
        return rows

    def _told(self, header: Array) -> list[list[int]]:
        """By place in the list what each rank says to this one."""
        came = np.empty_like(header)
        if len(self.ranks) == 1:
            came[:] = header
        else:
            source, target = header.reshape(-1).view(np.uint8), came.reshape(-1).view(np.uint8)
            args = CollectiveArgs(ALL_TO_ALL, self.ranks, self.call.tag, source, target, BY_NAME["int64"])
            self._wait(self.transport.prepare(args)())
        rows: list[list[int]] = came.tolist()
        return rows

    def _bounds(self, asked: Distinct) -> dict[int, slice]:
        """By owner where its ids lie among those of this rank."""
        each = self.call.rows_of_owner
        ends = np.searchsorted(asked.ids, np.arange(len(self.owners) + 1) * each).tolist()
        return {owner: slice(*ends[at : at + 2]) for at, owner in enumerate(self.owners)}

    def _answer(self, held: Array, ids: Ids, rank: int) -> Bytes:
        rows = self._rows(f"rows {rank}", ids.size)
        np.take(held, ids, axis=0, out=rows, mode="clip")
        return rows.reshape(-1)

    def _rows(self, name: str, count: int) -> Bytes:
        return self.memory.of(name, count * self.row_bytes).reshape(count, self.row_bytes)

    def _receive(self, data: Bytes, rank: int) -> Request:
        return self.transport.irecv(data, rank, self.tag)

    def _send(self, data: Bytes, rank: int) -> Request:
        return self.transport.isend(data, rank, self.tag)

    def _wait(self, request: Request) -> None:
        self.transport.wait(request, self.what)

    def _count(self, asked: Distinct, received: int) -> None:
        moved = self.moved
        moved.steps += 1
        moved.ids += asked.inverse.size
        moved.distinct += asked.ids.size
        moved.received += received


def look_up(lookup: Lookup, values: Sequence[Tensor | None], result: Tensor | None) -> tuple[Tensor | None, ...]:
    """What a rank gets of its ids and its other operand, in the order of the outputs."""
    ids, other = values
    if lookup.call.op == PULL:
        return (lookup.pull(other, ids, result),)
    return lookup.push(ids, other) or (None, None)
