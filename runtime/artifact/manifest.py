"""Opens an artifact: reads the manifest, and proves that the files a rank needs are those that the compiler wrote.

Nothing is trusted: the manifest is checked against its schema, every needed file against its recorded size and checksum, every path of
external data against the folder (links resolved) and every region against its file. The checksum of weights is CRC-32, which detects
damage in a third of the time of SHA-256; all other files, and all files in `partc check`, are compared by SHA-256. With `trust` no
contents are read for this; sizes and paths are still checked.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from partc.runtime.artifact.comm.collectives import GROUP_OPS
from partc.runtime.artifact.graph.bodies import read_model
from partc.runtime.artifact.graph.onnx_graph import model_tensors, structure_of
from partc.runtime.artifact.graph.rank_constants import bound
from pydantic import ValidationError

from ..errors import ArtifactError, breaks_lines, one_line, reason_of
from ..files import counted
from ..files.counted import LISTED_RANKS, Budget
from ..files.regular import fault, is_outside, open_regular, read_regular
from . import dim_expression as expression
from .format import CACHE, FORMAT, MANIFEST, Manifest, Port, Shape, rank_file, run_list_file, stays_inside
from .generation import GenerationRecord, binds_rows
from .manifest_file import ManifestFile
from .port import bad_pairs
from .ranks import Grid, ranks_text
from .referenced_file import REMEDY, change_of
from .run_list import RunList
from .training.training_record import TrainingRecord

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto


_LINE_END = re.compile(
    rb"(?<!\\)(?:\\\\)*\\(?:[nrf]|u000[a-dA-D]|u001[c-eC-E]|u0085|u202[89])|\xc2\x85|\xe2\x80[\xa8\xa9]"
)
"""A line end inside a text of the JSON: an escape, or one of the line ends that JSON allows unescaped."""
_SHOWN = 32
_CHUNK = 1 << 18
_TOLD = 20
_AGAIN = "help: compile again, or copy the whole folder again"


class Artifact:
    """An artifact on disk, seen from one of its programs: its folder, its manifest, and the checked files of the program's ranks."""

    def __init__(self, folder: Path, trust: bool, program: str = "") -> None:
        self.folder = folder
        self.trust = trust
        self._stamp = stamp(folder)  # before the manifest is read, so that a change in between is noticed
        self._index, self.digest = _manifest_file(folder)
        self._checked: set[str] = set()
        self.manifest: Manifest = self._of(program)

    @property
    def programs(self) -> list[str]:
        """The names of the artifact's programs, the main one first."""
        return [*self._index.programs]

    @property
    def training(self) -> TrainingRecord | None:
        """The artifact's training record, from whichever program it is seen; None where nothing is trained."""
        return self._index.training

    @property
    def generation(self) -> GenerationRecord | None:
        """The artifact's record of token generation, from whichever program it is seen."""
        return self._index.generation

    def program_named(self, program: str = "") -> Artifact:
        """The same artifact, seen from another of its programs, by default the main one; ArtifactError where it has no such program."""
        found = copy.copy(self)
        found.manifest = self._of(program)
        return found

    def shared(self) -> Artifact:
        """The same artifact with one file for ranks of equal programs, whose files differ in the shards of weights alone; for estimates."""
        manifest = self.manifest
        others = [self.program_named(name).manifest for name in self.programs if name != manifest.name]
        names, firsts = dict[str, str](), dict[tuple[bytes, tuple[str, ...]], str]()
        for name, ranks in manifest.by_file(range(manifest.ranks)).items():
            key = structure_of(self._read(name)), tuple(one.program(ranks[0]) for one in others)
            names[name] = firsts.setdefault(key, name)
        found = copy.copy(self)
        files = [names[manifest.program(rank)] for rank in range(manifest.ranks)]
        found.manifest = manifest.model_copy(update={"rank_files": files})
        return found

    def _of(self, program: str) -> Manifest:
        if program and program not in self._index.programs:
            known = ", ".join(f"'{name}'" for name in self._index.programs)
            raise ArtifactError(f"{self.folder}: has no program '{program}'\n  help: its programs are {known}")
        return self._index.manifest(program)

    def refuse_replaced(self) -> None:
        """Raises ArtifactError where another artifact has taken the place of this one since it was opened."""
        if stamp(self.folder) != self._stamp:
            raise ArtifactError(f"{self.folder}: was replaced while it was read\n  help: try again")

    def refuse_without_weights(self) -> None:
        """Raises ArtifactError where the artifact was compiled without weights."""
        if self.manifest.lacks_weights:
            name = self.manifest.model.name
            again = f"compile it with weights: `partc compile {name} --weights FOLDER`, or without --no-weights"
            raise ArtifactError(f"{self.folder}: the artifact has no weights, and cannot be run\n  help: {again}")

    def _read(self, name: str) -> ModelProto:
        from google.protobuf.message import DecodeError

        self._check([name])
        try:
            return read_model(self.folder / name)
        except DecodeError:
            raise ArtifactError(f"{self.folder / name}: is not an ONNX model\n  {_AGAIN}") from None

    def model(self, rank: int) -> ModelProto:
        """Reads the program of a rank; its weights stay in their files, its rank constants become initializers.

        ArtifactError where a file that it needs was changed or is not valid.
        """
        from onnx import TensorProto

        name = self.manifest.program(rank)
        model = self._read(name)
        names = [*_names(model.graph)]
        for function in model.functions:
            names += [function.name, *function.input, *_node_names(function.node)]
        if broken := next(filter(breaks_lines, names), None):
            raise ArtifactError(f"{self.folder / name}: the name '{one_line(broken)}' has a line end\n  {_AGAIN}")
        outside = (one for one in model_tensors(model) if one.data_location == TensorProto.EXTERNAL)
        regions = [(tensor.name, *_region(tensor)) for tensor in outside]
        self._check(dict.fromkeys(path for _, path, _, _ in regions))
        problems = [
            f"{self.folder / name}: weight '{weight}' lies at bytes {offset} to {offset + length} of {path}, which has "
            f"{self.manifest.files[path].bytes}"
            for weight, path, offset, length in regions
            if offset < 0 or length < 0 or offset + length > self.manifest.files[path].bytes
        ]
        if problems:
            raise ArtifactError("\n".join([*problems, f"  {_AGAIN}"]))
        return bound(model, self.manifest.groups_of(rank), rank, str(self.folder / name))

    def run_list(self, rank: int) -> RunList | None:
        """Reads the run list of a rank's program, which states how its nodes run; None where the artifact has no such list.

        ArtifactError where the list was changed, or is that of another rank file.
        """
        program = self.manifest.program(rank)
        if run_list_file(program) not in self.manifest.files:
            return None
        self._check([run_list_file(program)])
        return read_run_list(self.folder, self.manifest, program)

    def text(self, name: str) -> str:
        """Reads a text file of the artifact, such as `ir/schedule.txt`; ArtifactError where the file was changed or is not text."""
        self._check([name])
        try:
            return counted.read_text(self.folder / name, counted.SCHEDULE_BYTES)
        except OSError as error:
            raise ArtifactError(f"{self.folder / name}: {reason_of(error)}\n  {_AGAIN}") from None
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{self.folder / name}: is not UTF-8 text: {error}\n  {_AGAIN}") from None

    def _check(self, names: Iterable[str]) -> None:
        due = [name for name in names if name not in self._checked]
        problems = [problem for name in due for problem in self._violations(name)]
        if problems:
            self.refuse_replaced()
            remedy = f"help: {REMEDY}" if self.manifest.referenced.keys() & due else _AGAIN
            raise ArtifactError("\n".join([*problems, f"  {remedy}"]))
        self._checked.update(due)

    def _violations(self, name: str) -> Iterator[str]:
        file = self.folder / name
        record = self.manifest.files.get(name)
        if not stays_inside(name) or is_outside(file, self.folder):
            yield f"{self.folder}: the path '{name}' leaves the folder\n  a file of an artifact lies inside its folder"
        elif record is None:
            yield f"{file}: is needed, but the manifest does not list it"
        elif record.absent:
            return
        elif record.path:
            if why := change_of(record):
                yield f"{record.path}: weights of the artifact {self.folder} are read from this file: {why}"
        elif not os.path.lexists(file):
            yield f"{file}: is missing"
        elif why := fault(file):
            yield f"{file}: {why}"
        elif (size := file.stat().st_size) != record.bytes:
            yield f"{file}: has {size} bytes, the manifest says {record.bytes}"
        elif not self.trust:
            kind, wanted, sum_of = (
                ("CRC-32", record.crc32, crc32) if record.crc32 else ("SHA-256", record.sha256, sha256)
            )
            if (found := sum_of(file)) != wanted:
                yield f"{file}: was changed: its {kind} is {found[:12]}, the manifest says {wanted[:12]}"


