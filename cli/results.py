"""A run's outputs: brought to rank 0, written as one .npz at once, or told in a line each.

The file appears whole or not at all, and its bytes depend on the values alone. A sequence `s` becomes the members `s.0`, `s.1` and so
on, an absent optional becomes none, and types that numpy has no file form for become float32, int8 or uint8, which hold them exactly.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from partc.cli.present import Table
from partc.runtime.cuts import distinct, merge
from partc.runtime.dtypes import Array, by_numpy
from partc.runtime.format import Manifest, Port
from partc.runtime.replace import replacing

if TYPE_CHECKING:
    from mpi4py import MPI

Arrays = dict[str, Array]

_TAG = 17
_CHUNK = 1 << 30
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)
_ROWS = 8


def flatten(outputs: Mapping[str, Any]) -> Arrays:
    """Outputs as arrays that an .npz can hold, by member name."""
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


def gather(comm: MPI.Comm, manifest: Manifest, mine: Mapping[str, Any]) -> Arrays:
    """All outputs on rank 0, each sent by the lowest rank that it is delivered to; on other ranks what they have.

    An output that is cut comes from the ranks that together have all of it.
    """
    rank = comm.Get_rank()
    gathered = flatten(mine)
    for port in manifest.outputs:
        if port.boxes is not None:
            gathered.update(_merged(comm, port, mine))
            continue
        if 0 in port.ranks or not port.ranks:
            continue
        owner = min(port.ranks)
        if rank == owner:
            _send(comm, flatten({port.name: mine[port.name]}))
        elif rank == 0:
            gathered.update(_receive(comm, owner))
    return gathered


def _merged(comm: MPI.Comm, port: Port, mine: Mapping[str, Any]) -> Arrays:
    """The whole of a cut output on rank 0; nothing on other ranks."""
    rank, chosen, pieces = comm.Get_rank(), distinct(port), []
    for owner, _ in chosen:
        if rank == owner != 0:
            _send(comm, flatten({port.name: mine[port.name]}))
        elif rank == 0:
            found = flatten({port.name: mine[port.name]}) if owner == 0 else _receive(comm, owner)
            pieces.append(found[port.name])
    return {port.name: merge([box for _, box in chosen], pieces)} if rank == 0 and pieces else {}


def _send(comm: MPI.Comm, arrays: Arrays) -> None:
    comm.send([(name, array.dtype.str, array.shape) for name, array in arrays.items()], 0, _TAG)
    for array in arrays.values():
        content = _bytes(np.ascontiguousarray(array))
        for start in range(0, len(content), _CHUNK):
            comm.Send(content[start : start + _CHUNK], 0, _TAG)


def _receive(comm: MPI.Comm, owner: int) -> Arrays:
    arrays: Arrays = {}
    for name, dtype, shape in comm.recv(source=owner, tag=_TAG):
        arrays[name] = np.empty(shape, dtype)
        content = _bytes(arrays[name])
        for start in range(0, len(content), _CHUNK):
            comm.Recv(content[start : start + _CHUNK], owner, _TAG)
    return arrays


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)


def write(path: Path, arrays: Arrays) -> None:
    """Writes the .npz; `path` is there whole or unchanged, whatever happens."""
    with replacing(path) as out, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", _FIRST_DAY)
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def summary(arrays: Arrays) -> Table:
    """A row per output: name, dtype, shape, range and mean, and along the last axis where the largest values are."""
    table = Table(["output", "dtype", "shape", ">min", ">mean", ">max", "argmax"])
    for name, array in arrays.items():
        table.add(name, array.dtype.name, _shape(array), *_figures(array))
    return table


OUTPUT_KEYS = ("name", "dtype", "shape", "min", "mean", "max")


def figures(arrays: Arrays) -> list[tuple[Any, ...]]:
    """Per output its `OUTPUT_KEYS`: numbers of an array that has some, else None."""
    found = []
    for name, array in arrays.items():
        numbers: tuple[float | None, ...] = (None, None, None)
        if array.size and array.dtype.kind in "biuf":
            wide = array.astype(np.float64)
            numbers = (float(wide.min()), float(wide.mean()), float(wide.max()))
        found.append((name, array.dtype.name, array.shape, *numbers))
    return found


def _shape(array: Array) -> str:
    return f"[{', '.join(map(str, array.shape))}]"


def _figures(array: Array) -> tuple[str, str, str, str]:
    if array.size == 0 or array.dtype.kind not in "biuf":
        sample = ", ".join(str(item) for item in array.reshape(-1)[:3])
        return "", "", "", sample
    wide = array.astype(np.float64) if array.dtype.kind == "f" else array
    figures = (f"{wide.min():.6g}", f"{wide.mean():.6g}", f"{wide.max():.6g}")
    if array.ndim == 0 or array.shape[-1] < 2:
        return (*figures, "")
    rows = array.reshape(-1, array.shape[-1])
    best = " ".join(str(at) for at in rows[:_ROWS].argmax(axis=-1))
    return (*figures, f"{best} ..." if len(rows) > _ROWS else best)
