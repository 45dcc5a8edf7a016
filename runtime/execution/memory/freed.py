"""Fills memory that no value uses with numbers that spoil every computation, if `PARTC_FILL_FREED` is set: for tests and debugging.

Every two bytes are 0x7fff: NaN as a float of 16, 32 or 64 bits, and beyond any index as an integer of that width. An arena is filled before
each step, and the place of a value after its last reader, by the lifetimes that assign the place to the next value: a read that is too
early, too late, or of memory that was never written then gives no plausible number. The memory of a message or collective under way is
filled only after the wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Bytes
from partc.runtime.artifact.tensors.tensor import Tensor

from ...devices.device_memory import Placed
from ...program.memory_plan import Lifetime

VARIABLE = "PARTC_FILL_FREED"
_PAIR = 0x7FFF


def fills_freed() -> bool:
    """Whether the environment asks to fill freed memory."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def fill(place: Placed) -> None:
    """Fills a place, so that its values are unusable."""
    if isinstance(place, Tensor):
        pairs = place.data[: place.data.size // 2 * 2].view("<u2")
        pairs[...] = _PAIR
        place.data[2 * pairs.size :] = _PAIR & 0xFF
    else:
        place.memory.write(place.pointer, pattern(place.size))


def pattern(size: int) -> Bytes:
    """Returns `size` bytes of NaN."""
    return np.full((size + 1) // 2, _PAIR, "<u2").view(np.uint8)[:size]


class PoisonFreed:
    """The places that are free after each action of a step plan; `places` maps values to memory within the `arenas`."""

    def __init__(self, lives: Sequence[Lifetime], places: Mapping[str, Placed], arenas: Sequence[Placed]) -> None:
        self.places, self.arenas = places, arenas
        self._leaving = {life.name: {*life.sends} for life in lives}
        self._dying: dict[int, list[Lifetime]] = {}
        self._sent: dict[int, list[Lifetime]] = {}
        for life in lives:
            if life.bytes:
                self._dying.setdefault(life.died, []).append(life)
                for send in life.sends:
                    self._sent.setdefault(send, []).append(life)

    def renew(self) -> None:
        """Fills all arenas, when a step begins."""
        for arena in self.arenas:
            fill(arena)

    def after_step(self, index: int) -> Iterator[tuple[str, Placed]]:
        """Yields the values that nothing needs after a step, with their places."""
        yield from (
            (life.name, self.places[life.name]) for life in self._dying.get(index, ()) if not self._leaving[life.name]
        )

    def after_send(self, send: int, now: int) -> Iterator[tuple[str, Placed]]:
        """Yields the values that are free once a step's sends have left, with their places; the step `now` waits for the sends."""
        for life in self._sent.get(send, ()):
            leaving = self._leaving[life.name]
            leaving.discard(send)
            if not leaving and life.died < now:
                yield life.name, self.places[life.name]
