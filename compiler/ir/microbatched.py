"""What microbatches are of a program that does not train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Microbatched:
    """`count` microbatches; `records`: the graph's inputs and outputs that hold records of the batch, with the dim of these."""

    count: int
    records: Mapping[ir.Value, int]
