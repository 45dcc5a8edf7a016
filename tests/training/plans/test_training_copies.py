"""A value that ranks have in several ways: one parameter on many ranks, one cotangent for many readers, one name for two copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.compiler.frontend.source import Source
from partc.compiler.ir.graph import OWN_NAME
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from rows import of_today
from training_equivalence import from_text, same_training

SGD = """train:
  loss: {type: softmax_cross_entropy, logits: y, labels: labels}
  optimizer: {type: sgd, lr: 0.5}
"""
TIED = """<ir_version: 10, opset_import: ["" : 21]>
main (int64[batch, 5] ids) => (float[batch, 5, 12] y) {
    [look_up] x = Gather(table, ids)
    [middle] m = MatMul(x, w)
    [act] a = Tanh(m)
    [turn] turned = Transpose<perm = [1, 0]>(table)
    [head] y = MatMul(a, turned)
}"""
TIED_SHAPES = {"table": (12, 6), "w": (6, 6)}


@pytest.mark.parametrize(
    "plan",
    of_today(
        [
            "ranks: 2\nplacement: {look_up: 0, middle: 0, head: 1}\n",
            "ranks: 3\nplacement: {look_up: 2, middle: [0, 1], turn: 0, head: [0, 1, 2]}\n",
            "ranks: 4\nplacement: {look_up: [0, 1], middle: [0, 1], head: [2, 3]}\n"
            "sharding: {head: colwise, look_up: {in: [[2, 1], null]}}\n",
            "ranks: 4\nplacement: {look_up: [0, 1, 2], middle: 3, head: [1, 2, 3]}\nsharding: {head: colwise}\n",
            "ranks: 3\nsharding: {look_up: {in: [[3, 1], null]}, head: colwise}\n",
            "ranks: 3\nsharding: {look_up: {in: [[1, 3], null]}, head: colwise}\n",
            "ranks: 3\nsymbols: {batch: {divisor: 3}}\ndataset: data_parallel\n",
        ],
        3,
    ),
)
def test_a_tied_weight_is_one_parameter(plan: str, tmp_path: Path) -> None:
    """Its copies get the sum of all gradients and stay equal bit by bit, however they lie."""
    source = from_text(TIED, TIED_SHAPES)
    random = np.random.default_rng(2)
    steps = [{name: random.integers(0, 12, (n, 5)) for name in ("ids", "labels")} for n in (6, 3)]
    same_training(lambda: source, plan + SGD, tmp_path, steps, rtol=1e-5, atol=1e-4)


ADAFACTOR = "type: adafactor, lr: 0.02, d: 2.0"


LAMB = "type: lamb, lr: 0.02, eps: 0.01"
APART = [
    "ranks: 3\nsharding: {look_up: {in: [[1, 3], null]}, turn: {in: [[3, 1]]}}\n",
    "ranks: 5\nplacement: {look_up: [0, 1], middle: 4, turn: [2, 3], head: [2, 3]}\nsharding: {look_up: {in: [[2, 1], null]}}\n",
    "ranks: 3\nplacement: {look_up: [0, 2], middle: 1, turn: 1, head: 1}\nsharding: {look_up: {in: [[1, 2], null]}}\n",
]


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    of_today(
        [*((LAMB, plan) for plan in APART), ("type: adam, lr: 0.02, eps: 0.01", APART[0]), (ADAFACTOR, APART[1])], 2
    ),
)
def test_copies_that_lie_otherwise_stay_equal(plan: str, optimizer: str, tmp_path: Path) -> None:
    """LAMB's norms too are those of one of them: in another order sums would be other numbers."""
    source = from_text(TIED, TIED_SHAPES)
    random = np.random.default_rng(2)
    steps = [{name: random.integers(0, 12, (4, 5)) for name in ("ids", "labels")} for _ in range(4)]
    train = SGD.replace("type: sgd, lr: 0.5", optimizer)
    same_training(lambda: source, plan + train, tmp_path, steps, rtol=1e-5, atol=5e-4)


def numbers(shape: tuple[int, ...], rows: int, length: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(2)
    return {"x": random.standard_normal((rows, *shape), np.float32), "labels": random.integers(0, length, rows)}


SUM = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 6] y) {
    [one] a = MatMul(x, u)
    [two] b = MatMul(x, v)
    [three] c = MatMul(x, v2)
    [all] d = Sum(a, b, c)
    [last] y = MatMul(d, w)
}"""


@pytest.mark.parametrize("one", [0, 1])
def test_one_cotangent_is_sent_to_many_readers_on_a_rank(one: int, tmp_path: Path) -> None:
    """A Sum's operands have the same cotangent; sent to another rank for each, it arrived there under one name."""
    source = from_text(SUM, {"u": (6, 6), "v": (6, 6), "v2": (6, 6), "w": (6, 6)})
    plan = f"ranks: 2\nplacement: {{one: {one}, two: {one}, three: {one}, all: {1 - one}, last: {1 - one}}}\n"
    same_training(lambda: source, plan + SGD, tmp_path, [numbers((6,), 4, 6)], rtol=1e-5, atol=1e-4)


