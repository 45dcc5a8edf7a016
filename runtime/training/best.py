"""Finds the best evaluation of a training, and how many evaluations ago it was.

    checkpoint: {folder: runs, keep: {last: 3, best: {metric: accuracy}}}
    early_stop: {metric: loss, patience: 5}

Only rank 0 has the metrics, so it alone judges. Its results are in each checkpoint's `meta`, with the position in the data: so a resumed
training judges like one that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from partc.runtime.artifact.training.train_settings import EarlyStop, LoopSettings, MetricChoice
from pydantic import JsonValue

from .trainer import Trainer

EARLY_STOP = 1 << 11
"""The reason to stop when the metric of `early_stop` has not improved for too long."""


class BestEvaluation:
    """The best value of a metric so far, the step after which it was measured, and the number of evaluations since then.

    `loss` is the loss's name among the metrics. A value that is not finite is never the best.
    """

    def __init__(self, choice: MetricChoice, loss: str) -> None:
        self.metric = loss if choice.metric == "loss" else choice.metric
        self.value: float | None = None
        self.step: int | None = None
        self.waited = 0
        self._sign = -1 if choice.mode == "max" else 1
        self._least = choice.min_delta if isinstance(choice, EarlyStop) else 0.0
        self._patience = choice.patience if isinstance(choice, EarlyStop) else math.inf

    def judge(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Records an evaluation; returns whether it is the best so far."""
        value = float(metrics.get(self.metric, math.nan))
        better = math.isfinite(value) and (self.value is None or self._sign * (self.value - value) > self._least)
        if better:
            self.value, self.step = value, step
        self.waited = 0 if better else self.waited + 1
        return better

    @property
    def is_over(self) -> bool:
        """Whether none of the last `patience` evaluations was better than the best before."""
        return self.waited >= self._patience

    def meta(self) -> dict[str, JsonValue]:
        """Returns the state that a checkpoint stores."""
        return {"metric": self.metric, "value": self.value, "step": self.step, "waited": self.waited}

    def resume(self, meta: JsonValue) -> None:
        """Restores the state from a checkpoint; it begins anew if the checkpoint has none or that of another metric."""
        match meta:
            case {"metric": self.metric, "value": None, "step": None, "waited": int(waited)}:
                self.waited = waited
            case {"metric": self.metric, "value": float(value), "step": int(step), "waited": int(waited)}:
                self.value, self.step, self.waited = value, step, waited
            case _:
                pass


class Judged:
    """Decides from the evaluations of a training which checkpoint stays as the best, and whether training ends.

    `resumed` is the `meta` of the checkpoint from which training continues.
    """

    def __init__(self, settings: LoopSettings, loss: str, resumed: Mapping[str, JsonValue]) -> None:
        best = settings.checkpoint.keep.best if settings.checkpoint else None
        wanted: dict[str, MetricChoice | None] = {"best": best, "early_stop": settings.early_stop}
        self._judges = {key: BestEvaluation(one, loss) for key, one in wanted.items() if one is not None}
        for key, one in self._judges.items():
            one.resume(resumed.get(key))

    def judge(self, trainer: Trainer, metrics: Mapping[str, float]) -> tuple[bool, bool]:
        """Returns whether the evaluation is to be saved as the best, and whether training ends; collective, the same on all ranks."""
        better = {key: one.judge(trainer.step, metrics) for key, one in self._judges.items() if trainer.rank == 0}
        to_save = "best" in self._judges and trainer.program.any_rank(better.get("best", False))
        return to_save, "early_stop" in self._judges and trainer.program.any_rank(trainer.rank == 0 and self.is_over)

    @property
    def is_over(self) -> bool:
        """Whether the metric of `early_stop` has not improved during its patience."""
        return "early_stop" in self._judges and self._judges["early_stop"].is_over

    @property
    def best_step(self) -> int | None:
        """The step whose checkpoint stays as the best; None where there is none."""
        return self._judges["best"].step if "best" in self._judges else None

    def meta(self) -> dict[str, JsonValue]:
        """Returns the state that a checkpoint stores."""
        return {key: one.meta() for key, one in self._judges.items()}
