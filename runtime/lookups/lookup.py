"""A lookup of one step: ids and rows as messages between the ranks that ask and the owners of rows.

    Pull   all to all     the number of ids that each rank has for each other, or an id that is not a row, so that all refuse it
           to owners      ids, each once, counted from the owner's first row
           to askers      the rows, in the order of the ids
    Push   to owners      the rows, each id's sum, in the order in which the Pull asked for them

A Pull stores its requests as values of the step, so that its Push sends only rows: both ends know their number.

    Route  all to all     the number of rows that each rank has for each expert of each other, or an id that names none
           to owners      the rows, by owner and expert, those of one expert in their order
    Return to senders     a row for each received one; each is put at the place of the sent one

A Route stores the places of its rows and the counts, by which Returns, and the Routes of cotangents, send only rows.

Each begins and ends at its place in the file, like a collective on values of unknown shape: an owner answers there. Rows that a rank has
for itself are copied. Memory grows to the largest need of a step, and is reused.

The module also finds the distinct ids of a lookup, and sums rows by id. A batch names popular rows many times: of 16,384 ids with skewed
counts a fifth are distinct. Ids are sorted with their places as the low bits of one 64-bit number, which is faster than sorting ids and
asking for the order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper
from partc.runtime.artifact.comm.lookup_node import LookupCall
from partc.runtime.artifact.tensors.dtypes import BY_CODE, BY_NAME, Array, Bytes, Dtype
from partc.runtime.artifact.tensors.tensor import Tensor, aligned

from ..artifact.format import ALL_TO_ALL, ROUTE
from ..communication.transport import CollectiveArgs, Request, Transport
from ..devices.devices import HOST
from ..errors import StepError, no_such_row
from ..program.ort import Session, new_session

Ids: TypeAlias = npt.NDArray[np.int64]
_BITS = 31
_SUMMED = ("float", "double", "int32", "int64")
"""Element types that onnxruntime can add."""


@dataclass(frozen=True)
class Distinct:
    """Distinct ids, ascending; `inverse` has the place in `ids` of each original id."""

    ids: Ids
    inverse: npt.NDArray[np.integer]


def distinct(requested: Ids) -> Distinct:
    """Returns the distinct ids; all must be 0 or above."""
    count = requested.size
    if count == 0:
        return Distinct(requested, requested)
    if count >> _BITS or int(requested.max()) >> _BITS:
        ids, inverse = np.unique(requested, return_inverse=True)
        return Distinct(ids, inverse)
    keys = (requested << _BITS) | np.arange(count)
    keys.sort()
    ordered = keys >> _BITS
    first = np.empty(count, np.bool_)
    first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    inverse = np.empty(count, np.int64)
    inverse[keys & ((1 << _BITS) - 1)] = np.cumsum(first) - 1
    return Distinct(ordered[first], inverse)


def counted_from_front(ids: Array, rows: int) -> tuple[Ids, int]:
    """Returns flat ids, with those below 0 counted from the end of a table of `rows` rows; and the index of the first wrong id, or -1."""
    flat: Ids = ids.reshape(-1).astype(np.int64)
    if not flat.size:
        return flat, -1
    lowest, highest = int(flat.min()), int(flat.max())
    if lowest < -rows or highest >= rows:
        return flat, int(np.flatnonzero((flat < -rows) | (flat >= rows))[0])
    if lowest < 0:
        flat[flat < 0] += rows
    return flat, -1


class RowSums:
    """Sums rows of one element type in their order: each id's sum is independent of the other rows."""

    def __init__(self, code: int) -> None:
        self.dtype = BY_CODE[code]
        self._session: Session | None = None

    @np.errstate(over="ignore", invalid="ignore")
    def __call__(self, rows: Array, inverse: npt.NDArray[np.integer], count: int) -> Array:
        """Returns `count` sums: the k-th is that of the rows at which `inverse` is k."""
        total = np.zeros((count, rows.shape[1]), rows.dtype)
        if count == inverse.size:
            total[inverse] = rows
        elif self.dtype.name in _SUMMED:
            self._session = self._session or _session(self.dtype.code)
            places = inverse.astype(np.int64).reshape(-1, 1)
            total = self._session.run(["y"], {"zeros": total, "places": places, "rows": rows})[0]
        else:
            wide = total.astype(np.float32) if rows.dtype.itemsize < 4 and rows.dtype.kind not in "iub" else total
            np.add.at(wide, inverse, rows.astype(wide.dtype))
            total = wide.astype(rows.dtype)
        return total


