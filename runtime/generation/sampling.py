"""The tokens that a step draws: its logits stay in place, and only the first candidates of each shard are communicated.

    round        every shard tells the candidates of each row that is drawn      an agreement, where the vocabulary is cut
                 the rank that has the row's first shard draws                   an agreement on the tokens
    next round   of rows for which these were too few, with more candidates

Where each row has one shard its rank looks at more candidates by itself, and the agreement on the tokens is the only one. A step in which
no request draws has none. One rank draws, and not each for itself: exponentials of different processors differ in their last bits.

A draw looks at the same candidates whatever is drawn beside it, so a request's tokens are the same in any company.
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
    """The logits of some of the vocabulary that a rank has: of the tokens from `begin` on, as many as `size`, of the rows from `row` on."""

    rank: int
    row: int
    begin: int
    size: int


@dataclass(frozen=True)
class LogitShards:
    """For each row of a program's logits, its shards, in the order of their tokens; every row has the same number. `size`: of the
    largest; `vocabulary`: of all of a row together.
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
        """The bytes that a rank tells for a token for which the first candidates are enough; of a row on one rank the token alone."""
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
        """Whether a row lies on several ranks."""
        return self.count > 1


class Draws:
    """The rows of a step whose tokens are not drawn yet, by row the token's request and number.

    `logits`: by rank of this process what it has of them, which must stay until all is drawn. Of rows that lie on one rank each, those of
    other ranks are left to them.
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
        self, chosen: Vector, agree: Callable[[Vector], Vector] | None = None, told: Vector | None = None
    ) -> None:
        """Puts the tokens into `chosen`, and -1 for rows that others draw. What is not a token there stays: those logits are not finite.

        `agree` gives the maxima of all ranks' numbers; without it this process has all shards of its rows. `shard_vector`: the maxima of
        what all have told, where that is over.
        """
        chosen[self._others] = -1
        if agree is None:
            for row, one in self._pending.items():
                if chosen[row] < self.shards.vocabulary:
                    chosen[row] = self._alone(row, one)
            return
        while self._pending:
            given = agree(self.shard_vector()) if told is None else told
            for place, (row, one) in enumerate(self._pending.items()):
                if chosen[row] < self.shards.vocabulary:
                    token = self._drawn(row, place, given, one) if self._draws(row) else None
                    chosen[row] = -1 if token is None else token
            np.copyto(chosen, agree(chosen))
            self._pending = {row: one for row, one in self._pending.items() if chosen[row] < 0}
            self._further, told = self._further + 1, None

    def _alone(self, row: int, drawing: Drawing) -> int:
        """The token of a row whose shards are all here."""
        for further in itertools.count():
            found = [self._candidates(row, shard, drawing, further) for shard in self.shards.of_row[row]]
            if (token := draw(found, drawing.request, drawing.number, self._scratch)) is not None:
                return token
        raise AssertionError("of all tokens one is drawn")

    def _candidates(self, row: int, shard: Shard, drawing: Drawing, further: int) -> Candidates:
        """The candidates of a shard that is here, after the changes of its logits."""
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
        """This process's message about its shards: for each row that is drawn, for each of its shards, the sum of weights, and the keys
        of candidates; `NONE` for other ranks' shards. Its size is one of few, whatever is drawn.
        """
        told = np.full(self._words, NONE, np.int64)
        parts = self._parts(told)
        for place, (row, drawing) in enumerate(self._pending.items()):
            for at, shard in enumerate(self.shards.of_row[row]):
                if shard.rank in self._logits:
                    one = self._candidates(row, shard, drawing, self._further)
                    parts[place, at, :1].view(np.float64)[0] = one.weight
                    parts[place, at, 1 : 1 + one.keys.size] = one.keys
        return told

    @property
    def _words(self) -> int:
        """The count of numbers in a message: for a power of two of rows, and the most candidates that some request may need."""
        most, width = (
            max(candidate_count(one.request, self._further, self.shards.size) for one in self._pending.values()),
            FIRST,
        )
        while width < most:
            width *= FURTHER
        return self._rows * self.shards.count * (1 + min(width, self.shards.size))

    @property
    def _rows(self) -> int:
        """For how many rows there is room in what is told: the power of two that is enough."""
        return 1 << (len(self._pending) - 1).bit_length()

    def _parts(self, told: Vector) -> Vector:
        """The numbers of all messages, by the row's place, shard, and the number's place."""
        return told.reshape(self._rows, self.shards.count, -1)

    def _drawn(self, row: int, place: int, given: Vector, drawing: Drawing) -> int | None:
        """The token of a row, of what all have told; None where its candidates are too few."""
        found, request = [], drawing.request
        for shard, part in zip(self.shards.of_row[row], self._parts(given)[place], strict=True):
            count = candidate_count(request, self._further, shard.size)
            found.append(Candidates(part[1 : 1 + count], float(part[:1].view(np.float64)[0]), count == shard.size))
        return draw(found, request, drawing.number, self._scratch)
