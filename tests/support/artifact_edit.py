"""Artifacts made by hand: a chain of linear layers over ranks, for tests of the checker, the launcher and the commands.

    x [batch, 5] -> rank 0: fc0 -> rank 1: fc1 (also the output `mid`) -> rank 2: Gather(fc2, index) -> rank 0: y

Every width differs, the batch is a symbol, and an index out of range makes rank 2 fail while a step runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper
from partc.runtime.artifact.format import (
    CAUSE,
    DOMAIN,
    DOMAIN_VERSION,
    MANIFEST,
    PATH,
    PEER,
    RECV,
    RULE,
    SEND,
    TAG,
    FileRecord,
    Manifest,
    Port,
    SourceRecord,
    SymbolRecord,
    Transfer,
    rank_file,
    weights_file,
)
from partc.runtime.artifact.manifest_file import ManifestFile
from safetensors.numpy import save_file

FLOAT = "tensor(float)"
WIDTHS = (5, 7, 3, 4)


def node(op: str, inputs: list[str], output: str, path: str, **attributes: Any) -> NodeProto:
    """A standard node with its source path."""
    made = helper.make_node(op, inputs, [output], name=f"{path}.{op}", **attributes)
    _describe(made, path)
    return made


def comm(op: str, value: str, peer: int, tag: int, path: str) -> NodeProto:
    """A Send or Recv of `value`."""
    inputs, outputs = ([value], []) if op == SEND else ([], [value])
    ends: dict[str, Any] = {PEER: peer, TAG: tag}
    made = helper.make_node(op, inputs, outputs, name=f"{op}.{value}.{peer}", domain=DOMAIN, **ends)
    _describe(made, path)
    return made


def _describe(made: NodeProto, path: str) -> None:
    for key, value in ((PATH, path), (RULE, "plan.yaml:3"), (CAUSE, f"{path} is placed elsewhere")):
        entry = made.metadata_props.add()
        entry.key, entry.value = key, value


def value(name: str, dims: list[int | str], type: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """A declared tensor."""
    return helper.make_tensor_value_info(name, type, dims)


def weights() -> dict[str, np.ndarray]:
    """The weights of the chain's three layers, the same ones each time."""
    random = np.random.default_rng(7)
    return {f"fc{layer}.weight": random.normal(size=WIDTHS[layer : layer + 2]).astype(np.float32) for layer in range(3)}


def chain_models() -> dict[int, ModelProto]:
    """The three rank programs of the chain, without the data of their weights."""
    h0, h1, h2 = (value(name, ["batch", width]) for name, width in zip(("h0", "h1", "h2"), WIDTHS[1:], strict=True))
    x, mid, y = value("x", ["batch", 5]), value("mid", ["batch", 3]), value("y", [2, 4])
    index = value("index", [2], TensorProto.INT64)
    return {
        0: rank_model(
            0,
            [
                node("MatMul", ["x", "fc0.weight"], "h0", "fc0"),
                comm(SEND, "h0", 1, 0, "fc0"),
                comm(RECV, "y", 2, 2, "pick"),
            ],
            [x],
            [y],
            [h0],
        ),
        1: rank_model(
            1,
            [
                comm(RECV, "h0", 0, 0, "fc0"),
                node("MatMul", ["h0", "fc1.weight"], "h1", "fc1"),
                comm(SEND, "h1", 2, 1, "fc1"),
                node("Relu", ["h1"], "mid", "relu"),
            ],
            [],
            [mid],
            [h0, h1],
        ),
        2: rank_model(
            2,
            [
                comm(RECV, "h1", 1, 1, "fc1"),
                node("MatMul", ["h1", "fc2.weight"], "h2", "fc2"),
                node("Gather", ["h2", "index"], "y", "pick", axis=0),
                comm(SEND, "y", 0, 2, "pick"),
            ],
            [index],
            [],
            [h1, h2, y],
        ),
    }


def rank_model(
    rank: int,
    nodes: list[NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    values: list[onnx.ValueInfoProto],
) -> ModelProto:
    """A rank's program; the weights that its nodes name become external tensors when it is written."""
    graph = helper.make_graph(nodes, f"rank_{rank}", inputs, outputs, value_info=values)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


def chain_manifest() -> dict[str, object]:
    """The fields of the chain's manifest, all but its files."""

    def transfer(tag: int, value: str, source: int, target: int, shape: list[int | str], bytes: str) -> Transfer:
        return Transfer(
            tag=tag, value=value, source=source, target=target, type=FLOAT, shape=shape, bytes=bytes, cause="placement"
        )

    return {
        "partc": "0.1.0",
        "ranks": 3,
        "symbols": {"batch": SymbolRecord(min=2, max=64, divisor=1, remainder=0)},
        "inputs": [
            Port(name="x", type=FLOAT, shape=["batch", 5], ranks=[0]),
            Port(name="index", type="tensor(int64)", shape=[2], ranks=[2]),
        ],
        "outputs": [
            Port(name="y", type=FLOAT, shape=[2, 4], ranks=[0]),
            Port(name="mid", type=FLOAT, shape=["batch", 3], ranks=[1]),
        ],
        "transfers": [
            transfer(0, "h0", 0, 1, ["batch", 7], "28*batch"),
            transfer(1, "h1", 1, 2, ["batch", 3], "12*batch"),
            transfer(2, "y", 2, 0, [2, 4], "32"),
        ],
        "model": SourceRecord(name="chain.onnx", sha256="0" * 64),
        "plan": None,
    }


def write_artifact(folder: Path, models: Mapping[int, ModelProto], fields: Mapping[str, object]) -> Path:
    """The artifact of these rank programs: weights, rank files and a manifest whose hashes are right."""
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    data = weights()
    for rank, model in models.items():
        used = {name for made in model.graph.node for name in made.input if name in data}
        if used:
            save_file({name: data[name] for name in sorted(used)}, folder / weights_file(rank))
            header = int.from_bytes((folder / weights_file(rank)).read_bytes()[:8], "little")
            for name in sorted(used):
                model.graph.initializer.append(_external(name, data[name], weights_file(rank), 8 + header))
        (folder / rank_file(rank)).write_bytes(model.SerializeToString(deterministic=True))
    write_manifest(folder, fields)
    return folder


def write_manifest(folder: Path, fields: Mapping[str, object]) -> None:
    """The manifest with the sizes and hashes of the files as they are now."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            content = path.read_bytes()
            record = FileRecord(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
            files[path.relative_to(folder).as_posix()] = record
    index = ManifestFile.of([Manifest.model_validate({**fields, "files": files})])
    (folder / MANIFEST).write_text(json.dumps(index.model_dump(mode="json"), indent=1))


def _external(name: str, array: np.ndarray, location: str, offset: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=array.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in (("location", location), ("offset", str(offset)), ("length", str(array.nbytes))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, text
    return tensor


def chain(folder: Path) -> Path:
    """The whole artifact, sound in every respect."""
    return write_artifact(folder, chain_models(), chain_manifest())


def chain_reference(x: np.ndarray, index: np.ndarray) -> dict[str, np.ndarray]:
    """What the chain computes."""
    data = weights()
    h1 = x @ data["fc0.weight"] @ data["fc1.weight"]
    return {"mid": np.maximum(h1, 0), "y": (h1 @ data["fc2.weight"])[index]}
