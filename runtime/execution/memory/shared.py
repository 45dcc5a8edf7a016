"""The memory that a rank shares with the others of its host, as if all ranks of a job were on one: slots of messages, rooms of collectives.

A part takes memory once it is written to, and counts on each rank that reads or writes it. Slots and rooms are used in turn, so that after
some steps each has held the largest message, or block of a collective, that goes through it:

    messages       by peer and direction SLOTS times the largest message, at most SLOT bytes each
    collectives    by list of ranks ROOMS times the largest block in the room of each, at most ROOM bytes each; of an AllReduce among three
                   ranks and more also in the room in common
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from mmap import PAGESIZE
from typing import TYPE_CHECKING, TypeVar

from ...artifact.format import ALL_REDUCE
from ...artifact.tensors.dtypes import dense
from ...communication.host.messages import SLOT, SLOTS
from ...communication.host.rounds import ROOM, ROOMS
from ...program.steps import LookUp, PostRecv, Send, StartCollective
from .layout import at_sizes

if TYPE_CHECKING:
    from ...program.rank_file import RankFile

_SENDS, _RECEIVES = "sends", "receives"
_Key = TypeVar("_Key")


def shared_bytes(file: RankFile, sizes: Mapping[str, int]) -> int:
    """Bytes of the slots and rooms that a rank of this file touches; what only a run can size fills them."""
    slots: dict[tuple[int, str], int] = {}
    rooms: dict[tuple[int, ...], int] = {}
    for step in file.steps:
        if isinstance(step, Send | PostRecv):
            record = file.transfers[step.tag]
            bytes = _bytes(file, sizes, record.type, record.shape, SLOT)
            _raise(slots, [(step.peer, _SENDS if isinstance(step, Send) else _RECEIVES)], bytes)
        elif isinstance(step, LookUp):
            _raise(slots, _directions(file.rank, step), SLOT)
        elif isinstance(step, StartCollective):
            call = file.collectives[step.call.tag]
            bytes = _bytes(file, sizes, call.type, call.shape, ROOM)
            if step.call.kind.boxes:  # each is a message of a part of the input
                _raise(slots, _directions(file.rank, step), bytes)
            else:
                _raise(rooms, [step.ranks], bytes)
    common = {step.ranks for step in file.steps if isinstance(step, StartCollective) and step.call.op == ALL_REDUCE}
    many = sum(
        ROOMS * (len(ranks) + (ranks in common and len(ranks) > 2)) * _pages(min(bytes, ROOM))
        for ranks, bytes in rooms.items()
        if len(ranks) > 1
    )
    return many + sum(SLOTS * _pages(min(bytes, SLOT)) for bytes in slots.values())


def _raise(most: dict[_Key, int], keys: Iterable[_Key], bytes: int) -> None:
    """Makes each at least so many bytes."""
    for key in keys:
        most[key] = max(most.get(key, 0), bytes)


def _directions(rank: int, step: LookUp | StartCollective) -> Iterator[tuple[int, str]]:
    """Both ways between a rank and each other one of a lookup or an exchange."""
    for peer in step.ranks:
        if peer != rank:
            yield peer, _SENDS
            yield peer, _RECEIVES


def _bytes(file: RankFile, sizes: Mapping[str, int], text: str, shape: list[int | str] | None, most: int) -> int:
    """Bytes of a value; `most` where only a run tells."""
    dtype = dense(text)
    if dtype is None or shape is None:
        return most
    return dtype.bytes_of(at_sizes(shape, file.manifest.symbols, sizes))


def _pages(bytes: int) -> int:
    return -(-bytes // PAGESIZE) * PAGESIZE
