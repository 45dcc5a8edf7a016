"""Makes an onnxruntime session for each segment, and finds the failed op in the messages of onnxruntime.

A session is built from a model in memory whose large weights stay external: onnxruntime maps them from the artifact's folder, as
initializers, so that they are packed for the kernels once. An onnxruntime message names a node; it is translated to the op type and the
source name, which users know.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from partc.runtime.artifact.graph.half_kernels import compute_in_float32
from partc.runtime.artifact.graph.onnx_graph import op_and_path, source_path
from partc.runtime.artifact.tensors.dtypes import BY_CODE, Array, dense, element, type_proto, type_text
from partc.runtime.artifact.tensors.stored_weight import is_in_another_file, numbers

from ..artifact.format import DOMAIN, FACTORS, TASKS
from ..devices.devices import HOST, Device, Devices
from ..errors import NO_MEMORY_HELP, ArtifactError, reason_of, speaks_of_memory
from .kernels import refuse_moved_to_host, refuse_without_kernel
from .ort import NO_FALLBACK, Session, new_session, version
from .rank_file import RankFile
from .steps import Segment
from .weight_copies import multiply_by_transposed, read_narrow

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TypeProto

LARGE = 1_000
"""The number of nodes from which onnxruntime does not plan the sharing of buffers."""
_NODE = re.compile(r"Name:\s?'([^']*)'")
_OUTPUT = re.compile(
    r"provided for output '([^']*)' .*has shape (\{[^}]*\}) but the computed output shape for this run is (\{[^}]*\})"
)


@dataclass(frozen=True)
class Settings:
    """The settings of sessions.

    Threads of one operator, whether idle threads may spin, the devices of the rank's targets, whether the rank has state (`keeps`: then
    copies of a value are computed with the same bits), and the names of a decoder's caches.
    """

    threads: int
    spinning: bool
    devices: Devices = field(default_factory=Devices)
    keeps: bool = False
    caches: frozenset[str] = frozenset()
    one_arena: bool = False
    """Whether the sessions of a decoder have one arena together: where ranks share caches, each layer has several sessions."""
    profile: str = ""
    """The prefix of the files in which onnxruntime writes the times of segments' nodes; empty to write none."""
    tables: dict[bytes, Array] = field(default_factory=dict, compare=False)
    """The tables of all sessions, whose rows nodes read, that lie in files of others, by the rank file's serialized tensor."""
    shared: dict[bytes, Session] = field(default_factory=dict, compare=False)
    """The sessions of a decoder's programs by a hash of their models: equal segments share a session, and so its weights."""


@dataclass(frozen=True)
class SegmentSession:
    """A segment with its session on a `device`.

    `objects`: whether strings, sequences, optionals or maps are among its inputs or outputs, so that it is called with Python objects; then
    `widened` maps the outputs whose element type numpy lacks to outputs with the same values in a wider type.
    """

    segment: Segment
    session: Session
    objects: bool
    widened: Mapping[str, str]
    device: Device = HOST

    def explain(self, error: Exception) -> str:
        """Returns the message about a failure: the op first, then onnxruntime's text."""
        text = _plain(str(error))
        if promise := _OUTPUT.search(text):
            name, wanted, found = promise.groups()
            text = f"the value '{name}' was promised with shape {wanted} and has {found}: {text}"
        remedy = NO_MEMORY_HELP if speaks_of_memory(text) else ""
        return f"{self.culprit(text)}: {text}{remedy}"

    def culprit(self, text: str) -> str:
        """Returns the node that a message of onnxruntime names, or else the whole segment, as a text."""
        match = _NODE.search(text)
        found = self._node(match[1]) if match else None
        task = f"{self.segment.task}: " if self.segment.task else ""
        return task + op_and_path(found) if found is not None else str(self.segment)

    def module(self, name: str) -> str:
        """Returns the module of the node with this name in onnxruntime; empty if the name contains no node name of the segment."""
        found = self._node(name)
        return "" if found is None else source_path(found) or found.name

    def _node(self, name: str) -> NodeProto | None:
        """Returns the node with this name in onnxruntime; a fused node's name contains the name of one of its parts."""
        named = [node for node in self.segment.nodes if node.name and node.name in name]
        return max(named, key=lambda node: len(node.name), default=None)


