"""Proves that updates in place are safe: nobody reads an old value once it is overwritten.

A node of the optimizer writes `x.next` where `x` lies. That is right if, for each tensor that is replaced so:

    one maker    exactly one node makes `x.next`, and nothing but the graph's outputs reads that
    readers      every other node that reads `x`, by itself or in a body, stands before that node in the file; and since a segment
                 ends before an update, it has run when the update begins
    in flight    a collective that reads `x` is finished before, since its result is needed before; a message of `x`, which may
                 be on its way until the step ends, is not there
    element      the node's function is element-wise, and reads what an output overwrites only on the way to that output
    own place    the output takes the place of that operand which the function makes it of

What other nodes make in place of a tensor, such as running statistics, is copied when the step ends, and needs nothing of this. Sums
of gradients over the parts of a batch are replaced where they lie, too, by the laws of `accumulation.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import FunctionProto, ModelProto, NodeProto
from partc.runtime.artifact.format import DOMAIN, EXCHANGE, GRADIENT, OPTIMIZER, TAG, Manifest, StateRecord
from partc.runtime.artifact.optimizer_function import NEXT, is_elementwise, is_in_place
from partc.runtime.checker.graph import check_calls, node_title, reads
from partc.runtime.checker.training.accumulation import check_sums
from partc.runtime.checker.training.state import check_kept
from partc.runtime.checker.violation import Violation
from partc.runtime.errors import ArtifactError
from partc.runtime.program.segmentation import Send, StartCollective, Step, Update, WaitCollective, path_of, segmented

_AGAIN = "compile the model again"


@dataclass(frozen=True)
class Replaced:
    """How many tensors of all ranks are replaced in place, and how many by a copy when a step ends."""

    in_place: int = 0
    copied: int = 0

    def __add__(self, other: Replaced) -> Replaced:
        return Replaced(self.in_place + other.in_place, self.copied + other.copied)


def check_updates(manifest: Manifest, models: Mapping[int, ModelProto]) -> tuple[Replaced, list[Violation]]:
    """What is replaced in which way, and every reason why that is not safe; the rank files are sound graphs."""
    total, found = Replaced(), list[Violation]()
    known: dict[tuple[str, frozenset[tuple[str, str]]], Replaced] = {}
    for rank, model in models.items():
        records = [
            record for record in manifest.state if rank in record.ranks and (record.next or record.kind == GRADIENT)
        ]
        key = (manifest.program(rank), frozenset((record.value, record.next) for record in records))
        if records and key not in known:
            known[key], problems = _Rank(manifest.program(rank), model, records).check()
            found += problems
        total += known.get(key, Replaced())
    return total, found


def unsafe_state(manifest: Manifest, rank: int, model: ModelProto) -> list[Violation]:
    """Why what one rank keeps must not be laid out in memory and updated as its file says; for whoever loads that alone."""
    file = manifest.program(rank)
    if found := [*check_kept(manifest, rank, model), *check_calls(file, model)]:
        return found
    return _Rank(file, model, [one for one in manifest.state if rank in one.ranks]).check()[1]


class _Rank:
    """The nodes of one rank file, and which of them replace what."""

    def __init__(self, file: str, model: ModelProto, records: Sequence[StateRecord]) -> None:
        self.file, self.model = file, model
        self.sums = [record for record in records if record.kind == GRADIENT]
        self.records = [record for record in records if record.kind != GRADIENT and record.next]
        self.functions = {(one.domain, one.name): one for one in model.functions}
        self.makers: dict[str, list[int]] = {}
        self.readers: dict[str, list[int]] = {}
        for at, node in enumerate(model.graph.node):
            for name in filter(None, node.output):
                self.makers.setdefault(name, []).append(at)
            for name in dict.fromkeys(reads(node)):
                self.readers.setdefault(name, []).append(at)
        self.outputs = {port.name for port in model.graph.output}

    def check(self) -> tuple[Replaced, list[Violation]]:
        """The count of both ways, and what is wrong."""
        found = [*check_sums(self.file, self.model, self.sums)]
        in_place: dict[str, int] = {}
        for record in self.records:
            makers = self.makers.get(record.next, [])
            if len(makers) != 1:
                fact = f"{len(makers)} nodes make '{record.next}', which takes its place; it must be one"
                found.append(Violation(self.file, fact, f"state '{record.value}'", help=_AGAIN))
            elif self._function(makers[0]) is not None:
                in_place[record.value] = makers[0]
                found += self._check_record(record, makers[0])
        for at in dict.fromkeys(in_place.values()):
            found += self._check_function(at)
        found += self._check_steps(in_place)
        added = sum(bool(record.next) for record in self.sums)
        return Replaced(len(in_place) + added, len(self.records) - len(in_place)), found

    def _function(self, at: int) -> FunctionProto | None:
        """The function by which a node updates in place; None where it is an ordinary node, whose result is copied."""
        node = self.model.graph.node[at]
        function = self.functions.get((node.domain, node.op_type))
        return function if node.domain == OPTIMIZER and function is not None and is_elementwise(function) else None

    def _check_record(self, record: StateRecord, at: int) -> Iterator[Violation]:
        node, function = self.model.graph.node[at], self._function(at)
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

    def _check_steps(self, in_place: Mapping[str, int]) -> Iterator[Violation]:
        """What the order of nodes cannot say: updates that run as one, and communication that has begun and not ended."""
        try:
            steps = segmented(self.model, self.file)
        except ArtifactError:
            return
        nodes = self.model.graph.node
        titles = {name: node_title(nodes[at]) for name, at in in_place.items()}
        updates = {
            name: index
            for index, step in enumerate(steps)
            if isinstance(step, Update)
            for name, at in in_place.items()
            if any(nodes[at].output == one.output for one in step.nodes)
        }
        finished = {step.call.tag: index for index, step in enumerate(steps) if isinstance(step, WaitCollective)}
        for index, step in enumerate(steps):
            for name, tag, end in _until(step, finished):
                if name in updates and index < updates[name] and (end is None or end > updates[name]):
                    at = next(k for k in self.readers[name] if _tag(nodes[k]) == tag)
                    fact = f"{titles[name]} overwrites '{name}' while this may still read it"
                    yield self._violation(at, fact)
            if isinstance(step, Update):
                yield from self._check_together(step, {name for name, own in updates.items() if own == index})

    def _check_together(self, step: Update, replaced: set[str]) -> Iterator[Violation]:
        """Of updates that run as one, none reads what another one overwrites."""
        places = {tuple(node.output): at for at, node in enumerate(self.model.graph.node)}
        own = {record.next: record.value for record in self.records}
        for node in step.nodes:
            mine = {own[name] for name in node.output if name in own}
            for name in sorted({*node.input} & replaced - mine):
                yield self._violation(
                    places[tuple(node.output)], f"it reads '{name}', which another update overwrites at the same time"
                )

    def _violation(self, at: int, fact: str, help: str = _AGAIN) -> Violation:
        node: NodeProto = self.model.graph.node[at]
        return Violation(self.file, fact, node_title(node), path_of(node), help)


def _until(step: Step, finished: Mapping[int, int]) -> Iterator[tuple[str, int, int | None]]:
    """The values that communication reads, its tag, and the step by which it has; None where that is known at the end only."""
    if isinstance(step, Send):
        yield step.value, step.tag, None
    elif isinstance(step, StartCollective):
        call = step.call
        end = None if call.op == EXCHANGE else finished.get(call.tag)
        yield from ((name, call.tag, end) for name in call.given)


def _tag(node: NodeProto) -> int | None:
    """The tag of a communication node; None for another one."""
    return next((one.i for one in node.attribute if one.name == TAG), -1) if node.domain == DOMAIN else None
