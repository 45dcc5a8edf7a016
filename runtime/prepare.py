"""A rank's program made ready: everything that does not depend on the bindings of a step.

Steps are cut, sessions built, and every value gets a kind that says where it lies while a step runs. A shape is known when every
name in it is a symbol that the inputs bind; the promise that two ranks hold each other to is the transfer's shape in the
manifest, so that both choose the same form of message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from . import expression
from .artifact import Artifact
from .bindings import Binder, Bindings
from .buffers import Life
from .dtypes import BY_CODE, Array, Dtype, dense, element
from .errors import ArtifactError
from .format import Dim, Manifest, Shape, Transfer, rank_file
from .message import Value
from .segments import Post, Segment, Send, Step, cut
from .sessions import Builder, Runner, Settings, stated_shapes
from .tensor import Tensor

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto


class Kind(Enum):
    """Where a value lies."""

    INPUT = "input"
    """The caller's memory, another in each step."""
    CONSTANT = "constant"
    """A weight that is sent or delivered."""
    SLOT = "slot"
    """The arena: a dense tensor whose shape the bindings tell."""
    TENSOR = "tensor"
    """Memory of its own, new in each step: a dense tensor of unknown shape."""
    OBJECT = "object"
    """A Python object: strings, sequences, optionals, maps."""


@dataclass
class RankProgram:
    """Steps, sessions, kinds and promises of one rank."""

    rank: int
    steps: list[Step]
    runners: dict[int, Runner]
    types: dict[str, str]
    kinds: dict[str, Kind]
    shapes: dict[str, Shape]
    """The stated shapes of the values in slots."""
    constants: dict[str, Value]
    outputs: list[str]
    promises: dict[int, Shape]
    """By tag the shape of a message that travels bare; a tag without one has a header."""
    binder: Binder

    def dtype(self, name: str) -> Dtype:
        """The element type of a dense value."""
        found = dense(self.types[name])
        assert found is not None, name
        return found

    def evaluated(self, shape: Shape, bindings: Bindings) -> tuple[int, ...]:
        """A known shape with the symbols bound."""
        symbols = self.binder.manifest.symbols
        return tuple(expression.parse(dim, symbols)(bindings) for dim in shape or ())

    def lives(self, shapes: Mapping[str, tuple[int, ...]]) -> list[Life]:
        """Bytes and life of every value in a slot."""
        born: dict[str, int] = {}
        died: dict[str, int] = {}
        sends: dict[str, list[int]] = {}
        for index, step in enumerate(self.steps):
            if isinstance(step, Segment):
                born.update(dict.fromkeys(step.outputs, index))
                died.update(dict.fromkeys((*step.inputs, *step.outputs), index))
                continue
            died[step.value] = index
            if isinstance(step, Post):
                born[step.value] = index
            elif isinstance(step, Send):
                sends.setdefault(step.value, []).append(index)
        died.update(dict.fromkeys(self.outputs, len(self.steps)))
        return [
            Life(name, self.dtype(name).bytes_of(shape), born[name], died[name], tuple(sends.get(name, ())))
            for name, shape in shapes.items()
        ]

    def last_uses(self) -> dict[int, list[str]]:
        """By step the values with memory of their own that nobody needs after it."""
        died: dict[str, int] = {}
        for index, step in enumerate(self.steps):
            names = step.inputs + step.outputs if isinstance(step, Segment) else (step.value,)
            died.update({name: index for name in names if self.kinds[name] in (Kind.TENSOR, Kind.OBJECT)})
        found: dict[int, list[str]] = {}
        for name, index in died.items():
            if name not in self.outputs:
                found.setdefault(index, []).append(name)
        return found

    def explain(self, index: int, error: Exception) -> str:
        """What failed in a step."""
        return (
            self.runners[index].explain(error) if index in self.runners else f"{describe(self.steps, index)}: {error}"
        )


def describe(steps: Sequence[Step], index: int) -> str:
    """The text of a step as reports show it; the negative indices stand for what is no step."""
    if 0 <= index < len(steps):
        return str(steps[index])
    return "the agreement on the sizes of a step" if index == -2 else "nothing (between two steps)"


