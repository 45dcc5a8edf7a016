"""Writes the numbers of a training as scalars of TensorBoard, with the package `tensorboardX` or `tensorboard`, if one is installed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partc.runtime.artifact.training.metric_formula import Undefined
from partc.runtime.errors import UsageError

if TYPE_CHECKING:
    from partc.runtime.training.progress import Metrics, Progress


class TensorBoard:
    """Writes `train/loss`, `test/accuracy`, `train/lr` and so on by step into a folder. Raises UsageError where that is impossible."""

    def __init__(self, folder: str) -> None:
        if not any(map(find_spec, ("tensorboardX", "tensorboard"))):
            help = "pip install tensorboard, or take --metrics FILE"
            raise UsageError(f"--tensorboard: neither tensorboard nor tensorboardX is installed\n  help: {help}")
        try:
            self._add, self.close = _writer(folder)
        except OSError as error:
            reason = error.strerror or str(error)
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
