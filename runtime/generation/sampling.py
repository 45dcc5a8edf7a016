"""Draws the tokens of a step: the logits stay on their ranks, and only the first candidates of each shard are communicated.

    round        every shard sends the candidates of each row to draw            an agreement, if the vocabulary is sharded
                 the rank that has the row's first shard draws                   an agreement on the tokens
    next round   for rows whose candidates were too few, with more candidates

If each row has one shard, its rank reads more candidates by itself, and the agreement on the tokens is the only one. A step in which
no request draws has no agreement. One rank draws for all, since exponentials of different processors differ in their last bits.

A draw reads the same candidates whichever other rows are drawn, so a request's tokens do not depend on other requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from partc.runtime.artifact.tensors.boxes import distinct, full_region, region
from partc.runtime.artifact.tensors.dtypes import Array

from ..artifact.port import Port
from ..communication.transport import Vector
from .changes import Drawing
from .draw import FIRST, FURTHER, NONE, Candidates, Scratch, candidate_count, candidates, draw


@dataclass(frozen=True)
class Shard:
    """A rank's shard of the logits: `size` tokens from `begin` on, of the rows from `row` on."""

    rank: int
    row: int
    begin: int
    size: int


@dataclass(frozen=True)
class LogitShards:
    """The shards of each row of a program's logits, in the order of their tokens; all rows have the same number of shards.

    `size`: the tokens of the largest shard. `vocabulary`: the tokens of a row.
    """

    of_row: Sequence[Sequence[Shard]]
    size: int
    vocabulary: int

    @classmethod
    def of(cls, port: Port) -> LogitShards:
        """The shards of an output [rows, vocabulary]."""
        shape = [int(dim) for dim in port.shape or ()]
        boxes = [(port.ranks[0], full_region(shape))]
        if port.boxes is not None:
            boxes = [(rank, region(box, shape)) for rank, box in distinct(port)]
        rows: list[list[Shard]] = [[] for _ in range(shape[0])]
        for rank, one in sorted(boxes, key=lambda pair: pair[1]):
            (row, begin), (end, _) = one.begin, one.end
            for shards in rows[row:end]:
                shards.append(Shard(rank, row, begin, one.shape[1]))
        return cls(rows, max(one.size for shards in rows for one in shards), shape[1])

    @property
    def told(self) -> int:
        """The bytes that a rank sends for a token whose first candidates are enough; only the token itself if the row is on one rank."""
        return 8 * (1 + (self.count * (1 + self.first) if self.is_sharded else 0))

    @property
    def first(self) -> int:
        """The number of candidates of a shard that a draw reads at first."""
        return min(FIRST, self.size)

    @property
    def count(self) -> int:
        """The number of shards of each row."""
        return len(self.of_row[0])

    @property
    def is_sharded(self) -> bool:
        """Whether a row is on several ranks."""
        return self.count > 1