def _session(code: int) -> Session:
    node = helper.make_node("ScatterND", ["zeros", "places", "rows"], ["y"], reduction="add")
    zeros, rows, total = (
        helper.make_tensor_value_info(name, code, shape)
        for name, shape in (("zeros", ["u", "d"]), ("rows", ["n", "d"]), ("y", ["u", "d"]))
    )
    places = helper.make_tensor_value_info("places", TensorProto.INT64, ["n", 1])
    graph = helper.make_graph([node], "sums", [zeros, places, rows], [total])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    # One thread: rows are then added in their order.
    return new_session(model.SerializeToString(), 1, HOST, {})


_COUNT, _STATE, _ID, _RECORD, _EXPERTS = range(5)
_FINE, _NO_ROW, _NOTHING = range(3)
_ITEM = 8


@dataclass
class Memory:
    """Memory blocks by name, which grow; one lookup at a time uses them."""

    blocks: dict[str, Bytes] = field(default_factory=dict)

    def of(self, name: str, size: int) -> Bytes:
        """Returns `size` bytes, not cleared."""
        block = self.blocks.get(name)
        if block is None or block.size < size:
            block = self.blocks[name] = aligned(size + size // 4)
        return block[:size]


@dataclass
class Moved:
    """The lookups of a rank so far: steps, ids, distinct ids, and the bytes of ids and rows received from other ranks."""

    steps: int = 0
    ids: int = 0
    distinct: int = 0
    received: int = 0


@dataclass(frozen=True)
class Pulled:
    """The requests of a Pull, which its Push reads: the ids of givers on an owner, the counts of both, and each id's place on a giver."""

    ids: Tensor | None = None
    counts: Tensor | None = None
    places: Tensor | None = None


@dataclass(frozen=True)
class Routed:
    """The data of a Route, which Returns read: the place of each row among the sent ones, and the counts of rows to and from each rank."""

    places: Tensor
    counts: Tensor


class Lookup:
    """A lookup among `ranks` for rows of `dtype`; `tag` is the transport's, and `what` names it in reports."""

    def __init__(
        self,
        call: LookupCall,
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
        self.givers = [ranks[place] for place in call.givers]
        self.row_bytes = dtype.bytes_of(call.row)
        self.moved = Moved()
        self._sums = RowSums(dtype.code)
        place = ranks.index(transport.rank)
        self._turn = [*ranks[place + 1 :], *ranks[:place]]
        """The other ranks, the next one first, so that not all ranks begin with the same one."""

    def pull(self, table: Tensor | None, ids: Tensor | None, result: Tensor | None) -> tuple[Tensor | None, Pulled]:
        """Returns the rows for the ids, in `result` if given, and the requests; raises StepError on all ranks if an id is not a row."""
        once, requests, counts = self._ask(ids)
        mine = self.transport.rank
        asked = self._asked(once, requests, counts, ids)
        came = self._landing(asked, requests, counts)
        answers = self._rows("answers", once.ids.size)
        bounds = self._bounds(once)
        coming = {rank: self._receive(data.view(np.uint8), rank) for rank, data in came.items()}
        rows = {owner: answers[at] for owner, at in bounds.items() if owner != mine and at.start < at.stop}
        later = [self._receive(one.reshape(-1), owner) for owner, one in rows.items()]
        leaving = [self._send(requests[owner].view(np.uint8), owner) for owner in rows]
        if table is not None:
            held = table.data.reshape(self.call.rows_of_owner, self.row_bytes)
            if mine in bounds:
                np.take(held, requests[mine], axis=0, out=answers[bounds[mine]], mode="clip")
            for rank, request in coming.items():
                self._wait(request)
                rows_of_rank = self._rows(f"rows {rank}", came[rank].size)
                np.take(held, came[rank], axis=0, out=rows_of_rank, mode="clip")
                leaving.append(self._send(rows_of_rank.reshape(-1), rank))
        for request in later:
            self._wait(request)
        rows_found = None
        if ids is not None:
            shape = (*ids.shape, *self.call.row)
            rows_found = result if result is not None else Tensor.empty(self.dtype, shape)
            if rows_found.data.size:
                np.take(answers, once.inverse, axis=0, out=rows_found.data.reshape(-1, self.row_bytes), mode="clip")
        for request in leaving:
            self._wait(request)
        received = sum(one.nbytes for one in came.values()) + sum(one.nbytes for one in rows.values())
        self._count(once.inverse.size, once.ids.size, received)
        return rows_found, asked

    def push(self, pulled: Pulled, rows: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Returns, at an owner, the ids that it was asked for, and the sum of the givers' rows for each, in the order of givers."""
        assert pulled.counts is not None
        owners, mine = len(self.owners), self.transport.rank
        counts = pulled.counts.array().tolist()
        ends = [0, *accumulate(counts[:owners])]
        summed = np.empty((0, self.row_bytes), np.uint8)
        if rows is not None and pulled.places is not None:
            inverse: Ids = pulled.places.array().reshape(-1).view(np.int64)
            total = self._sums(rows.array().reshape(inverse.size, prod(self.call.row)), inverse, ends[-1])
            summed = np.ascontiguousarray(total).view(np.uint8).reshape(ends[-1], self.row_bytes)
        sums = None
        landing = np.empty((0, self.row_bytes), np.uint8)
        coming: dict[int, int] = {}
        if mine in self.owners:
            coming = dict(zip(self.givers, counts[owners:], strict=True))
            sums = Tensor.empty(self.dtype, (sum(coming.values()), *self.call.row))
            landing = sums.data.reshape(sums.shape[0], self.row_bytes)
        received = self._exchange(summed, dict(zip(self.owners, counts, strict=False)), landing, coming)
        self._count(0 if pulled.places is None else pulled.places.array().size, ends[-1], received)
        return pulled.ids, sums

    def route(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Routed]:
        """Sends rows to the owners of their experts; raises StepError on all ranks if an id is not an expert.

        Of one expert's rows the first are sent, as many as the capacity allows. Returns the received rows, their experts counted from the
        rank's first, and the data for a Return. Rows are received rank by rank in
        the order of the list, those of one rank by expert, those of one expert in their order there.
        """
        each, kind = self.call.rows_of_owner, BY_NAME["int64"]
        header = np.zeros((len(self.ranks), _EXPERTS + each), np.int64)
        flat: Ids = ids.array().reshape(-1).astype(np.int64)
        wrong = np.flatnonzero((flat < 0) | (flat >= self.call.rows))
        if wrong.size:
            header[:, 1:_EXPERTS] = _NO_ROW, flat[wrong[0]], wrong[0]
        else:
            most, counts = self.call.most(flat.size), np.bincount(flat, minlength=self.call.rows)
            header[:, _EXPERTS:] = np.minimum(counts, most).reshape(len(self.ranks), each)
        table = np.array(self._meet(header), np.int64)[:, _EXPERTS:]
        order = np.argsort(flat, kind="stable")
        turns = np.arange(flat.size) - np.repeat(np.cumsum(counts) - counts, counts)
        order = order[turns < most]
        places = np.full(flat.size, -1, np.int64)
        places[order] = np.arange(order.size)
        counts = np.concatenate([header[:, _EXPERTS:].sum(1), table.sum(1)])
        experts = np.repeat(np.tile(np.arange(each), len(self.ranks)), table.reshape(-1))
        found = Routed(Tensor.of(places, kind), Tensor.of(counts, kind))
        return self.route_as(found, rows), Tensor.of(experts, kind), found

    def route_as(self, routed: Routed, rows: Tensor) -> Tensor:
        """Sends rows along the way of the Route that made `routed`, and returns the received rows."""
        places, leaving, coming = self._ways(routed)
        count = sum(leaving.values())
        given, source = self._rows("leaving", count), rows.data.reshape(places.size, self.row_bytes)
        sent = slice(None) if count == places.size else places >= 0
        given[places[sent]] = source[sent]
        made = Tensor.empty(self.dtype, (sum(coming.values()), *self.call.row))
        received = self._exchange(given, leaving, made.data.reshape(made.shape[0], self.row_bytes), coming)
        self._count(places.size, places.size, received)
        return made

    def send_back(self, routed: Routed, rows: Tensor, result: Tensor | None) -> Tensor:
        """Sends back a row for each received one, and returns them at the places of the sent ones, in `result` if given."""
        places, leaving, coming = self._ways(routed)
        count = sum(leaving.values())
        home = self._rows("home", count)
        received = self._exchange(rows.data.reshape(rows.shape[0], self.row_bytes), coming, home, leaving)
        received_rows = result if result is not None else Tensor.empty(self.dtype, (places.size, *self.call.row))
        target = received_rows.data.reshape(places.size, self.row_bytes)
        if count:
            np.take(home, places, axis=0, out=target, mode="clip")
        if count < places.size:
            target[places < 0] = 0
        self._count(places.size, places.size, received)
        return received_rows

    def _ways(self, routed: Routed) -> tuple[Ids, dict[int, int], dict[int, int]]:
        """Returns the places of a rank's rows, and maps ranks to the number of rows to and from them."""
        counts: list[int] = routed.counts.array().tolist()
        ends = counts[: len(self.ranks)], counts[len(self.ranks) :]
        leaving, coming = (dict(zip(self.ranks, one, strict=True)) for one in ends)
        places: Ids = routed.places.array().reshape(-1).view(np.int64)
        return places, leaving, coming

    def give_up(self) -> None:
        """Takes part in a Pull or a Route without data: it ends for all other ranks by a StepError."""
        routes = self.call.op == ROUTE
        header = np.zeros((len(self.ranks), _EXPERTS + routes * self.call.rows_of_owner), np.int64)
        header[:, _STATE] = _NOTHING
        self._headers_of_all(header)

    def _ask(self, ids: Tensor | None) -> tuple[Distinct, dict[int, Ids], dict[int, int]]:
        """Returns the rank's distinct ids; maps each owner to the ids asked of it, and each rank to the number of ids that come from it."""
        header = np.zeros((len(self.ranks), _EXPERTS), np.int64)
        flat, wrong = np.empty(0, np.int64), -1
        if ids is not None:
            flat, wrong = counted_from_front(ids.array(), self.call.rows)
        if wrong >= 0 and ids is not None:
            record = wrong // max(prod(ids.shape[1:]), 1)
            header[:, 1:] = _NO_ROW, flat[wrong], record
            flat = flat[:0]
        asked = distinct(flat)
        requests = {}
        for owner, at in self._bounds(asked).items():
            each = self.call.rows_of_owner
            requests[owner] = asked.ids[at] - self.owners.index(owner) * each
            header[self.ranks.index(owner), _COUNT] = at.stop - at.start
        rows = self._meet(header)
        return asked, requests, {rank: int(row[_COUNT]) for rank, row in zip(self.ranks, rows, strict=True)}

    def _asked(
        self, once: Distinct, requests: Mapping[int, Ids], counts: Mapping[int, int], ids: Tensor | None
    ) -> Pulled:
        """Returns the requests that a Push reads; at an owner the ids of other givers are still to be received."""
        mine, kind = self.transport.rank, BY_NAME["int64"]
        owns, gives = mine in self.owners, mine in self.givers
        if not owns and not gives:
            return Pulled()
        of_owners = [requests[owner].size if gives else 0 for owner in self.owners]
        of_givers = [counts[giver] if owns else 0 for giver in self.givers]
        numbers = Tensor.empty(kind, (sum(of_givers),)) if owns else None
        places = None
        if gives and ids is not None:
            places = Tensor.of(np.asarray(once.inverse, np.int64).reshape(ids.shape), kind)
        return Pulled(numbers, Tensor.of(np.array([*of_owners, *of_givers], np.int64), kind), places)

    def _landing(self, asked: Pulled, requests: Mapping[int, Ids], counts: Mapping[int, int]) -> dict[int, Ids]:
        """Maps each rank to the place of the ids that it requests; the rank's own requests as a giver are already there."""
        landings: dict[int, Ids] = {}
        if asked.ids is not None:
            numbers, begin = asked.ids.data.view(np.int64), 0
            for giver in self.givers:
                landings[giver] = numbers[begin : begin + counts[giver]]
                begin += counts[giver]
            if (own := landings.get(self.transport.rank)) is not None:
                own[:] = requests[self.transport.rank]
        for rank in self._turn:
            if rank not in landings:
                landings[rank] = self.memory.of(f"ids {rank}", _ITEM * counts[rank]).view(np.int64)
        return {rank: landings[rank] for rank in self._turn if counts[rank]}

    def _meet(self, header: Array) -> list[list[int]]:
        """Returns, for each place in the list, the header sent to this rank; raises StepError on all ranks if one refuses."""
        rows = self._headers_of_all(header)
        for rank, row in zip(self.ranks, rows, strict=True):
            if row[_STATE] == _NO_ROW and self.call.op == ROUTE:
                fact = f"'{self.call.path}': row {row[_RECORD]} on rank {rank} is for expert {row[_ID]}"
                raise StepError(f"{fact}\n  there are {self.call.rows} experts, numbered from 0")
            if row[_STATE] == _NO_ROW:
                lookup = f"Gather '{self.call.path}'"
                raise StepError(no_such_row(lookup, row[_RECORD], row[_ID], self.call.rows, rank))
        for rank, row in zip(self.ranks, rows, strict=True):
            if row[_STATE] == _NOTHING:
                raise StepError(f"rank {self.transport.rank} failed in {self.what()}: rank {rank} has nothing to give")
        return rows

    def _headers_of_all(self, header: Array) -> list[list[int]]:
        """Returns, for each place in the list, the header sent to this rank."""
        came = np.empty_like(header)
        if len(self.ranks) == 1:
            came[:] = header
        else:
            source, target = header.reshape(-1).view(np.uint8), came.reshape(-1).view(np.uint8)
            args = CollectiveArgs(ALL_TO_ALL, self.ranks, self.call.tag, source, target, BY_NAME["int64"])
            self._wait(self.transport.prepare(args)())
        rows: list[list[int]] = came.tolist()
        return rows

    def _exchange(self, rows: Bytes, leaving: Mapping[int, int], landing: Bytes, coming: Mapping[int, int]) -> int:
        """Sends and receives rows, rank by rank in the order of each mapping from ranks to numbers; returns the received bytes."""
        mine, received, at = self.transport.rank, 0, 0
        parts: dict[int, Bytes] = {}
        for rank, count in leaving.items():
            parts[rank], at = rows[at : at + count], at + count
        requests: list[Request] = []
        at = 0
        for rank, count in coming.items():
            part, at = landing[at : at + count], at + count
            if rank == mine:
                part[:] = parts[mine]
            elif count:
                requests.append(self._receive(part.reshape(-1), rank))
                received += part.size
        requests += [self._send(parts[to].reshape(-1), to) for to in self._turn if to in parts and parts[to].size]
        for request in requests:
            self._wait(request)
        return received

    def _bounds(self, asked: Distinct) -> dict[int, slice]:
        """Maps each owner to the place of its ids among those of this rank."""
        each = self.call.rows_of_owner
        ends = np.searchsorted(asked.ids, np.arange(len(self.owners) + 1) * each).tolist()
        return {owner: slice(*ends[at : at + 2]) for at, owner in enumerate(self.owners)}

    def _rows(self, name: str, count: int) -> Bytes:
        return self.memory.of(name, count * self.row_bytes).reshape(count, self.row_bytes)

    def _receive(self, data: Bytes, rank: int) -> Request:
        return self.transport.irecv(data, rank, self.tag)

    def _send(self, data: Bytes, rank: int) -> Request:
        return self.transport.isend(data, rank, self.tag)

    def _wait(self, request: Request) -> None:
        self.transport.wait(request, self.what)

    def _count(self, ids: int, once: int, received: int) -> None:
        moved = self.moved
        moved.steps += 1
        moved.ids += ids
        moved.distinct += once
        moved.received += received
