"""Converts fields to the types and shapes of the model's inputs; fields that cannot be converted are reported before anything runs.

| field | input | |
|---|---|---|
| any | the same | unchanged |
| integers, bool | integers | a wider type always; a narrower one if the values of each batch fit |
| integers, bool | floats | if the float type has every value of the integer type: uint8 in float32, not int32 |
| floats | floats, complex | rounded once |
| text | text | |

All other conversions are refused. A record may lack dims of 1 or have additional ones: [28, 28] is accepted for [1, 28, 28].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from partc.runtime.artifact.tensors.boxes import slices
from partc.runtime.artifact.tensors.dtypes import Array, Dtype, by_numpy, dense

from ..artifact import dim_expression as expression
from ..artifact.format import Dim, Port
from ..errors import UsageError
from ..spellings import nearest
from .fields import Field

_TEXT = "tensor(string)"
_EXACT = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53, "complex64": 24, "complex128": 53}


@dataclass(frozen=True)
class Conversion:
    """The conversion of one field to one input."""

    port: Port
    dtype: Dtype | None
    shape: tuple[int, ...] | None
    """The shape to which a record is reshaped if dims of 1 must be added or removed, else None."""

    def shard(self, batch: Array, rank: int) -> Array:
        """Returns a rank's shard of these records along all dims but the first, contiguous and of the input's type."""
        if self.shape is not None:
            batch = batch.reshape(len(batch), *self.shape)
        if (box := self.port.box(rank)) is not None and len(box) > 1:
            try:
                batch = batch[:, *slices(box[1:], batch.shape[1:])]
            except ValueError as error:
                raise UsageError(f"input '{self.port.name}': a record's {error}") from None
        if self.dtype is None:
            return batch.astype(object)
        if batch.dtype.kind == "V" and by_numpy(batch.dtype) is None:
            batch = batch.view(self.dtype.numpy)
        if batch.dtype == self.dtype.numpy:
            return np.ascontiguousarray(batch)
        if batch.dtype.kind in "iu" and batch.size:
            self._hold(batch)
        return np.ascontiguousarray(batch, self.dtype.numpy)

    def _hold(self, batch: Array) -> None:
        """Raises UsageError where an integer is outside of the range of the input's type."""
        assert self.dtype is not None
        law, given = _range(self.dtype), np.iinfo(batch.dtype.name)
        if law is not None and not (law[0] <= given.min and given.max <= law[1]):
            least, most = int(batch.min()), int(batch.max())
            if least < law[0] or most > law[1]:
                raise UsageError(
                    f"input '{self.port.name}': the data goes from {least} to {most}, "
                    f"{self.port.type} from {law[0]} to {law[1]}\n  help: make its values smaller by a transform"
                )


def conversions(
    ports: Sequence[Port], fields: Mapping[str, Field], batch: int
) -> tuple[dict[str, Conversion], list[str]]:
    """Maps each input to the conversion of its field; also returns a list of all differences between data and model."""
    conversion_of: dict[str, Conversion] = {}
    sizes: dict[str, list[int | None]] = {}
    problems: list[str] = []
    names = ", ".join(f"'{name}'" for name in fields) or "none"
    for port in ports:
        if port.name not in fields:
            near = nearest(port.name, fields, 1)
            help = f"\n  help: write fields: {{{port.name}: {near[0]}}}" if near else ""
            problems.append(f"input '{port.name}' ({described(port)}) has no field; the fields are {names}{help}")
            continue
        field, dtype = fields[port.name], dense(port.type)
        if dtype is None and port.type != _TEXT:
            problems.append(f"input '{port.name}' is a {port.type}; data provides plain tensors only")
            continue
        differ = f"input '{port.name}': records are {field}, the model takes {described(port)}"
        if fault := _type_fault(field.dtype, dtype):
            problems.append(f"{differ}\n  {fault}")
        shape = _shape(port, field)
        if shape is None:
            problems.append(f"{differ}\n  help: give records of its dims after the first, which is the batch")
            continue
        sizes[port.name] = [batch, *([None] if field.ragged else []), *shape]
        conversion_of[port.name] = Conversion(port, dtype, None if field.ragged or shape == field.shape else shape)
    problems += _differences([port for port in ports if port.name in sizes and port.shape is not None], sizes)
    return conversion_of, problems


