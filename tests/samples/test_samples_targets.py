"""The samples whose ops are on two targets: what a run copies between these, counted in bytes, and that they learn as without."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from partc.compiler.pipeline import compile_model
from partc.runtime import load_local
from partc.runtime.checker.check import check_artifact
from partc.runtime.execution.targets.counts import Copies, TargetCounts
from samples_training_case import SAMPLES, same, train, with_few_tables
from training_equivalence import fed

SMALL = """from model import GPT, Sizes, batch, inputs, outputs, seq

__all__ = ["batch", "inputs", "outputs", "seq"]
model = GPT(Sizes(layers=1, width=24, heads=2, vocabulary=60, context=20))
"""


def counted(build: Path, step: Mapping[str, Any]) -> TargetCounts:
    """What the targets of an artifact's one rank do in a step, both on the CPU."""
    assert check_artifact(build) == []
    with load_local(build, devices={"cuda": "cpu"}) as ranks:
        ranks({**fed(ranks, 0), **step})
        return ranks.ranks[0].counts


def test_an_offloaded_gpt_copies_four_bytes_an_element_of_products(tmp_path: Path) -> None:
    """Of weights in 16 bits the gradients come down in 2 bytes and the next weights go up in 2; norms and tables have 4 bytes each way."""
    gpt = shutil.copytree(SAMPLES / "gpt", tmp_path / "gpt", ignore=shutil.ignore_patterns("build*", "__pycache__"))
    (gpt / "small.py").write_text(SMALL)
    report = compile_model(gpt / "small.py", gpt / "train_offload.yaml", tmp_path / "build")
    training, (part,) = report.program.training, report.program.parts
    assert training is not None
    sizes = {one.name or "": int(np.prod([int(str(dim)) for dim in one.shape or ()])) for one in training.parameters}
    assert {one.target for one in part.state} == {"cpu"}, "weights and the optimizer's state take nothing of the device"
    batch, seq, width = 3, 7, 24
    ids = np.random.default_rng(0).integers(0, 60, (2, batch, seq))
    counts = counted(tmp_path / "build", {"ids": ids[0], "labels": ids[1]})
    exact = sum(size for name, size in sizes.items() if "norm" in name or name == "tokens.weight")
    positions = sizes[
        "positions.weight"
    ]  # looked up by numbers made of the shape of ids, so on the CPU: its rows go up
    halves = sum(sizes.values()) - exact - positions
    assert halves > 0.6 * sum(sizes.values())
    data = 8 * 2 * batch * seq
    assert counts.copies["cuda"].bytes == 2 * halves + 4 * exact + 4 * seq * width + data + 4  # and the loss scale
    assert (
        counts.copies["cpu"].bytes == 2 * halves + 4 * exact + 4 * positions + 8 * seq + 16
    )  # and loss and accuracy, with what they are divided by
    assert counts.switches == 4


def test_tables_on_the_host_send_rows_up_and_gradients_down(tmp_path: Path) -> None:
    """Of all tables the rows are one copy, of the wide half one number a record; their gradients as much. Nothing has a table's size."""
    samples = with_few_tables(tmp_path / "wide_deep")
    steps = ("--steps", "3", "--log", "1")
    want = train(samples, "train.yaml", tmp_path / "whole", *steps)
    have = train(samples, "train_host.yaml", tmp_path / "host", *steps, "--device", "cuda=cpu")
    same(have, want, rtol=1e-4, atol=1e-5)
    batch, tables = 32, 6
    random = np.random.default_rng(0)
    step = {
        "ids": random.integers(0, 4, (batch, tables)),
        "numbers": random.standard_normal((batch, 13)).astype(np.float32),
        "clicked": random.integers(0, 2, (batch, 1)).astype(np.float32),
    }
    counts = counted(tmp_path / "host" / "build", step)
    rows = 4 * (16 * tables + 1) * batch
    down, up = counts.copies["cpu"], counts.copies["cuda"]
    assert down == Copies(down.number, rows + 4 + 4 * 2 * 2001), (
        "the loss, and counts of which the area under the ROC curve is made"
    )
    assert up == Copies(up.number, rows + 4 * (13 + 1) * batch + 3 * 4 + 8), "data, the optimizer's scalars, a count"
    assert (down.number, up.number) == (3, 6)
    assert counts.switches == 3, "looked up, the step on the device, updates of rows, those of the device"
