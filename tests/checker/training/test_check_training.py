"""The checker on artifacts that train: each promise broken alone, in the files of a real one, and the place that is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import onnx
import pytest
from flat_manifest import edit
from mutated import rewrite_raw, texts
from onnx import ModelProto, NodeProto, helper
from partc.cli.commands.check import command
from partc.runtime.artifact.format import ALL_REDUCE, MANIFEST
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check
from partc.runtime.checker.training.in_place import unsafe_state
from small_training import DATA_PARALLEL, LAMB, NORMALIZED, PERCEPTRON, compiled


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("sound") / "build", PERCEPTRON, DATA_PARALLEL)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest as the step needs it; hashes of the files are made right again."""
    rewrite_raw(folder, lambda data: edit(data, change))


def with_ranks(folder: Path, changes: Mapping[int, Callable[[ModelProto], object]]) -> None:
    """Changes the rank files; each rank gets one of its own."""
    programs = json.loads((folder / MANIFEST).read_text())["programs"]["train"]["rank_files"]
    programs = programs or ["rank_0000.onnx", "rank_0001.onnx"]
    models = [onnx.load(folder / name, load_external_data=False) for name in programs]
    for rank, model in enumerate(models):
        changes.get(rank, lambda model: None)(model)
        (folder / f"rank_{rank:04d}.onnx").write_bytes(model.SerializeToString())

    def change(data: dict[str, Any]) -> None:
        data["rank_files"] = []
        for rank in range(len(models)):
            data["files"].setdefault(f"rank_{rank:04d}.onnx", {})

    rewrite(folder, change)


def place(model: ModelProto, name: str) -> int:
    """Where the node stands that makes a value."""
    return next(at for at, node in enumerate(model.graph.node) if name in node.output)


def node_of(model: ModelProto, name: str) -> NodeProto:
    return model.graph.node[place(model, name)]


def move(model: ModelProto, name: str, before: int) -> None:
    """Takes the node that makes a value to another place."""
    node = NodeProto()
    node.CopyFrom(node_of(model, name))
    del model.graph.node[place(model, name)]
    model.graph.node.insert(before, node)


def test_a_sound_training_artifact_has_no_violation(sound: Path) -> None:
    checked = check(sound)
    assert checked.violations == []
    # three parameters with a slot each, on two ranks
    assert (checked.state.in_place, checked.state.copied, checked.state.copies) == (12, 0, 6)


def test_what_is_not_updated_in_place_is_told(tmp_path: Path) -> None:
    checked = check(compiled(tmp_path / "statistics", NORMALIZED, "ranks: 1\n"))
    assert checked.violations == []
    assert (checked.state.in_place, checked.state.copied, checked.state.copies) == (4, 2, 0)
    checked = check(compiled(tmp_path / "lamb", PERCEPTRON, DATA_PARALLEL, LAMB))
    assert checked.violations == []
    assert (checked.state.in_place, checked.state.copied, checked.state.copies) == (18, 0, 9)


def body_of(model: ModelProto) -> Any:
    """The nodes of the optimizer's function."""
    return next(one for one in model.functions if "momentum_next" in one.output).node


def _late_reader(model: ModelProto) -> None:
    move(model, "first.next", place(model, "h"))


def _late_body(model: ModelProto) -> None:
    body = helper.make_graph([helper.make_node("Neg", ["first"], ["negated"])], "body", [], [port("negated", [6, 5])])
    nodes = [
        helper.make_node("Constant", [], ["flag"], name="flag", value_int=1),
        helper.make_node("Cast", ["flag"], ["truth"], name="truth", to=9),
        helper.make_node("If", ["truth"], ["unused"], name="choice", then_branch=body, else_branch=body),
    ]
    model.graph.node.extend(nodes)


