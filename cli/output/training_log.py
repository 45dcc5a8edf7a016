"""The log of a training: lines on stdout, and every number as a line of JSON in a file for plotting.

step 100 of 18750   epoch 0.05   loss 0.4312   accuracy 0.8719   lr 0.01   24100 records/s   about 25 s left

Writes the numbers of a training as scalars of TensorBoard, with the package `tensorboardX` or `tensorboard`, if one is installed.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
from partc.cli.output import console, lookups
from partc.cli.output.table import Table
from partc.cli.output.training_stats import trained_tensors
from partc.runtime.artifact.training.metric_formula import Confusion, Undefined, json_numbers
from partc.runtime.artifact.training.train_settings import EarlyStop, LoopSettings
from partc.runtime.checkpoint.index import steps
from partc.runtime.errors import UsageError, reason_of
from partc.runtime.files.counted import PROGRESS, read_json
from partc.runtime.files.replace import write_text
from partc.runtime.files.writers import open_to_append
from partc.runtime.units import count, size_text

if TYPE_CHECKING:
    from partc.runtime.data.loader import Loader
    from partc.runtime.training.progress import Metrics, Progress
    from partc.runtime.training.trainer import Trainer


_NESTED = (Mapping, list, tuple)
_MOST_CLASSES = 20
Watch: TypeAlias = Callable[[int, int | None, str], None]


def watch_through_file(file: Path) -> Watch:
    """Returns a `Watch` that writes the progress to a file, for the launching process, which has the terminal and calls `read_progress`."""

    def watch(step: int, total: int | None, numbers: str) -> None:
        write_text(file, json.dumps([step, total, numbers]), settle=False)

    return watch


def read_progress(file: Path) -> tuple[int, int | None, str] | None:
    """Returns the progress last written to the file; None where there is none."""
    try:
        found = read_json(file, PROGRESS)
    except (OSError, ValueError):
        return None
    return tuple(found) if isinstance(found, list) else None


class TrainingLog:
    """The log of rank 0. `metrics` is the file of numbers, to which lines are appended.

    `watch` replaces the lines of progress: it is called with the step, the total and the other numbers, and shows a bar.
    A file whose name ends in .csv has the rows of training and of evaluations; any other has a line of JSON for each row. A `quiet` log
    only writes the numbers.
    """

    def __init__(self, metrics: str | None, watch: Watch | None = None, quiet: bool = False) -> None:
        self.watch, self.quiet = watch, quiet
        self._file: IO[str] | None = None
        self._is_csv = bool(metrics) and str(metrics).endswith(".csv")
        self._columns: list[str] = []
        if metrics:
            self._file = open_to_append(metrics)  # it stays open during the training

    def begins(self, trainer: Trainer, loader: Loader, settings: LoopSettings) -> None:
        """Prints the sizes of the training; the number of records is unknown where they come as a stream."""
        manifest, total = trainer.manifest, settings.total_steps(loader.batches)
        parameters = trained_tensors(manifest)
        elements = sum(parameters.values())
        assert manifest.training is not None
        report = {"tokens": "tokens_per_second", "memory": "memory_bytes"}
        further = [report.get(name, name) for name in manifest.training.settings.report or ()]
        names = [manifest.training.loss, *manifest.training.metrics, *further]
        self._columns = ["kind", "step", "epoch", *names, "lr", "records_per_second"]
        records = f"{count(loader.records, 'record')}, " if loader.records is not None else ""
        batches = "a stream of batches" if loader.batches is None else count(loader.batches, "batch", "batches")
        until = count(settings.epochs or 1, "epoch") if total is None else count(total, "step")
        self._print(
            f"{count(manifest.ranks, 'rank')}, {count(len(parameters), 'parameter')} of {elements:,} elements; "
            f"{records}{batches} of {loader.batch}; {until}"
        )

    def warn_of_other_run(self, folder: Path) -> None:
        """Warns where a new run writes its checkpoints into the folder of another run."""
        if there := steps(folder):
            console.echo(
                f"warning: {folder} has checkpoints of another run, up to step {there[-1][0]}: `keep` does not remove them, --resume "
                "takes the latest step, and equal steps are replaced; use a separate folder for each run",
                err=True,
            )

    def resumed(self, step: int, path: Path, place: str = "") -> None:
        """Prints the checkpoint from which training resumes, and how its place in the data is found, where that takes time."""
        self._print(f"resumes after step {step} from {path}")
        if place:
            self._print(place)

    def stepped(self, progress: Progress) -> None:
        """Logs the metrics of the steps since the last line."""
        more = "".join(f"   {_further(name, value)}" for name, value in progress.more.items())
        numbers = f"{_shown(progress.metrics)}{more}   lr {progress.rate:.4g}   {progress.speed:,.0f} records/s"
        if self.watch is not None:
            self.watch(progress.step, progress.total, numbers)
        else:
            of = "" if progress.total is None else f" of {progress.total:,}"
            epoch = (
                f"{progress.epoch:.2f}"
                if progress.records is None
                else f"{progress.epoch:.0f}, {progress.records:,} records"
            )
            left = "" if progress.remaining is None else f"   {_time(progress.remaining)} left"
            self._print(f"step {progress.step:,}{of}   epoch {epoch}   {numbers}{left}")
        self._write(
            {
                "kind": "train",
                "step": progress.step,
                "epoch": round(progress.epoch, 6),
                **json_numbers(progress.metrics),
                **progress.more,
                "lr": progress.rate,
                "records_per_second": round(progress.speed, 1),
            }
        )

    def not_finite(self, step: int, outputs: Mapping[str, Any], skipped: bool) -> None:
        """Warns of a loss, or a gradient, that is not finite."""
        numbers = {
            name: value if isinstance(value, float) else np.asarray(value).item() for name, value in outputs.items()
        }
        what = "a gradient is not finite; the step is skipped" if skipped else "the loss is not finite"
        console.echo(f"warning: step {step}: {what}   {_shown(numbers)}", err=True)
        self._write({"kind": "nonfinite", "step": step, "skipped": skipped})

    def evaluated(self, step: int, epoch: float, metrics: Metrics) -> None:
        """Logs the metrics of an evaluation."""
        self._print("\n".join([f"evaluated after step {step}   {_shown(metrics)}", *_tables(metrics)]))
        self._write({"kind": "test", "step": step, "epoch": round(epoch, 6), **json_numbers(metrics)})

    def saved(self, step: int, path: Path) -> None:
        """Prints the folder and size of a checkpoint."""
        total = sum(file.stat().st_size for file in path.iterdir())
        here = Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path
        self._print(f"wrote {shown}: {size_text(total)}")

    def stopped_early(self, step: int, why: EarlyStop) -> None:
        """Prints the reason why training ended before its last step."""
        evaluations = count(why.patience, "evaluation")
        self._print(f"stopped early after step {step}: {why.metric} was no better than its best in {evaluations}")

    def targets(self, line: str) -> None:
        """Prints the line about the work of the ranks' targets."""
        self._print(line)

    def looked_up(self, step: int, counts: Mapping[str, Any]) -> None:
        """Logs the ranks' lookups in tables that several ranks share."""
        self._print(lookups.line(counts))
        self._write({"kind": "lookups", "step": step, **counts})

    def close(self) -> None:
        """Closes the file of numbers."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _print(self, line: str) -> None:
        if not self.quiet:
            console.echo(line)
            sys.stdout.flush()

    def _write(self, row: dict[str, object]) -> None:
        if self._file is None:
            return
        if not self._is_csv:
            self._file.write(json.dumps(row) + "\n")
        elif row["kind"] in ("train", "test"):
            self._columns = self._columns or [*row]
            rows = csv.DictWriter(self._file, self._columns, extrasaction="ignore")
            if not self._file.seekable() or not self._file.tell():
                rows.writeheader()
            rows.writerow({key: json.dumps(one) if isinstance(one, _NESTED) else one for key, one in row.items()})
        self._file.flush()


def _shown(metrics: Metrics) -> str:
    return "   ".join(f"{name} {_number(value)}" for name, value in metrics.items())


def _number(value: float) -> str:
    if isinstance(value, Undefined):
        return f"undefined ({value.reason})"
    if isinstance(value, Confusion) and value.named:
        return f"{value:.4f} ({', '.join(f'{name} {number:,}' for name, number in value.named.items())})"
    return f"{value:.4f}"


def _tables(metrics: Metrics) -> Iterator[str]:
    """Yields the confusion tables by label and prediction, where there are few classes; files have them for any number."""
    for name, value in metrics.items():
        if isinstance(value, Confusion) and not value.named:
            if len(value.counts) > _MOST_CLASSES:
                yield f"{name}: {len(value.counts):,} classes, of which --metrics FILE has the counts"
                continue
            table = Table(["label", *(f">{k}" for k in range(len(value.counts)))])
            for k, row in enumerate(value.counts):
                table.add(k, *row)
            yield from (f"{name}, by prediction", *table.lines())


def _further(name: str, value: float) -> str:
    """Returns the text of an additional number of a progress line."""
    if name == "tokens_per_second":
        return f"{value:,.0f} tokens/s"
    return f"memory {size_text(round(value))}" if name == "memory_bytes" else f"{name} {value:.4g}"


def _time(seconds: float) -> str:
    """A remaining time, to the precision of the estimate."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class TensorBoard:
    """Writes `train/loss`, `test/accuracy`, `train/lr` and so on by step into a folder. Raises UsageError where that is impossible."""

    def __init__(self, folder: str) -> None:
        if not any(map(find_spec, ("tensorboardX", "tensorboard"))):
            help = "pip install tensorboard, or take --metrics FILE"
            raise UsageError(f"--tensorboard: neither tensorboard nor tensorboardX is installed\n  help: {help}")
        try:
            self._add, self.close = _writer(folder)
        except OSError as error:
            reason = reason_of(error)
            raise UsageError(
                f"--tensorboard {folder}: cannot be written: {reason}\n  help: give a folder that you may write"
            ) from None

    def stepped(self, progress: Progress) -> None:
        """Writes the metrics of the steps since the last line."""
        more = {"lr": progress.rate, "records_per_second": progress.speed, "epoch": progress.epoch}
        self._write("train", progress.step, {**progress.metrics, **progress.more, **more})

    def not_finite(self, step: int, outputs: Mapping[str, Any], skipped: bool) -> None:
        """Writes that a step was not finite."""
        self._write("train", step, {"nonfinite": 1.0})

    def evaluated(self, step: int, epoch: float, metrics: Metrics) -> None:
        """Writes the metrics of an evaluation."""
        self._write("test", step, metrics)

    def saved(self, step: int, path: Path) -> None:
        """Ignores a saved checkpoint."""

    def _write(self, kind: str, step: int, numbers: Metrics) -> None:
        for name, value in numbers.items():
            if not isinstance(value, Undefined):
                self._add(f"{kind}/{name}", float(value), step)


def _writer(folder: str) -> tuple[Callable[[str, float, int], object], Callable[[], None]]:
    """Returns a function that adds a scalar, and one that closes the files."""
    if find_spec("tensorboardX"):
        writer = import_module("tensorboardX").SummaryWriter(folder)
        return writer.add_scalar, writer.close
    events = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(folder)
    event = import_module("tensorboard.compat.proto.event_pb2").Event
    summary = import_module("tensorboard.compat.proto.summary_pb2").Summary

    def add(name: str, value: float, step: int) -> None:
        scalar = summary(value=[summary.Value(tag=name, simple_value=value)])
        events.add_event(event(wall_time=time.time(), step=step, summary=scalar))

    return add, events.close
