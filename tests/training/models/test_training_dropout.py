"""Dropout in training: one mask for a seed, a node, a step and a place, on any number of ranks, and as random as a mask should be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from gradient_case import evaluate
from partc.compiler.autodiff.engine import differentiate_nodes
from partc.compiler.frontend.names import node_paths
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import OWN, Local
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.rewrite.train_mode import to_training
from partc.runtime import load_local
from rows import of_today

Dims = Sequence[int | str]
RATIO = 0.3
TWO = """<ir_version: 10, opset_import: ["" : 21]>
main (float[{x}] x) => (float[{x}] y, float[{x}] z)
<float ratio = {{0.3}}, bool no = {{0}}> {{
    [drop1] h = Dropout (x, ratio)
    [neg] y = Neg (h)
    [drop2] z = Dropout (x, ratio, no)
}}"""


def model_of(text: str, seed: int = 7) -> ir.Model:
    model = from_proto(onnx.parser.parse_model(text), Path("model.onnx"))
    modes = to_training(model, cut=True, seed=seed, frozen=lambda name: False)
    assert modes.step is model.graph.inputs[-1]
    return model


def on_ranks(
    model: ir.Model, plan: str, out: Path, x: np.ndarray, steps: Sequence[int] = (3,)
) -> list[dict[str, np.ndarray]]:
    compile_source(Source(model), parse_plan(plan, "plan.yaml"), out)
    with load_local(out) as ranks:
        return [ranks({"x": x, "step": np.array(step)}) for step in steps]


PLANS = {
    "2 ranks, batch": ("b, 18, 5", "ranks: 2\nsymbols: {b: {divisor: 2}}\ndataset: data_parallel\n"),
    "3 ranks, batch": ("12, 18, 5", "ranks: 3\ndataset: data_parallel\n"),
    "6 ranks, batch": ("b, 18, 5", "ranks: 6\nsymbols: {b: {divisor: 6}}\ndataset: data_parallel\n"),
    "6 ranks, dim 1": ("b, 18, 5", "ranks: 6\ndataset: {x: [1, 6, 1]}\n"),
    "6 ranks, dims 0 and 1": ("12, 18, 5", "ranks: 6\ndataset: {x: [2, 3, 1]}\n"),
    "6 ranks, both dynamic": (
        "b, s, 5",
        "ranks: 6\nsymbols: {b: {divisor: 3}, s: {divisor: 2}}\ndataset: {x: [3, 2, 1]}\n",
    ),
    "3 ranks, whole": ("b, 18, 5", "ranks: 3\nplacement: {drop1: [1, 2], drop2: 1}\n"),
}


@pytest.mark.parametrize("name", of_today([*PLANS], 3))
def test_masks_are_those_of_one_rank(name: str, tmp_path: Path) -> None:
    dims, plan = PLANS[name]
    x = np.arange(1, 12 * 18 * 5 + 1, dtype=np.float32).reshape(12, 18, 5)
    whole = on_ranks(model_of(TWO.format(x=dims)), "ranks: 1\n", tmp_path / "one", x, (3, 4))
    cut = on_ranks(model_of(TWO.format(x=dims)), plan, tmp_path / "many", x, (3, 4))
    for one, many in zip(whole, cut, strict=True):
        for output in ("y", "z"):
            np.testing.assert_array_equal(many[output], one[output])
    kept = whole[0]["z"] != 0
    np.testing.assert_allclose(whole[0]["z"][kept], x[kept] / (1 - RATIO), rtol=1e-6)
    masks = [one[output] != 0 for one in whole for output in ("y", "z")]
    assert all(0.65 < mask.mean() < 0.75 for mask in masks)
    shared = [float((a == b).mean()) for a, b in itertools.combinations(masks, 2)]
    assert all(0.5 < share < 0.66 for share in shared), shared


def test_a_step_that_is_run_again_has_its_masks_and_another_seed_has_others(tmp_path: Path) -> None:
    x = np.ones((12, 18), np.float32)
    text = TWO.format(x="b, 18")
    first = on_ranks(model_of(text), "ranks: 1\n", tmp_path / "one", x, (0, 1, 2**33, 0))
    again = on_ranks(model_of(text), "ranks: 1\n", tmp_path / "two", x, (1,))
    other = on_ranks(model_of(text, seed=8), "ranks: 1\n", tmp_path / "three", x, (1,))
    np.testing.assert_array_equal(first[0]["y"], first[3]["y"])
    np.testing.assert_array_equal(first[1]["y"], again[0]["y"])
    assert (first[1]["y"] != other[0]["y"]).any()
    assert (first[0]["y"] != first[1]["y"]).any()


def test_other_random_numbers_are_drawn_in_evaluations_with_a_warning(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[4, 3] x) => (float loss)
    <float[3] w = {1, 2, 3}, float ratio = {0.3}, bool yes = {1}> {
        h = Mul (x, w)
        [drop] kept = Dropout (h, ratio, yes)
        [noise] z = RandomNormalLike (kept)
        y = Add (kept, z)
        loss = ReduceMean <keepdims = 0> (y)
    }"""
    source = Source(from_proto(onnx.parser.parse_model(text), Path("model.onnx")))
    plan = parse_plan("ranks: 1\ntrain: {loss: loss, optimizer: {type: sgd, lr: 0.1}}\n", "plan.yaml")
    (warning,) = compile_source(source, plan, tmp_path / "out").warnings
    assert warning.startswith("random numbers are drawn in evaluations, too (noise)")


