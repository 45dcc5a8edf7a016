"""Artifacts from ONNX text, one graph a rank, for tests of the runtime: the manifest is made from what the graphs say.

    write(folder, [
        "rank0 (float[batch, 3] x) => () <float[batch, 3] h> { h = Relu(x)  = partc.comm.Send <peer = 1, tag = 0> (h) }",
        "rank1 () => (float[batch, 3] y) { h = partc.comm.Recv <peer = 0, tag = 0> ()  y = Neg(h) }",
    ])

Every dim that is a name is a symbol. The type and shape of a transfer are those that the sender's graph states for the value,
those of a collective what a giver's graph states for its input. `boxes` gives cut inputs and outputs: by name the whole shape, and
each rank's box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import GraphProto, ModelProto, ValueInfoProto, helper, numpy_helper
from partc.runtime.artifact.comm.collectives import GROUP_OPS, LOOKUPS
from partc.runtime.artifact.format import (
    DOMAIN,
    MANIFEST,
    PATH,
    PULL,
    RETURN,
    ROUTE,
    SEND,
    Box,
    Collective,
    Dim,
    FileRecord,
    Manifest,
    Port,
    SourceRecord,
    SymbolRecord,
    Transfer,
    rank_file,
    weights_file,
)
from partc.runtime.artifact.manifest import sha256
from partc.runtime.artifact.manifest_file import ManifestFile
from partc.runtime.artifact.tensors.dtypes import type_text
from safetensors.numpy import save_file

HEAD = '<ir_version: 11, opset_import: ["" : 21, "partc.comm" : 1, "ai.onnx.ml" : 3]>\n'


def write(
    folder: Path,
    graphs: Sequence[str],
    symbols: Mapping[str, SymbolRecord] | None = None,
    shapes: Mapping[str, list[Dim] | None] | None = None,
    external: bool = False,
    groups: Mapping[str, list[list[int]]] | None = None,
    boxes: Mapping[str, tuple[list[Dim], list[Box]]] | None = None,
) -> Path:
    """The artifact in `folder`. `shapes` overrides the shapes of transfers and of what collectives take, by the value's name;
    `external` moves the weights to their own files. Ranks whose graphs have one text share a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    models = [_parsed(text) for text in graphs]
    transfers = []
    for rank, model in enumerate(models):
        known = {value.name: value for value in _values(model.graph)}
        for node in model.graph.node:
            if node.op_type == SEND:
                ends = {attribute.name: attribute.i for attribute in node.attribute}
                value = known[node.input[0]]
                shape = (shapes or {}).get(value.name, _shape(value))
                transfers.append(
                    Transfer(
                        tag=ends["tag"],
                        value=value.name,
                        source=rank,
                        target=ends["peer"],
                        type=type_text(value.type),
                        shape=shape,
                        bytes="unknown",
                        cause="test",
                    )
                )
    collectives = _collectives(models, shapes or {})
    inputs = _ports([list(model.graph.input) for model in models])
    outputs = _ports([list(model.graph.output) for model in models])
    inputs, outputs = (_cut(ports, boxes or {}) for ports in (inputs, outputs))
    programs = [rank_file(graphs.index(text)) for text in graphs]
    names = {dim for one in (*inputs, *outputs, *transfers) for dim in one.shape or () if isinstance(dim, str)}
    files: dict[str, FileRecord] = {}
    for rank, model in enumerate(models):
        if programs[rank] != rank_file(rank):
            continue
        if external and model.graph.initializer:
            _move_weights(folder, rank, model)
            files[weights_file(rank)] = record(folder / weights_file(rank))
        (folder / rank_file(rank)).write_bytes(model.SerializeToString(deterministic=True))
        files[rank_file(rank)] = record(folder / rank_file(rank))
    manifest = Manifest(
        partc="test",
        ranks=len(graphs),
        symbols={name: SymbolRecord() for name in sorted(names) if name.isidentifier()} | dict(symbols or {}),
        inputs=inputs,
        outputs=outputs,
        transfers=sorted(transfers, key=lambda one: one.tag),
        groups=dict(groups or {}),
        collectives=collectives,
        rank_files=programs if len(set(programs)) < len(programs) else [],
        files=files,
        model=SourceRecord(name="test", sha256="0"),
        plan=None,
    )
    (folder / MANIFEST).write_text(ManifestFile.of([manifest]).model_dump_json())
    return folder


