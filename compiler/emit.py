"""Writes the artifact: rank files, weights, dumps and the manifest, into a new folder that takes its place when it is whole."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import onnx
import onnx_ir as ir
from partc.compiler.dump import begin_text, end_text, rank_text
from partc.compiler.errors import CompileError, Problem
from partc.compiler.program import Part, Program, Recv, Send, Transfer, ValueInfo
from partc.compiler.transfer_bytes import bytes_text
from partc.compiler.weights import Location, is_inline, owners, write_weights
from partc.runtime import format as fmt

_OLDEST_IR, _NEWEST_IR = 11, 13


def emit(
    program: Program, out: Path, sources: Mapping[str, fmt.SourceRecord | None], texts: Mapping[str, str] | None = None
) -> fmt.Manifest:
    """Writes `program` to the folder `out` and gives the manifest; `sources` are the records of `model` and `plan`, `texts` more files.

    The same program gives the same bytes. `out` is replaced only if it is an artifact or empty, and only by a whole one.
    """
    with _new_folder(out) as folder:
        files, locations = write_weights(folder, owners({part.rank: part.weights for part in program.parts}))
        nodes: dict[ir.Node, onnx.NodeProto] = {}
        for part in program.parts:
            data = _rank_model(program, part, locations, nodes).SerializeToString(deterministic=True)
            files[fmt.rank_file(part.rank)] = _write(folder, fmt.rank_file(part.rank), data)
            text = rank_text(program, part)
            files[f"ir/rank_{part.rank:04d}.ir"] = _write(folder, f"ir/rank_{part.rank:04d}.ir", text.encode())
        files[fmt.BEGIN_IR] = _write(folder, fmt.BEGIN_IR, begin_text(program).encode())
        files[fmt.END_IR] = _write(folder, fmt.END_IR, end_text(program).encode())
        for file, text in (texts or {}).items():
            files[file] = _write(folder, file, text.encode())
        manifest = _manifest(program, files, sources)
        (folder / fmt.MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return manifest


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` at the end, and is removed on any error."""
    if out.exists() and not (out / fmt.MANIFEST).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise CompileError(
            Problem(
                str(out),
                "exists and is no artifact of partc, so it is not replaced",
                help="choose another folder with -o, or remove it",
            )
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        folder.chmod(0o755)
        yield folder
        if out.exists():
            shutil.rmtree(out)
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(folder: Path, file: str, data: bytes) -> fmt.FileRecord:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return fmt.FileRecord(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _rank_model(
    program: Program, part: Part, locations: Mapping[str, Location], cache: dict[ir.Node, onnx.NodeProto]
) -> onnx.ModelProto:
    graph = onnx.GraphProto(name=f"rank_{part.rank:04d}")
    for step in part.steps:
        match step:
            case Send(transfer):
                graph.node.append(_comm_node(program, fmt.SEND, transfer))
            case Recv(transfer):
                graph.node.append(_comm_node(program, fmt.RECV, transfer))
            case ir.Node():
                if step not in cache:
                    cache[step] = _node(program, step)
                graph.node.append(cache[step])
    known = frozenset(program.symbols)
    listed: set[ir.Value] = {*part.inputs, *part.outputs}
    graph.input.extend(_value_info(value, known) for value in part.inputs)
    graph.output.extend(_value_info(value, known) for value in part.outputs)
    for step in part.steps:
        values = step.outputs if isinstance(step, ir.Node) else (step.transfer.value,)
        for value in values:
            if value.name and value not in listed and value.type is not None:
                listed.add(value)
                graph.value_info.append(_value_info(value, known))
    for value in part.weights:
        graph.initializer.append(_weight(value, locations))
    imports = dict(program.model.opset_imports)
    imports.setdefault("", imports.pop("ai.onnx", 21))
    if any(isinstance(step, Send | Recv) for step in part.steps):
        imports[fmt.DOMAIN] = fmt.DOMAIN_VERSION
    return onnx.ModelProto(
        ir_version=min(_NEWEST_IR, max(_OLDEST_IR, program.model.ir_version or 0)),
        producer_name="partc",
        producer_version=version("partc"),
        graph=graph,
        opset_import=[
            onnx.OperatorSetIdProto(domain=domain, version=number) for domain, number in sorted(imports.items())
        ],
    )


def _node(program: Program, node: ir.Node) -> onnx.NodeProto:
    proto = ir.serde.serialize_node(node)
    del proto.metadata_props[:]
    proto.doc_string = ""
    proto.name = proto.name or program.paths[node]
    _add_metadata(proto, {fmt.PATH: program.paths[node], fmt.RULE: program.placement[node].rule})
    return proto


def _comm_node(program: Program, op_type: str, transfer: Transfer) -> onnx.NodeProto:
    name = transfer.value.name or ""
    here = op_type == fmt.SEND
    proto = onnx.NodeProto(
        op_type=op_type,
        domain=fmt.DOMAIN,
        name=f"{name}.{op_type.lower()}.{transfer.target if here else transfer.source}",
    )
    (proto.input if here else proto.output).append(name)
    proto.attribute.append(onnx.helper.make_attribute(fmt.PEER, transfer.target if here else transfer.source))
    proto.attribute.append(onnx.helper.make_attribute(fmt.TAG, transfer.tag))
    producer = transfer.value.producer()
    assert producer is not None
    metadata = {
        fmt.PATH: program.paths[producer],
        fmt.CAUSE: transfer.cause,
        fmt.BYTES: bytes_text(program.values[transfer.value]),
    }
    _add_metadata(proto, metadata)
    return proto


def _add_metadata(proto: onnx.NodeProto, metadata: Mapping[str, str]) -> None:
    proto.metadata_props.extend(onnx.StringStringEntryProto(key=key, value=value) for key, value in metadata.items())


def _value_info(value: ir.Value, known: frozenset[str]) -> onnx.ValueInfoProto:
    proto = ir.serde.serialize_value(value)
    kind = proto.type.WhichOneof("value") if proto.HasField("type") else None
    if kind in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(proto.type, kind)
        dims = list(value.shape.dims) if value.shape is not None else []
        for field, dim in zip(tensor.shape.dim, dims, strict=False):
            if isinstance(dim, ir.SymbolicDim) and not (dim.value is not None and dim.free_symbols() <= known):
                field.ClearField("dim_param")
    del proto.metadata_props[:]
    return proto


def _weight(value: ir.Value, locations: Mapping[str, Location]) -> onnx.TensorProto:
    tensor = value.const_value
    assert tensor is not None
    if is_inline(tensor):
        proto = ir.serde.serialize_tensor(
            tensor
            if not isinstance(tensor, ir.ExternalTensor)
            else ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype)
        )
        proto.name = value.name or ""
        del proto.metadata_props[:]
        proto.doc_string = ""
        return proto
    place = locations[value.name or ""]
    proto = onnx.TensorProto(
        name=value.name or "",
        data_type=tensor.dtype.value,
        dims=tensor.shape.numpy(),
        data_location=onnx.TensorProto.EXTERNAL,
    )
    for key, text in (("location", place.file), ("offset", str(place.offset)), ("length", str(place.length))):
        proto.external_data.append(onnx.StringStringEntryProto(key=key, value=text))
    return proto


def _manifest(
    program: Program, files: Mapping[str, fmt.FileRecord], sources: Mapping[str, fmt.SourceRecord | None]
) -> fmt.Manifest:
    model = sources["model"]
    assert model is not None
    return fmt.Manifest(
        format=1,
        partc=version("partc"),
        ranks=program.plan.ranks,
        symbols={name: _symbol(program, name) for name in sorted(program.symbols)},
        inputs=[
            _port(program, value, [p.rank for p in program.parts if value in p.inputs])
            for value in program.model.graph.inputs
        ],
        outputs=[
            _port(program, value, [p.rank for p in program.parts if value in p.outputs])
            for value in program.model.graph.outputs
        ],
        transfers=[_transfer(program.values[t.value], t) for t in program.transfers],
        files=dict(sorted(files.items())),
        model=model,
        plan=sources["plan"],
    )


def _symbol(program: Program, name: str) -> fmt.SymbolRecord:
    facts = program.symbols[name].facts
    if facts.value is not None:
        return fmt.SymbolRecord(min=facts.value, max=facts.value, divisor=1, remainder=0)
    return fmt.SymbolRecord(min=facts.min or 0, max=facts.max, divisor=facts.divisor, remainder=facts.remainder)


def _port(program: Program, value: ir.Value, ranks: Sequence[int]) -> fmt.Port:
    info = program.values[value]
    return fmt.Port(name=value.name or "", type=info.type, shape=_shape(info), ranks=list(ranks))


def _transfer(info: ValueInfo, transfer: Transfer) -> fmt.Transfer:
    return fmt.Transfer(
        tag=transfer.tag,
        value=transfer.value.name or "",
        source=transfer.source,
        target=transfer.target,
        type=info.type,
        shape=_shape(info),
        bytes=bytes_text(info),
        cause=transfer.cause,
    )


def _shape(info: ValueInfo) -> fmt.Shape:
    return None if info.shape is None else list(info.shape)
