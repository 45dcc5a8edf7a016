"""Writes weights as safetensors, streamed from their source: hashed and written in one pass, never completely in memory.

A weight stands in the file of the lowest rank that holds it, once, however many ranks read it. Tensors follow one another in the order of
`safetensors` itself (wider items first, then by name), and the header is padded so that the data starts on a page.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers numpy's views of bfloat16 and float8)
import numpy as np
import onnx_ir as ir
from partc.compiler.emit.names import Names
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.computed import (
    AbsentError,
    ComputedTensor,
    WidenedTensor,
    box_of,
    full_box,
    in_file,
    runs_of,
)
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.programs import RankTensor
from partc.compiler.ir.sharded import ShardedValue
from partc.runtime.artifact.format import REFERENCED, FileRecord, weights_file
from partc.runtime.artifact.referenced_file import referenced
from partc.runtime.artifact.tensors.dtypes import BY_CODE
from partc.runtime.artifact.tensors.safetensors_stream import (
    AS_BYTES,
    CODES,
    RunningSums,
    Sums,
    header_bytes,
    read_header,
)
from partc.runtime.artifact.tensors.stored_weight import source_text
from partc.runtime.errors import breaks_lines
from partc.runtime.files.regular import open_regular
from partc.runtime.files.writers import link_file, new_raw_file

INLINE_BYTES = 128
_PAGE = 4096
_CHUNK = 1 << 20
_RUN = 16 << 20
"""The most bytes of a computed tensor that are in memory at once."""


Stored = tuple[str | None, int, tuple[int, ...], tuple[int, ...]]
"""A shard of a weight: its name and the identity of its tensor, into how many shards its dims are cut, and which of them it is; of rows
of a computed tensor, which may be those of another weight, too, no name, and the first dim alone."""


@dataclass(frozen=True)
class WeightShard:
    """A rank's shard of a weight: what it is stored as, its tensor, and which part of which weight it is.

    `text` is as people slice arrays: `fc1.weight[0:8, 16:32]`; of a whole weight its name alone.
    """

    stored: Stored
    tensor: ir.TensorProtocol
    text: str
    is_inline: bool

    @property
    def data(self) -> ir.TensorProtocol:
        """The tensor as a file has it, in its own element type."""
        return self.tensor.source if isinstance(self.tensor, WidenedTensor) else self.tensor


class WeightShards:
    """The shards of weights that ranks have; each is made once, however many ranks have it and however often it is asked for."""

    def __init__(self) -> None:
        self._of_version: dict[tuple[ShardedValue, int], WeightShard] = {}
        self._known: dict[tuple[str | None, Stored], WeightShard] = {}
        self.texts: dict[Stored, dict[str, None]] = {}
        """The weights whose shards have the same bytes."""

    def of(self, weight: RankTensor) -> WeightShard:
        """The shard of a weight on a rank."""
        value, layout = weight.version.value, weight.version.layout
        key = weight.version, weight.index if any(layout.cuts) else 0
        if key not in self._of_version:
            tensor, shards, shard = value.const_value, layout.shards, layout.shard(weight.index)
            stored: Stored = value.name, id(tensor), shards, shard
            if isinstance(tensor, ComputedTensor) and all(count == 1 for count in shards[1:]):
                stored = None, id(tensor.rows_of), shards[:1], shard[:1]
            if (value.name, stored) not in self._known:
                self._known[value.name, stored] = made = _made(weight, stored)
                self.texts.setdefault(stored, {})[made.text] = None
            self._of_version[key] = self._known[value.name, stored]
        return self._of_version[key]


@dataclass(frozen=True)
class Location:
    """Where a weight lies: what ONNX calls external data. `source`: in a file outside of the artifact the tensor and the box in it."""

    file: str
    offset: int
    length: int
    source: str = ""


@dataclass(frozen=True)
class _ReferencedFile:
    """A file that weights stay in: its name in the manifest, and its tensors' names by first byte and size; None without a header."""

    key: str
    tensors: Mapping[tuple[int, int], str] | None


