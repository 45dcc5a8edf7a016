"""Proves the gathers of stored parameters: a rank never has more gathered bytes than the manifest says, and reads the latest gathered
values.

The laws hold in the order of each rank's file, with tasks in place of their calls:

    own event    a node reads a parameter from the last event before it that gathered the parameter: earlier values are freed by then
    as often     a unit is gathered in as many events as the manifest says
    together     one event gathers parameters of one unit
    own module   a node reads a parameter, or a form of it, only if it is of the module that owns the parameter, or the manifest names it;
                 and so is the node that makes the gradient of which a ReduceScatter gives the update of the parameter a shard
    peak         a gathered value is in memory from its event to its last reader; those that the node before an event reads count at the
                 event too, since both may be of one session; an unread value counts at its event. The peak is the manifest's, or at most
                 the manifest's if tasks have both freed units and others

A separate law, of updates in place, says that no gather comes after the update of its parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from onnx import ModelProto, NodeProto
from partc.runtime.artifact.format import (
    ALL_GATHER,
    DOMAIN,
    MANIFEST,
    OPTIMIZER,
    PATH,
    PIECE,
    REDUCE_SCATTER,
    RULE,
    Manifest,
    StoredUnitRecord,
)
from partc.runtime.artifact.graph.onnx_graph import metadata_of, node_title, path_of, reads
from partc.runtime.artifact.stored_readers import FORMS, is_of_module
from partc.runtime.artifact.tensors.dtypes import dense
from partc.runtime.checker.graph.declared import declared_types
from partc.runtime.checker.subject import Subject
from partc.runtime.errors import Violation

_SUMS = ("Add", "Sum")
"""Ops that add gradients of microbatches, which one reader makes, or of several readers, of which none is followed."""
_AGAIN = "compile the model again"


def check_stored(subject: Subject) -> Iterator[Violation]:
    """Yields violations of the manifest's record of stored parameters, for each rank file; the files' graphs are already checked."""
    stored = subject.manifest.stored
    if stored is None:
        return
    peaks = {rank: one.bytes for one in stored.peaks for rank in one.ranks}
    mixed = bool(subject.rows) and len({unit.freed for unit in stored.units}) > 1
    for ranks in subject.manifest.by_file(subject.models).values():
        units = {tensor: unit for unit in stored.units if ranks[0] in unit.ranks for tensor in unit.tensors}
        file = subject.manifest.program(ranks[0])
        gathers = _Gathers(file, subject.models[ranks[0]], units, subject.manifest, ranks[0])
        yield from gathers.violations()
        for rank in ranks:
            said, most = peaks.get(rank), gathers.peak
            if said is None or most > said or (most < said and not mixed):
                fact = f"stored: rank {rank} has {most:,} bytes of gathered parameters at once, and the manifest says {said}"
                yield Violation(
                    MANIFEST, f"{fact}; these are of {', '.join(gathers.at_peak) or 'no unit'}", help=_AGAIN
                )
                break


@dataclass
class _Gathered:
    """The value of a parameter that an event made, with the places of the event and of the value's last reader."""

    tensor: str
    begin: int
    bytes: int
    last: int = -1


