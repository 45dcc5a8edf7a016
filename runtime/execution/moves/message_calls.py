"""Messages as actions of a step: bare where their shape is promised, else with a header before them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from partc.runtime.artifact.tensors.tensor import Tensor, aligned

from ...communication.message import HEADER, decode, encode, payload_size
from ...communication.transport import Request, Transport
from ...devices.device_memory import Cell, on_host
from ...program.session_values import check_promise
from ...program.steps import PostRecv, Send, WaitRecv
from ...program.value_table import Storage
from ..rank_program import RankProgram
from ..targets.workers import Action


class MessageCalls:
    """The messages of a step plan: they read and set its `cells` and its `requests`; `promises` are the shapes that the plan knows."""

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
        """The function that begins to send."""
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
        """The function that posts a receive."""
        tag, peer, irecv, requests = self._wire[step.tag], step.peer, self._transport.irecv, self._requests
        data = self._tensor(step.value).data if step.tag in self._promises else self._headers[step.tag]

        def post() -> None:
            requests[index] = irecv(data, peer, tag)

        return post

    def receive(self, step: WaitRecv) -> Action:
        """The function that waits for a receive."""
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
