"""The job of simulated ranks: messages and collectives as MPI promises them, and no kinder.

A message is matched with a receive of the same (source, target, tag) in order, and arrives later, by a delay of its own: those of different
tags overtake each other. A send may be complete at once, or only when its receive is there. A collective is matched by the order of
calls among one list of ranks, never by its tag, and ends on each rank at another time; one of which a rank only gives, or that a root only
sends, may end there before others have come.

Memory that belongs to the transport is watched. What is sent must be unchanged when its wait returns. What is received is poisoned until
then, also where a collective works in place, so that whoever reads it too early computes nonsense, and whoever writes there is found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from partc.runtime.artifact.format import ALL_GATHER, BROADCAST, REDUCE_TO, SUM
from partc.runtime.artifact.tensors.dtypes import Bytes, Dtype
from partc.runtime.communication.transport import AGREEMENT, GATHER, Agreements, CollectiveArgs, Request, Vector

from .parts import Joining, Transfer, named, result
from .world import SimulatedWorld, What


class SimulatedTransport:
    """One rank's end."""

    def __init__(self, world: SimulatedWorld, rank: int, native: bool, own_cores: bool, tags: int) -> None:
        self.world, self.rank, self.size, self.stall, self.tags = world, rank, world.size, world.stall, tags
        self.place = rank
        self.cores, self.shares_host, self.single_host, self.has_own_core = 1, True, True, own_cores
        self.native = native
        self.everyone = tuple(range(world.size))
        self.channels = 0

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Request:
        world, key = self.world, (self.rank, peer, tag)
        world.step(self.rank, lambda: f"isend of {buffer.size} bytes to rank {peer}, tag {tag}")
        request = Transfer(key, buffer, True)
        request.done = not world.choices.chance(world.weather.rendezvous)
        world.sends.setdefault(key, deque()).append(request)
        return self._matched(request)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Request:
        world, key = self.world, (peer, self.rank, tag)
        world.step(self.rank, lambda: f"irecv of {buffer.size} bytes from rank {peer}, tag {tag}")
        buffer[:] = world.weather.poison
        request = Transfer(key, buffer, False)
        world.receives.setdefault(key, deque()).append(request)
        return self._matched(request)

    def _matched(self, request: Transfer) -> Transfer:
        world, key = self.world, request.key
        world.open[self.rank].append(request)
        sends, receives = world.sends.get(key), world.receives.get(key)
        if sends and receives:
            send, receive = sends.popleft(), receives.popleft()
            if send.buffer.size != receive.buffer.size:
                world.misuse(f"{named(send)} meets {named(receive)}")
            receive.data = send.data
            world.later(world.delay(), receive)
            if not send.done:
                world.later(world.delay(), send)
        return request

    def wait(self, request: Request, what: What) -> None:
        world = self.world
        world.step(self.rank, lambda: f"wait: {what()}")
        if isinstance(request, Joining):
            if not request.arrived:
                self._arrive(request)
            world.wait(self.rank, request, what)
            self._finish_joining(request, what)
        elif isinstance(request, Transfer):
            world.wait(self.rank, request, what)
            self._finish_transfer(request, what)
        else:
            world.misuse(f"rank {self.rank} waits for {request!r}: {what()}")
            return
        if request in world.open[self.rank]:
            world.open[self.rank].remove(request)

    def _finish_transfer(self, request: Transfer, what: What) -> None:
        if request.sends:
            if not np.array_equal(request.buffer, request.data):
                self.world.misuse(f"rank {self.rank}: memory was written before its send was complete: {what()}")
        elif request.data is not None:
            if (request.buffer != self.world.weather.poison).any():
                self.world.misuse(f"rank {self.rank}: memory was written before its receive was complete: {what()}")
            request.buffer[:] = request.data
            request.data = None

    def interrupt(self, message: str) -> None:
        raise NotImplementedError("simulated ranks have one target")

    def with_progress(self, action: Callable[[], object]) -> Callable[[], object]:
        return action

    def create_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        self.world.step(self.rank, lambda: "join")
        signature = ("join", tuple(groups))
        self.world.wait(self.rank, self.world.meet(self.everyone, False, self.rank, signature, None), lambda: "join")

    def reduces(self, op: str, ranks: Sequence[int], dtype: Dtype, reduce: str) -> bool:
        return self.native and (reduce == SUM or dtype.shown.startswith(("int", "uint"))) and dtype.bits >= 32

    def prepare(self, args: CollectiveArgs) -> Callable[[], Request]:
        def begin() -> Request:
            world = self.world
            world.step(self.rank, lambda: f"begin of {args.op} {args.ranks}, tag {args.tag}")
            joining = Joining(self.rank, args)
            if args.target.size and not (args.op == BROADCAST and args.source.size):
                args.target[:] = world.weather.poison
            world.open[self.rank].append(joining)
            if not args.at_once:
                self._arrive(joining)
            return joining

        return begin

    def _arrive(self, joining: Joining) -> None:
        world, args = self.world, joining.args
        joining.arrived = True
        block = args.target.size // len(args.ranks) if args.op in (ALL_GATHER, GATHER) else None
        size = args.source.size if block is None or not block else block
        if args.op == BROADCAST:
            size = args.target.size
        if block not in (None, 0, args.source.size):
            world.misuse(f"rank {self.rank}: {args.op} of {args.source.size} bytes into blocks of {block}")
        signature = (args.op, args.dtype.shown, args.reduce, args.root, args.at_once, size)
        meeting = joining.meeting = world.meet(args.ranks, True, self.rank, signature, joining.given)
        meeting.joinings.append(joining)
        root = args.ranks[args.root]
        early = (args.op == BROADCAST and self.rank == root) or (args.op in (REDUCE_TO, GATHER) and self.rank != root)
        if early and not args.at_once and not world.choices.chance(world.weather.rendezvous):
            world.later(world.delay(), joining)
        if meeting.complete:
            for one in meeting.joinings:
                if not one.done:
                    world.later(world.delay(), one)

    def _finish_joining(self, joining: Joining, what: What) -> None:
        world, args, meeting = self.world, joining.args, joining.meeting
        giver = args.op == BROADCAST and bool(args.source.size)
        if (not joining.in_place or giver) and not np.array_equal(args.source, joining.given):
            world.misuse(f"rank {self.rank}: memory was written before a collective was finished: {what()}")
        if meeting is None or not args.target.size or giver:
            return
        if (args.target != world.weather.poison).any():
            world.misuse(f"rank {self.rank}: memory was written before a collective had filled it: {what()}")
        args.target[:] = result(args, self.rank, [meeting.brought[rank] for rank in args.ranks])

    def all_reduce_max(self, vector: Vector) -> Vector:
        brought = self._together(("agree", vector.size), vector.copy(), AGREEMENT)
        highest: Vector = np.stack(brought).max(axis=0)
        return highest

    def count_step(self) -> None:
        pass

    def agreements(self) -> Agreements:
        self.channels += 1
        return SimulatedAgreements(self, 1 + self.channels)

    def all_gather_text(self, text: str) -> list[str]:
        return self._together(("share",), text, "the exchange of messages")

    def _together(self, signature: tuple[Any, ...], thing: Any, what: str) -> list[Any]:
        self.world.step(self.rank, lambda: str(signature))
        meeting = self.world.meet(self.everyone, False, self.rank, signature, thing)
        self.world.wait(self.rank, meeting, lambda: what)
        return [meeting.brought[rank] for rank in self.everyone]

    def fail(self, message: str, buffers: object = None) -> None:
        world, mine = self.world, self.rank
        if world.killed or mine in world.dead or world.failures[mine] is not None:
            return
        world.failures[mine] = message

        def notice(rank: int) -> Callable[[], None]:
            def arrive() -> None:
                world.failures[rank] = world.failures[rank] or message

            return arrive

        for rank in self.everyone:
            if rank != mine:
                world.scheduler.after(world.delay(), notice(rank))

    def leave(self, message: str) -> None:
        if self.world.failures[self.rank] is None:
            self.world.left.append(message)

    def abort(self, message: str) -> None:
        self.fail(message)

    def close(self) -> None:
        pass


class SimulatedAgreements:
    """Agreements that are matched in an order of their own."""

    def __init__(self, transport: SimulatedTransport, channel: int) -> None:
        self.transport, self.channel = transport, channel

    def begin(self, vector: Vector) -> Callable[[], Vector]:
        end, world = self.transport, self.transport.world
        world.step(end.rank, lambda: "begin of an agreement")
        meeting = world.meet(end.everyone, self.channel, end.rank, ("agree", vector.size), vector.copy())

        def finish() -> Vector:
            world.step(end.rank, lambda: f"wait: {AGREEMENT}")
            world.wait(end.rank, meeting, lambda: AGREEMENT)
            highest: Vector = np.stack([meeting.brought[rank] for rank in end.everyone]).max(axis=0)
            return highest

        return finish
