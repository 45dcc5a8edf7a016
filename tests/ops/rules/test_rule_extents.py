"""Extents that a node takes as data become local where the dims are dynamic: of reshapes, expansions, repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
import pytest
from partc.compiler.ops.families.shapes.reshape import matched
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import Rule
from rule_case import Case, case, node_of
from rule_prover import violations

Dims = Sequence[int | str]


def symbolic(source: Dims | None, made: Dims, seen: list[Rule]) -> Callable[[ir.Node], Rule]:
    """The table's rule for dims that are known by name only."""

    def rules(node: ir.Node) -> Rule:
        if source is not None and node.inputs[0] is not None:
            node.inputs[0].shape = ir.Shape(source)
        node.outputs[0].shape = ir.Shape(made)
        seen.append(rule_of(node))
        return seen[-1]

    return rules


RESHAPES = [
    case("Reshape", [(6, 12, 18), np.array([6, 12, 6, 3])]),
    case("Reshape", [(6, 12, 18)], constants={1: [6, 12, 6, 3]}),
    case("Reshape", [(6, 12, 18), np.array([0, 0, 6, 3])]),
    case("Reshape", [(6, 12, 18), np.array([-1, 12, 6, 3])]),
    case("Reshape", [(6, 12, 18), np.array([6, -1, 6, 3])], {"allowzero": 1}),
    case("Reshape", [(6, 12, 18)], constants={1: [0, -1, 6, 3]}),
]


@pytest.mark.parametrize("this", RESHAPES, ids=str)
def test_target_of_several_dynamic_dims_is_divided(this: Case) -> None:
    seen: list[Rule] = []
    assert violations(this, symbolic(["batch", "seq", 18], ["batch", "seq", 6, 3], seen)) == []
    assert {(rule.inputs[0], rule.outputs[0]) for rule in seen} == {("abc", "abc.")}


@pytest.mark.parametrize("target", [[12, 0, 1], [12, 6, 1], [12, 0, -1], [-1, 0, 1]], ids=str)
@pytest.mark.parametrize("known", [True, False])
def test_zero_that_copies_a_dim_cut_otherwise_means_the_whole_dim(target: list[int], known: bool) -> None:
    this = case(
        "Reshape", [(1, 6, 12)] if known else [(1, 6, 12), np.array(target)], constants={1: target} if known else {}
    )
    seen: list[Rule] = []
    assert violations(this, symbolic([1, "m", "n"], ["n", "m", 1], seen)) == []
    assert {(rule.inputs[0], rule.outputs[0]) for rule in seen} == {(".b.", "b..")}


def test_target_of_one_dynamic_dim_is_a_constant_with_a_minus_one() -> None:
    this = case("Reshape", [(6, 12, 18), np.array([72, 18])])
    seen: list[Rule] = []
    assert violations(this, symbolic(["batch", 12, 18], ["12*batch", 18], seen)) == []
    assert {(rule.inputs[0], rule.outputs[0]) for rule in seen} == {("a.c", "ac")}


def test_dynamic_target_is_not_cut_before_where_takes_integers() -> None:
    node = node_of(case("Reshape", [(6, 12), np.array([12, 6])], opset=8))
    assert rule_of(node).factors == ()


REPEATS = [
    (case("Expand", [(6, 1, 12), np.array([6, 18, 12])]), ["a", 1, "c"], ["a", "b", "c"], "a.c", "abc"),
    (case("Expand", [(6, 1, 12), np.array([1, 18, 1])]), ["a", 1, "c"], ["a", "b", "c"], "a.c", "abc"),
    (case("Expand", [(6, 1, 12), np.array([18, 1])]), ["a", 1, "c"], ["a", "b", "c"], "a.c", "abc"),
    (case("Expand", [(12,), np.array([6, 18, 1])]), ["c"], ["a", "b", "c"], "c", "abc"),
    (case("Expand", [(1, 12), np.array([18, 12])]), ["m", "c"], ["b", "c"], ".b", ".b"),
    (case("Tile", [(6, 1, 12), np.array([1, 18, 1])]), ["a", 1, "c"], ["a", "b", "c"], "a.c", "abc"),
    (case("Tile", [(6, 1, 5)], constants={1: [1, 18, 2]}), ["a", 1, "c"], ["a", "b", "2*c"], "a..", "ab."),
    (case("ConstantOfShape", [np.array([6, 12])]), None, ["a", "b"], ".", "ab"),
]


@pytest.mark.parametrize(("this", "source", "made", "letters", "out"), REPEATS, ids=str)
def test_repeats_along_dynamic_dims_are_divided(
    this: Case, source: Dims | None, made: Dims, letters: str, out: str
) -> None:
    seen: list[Rule] = []
    assert violations(this, symbolic(source, made, seen)) == []
    assert {(rule.inputs[0], rule.outputs[0]) for rule in seen} == {(letters, out)}


LETTERS_OF = [
    (["b", 128, 512], ["b", 128, 8, 64], "abc", "abc."),
    (["b", 128, 512], ["128*b", 512], "a.c", "ac"),
    (["b", "s", 512], ["b*s", 512], "a.c", "ac"),
    (["b*s", 512], ["b", "s", 512], "ab", "a.b"),
    (["b", "s + p", 8], ["b*s + b*p", 8], "a.c", "ac"),
    (["b", 6, "s"], ["s", 6, "b"], "a..", "a.."),
    ([6, 4], [4, 6], "a.", "a."),
    ([2, 3, 4], [3, 2, 4], "a.c", "a.c"),
    ([1, 6, 1, 4], [6, 4, 1], ".b.d", "bd."),
    ([6], [1, 2, 3], "a", ".a."),
    ([1], [1, 1], ".", ".."),
    ([], [1], "", "."),
    ([None, 6], [6, None], "a.", "a."),
]


@pytest.mark.parametrize(("source", "target", "left", "right"), LETTERS_OF, ids=str)
def test_dims_are_matched_in_groups_of_equal_products(source: Dims, target: Dims, left: str, right: str) -> None:
    assert matched(ir.Shape(source).dims, ir.Shape(target).dims) == (left, right)


def test_a_dim_of_zero_says_nothing_of_the_others() -> None:
    assert matched([0, 4], [0, 7]) is None
