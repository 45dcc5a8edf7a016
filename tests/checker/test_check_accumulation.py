"""The checker on artifacts whose batches are cut into parts: clean under several plans, and each promise of the sums broken alone."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import onnx
import pytest
from flat_manifest import edit
from mutated import correct
from onnx import ModelProto, NodeProto, helper, numpy_helper
from partc.cli.commands.inspect import command as inspect
from partc.cli.output.training_stats import kept_bytes, training_stats
from partc.runtime.artifact.format import MANIFEST
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check
from partc.runtime.checker.training.in_place import unsafe_state
from small_training import DATA_PARALLEL, MOMENTUM, NORMALIZED, PERCEPTRON, compiled

SUMS = ("first.grad.sum", "second.grad.sum", "shift.grad.sum")
PARTS = "accumulation"
SHARED = "{type: momentum, lr: 0.1, momentum: 0.9, shard: dp}"
ALONG_DP = "mesh: {dp: 2}\nsymbols: {batch: {divisor: 2}}\n"
GRID = f"""ranks: 4
{ALONG_DP.replace("dp: 2", "dp: 2, tp: 2")}dataset: {{x: [dp, null], t: [dp, null]}}
sharding: {{one: {{parameters: {{first: [tp, null]}}}}}}
"""
LOOKED_UP = """<ir_version: 10, opset_import: ["" : 21]>
main (int64[batch] x) => (float[batch, 3] y)
<float[6, 5] table, float[5, 3] second> {
    [rows] h = Gather(table, x)
    [two] y = MatMul(h, second)
}"""


def parts(optimizer: str = MOMENTUM) -> str:
    return f"{optimizer}, accumulate: 3"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("sound") / "build", PERCEPTRON, DATA_PARALLEL, parts())


PLANS = {
    "cut": (PERCEPTRON, f"ranks: 2\n{ALONG_DP}dataset: data_parallel\n"),
    "grid": (PERCEPTRON, GRID),
    "looked up": (LOOKED_UP, f"ranks: 2\n{ALONG_DP}dataset: data_parallel\n"),
    "normalized": (NORMALIZED, f"ranks: 2\n{ALONG_DP}dataset: data_parallel\n"),
    "placed": (PERCEPTRON, "ranks: 2\nplacement: {one: 0, plus: 0, turn: 0, two: 1}\n"),
    "placed twice": (PERCEPTRON, "ranks: 3\nplacement: {two: [0, 2]}\n"),
}


@pytest.mark.parametrize("optimizer", [MOMENTUM, SHARED])
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_compiled_is_sound(plan: str, optimizer: str, tmp_path: Path) -> None:
    model, text = PLANS[plan]
    if optimizer == SHARED and "dp:" not in text:
        optimizer = "{type: adam, lr: 0.1}"
    counts = set()
    for one in (optimizer, parts(optimizer)):
        checked = check(compiled(tmp_path / one, model, text, one))
        assert checked.violations == []
        counts.add((checked.in_place, checked.copied, checked.copies))
    assert len(counts) == 1


def test_shared_out_parameters_are_copied_and_stay_equal(tmp_path: Path) -> None:
    checked = check(compiled(tmp_path / "build", PERCEPTRON, f"ranks: 2\n{ALONG_DP}dataset: data_parallel\n", SHARED))
    # `first` is made by an AllGather on each of two ranks, and each has half of its slot; 5 and 5x3 cannot be halved
    assert (checked.in_place, checked.copied, checked.copies) == (10, 2, 5)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object] = lambda data: None) -> None:
    """Changes a manifest; sizes and hashes of the files are made right again."""
    data = json.loads((folder / MANIFEST).read_text())
    edit(data, change)
    for name, record in data["files"].items():
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            record.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (folder / MANIFEST).write_text(json.dumps(data))


def found_after(sound: Path, folder: Path, change: Callable[[Path], object]) -> str:
    """The violations where a copy of an artifact is changed."""
    shutil.copytree(sound, folder)
    change(folder)
    return "\n".join(str(one) for one in check(folder).violations)


def node_of(model: ModelProto, name: str) -> NodeProto:
    return next(node for node in model.graph.node if name in node.output)


def _of_programs(inner: str, change: Callable[[ModelProto], object], ranks: tuple[int, ...]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        for rank in ranks:
            file = folder / inner / f"rank_{rank:04d}.onnx"
            model = onnx.load(file, load_external_data=False)
            change(model)
            file.write_bytes(model.SerializeToString())
        rewritten(folder / inner)
        rewritten(folder)

    return changed


def of_part(change: Callable[[ModelProto], object], *ranks: int) -> Callable[[Path], None]:
    return _of_programs(PARTS, change, ranks or (0, 1))


def of_step(change: Callable[[ModelProto], object], *ranks: int) -> Callable[[Path], None]:
    return _of_programs("", change, ranks or (0, 1))


def of_manifest(inner: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        rewritten(folder / inner, change)
        rewritten(folder)

    return changed


def _state(name: str, **fields: object) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        next(one for one in data["state"] if one["value"] == name).update(fields)

    return change


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        data["state"] = [one for one in data["state"] if one["value"] != name]

    return change


def _subtracts(model: ModelProto) -> None:
    node_of(model, "first.grad.sum.next").op_type = "Sub"


def _of_another(model: ModelProto) -> None:
    node_of(model, "first.grad.sum.next").input[0] = "first"


def _twice(model: ModelProto) -> None:
    node_of(model, "first.grad.sum.next").input[1] = "first.grad.sum"


def _of_another_shape(model: ModelProto) -> None:
    node_of(model, "first.grad.sum.next").input[1] = "shift"
    node_of(model, "shift.grad.sum.next").input[1] = "first"


def _of_another_gradient(model: ModelProto) -> None:
    node_of(model, "shift.grad.sum.next").input[1] = "shift"


def _appended(op: str, name: str) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        model.graph.node.append(helper.make_node(op, [name], ["unused"], name="reader"))

    return change


def _prepended(model: ModelProto) -> None:
    model.graph.node.insert(0, helper.make_node("Neg", ["first.grad.sum"], ["unused"], name="reader"))


def _in_a_body(model: ModelProto) -> None:
    shape = helper.make_tensor_value_info("negated", 1, [6, 5])
    body = helper.make_graph([helper.make_node("Neg", ["first.grad.sum"], ["negated"])], "body", [], [shape])
    truth = numpy_helper.from_array(np.array(True), "truth")
    model.graph.initializer.append(truth)
    node = helper.make_node("If", ["truth"], ["unused"], name="reader", then_branch=body, else_branch=body)
    model.graph.node.append(node)


def _first_value(model: ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.ones((6, 5), np.float32), "first.grad.sum"))


def _forgotten(model: ModelProto) -> None:
    """The last part's gradient alone is reduced."""
    adder = node_of(model, "first.grad.sum.next")
    adder.input[list(adder.input).index("first.grad.sum")] = "first.zeros"
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((6, 5), np.float32), "first.zeros"))


