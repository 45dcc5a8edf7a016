"""Proves that updates in place are safe: no node reads an old value once it is overwritten.

A node of the optimizer writes `x.next` over `x`. That is correct if, for each tensor that is replaced so:

    one maker    exactly one node makes `x.next`, and only the graph's outputs read that
    readers      every other node that reads `x`, by itself or in a body, comes before that node in the file; and since a segment ends
                 before an update, it has run when the update begins
    as one       updates that directly follow each other may run as one: none of them reads a value that another one overwrites
    in flight    a collective that reads `x` has ended: a node between the two, or the update, needs its result; no message has `x`, and no
                 Exchange, since these may be in progress until the step ends
    element      the node's function is element-wise, and reads a value that an output overwrites only on the way to that output
    rows         or it writes rows at ids; these are distinct, as `MergeRows` makes them, or its addition is linear in the rows
    own place    the output replaces the operand from which the function makes it
    guard        the node comes after the one that makes the guard, if there is one: the runtime decides by it whether updates run

A cache is also written in place: the one node that reads it appends to it (`artifact/graph/cache_append.py`); in any other program a row
could read an entry that another node of its step has written, or lose it. Replacements that other nodes make, such as running statistics,
are copied when the step ends, and need none of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import FunctionProto, ModelProto, NodeProto
from partc.runtime.artifact.comm.collectives import LOOKUPS
from partc.runtime.artifact.format import DOMAIN, EXCHANGE, OPTIMIZER, SEND, Manifest, StateRecord
from partc.runtime.artifact.graph.cache_append import appended, not_appended
from partc.runtime.artifact.graph.onnx_graph import node_title, path_of, reads
from partc.runtime.artifact.graph.optimizer_function import NEXT, is_elementwise, is_in_place
from partc.runtime.artifact.graph.rank_constants import is_rank_constant
from partc.runtime.artifact.graph.row_function import IDS, ROWS, adds_up, is_merge, is_rowwise, merged_by
from partc.runtime.artifact.graph.targets import is_copy
from partc.runtime.checker.graph.nodes import check_calls
from partc.runtime.checker.subject import Subject
from partc.runtime.checker.training.state import check_state_of_rank
from partc.runtime.errors import Violation

_AGAIN = "compile the model again"


@dataclass(frozen=True)
class Replaced:
    """The numbers of all ranks' tensors that are replaced in place, and by a copy when a step ends."""

    in_place: int = 0
    copied: int = 0

    def __add__(self, other: Replaced) -> Replaced:
        return Replaced(self.in_place + other.in_place, self.copied + other.copied)


def check_updates(subject: Subject) -> list[Violation]:
    """Returns every reason for which an update in place is not safe, and the counts of both ways; the rank files are sound graphs."""
    manifest, total, violations = subject.shared, Replaced(), list[Violation]()
    known: dict[tuple[str, frozenset[tuple[str, str]]], Replaced] = {}
    for rank, model in subject.models.items():
        records = [record for record in manifest.state if rank in record.ranks and record.next]
        key = (manifest.program(rank), frozenset((record.value, record.next) for record in records))
        if records and key not in known:
            known[key], problems = _Rank(manifest.program(rank), model, records, manifest.guard).check()
            violations += problems
        total += known.get(key, Replaced())
    subject.counts.in_place, subject.counts.copied = total.in_place, total.copied
    return violations


def unsafe_state(manifest: Manifest, rank: int, model: ModelProto) -> list[Violation]:
    """Returns the reasons for which one rank's state must not be laid out and updated as its file says; for loading that rank alone."""
    file = manifest.program(rank)
    if found := [*check_state_of_rank(manifest, rank, model), *check_calls(file, model)]:
        return found
    return _Rank(file, model, [one for one in manifest.state if rank in one.ranks], manifest.guard).check()[1]


