"""Faults planted in bodies in which ranks communicate: `partc check` names each of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from body_models import BRANCHES, NESTED, WEIGHTS, WHILE, plan, weighed
from equivalence import compiled
from mutated import change_file, change_manifest, correct, texts
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from partc.runtime.artifact.format import GROUP_OF_BODY, TAGS_OF_BODY
from partc.runtime.artifact.graph.onnx_graph import all_nodes

Change = Callable[[ModelProto], object]
BUILT = {
    "while": (WHILE, plan("refine", 2)),
    "branches": (BRANCHES, plan("choose", 2, "h")),
    "nested": (NESTED, plan("outer.body.inner", 2)),
}
BOTH, ONE = ("rank_0000.onnx", "rank_0001.onnx"), ("rank_0001.onnx",)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bodies")
    for name, (text, rules) in BUILT.items():
        compiled(weighed(text, WEIGHTS), rules, folder / name, check=False)
        change_manifest(folder / name, unlisted)
        assert texts(folder / name) == ""
    return {name: folder / name for name in BUILT}


def unlisted(manifest: dict[str, Any]) -> None:
    """Takes the operands of communication out of the manifest, by which it would tell most of these faults."""
    for record in manifest["collectives"]:
        record["sources"] = []


def owner(model: ModelProto, kind: str = "") -> NodeProto:
    """The outermost node with bodies, or the first of a kind."""
    return next(node for node in all_nodes(model.graph.node) if node.op_type in ((kind,) if kind else ("If", "Loop")))


def body(model: ModelProto, at: int = 0, kind: str = "") -> GraphProto:
    return owner(model, kind).attribute[at].g


def maker(graph: GraphProto, op: str) -> NodeProto:
    return next(node for node in graph.node if node.op_type == op)


def reads(graph: GraphProto, op: str, name: str, at: int = 0) -> None:
    """The first node of an op reads another value."""
    maker(graph, op).input[at] = name


def differs(model: ModelProto, graph: GraphProto | None = None, before: str = "") -> str:
    """Adds a condition that is made of the rank's shard of a weight, and returns its name."""
    where = model.graph if graph is None else graph
    model.graph.initializer.append(numpy_helper.from_array(np.array(0.1, np.float32), "planted.limit"))
    nodes = [
        helper.make_node("ReduceMax", ["W"], ["planted.most"], "planted.most", keepdims=0),
        helper.make_node("Greater", ["planted.most", "planted.limit"], ["planted"], "planted"),
    ]
    at = next((k for k, node in enumerate(where.node) if before and node.name == before), 0)
    for node in reversed(nodes):
        where.node.insert(at, node)
    where.value_info.append(helper.make_tensor_value_info("planted", TensorProto.BOOL, []))
    return "planted"


def gives(graph: GraphProto, at: int, name: str) -> None:
    """A body gives an Identity of another value."""
    graph.node.append(helper.make_node("Identity", [name], ["planted.given"], "planted.given"))
    graph.value_info.append(graph.output[at])
    graph.output[at].name = "planted.given"


def metadata(model: ModelProto, key: str, value: str, kind: str = "") -> None:
    for entry in owner(model, kind).metadata_props:
        if entry.key == key:
            entry.value = value


def without(model: ModelProto, key: str) -> None:
    node = owner(model)
    kept = [entry for entry in node.metadata_props if entry.key != key]
    node.ClearField("metadata_props")
    node.metadata_props.extend(kept)


def more(model: ModelProto) -> None:
    """One collective more in the body."""
    graph = body(model)
    other = NodeProto()
    other.CopyFrom(maker(graph, "AllReduce"))
    other.name, other.output[0] = "planted", "planted"
    next(one for one in other.attribute if one.name == "tag").i = 99
    graph.node.append(other)


def fewer(model: ModelProto) -> None:
    node = maker(body(model), "AllReduce")
    node.op_type, node.domain = "Identity", ""
    node.ClearField("attribute")


def moved(model: ModelProto) -> None:
    """The collective of the one branch is in the other."""
    one, other = body(model, 0), body(model, 1)
    node = NodeProto()
    node.CopyFrom(maker(one, "AllReduce"))
    fewer(model)
    maker(one, "Identity").output[0] = "planted.d"
    one.output[0].name = "planted.d"
    node.input[0] = maker(other, "Neg").input[0]
    other.node.insert(0, node)


