"""The evaluation programs: one for batches of any size and, if stages run microbatches, one for batches divisible into these.

Both compute the same values for a batch, up to the rounding of sums over microbatches. The second one runs its stages at the same time, so
it is used for each batch that it accepts: usually all but the last one, which has only the remaining records.
"""

from __future__ import annotations

from ..artifact.format import EVALUATE, EVALUATE_STREAMED, TrainingRecord
from ..artifact.legal_sizes import wrong_batch
from ..execution.program import Program
from ..execution.times.profiler import Profiler


class Evaluation:
    """The evaluation programs of an artifact over the state of its training."""

    def __init__(self, record: TrainingRecord, whole: Program, streamed: Program | None) -> None:
        self._record, self._whole, self._streamed = record, whole, streamed

    @classmethod
    def beside(cls, program: Program) -> Evaluation | None:
        """Loads the evaluation programs next to a training program; None where the artifact has none. Collective."""
        record, names = program.manifest.training, program.artifact.programs
        if record is None or EVALUATE not in names:
            return None
        streamed = program.sibling_program(EVALUATE_STREAMED) if EVALUATE_STREAMED in names else None
        return cls(record, program.sibling_program(EVALUATE), streamed)

    def of(self, records: int) -> Program:
        """Returns the program for a batch with `records` records on all ranks together: the same program on each rank."""
        if self._streamed is None or any(wrong_batch(records, self._streamed.manifest, self._record)):
            return self._whole
        return self._streamed

    @property
    def programs(self) -> list[Program]:
        """The evaluation programs that the artifact has."""
        return [program for program in (self._whole, self._streamed) if program is not None]

    def record_times(self) -> Profiler:
        """Measure every task of each later batch, whichever program runs it."""
        profiler = self._whole.record_times()
        return profiler if self._streamed is None else self._streamed.record_times(beside=profiler)

    def release(self) -> None:
        """Releases the resources of the programs."""
        for program in self.programs:
            program.release()