def _other_loss(model: ModelProto) -> None:
    """Its parts count three times what the last one does."""
    seed = next(one for one in model.graph.initializer if one.name == "loss.seed")
    seed.CopyFrom(numpy_helper.from_array(np.array(1, np.float32), "loss.seed"))


def _term(model: ModelProto) -> None:
    """What one rank has added up in place of the sum over ranks."""
    node_of(model, "shift.next").input[1] = "shift.grad.sum.next"


def _truncated(folder: Path) -> None:
    file = folder / PARTS / "rank_0001.onnx"
    file.write_bytes(file.read_bytes()[:-9])


def _cut_off(folder: Path) -> None:
    _truncated(folder)
    correct(folder)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (
        lambda folder: shutil.rmtree(folder / PARTS),
        "accumulation/manifest.json: the manifest lists it, and it is not",
    ),
    "a file less": (
        lambda folder: (folder / PARTS / "rank_0001.onnx").unlink(),
        "accumulation/rank_0001.onnx: the manifest lists it, and it is not there",
    ),
    "a file cut off": (_truncated, "accumulation/rank_0001.onnx: it has"),
    "another file": (_cut_off, "accumulation/rank_0001.onnx: it is not an ONNX file"),
    "a folder away": (
        of_manifest("", lambda data: data["training"].update(accumulation="../away")),
        "its accumulation is at '../away', where the manifest lists no artifact",
    ),
    "no folder named": (
        of_manifest("", lambda data: data["training"].update(accumulation="")),
        "training: it names no folder with a program of the parts of a batch, which it cuts into 3",
    ),
    "not cut": (
        of_manifest("", lambda data: data["training"].update(accumulate=1)),
        "training: it has a program of the parts of a batch, which it cuts into 1",
    ),
    "subtracts": (
        of_part(_subtracts),
        "it makes 'first.grad.sum.next' as Sub(first.grad.sum, first.grad.partial); it must",
    ),
    "another sum": (
        of_part(_of_another),
        "as Add(first, first.grad.partial); it must add a gradient to 'first.grad.sum'",
    ),
    "itself": (of_part(_twice), "as Add(first.grad.sum, first.grad.sum); it must add a gradient to"),
    "another shape": (of_part(_of_another_shape), "'first', tensor(float) [6, 5], to 'shift.grad.sum', tensor(float)"),
    "another gradient": (of_part(_of_another_gradient), "what it adds to 'shift.grad.sum' is not what the other parts"),
    "another gradient of a rank": (of_part(_of_another_gradient, 1), "rank_0001.onnx: Add 'shift.grad.sum.next'"),
    "a late reader": (
        of_part(_appended("Neg", "first.grad.sum")),
        "Neg 'reader': it reads 'first.grad.sum' beside Add 'first.grad.sum.next', which must be the only one",
    ),
    "an early reader": (of_part(_prepended), "Neg 'reader': it reads 'first.grad.sum' beside Add 'first.grad.sum"),
    "a reader in a body": (of_part(_in_a_body), "If 'reader': it reads 'first.grad.sum' beside Add 'first.grad.sum"),
    "a reader of the next sum": (
        of_part(_appended("Neg", "first.grad.sum.next")),
        "Neg 'reader': it reads 'first.grad.sum.next', which is the memory of 'first.grad.sum' in the next part",
    ),
    "a value at the beginning": (of_step(_first_value), "'first.grad.sum': it has a first value; a sum of gradients"),
    "another beginning": (of_manifest("", _state(SUMS[0], initial=1.0)), "it begins as 1; a sum of gradients begins"),
    "a sum that no one takes": (of_step(_forgotten), "'first.grad.sum': no node reads it: of the parts of a batch all"),
    "another loss": (of_part(_other_loss), "what it adds to 'first.grad.sum' is not what the other parts of the batch"),
    "a term": (of_step(_term), "by 'shift.grad.sum.next', which is a term of a sum that no collective"),
    "a sum less": (of_manifest(PARTS, _without(SUMS[1])), "'second.grad.sum': on rank 0 no part of a batch adds to it"),
    "a sum on one rank": (of_manifest(PARTS, _state(SUMS[1], ranks=[0], boxes=None)), "on rank 1 no part of a batch"),
    "a sum that stays": (of_manifest(PARTS, _state(SUMS[1], next="")), "nothing takes its place; a part of a batch"),
    "a sum that a step replaces": (
        of_manifest("", _state(SUMS[1], next="second.grad.sum.next")),
        "'second.grad.sum.next' takes its place; a step ends the sum",
    ),
    "a parameter that moves": (
        of_manifest(PARTS, _state("shift", next="shift.next")),
        "'shift.next' takes its place; a part of a batch but the last leaves it as it is",
    ),
    "a sum of nobody": (
        of_manifest("", _state(SUMS[1], parameter="third")),
        "it is of the parameter 'third', which no",
    ),
    "another kind": (
        of_manifest(PARTS, _state(SUMS[1], kind="statistics", parameter="")),
        "rank 0 keeps 'second.grad.sum' (statistics)",
    ),
    "an input of its own": (
        of_manifest(PARTS, lambda data: data["inputs"][0].update(name="z")),
        "accumulation/manifest.json: input 'z': a part of a batch is not given it",
    ),
    "another type of input": (
        of_manifest(PARTS, lambda data: data["inputs"][0].update(type="tensor(double)")),
        "input 'x': it is tensor(double) ['batch', 6] on ranks [0, 1], and in a step tensor(float)",
    ),
    "an output less": (
        of_manifest(PARTS, lambda data: data.update(outputs=[])),
        "accumulation/manifest.json: its outputs are none, and those of a step 'loss' on ranks [0]",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_broken_promise_is_named(sound: Path, tmp_path: Path, case: str) -> None:
    change, expected = CHANGES[case]
    found = found_after(sound, tmp_path / "build", change)
    assert expected in found, found


def test_statistics_move_with_every_part(tmp_path: Path) -> None:
    build = compiled(tmp_path / "sound", NORMALIZED, "ranks: 1\n", parts())
    still = of_manifest(PARTS, _state("running_mean", next=""))
    assert "'running_mean': nothing takes its place; a part of a batch" in found_after(build, tmp_path / "still", still)


def test_a_scatter_adds_in_place_only_where_it_adds(tmp_path: Path) -> None:
    build = compiled(tmp_path / "sound", LOOKED_UP, DATA_PARALLEL, parts())

    def replaces(model: ModelProto) -> None:
        node = node_of(model, "table.grad.sum.next")
        assert node.op_type == "ScatterND"
        next(one for one in node.attribute if one.name == "reduction").s = b"none"

    found = found_after(build, tmp_path / "replaces", of_part(replaces))
    assert "'table.grad.sum.next' as ScatterND(table.grad.sum, " in found
    assert "it must add a gradient to 'table.grad.sum', once" in found


def test_loading_refuses_a_sum_that_another_node_reads(sound: Path) -> None:
    manifest = open_artifact(sound / PARTS).manifest
    for change in (None, _subtracts, _of_another, _appended("Neg", "first.grad.sum")):
        model = onnx.load(sound / PARTS / manifest.program(1), load_external_data=False)
        if change is not None:
            change(model)
        assert bool(unsafe_state(manifest, 1, model)) is (change is not None)


def test_sums_are_counted(sound: Path) -> None:
    artifact = open_artifact(sound)
    floats = 6 * 5 + 5 + 5 * 3
    kept = {"parameter": 4 * floats, "optimizer": 4 * floats, "statistics": 0, "gradient": 4 * floats}
    assert kept_bytes(artifact.manifest, 1) == kept
    assert training_stats(artifact.manifest, artifact.model(1), 1, {"batch": 4}).sums == 4 * floats
    lines = click.testing.CliRunner().invoke(inspect, [str(sound)], catch_exceptions=False).output.splitlines()
    at = lines.index("training")
    assert lines[at + 1].split()[-4:] == ["accumulated", "gradients", "gradient", "buckets"]
    assert lines[at + 2].split()[8:] == ["200", "B", "1,", "200", "B"]
