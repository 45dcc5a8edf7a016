"""Computes further numbers of progress lines, over all ranks: `report: [parameter_norm, tokens, memory]`.

The step itself computes `gradient_norm`.

    parameter_norm      the norm of all trained parameters together, in which each element counts once
    tokens_per_second   elements of the first integer input with two dims or more, such as the ids of (batch, seq)
    memory_bytes        the largest resident memory of a rank's process
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence

import numpy as np
from partc.runtime.artifact.dim_expression import parse

from ..checkpoint.ownership import owners
from ..errors import UsageError
from ..files.regular import text_of_system
from .trainer import Trainer

_AT_ONCE = 1 << 16
_INTEGERS = ("tensor(int64)", "tensor(int32)")


class Report:
    """Computes the numbers in `wanted`; UsageError where tokens are requested and no input has any."""

    def __init__(self, trainer: Trainer, wanted: Sequence[str]) -> None:
        self._trainer, self._wanted = trainer, frozenset(wanted)
        self._tokens = 0
        trained = {one.tensor for one in trainer.manifest.state if one.kind == "parameter" and one.next}
        self._owned = {
            one.value: one
            for some in owners([one for one in trainer.manifest.state if one.tensor in trained]).values()
            for one in some
            if one.rank == trainer.rank
        }
        ports = [one for one in trainer.ports if one.type in _INTEGERS and len(one.shape or ()) > 1]
        if "tokens" in self._wanted and not ports:
            raise UsageError("report: no input of integers has two dims, as token ids have\n  help: leave tokens out")
        symbols = trainer.manifest.symbols
        self._ids = [parse(dim, symbols) for dim in ports[0].shape or () if dim is not None] if ports else []

    def step(self) -> None:
        """Counts the tokens of the last step."""
        if "tokens" in self._wanted:
            sizes = self._trainer.program.agreement.sizes
            self._tokens += math.prod(dim(sizes) for dim in self._ids)

    def numbers(self, seconds: float) -> dict[str, float]:
        """Returns the numbers for the steps since the last call, which took `seconds`; collective."""
        numbers: dict[str, float] = {}
        if "parameter_norm" in self._wanted:
            squares = self._trainer.program.all_gather_text(repr(self._squares()))
            numbers["parameter_norm"] = math.sqrt(math.fsum(map(float, squares)))
        if "tokens" in self._wanted:
            numbers["tokens_per_second"], self._tokens = self._tokens / seconds, 0
        if "memory" in self._wanted:
            numbers["memory_bytes"] = max(map(float, self._trainer.program.all_gather_text(str(_resident()))))
        return numbers

    def _squares(self) -> float:
        """Returns the sum of squares over the elements of parameters that this rank owns."""
        terms = []
        for record, array in self._trainer.program.state.arrays():
            if (one := self._owned.get(record.value)) is not None:
                flat = np.ascontiguousarray(array[one.region.inside(one.held)]).reshape(-1)
                for at in range(0, flat.size, _AT_ONCE):
                    part = flat[at : at + _AT_ONCE].astype(np.float64)
                    terms.append(float(part @ part))
        return math.fsum(terms)


def _resident() -> int:
    """Returns the resident memory of this process in bytes; its peak on systems without /proc."""
    fields = text_of_system("/proc/self/statm").split()
    if len(fields) > 1:
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