SCALED = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 6] y) {
    [alone] a = Mul(x, s)
    [some] b = LayerNormalization(a, s)
    [all] c = Mul(b, s)
    [last] y = MatMul(c, w)
}"""


@pytest.mark.parametrize(
    "where", ["[0], some: [0, 1], all: [0, 1, 2]", "[1], some: [1, 2], all: [0, 2]", "0, some: 1, all: [0, 1]"]
)
def test_a_weight_that_groups_within_each_other_read_is_updated_once(where: str, tmp_path: Path) -> None:
    """Groups of which one has the other's ranks share the tensor; it was updated for each of them."""
    source = from_text(SCALED, {"s": (6,), "w": (6, 6)})
    plan = f"ranks: 3\nplacement: {{alone: {where}}}\n"
    same_training(lambda: source, plan + SGD, tmp_path, [numbers((6,), 4, 6)], rtol=1e-5, atol=1e-4)


SLICED = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 4, 6] x) => (float[batch, 6] y) <int64[1] middle = {1}> {
    [first] a = MatMul(x, u)
    [mean] b = ReduceMean<keepdims = 0>(a, middle)
    [total] c = ReduceSum<keepdims = 0>(a, middle)
    [both] d = Mul(b, c)
    [last] y = MatMul(d, w)
}"""


@pytest.mark.parametrize("node", ["mean", "total"])
def test_the_shape_of_a_shard_is_not_that_of_what_it_is_cut_from(node: str, tmp_path: Path) -> None:
    """A cut of a dim that varies computes its bounds from a shape, whose name the gradient's own had."""
    source = from_text(SLICED, {"u": (6, 6), "w": (6, 6)})
    cuts = f"{node}: {{in: [[2, 1, 1], null]}}, first: {{in: [[1, 1, 1], [1, 1]]}}"
    plan = f"ranks: 2\nsymbols: {{batch: {{divisor: 2}}}}\nsharding: {{{cuts}}}\n"
    same_training(lambda: source, plan + SGD, tmp_path, [numbers((4, 6), 4, 6)], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("ops", "cut"),
    [
        ("MatMul(w, w)", "[[3, 1], null]"),
        ("MatMul(w, w)", "[[1, 3], null]"),
        ("MatMul(w, v)", "[null, [3, 1]]"),
        ("MatMul(w, v)", "[null, [1, 3]]"),
        ("Gemm<transA = 1>(w, v, w)", "[[3, 1], null]"),
        ("Gemm<transA = 1>(w, v, w)", "[[1, 3], null]"),
        ("Gemm<transA = 1>(w, v, w)", "[null, [1, 3]]"),
    ],
)
def test_terms_of_a_gradient_are_summed_before_a_product_of_weights_is_cut(ops: str, cut: str, tmp_path: Path) -> None:
    """Data parallel gradients of what is made of parameters alone are terms of a sum; a node that sums along their axis needs the sum."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 6] y) {{
    [product] p = {ops}
    [act] a = Tanh(p)
    [last] y = MatMul(x, a)
}}"""
    source = from_text(text, {"w": (6, 6), "v": (6, 6)})
    more = ", null" if "Gemm" in ops else ""
    plan = f"ranks: 3\nsymbols: {{batch: {{divisor: 3}}}}\ndataset: data_parallel\nsharding: {{product: {{in: {cut[:-1]}{more}]}}}}\n"
    random = np.random.default_rng(2)
    steps = [{"x": random.standard_normal((6, 6)).astype(np.float32), "labels": random.integers(0, 6, 6)}] * 2
    same_training(lambda: source, plan + SGD, tmp_path, steps, rtol=1e-5, atol=1e-4)


def test_copies_are_the_same_bits_where_one_rank_has_the_seed_and_another_is_sent_it(tmp_path: Path) -> None:
    """Beside a constant onnxruntime would make y / n of (1 / n) * y, which rounds otherwise."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[batch, 3] x) => (float y) <float[3, 4] w> {
        [turn] a = MatMul(x, w) [bend] b = Tanh(a) [square] c = Mul(b, b) [mean] d = ReduceMean<keepdims = 0>(c)
        [far] e = Tanh(x) [mean2] f = ReduceMean<keepdims = 0>(e) [sum] y = Add(d, f)
    }"""
    twice = ", ".join(f"{name}: [0, 1]" for name in ("turn", "bend", "square", "mean"))
    plan = f"ranks: 2\nplacement: {{{twice}, sum: 1}}\ntrain:\n  loss: y\n  optimizer: {{type: sgd, lr: 0.5}}\n"
    steps = [numbers((3,), rows, 1) for rows in (5, 11, 14)]
    given = [{"x": step["x"].reshape(-1, 3)} for step in steps]
    same_training(lambda: from_text(text, {"w": (3, 4)}), plan, tmp_path, given, rtol=1e-6, atol=1e-5)


