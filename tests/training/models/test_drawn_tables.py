"""Weights that are laws: every rank draws its own shard, and no machine has all of a large table."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest
from partc.compiler import nn
from partc.compiler.errors import CompileError
from partc.compiler.frontend.inputs import Spec
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.trace import trace
from partc.compiler.ir import computed as drawn
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from partc.runtime.artifact.format import Law
from partc.runtime.artifact.tensors import draw, law
from partc.runtime.artifact.tensors.boxes import Region
from partc.runtime.checker.check import check_artifact
from rows import of_today
from training_equivalence import run_whole, same_training
from training_models import INT64

ROWS, WIDTH = 60, 6
TRAIN = """
symbols: {batch: {divisor: 4, max: 64}}
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label}
  optimizer: {type: momentum, lr: 0.5, momentum: 0.9}
  parameters: {"*.weight": {initial: {normal: 0.3, mean: 0.1, seed: 9}}}
"""
PLANS = {
    "rows": "ranks: 4\ndataset: data_parallel\nsharding: {table: {parameters: {weight: [4, 1]}}}",
    "columns": "ranks: 2\nsharding: {table: {parameters: {weight: [1, 2]}}}",
    "placed": "ranks: 3\nplacement: {table: [1, 2], out: 0}\nsharding: {table: {parameters: {weight: [2, 1]}}}",
    "zero": "ranks: 2\nmesh: {dp: 2}\ndataset: data_parallel",
    "microbatches": "ranks: 2\nplacement: {table: 0, out: 1}\npipeline: {microbatches: 2}",
}


class Lookup(nn.Module):
    def __init__(self, rows: int = ROWS, width: int = WIDTH, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, padding, init=nn.init.normal(0.3, 0.1))
        self.out = nn.Linear(width, 3)

    def forward(self, op, ids):  # type: ignore[no-untyped-def]
        return self.out(op, self.table(op, ids))


def lookup(rows: int = ROWS, width: int = WIDTH, padding: int | None = None) -> Source:
    return Source(trace(Lookup(rows, width, padding), [Spec("ids", ("batch", 2), INT64)], ["y"], "lookup"))


def batches(count: int, rows: int = ROWS) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(3)
    return [{"ids": random.integers(0, rows, (8, 2)), "label": random.integers(0, 3, (8, 2))} for _ in range(count)]


@pytest.mark.parametrize("kind", ["normal", "truncated_normal", "uniform", "constant"])
def test_any_part_is_drawn_alone(kind: str) -> None:
    for shape in ((7, 3, 5), (3, draw.BLOCK + 5, 2), (4001, 5), (11,), ()):
        one = Law(draw=kind, stream="7/w", offset=0.25, factor=0.5, zero_rows=(2,))  # type: ignore[arg-type]
        whole = law.full_tensor(one, shape, np.dtype(np.float32))
        random = np.random.default_rng(len(shape))
        for _ in range(8):
            begin = tuple(int(random.integers(0, size)) for size in shape)
            end = tuple(int(random.integers(low, size)) + 1 for low, size in zip(begin, shape, strict=True))
            held = Region(begin, end)
            out = np.full(held.shape, np.nan, np.float32)
            law.fill(one, out, shape, held)
            np.testing.assert_array_equal(out, whole[held.slices])


@pytest.mark.parametrize("name", of_today([*PLANS], 2))
def test_a_drawn_table_trains_as_the_whole_one(tmp_path: Path, name: str) -> None:
    shared = TRAIN.replace("momentum: 0.9}", "momentum: 0.9, shard: dp}") if name == "zero" else TRAIN
    whole = run_whole(lookup(), "ranks: 1\n" + TRAIN, batches(2))
    same_training(lookup, PLANS[name] + shared, tmp_path, batches(2), rtol=2e-6, atol=2e-6, whole=whole)
    np.testing.assert_array_equal(
        whole.before["table.weight"],
        nn.init.normal(0.3, 0.1).values("9/table.weight", (ROWS, WIDTH), np.dtype(np.float32)),
    )
    stored = b"".join(file.read_bytes() for file in (tmp_path / "cut").rglob("*.*") if file.suffix != ".ir")
    assert whole.before["table.weight"][:1].tobytes() not in stored
    assert "Initial: 0.1 + 0.3 * normal(9/table.weight)" in (tmp_path / "cut/ir/step_parallel_end.ir").read_text()


def test_a_large_weight_is_a_law_in_every_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "LAW_BYTES", 64)
    plan = "ranks: 2\nsharding: {table: {parameters: {weight: [2, 1]}}}\nsymbols: {batch: {divisor: 2}}\n"
    ids = batches(1)[0]["ids"]
    compile_source(lookup(padding=5), parse_plan(plan, "plan.yaml"), tmp_path / "infer")
    assert check_artifact(tmp_path / "infer") == []
    monkeypatch.setattr(drawn, "LAW_BYTES", 1 << 30)
    compile_source(lookup(padding=5), parse_plan("ranks: 1\n", "plan.yaml"), tmp_path / "bytes")
    with load_local(tmp_path / "infer") as cut, load_local(tmp_path / "bytes") as whole:
        np.testing.assert_allclose(cut({"ids": ids})["y"], whole({"ids": ids})["y"], rtol=1e-6, atol=1e-6)


def test_a_table_larger_than_the_machine_compiles(tmp_path: Path) -> None:
    begun = time.process_time()
    plan = TRAIN.replace('"*.weight": {initial: {normal: 0.3, mean: 0.1, seed: 9}}', '"*.bias": {weight_decay: 0}')
    compile_source(lookup(4_000_000_000, 64), parse_plan(PLANS["rows"] + plan, "plan.yaml"), tmp_path / "build")
    assert check_artifact(tmp_path / "build") == []
    assert sum(file.stat().st_size for file in (tmp_path / "build").rglob("*") if file.is_file()) < 1 << 18
    assert time.process_time() - begun < 30


@pytest.mark.parametrize(
    ("said", "fact"),
    [
        ("{normal: 0.1, uniform: 2}", "'normal' and 'uniform' are two distributions"),
        ("{seed: 3}", "it names no distribution"),
        ("{uniform: 0.1, mean: 1}", "'mean' belongs to a normal distribution"),
    ],
)
def test_first_values_that_are_none(said: str, fact: str) -> None:
    plan = "ranks: 1\n" + TRAIN.replace("{normal: 0.3, mean: 0.1, seed: 9}", said)
    with pytest.raises(CompileError, match=re.escape(fact)):
        parse_plan(plan, "plan.yaml")
