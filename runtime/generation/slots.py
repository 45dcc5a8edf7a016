"""The sequences in the slots, and the inputs of each step: the same on all ranks, since they depend only on requests and tokens.

A step is either a prefill, of `chunk` tokens of a prompt that is not read yet, or a decode, of one token of each running sequence. While
there are sequences of both kinds, prefills of at most `chunk` tokens in all come between two decodes: prompts delay the others by one chunk
a token, however many there are, and short prompts that arrive together are read before the next decode. Prompts are read one after the
other, in the order of their requests; if slots are in several runs, one of each run in a step.

In a model with an encoder a sequence is encoded before its prompt is read, by a step of its own (`encode`), which like a chunk takes one
slot of each run. It writes all of a slot's encoder caches: a row without a part in it encodes its slot's input again, which changes
nothing.

A prompt whose tokens are scored is read by decodes, a token a step, together with the running sequences: chunks only have the logits of
their last token. So are all prompts of a model with states, which each token replaces.

A row without a part in a step gets its slot's position: the step writes after all entries of the slot that are read, and the slot's next
step writes there again. The position of a free slot is the end of the tokens that another prompt may share.

If slots take turns in several groups, a step has those of one group, and may run while steps of other groups do (`turns.py`): a request
takes a slot of the group with the fewest sequences.

A step uses the program with the fewest rows that contains all of its sequences: a decode of the slots in use, which are the first free
ones. The end of a prompt is read by the narrow prefills that cost the least together: 20 tokens by those of 16 and of 4, not that of 64.

In a plan with drafts (`drafts.py`) a step that is not a prefill has the last token of one sequence of each run and the drafts after it; the
sequences take turns. Of its results those count whose drafts are the results before them:

    tokens     7   3   9   4        the last token, and three drafts
    chosen     3   9   5   .        3, 9 and 5 are the next tokens: 7 and the drafts 3, 9 are entries of the caches from now on

Entries of wrong drafts lie after the position, where the next step writes.

The first chunks of a prompt that are in the caches of a slot are not read again, but copied from there (`prefixes.py`).

Requests join and are cancelled between steps; each has a number, by which its tokens are identified:

    slots.admit(7, Request([1, 306]))       # it waits for a slot
    while (step := slots.next()) is not None:
        for token in slots.take(step, chosen_by(step)): ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from partc.runtime.artifact.tensors.dtypes import Array, dense

from ..artifact.generation import DECODE, DRAFT, ENCODE, PREFILL, GenerationRecord, narrow
from .changes import Drawing, LogitChange, changes_of, depend_on_number
from .drafts import Drafts
from .prefixes import ADAPTER_BITS, Copy, Prefixes
from .request import Finish, NewToken, Request, TokenScore

_PREFILLS = 16
"""The most prefills between two decodes: each reads all weights, however few tokens it has."""
_WEIGHTS = 16
"""The number of tokens whose products take about as long as the weights take to be read from a host's memory."""
NO_SCORES: Mapping[int, TokenScore] = {}
Pooled: TypeAlias = npt.NDArray[np.float64]
NOTHING_POOLED: Mapping[int, Pooled] = {}


