"""The values of a rank's program: types, shapes, the location of each while a step runs, and its lifetime.

Each column of the table is derived from the rank's file and the columns before it:

    promises      maps each message or collective to the shape on which its ranks rely: the manifest's, if inputs bind its symbols
    shapes        the stated shapes of values, if inputs bind their symbols
    types         declared by the file, by the manifest, or by an earlier session (`program/sessions.py`)
    storage       the kind of a value's memory while a step runs; `targets`: the rank's target that has it
    live ranges   from the step that makes a value to its last reader
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from partc.runtime.artifact.tensors.dtypes import Dtype, dense

from ..artifact.dim_expression import symbols_in
from ..artifact.format import CPU, PUSH, ROUTE, Collective, Dim, Manifest, Shape, Transfer
from ..devices.devices import Devices
from ..errors import ArtifactError
from .flat_buffers import FlatBuffer, flat_places
from .lifetimes import LiveRange, lifetimes, live_ranges, merged_ranges
from .memory_plan import Lifetime
from .rank_file import RankFile
from .steps import Copy, LookUp, PostRecv, Segment, Send, StartCollective, Step, Update


class Storage(Enum):
    """The kind of a value's memory."""

    INPUT = "input"
    """The caller's memory, different in each step."""
    CONSTANT = "constant"
    """Memory that outlives the step: a weight that is sent or delivered, and the state."""
    SLOT = "slot"
    """The arena: a dense tensor whose shape follows from the bindings."""
    TENSOR = "tensor"
    """Memory of its own, new in each step: a dense tensor of unknown shape."""
    OBJECT = "object"
    """A Python object: strings, sequences, optionals, maps."""


