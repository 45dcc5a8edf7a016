"""The artifact's record of its training: the outputs that are the loss and the metrics, the optimizer, the settings of the loop."""

from __future__ import annotations

from partc.runtime.artifact.training.scalars import OptimizerRecord
from partc.runtime.artifact.training.train_settings import LoopSettings
from pydantic import BaseModel, ConfigDict


class MetricsRecord(BaseModel):
    """The outputs that are the loss and the metrics, and how those of several batches are one number.

    `formulas`: of a metric whose output are sums the formula that makes one number of all batches (`training/metric_formula.py`). Others
    are numbers of a batch: those in `sums` are sums over its records, others means; `denominators` names the output that says what a mean
    is divided by, where that does not follow from the records.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)

    loss: str
    metrics: list[str] = []
    formulas: dict[str, str] = {}
    denominators: dict[str, str] = {}
    sums: list[str] = []


class TrainingRecord(MetricsRecord):
    """How an artifact is trained: the loss and the metrics, and what the runtime needs beside the programs.

    `scalars`: inputs of rank files without dims, new in every step: `lr`, `scale`, `step` and what `optimizer` derives from its number.
    `settings`: the keys of the plan that the loop reads; their paths are relative to `folder`, the plan's, as the artifact sees it; empty:
    to the artifact. `fixed`: inputs that hold no records, but one value for all. `guard`: an output that every rank has before it updates
    anything; where it is not finite the step replaces nothing of what is kept. `sum_over_ranks`: gradients are those of the sum over the
    batch's shards of their means. `not_streamed`: why a pipeline evaluates whole batches. `adapter`: the alpha
    of each module of an adapter that is trained, which adds alpha / rank times a product. `parts`: of how many parts of a batch sums have
    one order, whatever the number of ranks; 0 where they have that of the ranks. `copies`: the steps from one copy of the state in memory
    to the next; 0 without copies.
    """

    sum_over_ranks: bool = False
    scalars: list[str] = []
    optimizer: OptimizerRecord
    settings: LoopSettings = LoopSettings()
    folder: str = ""
    fixed: list[str] = []
    guard: str = ""
    not_streamed: str = ""
    adapter: dict[str, float] = {}
    parts: int = 0
    copies: int = 0