@dataclass(eq=False)
class _Sequence:
    """A request in a slot: `position` of its tokens are in the caches. `in_chunks`: whether its prompt is read in chunks."""

    number: int
    request: Request
    in_chunks: bool
    changes: Sequence[LogitChange] = ()
    tokens: list[int] = field(default_factory=list)
    position: int = 0
    cached: int = 0
    encoded: bool = False
    adapter: int = 0
    pooled: Pooled | None = None
    """The pooled inputs of the head so far, if it asks for an embedding."""
    drafts: Drafts | None = None
    turn: int = 0
    """The number of the last step of drafts that it was in."""

    @property
    def unread(self) -> int:
        """The number of prompt tokens that no step has read."""
        return max(len(self.request.prompt) - self.position, 0)

    @property
    def shared(self) -> Sequence[int]:
        """The tokens that it shares with other prompts: none if they are read in steps of a decode, or for an embedding."""
        if not self.in_chunks or self.request.embeds:
            return ()
        if not self.adapter:
            return self.request.prompt
        return [token + (self.adapter << ADAPTER_BITS) for token in self.request.prompt]

    @property
    def is_read(self) -> bool:
        """Whether its next step reads a chunk of its prompt, or encodes it."""
        return bool(self.unread) and (self.in_chunks or not self.encoded)

    def pool(self, more: Pooled, pooling: str) -> None:
        """Adds the head's input for its next tokens."""
        self.pooled = more if pooling == "last" or self.pooled is None else self.pooled + more

    @property
    def embedding(self) -> Array:
        """The embedding of its prompt, of length 1, float32."""
        assert self.pooled is not None
        whole: Pooled = self.pooled / (float(np.linalg.norm(self.pooled)) or 1.0)
        return whole.astype(np.float32)

    @property
    def last(self) -> int:
        """The token that its next decode reads."""
        return self.request.prompt[self.position] if self.unread else self.tokens[-1]


@dataclass(frozen=True)
class Step:
    """The inputs of a step: `tokens` [rows, n], and for each row the number of valid ones, and the number of earlier tokens.

    `scored_tokens`: the numbers [rows, n] of each row's tokens that are scored, in a plan with drafts; a row has n results, else one.
    `program`: the name of the program that runs it. `slots`: each row's slot; None for a decode whose rows are all slots of its `group`.
    `taking`: maps each row with a part to its slot, the number of its tokens, and its sequence. `encoded`: the encoder's input for each row
    of an encode; None for another step. `lengths`: each row's number of entries in its encoder's input. `copies`: the copies before the
    step. `adapters`: the place of each row's adapter, 0 for none.
    """

    tokens: Array
    count: Array
    position: Array
    taking: Mapping[int, tuple[int, int, _Sequence]]
    program: str
    slots: Sequence[int] | None = None
    group: int = 0
    lengths: Array | None = None
    encoded: Array | None = None
    copies: Sequence[Copy] = ()
    adapters: Array = field(default_factory=partial(np.zeros, 0, np.int64))
    scored_tokens: Array = field(default_factory=partial(np.zeros, (0, 1), np.int64))

    @property
    def results(self) -> int:
        """The number of its results."""
        return len(self.tokens) * self._of_row

    @property
    def _of_row(self) -> int:
        """The number of results of each row."""
        return int(self.scored_tokens.shape[1])

    def valid(self, row: int, chosen: Sequence[int]) -> range:
        """Returns the places of a row's results that count: the first, and each one after a draft that is the result before it."""
        begin, (_, count, _) = row * self._of_row, self.taking[row]
        end = begin + 1
        while end < begin + min(count, self._of_row) and chosen[end - 1] == self.tokens[row, end - begin]:
            end += 1
        return range(begin, end)

    def slots_of(self, chosen: Sequence[int], least: int) -> list[int]:
        """Returns the slots of which a chosen number is at least `least`."""
        return [
            slot
            for row, (slot, _, _) in self.taking.items()
            if any(chosen[place] >= least for place in self.valid(row, chosen))
        ]

    def drawing(self) -> Mapping[int, Drawing]:
        """Maps the place of each result that is drawn to the drawing; called before the step's tokens are taken.

        A result after drafts is drawn as if these were the answer's tokens; if they are not, it does not count.
        """
        drawings = dict[int, Drawing]()
        for row, (_, count, one) in self.taking.items():
            if (one.request.temperature or one.changes) and count >= one.unread:
                for draft in range(min(count, self._of_row)):
                    drafts = [] if draft == 0 else self.tokens[row, 1 : draft + 1].tolist()
                    tokens = [*one.tokens, *drafts] if drafts else one.tokens
                    drawings[row * self._of_row + draft] = Drawing(one.request, tokens, one.changes)
        return drawings

    @property
    def has_scores(self) -> bool:
        """Whether any of its sequences has scores."""
        return any(one.request.logprobs is not None for _, _, one in self.taking.values())

    @property
    def embedding_rows(self) -> list[int]:
        """The rows whose sequences ask for an embedding."""
        return [row for row, (_, _, one) in self.taking.items() if one.request.embeds and self.encoded is None]

    def scored(self, chosen: Sequence[int], vocabulary: int) -> dict[int, tuple[int, int]]:
        """Maps the place of each result with a score to the scored token, and to the number of likeliest tokens listed with it.

        The token is the chosen one, or that of a prompt.
        """
        scored_rows = dict[int, tuple[int, int]]()
        for row, (_, count, sequence) in self.taking.items():
            for place in self.valid(row, chosen):
                if (many := sequence.request.logprobs) is None or chosen[place] >= vocabulary:
                    break
                if (left := sequence.unread - count) > 0 and sequence.request.scores_prompt:
                    scored_rows[place] = sequence.request.prompt[-left], many
                elif left <= 0 and sequence.request.max_tokens:
                    scored_rows[place] = chosen[place], many
        return scored_rows


