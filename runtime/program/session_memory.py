"""Estimates the memory that onnxruntime needs inside a rank's sessions besides inputs and outputs, without a session or a run.

Nodes run in the order of the file, each with the memory of what it makes and of what its kernel needs besides; what may be written over an
operand is (`artifact/liveness.py`). A constant weight that one node alone reads turned takes nothing here: it is turned once, while the
session is made, and lies in the weight's place. Sessions that share an arena (`ort.py`) take from it in turn. It grows by what is asked for
where no free chunk is large enough, and keeps what it has: values of odd sizes leave chunks that no other fits. Sessions of a decoder have
an arena each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..artifact.graph.onnx_graph import reads
from ..artifact.liveness import Span, Use, spans
from ..artifact.tensors.dtypes import Dtype
from .steps import Segment

if TYPE_CHECKING:
    from onnx import NodeProto

Place = tuple[Dtype, tuple[int, ...]]
"""The type and the shape of a value."""
_ACTIVATIONS = ("Clip", "HardSigmoid", "LeakyRelu", "Relu", "Sigmoid", "Tanh")
_INTO_CONV = (*_ACTIVATIONS, "Add", "BatchNormalization")
"""Ops that onnxruntime makes one with the Conv whose result they read first: these, and more where its weights are constant."""
_IN_PLACE = "Relu"
_SCRATCH = "\n"
"""Begins a name that no value of a file has."""
_ALIGNED = 256
_FIRST_BLOCK = 1 << 20
_LARGEST_REST = 128 << 20
"""The bytes by which chunks of the arena are measured, and of what is left of one that is not kept with it."""


def inside(segment: Segment, place_of: Callable[[str], Place | None]) -> list[Span[str, int]]:
    """The places that the nodes of a session need beside its inputs and outputs.

    `place_of` gives the type and the shape of a value by its name in the session.
    """
    apart, constant = {*segment.inputs, *segment.outputs, *segment.initializers}, {*segment.initializers}
    readers = Counter(name for node in segment.nodes for name in reads(node))
    scratch: dict[str, int] = {}
    convolved: dict[str, tuple[Sequence[str], list[str]]] = {}
    uses = []
    for at, node in enumerate(segment.nodes):
        op, first = "" if node.domain else node.op_type, node.input[0] if node.input else ""
        taken, chain = convolved.get(first, ((), []))
        if op in taken and readers[first] == 1 and first not in apart:
            op, chain = _IN_PLACE, [*chain, first]
            convolved[node.output[0]] = taken, chain
            apart.update(chain if node.output[0] in apart else ())
        elif op == "Transpose" and first in constant and readers[first] == 1:
            apart.add(node.output[0])
        elif op == "Conv":
            convolved[node.output[0]] = _INTO_CONV if node.input[1] in constant else _ACTIVATIONS, []
        made = [name for name in node.output if name]
        for k, bytes in enumerate(_scratch(node, place_of)):
            scratch[f"{_SCRATCH}{at} {k}"] = bytes
            made.insert(k, f"{_SCRATCH}{at} {k}")
        uses.append(Use(list(reads(node)), made, op))

    def size(name: str) -> int | None:
        if name in scratch:
            return scratch[name]
        place = place_of(name)
        return None if place is None else place[0].bytes_of(place[1])

    return spans(uses, size, apart)


def _scratch(node: NodeProto, place_of: Callable[[str], Place | None]) -> list[int]:
    """The bytes that a kernel needs while it runs: Where selects from either side, each spread to the condition, before it joins both."""
    if node.domain or node.op_type != "Where":
        return []
    condition, *sides = (place_of(name) for name in node.input)
    return [side[0].bytes_of(np.broadcast_shapes(side[1], condition[1])) for side in sides if side and condition]


@dataclass
class _Chunk:
    size: int
    free: bool = False


@dataclass
class _Block:
    """What was asked for at once, and how much of it, from its begin, has been used."""

    chunks: list[_Chunk]
    used: int = 0


@dataclass
class SharedArena:
    """onnxruntime's arena as all sessions of a process share it: a list of chunks for each block that it has asked for."""

    blocks: list[_Block] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """What it has used of all blocks."""
        return sum(block.used for block in self.blocks)

    def run(self, session: Sequence[Span[str, int]]) -> None:
        """Takes and gives back what a session needs."""
        begins: dict[int, list[Span[str, int]]] = {}
        for one in session:
            if one.bytes:
                begins.setdefault(one.first, []).append(one)
        held: list[tuple[int, _Chunk]] = []
        for at in sorted(begins):
            for _, chunk in [one for one in held if one[0] < at]:
                self._give_back(chunk)
            held = [one for one in held if one[0] >= at]
            held += [(one.last, self._take(one.bytes or 0)) for one in begins[at]]
        for _, chunk in held:
            self._give_back(chunk)

    def grow(self, size: int) -> None:
        """Asks for a block in which there is room for so many bytes: for no more."""
        self.blocks.append(_Block([_Chunk(size, free=True)]))

    def _take(self, bytes: int) -> _Chunk:
        """The smallest free chunk that is large enough, cut where twice as large; else one of a new block."""
        size = -(-bytes // _ALIGNED) * _ALIGNED
        if (place := self._fitting(size)) is None:
            self.grow(size)
            place = self._fitting(size)
        assert place is not None
        block, k = place
        chunk = block.chunks[k]
        if chunk.size >= 2 * size or chunk.size - size >= _LARGEST_REST:
            block.chunks.insert(k + 1, _Chunk(chunk.size - size, free=True))
            chunk.size = size
        chunk.free = False
        block.used = max(block.used, sum(one.size for one in block.chunks[: k + 1]))
        return chunk

    def _fitting(self, size: int) -> tuple[_Block, int] | None:
        """The block and the place of the smallest free chunk of at least this size."""
        fitting = [
            (chunk.size, block, k)
            for block in self.blocks
            for k, chunk in enumerate(block.chunks)
            if chunk.free and chunk.size >= size
        ]
        return min(fitting, key=lambda one: one[0])[1:] if fitting else None

    def _give_back(self, chunk: _Chunk) -> None:
        """Frees a chunk, and joins it with its free neighbours."""
        chunk.free = True
        for block in self.blocks:
            if any(one is chunk for one in block.chunks):
                joined: list[_Chunk] = []
                for one in block.chunks:
                    if joined and joined[-1].free and one.free:
                        joined[-1].size += one.size
                    else:
                        joined.append(one)
                block.chunks[:] = joined


class OwnArena(SharedArena):
    """The arena of one session whose values grow from step to step: its blocks are of 1 MiB, 2 MiB, 4 MiB, and so on.

    Of the last block counts what a step uses, of those before it all, since smaller steps may have used them to their ends.
    """

    def grow(self, size: int) -> None:
        """Asks for blocks, each twice the one before, until there is room for so many bytes."""
        for block in self.blocks:
            block.used = sum(one.size for one in block.chunks)
        while (next := _FIRST_BLOCK << len(self.blocks)) < size:
            self.blocks.append(_Block([_Chunk(next, free=True)], next))
        self.blocks.append(_Block([_Chunk(next, free=True)]))
