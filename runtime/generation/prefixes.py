"""Begins of prompts that lie in the caches of slots, so that another prompt with the same begin copies their entries.

A prompt shares whole chunks that a prefill has read: by itself it would be read in the same chunks by the same program, so the entries have
the bits that it would compute. A sequence's own tokens come from steps of a decode, whose entries may have other bits: they are read
again when they come back in a prompt. A slot keeps its entries when its sequence ends, until another sequence takes the slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ADAPTER_BITS = 32
"""From this bit on a token that prompts share has the place of their adapter: under another one a token has other entries."""


@dataclass(frozen=True)
class Copy:
    """The first `count` entries of the slot `source` are copied into the slot `target`, in all caches."""

    source: int
    target: int
    count: int


class Prefixes:
    """By slot the prompt that its caches have, and in `counts` how many of its tokens can be shared: whole chunks."""

    def __init__(self, slots: int, chunk: int, shares: bool) -> None:
        self._chunk = chunk
        self._shares = shares
        self._prompts: list[tuple[int, ...]] = [()] * slots
        self.counts = [0] * slots

    def common(self, slot: int, prompt: Sequence[int]) -> int:
        """How many of a prompt's tokens a slot has, in whole chunks; its last token is read in any case, for its logits."""
        own, other, chunk = self._prompts[slot], tuple(prompt), self._chunk
        most, count = min(self.counts[slot], (len(other) - 1) // chunk * chunk), 0
        while count < most and own[count : count + chunk] == other[count : count + chunk]:
            count += chunk
        return count

    def begin(self, slot: int, prompt: Sequence[int]) -> int:
        """A sequence with this prompt takes a slot; how many of its tokens are there already."""
        count = self.common(slot, prompt)
        self._prompts[slot], self.counts[slot] = tuple(prompt) if self._shares else (), count
        return count

    def copied(self, slot: int, prompt: Sequence[int], others: Iterable[int]) -> Copy | None:
        """The copy that gives a slot most of its prompt's tokens; None where no other slot has more of them than it has."""
        if not self._shares:
            return None
        count, source = max(((self.common(other, prompt), -other) for other in others), default=(0, 0))
        if count <= self.counts[slot]:
            return None
        self.counts[slot] = count
        return Copy(-source, slot, count)

    def read(self, slot: int, position: int) -> None:
        """A slot has as many tokens of its sequence."""
        self.counts[slot] = min(position, len(self._prompts[slot])) // self._chunk * self._chunk

    def forget_adapter(self, place: int) -> None:
        """The entries that an adapter's weights have made are no longer those that its place makes."""
        for slot, prompt in enumerate(self._prompts):
            if prompt and prompt[0] >> ADAPTER_BITS == place:
                self.forget(slot)

    def forget(self, slot: int) -> None:
        """A slot's entries are no longer there."""
        self._prompts[slot], self.counts[slot] = (), 0
