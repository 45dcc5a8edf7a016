"""The memory of each rank by target as a table: what it holds from step to step, and what a step takes beside that.

weights             what is read there, and parameters and statistics that lie there; a weight counts on every target that reads it
optimizer           what else a training keeps from step to step and lies there
caches              keys and values of tokens, which a decoder keeps there
inputs, outputs     those of two steps, in a training with the batches that are read ahead
between segments    the arena of the values that segments, copies and messages hand on: exactly the bytes that the runtime asks for
inside segments     what onnxruntime takes for values and kernels inside of them
sessions            what onnxruntime and the runtime hold of each session and node
messages            slots of messages and rooms of collectives: memory that ranks of one host share, which counts on each that uses it
evaluation          values between and inside of segments, and sessions, of the program that evaluates a training
loading             what onnxruntime needs to lay out the weights of convolutions, before the first step
peak memory         weights, optimizer, caches, sessions and messages with the rest of a step, or with loading where that is more
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from partc.cli.output.table import Table
from partc.runtime.errors import UsageError
from partc.runtime.units import size_text

if TYPE_CHECKING:
    from partc.runtime.artifact.manifest import Artifact
    from partc.runtime.execution.memory.parts import RankMemory
    from partc.runtime.program.rank_file import RankFile


def memory_of_ranks(
    artifact: Artifact,
    sizes: Mapping[str, int],
    ranks: Sequence[int] | None = None,
    files: Mapping[str, RankFile] | None = None,
) -> list[RankMemory]:
    """The memory of every rank, or of some, those of one file at once; UsageError where a dim is not a whole number at them.

    `files`: by name the rank files that are read already.
    """
    from partc.runtime.execution.memory.needed import rank_memory

    manifest = artifact.manifest
    by_file: dict[str, RankMemory] = {}
    found = []
    for rank in range(manifest.ranks) if ranks is None else ranks:
        file = manifest.program(rank)
        if file not in by_file:
            try:
                by_file[file] = rank_memory(artifact, rank, sizes, (files or {}).get(file))
            except ValueError as error:
                chosen = ", ".join(f"{name}={size}" for name, size in sizes.items())
                raise UsageError(f"{artifact.folder}: at {chosen}: {error}\n  help: --set other sizes") from None
        found.append(replace(by_file[file], rank=rank))
    return found


def memory_json(memory: Sequence[RankMemory]) -> list[dict[str, object]]:
    """The same for machines, in bytes."""
    return [
        {
            **asdict(one),
            "targets": [
                {
                    "target": target.target,
                    **vars(target.resident),
                    **vars(target.step),
                    "loading": target.loading,
                    "unknown": target.unknown,
                    "peak": target.peak,
                }
                for target in one.targets
            ],
            "peak": one.peak,
        }
        for one in memory
    ]


def memory_table(memory: Sequence[RankMemory]) -> Table:
    """A row for each target of each rank; columns without bytes on any are left out."""
    rows = [(one.rank, target) for one in memory for target in one.targets]
    columns = {
        "weights": [target.resident.weights + target.resident.parameters for _, target in rows],
        "optimizer": [target.resident.optimizer for _, target in rows],
        "caches": [target.resident.caches for _, target in rows],
        "inputs, outputs": [target.step.inputs_outputs for _, target in rows],
        "between segments": [target.step.between for _, target in rows],
        "inside segments": [target.step.inside for _, target in rows],
        "sessions": [target.resident.sessions for _, target in rows],
        "messages": [target.resident.messages for _, target in rows],
        "evaluation": [target.step.evaluation for _, target in rows],
        "loading": [target.loading for _, target in rows],
    }
    columns = {name: bytes for name, bytes in columns.items() if any(bytes)}
    table = Table([">rank", "target", *(f">{name}" for name in columns), ">peak memory"], title="memory")
    for k, (rank, target) in enumerate(rows):
        peak = size_text(target.peak) + ("+?" if target.unknown else "")
        table.add(rank, target.target, *(size_text(bytes[k]) for bytes in columns.values()), peak)
    return table
