"""The training of one rank: steps, evaluation and checkpoints. Every call is collective over the ranks.

with load_trainer("build") as trainer:                    # on every rank
    for batch in batches:                                 # this rank's pieces
        outputs = trainer.train(batch)                    # {"loss": ...} on rank 0
    trainer.save("checkpoints")
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

from ..artifact.format import Manifest, Port, TrainingRecord
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
from .data import Choices, loader_of
from .ema import Averages
from .evaluation import Evaluation
from .finite import (
    STOP,
    PendingLoss,
    is_finite,
    nonfinite_state,
    not_finite,
    stopped,
)

Item = TypeVar("Item")

STEP = "step"
"""The scalar that counts the steps of a training."""
_REASON = 2
"""A request is so many times a reason to stop, and 1 more where a trace is to be written."""
SAVE_FAILED = 1 << 20
"""The request of a rank whose checkpoint could not be written in the background: larger than any reason to stop."""


class Trainer:
    """A training program with the evaluation of the same model, over one state.

    One call is under way at a time (`job/turn.py`). In a job of one rank calls of other threads wait for it; among several ranks they
    are refused with a UsageError, since threads have no order that all ranks know. Refused are calls from a schedule or from the batches
    of an evaluation, too, and those in a fork of the process; after `close`, which waits for the call under way, each is a RankError.
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
        """The number of steps that changed nothing, since a gradient was not finite; neither the rate nor the optimizer counts these."""
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
        """Why training is to stop after this step, on all ranks alike: the largest reason given to `ask_to_stop`; 0: it goes on."""
        self.tracing = False
        """Whether all ranks are to write a trace after this step, since one of them was asked to: `ask_to_trace`."""
        self._reason = 0
        self._traces = False
        self._stop: NonFiniteError
        self.ports: list[Port] = of_batch(program.manifest).inputs
        """The inputs of the model, of all ranks."""
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
        """The checkpoint from which tensors were taken last."""
        return self._checkpoints.source

    @property
    def manifest(self) -> Manifest:
        """The index of the artifact."""
        return self.program.manifest

    @property
    def inputs(self) -> list[Port]:
        """The part of a batch that this rank reads."""
        return [port for port in self.ports if self.rank in port.ranks]

    def loader(self, data: object, epochs: int | None = None, **choices: Unpack[Choices]) -> Loader:
        """This rank's batches of a path, of what `data:` of a plan may say, or of the object that a data file would define.

        `batch`, `seed`, `shuffle`, `drop_last`, `interleave` are those of the plan unless they are given, as are the `fields` of `data`.
        Without `epochs` it has no end. It is a context; `saved` is for `save`, `restore` takes what `load` returns.
        """
        return loader_of(data, self.record, self.ports, self.rank, self.program.largest, epochs, choices)

    @property
    def turn(self) -> CallGuard:
        """Whose turn it is to call."""
        return self.program.turn

    @one_call(TRAINER)
    def train(self, batch: Mapping[str, object], following: Mapping[str, object] | None = None) -> Outputs:
        """One step on this rank's shards of a batch; the loss and the metrics before the update, on rank 0.

        `following`: the batch of the next step, the same arrays, where it is known; other ranks may not know it. The ranks then agree on it
        during this step, and a loss that is not finite is told one step later, to `train`; other calls ask.
        """
        return self.numbers(self._advance(batch, following))

    def numbers(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of a step, with the numbers of metrics that are made of sums in place of these, and without denominators."""
        if not self.record.denominators and not self.record.formulas:
            return dict(outputs)
        beside = {*self.record.denominators.values()}
        outputs = {name: value for name, value in outputs.items() if name not in beside}
        formulas = {name: formula(one).number for name, one in self.record.formulas.items() if name in outputs}
        made = {name: number(np.asarray(outputs[name], np.float64)) for name, number in formulas.items()}
        return {**outputs, **made}

    @one_call(TRAINER)
    def advance(self, batch: Mapping[str, object], following: Mapping[str, object] | None = None) -> Outputs:
        """One step as `train` takes it, with what puts several steps together: denominators, and the sums that a metric is made of."""
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
        """Asks all ranks to stop for a reason of 1 or more; they find it in `stopping` after one of the next two steps, the same on all.

        Any rank may call it, at any time: the request travels with the agreement that begins a step.
        """
        self._reason = reason
        self._request()

    def ask_to_trace(self) -> None:
        """Asks all ranks to write a trace of the last steps; they find that in `tracing` as a reason to stop in `stopping`.

        One rank alone may ask. Where another one asks to stop at the same time, training does that, and ends with a trace.
        """
        self._traces = True
        self._request()

    def _request(self) -> None:
        number = self._reason * _REASON + self._traces
        self.program.agreement.request(SAVE_FAILED if self._checkpoints.has_failed else number)

    def _judged(self, batch: Mapping[str, object], outputs: Outputs) -> Outputs:
        """The outputs of a step; where training is to stop, whether the loss is finite is reported with the next step."""
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
        """NonFiniteError on all ranks where the loss of the last step is not finite and training is to stop; collective.

        A rank that gets the loss tells the others by the next agreement on a step that it begins, so that no step waits for one more.
        Every other call of the trainer asks first; so does `close`.
        """
        self._check_last_loss()

    def _check_last_loss(self) -> None:
        if self._untold:
            bad = any(one.bad for one in self._untold)
            if self.program.any_rank(bad) if self.manifest.ranks > 1 else bad:
                raise self._stopped()
            self._untold.clear()

    def _stopped(self, following: Mapping[str, object] | None = None) -> NonFiniteError:
        """The error of a step, whose batch may by now be overwritten by a later one, at last the `following`; collective."""
        untold = [*self._untold]
        self._untold.clear()
        self._stop = stopped(self.program, self.record.loss, untold, self.inputs, following or {})
        return self._stop

    @one_call(TRAINER)
    def evaluate(self, batches: Iterable[tuple[Mapping[str, Any], int]]) -> dict[str, float]:
        """The loss and the metrics over batches, on rank 0; the parameters stay as they are.

        Each batch is this rank's pieces, with the number of records that it has on all ranks. The numbers are those of one batch of all
        records: a mean is over all labels that count, of a batch without any too, and NaN, `Undefined`, where there are none at all.
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
        """Measure every task of every batch of an evaluation, from the next one on. UsageError where the artifact has none."""
        return self._evaluated().record_times()

    def _evaluated(self) -> Evaluation:
        """The evaluation; UsageError where the artifact has none."""
        if self._evaluation is None:
            raise UsageError("the artifact has no evaluation\n  help: compile again")
        return self._evaluation

    def _lent(self, batches: Iterator[Item]) -> Iterator[Item]:
        """The batches, which the user's code may make."""
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
        """Writes a checkpoint of this step into `folder`, which all ranks share; its path.

        The oldest beyond `keep` are removed, but for the one of the step `best`. In the `background` files are written while training
        goes on, from a copy in memory; the checkpoint is whole once `finish_saving`, the next `save` or `close` has returned.
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
        """On rank 0, whether a checkpoint is being written in the background, or could not be."""
        saving = self._checkpoints.saving
        return saving is not None and not saving.is_complete

    @one_call(TRAINER)
    def finish_saving(self) -> None:
        """Waits for a checkpoint that is written in the background. CheckpointError on all ranks where it could not be."""
        self._checkpoints.finish()

    @one_call(TRAINER)
    def claim(self, folder: str | Path) -> None:
        """Takes the lock of a folder for the checkpoints of this run, until the trainer is closed.

        CheckpointError where another job has it. `save` does so where it was not done before.
        """
        self._checkpoints.claim(Path(folder))

    @one_call(TRAINER)
    def load(self, path: str | Path, option: str = "", averaged: bool = False) -> Mapping[str, JsonValue]:
        """Continues from a checkpoint, whatever plan wrote it; returns what was saved in addition to the tensors.

        Of a folder of checkpoints the newest intact one is taken; `source` says which. Nothing is taken from one before all of it was found
        to be as it was written: DamagedError, on all ranks alike, says what is not, and leaves everything as it was. `option` is how
        the user gives another path, for the message. With `averaged` the parameters are the checkpoint's moving averages.
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
        """Loads weights from a checkpoint, or from any safetensors file with the same names; the names of the loaded tensors.

        `only`: which weights, by name, on both sides; the others keep their values, such as the base beneath adapters. Checkpoints are
        chosen and proven as by `load`; so is a file that `partc checkpoint export` wrote.
        """
        self._check_last_loss()
        return self._checkpoints.load_weights(Path(path), strict, option, only)

    def close(self) -> None:
        """Releases sessions and buffers, after the call under way; collective. NonFiniteError as `check_last_loss` raises it."""
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
