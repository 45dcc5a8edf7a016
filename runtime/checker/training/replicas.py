"""Proves that copies of a tensor stay equal: ranks that hold the same shard replace it by the same value.

Values that are equal have equal numbers (`value_numbering.py`), under the assumption that copies were equal before the step. What is
proven is the step of an induction: copies that are equal stay so, bit by bit, where equal ops make equal bits of equal inputs. That
is so for ranks of one kind of machine, with as many threads each. The first values of copies are compared, too. Of shards that
overlap without being the same nothing is said.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TypeAlias

from onnx import AttributeProto, NodeProto, helper
from partc.runtime.artifact.format import DOMAIN, Manifest, StateRecord
from partc.runtime.artifact.graph.onnx_graph import node_title, path_of
from partc.runtime.checker.subject import Subject
from partc.runtime.checker.training.value_numbering import ValueNumbering
from partc.runtime.errors import Violation

Holder: TypeAlias = tuple[int, StateRecord]

_AGAIN = "compile the model again"


def check_copies(subject: Subject) -> Iterator[Violation]:
    """The copies of tensors that are not proven to stay equal; all else is proven."""
    copies = copies_of(subject.manifest)
    if not copies:
        return
    numbering = ValueNumbering(subject.folder, subject.manifest, subject.models)
    if numbering.done:
        subject.counts.copies = len(copies)
        yield from check_replicas(numbering, copies)


def copies_of(manifest: Manifest) -> list[list[Holder]]:
    """The shards that several ranks hold, each with all who do."""
    found: dict[tuple[str, str], list[Holder]] = {}
    for record in manifest.state:
        for rank in record.ranks:
            found.setdefault((record.tensor, str(record.shard(rank))), []).append((rank, record))
    return [holders for holders in found.values() if len(holders) > 1]


def check_replicas(numbering: ValueNumbering, copies: Sequence[Sequence[Holder]]) -> list[Violation]:
    """The copies that may differ."""
    comparison = _Comparison(numbering)
    return [one for holders in copies for one in comparison.compare(holders)]


class _Comparison:
    """Ranks side by side."""

    def __init__(self, numbering: ValueNumbering) -> None:
        self.numbering = numbering

    def compare(self, holders: Sequence[Holder]) -> Iterator[Violation]:
        """Violations for the copies of one shard that are not proven equal."""
        (rank, record), *others = holders
        first = self._first_value(rank, record)
        for other, copy in others:
            file = self.numbering.manifest.program(other)
            if self._first_value(other, copy) != first:
                fact = f"rank {other} begins with another value of '{copy.tensor}' than rank {rank}"
                yield Violation(file, fact, f"state '{copy.value}'", help=_AGAIN)
            if not copy.next or not record.next:
                continue
            if self.numbering.numbers[other].get(copy.next) != self.numbering.numbers[rank].get(record.next):
                node = self.numbering.makers[other].get(copy.next)
                title, path = (node_title(node), path_of(node)) if node else (f"state '{copy.value}'", "")
                fact = f"'{copy.tensor}' on rank {other} may become another one than on rank {rank}, which holds the same shard"
                reason = self._difference(rank, record.next, other, copy.next)
                yield Violation(file, f"{fact}: {reason}", title, path, _AGAIN)

    def _first_value(self, rank: int, record: StateRecord) -> Hashable:
        tensors = self.numbering.models[rank].graph.initializer
        return next((self.numbering.content(one) for one in tensors if one.name == record.value), record.initial)

    def _difference(self, rank: int, name: str, other: int, twin: str) -> str:
        """Where two values begin to differ, seen from what they have become."""
        while True:
            one, two = self.numbering.makers[rank].get(name), self.numbering.makers[other].get(twin)
            if one is None or two is None or DOMAIN in (one.domain, two.domain):
                return f"'{twin}' is not known to be the '{name}' of rank {rank}"
            if (one.domain, one.op_type) != (two.domain, two.op_type):
                return f"{node_title(two)} is {node_title(one)} there"
            if self.numbering.attributes(one) != self.numbering.attributes(two):
                return f"{node_title(two)} has {_text(two, one)}, and there {_text(one, two)}"
            pairs = zip(one.input, two.input, strict=False)
            mine, own = self.numbering.numbers[rank], self.numbering.numbers[other]
            parted = [(a, b) for a, b in pairs if a and b and mine.get(a) != own.get(b)]
            if not parted:
                return f"{node_title(two)} is not known to make what it makes on rank {rank}"
            name, twin = parted[0]


def _text(node: NodeProto, other: NodeProto) -> str:
    """The attributes in which a node differs from another, as text."""
    theirs = {one.name: one.SerializeToString(deterministic=True) for one in other.attribute}
    different = [one for one in node.attribute if theirs.get(one.name) != one.SerializeToString(deterministic=True)]
    values = (
        f"{one.f:g}" if one.type == AttributeProto.FLOAT else str(helper.get_attribute_value(one)) for one in different
    )
    return ", ".join(f"{one.name}={value}" for one, value in zip(different, values, strict=True)) or "nothing of that"