def open_artifact(folder: str | Path, *, rank: int | None = None, trust: bool = False, program: str = "") -> Artifact:
    """Opens the artifact in a folder and checks its manifest; with `rank`, that rank's files too. ArtifactError says what is wrong.

    The artifact is seen from the main program, or from the one called `program`.
    """
    place = Path(folder)
    artifact = Artifact(place, trust, program)
    if rank is not None:
        artifact.model(rank)
    return artifact


def read_run_list(folder: Path, manifest: Manifest, program: str) -> RunList:
    """Reads the run list of a rank file; ArtifactError where the list is that of another file, or is not valid."""
    file = folder / run_list_file(program)
    ranks = ranks_text(rank for rank in range(manifest.ranks) if manifest.program(rank) == program)
    title = f"{file}, the run list of rank {ranks}"
    try:
        run_list = RunList.model_validate(counted.read_json(file, counted.RUN_LIST))
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        fact = f"{'.'.join(map(str, wrong['loc'])) or 'the whole'}: {wrong['msg']}"
        raise ArtifactError(f"{title}: {fact}\n  {_AGAIN}") from None
    except OSError as error:
        raise ArtifactError(f"{title}: {reason_of(error)}\n  {_AGAIN}") from None
    except ValueError as error:
        raise ArtifactError(f"{title}: is not JSON: {error}\n  {_AGAIN}") from None
    if run_list.program != manifest.files[program].sha256:
        raise ArtifactError(f"{title}: it is not of the artifact's {program}\n  {_AGAIN}")
    return run_list