def port(name: str, shape: list[int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, 1, shape)


def _reads_next(model: ModelProto) -> None:
    model.graph.node.append(helper.make_node("Neg", ["first.next"], ["negated"], name="negated"))


def _no_maker(model: ModelProto) -> None:
    del model.graph.node[place(model, "shift.next")]


def _no_output(model: ModelProto) -> None:
    ports = model.graph.output
    del ports[next(at for at, one in enumerate(ports) if one.name == "shift.next")]


def _no_input(model: ModelProto) -> None:
    ports = model.graph.input
    del ports[next(at for at, one in enumerate(ports) if one.name == "shift.momentum")]


def _wrong_shape(model: ModelProto) -> None:
    one = next(one for one in model.graph.input if one.name == "shift")
    one.CopyFrom(port("shift", [4]))


def _no_first_value(model: ModelProto) -> None:
    weights = model.graph.initializer
    del weights[next(at for at, one in enumerate(weights) if one.name == "shift")]


def _other_first_value(model: ModelProto) -> None:
    one = next(one for one in model.graph.initializer if one.name == "shift")
    one.CopyFrom(onnx.numpy_helper.from_array(np.ones(5, np.float32), "shift"))


def _other_attribute(model: ModelProto) -> None:
    next(one for one in node_of(model, "shift.next").attribute if one.name == "lr_multiplier").f = 0.5


def _own_gradient(model: ModelProto) -> None:
    """A term in place of the sum over ranks."""
    reduce = node_of(model, "shift.grad")
    node_of(model, "shift.next").input[1] = reduce.input[list(reduce.output).index("shift.grad")]


def _other_order(model: ModelProto) -> None:
    for names in (node_of(model, "first.grad").input, node_of(model, "first.grad").output):
        names[:] = list(names)[::-1]


def _swapped_outputs(model: ModelProto) -> None:
    outputs = node_of(model, "shift.next").output
    outputs[:] = list(outputs)[::-1]


def _of_another(model: ModelProto) -> None:
    node_of(model, "first.next").input[2] = "first"


def _reads_after_overwriting(model: ModelProto) -> None:
    """The change is made of the old momentum, by a node that does not lead to the next one."""
    change = next(node for node in body_of(model) if "change" in node.output)
    change.input[list(change.input).index("momentum_next")] = "momentum"


def _communicates(model: ModelProto) -> None:
    reduce = helper.make_node(ALL_REDUCE, ["gradient"], ["all"], domain="partc.comm", group="0-1", tag=9, reduce="sum")
    body_of(model).insert(0, reduce)


def _unknown_in_body(model: ModelProto) -> None:
    body_of(model)[0].op_type = "Multiply"


def _lost_in_body(model: ModelProto) -> None:
    body_of(model)[0].input[0] = "ghost"


def _one_attribute_less(model: ModelProto) -> None:
    del node_of(model, "shift.next").attribute[0]


def _one_input_less(model: ModelProto) -> None:
    del node_of(model, "shift.next").input[-1]


def _no_function(model: ModelProto) -> None:
    del model.functions[:]


def _in_flight(model: ModelProto) -> None:
    """A collective whose result is needed behind the update."""
    call = {"domain": "partc.comm", "group": "0-1", "tag": 78, "reduce": "sum"}
    model.graph.node.insert(0, helper.make_node(ALL_REDUCE, ["second"], ["all"], name="flying", **call))
    model.graph.node.append(helper.make_node("Neg", ["all"], ["negated"], name="negated"))


def _is_sent(model: ModelProto) -> None:
    node = helper.make_node("Send", ["second"], [], name="sent", domain="partc.comm", peer=1, tag=77)
    model.graph.node.insert(0, node)


BOTH = {
    "a reader behind the update": (_late_reader, "MatMul 'one' (one): it reads 'first' after Momentum"),
    "a body behind the update": (_late_body, "If 'choice': it reads 'first' after MomentumScaled 'first.update'"),
    "a reader of the next value": (_reads_next, "Neg 'negated': it reads 'first.next', which is the memory of 'first'"),
    "nobody makes it": (_no_maker, "its output 'shift.next' is defined by no node of this rank"),
    "no output": (_no_output, "has 'shift.next' as state of rank 0, and the file has no such output"),
    "no input": (_no_input, "has 'shift.momentum' as state of rank 0, and the file has no such input"),
    "another shape": (_wrong_shape, "state 'shift': its input 'shift' is tensor(float) [4]; manifest.json makes it"),
    "no first value": (_no_first_value, "state 'shift': this parameter has no first value"),
    "the slot's place": (_swapped_outputs, "its output 'shift.next' takes the place of 'shift', and Momentum"),
    "another's slot": (_of_another, "takes the place of 'first.momentum', and Momentum"),
    "a late reader in the body": (_reads_after_overwriting, "writes its output 'momentum_next' where 'momentum' lies"),
    "a collective in the body": (_communicates, ": AllReduce 'all': it communicates, and a function runs on one rank"),
    "an unknown op in the body": (_unknown_in_body, "neither ONNX nor onnxruntime knows ai.onnx.Multiply"),
    "a dangling value in the body": (_lost_in_body, "its input 'ghost' is defined by no node of the function"),
    "an attribute less": (
        _one_attribute_less,
        "'shift.update' (shift.update): its attribute 'lr_multiplier' is missing",
    ),
    "an input less": (_one_input_less, "it has 4 inputs, and partc.optimizer.Momentum"),
    "no function": (_no_function, "neither ONNX nor onnxruntime knows partc.optimizer.Momentum"),
    "a message of it": (_is_sent, "Send 'sent': MomentumScaled 'second.update' overwrites 'second' while this may"),
    "a collective in flight": (_in_flight, "AllReduce 'flying': MomentumScaled 'second.update' overwrites 'second'"),
}
ONE = {
    "another attribute": (_other_attribute, "'shift' on rank 1 may become another one than on rank 0"),
    "another attribute, told": (_other_attribute, "has lr_multiplier=0.5, and there lr_multiplier=1"),
    "its own gradient": (_own_gradient, "', which is a partial sum that no collective has reduced"),
    "another order": (_other_order, "its value 0 is 'first.grad', that of rank 0 is 'second.grad': one would be added"),
    "another first value": (_other_first_value, "rank 1 begins with another value of 'shift' than rank 0"),
}


@pytest.mark.parametrize("case", [*BOTH, *ONE])
def test_a_changed_program_is_named(sound: Path, tmp_path: Path, case: str) -> None:
    folder = tmp_path / "build"
    shutil.copytree(sound, folder)
    change, expected = {**BOTH, **ONE}[case]
    with_ranks(folder, dict.fromkeys((0, 1) if case in BOTH else (1,), change))
    found = texts(folder)
    assert expected in found, found


def _state(name: str, **fields: object) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        next(one for one in data["state"] if one["value"] == name).update(fields)

    return change


def _box(*boxes: list[list[int]]) -> dict[str, object]:
    return {"boxes": list(boxes)}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_state("shift", shape=[7]), "state 'shift': its input 'shift' is tensor(float) [5]; manifest.json makes it"),
        (_state("shift", type="tensor(double)"), "makes it tensor(double) [5] on rank 0"),
        (_state("shift", ranks=[0, 2]), "state 'shift': it names rank 2; there are ranks 0 to 1"),
        (_state("shift", ranks=[1, 1]), "its ranks are [1, 1]; each that holds it is listed once"),
        (_state("shift", **_box([[0, 1, 5]], [[3, 5, 5]])), "no rank holds [1:3] of 'shift' [5]"),
        (
            _state("shift", **_box([[0, 3, 5]], [[2, 5, 5]])),
            "its shards overlap in [2:3]; they are equal or",
        ),
        (_state("shift", **_box([[0, 1, 2]], [[1, 2, 2]])), "the box of rank 0 is 0/2 to 1/2 of dim 0, which is 5"),
        (_state("shift", **_box([[0, 1, 1]])), "it has 1 boxes for 2 ranks"),
        (_state("shift", **_box([[0, 3, 2]], [[0, 1, 1]])), "the box of rank 0 has the cut [0, 3, 2]"),
        (
            _state("shift", kind="statistics"),
            "state 'shift.momentum': it is of the parameter 'shift', which no rank keeps",
        ),
        (_state("shift.momentum", shape=[2]), "its shape is [2], and that of its parameter 'shift' [5]"),
        (
            _state("shift.momentum", ranks=[0]),
            "rank_0001.onnx: graph input 'shift.momentum': manifest.json lists no input",
        ),
        (
            _state("shift", tensor="first"),
            "state 'first': its shape is [6, 5], and that of 'shift', the same tensor, [5]",
        ),
        (lambda data: data["training"].update(loss="none"), "training: the loss 'none' is not an output"),
    ],
)
def test_a_changed_manifest_is_named(
    sound: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], expected: str
) -> None:
    shutil.copytree(sound, tmp_path / "build")
    rewrite(tmp_path / "build", change)
    found = texts(tmp_path / "build")
    assert expected in found, found


def test_one_rank_can_be_checked_before_it_is_loaded(sound: Path, tmp_path: Path) -> None:
    manifest = open_artifact(sound).manifest
    for change in (None, _of_another, _wrong_shape, _one_input_less, _one_attribute_less, _reads_after_overwriting):
        model = onnx.load(sound / manifest.program(1), load_external_data=False)
        if change is not None:
            change(model)
        assert bool(unsafe_state(manifest, 1, model)) is (change is not None)


def test_the_command_says_what_is_proven(sound: Path) -> None:
    result = click.testing.CliRunner().invoke(command, [str(sound)], catch_exceptions=False)
    assert result.exit_code == 0
    (line,) = [line for line in result.output.splitlines() if line.startswith("training: ")]
    assert line == "training: 12 tensors safely updated in place; 6 replicated shards, proven to stay identical"
