"""What a compile proves of the files that it has just written: each is a sound graph, which onnx and onnxruntime take.

It is a part of `partc check`, in a small part of a compile's time: ranks whose programs differ in their weights and in whom they speak
to are looked at once, types are inferred at one size of the symbols, and hashes are believed. onnxruntime makes a session of a
program without its large weights, of nodes that are alike one, and without optimizing it except where it is known to fail at that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto
from partc.runtime.artifact.format import DOMAIN, MANIFEST, Manifest
from partc.runtime.artifact.graph.half_kernels import compute_in_float32
from partc.runtime.artifact.graph.onnx_graph import all_nodes, read_model, reads
from partc.runtime.artifact.graph.rank_constants import is_rank_constant
from partc.runtime.artifact.graph.targets import as_identity, is_copy
from partc.runtime.artifact.tasks.calls import unrolled
from partc.runtime.checker.files import read_artifact
from partc.runtime.checker.graph.nodes import check_graph
from partc.runtime.checker.graph.rank_file import check_onnx
from partc.runtime.checker.graph.types import check_types, without_weights
from partc.runtime.errors import Violation

__all__ = ["Structure", "check_model", "check_structures", "refusal", "structures"]


class CanLoad(Protocol):
    """Says why onnxruntime does not load the bytes of a model, "" where it does."""

    def __call__(self, model: bytes, folder: str, *, optimized: bool) -> str: ...


_QUANTIZED = {"QuantizeLinear", "DequantizeLinear"}
_MOVED = {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}
"""What onnxruntime's optimizer moves through quantized values, where it may write a node that it then refuses."""


@dataclass(frozen=True)
class Structure:
    """One of several rank files of equal structure, by its path in the artifact's folder; `rest`: without nodes that one before it has."""

    file: str
    model: ModelProto
    rest: ModelProto
    manifest: Manifest
    folder: Path


def structures(folder: Path) -> list[Structure]:
    """The programs of an artifact and of those inside of it, those of one structure once, with the nodes of each task once."""
    found: list[Structure] = []
    seen = set[tuple[bytes, ...]]()
    for inside in sorted(path.parent for path in folder.rglob(MANIFEST)):
        artifact, _ = read_artifact(inside)
        for one in map(artifact.beside, artifact.programs) if artifact else ():
            manifest, known = one.manifest, set[bytes]()
            for file in dict.fromkeys(map(manifest.program, range(manifest.ranks))):
                model = read_model(inside / file)
                # equal for programs that differ in weights, constants and the ends of their messages only
                digest = hashlib.sha256()
                for text in _texts(model):
                    digest.update(text)
                if (structure := digest.digest()) not in known:
                    known.add(structure)
                    name = (inside / file).relative_to(folder).as_posix()
                    model = unrolled(model, name, once=True)
                    found.append(Structure(name, model, _unseen(model, seen), manifest, inside))
    return found


def check_structures(programs: Sequence[Structure]) -> list[Violation]:
    """What is wrong with programs, each by itself; of a node that several of them have alike it is asked once."""
    return [
        violation
        for one in programs
        for violation in check_graph(one.file, one.model) or _check_nodes(one.file, one.rest, one.manifest)
    ]


def check_model(file: str, model: ModelProto, manifest: Manifest) -> list[Violation]:
    """What is wrong with one graph: its values, what `onnx.checker` says, and the types inside."""
    return check_graph(file, model) or _check_nodes(file, model, manifest)


def _check_nodes(file: str, model: ModelProto, manifest: Manifest) -> list[Violation]:
    return check_onnx(file, model) or check_types(file, model, manifest, 1)


def refusal(model: ModelProto, can_load: CanLoad, folder: Path | None = None, rest: ModelProto | None = None) -> str:
    """Why onnxruntime does not load a program, "" where it does; weights that it needs to see lie in `folder`.

    `can_load` says so of a model's bytes: onnxruntime is not known here. `rest`: the program without nodes that are known to load.
    """
    ops = {node.op_type for node in all_nodes(model.graph.node)}
    risky = not ops.isdisjoint(_QUANTIZED) and not ops.isdisjoint(_MOVED)
    light = without_weights(model if risky or rest is None else rest)
    if not (text := can_load(_alone(light, light.graph.node if risky else _unlike(light)), "", optimized=risky)):
        return ""
    return text if folder is None else can_load(_alone(model, model.graph.node), str(folder.resolve()), optimized=risky)


