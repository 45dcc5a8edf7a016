"""Warnings of looked-up matrices, such as experts that a router picks, whose rows are sharded: each rank has a partial of every token.

Every rank then computes all tokens with the experts that it has, zeros standing for the others, and the terms are added up: of the
picked matrices themselves, or of what is made of them, as far as sums pass. Cut in their inner dim, each rank has its part of every
expert, and one sum of what a token gets is left, as in any two products of a tensor parallel model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.program import Sharded
from partc.compiler.ir.value_info import bytes_text
from partc.compiler.sharding.seeding.styles import LOOKUPS, styled

_FURTHEST = 12
"""The largest number of nodes between a product and another node that reads its result."""


def picked_rows(program: Sharded) -> Iterator[str]:
    """A warning for each table of matrices whose rows are sharded, with the bytes that are added up and the better cut."""
    meant = {node: styled(node) for node in program.model.graph if node.op_type in LOOKUPS}
    products = {product for node, product in meant.items() if product is not node}
    for instance, choice in program.choices.items() if products else ():
        node, rule = instance.node, choice.rule
        product, table = meant.get(node, node), node.inputs[0] if node.inputs else None
        if product is node or table is None or choice.pulled:
            continue
        rows = [letter for letter in rule.inputs[0] or "" if choice.axes.get(letter) and letter in rule.reduce]
        if not rows:
            continue
        second = any(value is not None and _follows(value.producer(), products - {product}) for value in product.inputs)
        reduced = _reduced(program, NodeOnGroup(node, instance.group))
        if second and not any(value in _between(node, product) for value in reduced):
            continue
        yield _warning(program, table, choice, rows[0], reduced, product if second else None)


def _warning(
    program: Sharded,
    table: ir.Value,
    choice: NodeSharding,
    row: str,
    reduced: Iterable[ir.Value],
    last: ir.Node | None,
) -> str:
    """The warning; `last` is the product of what a token gets, None where another one follows."""

    def size(value: ir.Value) -> str:
        return bytes_text(program.values[value], program.values[value].shape)

    better = f"`'{table.name}': colwise` (or `packed_colwise` where it holds several, as gate and up) adds up nothing"
    if last is not None:
        better = f"`'{table.name}': rowwise` adds up {size(last.outputs[0])}"
    added = " and ".join(f"{size(value)} of '{value.name}'" for value in reduced)
    where = choice.why.get(row, "")
    count = (program.values[table].shape or ("?",))[0]
    return (
        f"{where + ': ' if where else ''}the {count} matrices of '{table.name}' are shared by {choice.num_shards(row)} ranks, and ids pick "
        f"from all of them: bytes {added} are added up over the ranks; a cut inside of each matrix is cheaper: {better}"
    )


def _between(node: ir.Node, product: ir.Node) -> set[ir.Value]:
    """The values computed from picked matrices up to their product."""
    found = {*node.outputs}
    while node is not product:
        node = next(user for user, _ in node.outputs[0].uses())
        found.update(node.outputs if node is not product else ())
    return found


def _reduced(program: Sharded, instance: NodeOnGroup) -> list[ir.Value]:
    """The values at which the partial sums of a node are reduced."""
    found: list[ir.Value] = []
    values = list(instance.node.outputs)
    while values:
        value = values.pop()
        readers = [(program.choices.get(NodeOnGroup(node, instance.group)), node, k) for node, k in value.uses()]
        if not value.is_graph_output() and readers and all(one and k in one.partial for one, _, k in readers):
            values += [out for _, node, _ in readers for out in node.outputs if out.name and out not in values]
        elif value not in found:
            found.append(value)
    return found


def _follows(node: ir.Node | None, products: set[ir.Node]) -> bool:
    """Whether a node is one of `products`, or at most `_FURTHEST` nodes after one."""
    behind = set() if node is None else {node}
    for _ in range(_FURTHEST + 1):
        if not behind.isdisjoint(products):
            return True
        made = (value.producer() for one in behind for value in one.inputs if value is not None)
        behind = {producer for producer in made if producer is not None}
    return False
