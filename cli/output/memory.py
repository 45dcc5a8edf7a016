"""The memory of each rank by target as a table; `compiler/cost/memory.py` says what its columns are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from partc.cli.output.table import Table
from partc.runtime.units import size_text

if TYPE_CHECKING:
    from partc.compiler.cost.memory import RankMemory


def memory_table(memory: Sequence[RankMemory]) -> Table:
    """A row for each target of each rank; columns without bytes on any are left out."""
    rows = [(one.rank, target) for one in memory for target in one.targets]
    columns = {
        "weights": [target.weights + target.parameters for _, target in rows],
        "optimizer": [target.optimizer for _, target in rows],
        "caches": [target.caches for _, target in rows],
        "inputs, outputs": [target.inputs_outputs for _, target in rows],
        "between segments": [target.between for _, target in rows],
        "inside segments": [target.inside for _, target in rows],
        "sessions": [target.sessions for _, target in rows],
        "messages": [target.messages for _, target in rows],
        "evaluation": [target.evaluation for _, target in rows],
        "loading": [target.loading for _, target in rows],
    }
    columns = {name: bytes for name, bytes in columns.items() if any(bytes)}
    table = Table([">rank", "target", *(f">{name}" for name in columns), ">peak memory"], title="memory")
    for k, (rank, target) in enumerate(rows):
        peak = size_text(target.peak) + ("+?" if target.unknown else "")
        table.add(rank, target.target, *(size_text(bytes[k]) for bytes in columns.values()), peak)
    return table
