"""The factor that a style shards in a node: colwise the one that a parameter shares with the output, rowwise the contracted one.

A parameter is a value that depends only on weights. In a product without one, a value that is looked up in weights counts: the matrices of
the experts that a token chose are rows of one weight.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from partc.compiler.ops.node import rank_of
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import Rule

_PRODUCTS = ("MatMul", "Gemm", "Einsum", "FusedMatMul")
LOOKUPS = ("Gather", "GatherND")
_MOVES = ("Cast", "Identity", "Squeeze", "Transpose", "Unsqueeze")

IsConstant = Callable[[ir.Value], bool]


def parameter_factor(rule: Rule, node: ir.Node, style: str, is_constant: IsConstant) -> tuple[int, str] | None:
    """Returns the operand that is a parameter, and its factor that the style shards, or None."""
    found = _factor(rule, node, style, is_constant)
    if found is None and node.op_type in _PRODUCTS:
        found = _factor(rule, node, style, lambda value: _looked_up(value, is_constant))
    return found


def styled(node: ir.Node) -> ir.Node:
    """Returns the node to which a style of `node` applies: if it looks up matrices, the product that reads them."""
    data = node.inputs[0] if node.op_type in LOOKUPS else None
    if data is None or (rank_of(data) or 0) < 3:
        return node
    reached = node
    while reached.op_type not in _PRODUCTS:
        readers = list(reached.outputs[0].uses())
        if len(readers) != 1 or readers[0].node.op_type not in (*_MOVES, *_PRODUCTS):
            return node
        reached = readers[0].node
    return reached


def source_of(value: ir.Value, dim: int) -> tuple[ir.Value, int] | None:
    """Returns the weight, and its dim, from which a dim of a parameter comes; None if it comes from several dims or is regrouped."""
    while not value.is_initializer():
        node = value.producer()
        if node is None or node.op_type not in (*LOOKUPS, *_MOVES):
            return None
        rule = rule_of(node)
        letters, made = rule.inputs[0], rule.outputs[0]
        if not letters or not made or node.inputs[0] is None or made[dim] not in letters or made[dim] == ".":
            return None
        value, dim = node.inputs[0], letters.index(made[dim])
    return value, dim


def _looked_up(value: ir.Value, is_constant: IsConstant) -> bool:
    """Whether the value consists of rows of a constant."""
    node = value.producer()
    if is_constant(value) or node is None or node.inputs[0] is None:
        return is_constant(value)
    return node.op_type in (*LOOKUPS, *_MOVES) and _looked_up(node.inputs[0], is_constant)


def _factor(rule: Rule, node: ir.Node, style: str, is_parameter: IsConstant) -> tuple[int, str] | None:
    for k, value in enumerate(node.inputs):
        letters = rule.inputs[k] if k < len(rule.inputs) else None
        if value is None or not letters or len(letters) < 2 or not is_parameter(value):
            continue
        others = {
            letter
            for other, operand in enumerate(node.inputs)
            if other != k and operand is not None and not is_parameter(operand)
            for letter in (rule.inputs[other] or "")
        }
        made = rule.outputs[0] or ""
        if style == "colwise":
            fitting = [letter for letter in letters if letter in made and letter not in others]
        else:
            fitting = [letter for letter in letters if letter not in made and rule.reduce.get(letter)]
            fitting.sort(key=others.isdisjoint)  # a product sums over what both have, not over experts
        fitting = [letter for letter in fitting if letter in rule.factors]
        if fitting:
            return k, fitting[-1] if style == "colwise" else fitting[0]
    return None
