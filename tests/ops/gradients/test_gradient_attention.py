"""Attention of a value to itself: what flows back to it as queries, as keys and as values is added up, once each."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from gradient_case import evaluate
from partc.compiler.autodiff.engine import differentiate_nodes

SHAPE = (2, 3, 5, 4)
rng = np.random.default_rng(4)
X, DY, DK = (rng.uniform(-1, 1, SHAPE).astype(np.float32) for _ in range(3))


def gradients(names: list[str], dims: tuple[int | str, ...], present: bool) -> dict[str, np.ndarray]:
    """By operand, what flows back from the output, and from the present keys too, to attention of `names`."""
    floats = ir.TensorType(ir.DataType.FLOAT)
    known = {name: ir.Value(name=name, shape=ir.Shape(dims), type=floats) for name in dict.fromkeys(names)}
    outputs = [ir.Value(name=name, shape=ir.Shape(dims), type=floats) for name in ("y", "k", "v")]
    node = ir.Node("", "Attention", [known[name] for name in names], outputs=outputs)
    seeds = {"y": "y.dy"} | ({"k": "k.dy"} if present else {})
    backward = differentiate_nodes([node], seeds, list(known))
    every = [*backward.early, *backward.nodes]
    made = [out.name for one in every for out in one.outputs]
    assert len(set(made)) == len(made)
    feeds = {**dict.fromkeys(known, X), "y.dy": DY, **({"k.dy": DK} if present else {})}
    found = evaluate(every, feeds, backward.constants, list(backward.gradients.values()), fallback=False)
    return {name: found[dx] for name, dx in backward.gradients.items()}


@pytest.mark.parametrize("dims", [SHAPE, ("b", 3, "s", 4), ("b", "h", "s", "d")], ids=str)
@pytest.mark.parametrize("present", [False, True])
def test_one_value_may_be_every_operand(dims: tuple[int | str, ...], present: bool) -> None:
    apart = gradients(["q", "k0", "v0"], dims, present)
    alone = gradients(["x", "x", "x"], dims, present)
    np.testing.assert_allclose(alone["x"], apart["q"] + apart["k0"] + apart["v0"], rtol=1e-5, atol=1e-6)
    assert np.abs(apart["k0"]).max() > 1e-2
