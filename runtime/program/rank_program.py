"""A rank's program made ready: everything that does not depend on the bindings of a step.

Steps are cut, sessions built, and every value gets a kind that says where it lies while a step runs. A shape is known when every
name in it is a symbol that the inputs bind; the promise that ranks hold each other to is the transfer's or collective's shape in
the manifest, so that all choose the same form of message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from ..artifact import dim_expression as expression
from ..artifact.comm_node import LOOSE, Call
from ..artifact.dtypes import BY_CODE, Array, Bytes, Dtype, dense, element
from ..artifact.format import ALL_REDUCE, EXCHANGE, Collective, Dim, Manifest, Shape, StateRecord, Transfer
from ..artifact.manifest import Artifact
from ..artifact.tensor import Tensor, Value, aligned
from ..errors import ArtifactError
from ..execution.state import State, check_same, make_state
from ..execution.symbol_bindings import Binder, Bindings
from ..updates.flat_buffers import bundle_of, plan_updates
from ..updates.updater import Updater
from .liveness import LiveRange, bundled, in_place_aliases, lifetimes, live_ranges
from .memory_plan import Lifetime
from .segmentation import PostRecv, Segment, Send, StartCollective, Step, Update, WaitCollective, segmented
from .sessions import Builder, Runner, Settings, stated_shapes
from .validate import check_ports, collectives_of, transfers_of

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto


class Storage(Enum):
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
    kinds: dict[str, Storage]
    shapes: dict[str, Shape]
    """The stated shapes of the values in slots."""
    constants: dict[str, Value]
    outputs: list[str]
    promises: dict[int, Shape]
    """By tag the shape of a message that travels bare, or of a collective's input; a message without one has a header."""
    live_ranges: dict[str, LiveRange]
    in_place_aliases: dict[str, str]
    """By output of a collective the value whose place in memory it takes."""
    bundles: dict[str, tuple[str, int]]
    """By value that has a place in a bundle its name, and the element at which the value begins."""
    binder: Binder
    state: State
    updates: dict[int, list[Updater]]
    memory: Bytes
    guard: str
    """The output that must be finite for a step to replace what is kept; empty where there is none."""
    replaced: list[tuple[str, str]]
    """What a node of the program makes in place of a kept tensor: the tensor, and the value that is copied into it."""

    def dtype(self, name: str) -> Dtype:
        """The element type of a dense value."""
        found = dense(self.types[name])
        assert found is not None, name
        return found

    def evaluated(self, shape: Shape, bindings: Bindings) -> tuple[int, ...]:
        """A known shape with the symbols bound."""
        symbols = self.binder.manifest.symbols
        return tuple(expression.parse(dim, symbols)(bindings) for dim in shape or ())

    def block(self, size: int) -> Bytes:
        """Memory for the arena of a schedule: one block for all of them where it is large enough, since one runs at a time."""
        if self.memory.size < size:
            self.memory = aligned(size)
        return self.memory

    def lifetimes(self, shapes: Mapping[str, tuple[int, ...]]) -> list[Lifetime]:
        """Bytes and life of every place in the arena."""
        sizes = {n: self.dtype(n).bytes_of(shape) for n, shape in shapes.items() if n not in self.bundles}
        return lifetimes(self.live_ranges, self.in_place_aliases, sizes)

    def last_uses(self) -> dict[int, list[str]]:
        """By step the values with memory of their own that nobody needs after it."""
        found: dict[int, list[str]] = {}
        for name, span in self.live_ranges.items():
            if self.kinds[name] in (Storage.TENSOR, Storage.OBJECT) and name not in self.outputs:
                found.setdefault(max(span.ends), []).append(name)
        return found

    def adjacent(self) -> set[int]:
        """The tags of the collectives that are waited for as soon as they have begun."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return {
            first.call.tag
            for first, second in pairs
            if isinstance(first, StartCollective) and isinstance(second, WaitCollective) and first.call is second.call
        }

    def in_place(self, apart: Collection[int] = ()) -> set[int]:
        """Let collectives work in place where they can, but for those tags; the tags of those that do."""
        slots = {name for name, kind in self.kinds.items() if kind is Storage.SLOT and name not in self.bundles}
        self.in_place_aliases = in_place_aliases(self.steps, self.live_ranges, slots, apart)
        calls = [step.call for step in self.steps if isinstance(step, StartCollective)]
        return {
            call.tag for call in calls if call.result in self.in_place_aliases or (call.parts and call.op == ALL_REDUCE)
        }

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


def lower_rank_program(artifact: Artifact, rank: int, settings: Settings, state: State | None = None) -> RankProgram:
    """The program of a rank with its sessions built; ArtifactError where the file contradicts itself or the manifest.

    `state` is that of another program of the same model, whose tensors are then this one's too.
    """
    manifest = artifact.manifest
    where = str(artifact.folder / manifest.program(rank))
    model = artifact.model(rank)
    steps = segmented(model, where, manifest.circles(rank))
    transfers = transfers_of(steps, manifest, rank, where)
    collectives = collectives_of(steps, manifest, rank, where)
    records = [record for record in manifest.state if rank in record.ranks]
    kept, following = {record.value for record in records}, {record.next for record in records if record.next}
    _refuse_unsafe_updates(manifest, rank, model)
    reads = [value.name for value in model.graph.input if value.name not in kept]
    outputs = [value.name for value in model.graph.output if value.name not in following]
    check_ports(manifest, rank, {"inputs": reads, "outputs": outputs}, where)
    binder = Binder(manifest, rank, frozenset(reads))

    def known(shape: Shape) -> bool:
        return shape is not None and all(_names(dim, manifest) <= binder.bound for dim in shape)

    promised: list[Transfer | Collective] = [*transfers.values(), *collectives.values()]
    promises = {one.tag: one.shape for one in promised if dense(one.type) and known(one.shape)}
    sent = {step.value: transfers[step.tag].shape for step in steps if isinstance(step, Send)}
    received = {step.value: transfers[step.tag] for step in steps if isinstance(step, PostRecv)}
    calls = [step.call for step in steps if isinstance(step, StartCollective)]
    results = {call.result: call for call in calls if call.result}
    stated = [*sent.items(), *stated_shapes(model).items()]
    shapes = {name: shape for name, shape in stated if known(shape) and name not in received}
    shapes |= {name: one.shape for name, one in received.items() if one.tag in promises}
    bundles = [bundle_of(call, shapes, collectives[call.tag].type, where) for call in calls if _is_bundled(call)]
    shapes |= {bundle.name: [bundle.size] for bundle in bundles}
    _check_results(results.values(), shapes, promises, where)
    foreign = {name: one.type for name, one in received.items()}
    foreign |= {name: collectives[call.tag].type for name, call in results.items()}
    foreign |= {name: collectives[call.tag].type for call in calls for name in call.made}
    foreign |= {record.value: record.type for record in records}
    if sum(isinstance(step, Segment) for step in steps) > 1:
        # idle threads of one session that spin would take the cores from the next
        settings = replace(settings, spinning=False)
    settings = replace(settings, keeps=bool(records))
    builder = Builder(model, artifact.folder, foreign, settings, where)
    runners = {index: builder.build(step) for index, step in enumerate(steps) if isinstance(step, Segment)}
    types = builder.types
    _refuse_sparse(types, steps, where)
    if state is None:
        plan = plan_updates(steps, model, records, rank, shapes, types, bundles)
        bundles += plan.bundles
        shapes |= {bundle.name: [bundle.size] for bundle in plan.bundles}
        types |= {bundle.name: bundle.type for bundle in plan.bundles}
        state = make_state(records, rank, plan.kept, model, artifact.folder)
        updates = {
            index: [Updater(group, settings, types[group.operands[0][0]]) for group in groups]
            for index, groups in plan.groups.items()
        }
    else:
        updates = {}
        check_same(state, records, where)
    members = {name: (bundle.name, at) for bundle in bundles for name, at in bundle.places.items()}
    members |= {s: members[r] for call in calls if _is_bundled(call) for s, r in call.parts if r in members}
    constants = _constants(model, artifact, steps, outputs)
    types |= {name: f"tensor({element(tensor.data_type)})" for name, (tensor, _) in constants.items()}
    _refuse_other_types(types, steps, collectives, where)
    made = [name for runner in runners.values() for name in runner.segment.outputs]
    made += [name for step in steps if isinstance(step, Update) for node in step.nodes for name in node.output]
    known_results = {name for name, call in results.items() if call.tag in promises}
    kinds = {
        **{name: _kind(types[name], name in shapes) for name in (*received, *made)},
        **{name: _kind(types[name], name in known_results) for name in results},
        **dict.fromkeys((*members, *(bundle.name for bundle in bundles)), Storage.SLOT),
        **dict.fromkeys((name for call in calls if call.parts for name in call.made), Storage.SLOT),
        **dict.fromkeys(reads, Storage.INPUT),
        **dict.fromkeys(constants, Storage.CONSTANT),
        **dict.fromkeys(kept, Storage.CONSTANT),
    }
    updated = {
        record.next for record in records if record.next and (record.kind == "gradient" or _is_updated(record, steps))
    }
    copied = [(record.value, record.next) for record in records if record.next and record.next not in updated]
    in_place = {record.next: state.tensors[record.value] for record in records if record.next in updated}
    kinds |= dict.fromkeys(in_place, Storage.CONSTANT)
    used = bundled(
        live_ranges(steps, [*outputs, *(made for _, made in copied)]), {n: one for n, (one, _) in members.items()}
    )
    slots = {name for name, kind in kinds.items() if kind is Storage.SLOT}
    return RankProgram(
        rank=rank,
        steps=steps,
        runners=runners,
        types=types,
        kinds=kinds,
        shapes={name: shape for name, shape in shapes.items() if name in slots},
        constants={**{name: value for name, (_, value) in constants.items()}, **state.tensors, **in_place},
        outputs=outputs,
        promises=promises,
        live_ranges=used,
        in_place_aliases={},
        bundles=members,
        binder=binder,
        state=state,
        updates=updates,
        memory=aligned(0),
        guard=manifest.training.guard if manifest.training is not None else "",
        replaced=copied,
    )


def _refuse_unsafe_updates(manifest: Manifest, rank: int, model: ModelProto) -> None:
    """Memory is overwritten only where that is proven to be safe."""
    if not manifest.state:
        return
    from ..checker.training.in_place import unsafe_state

    if problems := unsafe_state(manifest, rank, model):
        raise ArtifactError("\n".join(map(str, problems)))


def _is_bundled(call: Call) -> bool:
    """Whether the values of a collective lie side by side, where it works in place."""
    return bool(call.parts) and call.op == ALL_REDUCE


def _is_updated(record: StateRecord, steps: Sequence[Step]) -> bool:
    """Whether a node of the optimizer replaces a tensor, in its own memory."""
    return any(record.next in node.output for step in steps if isinstance(step, Update) for node in step.nodes)


def _names(dim: Dim, manifest: Manifest) -> frozenset[str]:
    """The symbols that a dim needs; a file may name dims in ways that are no expression, and those nobody knows."""
    try:
        return expression.parse(dim, manifest.symbols).names
    except ValueError:
        return frozenset([str(dim)])


def _kind(text: str, known: bool) -> Storage:
    if not dense(text):
        return Storage.OBJECT
    return Storage.SLOT if known else Storage.TENSOR


def _check_results(calls: Iterable[Call], shapes: Mapping[str, Shape], promises: Collection[int], where: str) -> None:
    """Every collective whose result's shape must be known has one."""
    problems = []
    for call in calls:
        if call.tag not in promises and call.op not in LOOSE:
            problems.append(
                f"{where}: {call.op} of '{call.value}': the inputs of a step do not tell the shape of what it moves"
            )
        elif call.op == EXCHANGE and call.result not in shapes:
            problems.append(f"{where}: {call.op} of '{call.value}': the file does not state the shape of its output")
    if problems:
        raise ArtifactError("\n".join([*problems, "  help: compile again"]))