class ReferencedFiles:
    """The files that weights stay in, by their names in the manifest, and where the weights are in them."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        self._files: dict[Path, _ReferencedFile] = {}

    def locations(self, weights: Iterable[RankTensor], shards: WeightShards) -> dict[Stored, Location]:
        """The locations of those weights that are a tensor, or a box of one, of a file."""
        distinct = {shard.stored: shard for shard in map(shards.of, weights) if not shard.is_inline}
        located = {stored: self._location(shard) for stored, shard in distinct.items()}
        return {stored: location for stored, location in located.items() if location is not None}

    def _location(self, shard: WeightShard) -> Location | None:
        if (place := in_file(shard.data)) is None:
            return None
        source, box = place
        path = Path(source.path).resolve()
        if breaks_lines(str(path)):  # a manifest has no such text
            return None
        file, begin, size = self._of(path), source.offset or 0, source.nbytes
        if file.tensors is not None and (begin, size) not in file.tensors:
            raise CompileError(Problem(str(path), "changed while it was compiled", help="compile again"))
        name = file.tensors[begin, size] if file.tensors is not None else ""
        spans = [(one.start, one.stop) for one in box]
        return Location(file.key, begin, size, source_text(name, spans, source.shape.numpy()))

    def _of(self, path: Path) -> _ReferencedFile:
        if path not in self._files:
            key = f"{REFERENCED}/{len(self._files)}/{path.name}"
            self.records[key] = record = referenced(path)
            header = read_header(path, record.sha256).items() if record.sha256 else None
            spans = None if header is None else {(one.offset, one.bytes): name for name, one in header}
            self._files[path] = _ReferencedFile(key, spans)
        return self._files[path]


def is_inline(tensor: ir.TensorProtocol) -> bool:
    """Whether a weight stays inside the rank file: tiny ones, strings, integers that shape arithmetic reads; none without numbers."""
    if tensor.dtype == ir.DataType.STRING:
        return True
    limit = 8 * INLINE_BYTES if tensor.dtype.is_integer() else INLINE_BYTES
    if tensor.nbytes > limit:
        return False
    try:
        return not isinstance(tensor, ir.LazyTensor) or tensor.numpy() is not None
    except AbsentError:
        return False


def write_weights(
    folder: Path,
    weights_of: Mapping[int, Sequence[RankTensor]],
    shards: WeightShards,
    names: Names,
    before: Path,
    program: str = "",
    absent: bool = False,
) -> tuple[dict[str, FileRecord], dict[Stored, Location]]:
    """Writes the weights that each rank owns into its file in `folder`; gives the files' records and the place of every weight.

    `before`: the folder of the artifact that this one replaces: a file with the same bytes there is linked, and not written again.
    `names`: what weights are called in the files. `program` is named where it is not the main one of the artifact. `absent`: no file is
    written; its record has the size that it would have, and no hash.

    Files are written side by side, as many as there are cores: hashing a byte takes longer than writing it.
    """
    files = {
        weights_file(rank, program): [(names[one.value], shards.of(one)) for one in held]
        for rank, held in weights_of.items()
    }
    with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as writers:
        written = {
            file: writers.submit(_write_file, folder, file, weights, shards.texts, absent, before)
            for file, weights in files.items()
        }
        results = {file: future.result() for file, future in written.items()}
    locations = {
        shards.of(one).stored: results[weights_file(rank, program)][1][names[one.value]]
        for rank, held in weights_of.items()
        for one in held
    }
    return {file: record for file, (record, _) in results.items()}, locations


def _write_file(
    folder: Path,
    file: str,
    weights: Sequence[tuple[str, WeightShard]],
    texts: Mapping[Stored, Iterable[str]],
    absent: bool,
    before: Path,
) -> tuple[FileRecord, dict[str, Location]]:
    shards = sorted(weights, key=lambda item: (-item[1].data.dtype.bitwidth, item[0]))
    ordered = [(name, shard.data, shard.data.nbytes) for name, shard in shards]
    rows = [(name, *_in_format(tensor), size) for name, tensor, size in ordered]
    prefix = header_bytes(rows, {name: "; ".join(texts[shard.stored]) for name, shard in shards}, _PAGE)
    locations: dict[str, Location] = {}
    end = len(prefix)
    for name, _, size in ordered:
        locations[name] = Location(file, end, size)
        end += size
    if absent:
        return FileRecord(bytes=end, sha256="", absent=True), locations
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = [tensor for _, tensor, _ in ordered]
    if (sums := _same_sums(before / file, prefix, tensors, end)) is not None and link_file(before / file, path):
        return FileRecord(bytes=end, sha256=sums.sha256, crc32=sums.crc32), locations
    running = RunningSums(prefix)
    with new_raw_file(path) as out, ThreadPoolExecutor(1) as hasher:
        out.write(prefix)
        for tensor in tensors:
            if (place := _range_of(tensor)) is not None:
                hashed = hasher.submit(_sum_range, running, place)
                _copy_range(place, out)
                hashed.result()
                continue
            for data in _bytes_of(tensor):
                hashed = hasher.submit(running.update, data)
                _write_all(out, data)
                hashed.result()
    sums = running.sums()
    return FileRecord(bytes=end, sha256=sums.sha256, crc32=sums.crc32), locations


def _same_sums(before: Path, prefix: bytes, tensors: Sequence[ir.TensorProtocol], size: int) -> Sums | None:
    """The sums of the file of the artifact before, where it has the bytes that would be written; else None."""
    try:
        with open_regular(before) as file:
            if os.fstat(file.fileno()).st_size != size or file.read(len(prefix)) != prefix:
                return None
            running = RunningSums(prefix)
            for tensor in tensors:
                place = _range_of(tensor)
                for data in _bytes_of(tensor) if place is None else _range(place):
                    if not np.array_equal(np.frombuffer(file.read(len(data)), np.uint8), data):
                        return None
                    running.update(data)
    except OSError:
        return None
    return running.sums()


def _in_format(tensor: ir.TensorProtocol) -> tuple[str, Sequence[int]]:
    """Type and shape of a tensor in a weights file: those of its bytes where the format lacks its type."""
    dtype = BY_CODE.get(tensor.dtype.value)
    if dtype is None or dtype.shown not in CODES:
        return AS_BYTES, [tensor.nbytes]
    return CODES[dtype.shown], tensor.shape.numpy()


def _bytes_of(tensor: ir.TensorProtocol) -> Iterator[memoryview]:
    """The tensor's little-endian bytes as ONNX lays them out, of a computed one in runs."""
    if tensor.dtype.bitwidth < 8 or tensor.nbytes == 0:
        yield memoryview(tensor.tobytes())
        return
    for run in runs_of(tensor, _RUN) if isinstance(tensor, ComputedTensor) else (tensor.numpy(),):
        yield np.ascontiguousarray(run).reshape(-1).view(np.uint8).data


