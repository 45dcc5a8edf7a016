"""The rows of its caches that a rank binds in a step: those of one slot in a prefill, of one group of slots in a decode by groups.

decode     past_k [4, heads, length, size]     all slots of the rank
decode     past_k [2, heads, length, size]     the rows of one of two groups, in place
prefill    past_k [1, heads, length, size]     the row of slot 2, in place; the next step binds another slot's; so does encode
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ...artifact.format import CACHE, StateRecord
from ...artifact.generation import binds_rows
from ...devices.device_memory import Placed
from ...errors import UsageError
from ...program.rank_file import RankFile
from ...units import count as units
from ..state import State


@dataclass
class CacheRows:
    """The rows of a rank's caches that the next steps use.

    `records`: the record of each cache, and of each output that replaces it. `run`: the index of the rank's run of slots, of `runs` equal
    ones; `count`: the slots of a run; `size`: the slots of a step. `first`: the first slot of the next step, counted within the run.
    """

    state: State
    records: Mapping[str, StateRecord]
    run: int
    runs: int
    count: int
    size: int
    first: int = 0

    @classmethod
    def of(cls, file: RankFile, state: State) -> Self | None:
        """Returns the rows of a rank whose program binds those of some slots, such as a decode by groups; None for another program."""
        caches = [one for one in file.state if one.kind == CACHE]
        generation = file.manifest.generation
        if not binds_rows(file.manifest.name) and (generation is None or generation.groups == 1):
            return None
        records = {name: one for one in caches for name in (one.value, one.next) if name}
        if not caches:
            return cls(state, records, 0, 1, 0, 0)
        begin, _, of = caches[0].shard(file.rank)[0]
        size = caches[0].local_shape(file.rank)[0]
        runs = caches[0].shape[0] // size
        return cls(state, records, runs * begin // of, runs, state.tensors[caches[0].value].shape[0], size)

    def choose(self, slots: Sequence[int]) -> None:
        """Sets the slots of the next steps: the same number of each run, consecutive; UsageError where the rank has other slots."""
        if not self.records:
            return
        mine, begin = slots[self.run * self.size :][: self.size], self.run * self.count
        first = mine[0] - begin if len(slots) == self.runs * self.size else -1
        if not 0 <= first <= self.count - self.size or [*mine] != [*range(mine[0], mine[0] + self.size)]:
            fact, each = f"a step of the slots {[*slots]}", units(self.size, "slot")
            law = f"it computes {each} of each of {self.runs} runs of {self.count}"
            raise UsageError(f"{fact}\n  {law}\n  help: give {each} of {begin} and on for run {self.run}")
        self.first = first

    def places(self) -> dict[str, Placed]:
        """Maps names to the rows of the chosen slots."""
        return {name: self.state.rows(record, self.first, self.size) for name, record in self.records.items()}
