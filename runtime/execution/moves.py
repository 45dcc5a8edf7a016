"""Messages and collectives as actions of a step: without a header if their shape is promised, else with one before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from partc.runtime.artifact.tensors.tensor import Tensor, aligned

from ..artifact.format import PUSH, RETURN, ROUTE
from ..communication.coalesced import CoalescedCollective
from ..communication.collective import BoundCollective, CollectivePlan, dynamic_collective, give_up, nothing
from ..communication.exchange import Redistribution
from ..communication.message import HEADER, decode, encode, payload_size
from ..communication.nccl import GpuCollective
from ..communication.transport import Request, Transport
from ..devices.device_memory import Remote, host_view, on_host
from ..errors import StepError
from ..lookups.lookup import Lookup, Pulled, Routed
from ..program.session_values import check_promise
from ..program.steps import LookUp, PostRecv, Send, StartCollective, WaitCollective, WaitRecv
from ..program.value_table import Storage
from .collective_plans import AnyCollective
from .memory.step_memory import StepMemory
from .rank_program import RankProgram
from .targets.workers import Action


class MessageCalls:
    """The messages of a step plan: they read and set values in its `memory`; `promises` has the shapes that the plan knows.

    `requests`: the messages in progress, by step. `wire`: the tags of the transport.
    """

    def __init__(
        self,
        program: RankProgram,
        transport: Transport,
        wire: Mapping[int, int],
        promises: dict[int, tuple[int, ...]],
        memory: StepMemory,
    ) -> None:
        self.program, self.transport, self.wire, self.promises = program, transport, wire, promises
        self.requests: list[Request] = [None] * len(program.steps)
        self.memory, self._storage, self._links = memory, program.values.storage, program.messages.links
        self._posts = {step.tag: index for index, step in enumerate(program.steps) if isinstance(step, PostRecv)}
        self._headers = {tag: aligned(HEADER) for tag in self._posts if tag not in promises}

    def send(self, index: int, step: Send) -> Action:
        """Returns the function that begins to send."""
        tag, peer, isend, requests = self.wire[step.tag], step.peer, self.transport.isend, self.requests
        promise = self.promises.get(step.tag)
        if promise is None:
            return partial(self._send_encoded, index, step)
        if step.target:
            value = self.memory.remote(step.value)
            check_promise(step.value, value.shape, promise)
            return self._on_device(index, value, step.peer, tag, sends=True)
        if self._storage[step.value] in (Storage.SLOT, Storage.CONSTANT):
            tensor = self.memory.tensor(step.value)
            check_promise(step.value, tensor.shape, promise)
            data = tensor.data

            def send_fixed() -> None:
                requests[index] = isend(data, peer, tag)

            return send_fixed

        def send() -> None:
            tensor = self.memory.tensor(step.value)
            check_promise(step.value, tensor.shape, promise)
            requests[index] = isend(tensor.data, peer, tag)

        return send

    def _send_encoded(self, index: int, step: Send) -> None:
        tag = self.wire[step.tag]
        self.requests[index] = [
            self.transport.isend(part, step.peer, tag) for part in encode(on_host(self.memory.cells[step.value]))
        ]

    def post(self, index: int, step: PostRecv) -> Action:
        """Returns the function that posts a receive."""
        tag, peer, irecv, requests = self.wire[step.tag], step.peer, self.transport.irecv, self.requests
        if step.target:
            return self._on_device(index, self.memory.remote(step.value), peer, tag, sends=False)
        data = self.memory.tensor(step.value).data if step.tag in self.promises else self._headers[step.tag]

        def post() -> None:
            requests[index] = irecv(data, peer, tag)

        return post

    def _on_device(self, index: int, value: Remote, peer: int, tag: int, sends: bool) -> Action:
        """Returns the function that begins a message between devices: by the links of a GPU, or where the target runs on the CPU."""
        links, requests = self._links, self.requests
        begin: Callable[[], Request]
        if links is not None:
            begin = partial(links.isend if sends else links.irecv, value, peer)
        else:
            move = self.transport.isend if sends else self.transport.irecv
            begin = partial(move, host_view(value).data, peer, tag)

        def act() -> None:
            requests[index] = begin()

        return act

    def receive(self, step: WaitRecv) -> Action:
        """Returns the function that waits for a receive."""
        post, wait, what, requests = self._posts[step.tag], self.transport.wait, step.__str__, self.requests

        def receive() -> None:
            wait(requests[post], what)

        return receive if step.tag in self.promises else partial(self._receive_encoded, post, step)

    def _receive_encoded(self, post: int, step: WaitRecv) -> None:
        transport, header = self.transport, self._headers[step.tag]
        transport.wait(self.requests[post], step.__str__)
        payload = aligned(payload_size(header))
        transport.wait(transport.irecv(payload, step.peer, self.wire[step.tag]), step.__str__)
        self.memory.cells[step.value] = decode(header, payload)

    def sent(self, index: int) -> Action:
        """Returns the function that waits for what a step has sent."""
        step, wait, requests = self.program.steps[index], self.transport.wait, self.requests

        def complete() -> None:
            request = requests[index]
            for one in request if isinstance(request, list) else (request,):
                wait(one, step.__str__)
            requests[index] = None

        return complete


class AtLarge:
    """The calls of a step plan for values of unknown size: they read and set values in its `memory`.

    `promises`: the shapes that the plan knows, `wire`: the tags of the transport.
    """

    def __init__(
        self,
        program: RankProgram,
        transport: Transport,
        wire: Mapping[int, int],
        promises: Mapping[int, tuple[int, ...]],
        memory: StepMemory,
    ) -> None:
        self._program, self._transport, self._wire = program, transport, wire
        self._promises, self.memory = promises, memory

    def look_up(self, step: LookUp) -> Callable[[], object]:
        """Returns the function that runs a lookup."""
        return partial(self._look_up, step, self._lookup(step))

    def collect(self, step: StartCollective) -> None:
        """Runs a collective on a value of unknown shape."""
        call, finish = step.call, WaitCollective(step.call, step.ranks)
        source = self.memory.tensor(call.source or "")
        what = finish.__str__
        self.memory.cells[call.result or ""] = dynamic_collective(
            call, step.ranks, call.tag, source, self._transport, what
        )

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
                results = {call.result: self._routed(step, lookup, self.memory.tensor(call.operand or ""))}
        for name, value in results.items():
            if name:
                self.memory.cells[name] = value

    def _route(self, step: LookUp, lookup: Lookup) -> dict[str | None, Tensor | None]:
        call, ids = step.call, self.memory.tensor(step.call.ids or "")
        self._hold_to_promise(step, lookup, ids)
        rows, experts, routed = lookup.route(self.memory.tensor(call.operand or ""), ids)
        found: dict[str | None, Tensor | None] = {call.result: rows, call.numbers: experts}
        return found | dict(zip(call.requests, (routed.places, routed.counts), strict=True))

    def _routed(self, step: LookUp, lookup: Lookup, rows: Tensor) -> Tensor:
        """Returns the rows that are received for rows sent along a Route, or back."""
        call = step.call
        routed = Routed(*(self.memory.tensor(name or "") for name in call.requests))
        if call.op == ROUTE:
            return lookup.route_as(routed, rows)
        slot = self._program.values.storage[call.result or ""] is Storage.SLOT
        return lookup.send_back(routed, rows, self.memory.tensor(call.result or "") if slot else None)

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
        result = self.memory.tensor(call.result or "") if slot else None
        rows, asked = lookup.pull(self._operand(call.operand), ids, result)
        found = dict(zip(call.requests, (asked.ids, asked.counts, asked.places), strict=True))
        return found if slot else {**found, call.result: rows}

    def _push_nothing(self, step: LookUp, lookup: Lookup) -> None:
        """Sends zeros for the rows that a rank has asked for; nothing if the Pull was given up, as it then was on all ranks."""
        call = step.call
        values = [self.memory.cells.get(name or "") for name in call.requests]
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
        return self.memory.tensor(name) if name else None


class CollectiveCalls:
    """The collectives of a step plan on values of known shape, in its `memory`.

    `works`: maps the tag of each to how it is computed. `at_once`: the tags of those that begin at their wait. `begun`: maps the tag of
    each in progress to its requests and to what follows them.
    """

    def __init__(self, messages: MessageCalls, works: dict[int, AnyCollective], at_once: frozenset[int]) -> None:
        self.messages, self.memory, self.works, self.at_once = messages, messages.memory, works, at_once
        self.begun: dict[int, tuple[list[Request], Action | None]] = {}

    def begin(self, index: int, step: StartCollective, at_large: AtLarge) -> Action:
        """Returns the function that begins a collective; `at_large` has those on values of unknown shape."""
        call, work = step.call, self.works.get(step.call.tag)
        if work is None:
            return partial(at_large.collect, step)
        if isinstance(work, Redistribution):
            return partial(self._begin_redistribution, index, step, work)
        if isinstance(work, GpuCollective):
            ends = [[self.memory.remote(name) for name in names] for names in (call.inputs, call.outputs)]
            return self._begin_bound(index, step, work.bind(*ends))
        if isinstance(work, CoalescedCollective):
            sources, results = (
                [self._tensor(step, name) for name in names] for names in (step.call.inputs, step.call.outputs)
            )
            packed, landing = self.memory.scratch[step.call.tag, "out"], self.memory.scratch[step.call.tag, "in"]
            return self._begin_bound(
                index, step, work.bind(sources, results, packed, landing, step.call.tag in self.at_once)
            )
        if call.source and self.memory.program.values.storage[call.source] not in (Storage.SLOT, Storage.CONSTANT):
            return partial(self._begin_anew, index, step, work)
        return self._begin_bound(index, step, self._bound(step, work))

    def _tensor(self, step: StartCollective, name: str) -> Tensor:
        """Returns an operand or a result on the host, or of a target that runs on the CPU."""
        return host_view(self.memory.remote(name)) if step.target else self.memory.tensor(name)

    def _begin_bound(self, index: int, step: StartCollective, bound: BoundCollective) -> Action:
        start, begun, tag = bound.start, self.begun, step.call.tag
        if not step.call.outputs:
            return partial(self._leave, index, bound)

        def begin() -> None:
            if bound.before:
                bound.before()
            begun[tag] = ([start()], bound.after)

        return begin

    def _bound(self, step: StartCollective, work: CollectivePlan) -> BoundCollective:
        """Returns a collective bound to the current memory of its values."""
        call = step.call
        source = self._tensor(step, call.source) if call.source else None
        if source is not None:
            check_promise(call.source or "", source.shape, work.shape)
        packed, landing = self.memory.scratch[call.tag, "out"], self.memory.scratch[call.tag, "in"]
        result = self._tensor(step, call.result) if call.result else None
        return work.bind(source, result, packed, landing, call.tag in self.at_once)

    def _leave(self, index: int, bound: BoundCollective) -> None:
        """Begins a collective without a result on this rank: like a send, it is waited for when its memory is needed."""
        if bound.before:
            bound.before()
        self.messages.requests[index] = bound.start()

    def _begin_anew(self, index: int, step: StartCollective, work: CollectivePlan) -> None:
        """Begins a collective whose input has another place each time."""
        bound = self._bound(step, work)
        if not step.call.outputs:
            self._leave(index, bound)
            return
        if bound.before:
            bound.before()
        self.begun[step.call.tag] = ([bound.start()], bound.after)

    def _begin_redistribution(self, index: int, step: StartCollective, work: Redistribution) -> None:
        call = step.call
        source = self.memory.tensor(call.source) if call.source else None
        if source is not None:
            check_promise(call.source or "", source.shape, work.given or ())
        result = self.memory.tensor(call.result) if call.result else None
        packed, landing = self.memory.scratch[call.tag, "out"], self.memory.scratch[call.tag, "in"]
        leaving, coming, after = work.begin(source, result, packed, landing)
        self.messages.requests[index] = leaving
        self.begun[call.tag] = (coming, after)

    def finish(self, step: WaitCollective) -> Action:
        """Returns the function that waits for a collective."""
        if step.call.tag not in self.works:
            return nothing
        wait, what, begun, tag = self.messages.transport.wait, step.__str__, self.begun, step.call.tag

        def finish() -> None:
            requests, after = begun[tag]
            for request in requests:
                if request is not None:
                    wait(request, what)
            if after:
                after()

        return finish
