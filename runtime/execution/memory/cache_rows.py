"""Which row of each of its caches a rank binds in a step of prefill: that of one slot.

decode     past_k [4, heads, length, size]     all slots of the rank
prefill    past_k [1, heads, length, size]     the row of slot 2, where it lies; the next step another one's
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ...artifact.format import CACHE, PREFILL, StateRecord
from ...devices.device_memory import Placed
from ...errors import UsageError
from ...program.rank_file import RankFile
from ..state import State


@dataclass
class CacheRows:
    """`records`: by cache, and by output that takes its place, the record. `run`: which run of slots lies on the rank, of `runs` equal
    ones; `count`: how many slots it has. `slot`: the rank's own number of that which the next step computes.
    """

    state: State
    records: Mapping[str, StateRecord]
    run: int
    runs: int
    count: int
    slot: int = 0

    @classmethod
    def of(cls, file: RankFile, state: State) -> Self | None:
        """The rows of a rank of a prefill; None of another program."""
        caches = [one for one in file.state if one.kind == CACHE]
        if file.manifest.name != PREFILL:
            return None
        records = {name: one for one in caches for name in (one.value, one.next)}
        if not caches:
            return cls(state, records, 0, 1, 0)
        begin, _, of = caches[0].shard(file.rank)[0]
        runs = caches[0].shape[0]
        return cls(state, records, runs * begin // of, runs, state.tensors[caches[0].value].shape[0])

    def choose(self, slots: Sequence[int]) -> None:
        """Lets the next steps compute these slots, one of each run; UsageError where that of this rank lies on another one."""
        if not self.records:
            return
        chosen = slots[self.run] - self.run * self.count if len(slots) == self.runs else -1
        if not 0 <= chosen < self.count:
            fact = f"a prefill of the slots {[*slots]}"
            law = f"it computes one slot of each of {self.runs} runs of {self.count}"
            raise UsageError(
                f"{fact}\n  {law}\n  help: give a slot of {self.run * self.count} and on for run {self.run}"
            )
        self.slot = chosen

    def places(self) -> dict[str, Placed]:
        """By name the row of the chosen slot."""
        return {name: self.state.row(record, self.slot) for name, record in self.records.items()}
