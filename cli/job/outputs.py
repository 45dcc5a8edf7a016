"""Gathers a run's outputs to rank 0, and writes them as one .npz or prints them as one line each.

The file is written completely or not at all, and its bytes depend on the values alone. A sequence `s` becomes the members
`s.0`, `s.1` and so on, an absent optional has no member, and types that numpy cannot write (bfloat16, float8, int4) become
float32, int8 or uint8, which represent them exactly.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from partc.cli.job.job import Job
from partc.cli.output import console
from partc.cli.output.table import Table
from partc.runtime.artifact.format import Manifest, Port
from partc.runtime.artifact.tensors.boxes import distinct, merge
from partc.runtime.artifact.tensors.dtypes import Array, Bytes, by_numpy
from partc.runtime.files.replace import replacing

if TYPE_CHECKING:
    from partc.runtime.communication.transport import Transport

Arrays = dict[str, Array]

_TAG = 17
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)
_ROWS = 8


def flatten(outputs: Mapping[str, Any]) -> Arrays:
    """Maps member names to arrays that an .npz can store."""
    arrays: Arrays = {}
    for name, value in outputs.items():
        if isinstance(value, list):
            arrays.update({f"{name}.{at}": _storable(item) for at, item in enumerate(value)})
        elif value is not None:
            arrays[name] = _storable(value)
    return arrays


def _storable(value: Any) -> Array:
    array = np.asarray(value)
    if array.dtype.kind == "O":
        return array.astype(np.str_)
    element = by_numpy(array.dtype)
    return array.astype(element.wide) if element is not None and element.wide else array


def gather(transport: Transport, manifest: Manifest, mine: Mapping[str, Any]) -> Arrays:
    """Gathers all outputs on rank 0, each from the lowest rank that has it; other ranks return their own. Collective.

    The shards of a sharded output come from ranks that together have all of it.
    """
    rank = transport.rank
    ports = [port for port in manifest.outputs if port.ranks]
    sent = {port.name: flatten({port.name: mine[port.name]}) for port in ports if rank in _owners(port)}
    heads = {name: [(key, one.dtype.str, one.shape) for key, one in arrays.items()] for name, arrays in sent.items()}
    arrays_of: dict[tuple[int, str], Arrays] = {(rank, name): arrays for name, arrays in sent.items()}
    under_way = []
    for other, text in enumerate(transport.all_gather_text(json.dumps(heads))):
        for name, rows in json.loads(text).items() if other != 0 == rank else ():
            arrays_of[other, name] = {key: np.empty(shape, dtype) for key, dtype, shape in rows}
            moving = [transport.irecv(_bytes(one), other, _TAG) for one in arrays_of[other, name].values()]
            under_way += [(one, f"the output '{name}' from rank {other}") for one in moving]
    for name, arrays in sent.items() if rank else ():
        for one in arrays.values():
            request = transport.isend(_bytes(np.ascontiguousarray(one)), 0, _TAG)
            under_way.append((request, f"the output '{name}' to rank 0"))
    for request, what in under_way:
        transport.wait(request, lambda what=what: what)  # type: ignore[misc]
    whole = flatten(mine)
    for port in ports if rank == 0 else ():
        parts = [arrays_of[owner, port.name] for owner in _owners(port)]
        if port.boxes is None:
            whole |= parts[0]
        else:
            whole[port.name] = merge([box for _, box in distinct(port)], [part[port.name] for part in parts])
    return whole


def _owners(port: Port) -> list[int]:
    """Returns the ranks that together have all of an output."""
    return [min(port.ranks)] if port.boxes is None else [owner for owner, _ in distinct(port)]


def _bytes(array: Array) -> Bytes:
    return array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)


def write(path: Path, arrays: Arrays) -> None:
    """Writes the .npz; whatever happens, the file at `path` is complete or unchanged."""
    with replacing(path) as out, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", _FIRST_DAY)
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def summary(arrays: Arrays) -> Table:
    """Returns a table with a row for each output: name, dtype, shape, range, mean, and the argmax along the last axis."""
    table = Table(["output", "dtype", "shape", ">min", ">mean", ">max", "argmax"])
    for name, array in arrays.items():
        table.add(name, array.dtype.name, f"[{', '.join(map(str, array.shape))}]", *_statistics(array))
    return table


OUTPUT_KEYS = ("name", "dtype", "shape", "min", "mean", "max")


def statistics(arrays: Arrays) -> list[tuple[Any, ...]]:
    """Returns the `OUTPUT_KEYS` of each output; min, mean and max are None for an array without numbers."""
    rows = []
    for name, array in arrays.items():
        numbers: tuple[float | None, ...] = (None, None, None)
        if array.size and array.dtype.kind in "biuf":
            wide = array.astype(np.float64)
            numbers = (float(wide.min()), float(wide.mean()), float(wide.max()))
        rows.append((name, array.dtype.name, array.shape, *numbers))
    return rows


def _statistics(array: Array) -> tuple[str, str, str, str]:
    if array.size == 0 or array.dtype.kind not in "biuf":
        sample = ", ".join(str(item) for item in array.reshape(-1)[:3])
        return "", "", "", sample
    wide = array.astype(np.float64) if array.dtype.kind == "f" else array
    numbers = (f"{wide.min():.6g}", f"{wide.mean():.6g}", f"{wide.max():.6g}")
    if array.ndim == 0 or array.shape[-1] < 2:
        return (*numbers, "")
    rows = array.reshape(-1, array.shape[-1])
    best = " ".join(str(at) for at in rows[:_ROWS].argmax(axis=-1))
    return (*numbers, f"{best} ..." if len(rows) > _ROWS else best)


def hand_over(job: Job, document: dict[str, object]) -> None:
    """Prints the command's JSON document, or sends it to the launching process, which prints it."""
    if job.run_dir is None:
        console.result(document)
    else:
        console.echo(console.DOCUMENT + json.dumps(console.plain(document)))
        sys.stdout.flush()
