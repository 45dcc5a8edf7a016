"""Finds non-finite numbers in a step's outputs, in its inputs, and in the state.

A non-finite loss is reported on all ranks before anything else is done, with the non-finite inputs of each rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array

from ..artifact.format import Port, StateRecord
from ..errors import NonFiniteError

if TYPE_CHECKING:
    from ..execution.program import Program

STOP, WARN = "stop", "warn"
"""The reactions to a non-finite loss: training ends, or a warning is printed; with any other setting the step changes nothing."""
_AT_ONCE = 1 << 16
"""Numbers that are checked at a time, so that temporary arrays stay in the cache, however large the tensor is."""


@dataclass(frozen=True)
class PendingLoss:
    """A step, counted from 1, whose loss is not yet known to be finite on all ranks, with this rank's batch."""

    step: int
    bad: bool
    loss: str
    batch: Mapping[str, object]


def stopped(
    program: Program, name: str, untold: Sequence[PendingLoss], inputs: Iterable[Port], following: Mapping[str, object]
) -> NonFiniteError:
    """Returns the error for the first step whose loss is not finite on some rank, with the non-finite inputs of each rank; collective.

    `untold`: this rank's last steps. A batch that shares memory with a later one, or with `following`, is not inspected, since it was
    overwritten.
    """
    bad = next((one for one in untold if one.bad), None)
    told = program.all_gather_text(json.dumps([bad.step, bad.loss]) if bad else "")
    step, shown = min(json.loads(text) for text in told if text)
    at = next(place for place, one in enumerate(untold) if one.step == step)
    batch, later = untold[at].batch, [*(one.batch for one in untold[at + 1 :]), following]
    ports = [port for port in inputs if port.name in batch]
    again = any(is_same(batch[port.name], other.get(port.name)) for port in ports for other in later)
    cause = f"rank {program.rank}: its inputs were overwritten since" if again else ""
    causes = program.all_gather_text(cause or first_in_batch(batch, ports, program.rank))
    counted = [json.loads(text) for text in program.all_gather_text(json.dumps(without_labels(batch, ports)))]
    return NonFiniteError(nonfinite_loss(step, name, shown, causes, counted))


def is_same(value: object, other: object) -> bool:
    """Whether two inputs are the same array or may share memory, so that the first one's contents may have been overwritten."""
    arrays = isinstance(value, np.ndarray) and isinstance(other, np.ndarray)
    return value is other or (arrays and bool(np.may_share_memory(value, other)))


def is_finite(value: object) -> bool:
    """Whether all numbers of a value are finite; integers, bools and texts always are."""
    array = np.asarray(value)
    if array.ndim == 0 and array.dtype.kind == "f":
        return math.isfinite(array)  # for the loss of every step: a tenth of the time of numpy's isfinite
    if array.dtype.kind not in "fcV":
        return True
    flat = array.reshape(-1)
    parts = (flat[at : at + _AT_ONCE] for at in range(0, flat.size, _AT_ONCE))
    return all(bool(np.isfinite(one.astype(np.float32) if one.dtype.kind == "V" else one).all()) for one in parts)


def first_in_batch(batch: Mapping[str, object], ports: Iterable[Port], rank: int) -> str:
    """Describes a rank's first input that is not finite, with its record; empty where all inputs are finite."""
    for port in ports:
        if port.name not in batch or is_finite(batch[port.name]):
            continue
        array = np.asarray(batch[port.name])
        place = tuple(int(one) for one in np.argwhere(~np.isfinite(array))[0])
        box = port.box(rank)
        at = port.batch_dim
        begin = array.shape[at] * box[at][0] // (box[at][1] - box[at][0]) if place and box else 0
        where = f"record {begin + place[at]} of the batch" if place else "it"
        return f"rank {rank}: input '{port.name}': {where} holds {array[place]}"
    return ""


def without_labels(batch: Mapping[str, object], ports: Iterable[Port]) -> str | None:
    """Describes an input all of whose labels are ignored by the loss on this rank.

    '' where any label counts, None where the rank reads no labels.
    """
    described: str | None = None
    for port in ports:
        ignored = port.labels.ignored if port.labels is not None else []
        if not ignored or port.name not in batch:
            continue
        array = np.asarray(batch[port.name])
        if array.size and np.isin(array, ignored).all():
            numbers = ", ".join(str(number) for number in ignored if (array == number).any())
            return f"all {array.size:,} labels of '{port.name}' are {numbers}, which is ignored"
        described = described or ""
    return described


def not_finite(arrays: Iterable[tuple[StateRecord, Array]]) -> list[str]:
    """Returns the names of the tensors that have a non-finite number."""
    return [record.tensor for record, array in arrays if not is_finite(array)]


def nonfinite_loss(step: int, name: str, loss: Any, causes: Iterable[str], counted: Sequence[str | None] = ()) -> str:
    """Returns the message about a non-finite loss; `counted`: the result of `without_labels` of each rank."""
    why = [f"  {cause}" for cause in causes if cause]
    help = (
        "resume from the last checkpoint with other data, a smaller learning rate or `clip: {norm: 1}`; "
        "`on_nonfinite: skip` skips such steps"
    )
    none = [(rank, text) for rank, text in enumerate(counted) if text]
    if not why and none and all(text is None or text for text in counted):
        why = [f"  rank {rank}: {text}" for rank, text in none]
        why += ["  a mean of no losses is 0/0"]
        help = "give each batch a label that counts; `on_nonfinite: skip` skips such steps"
    elif not why and none:
        why = [f"  rank {rank}: {text}: with `reduction: sum_over_ranks` its mean is 0/0" for rank, text in none]
        why += ["  where the reduction is another one, a gradient or a parameter has become too large"]
        help = (
            "give each rank a label that counts, or take `reduction: mean`, which divides by the labels of the whole batch; "
            "`on_nonfinite: skip` skips such steps"
        )
    if not why:
        why = [
            "  the inputs of all ranks are finite: a gradient or a parameter has become too large, or a function has no finite "
            "value or slope where it was taken (sqrt or log at 0, 0/0)"
        ]
        help = (
            "resume from the last checkpoint with other data, a smaller learning rate or `clip: {norm: 1}`, or add a small number to what "
            "the model divides by or takes a root or a logarithm of; `on_nonfinite: skip` skips such steps"
        )
    return "\n".join([f"step {step}: the {name} is {loss}", *why, f"  help: {help}"])


def nonfinite_state(step: int, names: list[str]) -> str:
    """Returns the message about non-finite tensors, for which no checkpoint is written."""
    more = f" and {len(names) - 1} more hold" if len(names) > 1 else " holds"
    return (
        f"step {step}: '{names[0]}'{more} numbers that are not finite, so no checkpoint is written\n"
        "  help: resume from the last checkpoint with a smaller learning rate or `clip: {norm: 1}`"
    )
