"""What a model declares of its own distribution: placements, shardings, constraints of its dims, annotations, and its inputs' dataset."""

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
    """A placement of the nodes that match `pattern` on a rank or group; `where` is the source line that requests it, such as `model.py:12`.

    With a `role`, the ranks with that role in the plan hold the parameters of these nodes instead, and `on` names no ranks.
    """

    pattern: str
    on: On
    where: str
    role: str = ""


@dataclass(frozen=True)
class TpPlanEntry:
    """A line of the `tp_plan` of a `transformers` model: a pattern, its style, and the class that declares the line."""

    pattern: str
    style: str
    source: str


WINDOW = "window"


@dataclass(frozen=True)
class Decoding:
    """The way in which a model's configuration says that tokens are generated.

    `stop`: the tokens after which a sequence ends. `defaults`: options of requests, such as `{"temperature": 0.6}`. `ignored`: settings
    that change tokens but that no program follows, such as `num_beams: 4`. `longest`: the largest number of tokens of a sequence for which
    its rotary `positions`, such as `longrope`, have the same frequencies, or, where `positions` is `WINDOW`, before its cache is cut; 0
    where all lengths have the same ones.
    """

    stop: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()
    longest: int = 0
    positions: str = ""
    defaults: Mapping[str, int | float | list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Declared:
    """All declarations of one model.

    `placements` and `sharding` are in the order of the calls in a `model.py`. `symbols`: maps each dim to its constraints. `annotations`:
    the annotations of the ONNX standard in the model. `dataset`: how its inputs arrive. `targets`: the devices of its nodes. `warnings`:
    lines about the file for the user. `tp_plan`: where a proposal begins; no program follows it by itself. `start`: the tokens with which a
    decoder begins after an encoder. `adapters`: maps each module of a decoder to the adapters of the plan that add to its stacks A and B.
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
        """The least number of ranks that the model's placements need; mesh slices, whose mesh only a plan has, count as one rank."""
        named = [(one.on,) if isinstance(one.on, int) else one.on for one in self.placements if not one.role]
        return 1 + max((rank for ranks in named if isinstance(ranks, tuple) for rank in ranks), default=0)
