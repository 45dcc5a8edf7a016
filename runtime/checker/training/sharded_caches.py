"""Proves that ranks which share the entries of caches append each entry once, and that a token attends each entry before it once.

Block k of a chunk of a sequence's entries belongs to shard k modulo p (`artifact/generation.py`). What a rank does with an entry depends on
positions and constants alone, so the checker computes it from the rank file for the positions that a step can have:

    GroupQueryAttention(.., cache_k, cache_v, ends, total)    ends is the number of the slot's entries on the rank, and the new ones, less 1
    Where(seen, scores, hidden)                               seen is true for exactly these entries, of the new ones up to the token's own

Of more than `MOST` positions an evenly spaced selection is computed, and of masks, which are as large as scores, those of few positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper
from partc.runtime.artifact.format import CACHE, DOMAIN, Manifest, StateRecord
from partc.runtime.artifact.generation import GenerationRecord
from partc.runtime.artifact.graph.cache_append import entries_axis
from partc.runtime.artifact.graph.onnx_graph import integer_of, node_title, path_of, text_of
from partc.runtime.artifact.graph.rank_constants import constant_of, group_of, is_rank_constant
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.checker.subject import Subject
from partc.runtime.errors import Violation

MOST, _FEW = 8192, 6
_LARGEST = 1 << 24
"""The most elements of a value that is computed."""
_AGAIN = "compile the model again"
_OF_ONE = ("Gather", "ReduceMax", "Reshape", "Slice", "Squeeze", "Unsqueeze")
"""Ops whose result has no more elements than their first operand; further operands say how it is taken."""
_PARTS = ("Gather", "Slice")
"""Ops by which a rank takes its own slots of a step's."""
_VIEWS = ("Cast", "Identity", "Unsqueeze")
"""Ops between the scores of an attention and their mask."""
_CACHES, _ENDS, _TOTAL, _SCORES = (3, 4), 5, 6, 3
"""The operands of the fused op, and its output of scores."""
_Kernel: TypeAlias = Callable[..., Any]
_KERNELS: Mapping[str, _Kernel] = {
    "Add": np.add,
    "And": np.logical_and,
    "Cast": lambda x: x,
    "Div": np.floor_divide,
    "Equal": np.equal,
    "Expand": lambda x, shape: np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(map(int, shape)))),
    "Gather": lambda x, k: x[k],
    "GreaterOrEqual": np.greater_equal,
    "Identity": lambda x: x,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Max": np.maximum,
    "Min": np.minimum,
    "Mod": np.mod,
    "Mul": np.multiply,
    "Range": lambda begin, end, step: np.arange(begin.item(), end.item(), step.item()),
    "ReduceMax": lambda x: x.max(keepdims=True),
    "Reshape": lambda x, shape: x.reshape([x.shape[k] if size == 0 else int(size) for k, size in enumerate(shape)]),
    "Slice": lambda x, begin, end, axes: x[begin.item() : end.item()],
    "Squeeze": lambda x, axes: np.squeeze(x, tuple(map(int, axes))),
    "Sub": np.subtract,
    "Unsqueeze": lambda x, axes: np.expand_dims(x, tuple(map(int, axes))),
    "Where": np.where,
}
"""The ops of positions, on arrays: Gather and Slice along the only dim of a vector, ReduceMax of all of one."""


def check_sharded_caches(subject: Subject) -> Iterator[Violation]:
    """Yields the nodes of a program by which ranks would append or attend an entry on another rank than its own, the first of each rank."""
    record, manifest = subject.generation, subject.manifest
    caches = [one for one in manifest.state if one.kind == CACHE and one.next]
    if record is None or not caches:
        return
    if record.cut == 1:
        for cache in caches:
            axis = entries_axis(subject.models[cache.ranks[0]], cache)
            if axis is not None and cache.shard(cache.ranks[0])[axis][2] > 1:
                fact = f"'{cache.value}' is cut along its entries, and the generation names no ranks that share them"
                yield Violation(manifest.program(cache.ranks[0]), fact, help=_AGAIN)
                return
        return
    ids = next((port for port in manifest.inputs if port.name == record.tokens), None)
    tokens = ids.shape[1] if ids is not None and ids.shape is not None and len(ids.shape) == 2 else None
    if not isinstance(tokens, int):
        fact = f"the tokens of a step, '{record.tokens}', have no fixed number: ranks that share caches need it"
        yield Violation(manifest.program(0), fact, help=_AGAIN)
        return
    known = dict[tuple[int, int], Violation | None]()
    for rank, model in subject.models.items():
        kept = [one for one in caches if rank in one.ranks]
        for place in {_place(one, rank, record.cut, model) for one in kept}:
            file = _File(manifest.program(rank), model, manifest, rank, record, tokens)
            if (id(model), place) not in known:
                known[id(model), place] = next(file.violations(kept, place), None)
                if (violation := known[id(model), place]) is not None:
                    yield violation