def typed(graph: GraphProto, at: int, kind: int, dims: list[object]) -> None:
    port = graph.output[at]
    port.CopyFrom(helper.make_tensor_value_info(port.name, kind, dims))


def condition(model: ModelProto) -> None:
    """The branch is chosen by a shard."""
    name = differs(model)
    owner(model).input[0] = name


def counted(model: ModelProto) -> None:
    """The number of turns is made of a shard."""
    differs(model)
    model.graph.node.insert(
        2, helper.make_node("Cast", ["planted"], ["planted.count"], "planted.count", to=TensorProto.INT64)
    )
    model.graph.value_info.append(helper.make_tensor_value_info("planted.count", TensorProto.INT64, []))
    owner(model).input[0] = "planted.count"


def begun(model: ModelProto) -> None:
    owner(model).input[1] = differs(model)


def in_turn(model: ModelProto) -> None:
    gives(body(model), 0, differs(model, body(model)))


def drawn(model: ModelProto) -> None:
    graph = body(model)
    like = helper.make_node("RandomUniformLike", ["refine.body.ReduceMax_0"], ["planted.drawn"], "planted.drawn")
    reads(graph, "Greater", "planted.drawn")
    graph.node.insert(list(graph.node).index(maker(graph, "Greater")), like)


def inner(model: ModelProto) -> None:
    graph = body(model)
    owner(model, "If").input[0] = differs(model, graph)


def other_group(folder: Path) -> None:
    """The body is run by each rank for itself, and its collective is among both."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["groups"]["apart"] = [[0], [1]]
        for record in manifest["collectives"]:
            if record["op"] in ("Begin", "End"):
                record["group"] = "apart"

    change_manifest(folder, change)
    for file in BOTH:
        change_file(folder, file, lambda model: metadata(model, GROUP_OF_BODY, "apart"))


def swapped(model: ModelProto) -> None:
    """The branches have each other's place."""
    node = owner(model)
    one, other = node.attribute[0], node.attribute[1]
    one.name, other.name = other.name, one.name


def row(old: str, new: str) -> Callable[[Path], None]:
    """Changes the row of a run list."""

    def change(folder: Path) -> None:
        import re

        file = folder / "rank_0001.run.json"
        text = file.read_text()
        changed = re.sub(old, new, text, count=1)
        assert changed != text
        file.write_text(changed)
        correct(folder)

    return change