def sha256(file: Path) -> str:
    """The SHA-256 of a file's contents, in hexadecimal."""
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def crc32(file: Path) -> str:
    """The CRC-32 of a file's contents, in hexadecimal; read through one small buffer, which stays in the cache."""
    found, buffer = 0, memoryview(bytearray(_CHUNK))
    with open_regular(file) as stream:
        while count := stream.readinto(buffer):
            found = zlib.crc32(buffer[:count], found)
    return f"{found:08x}"


def stamp(folder: Path) -> tuple[int, ...] | None:
    """The identity of the manifest's file, which changes when the artifact is replaced; None where there is no manifest."""
    try:
        of = os.stat(folder / MANIFEST)
    except OSError:
        return None
    return of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns


def _manifest_file(folder: Path) -> tuple[ManifestFile, str]:
    """Reads and checks the manifest; returns it with the SHA-256 of its text."""
    file = folder / MANIFEST
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: there is no such folder\n  help: give the folder that `partc compile` wrote")
    if not os.path.lexists(file):
        raise ArtifactError(f"{folder}: has no {MANIFEST}\n  help: give the folder that `partc compile` wrote")
    try:
        if is_outside(file, folder):
            raise ArtifactError(f"{folder}: the path '{MANIFEST}' leaves the folder\n  help: put the file itself there")
        text = read_regular(file, counted.MANIFEST.bytes)
        data = counted.parse_json(text, counted.MANIFEST)
    except OSError as error:
        raise ArtifactError(f"{file}: {reason_of(error)}\n  {_AGAIN}") from None
    except ValueError as error:
        raise ArtifactError(f"{file}: is not JSON: {error}\n  {_AGAIN}") from None
    if (b"\\" in text or not text.isascii()) and (found := _LINE_END.search(text)):
        fact = f"a text in it has a line end, at byte {found.start()}"
        raise ArtifactError(f"{file}: {fact}\n  {_AGAIN}")
    if isinstance(data, dict) and (version := data.get("format")) != FORMAT:
        again = "compile again with this partc" + (", its checkpoints stay valid" if version in (1, 2) else "")
        raise ArtifactError(
            f"{file}: is of format {version!r}, this partc reads format {FORMAT}\n"
            f"  help: {again}; or install the one that wrote it ({data.get('partc')})"
        )
    try:
        index = ManifestFile.model_validate(data, context=Budget(LISTED_RANKS, "ranks"))
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)
        lines = [f"{file}: {'.'.join(map(str, item['loc'])) or 'the whole'}: {item['msg']}" for item in wrong[:_TOLD]]
        more = [f"{file}: and {len(wrong) - _TOLD:,} more"] if len(wrong) > _TOLD else []
        raise ArtifactError("\n".join([*lines, *more, f"  {_AGAIN}"])) from None
    problems = [f"{file}: {problem}" for problem in _wrong_programs(index)]
    if problems:
        raise ArtifactError("\n".join([*problems, f"  {_AGAIN}"]))
    return index, hashlib.sha256(text).hexdigest()


