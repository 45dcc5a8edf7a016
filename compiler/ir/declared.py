"""A model's declarations of its own distribution: placements, shardings, promises of its dims, annotations, how its inputs arrive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import onnx_ir as ir
    from partc.compiler.annotations.read import Annotations
    from partc.compiler.dims.symbol import Symbol
    from partc.compiler.plan.rules import Dataset, ShardingRule
    from partc.compiler.plan.target import TargetRule

On: TypeAlias = int | tuple[int, ...] | Mapping[str, int]
"""The place that a model requests: a rank, a group, or coordinates along axes of the plan's mesh."""


@dataclass(frozen=True)
class Placement:
    """The nodes that match `pattern` run on this rank or group; `where` is the line that says so, such as `model.py:12`.

    With a `role` the ranks of that role of the plan have its parameters instead, and `on` names none.
    """

    pattern: str
    on: On
    where: str
    role: str = ""


@dataclass(frozen=True)
class TpPlanEntry:
    """A line of the `tp_plan` of a model of `transformers`: a pattern, one of its styles, and the class that has the line."""

    pattern: str
    style: str
    source: str


WINDOW = "window"


@dataclass(frozen=True)
class Decoding:
    """How a model's configuration wants its tokens made. `stop`: the tokens behind which a sequence ends. `defaults`: options of requests,
    such as `{"temperature": 0.6}`. `ignored`: settings that change
    tokens, and that no program follows, such as `num_beams: 4`. `longest`: the most tokens of a sequence for which its rotary
    `positions`, such as `longrope`, have the same frequencies, or, of `WINDOW`, before its cache is cut; 0 where all are alike.
    """

    stop: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()
    longest: int = 0
    positions: str = ""
    defaults: Mapping[str, int | float | list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Declared:
    """All declarations of one model.

    `placements` and `sharding` are in the order of the calls in a `model.py`, `symbols` are the constraints of its dims by name,
    `annotations` the standard's that the model carries, `dataset` how its inputs arrive, `targets` the devices of its nodes,
    `warnings` what the user should know of the file. `tp_plan` is what a proposal begins with; no program follows it by itself. `start`:
    the tokens with which a decoder behind an encoder begins. `adapters`: maps each module of a
    decoder to which adapters of the plan add to their stacks A and B.
    """

    placements: tuple[Placement, ...] = ()
    symbols: Mapping[str, Symbol] = field(default_factory=dict)
    sharding: tuple[ShardingRule, ...] = ()
    annotations: Annotations | None = None
    dataset: Dataset | None = None
    targets: tuple[TargetRule, ...] = ()
    warnings: tuple[str, ...] = ()
    tp_plan: tuple[TpPlanEntry, ...] = ()
    start: tuple[int, ...] = ()
    decoding: Decoding = field(default_factory=Decoding)
    adapters: Mapping[str, Mapping[str, ir.TensorProtocol]] = field(default_factory=dict)

    @property
    def least_ranks(self) -> int:
        """The number of ranks that the model's placements need at least; slices of a mesh that only a plan has count one."""
        named = [(one.on,) if isinstance(one.on, int) else one.on for one in self.placements if not one.role]
        return 1 + max((rank for ranks in named if isinstance(ranks, tuple) for rank in ranks), default=0)
