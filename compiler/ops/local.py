"""What a rule's `local` sees and does: one node on one rank, its operands as local shards, and nodes emitted in its place.

The program of every rank of a group is the same list of nodes; what differs by rank (an offset, a zero or one) must be a constant, never
another node, so that equal programs stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.ops.rule import Rule

Dim = int | str
Shape = tuple[Dim, ...]


@dataclass
class Local:
    """One node on one rank.

    `shards`: per factor the number of its shards (absent: 1); `shard`: which of them this rank has. `inputs` are the names of the
    local operands ("" where absent), `outputs` the names that must be made. `global_shapes`/`local_shapes`: by name, for operands
    and outputs, where known. `nodes` and `constants` collect what is emitted.
    """

    node: ir.Node
    rule: Rule
    shards: Mapping[str, int]
    shard: Mapping[str, int]
    inputs: Sequence[str]
    outputs: Sequence[str]
    global_shapes: Mapping[str, Shape | None]
    local_shapes: Mapping[str, Shape | None]
    nodes: list[ir.Node] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    value: Callable[[str], ir.Value] = field(default=lambda name: ir.Value(name=name))
    pieces: int = 1
    """Into how many pieces a batch is dealt out of which each of its parts has a share, over all ranks."""

    def num_shards(self, factor: str) -> int:
        """The number of shards of a factor."""
        return self.shards.get(factor, 1)

    def index(self, factor: str) -> int:
        """Which shard of a factor this rank has."""
        return self.shard.get(factor, 0)

    def constant(self, name: str, array: np.ndarray) -> str:
        """A constant of this rank; `name` says what it is (`offset`), and becomes `<node's path>.offset`."""
        full = f"{self.outputs[0]}.{name}"
        self.constants[full] = array
        return full

    def same(self, inputs: Sequence[str] | None = None, outputs: Sequence[str] | None = None, **changed: Any) -> None:
        """Emits the node itself, with other operands or attributes where given (an attribute of None is left out)."""
        attributes = {name: attr for name, attr in self.node.attributes.items() if name not in changed}
        extra = ir.convenience.convert_attributes({name: value for name, value in changed.items() if value is not None})
        self._append(
            self.node.op_type,
            inputs or self.inputs,
            outputs or self.outputs,
            [*attributes.values(), *extra],
            self.node.domain,
        )

    def emit(self, op_type: str, inputs: Sequence[str], word: str, **attributes: Any) -> str:
        """Emits a standard op whose one output stays inside; `word` says what that is, and it is called `<first output>.<word>`."""
        return self.give(op_type, inputs, f"{self.outputs[0]}.{word}", **attributes)

    def give(self, op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Emits a standard op whose one output has this name: one of `outputs`."""
        self._append(op_type, inputs, [output], ir.convenience.convert_attributes(attributes), "")
        return output

    def _append(
        self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Sequence[ir.Attr], domain: str
    ) -> None:
        self.nodes.append(
            ir.Node(
                domain,
                op_type,
                inputs=[self.value(name) if name else None for name in inputs],
                attributes=attributes,
                outputs=[ir.Value(name=name) for name in outputs],
            )
        )


def likeness(node: ir.Node) -> tuple[object, ...]:
    """Equal for nodes that are written alike: op, attributes, and the names of what they read and make."""
    attributes = [one for _, one in sorted(node.attributes.items())]
    return (
        node.domain,
        node.op_type,
        tuple(value and value.name for value in node.inputs),
        tuple(value.name for value in node.outputs),
        tuple(ir.serde.serialize_attribute(one).SerializeToString(deterministic=True) for one in attributes),
    )