def test_the_node_keeps_its_path_and_drops_what_it_no_longer_reads() -> None:
    model = model_of(TWO.format(x="b, 18").replace("[drop1] ", "").replace("[drop2] ", ""))
    assert list(node_paths(model).values()) == ["Dropout_0", "neg", "Dropout_1"]
    assert [node.domain for node in model.graph] == [OWN, "", OWN]
    assert list(model.graph.initializers) == []
    seeds = [node.attributes.get_int("seed", -1) for node in model.graph if node.domain == OWN]
    assert len(set(seeds)) == 2
    assert all(2**32 < seed < 2**63 for seed in seeds)


def test_a_ratio_of_0_needs_no_step() -> None:
    text = TWO.format(x="b, 18").replace("0.3", "0.0").replace("bool no = {0}", "bool no = {1}")
    model = from_proto(onnx.parser.parse_model(text), Path("model.onnx"))
    modes = to_training(model, cut=True, seed=7, frozen=lambda name: False)
    assert not modes.needs_step
    assert [(node.op_type, node.domain, len(node.inputs)) for node in model.graph if node.op_type != "Neg"] == [
        ("Dropout", "", 2),
        ("Dropout", "", 2),
    ]


def node_of(dims: Dims | None, ratio: float = RATIO, outputs: int = 1, seed: int = 0x1234_5678_9ABC_DEF) -> ir.Node:
    shape = None if dims is None else ir.Shape(dims)
    x = ir.Value(name="x", shape=shape, type=ir.TensorType(ir.DataType.FLOAT))
    step = ir.Value(name="step", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
    given = ir.convenience.convert_attributes({"ratio": ratio, "seed": seed})
    made = [ir.Value(name=f"y{k}") for k in range(outputs)]
    return ir.Node(OWN, "Dropout", [x, step], given, outputs=made, version=1)


def local_of(node: ir.Node, dims: Dims | None = None, cut: dict[str, int] | None = None, index: int = 0) -> Local:
    """The node's local form; `cut` has one factor, of which this is shard `index`."""
    value = node.inputs[0]
    assert value is not None
    whole = None if value.shape is None else tuple(d if isinstance(d, int) else str(d) for d in value.shape.dims)
    shapes = {"x": tuple(dims) if dims is not None else whole}
    names = [str(out.name) for out in node.outputs]
    shards = cut or {}
    local = Local(node, rule_of(node), shards, dict.fromkeys(shards, index), ["x", "step"], names, {"x": whole}, shapes)
    assert local.rule.local is not None
    local.rule.local(local)
    return local


def run(local: Local, x: np.ndarray, step: int = 0) -> list[np.ndarray]:
    names = [str(out.name) for out in local.node.outputs]
    feeds = {"x": x, "step": np.array(step, np.int64)}
    made = evaluate(local.nodes, feeds, local.constants, names, fallback=False)
    return [made[name] for name in names]


def drawn(*shape: int, ratio: float = 0.5, step: int = 0, seed: int = 0x1234_5678_9ABC_DEF) -> np.ndarray:
    """A mask as numbers of mean 0 and variance 1."""
    (y,) = run(local_of(node_of(shape, ratio, seed=seed)), np.ones(shape, np.float32), step)
    return ((y != 0) - (1 - ratio)) / (ratio * (1 - ratio)) ** 0.5


SHAPE = (6, 12, 6, 7)


@pytest.mark.parametrize(("dynamic", "outputs"), [("", 1), ("b", 2), ("bcd", 1), ("abcd", 2)])
def test_shards_are_shards_of_the_whole(dynamic: str, outputs: int) -> None:
    dims: Dims = [letter if letter in dynamic else size for letter, size in zip("abcd", SHAPE, strict=True)]
    node, x = node_of(dims, outputs=outputs), np.ones(SHAPE, np.float32)
    want = run(local_of(node), x)
    if outputs == 2:
        np.testing.assert_array_equal(want[1], want[0] != 0)
    for dim, shards in itertools.product(range(3), (2, 3, 6)):
        letter = "abcd"[dim]
        own: Dims = [
            dim_ if k != dim else f"{dim_}/{shards}" if isinstance(dim_, str) else dim_ // shards
            for k, dim_ in enumerate(dims)
        ]
        locals_ = [local_of(node, own, {letter: shards}, index) for index in range(shards)]
        assert len({"".join(str(ir.to_proto(each)) for each in local.nodes) for local in locals_}) == 1
        parts = [run(local, np.split(x, shards, dim)[0]) for local in locals_]
        for k in range(outputs):
            np.testing.assert_array_equal(np.concatenate([part[k] for part in parts], dim), want[k])


@pytest.mark.parametrize("shape", [(), (1,), (30,), (0, 4), (5, 1), (1, 2, 1, 3, 1, 2)], ids=str)
@pytest.mark.parametrize("known", ["dims", "rank", "nothing"])
def test_every_rank_and_size(shape: tuple[int, ...], known: str) -> None:
    dims = {"dims": shape, "rank": tuple(f"d{k}" for k in range(len(shape))), "nothing": None}[known]
    x = np.full(shape, 7, np.float32)
    y, kept = run(local_of(node_of(dims, outputs=2)), x)
    assert y.shape == kept.shape == shape
    np.testing.assert_allclose(y, np.where(kept, x / (1 - RATIO), 0), rtol=1e-6)


def test_a_batch_of_a_fixed_size_has_the_masks_of_a_dynamic_one() -> None:
    for shape in ((4, 36), (64, 5), (2, 3, 50)):
        x = np.ones(shape, np.float32)
        fixed, dynamic = (run(local_of(node_of(dims)), x)[0] for dims in (shape, ("b", *shape[1:])))
        np.testing.assert_array_equal(fixed, dynamic)


@pytest.mark.parametrize("dims", [(8, 9), ("b", 9), ("b", "s")], ids=str)
def test_the_gradient_takes_the_mask_as_it_is(dims: Dims) -> None:
    node = node_of(dims)
    local = local_of(node)
    values = [value for value in node.inputs if value is not None]
    backward = differentiate_nodes(local.nodes, {"y0": "dy"}, ["x"], values=values, constants=local.constants)
    assert [one.op_type for one in backward.nodes] == ["Mul"]
    assert backward.early == []
    x, dy = (np.random.default_rng(k).uniform(1, 2, (8, 9)).astype(np.float32) for k in (1, 2))
    feeds = {"x": x, "dy": dy, "step": np.array(5, np.int64)}
    every = [*backward.forward, *backward.nodes]
    made = evaluate(
        every, feeds, {**local.constants, **backward.constants}, ["y0", backward.gradients["x"]], fallback=False
    )
    np.testing.assert_allclose(made[backward.gradients["x"]], made["y0"] / x * dy, rtol=1e-6)


def test_terms_of_a_sum_pass() -> None:
    assert rule_of(node_of((4, 5))).partial_inputs == ((0,),)
    assert rule_of(node_of((4, 5), outputs=2)).partial_inputs == ()


def sigmas(products: np.ndarray) -> float:
    """How many deviations the mean of products of independent numbers of variance 1 is off 0."""
    return float(abs(products.sum()) / products.size**0.5)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.75])