@dataclass
class _Gathers:
    """The gathers of one rank file; `units` maps each tensor to its unit in the manifest."""

    file: str
    model: ModelProto
    units: dict[str, StoredUnitRecord]
    manifest: Manifest
    rank: int
    peak: int = 0
    at_peak: list[str] = field(default_factory=list)
    """The units of which values are in memory at the peak."""
    gathered: dict[str, _Gathered] = field(default_factory=dict)

    def violations(self) -> Iterator[Violation]:
        """Yields the violations; it walks the file once."""
        tensors = self._tensors()
        types = declared_types(self.model)
        latest: dict[str, str] = {}
        counts: Counter[str] = Counter()
        begins: list[tuple[int, int]] = []
        """The place of the node before each event, and the place of the event."""
        before = -1
        forms: dict[str, str] = {}
        """Maps each gathered value, and each form of one, to its parameter."""
        makers: dict[str, NodeProto] = {}
        """Maps each value, but forms of another one, to its node."""
        gradients: dict[str, NodeProto] = {}
        """Maps each shard of a gradient, and what is made of it and no other, to the node that makes the gradient."""
        for at, node in enumerate(self.model.graph.node):
            if node.op_type == "Cast" and node.input[0] in tensors:
                tensors[node.output[0]] = tensors[node.input[0]]
            for tensor in dict.fromkeys(forms[name] for name in reads(node) if name in forms):
                if not self._may_read(node, tensor):
                    yield self._violation(node, f"it reads the stored parameter '{tensor}', which is of another module")
            if node.op_type in FORMS and node.input[0] in forms:
                forms[node.output[0]] = forms[node.input[0]]
            yield from self._wrong_gradients(node, tensors, makers, gradients)
            for name in reads(node):
                if (one := self.gathered.get(name)) is not None:
                    one.last = at
                    if latest[one.tensor] != name:
                        fact = f"it reads '{name}', and '{one.tensor}' has been gathered again since, as '{latest[one.tensor]}'"
                        yield self._violation(node, fact)
            own = [tensors.get(name, "") for name in node.input] if _gathers(node) else []
            if not any(name in self.units for name in own):
                before = at
                continue
            if len({self.units[name].unit if name in self.units else "" for name in own}) > 1:
                yield self._violation(node, f"it gathers {', '.join(own)}, which are not of one unit")
            begins.append((before, at))
            counts[self.units[own[0]].unit if own[0] in self.units else ""] += 1
            for tensor, gathered_name in zip(own, node.output, strict=True):
                latest[tensor] = gathered_name
                forms |= {gathered_name: tensor} if tensor in self.units else {}
                type, shape = types.get(gathered_name, ("", None))
                sizes = [dim for dim in shape or () if isinstance(dim, int)]
                kind = dense(type)
                self.gathered[gathered_name] = _Gathered(
                    tensor, at, kind.bytes_of(tuple(sizes)) if kind is not None else 0
                )
        for port in self.model.graph.output:
            if port.name in self.gathered:
                self.gathered[port.name].last = len(self.model.graph.node)
        for unit in {unit.unit: unit for unit in self.units.values()}.values():
            if counts[unit.unit] != unit.gathers:
                fact = f"stored: {self.file} gathers unit '{unit.unit}' {counts[unit.unit]} times, and the manifest says {unit.gathers}"
                yield Violation(MANIFEST, fact, help=_AGAIN)
        self._count(begins)

    def _wrong_gradients(
        self, node: NodeProto, tensors: Mapping[str, str], makers: dict[str, NodeProto], gradients: dict[str, NodeProto]
    ) -> Iterator[Violation]:
        """Follows gradients from their makers through ReduceScatters to updates; yields those that are of another module's parameter."""
        if node.domain == DOMAIN and node.op_type == REDUCE_SCATTER:
            pairs = zip(node.output, node.input, strict=False)
            gradients |= {made: makers[given] for made, given in pairs if given in makers}
        elif node.domain == DOMAIN:
            pairs = zip(node.output, node.input, strict=False)
            gradients |= {made: gradients[given] for made, given in pairs if given in gradients}
        elif node.domain == OPTIMIZER and node.input[0] in tensors:
            tensor = tensors[node.input[0]]
            for name in node.input[1:] if tensor in self.units else ():
                if (maker := gradients.get(name)) is not None and not self._may_read(maker, tensor):
                    fact = f"it updates the stored parameter '{tensor}' by '{name}', the gradient that {node_title(maker)} makes"
                    yield self._violation(node, f"{fact}, which is of another module")
        elif len(followed := {gradients[name].name: gradients[name] for name in node.input if name in gradients}) == 1:
            gradients |= dict.fromkeys(node.output, next(iter(followed.values())))
        elif node.op_type in FORMS and node.input[0] in makers:
            makers |= dict.fromkeys(node.output, makers[node.input[0]])
        elif node.op_type in _SUMS:
            terms = {metadata_of(makers[name], PATH): makers[name] for name in node.input if name in makers}
            makers |= dict.fromkeys(node.output, next(iter(terms.values()))) if len(terms) == 1 else {}
        elif node.op_type != "ConstantOfShape":
            makers |= dict.fromkeys(node.output, node)

    def _may_read(self, node: NodeProto, tensor: str) -> bool:
        """Whether a node may read a stored parameter; a message, a copy or a node that stands for none of the model's may."""
        path = metadata_of(node, PATH)
        if node.domain == DOMAIN or not metadata_of(node, RULE):
            return True
        return is_of_module(path, tensor) or path in self.units[tensor].readers.get(tensor, ())

    def _tensors(self) -> dict[str, str]:
        """Maps each value of the file to the parameter of which it is this rank's shard; a turn's slice of a stack is one itself."""
        found = {one.value: one.tensor for one in self.manifest.state if self.rank in one.ranks}
        for tensor in self.model.graph.initializer:
            found.setdefault(tensor.name, metadata_of(tensor, PIECE).partition("[")[0] or tensor.name)
        return {value: value if value in self.units else tensor for value, tensor in found.items()}

    def _count(self, begins: list[tuple[int, int]]) -> None:
        """Finds the peak of the gathered bytes; `begins`: for each event the place of the node before it, and its own place."""
        for before, at in begins:
            there = (
                one for one in self.gathered.values() if one.begin == at or (one.begin < at and one.last >= before)
            )
            alive = [one for one in there if one.tensor in self.units]
            if (total := sum(one.bytes for one in alive)) > self.peak:
                self.peak, self.at_peak = total, [*dict.fromkeys(self.units[one.tensor].unit for one in alive)]

    def _violation(self, node: NodeProto, fact: str) -> Violation:
        return Violation(self.file, fact, node_title(node), path_of(node), _AGAIN)


def _gathers(node: NodeProto) -> bool:
    return node.domain == DOMAIN and node.op_type == ALL_GATHER