def _unseen(model: ModelProto, known: set[tuple[bytes, ...]]) -> ModelProto:
    """The program without the nodes that a program before it had, over operands of these types; `known`, to which its own are added.

    What they make is an input then. A node stays where it reads integers, which may be a shape, that another one of the program makes,
    and with it what makes such integers, or a value of unknown shape, which no input has.
    """
    ports = _declared(model)
    types = {name: port.SerializeToString() for name, port in ports.items()}
    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            types[tensor.name] = tensor.SerializeToString()
    new = set[int]()
    numbers = set[str]()
    for at, node in enumerate(model.graph.node):
        read = [*reads(node)]
        key = (node.SerializeToString(), *[types.get(name, b"") for name in (*read, *node.output)])
        is_new = key not in known or is_rank_constant(node) or not numbers.isdisjoint(read)
        if is_new or not all(name in ports for name in node.output if name):
            known.add(key)
            new.add(at)
            numbers.update(name for name in node.output if _is_integer(ports.get(name)))
    if len(new) == len(model.graph.node):
        return model
    numbers = set()
    for at, node in reversed([*enumerate(model.graph.node)]):
        if at in new or not numbers.isdisjoint(node.output):
            new.add(at)
            for name in reads(node):
                if _is_integer(ports.get(name)) or not ports[name].type.tensor_type.HasField("shape"):
                    numbers.add(name)
    kept = [node for at, node in enumerate(model.graph.node) if at in new]
    rest = ModelProto()
    rest.CopyFrom(model)
    del rest.graph.node[:], rest.graph.output[:]
    rest.graph.node.extend(kept)
    made = {name for node in kept for name in node.output}
    rest.graph.output.extend(port for port in model.graph.output if port.name in made)
    given = made | {port.name for port in model.graph.input} | {tensor.name for tensor in model.graph.initializer}
    others = dict.fromkeys(name for node in kept for name in reads(node) if name not in given and name in ports)
    rest.graph.input.extend(ports[name] for name in others)
    values = [port for port in model.graph.value_info if port.name in made]
    del rest.graph.value_info[:]
    rest.graph.value_info.extend(values)
    return rest


def _is_integer(port: ValueInfoProto | None) -> bool:
    """Whether a value is of integers, or may be."""
    return port is None or port.type.tensor_type.elem_type in (TensorProto.INT32, TensorProto.INT64)


def _unlike(model: ModelProto) -> list[NodeProto]:
    """The nodes without repetitions: the first of each op with these attributes, and operands of these types and ranks."""
    types = _declared(model)
    kinds: dict[str, str] = {}
    for name, port in types.items():
        tensor_type = port.type.tensor_type
        has_rank = port.type.HasField("tensor_type") and tensor_type.HasField("shape")
        kinds[name] = f"{tensor_type.elem_type}/{len(tensor_type.shape.dim)}" if has_rank else str(port.type)
    kinds |= {tensor.name: f"{tensor.data_type}/{len(tensor.dims)}" for tensor in model.graph.initializer}
    found: list[NodeProto] = []
    known = set[tuple[str, ...]]()
    for node in model.graph.node:
        attributes = sorted(attribute.SerializeToString().hex() for attribute in node.attribute)
        operands = [kinds.get(name, name) if name else "" for name in node.input]
        like = (node.domain, node.op_type, *attributes, "", *operands)
        if like not in known or not all(name in types for name in node.output if name):
            known.add(like)
            found.append(node)
    return found


def _declared(model: ModelProto) -> dict[str, ValueInfoProto]:
    return {port.name: port for port in (*model.graph.value_info, *model.graph.input, *model.graph.output)}


def _alone(model: ModelProto, nodes: Iterable[NodeProto]) -> bytes:
    """Some nodes of the program without its communication, as a CPU runs them: what others make is fed, what others read is an output."""
    types, graph = _declared(model), model.graph
    compute = [as_identity(node) for node in nodes if node.domain != DOMAIN or is_copy(node)]
    if not compute:
        return b""
    alone = ModelProto(ir_version=model.ir_version)
    alone.opset_import.extend(entry for entry in model.opset_import if entry.domain != DOMAIN)
    alone.functions.extend(model.functions)
    alone.graph.name = graph.name
    alone.graph.node.extend(compute)
    read = {name for node in compute for name in reads(node)}
    made = {name for node in compute for name in node.output}
    alone.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in read)
    held = {tensor.name for tensor in alone.graph.initializer}
    fed = [name for name in sorted(read - made - held) if name in types]
    alone.graph.input.extend(types[name] for name in fed)
    last = [name for node in compute for name in node.output if name and name not in read]
    alone.graph.output.extend(
        types.get(name) or ValueInfoProto(name=name) for name in last or sorted(filter(None, made))[:1]
    )
    alone.graph.value_info.extend(types[name] for name in made if name in types and name in read)
    compute_in_float32(alone)
    data: bytes = alone.SerializeToString()
    return data


def _texts(model: ModelProto) -> Iterator[bytes]:
    for node in model.graph.node:
        if node.domain == DOMAIN:
            yield "|".join([node.op_type, *node.input, ">", *node.output]).encode()
        else:
            yield node.SerializeToString()
    for port in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        yield port.SerializeToString()
    for tensor in model.graph.initializer:
        yield f"{tensor.name} {tensor.data_type} {list(tensor.dims)}".encode()
