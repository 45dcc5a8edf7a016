"""Where one rank alone reads a sum, it is reduced there; where one rank alone has what a group reads, it is broadcast."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from artifact_text import write
from equivalence import model, same_as_whole
from partc.compiler.ir.program import Complete
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.moves import Reduce, Traffic, bytes_moved
from partc.compiler.layout.reshard import lower
from partc.runtime.checker.check import check_artifact
from sharded_models import with_weights
from training_equivalence import from_text, same_training

SUM = """<ir_version: 10, opset_import: ["" : 21]>
m (float[B, 6, 3] x) => (float[B, 3] y) <int64[1] one = {1}> {
    [halves] h = OP <keepdims = 0> (x, one)
    [head] y = Tanh (h)
}"""
ONE_TO_ALL = """<ir_version: 10, opset_import: ["" : 21]>
m (float[B, 6] x) => (float[B, 5] y) <float[6, 4] w, float[4, 5] v> {
    [first] h = MatMul (x, w)
    [second] y = MatMul (h, v)
}"""
RANDOM = np.random.default_rng(0)


def moved(program: Complete) -> list[tuple[str, tuple[tuple[int, ...], ...], str]]:
    return [(event.op_type, event.ranks, event.bytes) for event in program.events]


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMax"])
@pytest.mark.parametrize("root", [0, 2])
def test_a_sum_that_one_rank_reads_is_reduced_there(op: str, root: int) -> None:
    plan = (
        f"ranks: 3\ndataset: {{x: [1, 3, 1]}}\nplacement: {{halves: [0, 1, 2], head: {root}}}\noutputs: {{y: {root}}}\n"
    )
    steps = [{"x": RANDOM.standard_normal((rows, 6, 3)).astype(np.float32)} for rows in (4, 1)]
    program = same_as_whole(model(SUM.replace("OP", op)), plan, *steps, rtol=1e-6, atol=1e-6)
    assert moved(program) == [("Reduce", ((0, 1, 2),), "12*B")]


def test_an_output_that_one_rank_gets_is_reduced_there() -> None:
    """With two readers the sum is made once, on all ranks."""
    plan = "ranks: 4\ndataset: {x: [1, 2, 1]}\nsharding: {halves: {in: [[1, 2, 1], null]}}\n"
    text = SUM.replace("OP", "ReduceSum").replace("[head] y = Tanh (h)", "").replace("h = R", "y = R")
    x = {"x": RANDOM.standard_normal((4, 6, 3)).astype(np.float32)}
    program = same_as_whole(model(text), plan, x, rtol=1e-6, atol=1e-6)
    assert [kind for kind, _, _ in moved(program)] == ["Reduce"]
    both = text.replace("float[B, 3] y)", "float[B, 3] y, float[B, 3] z)")
    both = both.rstrip().removesuffix("}") + "[tail] z = Neg (y) }"
    program = same_as_whole(model(both), plan + "outputs: {z: [0, 1, 2, 3]}\n", x, rtol=1e-6, atol=1e-6)
    assert "AllReduce" in [kind for kind, _, _ in moved(program)]


def test_what_one_rank_has_is_broadcast_to_all_that_read_it(tmp_path: Path) -> None:
    """And the cotangents that come back are reduced where the value was made."""
    plan = "ranks: 3\nplacement: {first: 1, second: [0, 1, 2]}\nsharding: {second: replicate}\noutputs: {y: 2}\n"
    x = {"x": RANDOM.standard_normal((4, 6)).astype(np.float32)}
    whole = with_weights(ONE_TO_ALL, {"w": (6, 4), "v": (4, 5)})
    program = same_as_whole(whole, plan, x, rtol=1e-5, atol=1e-5)
    assert moved(program) == [("Broadcast", ((1, 0, 2),), "16*B")]
    text = ONE_TO_ALL.replace("(float[B, 5] y)", "(float y)").replace("[second] y =", "[second] k =")
    text = text.replace("float[4, 5] v", "float[4, 9] v").rstrip().removesuffix("}")
    text += "[square] q = Mul (k, k) [loss] y = ReduceMean <keepdims = 0> (q) }"
    source = from_text(text, {"w": (6, 4), "v": (4, 9)})
    train = "train:\n  loss: y\n  optimizer: {type: sgd, lr: 0.1}\n"
    plan = "ranks: 3\nplacement: {first: 1, second: [0, 1, 2], square: [0, 1, 2], loss: [0, 1, 2]}\n"
    plan += "sharding: {second: {in: [[1, 1], [1, 3]]}}\n" + train
    program = same_training(lambda: source, plan, tmp_path, [x, x], rtol=1e-5, atol=1e-4)
    found = Counter((event.op_type, str(event.value.name)) for event in program.events)
    assert found["Broadcast", "h"] == 1
    assert found["Reduce", "h.grad"] == 1


def test_a_reduce_costs_no_more_than_the_ways_without() -> None:
    """All of the value on the root; the others together get it as often as there are ranks but two."""
    for ranks in (2, 3, 6):
        terms, one = Layout((ranks,), ((),), ((0, "sum"),)), Layout((1,), ((),))
        (move,) = lower(terms, one, tuple(range(ranks)), (ranks - 1,))
        assert isinstance(move, Reduce)
        assert (move.root, move.sets) == (ranks - 1, (tuple(range(ranks)),))
        assert bytes_moved([move]) == Traffic(1, ranks - 1)
    rows = Layout((2, 3), ((0,),), ((1, "max"),))
    (move,) = lower(rows, Layout((2,), ((0,),)), (0, 1, 2, 3, 4, 5), (1, 4))
    assert isinstance(move, Reduce)
    assert (move.root, move.sets) == (1, ((0, 1, 2), (3, 4, 5)))


ROOTED = {
    "Reduce": 'k = partc.comm.Reduce <group = "all", tag = 0, root = 0, reduce = "sum"> (x)',
    "Broadcast": 'k = partc.comm.Broadcast <group = "all", tag = 0, root = 0> (x)',
}


@pytest.mark.parametrize(
    ("op", "old", "new", "fact"),
    [
        ("Reduce", "root = 0", "root = 1", "a rank that is not its root gets a result"),
        ("Reduce", "root = 0", "root = 2", "its root is 2, and its list has 2 ranks"),
        ("Broadcast", "root = 0", "root = 1", "its root gives nothing"),
    ],
)
def test_the_checker_holds_roots_against_the_law(tmp_path: Path, op: str, old: str, new: str, fact: str) -> None:
    """Rank 0 gives and gets; rank 1 only gives to a Reduce, and only gets from a Broadcast."""
    other = ROOTED[op].replace("k =", " =") if op == "Reduce" else ROOTED[op].replace("(x)", "()")
    result = "y = Neg(x)" if op == "Reduce" else "y = Neg(k)"
    graphs = [
        f"rank0 (float[n] x) => (float[n] z) <float[n] k> {{ {ROOTED[op]}  z = Neg(k) }}",
        f"rank1 (float[n] x) => (float[n] y) <float[n] k> {{ {other}  {result} }}",
    ]
    assert check_artifact(write(tmp_path / "sound", graphs, groups={"all": [[0, 1]]})) == []
    broken = write(tmp_path / "broken", [one.replace(old, new) for one in graphs], groups={"all": [[0, 1]]})
    assert fact in "\n".join(map(str, check_artifact(broken)))
