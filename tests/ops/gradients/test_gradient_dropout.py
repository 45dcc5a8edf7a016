"""Dropout in training: the gradient passes where the very mask of the forward pass has kept an element, scaled as there."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from gradient_case import evaluate
from partc.compiler.autodiff.engine import differentiate_nodes
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import Local
from rule_case import case, node_of

OPERANDS = {"x0": np.linspace(1, 2, 77, dtype=np.float32).reshape(7, 11), "y0.dy": np.full((7, 11), 3, np.float32)}


@pytest.mark.parametrize("given", [{1: np.float32(0.4), 2: True}, {2: True}, {1: np.float32(0.4)}, {}])
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_mask_of_the_forward_pass_is_that_of_the_backward_pass(given: dict[int, object], outputs: int) -> None:
    ratio, training = np.array(0.4, np.float32), np.array(True)
    operands = [(7, 11), None if 1 in given else ratio, None if 2 in given else training]
    this = case("Dropout", operands, {"seed": 5}, constants=given, outputs=outputs)
    node = node_of(this)
    backward = differentiate_nodes([node], {"y0": "y0.dy"}, ["x0"])
    every = [*backward.forward, *backward.early, *backward.nodes]
    fixed = {f"x{k}": np.asarray(one) for k, one in given.items()}
    feeds = OPERANDS | {f"x{k}": one for k, one in ((1, ratio), (2, training)) if k not in given}
    feeds = {name: array for name, array in feeds.items() if name in _read(every)}
    made = evaluate(every, feeds, fixed | backward.constants, ["y0", backward.gradients["x0"]], fallback=False)
    dx = made[backward.gradients["x0"]]
    np.testing.assert_allclose(dx, made["y0"] / OPERANDS["x0"] * 3, rtol=1e-6)
    assert 20 < np.count_nonzero(dx) < 70


def test_every_rank_draws_the_same_mask() -> None:
    node = node_of(case("Dropout", [(7, 11)], constants={1: np.float32(0.4), 2: True}))
    rule = rule_of(node)
    assert rule.factors == ()
    seeds = []
    for rank in range(2):
        local = Local(node, rule, {}, {"a": rank}, ["x0", "x1", "x2"], ["y0"], {}, {})
        assert rule.local is not None
        rule.local(local)
        seeds.append(local.nodes[0].attributes.get_int("seed", None))
    assert seeds[0] is not None
    assert seeds[0] == seeds[1]


def _read(nodes: list[ir.Node]) -> set[str]:
    return {str(value.name) for node in nodes for value in node.inputs if value is not None}
