"""The checks of a compile on the files that it has just written: each is a valid graph, which onnx and onnxruntime accept.

They are a part of `partc check`, and take a small part of a compile's time: programs that differ only in their weights and their peers
are checked once, types are inferred at one size of the symbols, and hashes are not checked. onnxruntime creates a session of a program
without its large weights, with one of several equal nodes, and without optimization, except where its optimizer is known to fail.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from onnx import ModelProto, NodeProto, ValueInfoProto
from partc.runtime.artifact.format import DOMAIN, MANIFEST, Manifest
from partc.runtime.artifact.graph.bodies import read_model
from partc.runtime.artifact.graph.half_kernels import compute_in_float32
from partc.runtime.artifact.graph.onnx_graph import all_nodes, reads
from partc.runtime.artifact.graph.targets import as_identity, is_copy
from partc.runtime.artifact.tasks.calls import unrolled
from partc.runtime.artifact.tasks.microbatches import refuse_left_out
from partc.runtime.checker.files import read_artifact
from partc.runtime.checker.graph.kinds import declared_ports, without_known
from partc.runtime.checker.graph.nodes import check_graph
from partc.runtime.checker.graph.rank_file import check_onnx
from partc.runtime.checker.graph.run_list import check_run_list
from partc.runtime.checker.graph.types import check_types, without_weights
from partc.runtime.checker.training.in_place import unsafe_state
from partc.runtime.errors import ArtifactError, Violation

__all__ = ["Structure", "check_model", "check_structures", "refusal", "structures"]


class CanLoad(Protocol):
    """Says why onnxruntime does not load the bytes of a model, "" where it does."""

    def __call__(self, model: bytes, folder: str, *, optimized: bool) -> str: ...


_QUANTIZED = {"QuantizeLinear", "DequantizeLinear"}
_MOVED = {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}
"""Ops that onnxruntime's optimizer moves across quantized values, where it may create a node that it then refuses."""


@dataclass(frozen=True)
class Structure:
    """One of several rank files of equal structure, by its path in the artifact's folder.

    `listed`: the file as it is, with calls of tasks. `model`: with tasks inlined. `rest`: without nodes that an earlier structure has.
    """

    file: str
    listed: ModelProto
    model: ModelProto
    rest: ModelProto
    manifest: Manifest
    folder: Path


def structures(folder: Path) -> list[Structure]:
    """Returns the programs of an artifact and of artifacts inside it, one for each structure, with the nodes of each task once."""
    distinct: list[Structure] = []
    seen: dict[Hashable, int] = {}
    for inside in sorted(path.parent for path in folder.rglob(MANIFEST)):
        artifact, _ = read_artifact(inside)
        for one in map(artifact.program_named, artifact.programs) if artifact else ():
            manifest, known = one.manifest, set[bytes]()
            for file in dict.fromkeys(map(manifest.program, range(manifest.ranks))):
                model = read_model(inside / file)
                if (structure := _structure(model)) not in known:
                    known.add(structure)
                    name = (inside / file).relative_to(folder).as_posix()
                    listed, model = model, unrolled(model, name, once=True)
                    distinct.append(Structure(name, listed, model, without_known(name, model, seen), manifest, inside))
    return distinct


def check_structures(programs: Sequence[Structure]) -> list[Violation]:
    """Returns the faults of programs, each by itself; equal nodes of several programs are checked once."""
    return [
        violation
        for one in programs
        for violation in check_graph(one.file, one.model)
        or _check_nodes(one.file, one.rest, one.manifest)
        or _check_run(one)
    ]


def _check_run(structure: Structure) -> list[Violation]:
    """Returns the faults of a program's run: of its run list, its updates in place, and its number of microbatches."""
    file, manifest = Path(structure.file).name, structure.manifest
    rank = next(rank for rank in range(manifest.ranks) if manifest.program(rank) == file)
    kept = [record for record in manifest.state if rank in record.ranks]
    faults = check_run_list(structure.folder, file, manifest, kept, structure.listed) or unsafe_state(
        manifest, rank, structure.listed
    )
    try:
        refuse_left_out(structure.listed, manifest, file)
    except ArtifactError as error:
        faults.append(Violation(file, str(error).splitlines()[0].removeprefix(f"{file}: ")))
    return faults