@dataclass(frozen=True)
class ValueTable:
    """The facts about the values of a rank's program before any step, by name."""

    types: Mapping[str, str]
    shapes: Mapping[str, Shape]
    """The stated shapes of the values in slots."""
    storage: Mapping[str, Storage]
    flat_places: Mapping[str, tuple[str, int]]
    """Maps each value in a flat buffer to the buffer's name and the value's first element in it."""
    live_ranges: Mapping[str, LiveRange]
    """Maps each value to its live range; a value in a flat buffer has the buffer's."""
    targets: Mapping[str, str] = field(default_factory=dict)
    """Maps each value that is not on the host to its target."""

    def dtype(self, name: str) -> Dtype:
        """The element type of a dense value."""
        found = dense(self.types[name])
        assert found is not None, name
        return found

    def have_one_type(self, one: str, two: str) -> bool:
        """Whether two values in slots have the same type, shape and target."""
        there = self.targets.get(one) == self.targets.get(two)
        return there and self.types[one] == self.types[two] and self.shapes[one] == self.shapes[two]

    def is_dynamic(self, name: str) -> bool:
        """Whether a value has a different place and shape in each step."""
        return self.storage[name] is Storage.TENSOR

    def lifetimes(self, aliases: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> list[Lifetime]:
        """Returns the size and lifetime of every place in an arena.

        `aliases`: maps values that reuse the place of another value to that value; `shapes`: the values' shapes in a step.
        """
        sizes = {name: self.dtype(name).bytes_of(one) for name, one in shapes.items() if name not in self.flat_places}
        return lifetimes(self.live_ranges, aliases, sizes)

    @property
    def slots(self) -> set[str]:
        """The values with a slot of their own in the arena."""
        slots = (name for name, kind in self.storage.items() if kind is Storage.SLOT)
        return {name for name in slots if name not in self.flat_places}


def value_table(
    file: RankFile,
    types: Mapping[str, str],
    shapes: Mapping[str, Shape],
    promises: Collection[int],
    buffers: Sequence[FlatBuffer],
    constants: Collection[str],
    targets: Mapping[str, str],
) -> ValueTable:
    """Returns the table of a rank's values.

    `types` and `shapes` are complete except for the buffers; `constants` are the weights that are values by themselves.
    """
    targets = {**targets, **{one.name: targets[one.members[0]] for one in buffers if one.members[0] in targets}}
    types = {**types, **{buffer.name: buffer.type for buffer in buffers}}
    shapes = {**shapes, **{buffer.name: [buffer.size] for buffer in buffers}}
    places = flat_places(file, buffers)
    storage = storage_of(file, types, shapes, promises, {*places, *(one.name for one in buffers)}, constants)
    last = [*file.outputs, *(made for _, made in file.replaced_by_copy)]
    used = merged_ranges(live_ranges(file.steps, last), {name: buffer for name, (buffer, _) in places.items()})
    in_slots = {name: shape for name, shape in shapes.items() if storage.get(name) is Storage.SLOT}
    return ValueTable(types, in_slots, storage, places, used, targets)


def promised_shapes(file: RankFile, bound: frozenset[str]) -> dict[int, Shape]:
    """Maps tags to the shape of a message without a header, or of a collective's input; `bound` are the symbols that inputs bind."""
    promised: list[Transfer | Collective] = [*file.transfers.values(), *file.collectives.values()]
    return {one.tag: one.shape for one in promised if dense(one.type) and _known(one.shape, file.manifest, bound)}


def known_shapes(file: RankFile, bound: frozenset[str], promises: Collection[int]) -> dict[str, Shape]:
    """Maps values to the shapes that the file states, received values to their transfers' shapes, if inputs bind all their symbols."""
    stated = {
        **{name: one.shape for name, one in file.sent.items()},
        **file.shapes_of(name for name in file.declared if name in file.named),
    }
    shapes = {
        name: shape
        for name, shape in stated.items()
        if name not in file.received and _known(shape, file.manifest, bound)
    }
    shapes |= {name: one.shape for name, one in file.received.items() if one.tag in promises}
    for copy in file.copies:
        if copy.source in shapes:
            shapes.setdefault(copy.result, shapes[copy.source])
    return shapes


def sized_inputs(file: RankFile, bound: frozenset[str]) -> dict[str, tuple[Dtype, list[Dim]]]:
    """Maps each input that is not fed to its type and shape; raises ArtifactError if the inputs of a step do not determine them."""
    declared = file.shapes_of(file.sized)
    ports = {port.name: port for port in file.manifest.inputs}
    sized: dict[str, tuple[Dtype, list[Dim]]] = {}
    for name in file.sized:
        shape, dtype = declared.get(name), dense(ports[name].type)
        if shape is None or dtype is None or not _known(shape, file.manifest, bound):
            raise ArtifactError(
                f"{file.where}: the input '{name}' is read for its sizes alone, which the inputs of a step do not determine\n"
                "  help: compile again"
            )
        sized[name] = dtype, list(shape)
    return sized


def check_results(file: RankFile, shapes: Collection[str], promises: Collection[int]) -> None:
    """Raises ArtifactError for the collectives whose result must have a known shape and has none."""
    problems = []
    for call in (call for call in file.calls if call.result):
        if call.tag not in promises and not call.kind.dynamic:
            fact = "the inputs of a step do not determine the shape of its value"
            problems.append(f"{file.where}: {call.op} of '{call.value}': {fact}")
        elif call.kind.boxes and call.result not in shapes:
            fact = "the file does not state the shape of its output"
            problems.append(f"{file.where}: {call.op} of '{call.value}': {fact}")
    if problems:
        raise ArtifactError("\n".join([*problems, "  help: compile again"]))


def types_from_manifest(file: RankFile) -> dict[str, str]:
    """Maps each value that is received or is the rank's state to its type."""
    types = {name: one.type for name, one in file.received.items()}
    for call in file.calls:
        types |= dict.fromkeys((*filter(None, [call.result]), *call.outputs), file.collectives[call.tag].type)
    for lookup in file.lookups:
        types |= {lookup.result: file.collectives[lookup.tag].type} if lookup.result else {}
        types |= dict.fromkeys(lookup.numeric_outputs, "tensor(int64)")
    return types | {record.value: record.type for record in file.state}


def check_types(file: RankFile, types: Mapping[str, str]) -> None:
    """Raises ArtifactError for messages of sparse values, and for collectives whose input does not have the manifest's type."""
    problems = [
        f"{file.where}: the {step}: a sparse value cannot go from rank to rank"
        for step in file.steps
        if isinstance(step, Send | PostRecv) and types.get(step.value, "").startswith("sparse_tensor(")
    ]
    if problems:
        raise ArtifactError("\n".join([*problems, "  help: place the ops that make and use it on one rank"]))
    problems = [
        f"{file.where}: the {step}: its input is {found}, the manifest says {file.collectives[step.call.tag].type}"
        for step in file.steps
        if isinstance(step, StartCollective | LookUp)
        if (found := types.get(step.call.typed or ""))
        if found != file.collectives[step.call.tag].type
    ]
    if problems:
        raise ArtifactError("\n".join([*problems, "  help: the file was changed; compile again"]))


def storage_of(
    file: RankFile,
    types: Mapping[str, str],
    shapes: Collection[str],
    promises: Collection[int],
    flat: Collection[str],
    constants: Collection[str],
) -> dict[str, Storage]:
    """Maps each value to the kind of its memory; `flat` are flat buffers and the values in them."""

    def computed(name: str, known: bool) -> Storage:
        if not dense(types[name]):
            return Storage.OBJECT
        return Storage.SLOT if known else Storage.TENSOR

    return {
        **{name: computed(name, name in shapes) for name in (*file.received, *file.computed)},
        **{
            name: computed(name, call.tag in promises and call.op not in (PUSH, ROUTE))
            for name, call in file.calls_by_output.items()
        },
        **{name: Storage.TENSOR for call in file.lookups for name in call.numeric_outputs},
        **dict.fromkeys(flat, Storage.SLOT),
        **dict.fromkeys((name for call in file.calls if call.parts for name in call.outputs), Storage.SLOT),
        **dict.fromkeys(file.inputs, Storage.INPUT),
        **dict.fromkeys(constants, Storage.CONSTANT),
        **dict.fromkeys((record.value for record in file.state), Storage.CONSTANT),
        **dict.fromkeys((record.next for record in file.updated_in_place), Storage.CONSTANT),
    }


def _known(shape: Shape, manifest: Manifest, bound: frozenset[str]) -> bool:
    return shape is not None and all(bound.issuperset(symbols_in(dim, manifest.symbols)) for dim in shape)


_SIZES = ("Shape", "Size")
"""Ops whose results are on the host, on whichever target they run."""


def locations(file: RankFile, devices: Devices, state: Mapping[str, str] | None = None) -> dict[str, str]:
    """Maps each value that is not on the host to its target; ArtifactError where a step reads a value of another target.

    A value is on the target of the node that makes it, the result of a Copy on the Copy's. On the host are graph inputs and outputs, the
    values that are communicated without a target, and the sizes that Shape and Size compute. A tensor of the state is on the target of
    the node that makes its next value, or else of its readers.

    `state`: the targets of tensors that another program of the same rank has laid out.
    """
    targets: dict[str, str] = {}
    for step in file.steps:
        if isinstance(step, Copy):
            targets[step.result] = devices.target(step.to)
        elif isinstance(step, Segment) and step.target:
            sizes = {name for node in step.nodes if node.op_type in _SIZES and not node.domain for name in node.output}
            names = dict(step.output_pairs)
            sizes = {names[name] for name in sizes if name in names}
            targets |= {name: devices.target(step.target) for name in step.outputs if name not in sizes}
        elif isinstance(step, Update | PostRecv | StartCollective) and step.target:
            targets |= dict.fromkeys(step.makes, devices.target(step.target))
    homes = _homes(file, devices) if state is None else state
    for record in file.state:
        targets[record.value] = targets[record.next] if record.next in targets else homes.get(record.value, CPU)
    targets = {name: target for name, target in targets.items() if target != CPU}
    if targets:
        _refuse_unreachable(file, devices, targets)
    return targets


def _homes(file: RankFile, devices: Devices) -> dict[str, str]:
    """Maps each tensor of the state to the target of its readers."""
    kept = {record.value for record in file.state}
    homes: dict[str, str] = {}
    for step in file.steps:
        if isinstance(step, Segment | Update) and step.target:
            for name in step.reads:
                if name in kept:
                    homes.setdefault(name, devices.target(step.target))
    return homes


def _refuse_unreachable(file: RankFile, devices: Devices, targets: Mapping[str, str]) -> None:
    problems = []
    for step in file.steps:
        target, read = _reader(step, devices)
        problems += [
            f"{file.where}: the {step} reads '{name}', which lies on {targets[name]}, and no Copy brings it to {target}"
            for name in read
            if targets.get(name, target) != target
        ]
    if problems:
        raise ArtifactError("\n".join([*problems, "  help: the file was changed; compile again"]))


def _reader(step: Step, devices: Devices) -> tuple[str, tuple[str, ...]]:
    """Returns the target on which a step reads values, and the values; none for a Copy, which reads on any target."""
    if isinstance(step, Segment | Update):
        return devices.target(step.target), step.reads
    if isinstance(step, Send | PostRecv | StartCollective):
        return devices.target(step.target or CPU), (*step.reads, *step.makes)
    if isinstance(step, LookUp):
        return CPU, (*step.reads, *step.makes)
    return CPU, ()


def used_targets(steps: list[Step], devices: Devices) -> list[str]:
    """Returns the targets that a program uses, sorted."""
    computing = {devices.target(step.target) for step in steps if isinstance(step, Segment | Update)}
    return sorted(computing | {devices.target(step.to) for step in steps if isinstance(step, Copy)})
