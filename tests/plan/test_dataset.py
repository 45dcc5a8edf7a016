"""How inputs arrive: a plan's `dataset`, MindSpore's names for it, and the globals of a model.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.compiler.errors import CompileError
from partc.compiler.ir.program import Complete
from partc.compiler.plan.read import parse_plan
from shard_call_models import compiled, line, refused, said_by_compile, same_on_all_ranks

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 10)

    def forward(self, op, x, mask):
        return op.Mul(self.fc(op, x), mask)

model = Net()
inputs = {"x": [12, 6], "mask": [12, 1]}
"""
X = np.random.default_rng(0).standard_normal((12, 6), dtype=np.float32)
STEP = {"x": X, "mask": np.arange(12, dtype=np.float32)[:, None]}
MESH = "mesh: {dp: 2, tp: 2}\n"


def arriving(program: Complete) -> dict[str, str]:
    """How each input of rank 0 lies, as cuts."""
    return {held.version.value.name or "": str(held.version.layout) for held in program.parts[0].inputs}


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ("dataset_strategy: data_parallel", {"x": "[4, 1]", "mask": "[4, 1]"}),
        ("full_batch: false", {"x": "[4, 1]", "mask": "[4, 1]"}),
        ("full_batch: true\nmesh: {tp: 4}", {"x": "[1, 1]", "mask": "[1, 1]"}),
        ("dataset: [[4, 1], [2, 1]]", {"x": "[4, 1]", "mask": "[2, 1]"}),
        ("dataset_strategy: [[2, 2], null]", {"x": "[2, 2]", "mask": "[1, 1]"}),
        ("dataset_strategy: {x: [2, 2]}", {"x": "[2, 2]", "mask": "[1, 1]"}),
        (f"{MESH}dataset: [[dp, tp], [[dp, tp], null]]", {"x": "[2, 2]", "mask": "[4, 1]"}),
    ],
)
def test_a_plan_in_every_spelling(tmp_path: Path, words: str, want: dict[str, str]) -> None:
    plan = f"ranks: 4\n{words}\noutputs: cut\n"
    assert arriving(same_on_all_ranks(tmp_path, NET, plan, STEP, rtol=1e-5, atol=1e-6)) == want


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ('dataset_strategy = "data_parallel"', {"x": "[4, 1]", "mask": "[4, 1]"}),
        ("full_batch = False", {"x": "[4, 1]", "mask": "[4, 1]"}),
        ("dataset_strategy = ((4, 1), (2, 1))", {"x": "[4, 1]", "mask": "[2, 1]"}),
        ("dataset_strategy = [(2, 2), None]", {"x": "[2, 2]", "mask": "[1, 1]"}),
        ('dataset = {"x": (2, 2)}', {"x": "[2, 2]", "mask": "[1, 1]"}),
        ('dataset_strategy = (("dp", "tp"), (("dp", "tp"), None))', {"x": "[2, 2]", "mask": "[4, 1]"}),
    ],
)
def test_a_model_says_it_by_globals(tmp_path: Path, words: str, want: dict[str, str]) -> None:
    plan = f"ranks: 4\n{MESH if 'dp' in words else ''}outputs: cut\n"
    assert arriving(compiled(tmp_path, f"{NET}{words}\n", plan).program) == want


def test_the_plan_wins(tmp_path: Path) -> None:
    text = f"{NET}dataset_strategy = ((4, 1), (4, 1))\n"
    program = compiled(tmp_path, text, "ranks: 4\nfull_batch: true\nmesh: {tp: 4}\n").program
    assert arriving(program) == {"x": "[1, 1]", "mask": "[1, 1]"}


def test_labels_come_last(tmp_path: Path) -> None:
    train = "train: {loss: {type: mean_squared, prediction: output, target: t}, optimizer: {type: sgd, lr: 0.1}}\n"
    for more, want in (("", "[1, 1]"), (", [4, 1]", "[4, 1]")):
        program = compiled(tmp_path, NET, f"ranks: 4\ndataset_strategy: [[4, 1], [4, 1]{more}]\n{train}").program
        assert arriving(program) == {"x": "[4, 1]", "mask": "[4, 1]", "t": want}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "dataset: [[4, 1]]",
            "2: the dataset has 1 entry, but the inputs are x, mask\n"
            "  help: write one for each in this order, null for one that is whole",
        ),
        (
            "dataset_strategy: [4, 1]",
            "2: 'dataset_strategy': the list has dims where it should have inputs\n"
            "  a dataset has a cut for each input, with an entry for each dim\n  help: write one more pair of brackets",
        ),
        ("dataset: [[4, 1], [0, 1]]", "2: 'dataset': input 1: expected at least 1 shard, but got 0\n"),
        ("full_batch: yes", "2: 'full_batch': expected true or false, but got the string 'yes'"),
        (
            "dataset: full_batch\nfull_batch: false",
            "3: 'full_batch' and 'dataset' both define how inputs arrive\n  help: keep one of them",
        ),
    ],
)
def test_mistakes_of_a_plan(tmp_path: Path, words: str, message: str) -> None:
    if "entry" in message:
        assert said_by_compile(tmp_path, NET, f"ranks: 4\n{words}\n") == f"plan.yaml:{message}"
        return
    with pytest.raises(CompileError) as caught:
        parse_plan(f"ranks: 4\n{words}\n", "plan.yaml")
    assert str(caught.value).startswith(f"plan.yaml:{message}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("full_batch = 1", "full_batch: expected true or false, but got the number 1"),
        ("dataset_strategy = 'data'", "dataset_strategy: expected full_batch, data_parallel or the cut of each input"),
        (
            "dataset_strategy = ((4, 'dp'), None)",
            "dataset_strategy: input 0: the axis 'dp' and 4 shards are in one rule",
        ),
        (
            "dataset_strategy = 'full_batch'; full_batch = True",
            "'full_batch' and 'dataset_strategy' both define how inputs arrive\n  help: keep one of them",
        ),
    ],
)
def test_mistakes_of_a_model(tmp_path: Path, words: str, message: str) -> None:
    said = refused(tmp_path, f"{NET}{words}\n")
    assert said.startswith(f"model.py:{line(tmp_path, words)}: {message}")


def test_a_model_is_held_against_its_inputs(tmp_path: Path) -> None:
    words = "dataset_strategy = ((4, 1), (4, 1), (4,))"
    said = said_by_compile(tmp_path, f"{NET}{words}\n", "ranks: 4\n")
    where = f"model.py:{line(tmp_path, words)}"
    assert said.startswith(f"{where}: the dataset has 3 entries, but the inputs are x, mask\n")