@pytest.mark.parametrize("shape", [(1000, 700), (16, 40, 900), (100_000,), (20, 30, 20, 30)], ids=str)
def test_the_share_that_is_kept(shape: tuple[int, ...], ratio: float) -> None:
    z = drawn(*shape, ratio=ratio)
    assert sigmas(z) < 4
    for axis in range(z.ndim):
        sums = z.sum(axis) / z.shape[axis] ** 0.5
        assert sigmas((sums**2 - 1) / 2**0.5) < 5


def test_neighbours_are_independent() -> None:
    z = drawn(600, 500)
    found = []
    for rows, columns in itertools.product(range(6), range(-6, 7)):
        if (rows, columns) > (0, 0):
            left = z[: 600 - rows, max(0, -columns) : 500 - max(0, columns)]
            right = z[rows:, max(0, columns) : 500 - max(0, -columns)]
            found.append(sigmas(left * right))
    assert max(found) < 4
    assert 0.6 < np.square(found).mean() < 1.5


def test_rows_and_columns_and_rectangles_are_independent() -> None:
    z = drawn(400, 300)
    for one in (z, z.T):
        pairs = (one @ one.T)[np.triu_indices(len(one), 1)] / one.shape[1] ** 0.5
        assert 0.97 < np.square(pairs).mean() < 1.03
        assert np.abs(pairs).max() < 6
    largest = np.linalg.svd(z, compute_uv=False)[0]
    assert largest < 1.05 * (400**0.5 + 300**0.5)
    corners = []
    for rows, columns in itertools.product((1, 2, 7, 64, 199), (1, 3, 16, 150)):
        corners.append(sigmas(z[:-rows, :-columns] * z[rows:, :-columns] * z[:-rows, columns:] * z[rows:, columns:]))
    assert max(corners) < 4


def test_blocks_are_as_likely_as_they_should_be() -> None:
    """Chi-square over the 512 patterns of 3 x 3 blocks: 511 on average, with a deviation of 32."""
    kept = drawn(900, 900) > 0
    blocks = kept.reshape(300, 3, 300, 3).transpose(0, 2, 1, 3).reshape(-1, 9)
    counts = np.bincount(blocks @ (1 << np.arange(9)), minlength=512)
    expected = len(blocks) / 512
    assert 511 - 4 * 32 < ((counts - expected) ** 2 / expected).sum() < 511 + 4 * 32


def test_steps_and_nodes_are_independent() -> None:
    """Steps that follow each other, and seeds that differ in one bit of either half."""
    first = drawn(200, 300)
    others = [drawn(200, 300, step=step) for step in (1, 2, 3, 1000)]
    others += [drawn(200, 300, seed=0x1234_5678_9ABC_DEF ^ bit) for bit in (1, 1 << 31, 1 << 32, 1 << 60)]
    for a, b in itertools.combinations([first, *others], 2):
        assert sigmas(a * b) < 4
        assert all(sigmas(a[k:] * b[:-k]) < 4.5 and sigmas(a[:, k:] * b[:, :-k]) < 4.5 for k in (1, 2))
