"""Writes the artifact: rank files, weights, dumps and the manifest, into a new folder that replaces the old one once it is complete."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import onnx
from partc.compiler.emit.dump import begin_text, end_text, rank_text
from partc.compiler.emit.helper_types import HelperTypes
from partc.compiler.emit.manifest import guard_of, manifest_of, program_name
from partc.compiler.emit.names import Names
from partc.compiler.emit.rank_model import RankModels, structure
from partc.compiler.emit.rank_text import RankTexts
from partc.compiler.emit.run_list import run_list
from partc.compiler.emit.weights import Location, ReferencedFiles, Stored, WeightShards, owners, write_weights
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.computed import law_of
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import RankProgram, State
from partc.compiler.schedule.grid import schedule_text
from partc.runtime.artifact import format as fmt
from partc.runtime.artifact.graph.bodies import opened
from partc.runtime.artifact.graph.rank_constants import bound
from partc.runtime.artifact.legal_sizes import wrong_batch
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.artifact.manifest_file import ManifestFile
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.replace_folder import Obstacle, ObstacleError, obstacle, replacing_folder
from partc.runtime.artifact.run_list import RunList
from partc.runtime.errors import printable
from partc.runtime.files.regular import read_regular
from partc.runtime.files.writers import write_new


def emit(
    program: Complete,
    out: Path,
    sources: Mapping[str, fmt.SourceRecord | None],
    texts: Mapping[str, str] | None = None,
    inner: Sequence[Complete] = (),
    prove: Callable[[Path], None] = lambda folder: None,
    absent: bool = False,
    by_reference: bool = False,
    elastic: Mapping[int, Sequence[Complete]] = MappingProxyType({}),
) -> fmt.Manifest:
    """Writes `program` to the folder `out` and returns the manifest; `sources` are the records of `model` and `plan`, `texts` more files.

    `inner`: the other programs of a training or generation, over the same state. The same program gives the same bytes. `absent`: whether
    the weights' files are left out. `by_reference`: whether weights that are in files stay there and are not copied. `elastic`: maps other
    numbers of ranks to their programs, the main one first; each is an artifact in a folder of this one. `out` is replaced only if it is
    empty or contains an artifact and nothing else, and only by a complete one that `prove` has checked.
    """
    try:
        with replacing_folder(out) as folder:
            how = absent, by_reference
            manifest = _write_all([program, *inner], folder, out, sources, texts or {}, *how, elastic)
            prove(folder)
            return manifest
    except ObstacleError as error:
        raise _in_the_way(out, error.found) from error


def refuse_to_replace(out: Path) -> None:
    """Raises CompileError if the folder to write is something else than an artifact, or has files that partc did not write."""
    if (found := obstacle(out)) is not None:
        raise _in_the_way(out, found)


def _in_the_way(out: Path, found: Obstacle) -> CompileError:
    return CompileError(Problem(str(out), found.fact, help=found.help))


def _write_all(
    programs: Sequence[Complete],
    folder: Path,
    before: Path,
    sources: Mapping[str, fmt.SourceRecord | None],
    texts: Mapping[str, str],
    absent: bool,
    by_reference: bool,
    elastic: Mapping[int, Sequence[Complete]],
) -> fmt.Manifest:
    """Writes the programs of an artifact, the main one first, and returns its manifest. `before`: the folder with files to link."""
    files: dict[str, fmt.FileRecord] = {}
    locations: dict[Stored, Location] = {}
    shards, staying = WeightShards(), ReferencedFiles()
    rank_files = []
    shown, programs = programs, with_laws(programs)
    named = [Names(program) for program in shown]
    for program, as_read, own in zip(programs, shown, named, strict=True):
        name = "" if program is programs[0] else program_name(program)
        held = {part.rank: part.weights for part, _ in program.distinct_programs}
        if by_reference and not absent:
            locations |= staying.locations(chain.from_iterable(held.values()), shards)
        weights = owners(held, shards, locations)
        written, found = write_weights(folder, weights, shards, own, before, name, absent)
        files |= written
        locations |= found
        rank_files.append(_write_ranks(program, as_read, own, folder, name, files, shards, locations))
    files |= staying.records
    for file, text in texts.items():
        files[file] = _write_text(folder, file, text)
    for ranks, others in elastic.items():
        place = fmt.ranks_folder(ranks)
        there = _write_all(others, folder / place, folder, sources, {}, absent, by_reference, {})
        files |= {f"{place}/{file}": record for file, record in there.files.items() if not record.path}
        data = read_regular(folder / place / fmt.MANIFEST)
        files[f"{place}/{fmt.MANIFEST}"] = fmt.FileRecord(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    manifests = [
        manifest_of(program, own, files, sources, by_rank, program is programs[0])
        for program, own, by_rank in zip(programs, named, rank_files, strict=True)
    ]
    _refuse_batch(programs[0], manifests[0])
    index = ManifestFile.of(manifests)
    write_new(folder / fmt.MANIFEST, f"{index.model_dump_json(indent=1)}\n".encode())
    return manifests[0]


def _refuse_batch(program: Complete, manifest: fmt.Manifest) -> None:
    """Raises CompileError if the plan's batch does not fit the inputs' symbols."""
    rules = program.plan.train
    if rules is None or rules.batch is None:
        return
    parts = [text.partition("\n  help: ") for text in wrong_batch(rules.batch, manifest)]
    if problems := [Problem(rules.where(), fact, help=help or "choose another batch") for fact, _, help in parts]:
        raise CompileError(problems)


def _write_ranks(
    program: Complete,
    shown: Complete,
    names: Names,
    folder: Path,
    name: str,
    files: dict[str, fmt.FileRecord],
    shards: WeightShards,
    locations: Mapping[Stored, Location],
) -> list[str]:
    """Writes the rank files of a program, and the dumps of `shown`; returns each rank's file. `name` is empty for the main program."""
    helpers = HelperTypes(program)
    models, texts = RankModels(program, names, shards, locations, helpers), RankTexts(shown, names, helpers)
    lists: dict[Hashable, RunList] = {}
    by_rank = [""] * program.plan.ranks
    bodies: list[tuple[Sequence[int], str]] = []
    for data, shared in _distinct(program, models).items():
        file, part = fmt.rank_file(shared[0], name), shown.parts[shared[0]]
        for rank in shared:
            by_rank[rank] = file
        of_ranks = onnx.StringStringEntryProto(key=fmt.OF_RANKS, value=ranks_text(shared))
        more = onnx.ModelProto(metadata_props=[of_ranks]).SerializeToString(deterministic=True)
        files[file] = _write(folder, file, data + more)  # protobuf messages one behind the other are merged
        if (key := structure(program.parts[part.rank])) not in lists:
            kept, model = [names[one.value] for one in part.state], onnx.ModelProto.FromString(data)
            lists[key] = run_list(model, program_name(program), guard_of(program), kept)
        listed = lists[key].model_copy(update={"program": files[file].sha256})
        files[fmt.run_list_file(file)] = _write(folder, fmt.run_list_file(file), listed.text().encode())
        bodies.append((shared, texts.of(part, shared)))
        file = fmt.dump_file(f"ir/rank_{part.rank:04d}.ir", name)
        files[file] = _write_text(folder, file, rank_text(shown, part, bodies[-1][1]))
    whole = {fmt.BEGIN_IR: begin_text(shown), fmt.END_IR: end_text(shown, names, bodies)}
    if program.tasks is not None:
        whole[fmt.SCHEDULE] = schedule_text(program.tasks.schedule, program.tasks.costs)
    for file, text in whole.items():
        files[fmt.dump_file(file, name)] = _write_text(folder, fmt.dump_file(file, name), text)
    return by_rank


