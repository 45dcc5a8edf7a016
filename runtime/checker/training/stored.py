"""Proves the gathers of stored parameters: a rank never has more gathered bytes than the manifest says, and reads the latest gathered
values.

The laws hold in the order of each rank's file, with tasks in place of their calls:

    own event    a node reads a parameter from the last event before it that gathered the parameter: earlier values are freed by then
    as often     a unit is gathered in as many events as the manifest says
    as large     its gathered parameters have as many bytes as the manifest says
    together     one event gathers parameters of one unit
    own module   a node reads a parameter, or a form of it, only if it is of the module that owns the parameter, or the manifest names it;
                 and so is the node that makes the gradient of which a ReduceScatter gives the update of the parameter a shard
    peak         a gathered value is in memory from its event to its last reader; those that the node before an event reads count at the
                 event too, since both may be of one session; an unread value counts at its event. The peak is the manifest's, or at most
                 the manifest's if the program has tasks, of which the manifest adds the largest to what all of them keep

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
from partc.runtime.artifact.graph.row_function import gradient_operands
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
    said = {rank: one.bytes for one in stored.peaks for rank in one.ranks}
    counted: dict[int, _Gathers] = {}
    for ranks in subject.manifest.by_file(subject.models).values():
        own_units = [unit for unit in stored.units if ranks[0] in unit.ranks]
        file = subject.manifest.program(ranks[0])
        gathers = _Gathers(file, subject.models[ranks[0]], own_units, subject.manifest, ranks[0])
        yield from gathers.violations()
        read = gathers.read & {tensor for unit in stored.units for tensor in unit.tensors}
        for rank in ranks:
            listed = {tensor for unit in stored.units if rank in unit.ranks for tensor in unit.tensors}
            if lacking := sorted(read - listed):
                fact = f"stored: rank {rank} gathers '{lacking[0]}', and the manifest lists no unit of it for the rank"
                yield Violation(MANIFEST, fact, help=_AGAIN)
        if wrong := [rank for rank in ranks if rank not in said or gathers.peak > said[rank]]:
            yield gathers.other_peak(wrong[0], said.get(wrong[0]))
        counted |= dict.fromkeys(ranks, gathers)
    if subject.rows:
        return
    for record in stored.peaks:
        most = max(record.ranks, key=lambda rank: counted[rank].peak if rank in counted else record.bytes)
        if most in counted and counted[most].peak < record.bytes:
            yield counted[most].other_peak(most, record.bytes)


@dataclass
class _Gathered:
    """The value of a parameter that an event made, with the places of the event and of the value's last reader."""

    tensor: str
    begin: int
    bytes: int
    last: int = -1