class Builder:
    """Makes the sessions of one rank, in order: types are known from the file, the manifest or an earlier session."""

    def __init__(self, file: RankFile, folder: Path, types: Mapping[str, str], settings: Settings) -> None:
        model, where = file.model, file.where
        graph = model.graph
        self.model = model
        self.functions = [one for one in model.functions if one.domain != TASKS]
        self.built: dict[int, tuple[Session, bool, dict[str, str]]] = {}
        self.made = 0
        self.folder, self.manifest = folder, file.manifest
        self.settings = settings
        self.where = where
        self.types = dict(types)
        self.protos: dict[str, TypeProto] = {}
        for name in file.named.intersection(file.declared):
            if text := type_text(file.declared[name].type):
                self.types[name] = text
                self.protos[name] = file.declared[name].type
        self.initializers = file.tensors
        for tensor in graph.initializer:
            self.types.setdefault(tensor.name, f"tensor({element(tensor.data_type)})")
        self.sparse = {tensor.values.name: tensor for tensor in graph.sparse_initializer}

    def build(self, segment: Segment) -> SegmentSession:
        """Returns the session of a segment; all calls of a body share one. ArtifactError where onnxruntime rejects it."""
        key = id(segment.formal)
        if key not in self.built:
            self.built[key] = self._build(segment)
        session, objects, widened = self.built[key]
        kinds = {output.name: output.type for output in session.get_outputs()}
        for formal, name in segment.output_pairs:
            self.types.setdefault(name, kinds[formal])
        return SegmentSession(segment, session, objects, widened, self.settings.devices.of(segment.target))

    def copy(self, source: str, result: str) -> None:
        """Notes that the result of a copy has the type of its source."""
        if source in self.types:
            self.types.setdefault(result, self.types[source])

    def _build(self, segment: Segment) -> tuple[Session, bool, dict[str, str]]:
        model = self._model(segment)
        session = self._session(model, segment)
        formal = segment.formal
        kinds = {output.name: output.type for output in session.get_outputs()}
        kinds |= {one: self.types[name] for one, name in segment.operands}
        for one, name in segment.output_pairs:
            kinds[one] = self.types.get(name, kinds[one])
        objects = not all(dense(kinds[name]) for name in (*formal.inputs, *formal.outputs))
        widened = _widen(model, formal, kinds) if objects else {}
        if widened:
            session = self._session(model, segment)
        return session, objects, widened

    def _session(self, model: ModelProto, segment: Segment) -> Session:
        settings, device = self.settings, self.settings.devices.of(segment.target)
        threads = segment.threads or settings.threads
        entries = {
            "session.intra_op.allow_spinning": "1" if settings.spinning else "0",
            "session.model_external_initializers_file_folder_path": str(self.folder.resolve()),
        }
        if segment.target and not device.is_host:
            entries[NO_FALLBACK] = "1"
        data = model.SerializeToString()
        key = hashlib.sha256(b"%d %s " % (threads, str(device).encode()) + data).digest() if settings.caches else b""
        if key in settings.shared:
            return settings.shared[key]
        try:
            self.made += 1
            profile = f"{settings.profile}.{self.made}" if settings.profile else ""
            arrays, tables = self._of_other_files(model, device)
            session = new_session(
                data,
                threads,
                device,
                entries,
                settings.keeps,
                bool(settings.caches),
                profile,
                arrays,
                tables,
                settings.one_arena,
                len(model.graph.node) >= LARGE,
            )
        except Exception as error:
            if not device.is_host:
                refuse_without_kernel(self.where, device, data, entries, segment.nodes)
            text = _plain(reason_of(error))
            named = (op_and_path(node) for node in segment.nodes if node.name and f"({node.name})" in text)
            raise ArtifactError(
                f"{self.where}: onnxruntime {version()} does not load {next(named, str(segment))}: {text}\n"
                "  help: install the onnxruntime that the artifact was compiled for, or compile again"
            ) from None
        if not device.is_host and not segment.target:
            refuse_moved_to_host(self.where, device, session, model)
        if key:
            settings.shared[key] = session
        return session

    def _of_other_files(self, model: ModelProto, device: Device) -> tuple[dict[str, Array], list[str]]:
        """Returns by name the weights in files outside of the artifact, which onnxruntime does not read, and the names of the tables.

        A table is one array for all sessions of the rank; each session packs or folds its other weights, whose arrays are then freed.
        """
        outside = {tensor.name: tensor for tensor in model.graph.initializer if is_in_another_file(tensor)}
        gathers = (node.input[0] for node in model.graph.node if node.op_type == "Gather" and device.is_host)
        tables = sorted(outside.keys() & set(gathers))
        tables_by_key, arrays = self.settings.tables, dict[str, Array]()
        for name, tensor in outside.items():
            key = tensor.SerializeToString(deterministic=True)
            known = tables_by_key.get(key)
            arrays[name] = numbers(tensor, self.folder, self.manifest) if known is None else known
            if name in tables:
                tables_by_key[key] = arrays[name]
        return arrays, tables

    def _model(self, segment: Segment) -> ModelProto:
        from onnx import ModelProto

        model = ModelProto(ir_version=self.model.ir_version)
        model.opset_import.extend(entry for entry in self.model.opset_import if entry.domain not in (DOMAIN, TASKS))
        model.functions.extend(self.functions)
        graph = model.graph
        graph.name = "segment"
        graph.node.extend(segment.nodes)
        for node in graph.node:  # letters of shapes may differ by program, but equal sessions are to be shared
            kept = [entry for entry in node.metadata_props if entry.key != FACTORS]
            del node.metadata_props[:]
            node.metadata_props.extend(kept)
        graph.initializer.extend(self.initializers[name] for name in segment.initializers if name in self.initializers)
        graph.sparse_initializer.extend(self.sparse[name] for name in segment.initializers if name in self.sparse)
        for one, name in segment.operands:
            if name not in self.types:
                raise ArtifactError(f"{self.where}: the type of '{name}' is not known\n  help: compile again")
            graph.input.add(name=one, type=self._declared(name) or type_proto(self.types[name]))
        for one, name in segment.output_pairs:
            graph.output.add(name=one, type=self._declared(name))
        if self.settings.devices.of(segment.target).is_host:
            compute_in_float32(model)
            multiply_by_transposed(model)
        read_narrow(graph)
        return model

    def _declared(self, name: str) -> TypeProto | None:
        """Returns the declared type of a session's input or output; without a shape where programs of other sizes may share the session.

        A cache's type omits only the number of slots, because onnxruntime takes a dim of unknown size to be as long as the new entries.
        """
        declared = self.protos.get(name)
        if declared is None or not self.settings.caches:
            return declared
        if name not in self.settings.caches:
            return type_proto(text) if (text := type_text(declared)) else declared
        copy = type(declared)()
        copy.CopyFrom(declared)
        copy.tensor_type.shape.dim[0].Clear()
        return copy


def _widen(model: ModelProto, segment: Segment, types: Mapping[str, str]) -> dict[str, str]:
    """Adds to the model an exact cast of every output whose element type numpy lacks; maps these outputs to the casts' results."""
    from onnx import helper

    twins: dict[str, str] = {}
    for name in segment.outputs:
        dtype = dense(types[name])
        if dtype and dtype.wide:
            twin = f"{name}.wide"
            wide = next(row for row in BY_CODE.values() if row.shown == dtype.wide)
            model.graph.node.append(helper.make_node("Cast", [name], [twin], to=wide.code))
            model.graph.output.add(name=twin)
            twins[name] = twin
    return twins


def _plain(text: str) -> str:
    """Returns a message on one line, without the places in onnxruntime's own source."""
    return re.sub(r"/\S*onnxruntime\S*:\d+ [^\[]*?\)( const)? ", "", " ".join(text.split()))
