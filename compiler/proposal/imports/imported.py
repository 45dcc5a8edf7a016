"""A distribution that a file of another system describes, in partc's terms, and the statements that have no counterpart in partc."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from partc.compiler.ir.declared import TpPlanEntry


@dataclass(frozen=True)
class Strategy:
    """An operator of the file: the weight that it reads, the number of shards of each dim of each input, and its pipeline stage.

    `weight_shape` is the weight's there, by which it is seen whether the model has it transposed; () where the file has none.
    """

    op: str
    weight: str
    inputs: tuple[tuple[int, ...], ...]
    stage: int = 0
    weight_shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Imported:
    """`source` names the files. `degrees`: ranks along `tp`, `dp` and `stages`, or `ranks` of a stage, where they say so.

    `styles` are entries of a tensor parallel plan, `strategies` operators with their shards; `training` holds lines below `train:`,
    `pipeline` and `precision` those sections' text, `microbatches` how many of them a batch is cut into. `ignored` says line by line what
    is not taken, and why.
    """

    source: str = ""
    degrees: Mapping[str, int] = field(default_factory=dict)
    styles: tuple[TpPlanEntry, ...] = ()
    strategies: tuple[Strategy, ...] = ()
    training: tuple[str, ...] = ()
    microbatches: int = 1
    pipeline: str = ""
    precision: str = ""
    ignored: tuple[str, ...] = ()