def _collectives(models: Sequence[ModelProto], shapes: Mapping[str, list[Dim] | None]) -> list[Collective]:
    found: dict[int, Collective] = {}
    made: dict[int, str] = {}
    for node in (node for model in models for node in model.graph.node if node.op_type in GROUP_OPS and node.output):
        tag = next(attribute.i for attribute in node.attribute if attribute.name == "tag")
        if name := node.output[0 if node.op_type in (PULL, ROUTE) else -1]:
            made.setdefault(tag, name)
    for model in models:
        known = {value.name: value for value in _values(model.graph)}
        for node in model.graph.node:
            said = {attribute.name: attribute for attribute in node.attribute}
            if node.op_type in GROUP_OPS and node.domain == DOMAIN and any(node.input):
                tag, given = said["tag"].i, node.input[0]
                value = typed = made.get(tag, "")
                if node.op_type not in LOOKUPS:
                    typed = given
                elif node.op_type in (ROUTE, RETURN):  # of rows the type, of ids or places the shape
                    given, typed = node.input[1] or node.input[2], node.output[0]
                elif not (ids := [*node.input, "", ""][1 if node.op_type == PULL else 2]):
                    continue  # another rank says how many ids it has
                else:  # of rows the type, of ids the shape
                    rows = node.output[:1] if node.op_type == PULL else (*node.input[3:], *node.output[1:])
                    given, typed = ids, next(filter(None, rows))
                found[tag] = Collective(
                    tag=tag,
                    op=node.op_type,
                    value=value,
                    group=said["group"].s.decode(),
                    type=type_text(known[typed].type),
                    shape=shapes.get(given, _shape(known[given])),
                    bytes="unknown",
                    cause="test",
                )
    return [found[tag] for tag in sorted(found)]


def _cut(ports: list[Port], boxes: Mapping[str, tuple[list[Dim], list[Box]]]) -> list[Port]:
    return [
        port.model_copy(update={"shape": boxes[port.name][0], "boxes": boxes[port.name][1]})
        if port.name in boxes
        else port
        for port in ports
    ]


def record(file: Path) -> FileRecord:
    """What the manifest says of a file."""
    return FileRecord(bytes=file.stat().st_size, sha256=sha256(file))


def _parsed(text: str) -> ModelProto:
    model = onnx.parser.parse_model(HEAD + text)
    for node in model.graph.node:
        first = (*node.output, *node.input)[0]
        node.name = f"{node.op_type}.{first}"
        node.metadata_props.add(key=PATH, value=f"net.{first}")
    return model


def _values(graph: GraphProto) -> list[ValueInfoProto]:
    weights = [helper.make_tensor_value_info(one.name, one.data_type, list(one.dims)) for one in graph.initializer]
    return [*graph.value_info, *graph.input, *graph.output, *weights]


def _shape(value: ValueInfoProto) -> list[Dim] | None:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not tensor.HasField("shape"):
        return None
    dims: list[Dim] = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
    return dims


def _ports(lists: Sequence[list[ValueInfoProto]]) -> list[Port]:
    found: dict[str, Port] = {}
    for rank, values in enumerate(lists):
        for value in values:
            earlier = found[value.name].ranks if value.name in found else []
            found[value.name] = Port(
                name=value.name, type=type_text(value.type), shape=_shape(value), ranks=[*earlier, rank]
            )
    return list(found.values())


def _move_weights(folder: Path, rank: int, model: ModelProto) -> None:
    arrays = {one.name: np.ascontiguousarray(numpy_helper.to_array(one)) for one in model.graph.initializer}
    file = folder / weights_file(rank)
    file.parent.mkdir(exist_ok=True)
    save_file(arrays, file)
    data = file.read_bytes()
    for tensor in model.graph.initializer:
        offset = data.index(arrays[tensor.name].tobytes(), int.from_bytes(data[:8], "little"))
        for field in ("raw_data", "float_data", "int64_data", "int32_data", "double_data"):
            tensor.ClearField(field)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        entries = {"location": weights_file(rank), "offset": offset, "length": arrays[tensor.name].nbytes}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))


assert DOMAIN in HEAD
