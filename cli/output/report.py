"""What a training tells its user: lines on stdout, and every number as a line of JSON in a file for those who plot.

step 100 of 18750   epoch 0.05   loss 0.4312   accuracy 0.8719   lr 0.01   24100 records/s   about 25 s left
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
from partc.cli.output import say
from partc.cli.output.present import count, size
from partc.runtime.checkpoint.index import steps
from partc.runtime.files.replace import write_text

if TYPE_CHECKING:
    from partc.runtime.data import Loader
    from partc.runtime.training.loop import Metrics, Progress
    from partc.runtime.training.trainer import Trainer


Watch: TypeAlias = Callable[[int, int, str], None]


def watched_through(file: Path) -> Watch:
    """Leaves what is told in a file, for the launching process, which has the terminal (see `seen`)."""

    def watch(step: int, total: int, numbers: str) -> None:
        write_text(file, json.dumps([step, total, numbers]), settle=False)

    return watch


def seen(file: Path) -> tuple[int, int, str] | None:
    """What was last left in the file; None where nothing is."""
    try:
        step, total, numbers = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return step, total, numbers


def _at_once(path: str, flags: int) -> int:
    """Opens a file that is appended to; a pipe only where somebody reads it, rather than to wait for that."""
    handle = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(handle, True)
    return handle


class Report:
    """The listener of rank 0. `metrics` is the file of numbers, to which is appended.

    `watch`: who shows a bar instead of a line for every few steps; it is given the step, the total and the line's other numbers.
    A `quiet` one says nothing, and writes the numbers only.
    """

    def __init__(self, metrics: str | None, unit: str, watch: Watch | None = None, quiet: bool = False) -> None:
        self.unit, self.watch, self.quiet = unit, watch, quiet
        self._file: IO[str] | None = None
        if metrics:
            self._file = open(metrics, "a", encoding="utf-8", opener=_at_once)  # noqa: SIM115, open as long as training goes on

    def begins(self, trainer: Trainer, loader: Loader, total: int) -> None:
        """Says what is about to be done."""
        manifest, order = trainer.manifest, loader.order
        parameters = {record.tensor: record for record in manifest.state if record.kind == "parameter" and record.next}
        elements = sum(_elements(record.shape) for record in parameters.values())
        self._say(
            f"{count(manifest.ranks, 'rank')}, {count(len(parameters), 'parameter')} of {elements:,} numbers; "
            f"{order.records:,} {self.unit}, {count(order.batches, 'batch', 'batches')} of {order.batch}; {count(total, 'step')}"
        )

    def begins_beside(self, folder: Path) -> None:
        """Warns where a run that begins anew writes its checkpoints beside those of another."""
        if there := steps(folder):
            say.echo(
                f"warning: {folder} has checkpoints of another run, up to step {there[-1][0]}: `keep` leaves them, --resume takes the "
                "latest step, and equal steps are replaced; give each run a folder of its own",
                err=True,
            )

    def resumed(self, step: int, path: Path) -> None:
        """Says where training goes on."""
        self._say(f"goes on after step {step}, from {path}")

    def stepped(self, progress: Progress) -> None:
        """Some steps are done."""
        numbers = f"{_shown(progress.metrics)}   lr {progress.rate:.4g}   {progress.speed:,.0f} {self.unit}/s"
        if self.watch is not None:
            self.watch(progress.step, progress.total, numbers)
        else:
            at = f"step {progress.step:,} of {progress.total:,}   epoch {progress.epoch:.2f}"
            self._say(f"{at}   {numbers}   {_time(progress.remaining)} left")
        self._write(
            {
                "kind": "train",
                "step": progress.step,
                "epoch": round(progress.epoch, 6),
                **progress.metrics,
                "lr": progress.rate,
                "records_per_second": round(progress.speed, 1),
            }
        )

    def not_finite(self, step: int, outputs: Mapping[str, Any], skipped: bool) -> None:
        """A step's loss, or a gradient, is no finite number."""
        numbers = {name: float(np.asarray(value)) for name, value in outputs.items()}
        what = "a gradient is no finite number; the step changes nothing" if skipped else "the loss is no finite number"
        say.echo(f"warning: step {step}: {what}   {_shown(numbers)}", err=True)
        self._write({"kind": "nonfinite", "step": step, "skipped": skipped})

    def evaluated(self, step: int, epoch: float, metrics: Metrics) -> None:
        """The model was evaluated."""
        self._say(f"evaluated after step {step}   {_shown(metrics)}")
        self._write({"kind": "test", "step": step, "epoch": round(epoch, 6), **metrics})

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint was written."""
        total = sum(file.stat().st_size for file in path.iterdir())
        here = Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path
        self._say(f"wrote {shown}: {size(total)}")

    def close(self) -> None:
        """Ends the file of numbers."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _say(self, line: str) -> None:
        if not self.quiet:
            say.echo(line)
            sys.stdout.flush()

    def _write(self, row: dict[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


def _shown(metrics: Metrics) -> str:
    return "   ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _elements(shape: list[int]) -> int:
    product = 1
    for dim in shape:
        product *= dim
    return product


def _time(seconds: float) -> str:
    """A time to come, as exact as it is known."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
