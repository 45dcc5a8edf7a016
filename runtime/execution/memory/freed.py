"""Memory that no value has is filled with what no computation survives, if `PARTC_FILL_FREED` is set: for tests and to hunt a fault.

Every two bytes are 0x7fff: NaN as a float of 16, 32 or 64 bits, and beyond any index as a whole number of as many. An arena is filled
before each step, and the place of a value when nothing reads it any more, by the lifetimes that give it to the next one: what is read too
early, too late, or where nothing was written is then no plausible number. What is on its way is not freed before the wait for it.
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
    """Whether the environment asks for it."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def fill(place: Placed) -> None:
    """Makes a place unusable."""
    if isinstance(place, Tensor):
        pairs = place.data[: place.data.size // 2 * 2].view("<u2")
        pairs[...] = _PAIR
        place.data[2 * pairs.size :] = _PAIR & 0xFF
    else:
        place.memory.write(place.pointer, pattern(place.size))


def pattern(size: int) -> Bytes:
    """So many bytes of NaN."""
    return np.full((size + 1) // 2, _PAIR, "<u2").view(np.uint8)[:size]


class PoisonFreed:
    """The places that are free after each action of a step plan; `places` by value, and the `arenas` in which they are."""

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
        """Fills all arenas: a step begins."""
        for arena in self.arenas:
            fill(arena)

    def after_step(self, index: int) -> Iterator[tuple[str, Placed]]:
        """The values that nothing needs after a step, with their places."""
        yield from (
            (life.name, self.places[life.name]) for life in self._dying.get(index, ()) if not self._leaving[life.name]
        )

    def after_send(self, send: int, now: int) -> Iterator[tuple[str, Placed]]:
        """The values that are free once a step's sends have left, with their places; the step `now` waits for the sends."""
        for life in self._sent.get(send, ()):
            leaving = self._leaving[life.name]
            leaving.discard(send)
            if not leaving and life.died < now:
                yield life.name, self.places[life.name]
