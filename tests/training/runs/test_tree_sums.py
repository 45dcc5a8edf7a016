"""`elastic: {parts: ..}`: the bits of a training on any number of ranks; what has other bits is refused, and another order is found."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from mutated import change_file, texts
from partc.cli.main import invoke
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_model
from partc.runtime.artifact.tasks.sum_tree import halves, nodes, roots, run_of
from training_command_case import MODEL, ONE, built, folder, tensors, train

__all__ = ["folder"]

PARTS = ONE.replace("type: adam,", "type: adam, shard: true,").replace(
    "batch: 12\n", "batch: 24\n  clip: {norm: 0.3}\n"
)
PARTS = "ranks: 6\nelastic: {ranks: [6, 4, 1], parts: 12}\ndataset: data_parallel\n" + PARTS.removeprefix("ranks: 1\n")
PARTS = PARTS.replace("train:", "symbols: {batch: {divisor: 12}}\ntrain:")


def test_the_tree_is_one_for_every_division_into_runs() -> None:
    for parts in (2, 7, 12, 24, 30):
        tree = {*nodes((0, parts))}
        assert all({*halves(node)} <= tree | {(part, part + 1) for part in range(parts)} for node in tree)
        for ranks in range(1, parts + 1):
            runs = [run_of(place, ranks, parts) for place in range(ranks)]
            given = [root for run in runs for root in roots((0, parts), run)]
            assert [part for root in given for part in range(*root)] == [*range(parts)]
            assert all(root in tree or root[1] - root[0] == 1 for root in given)


def other_order(model: onnx.ModelProto, word: str = "grad.sum.next") -> None:
    """((0, 2), (2, 4)) becomes ((0, 2), 2), 3)."""
    adds = {node.output[0]: node for node in model.graph.node if node.op_type == "Add"}
    whole = next(node for name, node in adds.items() if name.endswith(".of_0_4") and word in name)
    right = adds[whole.input[1]]
    third, fourth = right.input
    right.input[:], whole.input[:] = [whole.input[0], third], [right.output[0], fourth]


def test_bits_are_those_of_any_number_of_ranks(folder: Path) -> None:
    """Dropout, clipping, Adam's state in shards: alone, and begun on 6 ranks, continued on 4 and 1; another order of a sum is found."""
    build = built(folder, PARTS)
    assert texts(build) == ""
    assert invoke(["verify", "model.py", "--plan", "build.yaml"]) == 0
    runs = {f"on{ranks}": [(ranks, 5)] for ranks in (6, 4, 1)} | {"moved": [(6, 1), (4, 3), (1, 5)]}
    lines, weights = [], []
    for name, stages in runs.items():
        ran = ("--resume", "auto", "--checkpoint", name, "--log", "1", "--metrics", f"{name}.jsonl")
        for ranks, steps in stages:
            assert train(str(build), "-n", str(ranks), "--steps", str(steps), *ran) == 0
        lines.append([line["loss"] for line in map(json.loads, Path(f"{name}.jsonl").read_text().splitlines())])
        weights.append(tensors(folder / name))
    assert len(lines[0]) == 5
    assert all(one == lines[0] for one in lines)
    assert all(one == weights[0] for one in weights)
    change_file(build / "r1", "rank_0000.onnx", other_order)
    found = texts(build / "r1")
    assert "is not the sum over 12 parts by their tree: Add" in found
    assert "of_2_4' adds parts 0 to 1 and 2 to 2" in found


NORMALIZED = MODEL.replace("nn.Dropout(0.25)", "nn.BatchNorm2d(16)").replace(
    "self.drop(op, op.Tanh(self.a(op, x)))",
    "op.Squeeze(self.drop(op, op.Unsqueeze(op.Tanh(self.a(op, x)), [2, 3])), [2, 3])",
)


STATISTICS = (
    PARTS.replace("ranks: 6\nelastic: {ranks: [6, 4, 1], parts: 12}", "ranks: 3\nelastic: {ranks: [3, 1], parts: 6}")
    .replace("parts: 6", "parts: 6, statistics: part")
    .replace("divisor: 12", "divisor: 24")
)


def test_statistics_of_parts_have_the_bits_of_any_number_of_ranks(folder: Path) -> None:
    """A batch normalization: alone, and on other ranks in between; another order of its running statistics is found."""
    (folder / "model.py").write_text(NORMALIZED)
    build = built(folder, STATISTICS)
    assert texts(build) == ""
    assert invoke(["verify", "model.py", "--plan", "build.yaml"]) == 0
    weights = []
    for name, stages in {"on3": [(3, 4)], "on1": [(1, 4)], "moved": [(1, 2), (3, 4)]}.items():
        for ranks, steps in stages:
            ran = ("-n", str(ranks), "--steps", str(steps), "--resume", "auto", "--checkpoint", name)
            assert train(str(build), *ran) == 0
        weights.append(tensors(folder / name))
    assert sum("running" in name for name in weights[0]) == 2
    assert all(one == weights[0] for one in weights)
    change_file(build / "r1", "rank_0000.onnx", partial(other_order, word="running_mean"))
    assert "running_mean.next' is not the sum over 6 parts by their tree" in texts(build / "r1")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("parts: 12", "parts: 9"), ("9 parts cannot be dealt out to 6 ranks", "choose 12")),
        (("parts: 12", "parts: 36"), ("a batch of 24 records cannot be divided into 36 parts",)),
        (("train:", "placement: {a: 0}\ntrain:"), ("'parts' beside 'placement'",)),
        (("train:", "train:\n  accumulate: 2"), ("'parts' beside 'train.accumulate'",)),
        (("dataset: data_parallel\n", ""), ("the records of 'x' are not dealt out to all 6 ranks",)),
        (
            ("labels: label}", "labels: label, weights: [1, 2, 1, 1, 1, 0.5]}"),
            ("'loss.class_weights', which has fractions",),
        ),
        (("type: adam,", "type: lamb,"), ("an optimizer with norms of whole parameters, 'lamb', is shared out",)),
        (
            ("", ""),
            ("not all of the model can run by parts: drop", "write statistics: part, if a batch normalization may"),
        ),
        (("parts: 12", "statistics: part"), ("'statistics' without 'parts'", "write parts: 24")),
    ],
)
def test_what_has_other_bits_is_refused(folder: Path, change: tuple[str, str], words: tuple[str, ...]) -> None:
    (folder / "model.py").write_text(MODEL if change[0] else NORMALIZED)
    (folder / "plan.yaml").write_text(PARTS.replace(*change, 1) if change[0] else PARTS)
    with pytest.raises(CompileError) as refused:
        compile_model(folder / "model.py", folder / "plan.yaml", folder / "build")
    for text in words:
        assert text in str(refused.value)
    assert "plan.yaml:" in str(refused.value)


def test_sums_of_rows_have_other_bits_in_another_order() -> None:
    """What the tests above could not show of numbers that add up exactly."""
    terms = np.random.default_rng(0).standard_normal(12).astype(np.float32)
    plain = np.float32(0)
    for term in terms:
        plain += term
    tree = {(part, part + 1): term for part, term in enumerate(terms)}
    for node in nodes((0, 12)):
        tree[node] = tree[halves(node)[0]] + tree[halves(node)[1]]
    assert tree[0, 12] != plain
