"""The programs that evaluate: of a batch of any size, and, where stages run microbatches, of one that these divide.

Both give the same numbers of a batch, up to the rounding of sums over microbatches. The second one runs its stages at the same time, so it
takes each batch that it can: usually all but the last one, which has the records that are left.
"""

from __future__ import annotations

from ..artifact.format import EVALUATE, EVALUATE_STREAMED, TrainingRecord
from ..artifact.legal_sizes import wrong_batch
from ..execution.program import Program
from ..execution.times.profiler import Profiler


class Evaluation:
    """The programs of an artifact that evaluate over the state of its training."""

    def __init__(self, record: TrainingRecord, whole: Program, streamed: Program | None) -> None:
        self._record, self._whole, self._streamed = record, whole, streamed

    @classmethod
    def beside(cls, program: Program) -> Evaluation | None:
        """The evaluation programs of a step's program; None where the artifact has none. Collective."""
        record, names = program.manifest.training, program.artifact.programs
        if record is None or EVALUATE not in names:
            return None
        streamed = program.sibling_program(EVALUATE_STREAMED) if EVALUATE_STREAMED in names else None
        return cls(record, program.sibling_program(EVALUATE), streamed)

    def of(self, records: int) -> Program:
        """The program for a batch of so many records on all ranks: the same on each of them."""
        if self._streamed is None or any(wrong_batch(records, self._streamed.manifest, self._record)):
            return self._whole
        return self._streamed

    @property
    def programs(self) -> list[Program]:
        """The programs that the artifact has."""
        return [program for program in (self._whole, self._streamed) if program is not None]

    def record_times(self) -> Profiler:
        """Measure every task of every batch from the next one on, whichever program takes it."""
        profiler = self._whole.record_times()
        return profiler if self._streamed is None else self._streamed.record_times(beside=profiler)

    def release(self) -> None:
        """Gives back what the programs hold."""
        for program in self.programs:
            program.release()