def _differences(ports: Sequence[Port], sizes: Mapping[str, list[int | None]]) -> Iterator[str]:
    """Yields a problem for each dim that differs from the model's number, or from the size that another dim has bound to its name."""
    bindings: dict[str, int] = {}
    dims = [(port, axis, dim) for port in ports for axis, dim in enumerate(port.shape or ())]
    for port, axis, dim in dims:
        size = sizes[port.name][axis]
        if size is not None and isinstance(dim, str) and dim.isidentifier():
            bindings.setdefault(dim, size)
    for port, axis, dim in dims:
        size, wanted = sizes[port.name][axis], _evaluated(dim, bindings)
        if size is not None and wanted not in (None, size):
            what = "batches have" if axis == 0 else "records have"
            said = f"{wanted}" if isinstance(dim, int) else f"{wanted} by '{dim}'"
            yield f"input '{port.name}' axis {axis}: {what} {size}, the model takes {said}, {described(port)}"


def _evaluated(dim: Dim, bindings: Mapping[str, int]) -> int | None:
    """Returns the size of a dim; None where it depends on an unbound name."""
    try:
        promise = expression.parse(dim, bindings)
        return promise(bindings) if promise.names <= bindings.keys() else None
    except ValueError:
        return None


def described(port: Port) -> str:
    """Returns a port as messages show it: `tensor(float) [batch, 10]`."""
    return port.type if port.shape is None else f"{port.type} [{', '.join(map(str, port.shape))}]"


def _type_fault(dtype: np.dtype[np.generic], required: Dtype | None) -> str:
    """Returns the reason why a type cannot be converted to another, as help for the user; empty where it can."""
    if required is None:
        return "" if dtype.kind in "OUST" else "help: give text"
    known = by_numpy(dtype.newbyteorder("="))
    if known == required:
        return ""
    if known is None:
        same = dtype.kind == "V" and required.wide and dtype.itemsize == required.numpy.itemsize
        return "" if same else "help: give numbers"
    if dtype.kind in "iub":
        if _range(required) or required.name == "bool":
            return "help: convert it by a transform" if required.name == "bool" else ""
        bits = known.bits - (dtype.kind == "i") if dtype.kind != "b" else 1
        if bits <= _EXACT.get(required.shown, 0):
            return ""
        return f"{dtype} has values that {required.shown} cannot hold\n  help: convert it by a transform"
    if dtype.kind == "f" or known.wide == "float32":
        floats = not _range(required) and required.name != "bool"
        return "" if floats else "help: whole numbers are not made of floats; convert it by a transform"
    return "" if dtype.kind == "c" and required.name.startswith("complex") else "help: convert it by a transform"


def _range(dtype: Dtype) -> tuple[int, int] | None:
    """Returns the least and the greatest value of an integer type; None for other types."""
    if dtype.name.startswith("uint"):
        return 0, 2**dtype.bits - 1
    return (-(2 ** (dtype.bits - 1)), 2 ** (dtype.bits - 1) - 1) if dtype.name.startswith("int") else None


def _shape(port: Port, field: Field) -> tuple[int, ...] | None:
    """Returns a record's shape without the ragged dim and with as many dims as the input has; None where that is not possible."""
    if port.shape is None:
        return field.shape
    dims = port.shape[1 + field.ragged :]
    if not port.shape or len(port.shape) < 1 + field.ragged:
        return None
    if len(dims) == len(field.shape):
        return field.shape
    whole = [dim for dim in dims if isinstance(dim, int)]
    alike = [dim for dim in whole if dim != 1] == [dim for dim in field.shape if dim != 1]
    return tuple(whole) if alike and len(whole) == len(dims) and not field.ragged else None
