"""Messages as actions of a step: without a header if their shape is promised, else with one before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from partc.runtime.artifact.tensors.tensor import Tensor, aligned

from ..artifact.format import PUSH, RETURN, ROUTE
from ..communication.collective import dynamic_collective, give_up
from ..communication.message import HEADER, decode, encode, payload_size
from ..communication.transport import Request, Transport
from ..devices.device_memory import Cell, on_host
from ..errors import StepError
from ..lookups.lookup import Lookup, Pulled, Routed
from ..program.session_values import check_promise
from ..program.steps import LookUp, PostRecv, Send, StartCollective, WaitCollective, WaitRecv
from ..program.value_table import Storage
from .rank_program import RankProgram
from .targets.workers import Action


class MessageCalls:
    """The messages of a step plan: they read and set its `cells` and its `requests`; `promises` has the shapes that the plan knows."""

    def __init__(
        self,
        program: RankProgram,
        transport: Transport,
        wire: Mapping[int, int],
        promises: Mapping[int, tuple[int, ...]],
        cells: dict[str, Cell],
        requests: list[Request],
    ) -> None:
        self._storage, self._transport, self._wire = program.values.storage, transport, wire
        self._promises, self._cells, self._requests = promises, cells, requests
        self._posts = {step.tag: index for index, step in enumerate(program.steps) if isinstance(step, PostRecv)}
        self._headers = {tag: aligned(HEADER) for tag in self._posts if tag not in promises}

    def send(self, index: int, step: Send) -> Action:
        """Returns the function that begins to send."""
        tag, peer, isend, requests = self._wire[step.tag], step.peer, self._transport.isend, self._requests
        promise = self._promises.get(step.tag)
        if promise is None:
            return partial(self._send_encoded, index, step)
        if self._storage[step.value] in (Storage.SLOT, Storage.CONSTANT):
            tensor = self._tensor(step.value)
            check_promise(step.value, tensor.shape, promise)
            data = tensor.data

            def send_fixed() -> None:
                requests[index] = isend(data, peer, tag)

            return send_fixed

        def send() -> None:
            tensor = self._tensor(step.value)
            check_promise(step.value, tensor.shape, promise)
            requests[index] = isend(tensor.data, peer, tag)

        return send

    def _send_encoded(self, index: int, step: Send) -> None:
        tag = self._wire[step.tag]
        self._requests[index] = [
            self._transport.isend(part, step.peer, tag) for part in encode(on_host(self._cells[step.value]))
        ]

    def post(self, index: int, step: PostRecv) -> Action:
        """Returns the function that posts a receive."""
        tag, peer, irecv, requests = self._wire[step.tag], step.peer, self._transport.irecv, self._requests
        data = self._tensor(step.value).data if step.tag in self._promises else self._headers[step.tag]

        def post() -> None:
            requests[index] = irecv(data, peer, tag)

        return post

    def receive(self, step: WaitRecv) -> Action:
        """Returns the function that waits for a receive."""
        post, wait, what, requests = self._posts[step.tag], self._transport.wait, step.__str__, self._requests

        def receive() -> None:
            wait(requests[post], what)

        return receive if step.tag in self._promises else partial(self._receive_encoded, post, step)

    def _receive_encoded(self, post: int, step: WaitRecv) -> None:
        transport, header = self._transport, self._headers[step.tag]
        transport.wait(self._requests[post], step.__str__)
        payload = aligned(payload_size(header))
        transport.wait(transport.irecv(payload, step.peer, self._wire[step.tag]), step.__str__)
        self._cells[step.value] = decode(header, payload)

    def _tensor(self, name: str) -> Tensor:
        value = self._cells[name]
        assert isinstance(value, Tensor), name
        return value


class AtLarge:
    """The calls of a step plan for values of unknown size: they read and set its `cells`.

    `promises`: the shapes that the plan knows, `wire`: the tags of the transport.
    """

    def __init__(
        self,
        program: RankProgram,
        transport: Transport,
        wire: Mapping[int, int],
        promises: Mapping[int, tuple[int, ...]],
        cells: dict[str, Cell],
    ) -> None:
        self._program, self._transport, self._wire = program, transport, wire
        self._promises, self._cells = promises, cells

    def look_up(self, step: LookUp) -> Callable[[], object]:
        """Returns the function that runs a lookup."""
        return partial(self._look_up, step, self._lookup(step))

    def collect(self, step: StartCollective) -> None:
        """Runs a collective on a value of unknown shape."""
        call, finish = step.call, WaitCollective(step.call, step.ranks)
        source = self._tensor(call.source or "")
        what = finish.__str__
        self._cells[call.result or ""] = dynamic_collective(call, step.ranks, call.tag, source, self._transport, what)

    def give_up(self, step: StartCollective | LookUp) -> None:
        """Takes part in a lookup, or in a collective on values of unknown shape, after a failure and without data."""
        if isinstance(step, StartCollective):
            give_up(step.call, step.ranks, step.call.tag, self._transport, step.__str__)
        elif step.call.asks:
            self._lookup(step).give_up()
        else:
            self._push_nothing(step, self._lookup(step))

    def _lookup(self, step: LookUp) -> Lookup:
        """Returns the lookup of a step, one for all plans of a program."""
        call, program = step.call, self._program
        if call.tag not in program.messages.lookups:
            dtype = program.values.dtype(next(name for name in (call.operand, call.result) if name))
            program.messages.lookups[call.tag] = Lookup(
                call,
                step.ranks,
                dtype,
                self._transport,
                self._wire[call.tag],
                program.messages.lookup_memory,
                step.__str__,
            )
        return program.messages.lookups[call.tag]

    def _look_up(self, step: LookUp, lookup: Lookup) -> None:
        call = step.call
        match call.op:
            case "Pull":
                results = self._pull(step, lookup)
            case "Route" if call.ids is not None:
                results = self._route(step, lookup)
            case "Push":
                asked = Pulled(*(self._operand(name) for name in call.requests))
                ids, rows = lookup.push(asked, self._operand(call.operand))
                results = {call.numbers: ids, call.result: rows}
            case _:
                results = {call.result: self._routed(step, lookup, self._tensor(call.operand or ""))}
        for name, value in results.items():
            if name:
                self._cells[name] = value

    def _route(self, step: LookUp, lookup: Lookup) -> dict[str | None, Tensor | None]:
        call, ids = step.call, self._tensor(step.call.ids or "")
        self._hold_to_promise(step, lookup, ids)
        rows, experts, routed = lookup.route(self._tensor(call.operand or ""), ids)
        found: dict[str | None, Tensor | None] = {call.result: rows, call.numbers: experts}
        return found | dict(zip(call.requests, (routed.places, routed.counts), strict=True))

    def _routed(self, step: LookUp, lookup: Lookup, rows: Tensor) -> Tensor:
        """Returns the rows that are received for rows sent along a Route, or back."""
        call = step.call
        routed = Routed(*(self._tensor(name or "") for name in call.requests))
        if call.op == ROUTE:
            return lookup.route_as(routed, rows)
        slot = self._program.values.storage[call.result or ""] is Storage.SLOT
        return lookup.send_back(routed, rows, self._tensor(call.result or "") if slot else None)

    def _hold_to_promise(self, step: LookUp, lookup: Lookup, ids: Tensor) -> None:
        """Raises StepError on all ranks if ids have another shape than the manifest says."""
        if (promise := self._promises.get(step.call.tag)) is not None:
            try:
                check_promise(step.call.ids or "", ids.shape, promise)
            except StepError:
                lookup.give_up()
                raise

    def _pull(self, step: LookUp, lookup: Lookup) -> dict[str | None, Tensor | None]:
        call = step.call
        ids = self._operand(call.ids)
        if ids is not None:
            self._hold_to_promise(step, lookup, ids)
        slot = call.result is not None and self._program.values.storage[call.result] is Storage.SLOT
        result = self._tensor(call.result or "") if slot else None
        rows, asked = lookup.pull(self._operand(call.operand), ids, result)
        found = dict(zip(call.requests, (asked.ids, asked.counts, asked.places), strict=True))
        return found if slot else {**found, call.result: rows}

    def _push_nothing(self, step: LookUp, lookup: Lookup) -> None:
        """Sends zeros for the rows that a rank has asked for; nothing if the Pull was given up, as it then was on all ranks."""
        call = step.call
        values = [self._cells.get(name or "") for name in call.requests]
        if call.op != PUSH:
            sent, sizes = (one if isinstance(one, Tensor) else None for one in values)
            if sent is not None and sizes is not None:
                came = int(sizes.array()[len(step.ranks) :].sum()) if call.op == RETURN else sent.shape[0]
                zeros = Tensor.empty(lookup.dtype, (came, *call.row))
                zeros.data[:] = 0
                self._routed(step, lookup, zeros)
            return
        ids, counts, places = (one if isinstance(one, Tensor) else None for one in values)
        if counts is not None:
            rows = None if places is None else Tensor.empty(lookup.dtype, (*places.shape, *call.row))
            if rows is not None:
                rows.data[:] = 0
            lookup.push(Pulled(ids, counts, places), rows)

    def _operand(self, name: str | None) -> Tensor | None:
        return self._tensor(name) if name else None

    def _tensor(self, name: str) -> Tensor:
        value = self._cells[name]
        assert isinstance(value, Tensor), name
        return value
