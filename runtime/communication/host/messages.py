"""Messages between two ranks of a host: slots in shared memory, which the sender fills and the receiver empties.

Each ordered pair of ranks has `SLOTS` slots of `SLOT` bytes, used in turn. The sender copies a message into as many as it needs, and raises
its count; the receiver copies out of them, and raises its own. A message without a free slot waits in a list of the sender, which continues
it whenever it calls the transport.

Messages of one tag keep their order, and those of other tags may be received before them: the receiver stores a message that arrives before
it is expected. No call here waits: `progress` does everything that is possible without waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Bytes

from ...errors import RankError
from ...job.parking import LINE, Cell, RankWait

SLOTS, SLOT = 8, 1 << 17
_BATCH = 2
"""The number of slots that a receiver empties before it releases them."""
_TAG, _TOTAL = range(2)


@dataclass
class Channel:
    """One direction of a pair: the counts of filled and of emptied slots, each written by one side, and each slot with its tag and size."""

    filled: Cell
    emptied: Cell
    heads: list[Cell]
    slots: list[Bytes]

    @staticmethod
    def size() -> int:
        """Returns the bytes of a channel."""
        return 4096 + SLOTS * SLOT

    @staticmethod
    def of(memory: memoryview) -> Channel:
        """Returns the channel in `memory`, which has `size()` bytes."""
        lines = [memory[at : at + LINE].cast("q") for at in range(0, LINE * (2 + SLOTS), LINE)]
        slots = [np.frombuffer(memory, np.uint8, SLOT, 4096 + at * SLOT) for at in range(SLOTS)]
        return Channel(lines[0], lines[1], [*lines[2:]], slots)


@dataclass(eq=False)
class Message:
    """One end of a message, which is its own request; of a message that arrives unexpected only the tag is known."""

    owner: HostMessages
    peer: int
    tag: int
    data: Bytes
    moved: int = 0
    done: bool = False

    def Test(self) -> bool:
        if not self.done:
            self.owner.progress()
        return self.done


@dataclass
class _Sender:
    channel: Channel
    filled: int = 0
    waiting: deque[Message] = field(default_factory=deque)


@dataclass
class _Receiver:
    channel: Channel
    emptied: int = 0
    now: Message | None = None
    """The message into which slots are being copied."""
    expected: dict[int, deque[Message]] = field(default_factory=dict)
    kept: dict[int, deque[Message]] = field(default_factory=dict)
    count: int = 0
    """The number of expected messages."""


class HostMessages:
    """A rank's messages. `channel` opens the channel from one place of the host to another; peers are places of the host, too."""

    def __init__(self, place: int, channel: Callable[[int, int], Channel], parking: RankWait) -> None:
        self._place, self._channel, self._parking = place, channel, parking
        self._senders: dict[int, _Sender] = {}
        self._receivers: dict[int, _Receiver] = {}
        self.sending: set[int] = set()
        """Peers for which messages wait for a free slot."""
        self.expecting: set[int] = set()
        """Peers from which messages are expected."""

    def send(self, data: Bytes, peer: int, tag: int) -> Message:
        """Begins to send a message."""
        sender = self._senders.get(peer)
        if sender is None:
            sender = self._senders[peer] = _Sender(self._channel(self._place, peer))
        message = Message(self, peer, tag, data)
        sender.waiting.append(message)
        self._fill(peer, sender)
        return message

    def receive(self, data: Bytes, peer: int, tag: int) -> Message:
        """Begins to receive exactly as many bytes as the buffer has."""
        receiver = self._receivers.get(peer)
        if receiver is None:
            receiver = self._receivers[peer] = _Receiver(self._channel(peer, self._place))
        message = Message(self, peer, tag, data)
        kept = receiver.kept.get(tag)
        if kept:
            first = kept.popleft()
            self._fits(message, first.data.size)
            message.moved, message.done = first.moved, first.done
            data[: first.moved] = first.data[: first.moved]
            if not first.done:
                receiver.now = message
                self._expect(peer, receiver, 1)
        else:
            receiver.expected.setdefault(tag, deque()).append(message)
            self._expect(peer, receiver, 1)
        return message

    def progress(self) -> None:
        """Sends and receives as much as possible without waiting."""
        for peer in [*self.sending]:
            self._fill(peer, self._senders[peer])
        for peer in [*self.expecting]:
            self._empty(peer, self._receivers[peer])

    def _expect(self, peer: int, receiver: _Receiver, more: int) -> None:
        receiver.count += more
        if receiver.count:
            self.expecting.add(peer)
        else:
            self.expecting.discard(peer)

    def _fits(self, message: Message, size: int) -> None:
        if message.data.size != size:
            raise RankError(
                f"a message of tag {message.tag} from rank {message.peer} has {size} bytes instead of {message.data.size}"
            )

    def _fill(self, peer: int, sender: _Sender) -> None:
        """Copies waiting messages into free slots."""
        channel, waiting, begun = sender.channel, sender.waiting, sender.filled
        free = channel.emptied[0] + SLOTS
        while waiting and sender.filled < free:
            message = waiting[0]
            turn, part = sender.filled % SLOTS, message.data[message.moved : message.moved + SLOT]
            head = channel.heads[turn]
            head[_TAG], head[_TOTAL] = message.tag, message.data.size
            channel.slots[turn][: part.size] = part
            message.moved += part.size
            sender.filled += 1
            if message.moved == message.data.size:
                message.done = True
                waiting.popleft()
        if sender.filled > begun:
            channel.filled[0] = sender.filled
            self._parking.fence()
            self._parking.wake((peer,))
        if waiting:
            self.sending.add(peer)
        else:
            self.sending.discard(peer)

    def _empty(self, peer: int, receiver: _Receiver) -> None:
        """Copies filled slots into the expected messages, and stores the others."""
        channel = receiver.channel
        filled, released = channel.filled[0], receiver.emptied
        while receiver.emptied < filled:
            turn = receiver.emptied % SLOTS
            tag, total = channel.heads[turn][_TAG], channel.heads[turn][_TOTAL]
            message = receiver.now
            if message is None:
                message = receiver.now = self._taker(receiver, peer, tag, total)
            size = min(SLOT, total - message.moved)
            message.data[message.moved : message.moved + size] = channel.slots[turn][:size]
            message.moved += size
            receiver.emptied += 1
            if message.moved == total:
                message.done, receiver.now = True, None
                if message not in receiver.kept.get(tag, ()):
                    self._expect(peer, receiver, -1)
            if receiver.emptied - released == _BATCH:
                released = self._release(peer, receiver, released)
        if receiver.emptied > released:
            self._release(peer, receiver, released)

    def _taker(self, receiver: _Receiver, peer: int, tag: int, total: int) -> Message:
        expected = receiver.expected.get(tag)
        if expected:
            message = expected.popleft()
            self._fits(message, total)
            return message
        message = Message(self, peer, tag, np.empty(total, np.uint8))
        receiver.kept.setdefault(tag, deque()).append(message)
        return message

    def _release(self, peer: int, receiver: _Receiver, told: int) -> int:
        """Releases the emptied slots; the sender is woken only if it had filled all slots, since it may sleep only then."""
        receiver.channel.emptied[0] = receiver.emptied
        self._parking.fence()
        if receiver.channel.filled[0] - told >= SLOTS:
            self._parking.wake((peer,))
        return receiver.emptied
