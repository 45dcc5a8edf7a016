"""One rank's end of a training: steps, evaluation and checkpoints. Every call is collective over the ranks.

with load_trainer("build") as trainer:                    # on every rank
    for batch in batches:                                 # this rank's pieces
        outputs = trainer.train(batch)                    # {"loss": ...} on rank 0
    trainer.save("checkpoints")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from pydantic import JsonValue

from ..artifact import open_artifact
from ..errors import InputError, UsageError
from ..format import Manifest, Port, TrainingRecord
from ..program import OnError, Outputs, Program, load
from .checkpoint import Checkpoint
from .checkpoint_match import OPTIMIZER, initial, meet, meet_weights
from .checkpoint_save import save
from .schedule import Rate, scalars, schedule
from .state import SUM

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..transport import Transport

STEP = "step"
Result = TypeVar("Result")


class Trainer:
    """A training program with the evaluation of the same model, over one state."""

    def __init__(
        self, program: Program, evaluation: Program | None, rate: Rate, accumulation: Program | None = None
    ) -> None:
        record = program.manifest.training
        assert record is not None
        self.program = program
        self.record: TrainingRecord = record
        self.rate = rate
        self.step = 0
        """The number of steps taken so far."""
        self._evaluation, self._accumulation = evaluation, accumulation
        self._kept = [one for one in program.manifest.state if one.kind != SUM]
        self._numbers = [name for name in record.scalars if name != STEP]
        self._hyper = {name: float(value) for name, value in record.optimizer.items() if isinstance(value, int | float)}
        known = {port.name for port in program.inputs}
        self._scalars: dict[str, np.ndarray[Any, Any]] = {
            name: np.zeros((), np.int64 if name == STEP else np.float32) for name in record.scalars if name in known
        }

    @property
    def rank(self) -> int:
        """This rank."""
        return self.program.rank

    @property
    def manifest(self) -> Manifest:
        """The index of the artifact."""
        return self.program.manifest

    @property
    def inputs(self) -> list[Port]:
        """What this rank reads of a batch."""
        return [port for port in self.program.inputs if port.name not in self.record.scalars]

    @property
    def ports(self) -> list[Port]:
        """The inputs of the model, of all ranks."""
        return [port for port in self.manifest.inputs if port.name not in self.record.scalars]

    def train(self, batch: Mapping[str, object]) -> Outputs:
        """One step on this rank's pieces of a batch; the loss and the metrics, on rank 0, before the update."""
        for name, value in scalars(self._numbers, self.step, {**self._hyper, "lr": self.rate(self.step)}).items():
            if name in self._scalars:
                self._scalars[name][...] = value
        if self._accumulation is not None:
            return self._train_in_parts(batch, self._accumulation)
        if STEP in self._scalars:
            self._scalars[STEP][...] = self.step
        outputs = self.program({**batch, **self._scalars})
        self.step += 1
        return outputs

    def _train_in_parts(self, batch: Mapping[str, object], accumulation: Program) -> Outputs:
        """One step on a batch whose parts run one after the other; what comes out are means over the parts."""
        count = self.record.accumulate
        found: list[Outputs] = []
        for part in range(count):
            inputs = {name: _part(name, value, part, count) for name, value in batch.items()}
            if STEP in self._scalars:
                inputs[STEP] = np.array(self.step * count + part, np.int64)
            if part < count - 1:
                found.append(accumulation(inputs))
            else:
                found.append(self.program({**inputs, **{n: v for n, v in self._scalars.items() if n != STEP}}))
        for array in self.program.state.sums():
            array.fill(0)
        self.step += 1
        return {name: np.mean([np.asarray(one[name]) for one in found], axis=0, dtype=np.float32) for name in found[0]}

    def evaluate(self, batches: Iterable[tuple[Mapping[str, Any], int]]) -> dict[str, float]:
        """The loss and the metrics over batches, on rank 0; the parameters stay as they are.

        Each batch is this rank's pieces, with the number of records that it has on all ranks, by which it is weighed.
        """
        if self._evaluation is None:
            raise UsageError("the artifact has no evaluation\n  help: compile again")
        totals: dict[str, float] = {}
        records = 0
        for batch, size in batches:
            records += size
            for name, value in self._evaluation(batch).items():
                totals[name] = totals.get(name, 0.0) + np.asarray(value).item() * size
        return {name: total / max(records, 1) for name, total in totals.items()}

    def save(self, folder: str | Path, meta: Mapping[str, JsonValue] | None = None, keep: int | None = None) -> Path:
        """Writes a checkpoint of this step into `folder`, which all ranks share; its path."""
        known: dict[str, JsonValue] = {OPTIMIZER: self.record.optimizer.get("type", ""), **(meta or {})}
        state, share = self.program.state, self.program.share
        return save(Path(folder), self.step, self.rank, state.arrays(), self._kept, known, share, keep)

    def load(self, path: str | Path) -> Mapping[str, JsonValue]:
        """Goes on where a checkpoint was written, whatever plan wrote it; what was saved beside the tensors."""
        checkpoint = self._together(lambda: Checkpoint.open(path))
        self._together(lambda: meet(checkpoint, self._kept, str(self.record.optimizer.get("type", ""))))
        self._together(lambda: self._fill(checkpoint, {record.tensor for record in self._kept}))
        self.step = checkpoint.index.step
        return checkpoint.index.meta

    def begin(self, path: str | Path, strict: bool = True) -> frozenset[str]:
        """Takes weights from a checkpoint, or from any safetensors file with the same names; the names of those taken."""
        source = self._together(lambda: initial(path))
        names = self._together(lambda: meet_weights(source, self._kept, strict))
        self._together(lambda: self._fill(source, names))
        return names

    def _fill(self, checkpoint: Checkpoint, names: Iterable[str]) -> None:
        wanted = set(names)
        for record, array in self.program.state.arrays():
            if record.tensor in wanted:
                checkpoint.load_into(record, self.rank, array)

    def _together(self, action: Callable[[], Result]) -> Result:
        """The action's result where it succeeds on every rank; else the first rank's failure on all."""
        failure: Exception | None = None
        result: Result | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        texts = self.program.share("" if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text:
                raise UsageError(f"rank {rank}: {text}")
        return result  # type: ignore[return-value]

    def close(self) -> None:
        """Gives back sessions and buffers; collective."""
        self._release()
        self.program.close()

    def _release(self) -> None:
        for other in (self._evaluation, self._accumulation):
            if other is not None:
                other.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()
        self.program.__exit__(kind, error, trace)


def load_trainer(
    folder: str | Path,
    comm: MPI.Intracomm | Transport | None = None,
    *,
    rate: Rate | None = None,
    threads: int | None = None,
    trust: bool = False,
    stall: float = 30.0,
    on_error: OnError = "raise",
    providers: Sequence[str] = ("CPUExecutionProvider",),
) -> Trainer:
    """This rank's trainer of the artifact in `folder`; collective over `comm`, by default MPI.COMM_WORLD.

    `rate` gives the learning rate of a step, counted from 0, in place of the plan's schedule. UsageError for an artifact that does not
    train.
    """
    place = Path(folder)
    record = open_artifact(place, trust=True).manifest.training
    if record is None:
        raise UsageError(f"{place}: it was compiled to run, not to train\n  help: compile it by a plan with `train:`")
    if rate is None:
        rate = schedule(record.schedule or None, _base(record), "schedule", base_folder(place, record))
    program = load(place, comm, threads=threads, trust=trust, stall=stall, on_error=on_error, providers=providers)
    evaluation = program.beside(place / record.evaluation, trust) if record.evaluation else None
    accumulation = program.beside(place / record.accumulation, trust) if record.accumulation else None
    return Trainer(program, evaluation, rate, accumulation)


def _part(name: str, value: object, part: int, count: int) -> object:
    """One of `count` equal parts of what a rank reads of an input."""
    array = np.asarray(value)
    if not array.ndim or len(array) % count:
        found = f"{len(array)} records" if array.ndim else "a number"
        raise InputError(
            f"input '{name}': {found} cannot be cut into {count} parts, as `accumulate` of the plan says\n"
            f"  help: give every rank a multiple of {count}"
        )
    size = len(array) // count
    return array[part * size : (part + 1) * size]


def base_folder(folder: Path, record: TrainingRecord) -> Path:
    """Where the files are that a plan names: beside the plan; the current folder where that is not known."""
    told = record.settings.get("folder")
    return folder / told if isinstance(told, str) and (folder / told).is_dir() else Path()


def _base(record: TrainingRecord) -> float:
    lr = record.optimizer.get("lr")
    return float(lr) if isinstance(lr, int | float) else 0.0
