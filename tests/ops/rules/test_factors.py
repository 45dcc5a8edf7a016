"""The letters that an artifact says of a node (`compiler/emit/factors.py`), where it is known by its local operands alone.

The law: a dim that is cut has no letter of one that is not, nor is it summed over where the whole op's rule does not say so. Otherwise the
check of where shards lie would raise an alarm about a sound artifact. Factors are cut into two, and into shards of one element.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
from partc.compiler.emit.factors import local_rule
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import WHOLE, Local, Rule
from rule_case import feeds_of, node_of, run
from rule_prover import Case, divides, local_of, text_of
from rules_case import CASES


def local_node(node: ir.Node, rule: Rule, letter: str, shards: int) -> ir.Node | None:
    """The op itself on the first rank of those that share a factor; None where its operands are not those of the whole op."""
    local = local_of(node, rule, {letter: shards}, {letter: 0})
    (rule.local or Local.same)(local)
    found = [one for one in local.nodes if (one.op_type, one.domain) == (node.op_type, node.domain)]
    if len(found) != 1 or len(found[0].inputs) != len(node.inputs):
        return None
    (one,) = found
    for value, whole in zip((*one.inputs, *one.outputs), (*node.inputs, *node.outputs), strict=False):
        if value is None or whole is None:
            continue
        if value.name in local.constants:
            value.const_value = ir.tensor(local.constants[value.name])
            value.shape = ir.Shape(local.constants[value.name].shape)
        elif value.name == whole.name:
            value.shape, value.const_value = ir.Shape(local.local_shapes[whole.name] or ()), whole.const_value
        else:
            return None
        value.type = whole.type
    return one


def faults(this: Case) -> Iterator[str]:
    feeds = feeds_of(this)
    node = node_of(this, feeds=feeds)
    rule, want = rule_of(node), run([node], feeds, {}, this)
    arrays = (*(feeds.get(f"x{k}") for k in range(len(rule.inputs))), *want)
    operands = list(zip((*rule.inputs, *rule.outputs), arrays, strict=True))
    for letter in rule.factors:
        sizes = [one.shape[letters.index(letter)] for letters, one in operands if letters and letter in letters]
        for shards in {2, min(sizes), rule.units.get(letter, 2)}:
            own = local_node(node, rule, letter, shards) if divides(rule, ((letter, shards),), feeds, want) else None
            if own is not None:
                yield from wrong_letters(f"{this} cut along {letter} in {shards}", rule, local_rule(own, node), letter)


def wrong_letters(what: str, rule: Rule, found: Rule, letter: str) -> Iterator[str]:
    """The letters of a local rule that break the law where `letter` is cut."""
    cut: dict[str, set[bool]] = {}
    for letters, whole in zip((*found.inputs, *found.outputs), (*rule.inputs, *rule.outputs), strict=True):
        for a, b in zip(letters or "", whole or "", strict=True):
            cut.setdefault(a, set()).add(b == letter)
    made = {one for letters in found.outputs for one in letters or ""} | {WHOLE}
    summed = [one for one, (is_cut, *_) in cut.items() if is_cut and one not in made and not rule.reduce.get(letter)]
    if wrong := [one for one, both in cut.items() if one != WHOLE and len(both) > 1] + summed:
        yield f"{what}: '{''.join(wrong)}' of {text_of(found)}, and of all {text_of(rule)}"


def test_letters_of_local_operands_say_nothing_wrong() -> None:
    assert [fault for this in CASES if this.op_type != "Shape" for fault in faults(this)] == []