def _distinct(program: Complete, models: RankModels) -> dict[bytes, tuple[int, ...]]:
    """Maps each distinct rank file, as bytes, to its ranks in ascending order."""
    ranks_of: dict[bytes, list[int]] = {}
    for part, ranks in program.distinct_programs:
        ranks_of.setdefault(models.of(part), []).extend(ranks)
    return {data: tuple(sorted(ranks)) for data, ranks in ranks_of.items()}


class Unwritten(Artifact):
    """The artifact of programs, the main one first, without a folder, dumps and weight data, for estimates.

    `where` stands for the folder in messages.
    """

    def __init__(self, programs: Sequence[Complete], where: str) -> None:
        self.folder, self.trust = Path(where), True
        self._data: dict[str, bytes] = {}
        self._lists: dict[str, RunList] = {}
        shards, manifests = WeightShards(), list[fmt.Manifest]()
        sources = {"model": fmt.SourceRecord(name=where, sha256="0" * 64), "plan": None}
        for program in with_laws(programs):
            name, names, by_rank = program_name(program) if manifests else "", Names(program), [""] * program.plan.ranks
            held = [shards.of(one) for part, _ in program.distinct_programs for one in part.weights]
            locations = {one.stored: Location("", 0, one.data.nbytes) for one in held if not one.is_inline}
            models = RankModels(program, names, shards, locations, HelperTypes(program))
            for data, ranks in _distinct(program, models).items():
                self._data[file := fmt.rank_file(ranks[0], name)] = data
                for rank in ranks:
                    by_rank[rank] = file
            manifests.append(manifest_of(program, names, {}, sources, by_rank, not manifests))
        self._index = ManifestFile.of(manifests)
        self.manifest = self._of("")

    def model(self, rank: int) -> onnx.ModelProto:
        """The program of a rank, without the data of its weights."""
        name = self.manifest.program(rank)
        return bound(self._read(name), self.manifest.groups_of(rank), rank, name)

    def _read(self, name: str) -> onnx.ModelProto:
        return opened(onnx.ModelProto.FromString(self._data[name]))

    def run_list(self, rank: int) -> RunList:
        """Returns the run list of a rank's program."""
        manifest, name = self.manifest, self.manifest.program(rank)
        if name not in self._lists:
            kept = [record.value for record in manifest.state if rank in record.ranks]
            model = onnx.ModelProto.FromString(self._data[name])
            self._lists[name] = run_list(model, manifest.name, manifest.guard, kept)
        return self._lists[name]