NORMALIZED = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 5] y) {
    [first] h = MatMul (x, w)
    [norm] n, m, v = BatchNormalization <training_mode = 1, momentum = 0.8> (h, scale, bias, mean, variance)
    [layer] l = LayerNormalization <axis = 1> (n, mean)
    [last] y = MatMul (l, head)
}"""
NORMALIZED_SHAPES = {"w": (6, 8), **dict.fromkeys(("scale", "bias", "mean", "variance"), (8,)), "head": (8, 5)}
SQUARED = """train:
  loss: {type: mean_squared, prediction: y, target: t}
  optimizer: {type: sgd, lr: 0.1}
"""


ON = ["[0, 1], '{layer,last}': 2", "0, '{layer,last}': [1, 2]", "2, '{layer,last}': [1, 0]"]


@pytest.mark.parametrize(
    ("ranks", "targets"),
    [*((ranks, "") for ranks in ON), (ON[0], "target: {layer: cuda}\n"), (ON[1], "target: cuda\n")],
)
def test_what_replaces_a_tensor_may_have_another_name_on_other_ranks(ranks: str, targets: str, tmp_path: Path) -> None:
    """The running mean moves on the ranks of the one node, is sent to those of the other, and kept on all."""
    source = from_text(NORMALIZED, NORMALIZED_SHAPES)
    random = np.random.default_rng(3)
    steps = [
        {"x": random.standard_normal((n, 6), np.float32), "t": random.standard_normal((n, 5), np.float32)}
        for n in (6, 4)
    ]
    plan = f"ranks: 3\n{targets}placement: {{'{{first,norm}}': {ranks}}}\n{SQUARED}"
    same_training(lambda: source, plan, tmp_path, steps, rtol=1e-5, atol=1e-4)


def test_nodes_in_the_place_of_a_node_are_placed_by_its_name_in_the_file(tmp_path: Path) -> None:
    """A BatchNorm over records on several ranks becomes plain nodes; a file of torch's has paths by modules."""

    def source() -> Source:
        one = from_text(NORMALIZED, NORMALIZED_SHAPES)
        for node in one.model.graph:
            node.metadata_props["pkg.torch.onnx.name_scopes"] = f"['', 'layers', '{node.name}']"
            node.name = f"node_{node.name}"
            node.meta[OWN_NAME] = node.name
        return one

    plan = """ranks: 4
mesh: {pp: 2, dp: 2}
symbols: {batch: {divisor: 4}}
dataset: {x: [dp, null], t: [dp, null]}
placement: {node_first: {pp: 0}, node_norm: {pp: 1}, node_layer: {pp: 0}, node_last: {pp: 1}}
"""
    program = compile_source(source(), parse_plan(plan + SQUARED, "plan.yaml"), tmp_path / "build").program
    parts = {node: path for node, path in program.paths.items() if ".BatchNormalization." in path}
    assert len(parts) > 10
    assert {placed.ranks for node, placed in program.placement.items() if node in parts} == {(2, 3)}


SIZED = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 6] x) => (float[batch, 8] y) <int64[1] one = {1}> {
    [first] h = MatMul (x, w)
    [shape] s = Shape (w)
    [columns] n = Gather (s, one)
    [columns_cast] c = Cast <to = 1> (n)
    [size] q = Size (w)
    [size_cast] z = Cast <to = 1> (q)
    [rows] r = Shape <start = 0, end = 1> (w)
    [rows_cast] f = Cast <to = 1> (r)
    [divided] d = Div (h, c)
    [scaled] e = Div (d, z)
    [again] y = Mul (e, f)
}"""


@pytest.mark.parametrize(
    ("plan", "shape"),
    [
        ("ranks: 2\nsharding: {first: colwise}\n", (6, 4)),
        ("ranks: 3\nsharding: {first: rowwise}\n", (2, 8)),
        (
            "ranks: 4\nmesh: {dp: 2, tp: 2}\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\nsharding: {first: colwise}\n",
            (6, 4),
        ),
        ("ranks: 4\nsharding: {first: {in: [[1, 2], [2, 2]]}}\n", (3, 4)),
    ],
)
def test_no_rank_keeps_the_whole_for_its_size(plan: str, shape: tuple[int, int], tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    steps = [
        {"x": random.standard_normal((n, 6), np.float32), "t": random.standard_normal((n, 8), np.float32)}
        for n in (4, 6)
    ]
    program = same_training(
        lambda: from_text(SIZED, {"w": (6, 8)}), plan + SQUARED, tmp_path, steps, rtol=1e-5, atol=1e-4
    )
    for part in program.parts:
        kept = [one.version.layout.shards for one in part.state if one.tensor == "w"]
        assert [tuple(size // count for size, count in zip((6, 8), shards, strict=True)) for shards in kept] == [shape]