def _wrong_programs(index: ManifestFile) -> Iterator[str]:
    """Yields the faults of the programs: of each by itself, and of their use of the shared state."""
    values, (main, *_) = Counter(record.value for record in index.state), index.programs
    for name, program in index.programs.items():
        where = "" if name == main else f"program '{name}': "
        for one, names in program.kept.items():
            if isinstance(names, list) and len(names) != values[one]:
                yield f"{where}{len(names)} outputs take the place of the state '{one}', which has {values[one]} records"
                return
        yield from (f"{where}{problem}" for problem in _contradictions(index.manifest(name)))
        yield from (f"{where}it keeps '{one}', which is not a state" for one in program.kept if one not in values)
        if name == main:
            yield from (
                f"the program '{main}' does not keep the state '{one}'"
                for one in sorted(values.keys() - program.kept.keys())
            )
        caches = {one.value for one in index.state if one.kind == CACHE} if binds_rows(name) else set()
        for value, following in program.kept.items() if name != main else ():
            if any(following) and value not in caches:
                names = ", ".join([following] if isinstance(following, str) else following)
                yield f"{where}'{names}' takes the place of the state '{value}'; '{main}' alone replaces the state"


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """Violations of laws beyond the schema: ranks within range, tags unique, dims that are expressions over the symbols."""
    last = manifest.ranks - 1
    if manifest.rank_files and len(manifest.rank_files) != manifest.ranks:
        yield f"it names {len(manifest.rank_files)} rank files for {manifest.ranks} ranks"
        return
    named = manifest.rank_files or [rank_file(rank, manifest.prefix) for rank in range(manifest.ranks)]
    missing = next((rank for rank, name in enumerate(named) if name not in manifest.files), None)
    if missing is not None:
        yield f"it lists no file {manifest.program(missing)} for rank {missing} of {manifest.ranks}"
        return
    tags: set[int] = set()
    known: dict[int, bool] = {}  # ports share lists of ranks: each list is checked once, by its identity
    for kind, ports in (("input", manifest.inputs), ("output", manifest.outputs)):
        for port in ports:
            if id(port.ranks) not in known:
                known[id(port.ranks)] = not port.ranks or 0 <= min(port.ranks) <= max(port.ranks) <= last
            if not known[id(port.ranks)]:
                wrong = next(rank for rank in port.ranks if not 0 <= rank <= last)
                yield f"{kind} '{port.name}' names rank {wrong}: the ranks are 0 to {last}"
            yield from (f"{kind} '{port.name}': {problem}" for problem in _bad_dims(port.shape, manifest))
    yield from _bad_collectives(manifest)
    tags |= {one.tag for one in manifest.collectives}
    for transfer in manifest.transfers:
        where = f"transfer {transfer.tag} of '{transfer.value}'"
        ends = (transfer.source, transfer.target)
        if transfer.group and (problem := bad_pairs(transfer, manifest.groups)):
            yield f"{where}: {problem}"
        if transfer.source == transfer.target or not all(0 <= rank <= last for rank in ends):
            yield f"{where} goes from rank {transfer.source} to {transfer.target}: two different ranks of 0 to {last} are needed"
        if transfer.tag in tags:
            yield f"{where}: another transfer has the same tag"
        tags.add(transfer.tag)
        yield from (f"{where}: {problem}" for problem in _bad_dims(transfer.shape, manifest))


