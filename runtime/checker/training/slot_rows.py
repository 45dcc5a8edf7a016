"""Proves that slots stay separate: a row of a decoder's step reads and writes only its own slot's row of each cache.

Tokens and caches have slots as their first dim. They are followed through each rank's file as long as that dim is kept: an op that
picks, joins, reorders or reduces along it moves one slot's numbers to another slot, and is a violation.

    k = MatMul(h, w)               keeps rows
    k = Gather(h, order), axis 0   moves rows to others: a violation
    m = ReduceMax(h), axis 0       likewise

A value is not followed further where a Reshape, or an op by its factors (`partc.factors`), moves the first dim. The maximum of
positions is allowed: all slots read up to it, and masks end at each slot's own position.

A prefill runs one slot of each rank: the row that it is given, of caches that have one row in its files (`state.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnx import ModelProto, NodeProto, numpy_helper
from partc.runtime.artifact.format import CACHE, DOMAIN, Manifest
from partc.runtime.artifact.graph.factors import WHOLE, factors_of
from partc.runtime.artifact.graph.onnx_graph import integer_of, node_title
from partc.runtime.checker.subject import Subject
from partc.runtime.errors import Violation

_ALONG = {
    "Softmax": -1,
    "LogSoftmax": -1,
    "CumSum": None,
    "TopK": -1,
    "ArgMax": 0,
    "ArgMin": 0,
    "Concat": None,
    "Split": 0,
}
"""Maps each op along one axis to its default axis; None if the axis is an operand or is always stated."""
_AXES = frozenset(
    {"ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare"}
)
_AGAIN = "compile the model again"


def check_slots(subject: Subject) -> Iterator[Violation]:
    """Yields every node that moves one slot's numbers to another slot; only for a program of a decoder."""
    manifest = subject.manifest
    if not any(one.kind == CACHE for one in manifest.state):
        return
    for file, (rank, *_) in manifest.by_file(subject.models).items():
        yield from _File(file, rank, subject.models[rank], manifest).mixed()


class _File:
    """One rank file. `dealt`: whether slots are distributed over ranks, so that a Slice may take those of a rank."""

    def __init__(self, file: str, rank: int, model: ModelProto, manifest: Manifest) -> None:
        self.file, self.graph = file, model.graph
        self.constants = {one.name: one for one in model.graph.initializer}
        self.caches = [one for one in manifest.state if one.kind == CACHE]
        self.dealt = any(one.shard(holder)[0][2] > 1 for one in self.caches for holder in one.ranks[:1])
        self.ids = {port.name for port in manifest.inputs if len(port.shape or ()) > 1}
        adapter = manifest.generation.adapter if manifest.generation is not None else ""
        self.ids |= {adapter} - {""}
        self.positions = {port.name for port in manifest.inputs} - self.ids

    def mixed(self) -> Iterator[Violation]:
        """Yields the nodes that mix slots."""
        graph, given = self.graph, self.ids | {one.value for one in self.caches}
        rows = {port.name for port in graph.input if port.name in given | self.positions}
        numbers = rows & self.positions
        for node in graph.node:
            if rows.isdisjoint(node.input):
                continue
            of_positions = numbers.issuperset(rows.intersection(node.input))
            what = self._mixes(node, rows)
            if what == "reduces" and of_positions:
                continue
            if what:
                fact = (
                    f"it {what} along the first dim of '{next(name for name in node.input if name in rows)}', the slots"
                )
                law = "a row of a step reads and writes the cache of its own slot alone"
                yield Violation(self.file, f"{fact}; {law}", node_title(node), help=_AGAIN)
            else:
                kept = self._kept(node, rows)
                rows.update(kept)
                numbers.update(kept if of_positions else ())

    def _mixes(self, node: NodeProto, rows: set[str]) -> str:
        """Returns the verb for a node's action along the first dim of a value that has slots there; empty where it has no action."""
        kind, data = node.op_type, node.input[0] if node.input else ""
        if node.domain == DOMAIN or (kind != "Concat" and data not in rows):
            return ""
        if kind in ("Gather", "GatherElements") and integer_of(node, "axis", 0) == 0:
            return "picks"
        if kind == "GatherND" and integer_of(node, "batch_dims", 0) == 0:
            return "picks"
        if kind == "Slice" and not self.dealt and 0 in self._numbers(node, 3, range(len(self._numbers(node, 1)))):
            return "picks"
        if kind in _ALONG and self._axis(node) == 0:
            return {"Concat": "joins", "Split": "picks"}.get(kind, "reduces")
        if kind in _AXES and 0 in self._numbers(node, 1, [0] if len(node.input) < 2 else []):
            return "reduces"
        return "reorders" if kind == "ReverseSequence" and integer_of(node, "batch_axis", 1) != 0 else ""

    def _axis(self, node: NodeProto) -> int:
        if node.op_type == "CumSum":
            return next(iter(self._numbers(node, 1)), -1)
        return integer_of(node, "axis", _ALONG[node.op_type] or 0)

    def _kept(self, node: NodeProto, rows: set[str]) -> list[str]:
        """Returns the outputs of a node that also have slots as their first dim, by the op's factors, or for a Reshape by its target."""
        if node.domain == DOMAIN:
            return [*node.output] if node.op_type == "AllReduce" else []
        if node.op_type == "Reshape":
            return [*node.output] if next(iter(self._numbers(node, 1)), -1) == 0 else []
        try:
            factors = factors_of(node, {})
        except ValueError:  # the check of places says so
            factors = None
        if factors is None:
            return []
        given = zip(node.input, factors.inputs, strict=False)
        first = {letters[0] for name, letters in given if name in rows and letters} - {WHOLE}
        made = zip(node.output, factors.outputs, strict=False)
        return [name for name, letters in made if name and letters and letters[0] in first]

    def _numbers(self, node: NodeProto, at: int, default: Sequence[int] = ()) -> Sequence[int]:
        """The integers of a constant operand; `default` where it is not a constant."""
        tensor = self.constants.get(node.input[at]) if len(node.input) > at else None
        if tensor is None or tensor.external_data:
            return default
        return [int(one) for one in numpy_helper.to_array(tensor).reshape(-1)]