@dataclass
class _Gathers:
    """The gathers of one rank file; `own_units`: the units of its ranks in the manifest, and `units` maps each tensor to its unit."""

    file: str
    model: ModelProto
    own_units: list[StoredUnitRecord]
    manifest: Manifest
    rank: int
    peak: int = 0
    at_peak: list[str] = field(default_factory=list)
    """The units of which values are in memory at the peak."""
    gathered: dict[str, _Gathered] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    """The parameters of which the file gathers shards, whatever the manifest lists."""
    operands: dict[str, int] = field(default_factory=dict)
    """Maps each optimizer function to the place of the gradient among its inputs."""

    def __post_init__(self) -> None:
        self.units = {tensor: unit for unit in self.own_units for tensor in unit.tensors}

    def violations(self) -> Iterator[Violation]:
        """Yields the violations; it walks the file once."""
        tensors, self.operands = self._tensors(), gradient_operands(self.model)
        types = declared_types(self.model)
        latest: dict[str, str] = {}
        counts: Counter[str] = Counter()
        begins: list[tuple[int, int]] = []
        """The place of the node before each event, and the place of the event."""
        before = -1
        forms: dict[str, str] = {}
        """Maps each gathered value, and each form of one, to the gathered value."""
        makers: dict[str, NodeProto] = {}
        """Maps each value, but forms of another one, to its node."""
        gradients: dict[str, NodeProto] = {}
        """Maps each shard of a gradient, and what is made of it and no other, to the node that makes the gradient."""
        for at, node in enumerate(self.model.graph.node):
            if node.op_type == "Cast" and node.input[0] in tensors:
                tensors[node.output[0]] = tensors[node.input[0]]
            for value in dict.fromkeys(forms[name] for name in reads(node) if name in forms):
                if not self._may_read(node, tensor := self.gathered[value].tensor):
                    fact = (
                        f"it reads '{value}', gathered of the stored parameter '{tensor}', which is of another module"
                    )
                    yield self._violation(node, fact)
            if node.op_type in FORMS and node.input[0] in forms:
                forms[node.output[0]] = forms[node.input[0]]
            yield from self._wrong_gradients(node, tensors, makers, gradients)
            for name in reads(node):
                if (one := self.gathered.get(name)) is not None:
                    one.last = at
                    if latest[one.tensor] != name:
                        fact = f"it reads '{name}', and '{one.tensor}' has been gathered again since, as '{latest[one.tensor]}'"
                        yield self._violation(node, fact)
            own = (
                [tensors.get(name, "") for name in node.input]
                if (node.domain, node.op_type) == (DOMAIN, ALL_GATHER)
                else []
            )
            self.read.update(own)
            if not any(name in self.units for name in own):
                before = at
                continue
            if len({self.units[name].unit if name in self.units else "" for name in own}) > 1:
                yield self._violation(node, f"it gathers {', '.join(own)}, which are not of one unit")
            begins.append((before, at))
            counts[self.units[own[0]].unit if own[0] in self.units else ""] += 1
            for tensor, gathered_name in zip(own, node.output, strict=True):
                latest[tensor] = gathered_name
                forms |= {gathered_name: gathered_name} if tensor in self.units else {}
                type, shape = types.get(gathered_name, ("", None))
                sizes = [dim for dim in shape or () if isinstance(dim, int)]
                kind = dense(type)
                self.gathered[gathered_name] = _Gathered(
                    tensor, at, kind.bytes_of(tuple(sizes)) if kind is not None else 0
                )
        for port in self.model.graph.output:
            if port.name in self.gathered:
                self.gathered[port.name].last = len(self.model.graph.node)
        gathered = {one.tensor: one.bytes for one in self.gathered.values()}
        for unit in self.own_units:
            if (total := sum(gathered.get(tensor, 0) for tensor in unit.tensors)) != unit.bytes:
                fact = f"stored: the gathered parameters of unit '{unit.unit}' have {total:,} bytes in {self.file}, and the manifest says"
                yield Violation(MANIFEST, f"{fact} {unit.bytes:,}", help=_AGAIN)
            if counts[unit.unit] != unit.gathers:
                fact = f"stored: {self.file} gathers unit '{unit.unit}' {counts[unit.unit]} times, and the manifest says {unit.gathers}"
                yield Violation(MANIFEST, fact, help=_AGAIN)
        self._count(begins)

    def other_peak(self, rank: int, said: int | None) -> Violation:
        """Returns the violation that a rank of the file has another peak than the manifest says."""
        fact = (
            f"stored: rank {rank} has {self.peak:,} bytes of gathered parameters at once, and the manifest says {said}"
        )
        return Violation(MANIFEST, f"{fact}; these are of {', '.join(self.at_peak) or 'no unit'}", help=_AGAIN)

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
            tensor, operand = tensors[node.input[0]], self.operands.get(node.op_type, len(node.input))
            for name in node.input[operand : operand + 1] if tensor in self.units else ():
                if (maker := gradients.get(name)) is not None and not self._may_read(maker, tensor):
                    fact = f"it updates the stored parameter '{tensor}' by '{name}', the gradient that {node_title(maker)} makes"
                    yield self._violation(node, f"{fact}, which is of another module")
        elif (
            not metadata_of(node, RULE)
            and len(followed := {gradients[name].name: gradients[name] for name in node.input if name in gradients})
            == 1
        ):  # a node of the model makes another gradient: of attention, cotangents are sums of shards, too
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
