"""Samples in tar files, as WebDataset has them: members of one name and several extensions, one after the other, are one sample.

    shard_000.tar                    fields
        000000.x.npy                 x        an array
        000000.label.cls             label    a whole number
        000000.txt                   txt      text; a member without a field's name has that of its extension

The headers of all members are read once, at the start, by the standard library's `tarfile`; then samples are read by their places: in any
order, and each rank its own. Files are not compressed.

The values of the members of a sample, by the extension of their names.

| extension | value |
|---|---|
| .npy | the array |
| .cls, .id, .index | a whole number |
| .json | numbers, and lists of such |
| .txt, .text | text |
| .png, .jpg, .jpeg | uint8, height x width, or x channels where there are several; Pillow decodes them |
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array

from ...errors import UsageError
from ...files.regular import open_regular
from ..fields import Index, Ragged
from ..npy import BROKEN, array_of, reason
from .indexed import IndexedSource, Values, numbered
from .naming import Naming, Unfit, quoted
from .values import stacked


def _number(data: bytes) -> int:
    return int(data.decode().strip())


def _json(data: bytes) -> Array:
    array = np.asarray(json.loads(data))
    if array.dtype.kind not in "biuf":
        raise ValueError("it is not a number, nor a list of such")
    return array


def _image(data: bytes) -> Array:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB") if image.mode in ("P", "CMYK", "YCbCr") else image)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "npy": array_of,
    **dict.fromkeys(("cls", "id", "index"), _number),
    "json": _json,
    **dict.fromkeys(("txt", "text"), bytes.decode),
    **dict.fromkeys(("png", "jpg", "jpeg"), _image),
}


def check_decoder(extension: str, where: str) -> None:
    """UsageError where a decoder needs a package that is not installed."""
    if DECODERS[extension] is _image:
        try:
            import PIL.Image  # noqa: F401
        except ImportError:
            raise UsageError(
                f"{where}: its samples have .{extension}, which Pillow decodes, and it is not installed\n  help: pip install pillow"
            ) from None


_SUFFIX = ".tar"
_BLOCK = 512
_MOST_TOLD = 5


@dataclass
class _Shard:
    """One file: by field the places of its bytes and how many they are, one row for each sample."""

    path: Path
    places: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class ShardSource(IndexedSource):
    """The samples of some tar files as records, file after file. `ragged` names fields that are ragged even where a few have one length."""

    def __init__(self, given: object, where: str, naming: Naming, ragged: Collection[str] = ()) -> None:
        shards = [_opened(path) for path in shard_paths(given, where)]
        first = next((shard for shard in shards if shard.samples), None)
        problems = [problem for shard in shards for problem in shard.problems]
        if first is not None:
            problems += [problem for shard in shards for problem in _incomplete(shard, [*first.places])]
        if problems:
            more = f"\n  and {len(problems) - _MOST_TOLD} more" if len(problems) > _MOST_TOLD else ""
            raise UsageError("\n".join(problems[:_MOST_TOLD]) + more)
        self._paths = [shard.path for shard in shards]
        self._ends = np.cumsum([len(shard.samples) for shard in shards])
        members = [*first.places] if first is not None else []
        self._places = {
            member: np.array([place for shard in shards for place in shard.places.get(member, [])], np.int64)
            for member in members
        }
        self._keys = _named(members, naming, where)
        for member in self._keys.values():
            check_decoder(_extension(member), where)
        super().__init__(where, int(self._ends[-1]) if len(self._ends) else 0, ragged)

    def _read(self, indices: Index, names: Collection[str] | None) -> Values:
        names = names or [*self._keys]
        homes = np.searchsorted(self._ends, indices, side="right")
        values: dict[str, list[object]] = {name: [None] * len(indices) for name in names}
        for home in np.unique(homes):
            path = self._paths[home]
            with open_regular(path) as file:
                for at in np.flatnonzero(homes == home).tolist():
                    for name in names:
                        member = self._keys[name]
                        place, size = self._places[member][indices[at]].tolist()
                        data = os.pread(file.fileno(), size, place)
                        values[name][at] = self._decoded(data, size, member, path, int(indices[at]))
        found: dict[str, Array | Ragged] = {}
        for name in names:
            try:
                found[name] = stacked(values[name])
            except ValueError as error:
                raise UsageError(f"{self._where}: '{name}' of {numbered(indices)}: {error}") from None
        return found

    def _decoded(self, data: bytes, size: int, member: str, path: Path, index: int) -> object:
        try:
            if len(data) != size:
                raise ValueError(f"it ends after {len(data):,} of its {size:,} bytes")
            return DECODERS[_extension(member)](data)
        except BROKEN as error:
            raise UsageError(f"{path}: .{member} of sample {index} cannot be read: {reason(error)}") from None


def _named(members: Sequence[str], naming: Naming, where: str) -> dict[str, str]:
    """Maps each field to the ending of its members, `x.npy`; members with an extension that has no decoder are left out."""
    known = [member for member in members if _extension(member) in DECODERS]
    names = {member.rpartition(".")[0] or member: member for member in known}
    try:
        return {name: str(member) for name, member in naming.of(names, "a sample").items()}
    except Unfit as error:
        raise UsageError(f"{where}: {error}") from None


def shard_paths(given: object, where: str) -> list[Path]:
    """The files of a path, a glob or a list of such, those of a glob in order of their names; UsageError where there are none."""
    patterns = [str(one) for one in (given if isinstance(given, list | tuple) else [given])]
    found: list[Path] = []
    for pattern in patterns:
        if not pattern.endswith(_SUFFIX):
            raise UsageError(
                f"{where}: {pattern} is not a .tar file\n  help: give uncompressed .tar files, or a pattern: shards/train-*.tar"
            )
        files = [pattern] if Path(pattern).exists() else sorted(glob(pattern))
        if not files:
            raise UsageError(f"{where}: there is no file {pattern}")
        found += map(Path, files)
    return found


def _opened(path: Path) -> _Shard:
    """The samples of a file, with all that is wrong with it."""
    shard = _Shard(path)
    try:
        with open_regular(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            seen: set[str] = set()
            for key, ending, member in _members(archive):
                if not shard.samples or shard.samples[-1] != key:
                    if key in seen:
                        shard.problems.append(
                            f"{path}: the members of sample '{key}' do not follow one another\n"
                            "  help: write each sample's members one after the other: tar --sort=name"
                        )
                    shard.samples.append(key)
                    seen.add(key)
                places = shard.places.setdefault(ending, [])
                if len(places) == len(shard.samples):
                    shard.problems.append(
                        f"{path}: sample '{key}' has '.{ending}' twice\n  help: leave one of them out"
                    )
                    continue
                places += [(-1, 0)] * (len(shard.samples) - 1 - len(places))
                places.append((member.offset_data, member.size))
            if os.fstat(file.fileno()).st_size < archive.offset + _BLOCK:
                last = f" after sample '{shard.samples[-1]}'" if shard.samples else ""
                raise tarfile.ReadError(f"it has no end: it was cut short{last}")
    except (tarfile.TarError, *BROKEN) as error:
        shard.problems.append(f"{path}: it is not a whole .tar file: {reason(error)}\n  help: write or copy it again")
    return shard


def _members(archive: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """The files of an archive, each with the name of its sample and the ending that tells its field; hidden files are left out."""
    for member in archive:
        folder, _, name = member.name.rpartition("/")
        if member.isdir() or name.startswith((".", "__")):
            continue
        key, dot, ending = name.partition(".")
        if not member.isreg() or not dot or member.issparse():
            what = "has no extension" if member.isreg() else "is not a plain file"
            raise ValueError(f"its member {member.name} {what}")
        yield f"{folder}/{key}" if folder else key, ending.lower(), member


def _incomplete(shard: _Shard, endings: Sequence[str]) -> Iterator[str]:
    """Samples that lack a member that others have."""
    for ending in dict.fromkeys([*endings, *shard.places]):
        places = shard.places.get(ending, [])
        lacking = [k for k in range(len(shard.samples)) if k >= len(places) or places[k][0] < 0]
        if lacking and not shard.problems:
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            yield (
                f"{shard.path}: sample '{shard.samples[lacking[0]]}'{more} has no '.{ending}', which others have\n"
                f"  help: give every sample {quoted(endings)}"
            )


def _extension(member: str) -> str:
    return member.rpartition(".")[2]