def _write_text(folder: Path, file: str, text: str) -> fmt.FileRecord:
    """Writes a text file whose characters are safe to show on a terminal."""
    return _write(folder, file, printable(text).encode())


def _write(folder: Path, file: str, data: bytes) -> fmt.FileRecord:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    write_new(path, data)
    return fmt.FileRecord(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def with_laws(programs: Sequence[Complete]) -> list[Complete]:
    """Returns the programs of an artifact, the main one first, with weights that laws generate removed, as its files have them."""
    complete: list[Complete] = []
    for program in programs:
        weights = {held.version.value for part, _ in program.distinct_programs for held in part.weights}
        if not any(law_of(value) is not None for value in weights):
            complete.append(program)
            continue
        main = complete[0].parts if complete else None
        cache: dict[tuple[object, ...], RankProgram] = {}
        complete.append(
            replace(
                program,
                parts=tuple(
                    _with_laws(part, None if main is None else main[part.rank], cache) for part in program.parts
                ),
            )
        )
    return complete


def _with_laws(
    part: RankProgram, main: RankProgram | None, cache: dict[tuple[object, ...], RankProgram]
) -> RankProgram:
    """Returns a rank program without the weights that laws generate; ranks that shared state still share it."""
    drawn = {held.value: held for held in part.weights if law_of(held.version.value) is not None}
    if main is not None:
        begun = {one.version.across for one in main.state if one.initial != 0.0}
        drawn = {value: held for value, held in drawn.items() if held.version.across in begun}
    if not drawn:
        return part
    key = (part.share_key, tuple(drawn))
    if key not in cache:
        kept = {one.value: one for one in part.state}
        for value, held in drawn.items():
            law = law_of(held.version.value)
            assert law is not None
            own = kept.get(value) or State(value, held.version, None, name_of(held.version.value), "parameter")
            kept[value] = replace(own, initial=law)
        weights = tuple(held for held in part.weights if held.value not in drawn)
        cache[key] = replace(part, weights=weights, state=tuple(kept.values()))
    like = cache[key]
    return replace(part, weights=like.weights, state=like.state)
