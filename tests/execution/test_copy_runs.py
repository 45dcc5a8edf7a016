"""A run of copies is one moment: its values share no memory, its moves have no order, and nothing is copied that nothing reads."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx
import pytest
from artifact_text import HEAD
from onnx import helper
from partc.compiler.ir import programs
from partc.runtime import load_local
from partc.runtime.execution.targets import session_calls
from partc.runtime.program.flat_buffers import copy_runs, merged
from partc.runtime.program.lifetimes import lifetimes, live_ranges
from partc.runtime.program.memory_plan import Lifetime, assign
from partc.runtime.program.steps import Copy, Segment, Step
from run_steps import steps_of
from small_training import DATA_PARALLEL, MOMENTUM, PERCEPTRON, compiled
from targeted import ON_CPU, perceptron_steps, scattered, targeted
from training_equivalence import from_text, same_training


def copy(source: str, result: str, to: str = "cuda") -> Copy:
    return Copy(source, result, to, "")


def segment(inputs: str, outputs: str) -> Segment:
    names = inputs.split(), outputs.split()
    return Segment([helper.make_node("Sum", *names)], tuple(names[0]), tuple(names[1]), ())


def lives(steps: list[Step], *outputs: str) -> dict[str, Lifetime]:
    ranges = live_ranges(steps, outputs)
    return {one.name: one for one in lifetimes(ranges, {}, dict.fromkeys(ranges, 64))}


def test_a_run_of_copies_is_one_moment() -> None:
    """What nothing reads shares no memory with the other copies of its run, nor does a source that only the first of them reads."""
    steps: list[Step] = [segment("x", "a b"), copy("a", "unread"), copy("b", "b.cuda"), segment("b.cuda", "y")]
    found = lives(steps, "y")
    assert {name: (one.born, one.died) for name, one in found.items()} == {
        "x": (0, 0),
        "a": (0, 2),
        "b": (0, 2),
        "unread": (1, 2),
        "b.cuda": (1, 3),
        "y": (3, 4),
    }
    offsets = assign([one for name, one in found.items() if name in ("unread", "b.cuda")]).offsets
    assert offsets == {"unread": 0, "b.cuda": 64}


def test_a_copy_of_what_the_run_makes_begins_another_one() -> None:
    assert copy_runs([copy("a", "b"), copy("c", "d"), copy("b", "e"), copy("f", "g")]) == [[0, 1], [2, 3]]
    assert copy_runs([copy("a", "b"), copy("c", "d", "cpu"), segment("d", "e"), copy("e", "f", "cpu")]) == [
        [0],
        [1],
        [3],
    ]


def test_what_nothing_reads_is_neither_copied_nor_computed() -> None:
    text = """g (float[n] x, float[n] w) => (float[n] y)
    {
        wc = partc.comm.Copy <to = "cuda"> (w)
        xc = partc.comm.Copy <to = "cuda"> (x)
        unread = Mul(xc, wc)
        back = partc.comm.Copy <to = "cpu"> (unread)
        y = Neg(x)
    }"""
    steps = steps_of(onnx.parser.parse_model(HEAD + text), "rank.onnx")
    assert [(step.inputs, step.outputs) for step in steps if isinstance(step, Segment)] == [(("x",), ("y",))]
    assert len(steps) == 1


LOOKUP = """<ir_version: 10, opset_import: ["" : 21]>
m (int64[batch, 3] ids) => (float[batch, 4] y) <int64[1] axes = {1}> {
  [rows] rows = Gather(table, ids)
  [mean] h = ReduceMean <keepdims = 0> (rows, axes)
  [out] y = MatMul(h, w) }"""
WEIGHTS = {"table": (9, 4), "w": (4, 4)}
PLAN = """ranks: 2
placement: {rows: [0, 1], mean: [0, 1], out: 1}
target: {rows: cuda, mean: cuda}
train:
  loss: {type: mean_squared, prediction: y, target: t}
  optimizer: {type: momentum, lr: 0.1, target: cpu}
"""


def test_what_only_its_shape_is_read_of_is_not_brought_to_a_target(tmp_path: Path) -> None:
    """The first rank computes the gradient alone, for which it wants the shape of the rows: the table stays on the CPU."""
    random = np.random.default_rng(3)
    steps = [
        {"ids": random.integers(0, 9, (5, 3)), "t": random.standard_normal((5, 4)).astype(np.float32)} for _ in range(2)
    ]
    program = same_training(lambda: from_text(LOOKUP, WEIGHTS), PLAN, tmp_path, steps, rtol=1e-5, atol=1e-5)
    copied = [[str(one.source) for one in part.steps if isinstance(one, programs.Copy)] for part in program.parts]
    assert "table" not in copied[0]
    assert "table" in copied[1]


@pytest.mark.parametrize("others", ["cpu", "cuda"])
def test_the_order_of_moves_does_not_matter(others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where copies are between places of one memory: that of `device` is the CPU's here."""
    built = compiled(tmp_path / "build", PERCEPTRON, DATA_PARALLEL, MOMENTUM)
    folder = targeted(built, tmp_path / "targeted", lambda node: "device" if scattered(node) == "cpu" else others)
    with load_local(folder, trust=True, devices=ON_CPU) as ranks:
        expected = perceptron_steps(ranks)
    orders = set()
    for seed in range(4):
        chance = random.Random(seed)

        def shuffled(
            spans: Collection[tuple[int, int, int]], chance: random.Random = chance
        ) -> list[tuple[int, int, int]]:
            moves = merged(spans)
            order = chance.sample(range(len(moves)), len(moves))
            orders.add(tuple(order))
            return [moves[at] for at in order]

        monkeypatch.setattr(session_calls, "merged", shuffled)
        with load_local(folder, trust=True, devices=ON_CPU) as ranks:
            losses, state = perceptron_steps(ranks)
        assert losses == expected[0]
        for name, value in expected[1].items():
            np.testing.assert_array_equal(state[name], value, err_msg=name)
    assert any(order != tuple(sorted(order)) for order in orders)