PARTIAL, ACT = "refine.body.down.partial", "refine.body.act"
ALIKE = "is not the same on ranks 0, 1"
FAULTS: dict[str, tuple[str, tuple[str, ...], object, str]] = {
    "a condition of a partial sum": (
        "while",
        BOTH,
        lambda m: reads(body(m), "ReduceMax", PARTIAL),
        ALIKE,
    ),
    "a condition of a shard": ("while", BOTH, lambda m: reads(body(m), "ReduceMax", ACT), ALIKE),
    "a condition of a shard on one rank": ("while", ONE, lambda m: reads(body(m), "ReduceMax", ACT), ALIKE),
    "a condition of a weight's shard": ("while", BOTH, in_turn, ALIKE),
    "a condition that is drawn": ("while", BOTH, drawn, ALIKE),
    "a first condition of a shard": ("while", BOTH, begun, ALIKE),
    "a count of a shard": ("while", BOTH, counted, "number of turns"),
    "another count on one rank": (
        "while",
        ONE,
        lambda m: next(one for one in m.graph.initializer if one.name == "most").CopyFrom(
            numpy_helper.from_array(np.array(41), "most")
        ),
        "most",
    ),
    "a comparison turned on one rank": (
        "while",
        ONE,
        lambda m: setattr(maker(body(m), "Greater"), "op_type", "Less"),
        "it is Greater in rank_0000.onnx",
    ),
    "a branch chosen by a shard": ("branches", BOTH, condition, ALIKE),
    "an inner branch chosen by a shard": ("nested", BOTH, inner, ALIKE),
    "one collective more on one rank": ("while", ONE, more, "lists no collective 99"),
    "one collective more on all ranks": ("while", BOTH, more, "lists no collective 99"),
    "one collective less on one rank": ("while", ONE, fewer, "has no node on rank 1"),
    "a branch with one collective less on one rank": ("branches", ONE, fewer, "has no node on rank 1"),
    "a collective in the other branch of one rank": ("branches", ONE, moved, "is where manifest.json has collective 1"),
    "branches exchanged on one rank": ("branches", ONE, swapped, "is where manifest.json has collective 1"),
    "no Loop on one rank": (
        "while",
        ONE,
        lambda m: m.graph.node.remove(owner(m)),
        "has no node on rank 1",
    ),
    "another tag on one rank": ("while", ONE, lambda m: metadata(m, TAGS_OF_BODY, "0 7"), "lists no collective 7"),
    "tags of an inner node on one rank": ("nested", ONE, lambda m: metadata(m, TAGS_OF_BODY, "0 1"), "tag"),
    "no tags": ("while", ONE, lambda m: without(m, TAGS_OF_BODY), "do not say which ranks run that together"),
    "no group": ("while", ONE, lambda m: without(m, GROUP_OF_BODY), "do not say which ranks run that together"),
    "another group": ("while", ONE, lambda m: metadata(m, GROUP_OF_BODY, "0"), "rank 1 is in no list of group '0'"),
    "a collective with ranks outside of the body's": ("while", (), other_group, "does not run the body in which it is"),
    "a state that is handed on as a partial sum": ("while", BOTH, lambda m: gives(body(m), 2, PARTIAL), ALIKE),
    "a branch that gives a partial sum": (
        "branches",
        BOTH,
        lambda m: gives(body(m), 0, "choose.then_branch.down.partial"),
        "'choose.out0' is a partial sum that no collective has reduced",
    ),
    "a state of another shape": (
        "while",
        ONE,
        lambda m: typed(body(m), 2, TensorProto.FLOAT, ["batch", 7]),
        "[batch, 7]",
    ),
    "a state of another type": ("while", ONE, lambda m: typed(body(m), 1, TensorProto.FLOAT, []), "tensor(float)"),
    "a condition that is a number": (
        "while",
        BOTH,
        lambda m: gives(body(m), 0, "refine.body.ReduceMax_0"),
        "tensor(float)",
    ),
    "a branch of another shape": (
        "branches",
        ONE,
        lambda m: typed(body(m, 1), 1, TensorProto.FLOAT, ["batch", 7]),
        "[batch, 7]",
    ),
    "a branch that gives less": ("branches", BOTH, lambda m: body(m, 0).output.pop(), "gives 1 values"),
    "a body that gives less": ("while", BOTH, lambda m: body(m).output.pop(), "it gives 2 values"),
    "a value of a branch read after it": (
        "branches",
        BOTH[:1],
        lambda m: reads(m.graph, "Add", "choose.then_branch.down"),
        "before it is there",
    ),
    "a value of the other branch": (
        "branches",
        BOTH,
        lambda m: reads(body(m, 1), "Relu", "choose.then_branch.act"),
        "before it is there",
    ),
    "a border without its body": (
        "while",
        ONE,
        lambda m: m.graph.node.append(
            helper.make_node("End", ["y"], [], "planted", domain="partc.comm", group="0-1", tag=9, kind="Loop")
        ),
        "no body of its kind is open here",
    ),
    "a border that is not passed": ("while", (), row(r" B\d+\"", '"'), "no step begins it"),
    "borders in another order": ("branches", (), row(r"(B\d+)(.*?)(B\d+)", r"\3\2\1"), "before it is there"),
    "a segment of a turn before it": ("while", (), row(r"(B\d+) (S\d+)", r"\2 \1"), "before it is there"),
    "a collective that is not waited for in its turn": (
        "while",
        (),
        row(r"(W\d+) (.*?)(B\d+)", r"\2\3 \1"),
        "before it is there",
    ),
}


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 35


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, built: dict[str, Path], tmp_path: Path) -> None:
    name, files, change, said = FAULTS[fault]
    folder = tmp_path / name
    shutil.copytree(built[name], folder)
    assert callable(change)
    for file in files:
        change_file(folder, file, change)
    if not files:
        change(folder)
    found = texts(folder)
    assert said in found, found or "nothing is found"
