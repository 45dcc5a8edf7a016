"""An op that reads a weight only for its size reads the shard of the weight's other reader: each rank knows the number of shards.

h = MatMul(x, w), w in two shards        s = Shape(w)     would keep the whole weight beside its shard, and train it twice
"""

from __future__ import annotations

from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.sized import SIZES
from partc.compiler.sharding.propagate import Propagation


def ask_shards(done: Propagation) -> None:
    """Gives each node that reads a weight only for its size the sharding of the weight's first reader that shards it."""
    choices = done.choices
    for instance, choice in choices.items():
        node = instance.node
        if node.op_type not in SIZES or node.domain not in ("", "ai.onnx") or choice.axes or not choice.open:
            continue
        (value,) = node.inputs
        letters = choice.rule.inputs[0]
        if value is None or letters is None or not value.is_initializer():
            continue
        for use in value.uses():
            other = choices.get(NodeOnGroup(use.node, instance.group))
            layout = other.input(use.idx) if other is not None and other.mesh == choice.mesh else None
            if layout is not None and any(layout.cuts) and not layout.partial:
                cuts = {letter: axes for letter, axes in zip(letters, layout.cuts, strict=True) if axes}
                choice.axes |= cuts
                choice.why |= dict.fromkeys(cuts, done.paths[use.node])
                break
