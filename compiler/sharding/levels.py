"""The preference that `level` of a sharding rule expresses where the plan leaves a choice, after all shardings are derived from the
declared ones.

    0    fewest bytes: undeclared shardings follow their neighbours, and a sum is replicated on every rank that reads it
    1    less memory: a sum that an op of the rule computes stays sharded along its first divisible dim, and so do its readers

             project -> AllReduce -> Add -> Norm -> up          replicated between the two products
             project -> ReduceScatter -> Add -> Norm -> AllGather -> up        a shard on each, in about as many bytes

    2    faster: a product of the rule that every rank would repeat is sharded along its first divisible dim; its operands are
         sliced, which costs nothing, and its result is gathered where it is read unsharded

Level 1 is sequence parallelism where the first dim is already sharded by the batch. A dim counts as divisible where that is proven.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

import onnx_ir as ir
from partc.compiler.ir.choice import Axes, NodeOnGroup, NodeSharding, Operand
from partc.compiler.layout.layout import Layout
from partc.compiler.ops.rule import WHOLE
from partc.compiler.plan.rules import ShardingRule
from partc.compiler.sharding.propagate import Propagation

LESS_MEMORY, FASTER = 1, 2
_NOTHING = {
    LESS_MEMORY: "no op of it makes a sum of which a reader takes shards: its dims are sharded, or a symbol needs a `divisor`",
    FASTER: "every product of it is shared out already, or a symbol of its dims needs a `divisor`",
}


def prefer(rules: Mapping[ir.Node, ShardingRule], done: Propagation) -> list[str]:
    """Extends the derived shardings by the preferences of the rules' levels; returns warnings about levels that change nothing."""
    asked = {instance: rules[instance.node] for instance in done.instances if instance.node in rules}
    asked = {instance: rule for instance, rule in asked.items() if rule.level}
    if not asked:
        return []
    honoured = {rule.where for instance, rule in asked.items() if rule.level == FASTER and _share(instance, rule, done)}
    done.run()
    scattered: dict[Operand, str] = {}
    for instance, rule in asked.items():
        if rule.level == LESS_MEMORY:
            scattered |= {(instance, k): rule.where for k in _scatter(instance, rule, done)}
    done.run()
    for operand, where in scattered.items():
        instance, k = operand
        layout, _ = done.pinned.outputs.pop(operand)
        readers = done.readers.get((instance.node.outputs[k], len(instance.group)), ())
        if any(done.choices[reader].input(at) == layout for reader, at in readers):
            honoured.add(where)
    idle = {rule.where: rule.level for rule in asked.values() if rule.where not in honoured}
    return [f"{where}: level {level} changes nothing: {_NOTHING[level]}" for where, level in idle.items()]


def _share(instance: NodeOnGroup, rule: ShardingRule, done: Propagation) -> bool:
    """Shards a product that all ranks along free axes would repeat; returns whether that was possible."""
    choice = done.choices[instance]
    out = choice.rule.outputs[0] if choice.rule.outputs else None
    inputs = [letters for letters in choice.rule.inputs if letters is not None]
    is_product = len(inputs) > 1 and any(letter not in (out or "") for letter in "".join(inputs) if letter != WHOLE)
    axes = tuple(sorted(choice.free))
    if not choice.open or not out or not is_product or not axes:
        return False
    letter = _first(instance, choice, out, axes, done)
    if letter is None:
        return False
    choice.axes[letter] = axes
    choice.why[letter] = _why(rule)
    return True


def _scatter(instance: NodeOnGroup, rule: ShardingRule, done: Propagation) -> list[int]:
    """Pins a scattered layout on a node's outputs that are partial sums, for their readers; returns the outputs."""
    scattered = []
    choice = done.choices[instance]
    for k, letters in enumerate(choice.rule.outputs):
        layout = choice.output(k)
        if letters is None or layout is None or not layout.partial or (instance, k) in done.pinned.outputs:
            continue
        axes = tuple(axis for axis, how in layout.partial if how == "sum")
        letter = _first(instance, choice, letters[:-1], axes, done)
        if letter is None or len(axes) < len(layout.partial):
            continue
        cuts = tuple(axes if dim == letters.index(letter) else cut for dim, cut in enumerate(layout.cuts))
        done.pinned.outputs[instance, k] = (Layout(layout.mesh, cuts), _why(rule))
        scattered.append(k)
    return scattered


def _first(instance: NodeOnGroup, choice: NodeSharding, letters: str, axes: Axes, done: Propagation) -> str | None:
    """Returns the first of the factors `letters` that is not yet sharded and is proven to divide by the axes."""
    for letter in letters:
        if letter == WHOLE or letter in choice.axes or letter not in choice.rule.factors:
            continue
        shards = NodeSharding(choice.rule, choice.mesh, {letter: axes}).num_shards(letter)
        if done.divides(instance, letter, shards):
            return letter
    return None


def _why(rule: ShardingRule) -> str:
    return f"{PurePath(rule.where).name} '{rule.pattern}' level {rule.level}"