class _Rank:
    """The nodes of one rank file, and the tensors that they replace."""

    def __init__(self, file: str, model: ModelProto, records: Sequence[StateRecord], guard: str) -> None:
        self.file, self.model, self.guard = file, model, guard
        self.records = [record for record in records if record.next]
        self.nodes = list(model.graph.node)
        functions = (one for one in model.functions if one.domain == OPTIMIZER)
        self.updating = {one.name: one for one in functions if is_elementwise(one) or is_rowwise(one)}
        self.makers: dict[str, list[int]] = {}
        self.readers: dict[str, list[int]] = {}
        for at, node in enumerate(self.nodes):
            for name in filter(None, node.output):
                self.makers.setdefault(name, []).append(at)
            for name in dict.fromkeys(reads(node)):
                self.readers.setdefault(name, []).append(at)
        self.outputs = {port.name for port in model.graph.output}

    def check(self) -> tuple[Replaced, list[Violation]]:
        """Returns the counts of both ways, and the violations."""
        violations = list[Violation]()
        in_place: dict[str, int] = {}
        appends = appended(self.model, self.records)
        for record, node, fact in not_appended(self.model, self.records):
            title = node_title(node) if node is not None else f"state '{record.value}'"
            law = "a cache is read by the one node that appends to it"
            violations.append(
                Violation(self.file, f"{fact}; {law}", title, path_of(node) if node is not None else "", _AGAIN)
            )
        for record in self.records:
            makers = self.makers.get(record.next, [])
            if len(makers) != 1:
                fact = f"{len(makers)} nodes make '{record.next}', which takes its place; it must be one"
                violations.append(Violation(self.file, fact, f"state '{record.value}'", help=_AGAIN))
            elif self._function(makers[0]) is not None:
                in_place[record.value] = makers[0]
                violations += self._check_record(record, makers[0])
        for at in dict.fromkeys(in_place.values()):
            if self.guard and any(maker > at for maker in self.makers.get(self.guard, [at + 1])):
                fact = f"it stands before the node that makes '{self.guard}', by which it is decided whether it runs"
                violations.append(self._violation(at, fact))
            violations += self._check_rows(at)
        for at in {self.nodes[at].op_type: at for at in in_place.values()}.values():
            violations += self._check_function(at)
        violations += self._check_in_flight(in_place)
        number = len(in_place) + len(appends)
        return Replaced(number, len(self.records) - number), violations

    def _function(self, at: int) -> FunctionProto | None:
        """Returns the function with which a node updates in place; None for an ordinary node, whose result is copied."""
        node = self.nodes[at]
        return self.updating.get(node.op_type) if node.domain == OPTIMIZER else None

    def _check_record(self, record: StateRecord, at: int) -> Iterator[Violation]:
        node, function = self.nodes[at], self._function(at)
        assert function is not None
        for reader in self.readers.get(record.value, []):
            if reader > at:
                fact = f"it reads '{record.value}' after {node_title(node)} has overwritten it"
                yield self._violation(reader, fact, "put it before that node, or compile the model again")
        for reader in self.readers.get(record.next, []):
            fact = f"it reads '{record.next}', which is the memory of '{record.value}' in the next step"
            yield self._violation(reader, fact)
        if record.value in self.outputs:
            fact = f"the graph gives '{record.value}' as an output, and {node_title(node)} overwrites it before"
            yield Violation(self.file, fact, f"state '{record.value}'", help=_AGAIN)
        if len(node.output) != len(function.output) or len(node.input) != len(function.input):
            return
        formal = function.output[list(node.output).index(record.next)]
        operands = dict(zip(function.input, node.input, strict=True))
        old = operands.get(formal.removesuffix(NEXT)) if formal.endswith(NEXT) else None
        if old != record.value:
            made = f"of '{old}'" if old else "of no operand in its place"
            fact = (
                f"its output '{record.next}' takes the place of '{record.value}', and {function.name} makes it {made}"
            )
            yield self._violation(at, fact)
        elif Counter(node.input)[record.value] > 1:
            yield self._violation(
                at, f"it overwrites '{record.value}', which is {Counter(node.input)[record.value]} of its inputs"
            )

    def _check_function(self, at: int) -> Iterator[Violation]:
        function = self._function(at)
        assert function is not None
        for name in function.output:
            alone = FunctionProto()
            alone.CopyFrom(function)
            alone.output[:] = [name]
            if not is_in_place(alone):
                old = name.removesuffix(NEXT)
                fact = f"{function.name} writes its output '{name}' where '{old}' lies, and reads that by a node that does not lead there"
                yield self._violation(at, fact, "let every reader of an old value lead to the new one")

    def _check_rows(self, at: int) -> Iterator[Violation]:
        node, function = self.nodes[at], self._function(at)
        assert function is not None
        if not is_rowwise(function) or adds_up(function) or len(node.input) != len(function.input):
            return
        operands = dict(zip(function.input, node.input, strict=True))
        merges = {one.name for one in self.model.functions if is_merge(one)}
        ids, rows = (self._copied(operands[name]) for name in (IDS, ROWS))
        before = (self.nodes[k] for k in self.makers.get(ids, []))
        if not merged_by(before, ids, rows, merges):
            fact = (
                f"nothing proves that each row stands once among '{operands[IDS]}', and {function.name} overwrites rows"
            )
            yield self._violation(at, fact, "let MergeRows make its ids and rows")

    def _copied(self, name: str) -> str:
        """Returns the original value of a copy on another target."""
        for at in self.makers.get(name, []):
            node = self.nodes[at]
            if is_copy(node) and node.input[0] != name:
                return self._copied(node.input[0])
        return name

    def _check_in_flight(self, in_place: Mapping[str, int]) -> Iterator[Violation]:
        """Yields violations that the order of nodes cannot show: in updates that run as one, and in communication that has not ended."""
        nodes = self.nodes
        for name, at in in_place.items():
            for reader in self.readers.get(name, []):
                if reader < at and nodes[reader].domain == DOMAIN and not self._has_ended(nodes[reader], reader, at):
                    yield self._violation(
                        reader, f"{node_title(nodes[at])} overwrites '{name}' while this may still read it"
                    )
        runs = self._runs()
        for at, run in runs.items():
            for name in dict.fromkeys(nodes[at].input):
                if in_place.get(name, at) != at and runs.get(in_place[name]) == run:
                    fact = f"it reads '{name}', which another update overwrites at the same time"
                    yield self._violation(at, fact)

    def _runs(self) -> dict[int, int]:
        """Maps each update to the first of the adjacent updates before it: they may run as one."""
        runs: dict[int, int] = {}
        first: int | None = None
        for at, node in enumerate(self.nodes):
            if self._function(at) is not None and not self.outputs.isdisjoint(node.output):
                first = at if first is None else first
                runs[at] = first
            elif not is_rank_constant(node):
                first = None
        return runs

    def _has_ended(self, node: NodeProto, begun: int, at: int) -> bool:
        """Whether communication that begins at one node has ended before another: a node up to there needs its result."""
        if node.op_type in (SEND, EXCHANGE):
            return False
        if is_copy(node) or node.op_type in LOOKUPS:  # over before the next node begins
            return True
        return any(begun < reader <= at for name in node.output for reader in self.readers.get(name, []))

    def _violation(self, at: int, fact: str, help: str = _AGAIN) -> Violation:
        node: NodeProto = self.nodes[at]
        return Violation(self.file, fact, node_title(node), path_of(node), help)