class Draws:
    """The rows of a step whose tokens are not drawn yet; `drawing` maps each row to its token's request and number.

    `logits` maps each rank of this process to its logits, which must not change until all tokens are drawn. If each row is on one rank, the
    rows of other processes' ranks are drawn there.
    """

    def __init__(
        self,
        shards: LogitShards,
        drawing: Mapping[int, Drawing],
        logits: Mapping[int, Array],
        scratch: Scratch,
    ) -> None:
        self.shards, self._logits, self._scratch, self._further = shards, logits, scratch, 0
        self._others = [row for row in drawing if not (shards.is_sharded or self._draws(row))]
        self._pending = {row: one for row, one in drawing.items() if row not in self._others}

    def _draws(self, row: int) -> bool:
        """Whether this process draws the token of a row."""
        return self.shards.of_row[row][0].rank in self._logits

    def finish(
        self, chosen: Vector, agree: Callable[[Vector], Vector] | None = None, agreed: Vector | None = None
    ) -> None:
        """Writes the tokens into `chosen`, -1 for rows that other processes draw. An entry of `NO_TOKEN` stays: its logits are not finite.

        `agree` returns the maxima of all ranks' numbers; without it this process has all shards of its rows. `agreed`: the maxima of all
        ranks' `shard_vector()`, if they were already exchanged.
        """
        chosen[self._others] = -1
        if agree is None:
            for row, pending in self._pending.items():
                if chosen[row] < self.shards.vocabulary:
                    chosen[row] = self._alone(row, pending)
            return
        while self._pending:
            given = agree(self.shard_vector()) if agreed is None else agreed
            for place, (row, pending) in enumerate(self._pending.items()):
                if chosen[row] < self.shards.vocabulary:
                    token = self._drawn(row, place, given, pending) if self._draws(row) else None
                    chosen[row] = -1 if token is None else token
            np.copyto(chosen, agree(chosen))
            self._pending = {row: one for row, one in self._pending.items() if chosen[row] < 0}
            self._further, agreed = self._further + 1, None

    def _alone(self, row: int, drawing: Drawing) -> int:
        """Draws the token of a row whose shards are all in this process."""
        for further in itertools.count():
            found = [self._candidates(row, shard, drawing, further) for shard in self.shards.of_row[row]]
            if (token := draw(found, drawing.request, drawing.number, self._scratch)) is not None:
                return token
        raise AssertionError("of all tokens one is drawn")

    def _candidates(self, row: int, shard: Shard, drawing: Drawing, further: int) -> Candidates:
        """The candidates of a shard in this process, after the changes of its logits."""
        logits = self._logits[shard.rank][row - shard.row]
        if drawing.changes:
            changed = self._scratch.of("changed logits", shard.size, np.float32)
            np.copyto(changed, logits, casting="same_kind")
            logits = changed
        for one in drawing.changes:
            one.change(logits, shard.begin, drawing.tokens)
        count = candidate_count(drawing.request, further, shard.size)
        return candidates(logits, shard.begin, count, drawing.request, self._scratch)

    def shard_vector(self) -> Vector:
        """Returns this process's message about its shards: for each row to draw, and each of its shards, the sum of weights and the keys of
        candidates; `NONE` for other processes' shards. The message has one of a few sizes, whichever rows are drawn.
        """
        words = np.full(self._words, NONE, np.int64)
        parts = self._parts(words)
        for place, (row, drawing) in enumerate(self._pending.items()):
            for at, shard in enumerate(self.shards.of_row[row]):
                if shard.rank in self._logits:
                    one = self._candidates(row, shard, drawing, self._further)
                    parts[place, at, :1].view(np.float64)[0] = one.weight
                    parts[place, at, 1 : 1 + one.keys.size] = one.keys
        return words

    @property
    def _words(self) -> int:
        """The number of integers in a message: for rows rounded up to a power of two, and the most candidates that a request may need."""
        most, width = (
            max(candidate_count(one.request, self._further, self.shards.size) for one in self._pending.values()),
            FIRST,
        )
        while width < most:
            width *= FURTHER
        return self._rows * self.shards.count * (1 + min(width, self.shards.size))

    @property
    def _rows(self) -> int:
        """The number of rows that a message has room for: the least power of two that is enough."""
        return 1 << (len(self._pending) - 1).bit_length()

    def _parts(self, told: Vector) -> Vector:
        """Reshapes a message to [row's place, shard, number's place]."""
        return told.reshape(self._rows, self.shards.count, -1)

    def _drawn(self, row: int, place: int, given: Vector, drawing: Drawing) -> int | None:
        """Draws the token of a row from all ranks' messages; None where its candidates are too few."""
        found, request = [], drawing.request
        for shard, part in zip(self.shards.of_row[row], self._parts(given)[place], strict=True):
            count = candidate_count(request, self._further, shard.size)
            found.append(Candidates(part[1 : 1 + count], float(part[:1].view(np.float64)[0]), count == shard.size))
        return draw(found, request, drawing.number, self._scratch)
