"""Whatever bytes an artifact's files have, the checker tells it and raises nothing; what is not the manifest's it does not read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from artifact_edit import chain
from mutated import change_file, change_manifest, correct, texts
from onnx import ModelProto, helper
from partc.runtime.checker.graph import rank_file as check_rank
from partc.runtime.checker.graph import weights as check_weights

WEIGHTS = "weights/rank_0001.safetensors"


def test_a_file_with_another_hash_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain(tmp_path)
    for name in ("rank_0000.onnx", WEIGHTS):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    read: list[str] = []
    load, header = check_rank.read_model, check_weights.sound_header

    def noted(path: Path) -> ModelProto:
        read.append(path.name)
        return load(path)

    def noted_header(path: Path) -> Any:
        read.append(path.name)
        return header(path)

    monkeypatch.setattr(check_rank, "read_model", noted)
    monkeypatch.setattr(check_weights, "sound_header", noted_header)
    found = texts(tmp_path)
    assert found.count("its content has changed") == 2
    assert read == ["rank_0001.onnx", "rank_0002.onnx", "rank_0002.safetensors"]


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / WEIGHTS
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        head = json.loads(data[8 : 8 + length])
        change(head)
        text = json.dumps(head, separators=(",", ":")).encode().ljust(length)
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        correct(folder)

    return edit


def _model(change: Callable[[ModelProto], object]) -> Callable[[Path], None]:
    return lambda folder: change_file(folder, "rank_0001.onnx", change)


def _group_that_is_no_text(model: ModelProto) -> None:
    node = helper.make_node("AllReduce", ["h1"], ["h1.sum"], domain="partc.comm", group=b"\xff", tag=9, reduce="sum")
    model.graph.node.insert(2, node)


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "names of shards": (
        _header(lambda head: head.update(__metadata__=None)),
        "its '__metadata__' is not a mapping of texts",
    ),
    "a tensor that is none": (_header(lambda head: head.update(x=None)), "tensor 'x' has no data_offsets"),
    "a tensor's type": (
        _header(lambda head: head["fc1.weight"].update(dtype=3)),
        "its data in weights/rank_0001.safetensors is 3",
    ),
    "a tensor's shape": (
        _header(lambda head: head["fc1.weight"].update(shape=[3, 7])),
        "its data in weights/rank_0001.safetensors is of shape [3, 7], and it is of [7, 3]",
    ),
    "a group": (_model(_group_that_is_no_text), "rank_0001.onnx: AllReduce"),
    "a name": (
        lambda folder: (
            (path := folder / "rank_0001.onnx").write_bytes(path.read_bytes().replace(b"fc1", b"f\xff1")),
            correct(folder),
        ),
        "it has a name or a text that is not UTF-8",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_odd_bytes_are_told(tmp_path: Path, case: str) -> None:
    chain(tmp_path)
    change, expected = CASES[case]
    change(tmp_path)
    found = texts(tmp_path)
    assert expected in found, found
    assert "the check itself failed" not in found


def test_what_the_checker_itself_stumbles_over_is_not_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain(tmp_path)

    def stumble(*_: object) -> None:
        raise KeyError("odd")

    monkeypatch.setattr("partc.runtime.checker.check.check_order", stumble)
    expected = (
        "manifest.json: the order of communication cannot be proven: the check itself failed with KeyError: 'odd'"
    )
    assert texts(tmp_path).startswith(expected)
    change_manifest(tmp_path, lambda data: data["outputs"][0].update(ranks=[7]))
    assert "the check itself failed" not in texts(tmp_path)