def _sum_range(sums: RunningSums, tensor: ir.ExternalTensor) -> None:
    for data in _range(tensor):
        sums.update(data)


def _range(tensor: ir.ExternalTensor) -> Iterator[memoryview]:
    """The tensor's bytes, read through one small buffer, which stays in the cache."""
    buffer = memoryview(bytearray(_CHUNK))
    left = tensor.nbytes
    with open_regular(tensor.path) as file:
        file.seek(tensor.offset or 0)
        while left:
            count = file.readinto(buffer[: min(left, _CHUNK)])
            if not count:
                raise EOFError(f"'{tensor.path}' was cut short while it was read")
            yield buffer[:count]
            left -= count


def _copy_range(tensor: ir.ExternalTensor, out: FileIO) -> None:
    """Appends the tensor's bytes to `out`, inside the kernel where it can."""
    start, left = tensor.offset or 0, tensor.nbytes
    with open_regular(tensor.path) as file:
        try:
            while left:
                count = os.copy_file_range(file.fileno(), out.fileno(), left, start)
                if not count:
                    raise EOFError(f"'{tensor.path}' was cut short while it was read")
                start, left = start + count, left - count
        except (AttributeError, OSError):  # another system, or two file systems that cannot
            file.seek(start)
            while left:
                data = file.read(min(left, _CHUNK))
                _write_all(out, memoryview(data))
                left -= len(data)


def _write_all(out: FileIO, data: memoryview) -> None:
    while data:
        data = data[out.write(data) :]


def owners(
    held_by: Mapping[int, Sequence[RankTensor]], shards: WeightShards, known: Collection[Stored] = ()
) -> dict[int, list[RankTensor]]:
    """Maps each rank to the weights that its file holds: those that no lower rank holds, without the `known` and the inline ones."""
    seen = set(known)
    owned: dict[int, list[RankTensor]] = {}
    for rank in sorted(held_by):
        for one in held_by[rank]:
            shard = shards.of(one)
            if shard.stored not in seen and not shard.is_inline:
                seen.add(shard.stored)
                owned.setdefault(rank, []).append(one)
    return owned


def _made(held: RankTensor, stored: Stored) -> WeightShard:
    """The shard of a weight on a rank: the whole tensor, or a view of the rank's part that is read when it is written."""
    tensor, layout = held.version.value.const_value, held.version.layout
    name = name_of(held.version.value)
    assert tensor is not None
    if not any(layout.cuts):
        return WeightShard(stored, tensor, name, is_inline(tensor))
    sizes = tensor.shape.numpy()
    box = layout.box(held.index, sizes)
    text = f"{name}[{', '.join([f'{begin}:{end}' for begin, end in box])}]"
    view = box_of(tensor, tuple(slice(*span) for span in box), name)
    return WeightShard(stored, view, text, is_inline(view))


def _range_of(tensor: ir.TensorProtocol) -> ir.ExternalTensor | None:
    """The bytes of a file that are a tensor's elements one after the other: those of whole rows; None where there are none."""
    if isinstance(tensor, ir.ExternalTensor):
        return tensor
    if (place := in_file(tensor)) is None:
        return None
    source, box = place
    sizes = source.shape.numpy()
    if box == full_box(sizes):
        return source
    if box[1:] != full_box(sizes[1:]):
        return None
    row = source.nbytes // max(1, sizes[0])
    begin, count = (source.offset or 0) + box[0].start * row, box[0].stop - box[0].start
    shape, name, folder = ir.Shape([count, *sizes[1:]]), source.name, source.base_dir
    return ir.ExternalTensor(source.location, begin, count * row, source.dtype, shape=shape, name=name, base_dir=folder)
