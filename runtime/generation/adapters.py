"""Loads and unloads adapters while requests run: the weights of a peft file are written into a free place of the ranks' stacks.

Each rank reads its shard of the same file, between two steps. A place is free if it has no name, and all sequences that joined under an
earlier name have ended.

    A [place, :inputs, :rank] = lora_A^T        B [place, :rank, :outputs] = scale * lora_B^T        zeros elsewhere
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..artifact.format import ADAPTER, Manifest, StateRecord
from ..artifact.tensors.boxes import region
from ..artifact.tensors.dtypes import Array
from ..artifact.tensors.safetensors_stream import MappedFile, read_header, tensor_in
from ..execution.program import Program

_PEFT = "base_model.model."


@dataclass(frozen=True)
class AdapterChange:
    """An adapter to load, or to unload if it has no file; `scales` maps each module to the factor of its product."""

    name: str
    file: str = ""
    scales: Mapping[str, float] | None = None

    def packed(self) -> list[object]:
        """The change as a list for JSON."""
        return [self.name, self.file, self.scales]


def stacks_of(manifest: Manifest) -> dict[str, tuple[int, int, int]]:
    """Maps each module with room for adapters to the number of inputs, the number of outputs, and the largest rank of its adapters."""
    shapes = {one.tensor: one.shape for one in manifest.state if one.kind == ADAPTER}
    return {
        name.removesuffix(".lora_A.stack"): (shape[1], shapes[name.replace(".lora_A.", ".lora_B.")][2], shape[2])
        for name, shape in shapes.items()
        if name.endswith(".lora_A.stack")
    }


def write_adapter(ranks: Sequence[Program], place: int, change: AdapterChange) -> None:
    """Writes an adapter into a place of the stacks of this process's ranks; raises OSError or ValueError if its file has changed."""
    path, scales = Path(change.file), change.scales or {}
    tensors = {name.removeprefix(_PEFT): one for name, one in read_header(path).items()}
    data = MappedFile.of(path).data
    if len(tensors) != 2 * len(scales):
        raise ValueError(f"has {len(tensors)} tensors, and had {2 * len(scales)}")

    def factor(module: str, key: str) -> Array:
        stored = tensors.get(f"{module}.lora_{key}.weight")
        if stored is None or len(stored.shape) != 2:
            raise ValueError(f"has no lora_{key} of '{module}' any more")
        whole = tensor_in(data, stored).astype(np.float32).T
        return whole if key == "A" else np.asarray(whole * np.float32(scales[module]))

    for program in ranks:

        def write(record: StateRecord, array: Array, rank: int = program.rank) -> None:
            module, key, _ = record.tensor.rsplit(".", 2)
            (begin, *_), (end, *_) = (here := region(record.shard(rank), record.shape)).begin, here.end
            if not begin <= place < end:
                return
            mine = array[place - begin]
            mine.fill(0)
            if module in scales:
                part = factor(module, key[-1])[here.slices[1:]]
                mine[: part.shape[0], : part.shape[1]] = part

        program.state.fill(write, {one.tensor for one in program.state.records if one.kind == ADAPTER})
