"""The artifact checker: each promise broken alone, and the exact place that is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from artifact_edit import FLOAT, chain, chain_manifest, chain_models, comm, node, rank_model, value, write_artifact
from mutated import correct, texts
from onnx import ModelProto
from partc.runtime.artifact.format import MANIFEST, RECV, SEND, Port, Transfer
from partc.runtime.checker.check import check


def test_a_sound_artifact_has_no_violation(tmp_path: Path) -> None:
    checked = check(chain(tmp_path))
    assert checked.violations == []
    assert (checked.ranks, checked.files, checked.nodes, checked.transfers) == (3, 7, 11, 3)


def _remove(rank: int, at: int) -> Callable[[dict[int, ModelProto]], None]:
    def change(models: dict[int, ModelProto]) -> None:
        del models[rank].graph.node[at]

    return change


def _swap(rank: int, first: int, second: int) -> Callable[[dict[int, ModelProto]], None]:
    def change(models: dict[int, ModelProto]) -> None:
        nodes = models[rank].graph.node
        left, right = type(nodes[0])(), type(nodes[0])()
        left.CopyFrom(nodes[first])
        right.CopyFrom(nodes[second])
        nodes[first].CopyFrom(right)
        nodes[second].CopyFrom(left)

    return change


def _attribute(rank: int, at: int, index: int, number: int) -> Callable[[dict[int, ModelProto]], None]:
    def change(models: dict[int, ModelProto]) -> None:
        models[rank].graph.node[at].attribute[index].i = number

    return change


def _edit(action: Callable[[dict[int, ModelProto]], Any]) -> Callable[[dict[int, ModelProto]], None]:
    def change(models: dict[int, ModelProto]) -> None:
        action(models)

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_remove(1, 0), "rank_0000.onnx: Send 'Send.h0.1' (fc0): tag 0 has no Recv on rank 1"),
        (_remove(1, 0), "rank_0001.onnx: MatMul 'fc1.MatMul' (fc1): its input 'h0' is defined by no node of this rank"),
        (_remove(1, 0), "manifest.json: transfer 0 of 'h0' has no Recv on rank 1"),
        (_remove(0, 1), "rank_0001.onnx: Recv 'Recv.h0.0' (fc0): tag 0 has no Send on rank 0"),
        (_swap(1, 1, 2), "Send 'Send.h1.2' (fc1): its input 'h1' is defined after it"),
        (_attribute(0, 1, 0, 2), "Send 'Send.h0.1' (fc0): tag 0 has no Recv on rank 2"),
        (_attribute(0, 1, 0, 9), "its peer is rank 9; it must be another one of 0 to 2"),
        (_attribute(2, 3, 1, 1), "Send 'Send.y.0' (pick): tag 1 has no Recv on rank 0"),
        (
            _edit(lambda models: models[1].graph.node.append(node("Relu", ["h1"], "mid", "again"))),
            "rank_0001.onnx: Relu 'again.Relu' (again): its output 'mid' is defined twice",
        ),
        (
            _edit(lambda models: models[2].graph.node[1].__setattr__("op_type", "MatMulls")),
            "MatMulls 'fc2.MatMul' (fc2): neither ONNX nor onnxruntime knows ai.onnx.MatMulls",
        ),
        (
            _edit(lambda models: models[2].graph.node[1].__setattr__("domain", "my.own")),
            "its domain my.own has no opset_import",
        ),
        (
            _edit(lambda models: models[0].graph.output.append(value("lost", [3]))),
            "rank_0000.onnx: graph 'rank_0': its output 'lost' is defined by no node of this rank",
        ),
        (
            _edit(lambda models: models[0].graph.output.append(value("h0", ["batch", 7]))),
            "graph output 'h0': manifest.json lists no output 'h0' for rank 0",
        ),
        (
            _edit(lambda models: models[0].graph.input[0].CopyFrom(value("x", ["batch", 6]))),
            "it is tensor(float) [batch, 6]; manifest.json says tensor(float) [batch, 5]",
        ),
        (
            _edit(lambda models: models[1].graph.value_info[0].CopyFrom(value("h0", ["batch", 8]))),
            "it sends tensor(float) [batch, 7], and rank 1 expects tensor(float) [batch, 8]",
        ),
        (
            _edit(lambda models: models[1].graph.node[1].attribute.add(name="alpha", type=2, i=3)),
            "rank_0001.onnx: onnx.checker refuses it",
        ),
    ],
)
def test_a_changed_program_is_named(
    tmp_path: Path, change: Callable[[dict[int, ModelProto]], None], expected: str
) -> None:
    models = chain_models()
    change(models)
    write_artifact(tmp_path, models, chain_manifest())
    assert expected in texts(tmp_path)


def _bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def action(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return action


def _fitting(action: Callable[[Path], object]) -> Callable[[Path], None]:
    """The change, and hashes that fit."""

    def done(folder: Path) -> None:
        action(folder)
        correct(folder)

    return done


def _link_outside(folder: Path) -> None:
    outside = folder.parent / "outside.onnx"
    (folder / "rank_0001.onnx").rename(outside)
    (folder / "rank_0001.onnx").symlink_to(outside)


WEIGHTS = "weights/rank_0001.safetensors"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_bytes(WEIGHTS, lambda data: data[:-5]), f"{WEIGHTS}: it has 159 bytes; the manifest says 164"),
        (_fitting(_bytes(WEIGHTS, lambda data: data[:-5])), "its tensors end at byte 164, and the file has 159"),
        (_bytes(WEIGHTS, lambda data: data[:-1] + b"\xaa"), f"{WEIGHTS}: its content has changed: sha256"),
        (
            _fitting(_bytes(WEIGHTS, lambda data: b"\xff" * 8 + data[8:])),
            "its header would end at byte 18446744073709551623",
        ),
        (_fitting(_bytes("rank_0002.onnx", lambda data: b"nonsense")), "rank_0002.onnx: it is not an ONNX file"),
        (_bytes(MANIFEST, lambda data: data.replace(b'"format": 3', b'"format": 7')), "is of format 7"),
        (_bytes(MANIFEST, lambda data: data[:40]), "is not JSON"),
        (_bytes(MANIFEST, lambda data: data.replace(b'"ranks": 3', b'"ranks": 4')), "rank_0003.onnx for rank 3 of 4"),
        (lambda folder: (folder / "extra.bin").write_bytes(b"1"), "extra.bin: the manifest does not list it"),
        (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS}: the manifest lists it, and it is not there"),
        (_link_outside, "rank_0001.onnx: it points outside the folder"),
    ],
)
def test_a_changed_file_is_named(tmp_path: Path, change: Callable[[Path], object], expected: str) -> None:
    folder = chain(tmp_path / "build")
    change(folder)
    assert expected in texts(folder)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("location", "../away.safetensors", "its data is at '../away.safetensors', outside the folder"),
        ("location", "weights/none.safetensors", "which the manifest does not list"),
        ("offset", "4", "its data would be bytes 4 to 88"),
        ("offset", "100", "its data would be bytes 100 to 184"),
        ("length", "80", "it has 80 bytes of data, and its type and shape need 84"),
    ],
)
def test_a_weight_must_lie_inside_its_file(tmp_path: Path, key: str, text: str, expected: str) -> None:
    models = chain_models()
    write_artifact(tmp_path, models, chain_manifest())
    for entry in models[1].graph.initializer[0].external_data:
        if entry.key == key:
            entry.value = text
    (tmp_path / "rank_0001.onnx").write_bytes(models[1].SerializeToString())
    correct(tmp_path)
    found = texts(tmp_path)
    assert f"weight 'fc1.weight': {expected}" in found or expected in found
    assert "rank_0001.onnx" in found


def crossing(order: dict[int, list[tuple[str, str, int, int]]]) -> dict[int, ModelProto]:
    """Two ranks that exchange `a` (0 to 1, tag 0) and `b` (1 to 0, tag 1), each in the given order of nodes."""
    own = {0: "a", 1: "b"}
    models = {}
    for rank, steps in order.items():
        nodes = [node("Relu", [f"x{rank}"], own[rank], own[rank])]
        nodes += [comm(op, name, peer, tag, name) for op, name, peer, tag in steps]
        nodes.append(node("Add", ["a", "b"], f"y{rank}", "sum"))
        values = [value("a", [5]), value("b", [5])]
        models[rank] = rank_model(rank, nodes, [value(f"x{rank}", [5])], [value(f"y{rank}", [5])], values)
    return models


def crossing_manifest() -> dict[str, object]:
    def transfer(tag: int, name: str, source: int, target: int) -> Transfer:
        shape: list[int | str] = [5]
        return Transfer(
            tag=tag, value=name, source=source, target=target, type=FLOAT, shape=shape, bytes="20", cause="sum"
        )

    def port(name: str, rank: int) -> Port:
        return Port(name=name, type=FLOAT, shape=[5], ranks=[rank])

    return {
        **chain_manifest(),
        "ranks": 2,
        "symbols": {},
        "inputs": [port("x0", 0), port("x1", 1)],
        "outputs": [port("y0", 0), port("y1", 1)],
        "transfers": [transfer(0, "a", 0, 1), transfer(1, "b", 1, 0)],
    }


SENDS_A, TAKES_B = (SEND, "a", 1, 0), (RECV, "b", 1, 1)
TAKES_A, SENDS_B = (RECV, "a", 0, 0), (SEND, "b", 0, 1)


def test_a_common_order_ends(tmp_path: Path) -> None:
    models = crossing({0: [SENDS_A, TAKES_B], 1: [TAKES_A, SENDS_B]})
    assert texts(write_artifact(tmp_path, models, crossing_manifest())) == ""


def test_a_deadlock_is_shown_with_every_rank_in_it(tmp_path: Path) -> None:
    models = crossing({0: [TAKES_B, SENDS_A], 1: [TAKES_A, SENDS_B]})
    found = texts(write_artifact(tmp_path, models, crossing_manifest()))
    assert "rank_0000.onnx: Recv 'Recv.b.1' (b): it is where manifest.json has transfer 0; its own is 1" in found
    assert "a deadlock of 2 ranks: rank 0 waits at Recv 'Recv.b.1' from rank 1, tag 1; rank 1 waits at Recv" in found


def test_an_order_that_ends_but_is_not_the_manifests_is_refused(tmp_path: Path) -> None:
    models = crossing({0: [TAKES_B, SENDS_A], 1: [SENDS_B, TAKES_A]})
    found = texts(write_artifact(tmp_path, models, crossing_manifest()))
    assert found.count("it is where manifest.json has transfer 0; its own is 1") == 2
    assert "deadlock" not in found


def test_a_value_captured_by_a_body_must_be_made(tmp_path: Path) -> None:
    from onnx import helper

    models = crossing({0: [SENDS_A, TAKES_B], 1: [TAKES_A, SENDS_B]})
    body = helper.make_graph([node("Neg", ["ghost"], "negated", "body")], "body", [], [value("negated", [5])])
    chosen = helper.make_node("If", ["flag"], ["z"], name="choice", then_branch=body, else_branch=body)
    models[0].graph.node.insert(0, helper.make_node("Constant", [], ["flag"], name="flag", value_int=1))
    models[0].graph.node.insert(1, chosen)
    found = texts(write_artifact(tmp_path, models, crossing_manifest()))
    assert "Neg 'body.Neg' (body): its input 'ghost' is defined by no node of this rank" in found


def test_all_violations_come_at_once(tmp_path: Path) -> None:
    folder = chain(tmp_path / "build")
    (folder / "extra.bin").write_bytes(b"1")
    (folder / WEIGHTS).unlink()
    data = json.loads((folder / MANIFEST).read_text())
    data["programs"]["infer"]["outputs"][1]["ranks"] = [2]
    (folder / MANIFEST).write_text(json.dumps(data))
    found = texts(folder)
    for expected in ("extra.bin", WEIGHTS, "lists no output 'mid' for rank 1", "gives it the output 'mid'"):
        assert expected in found
