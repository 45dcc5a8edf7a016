"""Estimates the memory that onnxruntime needs inside a rank's sessions besides inputs and outputs, without a session or a run.

Nodes run in the order of the file, each with the memory of what it makes and of what its kernel needs besides; what may be written over an
operand is (`artifact/liveness.py`). A constant weight that one node alone reads turned takes nothing here: it is turned once, while the
session is made, and lies in the weight's place. Sessions that share an arena (`ort.py`) take from it in turn. It grows by what is asked for
where no free chunk is large enough, and keeps what it has: values of odd sizes leave chunks that no other fits. Sessions of a decoder have
an arena each.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
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


@dataclass(eq=False)
class _Chunk:
    """Bytes of a block from an offset on, with the chunks beside it; `number` is that of its block."""

    number: int
    offset: int
    size: int
    free: bool = False
    before: _Chunk | None = None
    behind: _Chunk | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Orders free chunks: the smallest first, of equals the one in the block that was asked for first, then the one that begins it."""
        return self.size, self.number, self.offset


@dataclass
class _Block:
    """How much was asked for at once, and how much of it, from its begin, has been used."""

    size: int
    used: int = 0


@dataclass
class SharedArena:
    """onnxruntime's arena as all sessions of a process share it: for each block that it has asked for chunks beside each other."""

    blocks: list[_Block] = field(default_factory=list)
    _free: list[_Chunk] = field(default_factory=list)
    """In the order of their keys; no two of them lie beside each other."""

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
        """By rising last uses."""
        for at in sorted(begins):
            ended = bisect_left(held, at, key=itemgetter(0))
            for _, chunk in held[:ended]:
                self._give_back(chunk)
            del held[:ended]
            for one in begins[at]:
                insort(held, (one.last, self._take(one.bytes or 0)), key=itemgetter(0))
        for _, chunk in held:
            self._give_back(chunk)

    def grow(self, size: int) -> None:
        """Asks for a block in which there is room for so many bytes: for no more."""
        self._add(_Block(size))

    def _add(self, block: _Block) -> None:
        self._set_free(_Chunk(len(self.blocks), 0, block.size))
        self.blocks.append(block)

    def _take(self, bytes: int) -> _Chunk:
        """The smallest free chunk that is large enough, cut where twice as large; else one of a new block."""
        size = -(-bytes // _ALIGNED) * _ALIGNED
        if self._fitting(size) == len(self._free):
            self.grow(size)
        chunk = self._free.pop(self._fitting(size))
        chunk.free = False
        if (rest := chunk.size - size) >= size or rest >= _LARGEST_REST:
            left = _Chunk(chunk.number, chunk.offset + size, rest, before=chunk, behind=chunk.behind)
            if chunk.behind is not None:
                chunk.behind.before = left
            chunk.behind, chunk.size = left, size
            self._set_free(left)
        block = self.blocks[chunk.number]
        block.used = max(block.used, chunk.offset + chunk.size)
        return chunk

    def _fitting(self, size: int) -> int:
        """The place of the first free chunk of at least this size."""
        return bisect_left(self._free, size, key=lambda one: one.size)

    def _set_free(self, chunk: _Chunk) -> None:
        chunk.free = True
        insort(self._free, chunk, key=lambda one: one.key)

    def _give_back(self, chunk: _Chunk) -> None:
        """Frees a chunk, and joins it with its free neighbours."""
        if (behind := chunk.behind) is not None and behind.free:
            self._join(chunk, behind, behind)
        if (before := chunk.before) is not None and before.free:
            self._join(before, chunk, before)
            chunk = before
        self._set_free(chunk)

    def _join(self, left: _Chunk, right: _Chunk, free: _Chunk) -> None:
        """Makes two neighbours one, `left`; the one of them that is `free` is taken from the free ones."""
        del self._free[bisect_left(self._free, free.key, key=lambda one: one.key)]
        left.size += right.size
        left.behind = right.behind
        if left.behind is not None:
            left.behind.before = left


class OwnArena(SharedArena):
    """The arena of one session whose values grow from step to step: its blocks are of 1 MiB, 2 MiB, 4 MiB, and so on.

    Of the last block counts what a step uses, of those before it all, since smaller steps may have used them to their ends.
    """

    def grow(self, size: int) -> None:
        """Asks for blocks, each twice the one before, until there is room for so many bytes."""
        for block in self.blocks:
            block.used = block.size
        first = len(self.blocks)
        last = max(first, (-(-size // _FIRST_BLOCK) - 1).bit_length())
        for doubled in range(first, last):
            self._add(_Block(_FIRST_BLOCK << doubled, _FIRST_BLOCK << doubled))
        self._add(_Block(_FIRST_BLOCK << last))
