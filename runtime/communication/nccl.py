"""Messages and collectives between GPUs by NCCL, with requests that a transport waits for like its own.

Each direction between two ranks, and each list of ranks with collectives, has a communicator and a stream of its own. Ranks make their
calls on a communicator in one order, since NCCL's messages have no tags. A call queues the work and returns; its request is the event
after it, so that stalls and failures of other ranks are noticed as with MPI. NCCL's kernels wait without end for a rank that has failed,
so that the communicators are aborted then.

Source of the calls: the NCCL user guide (point-to-point communication, thread safety, fault tolerance), and cupy's reference.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from partc.runtime.artifact.comm.collective_node import CollectiveCall, Shape
from partc.runtime.artifact.tensors.dtypes import Dtype

from ..artifact.format import ALL_GATHER, ALL_REDUCE
from ..devices.device_memory import Remote
from ..devices.devices import Device
from .collective import BoundCollective
from .transport import Request

Key: TypeAlias = tuple[str, tuple[int, ...]]
"""A communicator: `message` with a sender and a receiver, or `collective` with a list of ranks."""
MESSAGE, COLLECTIVE = "message", "collective"


def gpu(device: Device) -> tuple[str, str]:
    """Returns a name of the GPU by which all ranks of a job know it, and an empty text; else an empty name and what NCCL lacks here."""
    try:
        import cupy
        from cupy.cuda import nccl

        if not nccl.available:
            return "", "cupy finds no NCCL"
        return f"{platform.node()} {cupy.cuda.runtime.deviceGetPCIBusId(device.number)}", ""
    except Exception as error:  # also what CUDA says
        return "", " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True)
class _Link:
    """A communicator with its stream."""

    communicator: Any
    stream: Any


@dataclass(frozen=True)
class _Queued:
    """Work on a GPU as a request."""

    event: Any
    check: Callable[[], object]

    def Test(self) -> bool:
        if self.event.done:
            return True
        self.check()
        return False


class NcclLinks:
    """A rank's end of the messages and collectives between GPUs, where it has any."""

    def __init__(self, device: Device, rank: int) -> None:
        import cupy
        from cupy.cuda import nccl

        self._rank = rank
        self._cuda, self._nccl = cupy.cuda, nccl
        self._device = cupy.cuda.Device(device.number)
        self._links: dict[Key, _Link] = {}

    def identifiers(self, keys: Iterable[Key]) -> str:
        """Returns identifiers of the communicators that are missing, and of whose ranks this one is the first, for all other ranks."""
        new = {*keys} - self._links.keys()
        return json.dumps(
            {json.dumps(key): self._nccl.get_unique_id() for key in sorted(new) if key[1][0] == self._rank}
        )

    def open(self, keys: Iterable[Key], texts: Iterable[str]) -> None:
        """Creates the communicators that are missing; collective among the ranks of each. `texts`: the `identifiers` of all ranks."""
        identifiers: dict[str, list[int]] = {}
        for text in texts:
            identifiers |= json.loads(text)
        self._device.use()
        # Two ranks create what they share in one order, that of the keys, so that neither waits for the other in vain.
        for key in sorted({*keys} - self._links.keys()):
            ranks, own = key[1], identifiers[json.dumps(key)]
            communicator = self._nccl.NcclCommunicator(len(ranks), tuple(own), ranks.index(self._rank))
            self._links[key] = _Link(communicator, self._cuda.Stream(non_blocking=True))

    def isend(self, value: Remote, peer: int) -> Request:
        """Begins to send a value, after those that were sent to that peer before."""
        link = self._links[MESSAGE, (self._rank, peer)]
        return self._queued(link, [self._message(link, link.communicator.send, value, 1)])

    def irecv(self, value: Remote, peer: int) -> Request:
        """Begins to receive into a value, after what that peer sent before."""
        link = self._links[MESSAGE, (peer, self._rank)]
        return self._queued(link, [self._message(link, link.communicator.recv, value, 0)])

    def _message(self, link: _Link, call: Callable[..., object], value: Remote, peer: int) -> Callable[[], object]:
        """Returns the call for a message; of the two ranks of its communicator 0 is the sender."""
        return partial(call, value.pointer, value.size, self._nccl.NCCL_UINT8, peer, link.stream.ptr)

    def collect(self, op: str, ranks: tuple[int, ...], dtype: Dtype, ends: Sequence[tuple[Remote, Remote]]) -> Request:
        """Begins a collective of one or several values, each with its result."""
        link, calls = self._links[COLLECTIVE, ranks], []
        communicator, stream = link.communicator, link.stream.ptr
        for source, result in ends:
            ends_of = source.pointer, result.pointer
            if op == ALL_GATHER:
                calls.append(partial(communicator.allGather, *ends_of, source.size, self._nccl.NCCL_UINT8, stream))
                continue
            kind, size = getattr(self._nccl, f"NCCL_{dtype.name.upper()}"), source if op == ALL_REDUCE else result
            count = size.size // (dtype.bits // 8)
            call = communicator.allReduce if op == ALL_REDUCE else communicator.reduceScatter
            calls.append(partial(call, *ends_of, count, kind, self._nccl.NCCL_SUM, stream))
        return self._queued(link, calls)

    def _queued(self, link: _Link, calls: Sequence[Callable[[], object]]) -> Request:
        """Queues calls as one, and returns their request."""
        self._device.use()
        if len(calls) > 1:
            self._nccl.groupStart()
        for call in calls:
            call()
        if len(calls) > 1:
            self._nccl.groupEnd()
        event = self._cuda.Event(disable_timing=True)
        event.record(link.stream)
        return _Queued(event, link.communicator.check_async_error)

    def abort(self) -> None:
        """Ends all that is under way, which may wait for a rank that has failed."""
        for link in self._links.values():
            link.communicator.abort()
        self._links.clear()

    def close(self) -> None:
        """Frees the communicators; nothing is under way."""
        for link in self._links.values():
            link.communicator.destroy()
        self._links.clear()


class GpuCollective:
    """A collective of values on a GPU, of fixed shape, which are sharded along axis 0; it needs no scratch memory."""

    packed = landing = 0

    def __init__(
        self, links: NcclLinks, call: CollectiveCall, ranks: tuple[int, ...], dtype: Dtype, shape: Shape, result: Shape
    ) -> None:
        self.links, self.call, self.ranks, self.dtype = links, call, ranks, dtype
        self.gives_shape, self.result = shape, result

    def bind(self, sources: Sequence[Remote], results: Sequence[Remote]) -> BoundCollective:
        """Binds the collective to memory."""
        ends = list(zip(sources, results, strict=True))
        return BoundCollective(partial(self.links.collect, self.call.op, self.ranks, self.dtype, ends))