def check_model(file: str, model: ModelProto, manifest: Manifest) -> list[Violation]:
    """Returns the faults of one graph: of its values, those that `onnx.checker` reports, and of its types."""
    return check_graph(file, model) or _check_nodes(file, model, manifest)


def _check_nodes(file: str, model: ModelProto, manifest: Manifest) -> list[Violation]:
    return check_onnx(file, model) or check_types(file, model, manifest, 1)


def refusal(model: ModelProto, can_load: CanLoad, folder: Path | None = None, rest: ModelProto | None = None) -> str:
    """Returns why onnxruntime does not load a program, "" where it does; weights that it must read are in `folder`.

    `can_load` returns the same for a model's bytes, since this module does not import onnxruntime. `rest`: the program without nodes that
    are known to load.
    """
    ops = {node.op_type for node in all_nodes(model.graph.node)}
    risky = not ops.isdisjoint(_QUANTIZED) and not ops.isdisjoint(_MOVED)
    light = without_weights(model if risky or rest is None else rest)
    if not (text := can_load(_alone(light, light.graph.node if risky else _unlike(light)), "", optimized=risky)):
        return ""
    if folder is None:
        return text
    readable = without_weights(model, read_here=True)
    return can_load(_alone(readable, readable.graph.node), str(folder.resolve()), optimized=risky)


def _unlike(model: ModelProto) -> list[NodeProto]:
    """Returns the nodes without repetitions: the first of each op with these attributes, and operands of these types and ranks."""
    types = declared_ports(model)
    kinds: dict[str, str] = {}
    for name, port in types.items():
        tensor_type = port.type.tensor_type
        has_rank = port.type.HasField("tensor_type") and tensor_type.HasField("shape")
        kinds[name] = f"{tensor_type.elem_type}/{len(tensor_type.shape.dim)}" if has_rank else str(port.type)
    kinds |= {tensor.name: f"{tensor.data_type}/{len(tensor.dims)}" for tensor in model.graph.initializer}
    distinct: list[NodeProto] = []
    known = set[tuple[str, ...]]()
    for node in model.graph.node:
        attributes = sorted(attribute.SerializeToString().hex() for attribute in node.attribute)
        operands = [kinds.get(name, name) if name else "" for name in node.input]
        like = (node.domain, node.op_type, *attributes, "", *operands)
        if like not in known or not all(name in types for name in node.output if name):
            known.add(like)
            distinct.append(node)
    return distinct


def _alone(model: ModelProto, nodes: Iterable[NodeProto]) -> bytes:
    """The bytes of a model of these nodes without communication, as a CPU runs them: outside values are inputs, unread values outputs."""
    types, graph = declared_ports(model), model.graph
    compute = [as_identity(node) for node in nodes if node.domain != DOMAIN or is_copy(node)]
    if not compute:
        return b""
    alone = ModelProto(ir_version=model.ir_version)
    alone.opset_import.extend(entry for entry in model.opset_import if entry.domain != DOMAIN)
    alone.functions.extend(model.functions)
    alone.graph.name = graph.name
    alone.graph.node.extend(compute)
    read = {name for node in compute for name in reads(node)}
    made_names = {name for node in compute for name in node.output}
    alone.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in read)
    held = {tensor.name for tensor in alone.graph.initializer}
    fed = [name for name in sorted(read - made_names - held) if name in types]
    alone.graph.input.extend(types[name] for name in fed)
    last = [name for node in compute for name in node.output if name and name not in read]
    alone.graph.output.extend(
        types.get(name) or ValueInfoProto(name=name) for name in last or sorted(filter(None, made_names))[:1]
    )
    alone.graph.value_info.extend(types[name] for name in made_names if name in types and name in read)
    compute_in_float32(alone)
    data: bytes = alone.SerializeToString()
    return data


def _structure(model: ModelProto) -> bytes:
    """Returns a hash that is equal for programs that differ only in the numbers of weights, constants and the ends of their messages."""
    light = ModelProto(functions=model.functions)
    light.graph.CopyFrom(model.graph)
    for node in (*light.graph.node, *(node for function in light.functions for node in function.node)):
        if node.domain == DOMAIN:
            for field in ("name", "attribute", "metadata_props", "doc_string"):
                node.ClearField(field)
    light.graph.ClearField("initializer")
    for tensor in model.graph.initializer:
        light.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    return hashlib.sha256(light.SerializeToString()).digest()