def _place(cache: StateRecord, rank: int, cut: int, model: ModelProto) -> int:
    """Returns which shard of a cache's entries a rank has; -1 where they are not cut into `cut`."""
    axis = entries_axis(model, cache)
    begin, end, of = (0, 1, 1) if axis is None else cache.shard(rank)[axis]
    return begin if of == cut and end == begin + 1 else -1


class _Unknown(Exception):
    """A value depends on more than positions and constants."""


def _shape(node: NodeProto, dims: Sequence[int]) -> Array:
    """Returns the result of a Shape."""
    return np.array(dims[integer_of(node, "start", 0) : integer_of(node, "end", len(dims))], np.int64)


class _File:
    """The file of one rank, whose values are computed for positions."""

    def __init__(
        self, name: str, model: ModelProto, manifest: Manifest, rank: int, record: GenerationRecord, tokens: int
    ) -> None:
        self.name, self.graph, self.record, self.tokens = name, model.graph, record, tokens
        self.groups, self.rank = manifest.groups_of(rank), rank
        self.makers = {made: node for node in model.graph.node for made in node.output}
        self.constants = {one.name: one for one in model.graph.initializer}
        self.slots = self._slots_of_all(manifest)

    def violations(self, caches: Sequence[StateRecord], place: int) -> Iterator[Violation]:
        """Yields the violations of the rank that has shard `place` of these caches."""
        names = {one.value for one in caches}
        nodes = [node for node in self.graph.node if node.op_type == "GroupQueryAttention"]
        appended = [node.input[k] for node in nodes for k in _CACHES if len(node.input) > _TOTAL]
        if place < 0 or not names <= {*appended}:
            fact = f"rank {self.rank} has no shard of the entries of '{caches[0].value}', or does not append to it"
            yield Violation(self.name, f"{fact}; each of {self.record.cut} ranks has one", help=_AGAIN)
            return
        every = range(0, self.record.length, self.tokens)
        positions, proven = np.array(every[:: -(-len(every) // MOST)], np.int64), set[str]()
        for node in nodes:
            yield from self._append(node, positions, place)
            mask = self._mask_of(node)
            if mask is None:
                yield self._violation(node, "no Where hides the scores of entries that are not in the rank's shard")
            elif mask[1] not in proven:
                proven.add(mask[1])
                yield from self._mask(*mask, place)

    def _slots_of_all(self, manifest: Manifest) -> int:
        """Returns how many slots' positions a step of all ranks has, where the rank takes its own of them; 1 where all are its own."""
        port = next((port for port in manifest.inputs if port.name == self.record.position), None)
        is_cut = any(node.op_type in _PARTS and node.input[0] == self.record.position for node in self.graph.node)
        slots = port.shape[0] if is_cut and port is not None and port.shape else 1
        return slots if isinstance(slots, int) else 1

    def _by_position(self, name: str, positions: Array) -> Array:
        """Returns a value at each of these positions, which all slots of a step have at one time."""
        if self.slots == 1:
            return self._computed(name, positions)
        by_slot = [self._computed(name, np.full(self.slots, position, np.int64)) for position in positions]
        if any(not one.size or (one != one.flat[0]).any() for one in by_slot):
            raise _Unknown("it differs by slot where positions do not")
        return np.array([one.flat[0] for one in by_slot])

    def _entries(self, positions: Array, place: int) -> Array:
        """Returns the numbers of entries that shard `place` has of sequences with these positions."""
        block, cut = positions // self.record.chunk, self.record.cut
        full = (block + cut - 1 - place) // cut * self.record.chunk
        return np.asarray(full + np.where(block % cut == place, positions % self.record.chunk, 0))

    def _append(self, node: NodeProto, positions: Array, place: int) -> Iterator[Violation]:
        try:
            ends, total = (self._by_position(node.input[k], positions) for k in (_ENDS, _TOTAL))
        except _Unknown as error:
            yield self._violation(node, f"its entries cannot be computed: {error}")
            return
        wanted = self._entries(positions, place) + self.tokens - 1
        if ends.shape != wanted.shape:
            yield self._violation(node, f"it has the ends of {ends.size} slots, and a step has {wanted.size}")
        elif len(wrong := np.flatnonzero(ends != wanted)):
            at = wrong[0]
            fact = f"on rank {self.rank} the new entries at position {positions[at]} end at {ends[at]}; they end at {wanted[at]}"
            yield self._violation(
                node, f"{fact}, after the rank's {wanted[at] + 1 - self.tokens} entries of the sequence"
            )
        elif not wanted.max() < total.max() <= self.record.room_for_entries:
            fact = f"on rank {self.rank} it attends up to {total.max()} entries of at least {wanted.max() + 1}"
            yield self._violation(node, f"{fact}, and there is room for {self.record.room_for_entries}")

    def _mask(self, node: NodeProto, mask: str, place: int) -> Iterator[Violation]:
        chunk, cut = self.record.chunk, self.record.cut
        last = (self.record.length - self.tokens) // self.tokens * self.tokens
        blocks = {chunk * k for k in (0, 1, cut - 1, cut, cut + 1)} | {last}
        for position in sorted(at for at in blocks if at <= last)[:_FEW]:
            try:
                seen = self._computed(mask, np.full(self.slots, position, np.int64))
            except _Unknown as error:
                yield self._violation(node, f"its mask cannot be computed: {error}")
                return
            ends = int(self._entries(np.array([position], np.int64), place)[0]) + np.arange(self.tokens)
            wanted = np.arange(seen.shape[-1] if seen.ndim else 0)[None] <= ends[:, None]
            if seen.ndim > 1 and (seen == seen[:, :1]).all():  # all slots have one position
                seen = seen[:, :1]
            if seen.shape != (1, 1, 1, *wanted.shape) or len(wanted[0]) <= ends[-1] or (seen[0, 0, 0] != wanted).any():
                fact = (
                    f"on rank {self.rank} its mask at position {position} is not that of the rank's {ends[0]} entries"
                )
                yield self._violation(node, f"{fact} and the step's; each entry is attended on one rank")
                return

    def _mask_of(self, node: NodeProto) -> tuple[NodeProto, str] | None:
        """Returns the Where that hides scores of an attention, with its condition; None if another op reads them."""
        scores = node.output[_SCORES] if len(node.output) > _SCORES else ""
        while scores:
            readers = [one for one in self.graph.node if scores in one.input]
            if len(readers) != 1:
                return None
            (reader,) = readers
            if reader.op_type == "Where" and list(reader.input).index(scores) == 1:
                return reader, reader.input[0]
            scores = reader.output[0] if reader.op_type in _VIEWS and not reader.domain else ""
        return None

    def _computed(self, name: str, positions: Array) -> Array:
        """Returns a value of a step whose slots have these positions; _Unknown if it depends on more."""
        known = dict[str, Array]()
        waiting = [name]
        while waiting:
            value = waiting[-1]
            node = self.makers.get(value)
            if value in known:
                waiting.pop()
            elif value == self.record.position:
                known[value] = positions
            elif value in self.constants:
                if self.constants[value].external_data or math.prod(self.constants[value].dims) > _LARGEST:
                    raise _Unknown(f"'{value}' is a weight")
                known[value] = numpy_helper.to_array(self.constants[value])
            elif node is None:
                raise _Unknown(f"it depends on '{value}'")
            elif node.op_type == "Shape" and node.input[0] == self.record.tokens:
                known[value] = _shape(node, [len(positions), self.tokens])
            elif missing := [each for each in node.input if each and each not in known]:
                if len(waiting) > len(self.makers):
                    raise _Unknown("it depends on itself")
                waiting += missing
            else:
                known[value] = self._made(node, [known[each] for each in node.input if each])
        return known[name]

    def _made(self, node: NodeProto, operands: Sequence[Array]) -> Array:
        """Returns the result of a node."""
        if is_rank_constant(node):
            return constant_of(node, self.groups[group_of(node)].index(self.rank))
        if node.domain == DOMAIN and node.op_type == "AllReduce" and text_of(node, "reduce") == "max":
            return operands[0]  # all ranks are given the same positions
        if node.op_type == "Shape" and not node.domain:
            return _shape(node, operands[0].shape)
        kernel = _KERNELS.get(node.op_type) if not node.domain else None
        if kernel is None:
            raise _Unknown(f"{node_title(node)} is not an op of positions")
        if node.op_type == "Range":
            begin, end, step = (one.item() for one in operands)
            size = (end - begin) / step if step else math.inf
        elif node.op_type == "Expand":
            size = math.prod(map(int, operands[1])) * operands[0].size
        else:
            size = 1 if node.op_type in _OF_ONE else math.prod(np.broadcast_shapes(*[one.shape for one in operands]))
        if size > _LARGEST:
            raise _Unknown(f"{node_title(node)} has more than {_LARGEST:,} elements")
        return np.asarray(kernel(*operands))

    def _violation(self, node: NodeProto, fact: str) -> Violation:
        return Violation(self.name, fact, node_title(node), path_of(node), _AGAIN)