def _bad_collectives(manifest: Manifest) -> Iterator[str]:
    """Yields the faults of groups, boxes and collectives."""
    ranks = manifest.ranks
    if (total := sum(len(one) for lists in manifest.groups.values() for one in lists)) > LISTED_RANKS:
        yield f"its groups list {total:,} ranks; at most {LISTED_RANKS:,} are read"
        return
    for name, lists in manifest.groups.items():
        count = sum(map(len, lists))
        members = {rank for one in lists for rank in one} if count <= ranks else set[int]()
        if len(members) != count or not all(lists) or (members and not 0 <= min(members) <= max(members) < ranks):
            shown = str(lists) if count <= _SHOWN else f"{len(lists):,} lists of {count:,} ranks"
            yield f"group '{name}' is {shown}: disjoint lists of ranks 0 to {ranks - 1} are needed"
    for port in (*manifest.inputs, *manifest.outputs):
        yield from (f"'{port.name}': {problem}" for problem in _bad_boxes(port))
    tags: set[int] = set()
    for record in manifest.collectives:
        where = f"collective {record.tag}, {record.op} of '{record.value}'"
        if record.op not in GROUP_OPS:
            yield f"{where}: this partc does not know the op"
        if record.group not in manifest.groups:
            yield f"{where}: there is no group '{record.group}'"
        if record.tag in tags:
            yield f"{where}: another collective has the same tag"
        tags.add(record.tag)
        yield from (f"{where}: {problem}" for problem in _bad_dims(record.shape, manifest))


def _bad_boxes(port: Port) -> Iterator[str]:
    if port.boxes is None:
        return
    dims = None if port.shape is None else len(port.shape)
    if not port.type.startswith("tensor(") or dims is None:
        yield "only a tensor of known dims can be cut"
    elif len(port.boxes) != len(port.ranks):
        yield f"it has {len(port.boxes)} boxes for {len(port.ranks)} ranks"
    elif isinstance(port.boxes, Grid):
        if len(port.boxes.cuts) != dims:
            yield f"its grid cuts {len(port.boxes.cuts)} dims, and it has {dims}"
    elif any(
        len(box) != dims or any(not (len(cut) == 3 and 0 <= cut[0] < cut[1] <= cut[2]) for cut in box)
        for box in port.boxes
    ):
        yield f"its boxes must be {dims} times begin, end, denominator with 0 <= begin < end <= denominator"


def _bad_dims(shape: Shape, manifest: Manifest) -> Iterator[str]:
    for dim in shape or ():
        try:
            names = expression.parse(dim, manifest.symbols).names
        except ValueError as error:
            yield str(error)
        else:
            yield from (
                f"the dim '{dim}' needs '{name}', which is not a symbol"
                for name in sorted(names - manifest.symbols.keys())
            )


def _names(graph: GraphProto) -> Iterator[str]:
    yield from (value.name for value in (*graph.input, *graph.initializer))
    yield from _node_names(graph.node)


def _node_names(nodes: Iterable[NodeProto]) -> Iterator[str]:
    from onnx import AttributeProto

    for node in nodes:
        yield node.name
        yield node.op_type
        yield from node.output
        yield from (entry.value for entry in node.metadata_props if entry.key.startswith("partc."))
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _names(attribute.g)


def _region(tensor: TensorProto) -> tuple[str, int, int]:
    """Returns the path, offset and length of a tensor's external data; offset and length are 0 where the entry lacks them."""
    entry = {item.key: item.value for item in tensor.external_data}
    try:
        return entry.get("location", ""), int(entry.get("offset", 0)), int(entry.get("length", 0))
    except ValueError:
        raise ArtifactError(
            f"weight '{tensor.name}' has external data that is not at a number of bytes\n  {_AGAIN}"
        ) from None