class Slots:
    """The sequences of an artifact's slots, and the waiting requests, in the order of their arrival.

    `least_rows`: the least number of slots of each run in a decode. `on_host`: whether all caches are there; a device takes hardly longer
    for a wide prefill than for a narrow one. `shares`: whether prompts share entries of slots; on a device and with an encoder none
    does.
    """

    def __init__(
        self, record: GenerationRecord, least_rows: int = 1, shares: bool = True, on_host: bool = True
    ) -> None:
        self.record = record
        self._weights = _WEIGHTS if on_host else record.chunk
        self._prefixes = Prefixes(record.slots, record.chunk, shares and on_host and record.encoder is None)
        self._ends = [0] * record.slots
        """The time at which each slot's last sequence ended, as a count of ends."""
        self._rows = [rows for rows in record.narrow_rows if rows >= least_rows]  # a rank may have one run alone
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence | None] = [None] * record.slots
        self._stop = frozenset(record.stop)
        self._of_group = [record.slots_of(group) for group in range(record.groups)]
        self._read = [0] * record.groups
        """The number of tokens that prefills of each group have read since its last decode; an encode counts as a whole chunk."""
        self._decoded: dict[tuple[int, int], tuple[Array, ...]] = {}
        """Maps a group and number of slots to the tokens, count, position, lengths and adapters of decodes: arrays that stay bound."""
        self._turn = 0
        self.drafted = self.accepted = 0
        """The number of drafts in all steps so far, and of those that were right."""

    @property
    def running(self) -> set[int]:
        """The numbers of the requests that have a slot."""
        return {one.number for one in self._running if one is not None}

    @property
    def used(self) -> int:
        """The number of slots that have a sequence."""
        return len(self._running) - self._running.count(None)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a slot."""
        return len(self._waiting)

    def admit(self, number: int, request: Request) -> None:
        """Adds a request that takes the next free slot, after those that wait; between two steps. Its number is above all earlier ones."""
        request = request.begun(self.record)
        changes = changes_of(request, self.record)
        place = self.record.adapters.index(request.adapter) + 1 if request.adapter else 0
        in_chunks = not (request.scores_prompt or self.record.states)
        encoded = self.record.encoder is None
        self._waiting.append(_Sequence(number, request, in_chunks, changes, encoded=encoded, adapter=place))

    def free_place(self) -> int:
        """Returns the first place of an adapter without a name and without sequences; 0 if there is none."""
        taken = {one.adapter for one in (*self._waiting, *self._running) if one is not None}
        places = (place for place, name in enumerate(self.record.adapters, 1) if not name and place not in taken)
        return next(places, 0)

    def rename(self, place: int, name: str) -> None:
        """Sets the name of the adapter at a place, empty for none; prompts no longer share entries made there before."""
        names = [name if at == place else other for at, other in enumerate(self.record.adapters, 1)]
        self.record = self.record.model_copy(update={"adapters": names})
        if name:
            self._prefixes.forget_adapter(place)

    def cancel(self, number: int) -> None:
        """Removes a request from its slot, or from those that wait, if it has not ended; between two steps."""
        self._waiting = deque(one for one in self._waiting if one.number != number)
        for slot, one in enumerate(self._running):
            if one is not None and one.number == number:
                self._end(slot)

    def next(self, group: int = 0) -> Step | None:
        """Returns the next step of a group whose last step has ended; None if the group has no request left."""
        while self._waiting and (slot := self._free(self._waiting[0].shared)) is not None:
            self._running[slot] = first = self._waiting.popleft()
            first.position = first.cached = self._prefixes.begin(slot, first.shared)
        reading, making = dict[int, _Sequence](), dict[int, _Sequence]()
        for slot in self._of_group[group]:
            if (one := self._running[slot]) is not None:
                (reading if one.is_read else making)[slot] = one
        if not reading and not making:
            return None
        first_read = min(reading.values(), key=lambda one: one.number, default=None)
        encodes = first_read is not None and not first_read.encoded
        reading = {slot: one for slot, one in reading.items() if one.encoded != encodes}
        if reading:
            chunk = self.record.chunk
            width = chunk if encodes else max(self._prefill_size(reading, group)[1], -(-chunk // _PREFILLS))
            if not making or self._read[group] + width <= chunk:
                self._read[group] += width
                return self._encode(reading, group) if encodes else self._prefill(reading, group)
        self._read[group] = 0
        return self._decode(making, group) if self.record.draft is None else self._draft(making, group)

    def idle_steps(self) -> Iterator[Step]:
        """Yields a step of each decode and each narrow prefill of each group in which no row has a part: it changes nothing."""
        for group, slots in enumerate(self._of_group):
            none = np.zeros(len(slots), np.int64)
            scored = none[:, None]
            yield Step(
                scored, none, none, {}, DECODE, None, group, self._lengths(slots), adapters=none, scored_tokens=scored
            )
            of_run = len(slots) // self.record.runs
            drafts = [] if self.record.draft is None else self.record.draft.sizes
            for kind, sizes in ((PREFILL, self.record.narrow_chunks), (DECODE, self._rows), (DRAFT, drafts)):
                for size in sizes:
                    rows, width = (size, 1) if kind == DECODE else (1, size)
                    window = [slot for begin in range(0, len(slots), of_run) for slot in slots[begin : begin + rows]]
                    none = np.zeros(len(window), np.int64)
                    tokens = np.zeros((len(window), width), np.int64)
                    named, lengths = narrow(kind, size), self._lengths(window)
                    scored = tokens if kind == DRAFT else none[:, None]
                    yield Step(
                        tokens, none, none, {}, named, window, group, lengths, adapters=none, scored_tokens=scored
                    )

    def _free(self, prompt: Sequence[int]) -> int | None:
        """Returns the slot for a prompt, in the group with the fewest sequences; None if all are taken.

        It is a slot with which a decode has the fewest rows; among these the one that has most of the prompt, then the one whose last
        sequence ended first.
        """
        used = [sum(self._running[slot] is not None for slot in slots) for slots in self._of_group]
        for _, slots in sorted(zip(used, self._of_group, strict=True), key=lambda pair: pair[0]):
            if free := [slot for slot in slots if self._running[slot] is None]:
                rows = [self._rows_with(slot, slots) for slot in free]
                best = [slot for slot, count in zip(free, rows, strict=True) if count == min(rows)]
                return min(best, key=lambda slot: (-self._prefixes.common(slot, prompt), self._ends[slot], slot))
        return None

    def _rows_with(self, slot: int, slots: Sequence[int]) -> int:
        """Returns the rows of each run in a decode of the slots in use and this one; `slots`: those of its group."""
        size = self.record.slots // self.record.runs
        run = [other for other in slots if other // size == slot // size]
        places = [at for at, other in enumerate(run) if other == slot or self._running[other] is not None]
        span = places[-1] - places[0] + 1
        return next((rows for rows in self._rows if rows >= span), len(run))

    def _end(self, slot: int) -> None:
        """Frees a slot."""
        self._running[slot] = None
        self._ends[slot] = max(self._ends) + 1

    def take(
        self,
        step: Step,
        chosen: Sequence[int],
        scores: Mapping[int, TokenScore] = NO_SCORES,
        pooled: Mapping[int, Pooled] = NOTHING_POOLED,
    ) -> list[NewToken]:
        """Records the results of a step and returns its tokens; `chosen` has a number for each, meaningless for rows without a part.

        `scores`: the scores of some results. `pooled`: maps each row that asks for an embedding to the head's input for its tokens,
        float64.
        """
        tokens = list[NewToken]()
        for row, (slot, count, sequence) in step.taking.items():
            valid = step.valid(row, chosen) if step.encoded is None else range(0)
            broken = any(chosen[place] >= self.record.vocabulary for place in valid)
            if broken:  # its entries become zeros
                self._prefixes.forget(slot)
            if (other := self._running[slot]) is not sequence:  # it was cancelled while the step was under way
                if broken and other is not None:
                    other.position = other.cached = self._prefixes.begin(slot, other.shared)
                continue
            if step.encoded is not None:
                sequence.encoded = True
                continue
            if self.record.draft is not None and step.scored_tokens.shape[1] > 1:
                self.drafted, self.accepted, count = (
                    self.drafted + count - 1,
                    self.accepted + len(valid) - 1,
                    len(valid),
                )
            sequence.position += count
            if not broken:
                self._prefixes.read(slot, sequence.position)
            token = min(int(chosen[valid.start]), self.record.vocabulary)
            finish: Finish = ""
            if row in pooled and self.record.embedding is not None and token < self.record.vocabulary:
                sequence.pool(pooled[row], self.record.embedding.pooling)
                if not sequence.unread:
                    self._end(slot)
                    last = sequence.request.prompt[-1]
                    tokens.append(NewToken(sequence.number, last, "stop", of_prompt=True, embedding=sequence.embedding))
                continue
            if token < self.record.vocabulary and (sequence.unread or not sequence.request.max_tokens):
                if sequence.request.scores_prompt:
                    finish = "" if sequence.request.max_tokens or sequence.unread > 1 else "length"
                    token = sequence.request.prompt[-max(sequence.unread, 1)]
                    tokens.append(
                        NewToken(sequence.number, token, finish, score=scores.get(valid.start), of_prompt=True)
                    )
                if finish:
                    self._end(slot)
                continue
            for place in valid:
                token = min(int(chosen[place]), self.record.vocabulary)
                sequence.tokens.append(token)
                if token >= self.record.vocabulary:
                    finish = "error"
                elif token in sequence.request.stop or (token in self._stop and not sequence.request.ignore_end):
                    finish = "stop"
                elif len(sequence.tokens) == sequence.request.max_tokens:
                    finish = "length"
                cached = sequence.cached if len(sequence.tokens) == 1 else 0
                tokens.append(NewToken(sequence.number, token, finish, cached, scores.get(place)))
                if finish:
                    self._end(slot)
                    break
            if sequence.drafts is not None and not finish:
                sequence.drafts.add(sequence.tokens[-len(valid) :])
        return tokens

    def _prefill(self, reading: Mapping[int, _Sequence], group: int) -> Step:
        """Returns a prefill of a chunk of the earliest prompt of each run of a group's slots."""
        record = self.record
        copies = self._copies(reading, group)
        slots, taking = self._of_each_run(reading, group)
        program, width = self._prefill_size(reading, group)
        tokens, count = np.zeros((record.runs, width), np.int64), np.zeros(record.runs, np.int64)
        for row, (slot, size, one) in taking.items():
            size = min(size, width)
            tokens[row, :size], count[row] = one.request.prompt[one.position : one.position + size], size
            taking[row] = slot, size, one
        position = np.array(self._positions(slots), np.int64)
        lengths, adapters = self._lengths(slots), self._adapters(slots)
        scored = np.maximum(count - 1, 0)[:, None]
        return Step(
            *(tokens, count, position, taking, program, slots, group, lengths),
            copies=copies,
            adapters=adapters,
            scored_tokens=scored,
        )

    def _prefill_size(self, reading: Mapping[int, _Sequence], group: int) -> tuple[str, int]:
        """Returns the program of that prefill, and the number of its tokens."""
        most = max(count for _, count, _ in self._of_each_run(reading, group)[1].values())
        sizes = [*self.record.narrow_chunks, self.record.chunk]
        width = self._cheapest(most, sizes)[1] if self.record.padded else next(size for size in sizes if size >= most)
        program = PREFILL if width == self.record.chunk else narrow(PREFILL, width)
        return program, width if self.record.padded else most

    def _cheapest(self, count: int, sizes: Sequence[int]) -> tuple[int, int]:
        """Returns the cost of reading so many tokens by prefills of these widths, in ascending order, and the width of the first."""
        whole = next(size for size in sizes if size >= count)
        below = max((size for size in sizes if size < count), default=0)
        cost = self._weights + whole
        split = self._weights + below + self._cheapest(count - below, sizes)[0] if below else cost
        return (split, below) if split < cost else (cost, whole)

    def _draft(self, making: Mapping[int, _Sequence], group: int) -> Step:
        """Returns a step of one sequence of each run of a group, the one that has waited longest: its last token, and drafts after it."""
        rules = self.record.draft
        assert rules is not None
        self._turn += 1
        slots, taking = self._of_each_run(making, group, lambda sequence: (sequence.turn, sequence.number))
        reads = {row: [one.last, *self._drafts_after(one)] for row, (_, _, one) in taking.items()}
        width = next(size for size in rules.sizes if size >= max(map(len, reads.values())))
        tokens, count = np.zeros((len(slots), width), np.int64), np.zeros(len(slots), np.int64)
        for row, read in reads.items():
            slot, _, one = taking[row]
            one.turn = self._turn
            tokens[row, : len(read)], count[row] = read, len(read)
            taking[row] = slot, len(read), one
        scored = np.broadcast_to(np.arange(width), tokens.shape).copy()
        position, lengths, adapters = np.array(self._positions(slots)), self._lengths(slots), self._adapters(slots)
        program = narrow(DRAFT, width)
        return Step(
            tokens, count, position, taking, program, slots, group, lengths, adapters=adapters, scored_tokens=scored
        )

    def _drafts_after(self, sequence: _Sequence) -> list[int]:
        """Returns the drafts of a sequence's next tokens.

        It has none while its prompt is read, for its last token, and if a change of its logits depends on the tokens before.
        """
        rules, request = self.record.draft, sequence.request
        assert rules is not None
        most = min(rules.tokens, request.most(self.record) - len(sequence.tokens) - 1)
        if sequence.unread or most < 1 or not depend_on_number(sequence.changes):
            return []
        if sequence.drafts is None:
            given = request.encoder if self.record.encoder is not None and self.record.encoder.vocabulary else None
            text = [] if given is None else [*map(int, np.asarray(given).reshape(-1))]
            sequence.drafts = Drafts(rules.lookup, [*text, *request.prompt, *sequence.tokens])
        return sequence.drafts.next(most)

    def _copies(self, reading: Mapping[int, _Sequence], group: int) -> list[Copy]:
        """Returns the copies by which the earliest prompt of each run gets entries that another slot of its run and group has by now."""
        size = self.record.slots // self.record.runs
        copies, runs = list[Copy](), set[int]()
        for slot, sequence in sorted(reading.items(), key=lambda pair: pair[1].number):
            if (run := slot // size) in runs:
                continue
            runs.add(run)
            others = [other for other in self._of_group[group] if other // size == run and other != slot]
            if (copy := self._prefixes.copied(slot, sequence.shared, others)) is not None:
                copies.append(copy)
                sequence.cached += copy.count - sequence.position
                sequence.position = copy.count
        return copies

    def _encode(self, waiting: Mapping[int, _Sequence], group: int) -> Step:
        """Returns an encode of the earliest sequence of each run of a group's slots."""
        encoder = self.record.encoder
        assert encoder is not None
        slots, taking = self._of_each_run(waiting, group)
        kind = dense(encoder.type)
        assert kind is not None
        encoder_inputs = np.zeros((len(slots), *encoder.shape), kind.numpy)
        for row, slot in enumerate(slots):
            one = self._running[slot]
            if one is not None and one.request.encoder is not None:
                encoder_inputs[row][: one.request.entries] = one.request.encoder
        none = np.zeros(len(slots), np.int64)
        lengths, adapters = self._lengths(slots), self._adapters(slots)
        return Step(none[:, None], none, none, taking, ENCODE, slots, group, lengths, encoder_inputs, adapters=adapters)

    def _of_each_run(
        self,
        waiting: Mapping[int, _Sequence],
        group: int,
        order: Callable[[_Sequence], tuple[int, ...]] = lambda sequence: (sequence.number,),
    ) -> tuple[list[int], dict[int, tuple[int, int, _Sequence]]]:
        """Returns a slot of each run of a group, that of its first sequence by `order`; also maps rows to its part of a chunk."""
        record = self.record
        size = record.slots // record.runs
        slots = self._of_group[group][:: size // record.groups]
        taking: dict[int, tuple[int, int, _Sequence]] = {}
        for slot, one in sorted(waiting.items(), key=lambda pair: order(pair[1])):
            if (run := slot // size) not in taking:
                slots[run] = slot
                taking[run] = slot, min(one.unread, record.chunk), one
        return slots, taking

    def _decode(self, making: Mapping[int, _Sequence], group: int) -> Step:
        """Returns a decode of one token of each running sequence of a group, or of each prompt that is scored."""
        slots, size = self._window(making, group)
        key = group, len(slots)
        if key not in self._decoded:
            n = len(slots)
            self._decoded[key] = tuple(np.zeros(shape, np.int64) for shape in ((n, 1), n, n, n, n))
        tokens, count, position, lengths, adapters = self._decoded[key]
        taking = dict[int, tuple[int, int, _Sequence]]()
        for row, slot in enumerate(slots):
            one = self._running[slot]
            meant = slot in making
            position[row], count[row] = self._prefixes.counts[slot] if one is None else one.position, meant
            adapters[row] = 0 if one is None else one.adapter
            tokens[row, 0] = making[slot].last if meant else 0
            if meant:
                taking[row] = slot, 1, making[slot]
        if (now := self._lengths(slots)) is not None:
            lengths[:] = now
        program, window = (narrow(DECODE, size), slots) if size else (DECODE, None)
        given = None if now is None else lengths
        return Step(tokens, count, position, taking, program, window, group, given, adapters=adapters)

    def _window(self, making: Collection[int], group: int) -> tuple[list[int], int]:
        """Returns the slots of a decode, as few of each run as a program allows that contain all in `making`, and their number in a run.

        The number is 0 if it has all slots of the group.
        """
        slots, runs = self._of_group[group], self.record.runs
        of_run = len(slots) // runs
        used = [[k for k in range(of_run) if slots[run * of_run + k] in making] for run in range(runs)]
        span = max(places[-1] - places[0] + 1 for places in used if places)
        size = next((rows for rows in self._rows if rows >= span), 0)
        if not size:
            return slots, 0
        begins = [run * of_run + (min(places[0], of_run - size) if places else 0) for run, places in enumerate(used)]
        return [slot for begin in begins for slot in slots[begin : begin + size]], size

    def _positions(self, slots: Sequence[int]) -> list[int]:
        """Returns each slot's number of tokens; for a free slot those that another prompt may share."""
        there = ((slot, self._running[slot]) for slot in slots)
        return [self._prefixes.counts[slot] if one is None else one.position for slot, one in there]

    def _adapters(self, slots: Sequence[int]) -> Array:
        """Returns the place of each slot's adapter."""
        return np.array([0 if (one := self._running[slot]) is None else one.adapter for slot in slots], np.int64)

    def _lengths(self, slots: Sequence[int]) -> Array | None:
        """Returns each slot's number of entries in its encoder's input; 1 for a free slot, which also reads something.

        Returns None if the encoder has no such numbers.
        """
        encoder = self.record.encoder
        if encoder is None or not encoder.count:
            return None
        there = (self._running[slot] for slot in slots)
        return np.array([1 if one is None else one.request.entries for one in there], np.int64)