def prepare(artifact: Artifact, rank: int, settings: Settings) -> RankProgram:
    """The program of a rank with its sessions built; ArtifactError where the file contradicts itself or the manifest."""
    where = str(artifact.folder / rank_file(rank))
    manifest = artifact.manifest
    model = artifact.model(rank)
    steps = cut(model, where)
    transfers = _transfers(steps, manifest, rank, where)
    reads = [value.name for value in model.graph.input]
    outputs = [value.name for value in model.graph.output]
    _check_ports(manifest, rank, reads, outputs, where)
    binder = Binder(manifest, frozenset(reads))

    def known(shape: Shape) -> bool:
        return shape is not None and all(_names(dim, manifest) <= binder.bound for dim in shape)

    promises = {one.tag: one.shape for one in transfers.values() if dense(one.type) and known(one.shape)}
    sent = {step.value: transfers[step.tag].shape for step in steps if isinstance(step, Send)}
    received = {step.value: transfers[step.tag] for step in steps if isinstance(step, Post)}
    stated = [*sent.items(), *stated_shapes(model).items()]
    shapes = {name: shape for name, shape in stated if known(shape) and name not in received}
    shapes |= {name: one.shape for name, one in received.items() if one.tag in promises}
    builder = Builder(model, artifact.folder, {name: one.type for name, one in received.items()}, settings, where)
    runners = {index: builder.build(step) for index, step in enumerate(steps) if isinstance(step, Segment)}
    types = builder.types
    _refuse_sparse(types, steps, where)
    constants = _constants(model, artifact, steps, outputs)
    types |= {name: f"tensor({element(tensor.data_type)})" for name, (tensor, _) in constants.items()}
    made = [name for runner in runners.values() for name in runner.segment.outputs]
    kinds = {
        **{name: _kind(types[name], name in shapes) for name in (*received, *made)},
        **dict.fromkeys(reads, Kind.INPUT),
        **dict.fromkeys(constants, Kind.CONSTANT),
    }
    return RankProgram(
        rank=rank,
        steps=steps,
        runners=runners,
        types=types,
        kinds=kinds,
        shapes={name: shapes[name] for name, kind in kinds.items() if kind is Kind.SLOT},
        constants={name: value for name, (_, value) in constants.items()},
        outputs=outputs,
        promises=promises,
        binder=binder,
    )


def _names(dim: Dim, manifest: Manifest) -> frozenset[str]:
    """The symbols that a dim needs; a file may name dims in ways that are no expression, and those nobody knows."""
    try:
        return expression.parse(dim, manifest.symbols).names
    except ValueError:
        return frozenset([str(dim)])


def _kind(text: str, known: bool) -> Kind:
    if not dense(text):
        return Kind.OBJECT
    return Kind.SLOT if known else Kind.TENSOR


def _transfers(steps: Sequence[Step], manifest: Manifest, rank: int, where: str) -> dict[int, Transfer]:
    """The manifest's record of each message of this rank, by tag; the file and the manifest must tell the same."""
    records = {one.tag: one for one in manifest.transfers}
    used: set[int] = set()
    problems = []
    for step in steps:
        if isinstance(step, Send | Post):
            ends = (rank, step.peer) if isinstance(step, Send) else (step.peer, rank)
            record = records.get(step.tag)
            if record is None or (record.value, record.source, record.target) != (step.value, *ends):
                problems.append(f"{where}: the manifest lists no transfer {step.tag} for the {step}")
            elif step.tag in used:
                problems.append(f"{where}: transfer {step.tag} stands twice in the file: {step}")
            used.add(step.tag)
    problems += [
        f"{where}: the manifest lists transfer {one.tag} of '{one.value}' ({one.source} to {one.target}), the file does not"
        for one in manifest.transfers
        if rank in (one.source, one.target) and one.tag not in used
    ]
    if problems:
        raise ArtifactError("\n".join([*problems, "  help: the file was changed; compile again"]))
    return {tag: records[tag] for tag in used}


def _refuse_sparse(types: Mapping[str, str], steps: Sequence[Step], where: str) -> None:
    problems = [
        f"{where}: the {step}: a sparse value cannot go from rank to rank"
        for step in steps
        if isinstance(step, Send | Post) and types.get(step.value, "").startswith("sparse_tensor(")
    ]
    if problems:
        raise ArtifactError("\n".join([*problems, "  help: place the ops that make and use it on one rank"]))


def _check_ports(manifest: Manifest, rank: int, reads: Sequence[str], outputs: Sequence[str], where: str) -> None:
    """The file's inputs and outputs are those that the manifest gives to this rank."""
    problems = []
    for kind, names, ports in (("inputs", reads, manifest.inputs), ("outputs", outputs, manifest.outputs)):
        listed = {port.name for port in ports if rank in port.ranks}
        if listed != set(names):
            problems.append(f"{where}: the {kind} are {sorted(names)}, the manifest says {sorted(listed)}")
    if problems:
        raise ArtifactError("\n".join([*problems, "  help: the file was changed; compile again"]))


def _constants(
    model: ModelProto, artifact: Artifact, steps: Sequence[Step], outputs: Sequence[str]
) -> dict[str, tuple[TensorProto, Value]]:
    """The weights that are sent or delivered as they are."""
    from onnx import numpy_helper

    loose = {step.value for step in steps if isinstance(step, Send)} | set(outputs)
    found: dict[str, tuple[TensorProto, Value]] = {}
    for tensor in model.graph.initializer:
        if tensor.name in loose:
            array = numpy_helper.to_array(tensor, base_dir=str(artifact.folder))
            dtype = BY_CODE.get(tensor.data_type)
            found[tensor.name] = (tensor, Tensor.of(array, dtype) if dtype else _texts(array))
    return found


def _texts(array: Array) -> Array:
    decoded = [text.decode() if isinstance(text, bytes) else str(text) for text in array.reshape(-1).tolist()]
    return np.array(decoded, object).reshape(array.shape)
