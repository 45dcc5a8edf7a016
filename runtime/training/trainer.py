"""The training of one rank: steps, evaluation and checkpoints. Every call is collective over the ranks.

with load_trainer("build") as trainer:              # on every rank
    for batch in batches:                           # this rank's shards
        outputs = trainer.train(batch)              # {"loss": ...} on rank 0
    trainer.save("checkpoints")

The evaluation programs: one for batches of any size and, if stages run microbatches, one for batches divisible into these.

Both compute the same values for a batch, up to the rounding of sums over microbatches. The second one runs its stages at the same time, so
it is used for each batch that it accepts: usually all but the last one, which has only the remaining records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import numpy as np
from partc.runtime.artifact.training.lr_schedule import Rate
from partc.runtime.artifact.training.metric_formula import MetricSums, formula
from partc.runtime.artifact.training.scalars import scalars
from partc.runtime.training.data import of_batch, with_next
from pydantic import JsonValue

from ..artifact.format import EVALUATE, EVALUATE_STREAMED, Manifest, Port, TrainingRecord
from ..artifact.legal_sizes import wrong_batch
from ..checkpoint.early_verification import EarlyVerification
from ..checkpoint.index import NONFINITE, SKIPPED
from ..data.loader import Loader
from ..errors import InputError, NonFiniteError, UsageError
from ..execution.program import Outputs, Program
from ..execution.symbol_bindings import Halted
from ..execution.times.profiler import Profiler
from ..job.turn import TRAINER, CallGuard, one_call
from ..user_code import user_code
from .checkpoints import Checkpoints
from .copies import Copies
from .data import Choices, loader_of
from .ema import Averages
from .finite import (
    STOP,
    PendingLoss,
    is_finite,
    nonfinite_state,
    not_finite,
    stopped,
)


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


Item = TypeVar("Item")

STEP = "step"
"""The scalar that counts the steps of a training."""
_REASON = 2
"""The factor of the reason to stop in a request; 1 is added where a trace is to be written."""
SAVE_FAILED = 1 << 20
"""The request of a rank whose checkpoint could not be written in the background: larger than any reason to stop."""


class Trainer:
    """A training program and the evaluation of the same model, over one state.

    One call is under way at a time (`job/turn.py`). In a job of one rank, calls of other threads wait for it; with several ranks they are
    refused with a UsageError, since threads have no order that all ranks know. Calls from inside of a schedule or of the batches of an
    evaluation are refused, too, and so are those in a fork of the process. After `close`, which waits for the current call, each call is a
    RankError.
    """

    def __init__(
        self,
        program: Program,
        evaluation: Evaluation | None,
        rate: Rate,
        ahead: EarlyVerification | None = None,
    ) -> None:
        record = program.manifest.training
        assert record is not None
        self.program = program
        self.record: TrainingRecord = record
        self.rate = rate
        self.step = 0
        """The number of steps taken so far."""
        self.skipped = 0
        """The number of steps that changed nothing because a gradient was not finite; neither the rate nor the optimizer counts these."""
        self.last_rate = 0.0
        """The learning rate of the last step."""
        ema = record.settings.ema
        self.averages = Averages(program.state, program.manifest.state, ema.decay) if ema is not None else None
        """The moving averages of the parameters, where the plan has `ema`."""
        self._checkpoints = Checkpoints(program, record.optimizer.types, ahead, self.averages)
        self.on_nonfinite = record.settings.on_nonfinite
        self._evaluation = evaluation
        self._untold: deque[PendingLoss] = deque(maxlen=2)
        self.stopping = 0
        """The reason to stop after this step, the same on all ranks: the largest passed to `ask_to_stop`; 0 where training continues."""
        self.tracing = False
        """Whether all ranks are to write a trace after this step, because any rank has called `ask_to_trace`."""
        self._reason = 0
        self._traces = False
        self._stop: NonFiniteError
        self.ports: list[Port] = of_batch(program.manifest).inputs
        """The inputs of the model on all ranks."""
        self._numbers = [name for name in record.scalars if name != STEP]
        self._hyper = record.optimizer.numbers
        known = {port.name for port in program.inputs}
        self._scalars: dict[str, np.ndarray[Any, Any]] = {
            name: np.zeros((), np.int64 if name == STEP else np.float32) for name in record.scalars if name in known
        }

    @property
    def rank(self) -> int:
        """This rank."""
        return self.program.rank

    @property
    def source(self) -> Path | None:
        """The checkpoint from which tensors were last loaded; None where there was none."""
        return self._checkpoints.source

    @property
    def manifest(self) -> Manifest:
        """The manifest of the artifact."""
        return self.program.manifest

    @property
    def inputs(self) -> list[Port]:
        """The inputs of a batch of which this rank reads a shard."""
        return [port for port in self.ports if self.rank in port.ranks]

    def loader(self, data: object, epochs: int | None = None, **choices: Unpack[Choices]) -> Loader:
        """Opens this rank's loader of a path, of a value that `data:` of a plan may have, or of the object that a data file would define.

        `batch`, `seed`, `shuffle`, `drop_last`, `interleave` and the `fields` of `data` are those of the plan unless they are passed.
        Without `epochs` it never ends. It is a context manager; `save` takes the result of its `saved`, and its `restore` takes the result
        of `load`.
        """
        return loader_of(data, self.record, self.ports, self.rank, self.program.largest, epochs, choices)

    @property
    def turn(self) -> CallGuard:
        """The guard of the trainer's calls."""
        return self.program.turn

    @one_call(TRAINER)
    def train(self, batch: Mapping[str, object], following: Mapping[str, object] | None = None) -> Outputs:
        """Takes one step on this rank's shards of a batch; returns the loss and the metrics before the update, on rank 0.

        `following`: the next step's batch, the same arrays, if it is known; other ranks may not know theirs. The ranks then agree on it
        during this step, and a non-finite loss is reported one step later by `train`; other calls check for it at once.
        """
        return self.numbers(self._advance(batch, following))

    def numbers(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the outputs of a step, with metrics computed from their sums, and without denominators."""
        if not self.record.denominators and not self.record.formulas:
            return dict(outputs)
        beside = {*self.record.denominators.values()}
        outputs = {name: value for name, value in outputs.items() if name not in beside}
        formulas = {name: formula(one).number for name, one in self.record.formulas.items() if name in outputs}
        made = {name: number(np.asarray(outputs[name], np.float64)) for name, number in formulas.items()}
        return {**outputs, **made}

    @one_call(TRAINER)
    def advance(self, batch: Mapping[str, object], following: Mapping[str, object] | None = None) -> Outputs:
        """Takes one step like `train`, and also returns the values that combine several steps: denominators, and the sums of metrics."""
        return self._advance(batch, following)

    def _advance(self, batch: Mapping[str, object], following: Mapping[str, object] | None) -> Outputs:
        applied = self.step - self.skipped
        with self.turn.running("the schedule"), user_code("the schedule", f"asking for the rate of step {applied}"):
            self.last_rate = float(self.rate(applied))
        hyper = {**self._hyper, "lr": self.last_rate}
        for name, value in scalars(self._numbers, applied, hyper).items():
            if name in self._scalars:
                self._scalars[name][...] = value
        if STEP in self._scalars:
            self._scalars[STEP][...] = self.step
        self._request()
        self.program.agreement.halt(any(one.bad for one in self._untold))
        try:
            if following is not None and self.manifest.ranks > 1:
                self.program.announce({**following, **self._scalars})
            outputs = self.program({**batch, **self._scalars})
        except Halted:
            raise (self._stopped(batch) if self._untold else self._stop) from None
        self.step += 1
        requested = self.program.agreement.requested
        self.stopping, traces = divmod(requested, _REASON) if requested < SAVE_FAILED else (0, 0)
        self.tracing = bool(traces)
        self._traces &= not traces
        outputs = self._judged(batch, outputs)
        if requested >= SAVE_FAILED:
            self._checkpoints.finish()
        return outputs

    def ask_to_stop(self, reason: int) -> None:
        """Asks all ranks to stop for a reason of 1 or more; `stopping` has it after one of the next two steps, the same on all ranks.

        Any rank may call it, at any time: the request travels with the agreement at the beginning of a step.
        """
        self._reason = reason
        self._request()

    def ask_to_trace(self) -> None:
        """Asks all ranks to write a trace of the last steps; `tracing` says so at the same time as `stopping` would for a reason to stop.

        One rank alone may ask. If another one asks to stop at the same time, training stops, and ends with a trace.
        """
        self._traces = True
        self._request()

    def _request(self) -> None:
        number = self._reason * _REASON + self._traces
        self.program.agreement.request(SAVE_FAILED if self._checkpoints.has_failed else number)

    def _judged(self, batch: Mapping[str, object], outputs: Outputs) -> Outputs:
        """Checks the outputs of a step and returns them.

        If a non-finite loss ends training, it is reported to other ranks with the next step.
        """
        if self.record.guard and not is_finite(outputs.pop(self.record.guard)):
            self.skipped += 1
        elif self.averages is not None:
            self.averages.update()
        if self.on_nonfinite == STOP:
            loss = outputs.get(self.record.loss)
            bad = loss is not None and not is_finite(loss)
            self._untold.append(PendingLoss(self.step, bad, str(loss) if bad else "", batch))
            if self.manifest.ranks == 1:
                self._check_last_loss()
        return outputs

    @one_call(TRAINER)
    def check_last_loss(self) -> None:
        """Raises NonFiniteError on all ranks where the last step's loss is not finite and the plan stops training then; collective.

        A rank that gets the loss tells the others in the agreement at the beginning of its next step, so that no step waits for another
        message. Every other call of the trainer checks first; so does `close`.
        """
        self._check_last_loss()

    def _check_last_loss(self) -> None:
        if self._untold:
            bad = any(one.bad for one in self._untold)
            if self.program.any_rank(bad) if self.manifest.ranks > 1 else bad:
                raise self._stopped()
            self._untold.clear()

    def _stopped(self, following: Mapping[str, object] | None = None) -> NonFiniteError:
        """Returns the error of a step with a non-finite loss; collective.

        The step's batch may be overwritten by a later one, at last by `following`.
        """
        untold = [*self._untold]
        self._untold.clear()
        self._stop = stopped(self.program, self.record.loss, untold, self.inputs, following or {})
        return self._stop

    @one_call(TRAINER)
    def evaluate(self, batches: Iterable[tuple[Mapping[str, Any], int]]) -> dict[str, float]:
        """Returns the loss and the metrics over batches, on rank 0; the parameters are unchanged.

        Each item is this rank's shards of a batch, and the batch's number of records on all ranks together. The results are those of one
        batch with all records: a mean is over all labels that count, even if a batch has none; where there are none at all it is NaN,
        `Undefined`.
        """
        evaluation = self._evaluated()
        self._check_last_loss()
        totals = MetricSums(self.record, adding=True)
        with self.turn.running("the batches of an evaluation"):
            source = with_next(batches)
        for number, ((batch, size), following) in enumerate(self._lent(source)):
            program = evaluation.of(size)
            if following is not None and evaluation.of(following[1]) is program:
                program.announce(following[0])
            try:
                totals.add(program(batch), size)
            except InputError as error:
                raise InputError(f"evaluation after step {self.step}, batch {number}: {error}") from None
        return totals.take()

    @one_call(TRAINER)
    def record_evaluation(self) -> Profiler:
        """Measure every task of each later batch of an evaluation. UsageError where the artifact has none."""
        return self._evaluated().record_times()

    def _evaluated(self) -> Evaluation:
        """Returns the evaluation; UsageError where the artifact has none."""
        if self._evaluation is None:
            raise UsageError("the artifact has no evaluation\n  help: compile again")
        return self._evaluation

    def _lent(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yields the batches; while one is read, the call is marked as running the user's code."""
        while True:
            with self.turn.running("the batches of an evaluation"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    @one_call(TRAINER)
    def save(
        self,
        folder: str | Path,
        meta: Mapping[str, JsonValue] | None = None,
        keep: int | None = None,
        best: int | None = None,
        background: bool = False,
    ) -> Path:
        """Writes a checkpoint of this step into `folder`, which all ranks share; returns its path.

        The oldest checkpoints beyond `keep` are removed, except that of the step `best`. With `background` the files are written while
        training continues, from a copy in memory; the checkpoint is complete once `finish_saving`, the next `save` or `close` has returned.
        """
        self._check_last_loss()
        known: dict[str, JsonValue] = {**(meta or {})}
        wrong = not_finite(self.program.state.arrays())
        if self.program.any_rank(bool(wrong)):
            if self.on_nonfinite == STOP:
                names = dict.fromkeys(
                    name for text in self.program.all_gather_text("\n".join(wrong)) for name in text.split("\n")
                )
                raise NonFiniteError(nonfinite_state(self.step, [name for name in names if name]))
            known[NONFINITE] = True
        if self.skipped:
            known[SKIPPED] = self.skipped
        return self._checkpoints.save(Path(folder), self.step, known, keep, best, background)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written in the background, or could not be; on ranks other than 0 only their own file counts."""
        saving = self._checkpoints.saving
        return saving is not None and not saving.is_complete

    @one_call(TRAINER)
    def finish_saving(self) -> None:
        """Waits for a checkpoint that is written in the background. CheckpointError on all ranks where it could not be written."""
        self._checkpoints.finish()

    @one_call(TRAINER)
    def keep_copies(self, folder: str | Path) -> Copies:
        """Prepares copies of the state in memory, in a folder of each host; CheckpointError on all ranks where a host cannot have it."""
        return self._checkpoints.keep_copies(Path(folder))

    @one_call(TRAINER)
    def copy(self, begins: bool, meta: Callable[[], Mapping[str, JsonValue]]) -> None:
        """Takes the next turn of a copy in memory that has begun, and begins one of this step if it `begins`; with `meta` as for `save`."""
        copies = self._checkpoints.copies
        if copies is None:
            return
        copies.advance()
        if begins:
            self._check_last_loss()
            self._checkpoints.copy(self.step, {**meta(), **({SKIPPED: self.skipped} if self.skipped else {})})

    @one_call(TRAINER)
    def end_copies(self) -> None:
        """Removes the copies in memory, at the end of a training."""
        if self._checkpoints.copies is not None:
            self._checkpoints.copies.end()
            self._checkpoints.copies = None

    @one_call(TRAINER)
    def claim(self, folder: str | Path) -> None:
        """Locks a folder for the checkpoints of this run, until the trainer is closed.

        CheckpointError where another job has the lock. `save` takes it if it was not taken before.
        """
        self._checkpoints.claim(Path(folder))

    @one_call(TRAINER)
    def load(self, path: str | Path, option: str = "", averaged: bool = False) -> Mapping[str, JsonValue]:
        """Continues from a checkpoint, whichever plan wrote it; returns the values that were saved in addition to the tensors.

        In a folder of checkpoints the newest intact one is loaded; `source` is its path. Nothing is loaded before the full checkpoint is
        verified: DamagedError, on all ranks, lists the damage and leaves everything as it was. `option` is the command-line option for
        another path, for the message. With `averaged` the parameters are the checkpoint's moving averages.
        """
        self._check_last_loss()
        index = self._checkpoints.load(Path(path), option, averaged)
        self.step = index.step
        skipped = index.meta.get(SKIPPED, 0)
        self.skipped = skipped if isinstance(skipped, int) else 0
        return index.meta

    @one_call(TRAINER)
    def load_weights(
        self, path: str | Path, strict: bool = True, option: str = "", only: Callable[[str], bool] | None = None
    ) -> frozenset[str]:
        """Loads weights from a checkpoint, or from any safetensors file with the same names; returns the names of the loaded tensors.

        `only` selects weights by name, in the program and in the file; the others keep their values, such as the base weights under
        adapters. Checkpoints are chosen and verified as by `load`; so is a file that `partc checkpoint export` wrote.
        """
        self._check_last_loss()
        return self._checkpoints.load_weights(Path(path), strict, option, only)

    def close(self) -> None:
        """Releases sessions and buffers after the current call; collective. NonFiniteError as for `check_last_loss`."""
        if not self.turn.over:
            self._end(finish=True)

    @one_call(TRAINER, "close()", ending=True)
    def _end(self, finish: bool) -> None:
        try:
            if finish and self.program.usable:
                self._check_last_loss()
                self._checkpoints.finish()
        finally:
            self._checkpoints.release()
            if self._evaluation is not None:
                self._evaluation.release()
            self.program.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self.program.leave(error)
        if not self.turn.over:
            self._end(finish=False)
