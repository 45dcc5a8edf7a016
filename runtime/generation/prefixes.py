"""Beginnings of prompts in the caches of slots, whose entries another prompt with the same beginning copies.

A prompt shares whole chunks that a prefill has read: alone it would be read in the same chunks by the same program, so the entries have the
bits that it would compute. A sequence's own tokens come from steps of a decode, whose entries may have other bits: they are read again when
they occur in a prompt. A slot keeps its entries when its sequence ends, until another sequence takes the slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ADAPTER_BITS = 32
"""The bit from which a shared token has the place of the prompt's adapter: under another adapter a token has other entries."""


@dataclass(frozen=True)
class Copy:
    """A copy of the first `count` entries of the slot `source` into the slot `target`, in all caches."""

    source: int
    target: int
    count: int


class Prefixes:
    """The prompt in each slot's caches; `counts` has the number of its tokens that can be shared: whole chunks."""

    def __init__(self, slots: int, chunk: int, shares: bool) -> None:
        self._chunk = chunk
        self._shares = shares
        self._prompts: list[tuple[int, ...]] = [()] * slots
        self.counts = [0] * slots

    def common(self, slot: int, prompt: Sequence[int]) -> int:
        """Returns the number of a prompt's tokens that a slot has, in whole chunks; its last token is always read, for its logits."""
        own, other, chunk = self._prompts[slot], tuple(prompt), self._chunk
        most, count = min(self.counts[slot], (len(other) - 1) // chunk * chunk), 0
        while count < most and own[count : count + chunk] == other[count : count + chunk]:
            count += chunk
        return count

    def begin(self, slot: int, prompt: Sequence[int]) -> int:
        """Gives a slot to a sequence with this prompt; returns the number of its tokens that are already there."""
        count = self.common(slot, prompt)
        self._prompts[slot], self.counts[slot] = tuple(prompt) if self._shares else (), count
        return count

    def copied(self, slot: int, prompt: Sequence[int], others: Iterable[int]) -> Copy | None:
        """Returns the copy that gives a slot most of its prompt's tokens; None if no other slot has more of them than it has."""
        if not self._shares:
            return None
        count, source = max(((self.common(other, prompt), -other) for other in others), default=(0, 0))
        if count <= self.counts[slot]:
            return None
        self.counts[slot] = count
        return Copy(-source, slot, count)

    def read(self, slot: int, position: int) -> None:
        """Records that a slot has `position` tokens of its sequence."""
        self.counts[slot] = min(position, len(self._prompts[slot])) // self._chunk * self._chunk

    def forget_adapter(self, place: int) -> None:
        """Forgets the entries made under an adapter's place, since its weights have changed."""
        for slot, prompt in enumerate(self._prompts):
            if prompt and prompt[0] >> ADAPTER_BITS == place:
                self.forget(slot)

    def forget(self, slot: int) -> None:
        """Forgets a slot's entries."""
        self._prompts[slot], self.counts[slot] = (), 0
