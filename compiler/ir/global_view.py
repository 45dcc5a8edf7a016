"""The global view of a program: the single-device model with its plan, where every node runs, and how it is sharded.

The passes before `localize` fill it. What is written for ranks (`lower/`) reads it, and is itself part of the `Program`, which adds what
ranks do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import onnx_ir as ir
from partc.compiler.ir.graph import Reads, bodies, captured_by, reads_of
from partc.compiler.ir.sharded import Placed
from partc.compiler.ir.training import ProgramKind, Training
from partc.compiler.ir.value_info import SymbolInfo, ValueInfo

if TYPE_CHECKING:
    from partc.compiler.annotations.followed import Followed
    from partc.compiler.ir.choice import NodeOnGroup, NodeSharding, Pinned
    from partc.compiler.ir.declared import Declared
    from partc.compiler.ir.microbatched import Microbatched
    from partc.compiler.plan.rules import Plan


@dataclass(frozen=True)
class GlobalView:
    """What is known of a model as a whole; `name` is its file's, `paths` gives every node of the main graph its dotted path.

    `file_names`: by path the name in its file of each node that the model was given with, before any fell away or became several.
    Of a plan that trains: `kind` is what the program does of it, `trainable` names the weights of the model that may be learned.
    `strict`: whether changes of layout that nobody asked for are refused.
    """

    name: str
    model: ir.Model
    plan: Plan
    declared: Declared
    paths: Mapping[ir.Node, str]
    file_names: Mapping[str, str] = field(default_factory=dict)
    kind: ProgramKind = ProgramKind.STEP
    trainable: tuple[str, ...] = ()
    strict: bool = False
    symbols: Mapping[str, SymbolInfo] = field(default_factory=dict)
    values: Mapping[ir.Value, ValueInfo] = field(default_factory=dict)
    followed: Mapping[ir.Node, Followed] = field(default_factory=dict)
    placement: Mapping[ir.Node, Placed] = field(default_factory=dict)
    stages: Mapping[ir.Node, int] = field(default_factory=dict)
    """The stage of every node that is on one group, where the plan names stages."""
    targets: Mapping[ir.Node, str] = field(default_factory=dict)
    """The kind of device that runs a node within its rank; of constants and shapes none, and of nothing where the plan names no target."""
    update_targets: Mapping[ir.Value, str] = field(default_factory=dict)
    """By parameter the kind of device that updates it, and keeps it."""
    choices: Mapping[NodeOnGroup, NodeSharding] = field(default_factory=dict)
    given: Pinned | None = None
    training: Training | None = None
    microbatched: Microbatched | None = None
    """What a microbatch is, of a program that runs by microbatches without training."""
    warnings: tuple[str, ...] = ()

    @cached_property
    def derived_paths(self) -> frozenset[str]:
        """The paths of all nodes: the reason of a derived sharding is one of these, that of a given one is a line."""
        return frozenset(self.paths.values())

    @cached_property
    def means(self) -> dict[ir.Node, ir.Node]:
        """By node that makes the divisor of a mean, for those who add means up, the node that makes the mean: they stand together."""
        divisors = self.training.denominators if self.training is not None else {}
        made = {value.name: value.producer() for value in self.model.graph.outputs}
        pairs = ((made.get(divisor), made.get(mean)) for mean, divisor in divisors.items())
        return {divisor: mean for divisor, mean in pairs if divisor is not None and mean is not None}

    @cached_property
    def around(self) -> dict[ir.Node, tuple[ir.Value, ...]]:
        """Per node of the main graph, the distinct values that its bodies read from outside; they may be its operands, too."""
        return {node: tuple(dict.fromkeys(captured_by(node))) for node in self.model.graph}

    @cached_property
    def own_names(self) -> frozenset[str]:
        """The names of all values of the model, those in bodies included."""
        return frozenset(_names_in(self.model.graph))

    @cached_property
    def reads(self) -> Reads:
        """Per node of the main graph, the distinct values that it reads, those captured by its bodies included."""
        return reads_of(self.model.graph)


def _names_in(graph: ir.Graph) -> Iterator[str]:
    for value in (*graph.inputs, *graph.initializers.values()):
        yield value.name or ""
    for node in graph:
        yield from (value.name or "" for value in node.outputs)
        for body in bodies(node):
            yield from _names_in(body)