def _refuse_sparse(types: Mapping[str, str], steps: Sequence[Step], where: str) -> None:
    problems = [
        f"{where}: the {step}: a sparse value cannot go from rank to rank"
        for step in steps
        if isinstance(step, Send | PostRecv) and types.get(step.value, "").startswith("sparse_tensor(")
    ]
    if problems:
        raise ArtifactError("\n".join([*problems, "  help: place the ops that make and use it on one rank"]))


def _refuse_other_types(
    types: Mapping[str, str], steps: Sequence[Step], collectives: Mapping[int, Collective], where: str
) -> None:
    problems = [
        f"{where}: the {step}: its input is {found}, the manifest says {collectives[step.call.tag].type}"
        for step in steps
        if isinstance(step, StartCollective) and (found := types.get(step.call.source or ""))
        if found != collectives[step.call.tag].type
    ]
    if problems:
        raise ArtifactError("\n".join([*problems, "  help: the file was changed; compile again"]))


def _constants(
    model: ModelProto, artifact: Artifact, steps: Sequence[Step], outputs: Sequence[str]
) -> dict[str, tuple[TensorProto, Value]]:
    """The weights that are sent or delivered as they are."""
    from onnx import numpy_helper

    loose = {step.value for step in steps if isinstance(step, Send)} | set(outputs)
    loose |= {step.call.source for step in steps if isinstance(step, StartCollective) and step.call.source}
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
