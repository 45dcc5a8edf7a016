"""Proves that ranks which share the entries of caches append each entry once, and that a token attends each entry before it once.

Block k of a chunk of a sequence's entries belongs to shard k modulo p (`artifact/generation.py`). What a rank does with an entry depends on
positions and constants alone, so the checker computes it from the rank file for the positions that a step can have:

    TensorScatter(cache, new, index)     index is the entry's row on the rank that has it, and the begin of the spare block on all others
    Add(scores, bias)                    bias is 0 for exactly the rows whose entries are not after the token, and all of these are read

Of more than `MOST` positions an evenly spaced selection is computed, and of biases, which are as large as scores, those of few positions.
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
_SCORING = ("Cast", "Div", "MatMul", "Mul", "Reshape", "Slice", "Tanh", "Transpose")
"""Ops from a cache to the Add of a mask."""
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


def check_cut_caches(subject: Subject) -> Iterator[Violation]:
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

    def violations(self, caches: Sequence[StateRecord], place: int) -> Iterator[Violation]:
        """Yields the violations of the rank that has shard `place` of these caches."""
        by_name = {one.value: one for one in caches}
        appends = [node for node in self.graph.node if node.op_type == "TensorScatter" and node.input[0] in by_name]
        if len(appends) < len(by_name) or place < 0:
            fact = f"rank {self.rank} has no shard of the entries of '{caches[0].value}', or does not append to it"
            yield Violation(self.name, f"{fact}; each of {self.record.cut} ranks has one", help=_AGAIN)
            return
        every = range(0, self.record.length, self.tokens)
        positions = np.array(every[:: -(-len(every) // MOST)], np.int64)
        for node in appends:
            yield from self._append(node, positions, place)
        masks = dict(self._biases([node.output[0] for node in appends]))
        for node, bias in masks.values():
            yield from self._mask(node, bias, place)
        if 2 * len(masks) != len(appends):
            fact = f"{len(masks)} masks are added to scores of keys in {len(appends)} caches of keys and values"
            yield Violation(self.name, f"{fact}; scores of each layer have one", help=_AGAIN)

    def _append(self, node: NodeProto, positions: Array, place: int) -> Iterator[Violation]:
        chunk, cut = self.record.chunk, self.record.cut
        try:
            index = self._computed(node.input[2], positions)
        except _Unknown as error:
            yield self._violation(node, f"its index cannot be computed: {error}")
            return
        block = positions // chunk
        rows = np.where(
            block % cut == place, block // cut * chunk + positions % chunk, self.record.room_for_entries - chunk
        )
        wrong = np.flatnonzero(np.broadcast_to(index, rows.shape) != rows) if index.size in (1, rows.size) else [0]
        if len(wrong):
            at = wrong[0]
            what = "the spare block" if block[at] % cut != place else "its row"
            fact = f"on rank {self.rank} it appends the entry of position {positions[at]} at {index.reshape(-1)[at % index.size]}"
            yield self._violation(node, f"{fact}; {what} begins at {rows[at]}, as each entry is on one rank")

    def _mask(self, node: NodeProto, bias: str, place: int) -> Iterator[Violation]:
        chunk, cut = self.record.chunk, self.record.cut
        last = (self.record.length - self.tokens) // self.tokens * self.tokens
        blocks = {chunk * k for k in (0, 1, cut - 1, cut, cut + 1)} | {last}
        for position in sorted(at for at in blocks if at <= last)[:_FEW]:
            try:
                added = self._computed(bias, np.array([position], np.int64))
            except _Unknown as error:
                yield self._violation(node, f"its mask cannot be computed: {error}")
                return
            rows = np.arange(added.shape[-1])
            entries = (rows // chunk * cut + place) * chunk + rows % chunk
            queries = position + np.arange(added.shape[-2] if added.ndim > 1 else 1) % self.tokens
            seen = entries[None] <= queries[:, None]
            block = (position + self.tokens - 1) // chunk
            have = (block - place) // cut + 1 if block >= place else 0  # a rank's blocks up to this one
            if len(rows) < have * chunk:
                fact = f"on rank {self.rank} a step at position {position} reads {len(rows)} entries of a slot"
                yield self._violation(node, f"{fact}; the rank has {have * chunk} of the sequence")
                return
            if len(rows) and not np.array_equal((added == 0).reshape(-1, *seen.shape)[0], seen):
                fact = f"on rank {self.rank} its mask at position {position} is not that of the rank's entries"
                yield self._violation(node, f"{fact}; a token attends all entries up to its own, each on one rank")
                return

    def _biases(self, appended: Sequence[str]) -> Iterator[tuple[str, tuple[NodeProto, str]]]:
        """Yields the nodes that add a mask to the scores of a cache's keys, by the sum, with the mask."""
        scores = {*appended}
        for node in self.graph.node:
            if scores.isdisjoint(node.input):
                continue
            if node.op_type in _SCORING and node.domain != DOMAIN:
                scores.update(node.output)
            elif node.op_type == "Add" and (others := [name for name in node.input if name not in scores]):
                yield node.output[0], (node, others[0])

    def _computed(self, name: str, positions: Array) -> Array:
        """Returns a value of a step whose slots have these positions; _Unknown if it depends on more."""
        known = dict[str, Array]()
        waiting = [name]
        while waiting:
            one = waiting[-1]
            node = self.makers.get(one)
            if one in known:
                waiting.pop()
            elif one == self.record.position:
                known[one] = positions
            elif one in self.constants:
                if self.constants[one].external_data or math.prod(self.constants[one].dims) > _LARGEST:
                    raise _Unknown(f"'{one}' is a weight")
                known[one] = numpy_helper.to_array(self.constants[one])
            elif node is None:
                raise _Unknown(f"it depends on '{one}'")
            elif node.op_type == "Shape" and node.input[0] == self.record.tokens:
                known[one] = _shape(node, [len(positions), self.tokens])
            elif missing := [each for each in node.input if each and each not in known]:
                if len(waiting) > len(self.makers):
                    raise _Unknown("it depends on itself")
                waiting += missing
            else:
                known[one] = self._made(node, [known[each] for each in node.input if each])
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
        if node.op_type == "Range" and operands[2].item() * _LARGEST < operands[1].item() - operands[0].item():
            raise _Unknown(f"{node_title(node)} is too long")
        if node.op_type in ("Add", "LessOrEqual", "Where", "Expand"):
            shapes = [one.shape for one in operands] if node.op_type != "Expand" else [tuple(map(int, operands[1]))]
            if math.prod(np.broadcast_shapes(*shapes)) > _LARGEST:
                raise _Unknown(f"{node_title(node)} is too large")
        return np.asarray(kernel(*operands))

    def _violation(self, node: NodeProto, fact: str) -> Violation:
        return Violation(self.name, fact, node_title(node), path_of(node), _AGAIN)
