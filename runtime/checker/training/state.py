"""Checks the state that ranks keep from step to step: the records in themselves, and each rank file against them.

records    of one tensor: one type, shape and kind; boxes that fit, and together cover all of it
file       a state is an input, its `next` an output, both of the type and shape of the shard; a parameter has an initial value
optimizer  an optimizer's tensor is sharded like its parameter, or each rank has a part of its shard
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from onnx import ModelProto
from partc.runtime.artifact.format import (
    ADAPTER,
    CACHE,
    MANIFEST,
    OF_A_PLAN,
    PIECE,
    Law,
    Manifest,
    Shape,
    StateRecord,
)
from partc.runtime.artifact.graph.onnx_graph import metadata_of
from partc.runtime.artifact.tensors.boxes import Region, full_region, overlap, region, remaining
from partc.runtime.artifact.tensors.dtypes import dense
from partc.runtime.checker.graph.declared import type_of
from partc.runtime.errors import Violation

_AGAIN = "compile the model again"


def check_state(manifest: Manifest, models: Mapping[int, ModelProto]) -> list[Violation]:
    """Returns all faults of the ranks' state; `models` has the rank files that can be read."""
    malformed = [_violation(record, fact) for record in manifest.state for fact in _malformed(record, manifest)]
    if malformed:
        return malformed
    faults = [*_check_tensors(manifest.state), *_check_slots(manifest)]
    seen = set()
    for rank, model in models.items():
        records = [record for record in manifest.state if rank in record.ranks]
        key = (manifest.program(rank), tuple((record.value, str(record.box(rank))) for record in records))
        if key not in seen:
            seen.add(key)
            faults += _check_file(manifest, rank, model, records)
    return faults


def different_tensors(manifest: Manifest, other: Manifest, file: str) -> Iterator[Violation]:
    """Yields the tensors and training settings in which the programs for another number of ranks, of the manifest `file`, differ."""
    ours, theirs = _tensors(manifest), _tensors(other)
    for tensor in sorted({*ours, *theirs}):
        if (here := ours.get(tensor, "nothing")) != (there := theirs.get(tensor, "nothing")):
            fact = f"'{tensor}' is {there} on {other.ranks} ranks, and {here} on {manifest.ranks}"
            yield Violation(file, f"{fact}; a checkpoint is of one list of tensors", help=_AGAIN)
    one, two = (found.training and found.training.model_copy(update={"folder": ""}) for found in (manifest, other))
    if one != two:
        fact = f"its training on {other.ranks} ranks is not that on {manifest.ranks}"
        yield Violation(file, f"{fact}; all but their programs is the same on each number of ranks", help=_AGAIN)


def _tensors(manifest: Manifest) -> dict[str, str]:
    """Maps each tensor of the state to a text of the facts that a checkpoint depends on."""
    return {
        record.tensor: f"{record.kind} {record.type} {record.shape}"
        + (f" of {record.parameter}" if record.parameter else "")
        for record in manifest.state
    }


def check_state_of_rank(manifest: Manifest, rank: int, model: ModelProto) -> list[Violation]:
    """Returns the faults of one rank's state and file."""
    records = [record for record in manifest.state if rank in record.ranks]
    malformed = [_violation(record, fact) for record in records for fact in _malformed(record, manifest)]
    return malformed or [*_check_file(manifest, rank, model, records)]


def _malformed(record: StateRecord, manifest: Manifest) -> Iterator[str]:
    """Yields the faults of a record by itself."""
    if wrong := [rank for rank in record.ranks if not 0 <= rank < manifest.ranks]:
        yield f"it names rank {wrong[0]}; there are ranks 0 to {manifest.ranks - 1}"
    if len({*record.ranks}) < len(record.ranks) or not record.ranks:
        yield f"its ranks are {record.ranks}; each that holds it is listed once"
    if dense(record.type) is None:
        yield f"it is a {record.type}, which cannot be kept from step to step"
    if any(dim < 0 for dim in record.shape):
        yield f"its shape is {record.shape}"
    if record.boxes is None:
        return
    if len(record.boxes) != len(record.ranks):
        yield f"it has {len(record.boxes)} boxes for {len(record.ranks)} ranks"
    for rank, box in zip(record.ranks, record.boxes, strict=False):
        cuts = [tuple(cut) for cut in box]
        if len(cuts) != len(record.shape):
            yield f"the box of rank {rank} has {len(cuts)} dims, and the tensor {len(record.shape)}"
        elif wrong_cuts := [cut for cut in cuts if len(cut) != 3 or not 0 <= cut[0] < cut[1] <= cut[2]]:
            yield f"the box of rank {rank} has the cut {list(wrong_cuts[0])}; it is begin, end, denominator"
        else:
            for axis, (size, (begin, end, of)) in enumerate(zip(record.shape, cuts, strict=True)):
                if size * begin % of or size * end % of:
                    yield f"the box of rank {rank} is {begin}/{of} to {end}/{of} of dim {axis}, which is {size}"


def _check_tensors(records: Sequence[StateRecord]) -> Iterator[Violation]:
    """Yields violations of records of one tensor that disagree, or do not cover it, and of two values of one name on a rank."""
    by_tensor: dict[str, list[StateRecord]] = {}
    for record in records:
        if (shared := overlap(_regions([record]))) is not None:
            yield _violation(record, f"its shards overlap in {shared}; they are equal or disjoint")
        by_tensor.setdefault(record.tensor, []).append(record)
    for tensor, same in by_tensor.items():
        first = same[0]
        for other in same[1:]:
            for what in ("type", "shape", "kind", "parameter", "initial"):
                one, two = getattr(first, what), getattr(other, what)
                if one != two:
                    yield _violation(other, f"its {what} is {two}, and that of '{first.value}', the same tensor, {one}")
            if bool(first.next) != bool(other.next):
                kept, moved = (first, other) if other.next else (other, first)
                yield _violation(
                    kept, f"no step replaces it, and '{moved.value}', the same tensor, becomes '{moved.next}'"
                )
        if all(one.shape == first.shape for one in same):
            lost = [one for one in remaining([full_region(first.shape)], _regions(same)) if one.count]
            yield from (_violation(first, f"no rank holds {one} of '{tensor}' {first.shape}") for one in lost[:1])
    names: dict[tuple[str, int], StateRecord] = {}
    for record in records:
        for rank in record.ranks:
            for name in filter(None, (record.value, record.next)):
                if (other := names.setdefault((name, rank), record)) is not record:
                    yield _violation(record, f"on rank {rank} '{name}' is also of '{other.tensor}'")


def _regions(records: Iterable[StateRecord]) -> list[Region]:
    """Returns the shards of records of one tensor, each once even if several ranks have it."""
    return sorted({region(record.shard(rank), record.shape) for record in records for rank in record.ranks})


def _check_slots(manifest: Manifest) -> Iterator[Violation]:
    """Yields violations of optimizer's tensors that are not within a shard of the parameter on the same rank."""
    held: dict[tuple[str, int], list[Region]] = {}
    for record in manifest.state:
        for rank in record.ranks if record.kind == "parameter" else ():
            held.setdefault((record.tensor, rank), []).append(region(record.shard(rank), record.shape))
    shapes = {record.tensor: record.shape for record in manifest.state if record.kind == "parameter"}
    for record in manifest.state:
        if record.kind != "optimizer":
            if record.parameter:
                yield _violation(record, f"it is of kind {record.kind}, and names the parameter '{record.parameter}'")
            continue
        if record.parameter not in shapes:
            yield _violation(record, f"it is of the parameter '{record.parameter}', which no rank keeps")
        elif not _is_of(record.shape, shapes[record.parameter]):
            fact = f"its shape is {record.shape}, and that of its parameter '{record.parameter}' {shapes[record.parameter]}"
            yield _violation(record, fact)
        elif lost := [rank for rank in record.ranks if not _is_inside(record, rank, shapes[record.parameter], held)]:
            yield _violation(
                record, f"rank {lost[0]} holds it without that shard of its parameter '{record.parameter}'"
            )


def _is_of(slot: Sequence[int], parameter: Sequence[int]) -> bool:
    """Whether a slot has its parameter's shape, except dims of size 1: the state of rows or columns."""
    return len(slot) == len(parameter) and all(one in (1, size) for one, size in zip(slot, parameter, strict=True))


def _is_inside(
    record: StateRecord, rank: int, parameter: Sequence[int], held: Mapping[tuple[str, int], Sequence[Region]]
) -> bool:
    """Whether a slot is within one of its rank's shards of its parameter, in the dims that both have."""
    own = region(record.shard(rank), record.shape)
    dims = [dim for dim, (one, size) in enumerate(zip(record.shape, parameter, strict=True)) if one == size]
    return any(_along(one, dims).contains(_along(own, dims)) for one in held.get((record.parameter, rank), ()))


def _along(one: Region, dims: Sequence[int]) -> Region:
    return Region(tuple(one.begin[dim] for dim in dims), tuple(one.end[dim] for dim in dims))


def _check_file(
    manifest: Manifest, rank: int, model: ModelProto, records: Sequence[StateRecord]
) -> Iterator[Violation]:
    file, graph = manifest.program(rank), model.graph
    inputs = {port.name: type_of(port.type) for port in graph.input}
    outputs = {port.name: type_of(port.type) for port in graph.output}
    first = {tensor.name: tensor for tensor in graph.initializer}
    declared = inputs | outputs
    for record in records:
        title = f"state '{record.value}'"
        wanted: Shape = list(record.local_shape(rank))
        sides = [("input", record.value, inputs)] + ([("output", record.next, outputs)] if record.next else [])
        for side, name, there in sides:
            if name not in there:
                if side == "input" and not manifest.is_main:
                    continue  # of the state it reads what it needs
                yield Violation(
                    file, f"{MANIFEST} has '{name}' as state of rank {rank}, and the file has no such {side}", title
                )
            elif declared[name] != (record.type, wanted) or there[name] != (record.type, wanted):
                have = " ".join(map(str, there[name]))
                fact = f"its {side} '{name}' is {have}; {MANIFEST} makes it {record.type} {wanted} on rank {rank}"
                yield Violation(file, fact, title, help=_AGAIN)
        if record.value in first:
            if list(first[record.value].dims) != wanted:
                fact = f"its first value has the shape {list(first[record.value].dims)}, and its shard {wanted}"
                yield Violation(file, fact, title, help=_AGAIN)
            elif (
                (said := metadata_of(first[record.value], PIECE))
                and not said.startswith(f"{record.tensor}.")  # a part of a packed one
                and said != (text := _text(record, rank))
            ):
                yield Violation(
                    file, f"its first value is '{said}', and {MANIFEST} makes it '{text}'", title, help=_AGAIN
                )
        elif (
            record.kind not in ("optimizer", CACHE, ADAPTER, *OF_A_PLAN)
            and not isinstance(record.initial, Law)
            and manifest.is_main
        ):
            # the other programs of an artifact run over the tensors of the main one, and have no values of their own
            yield Violation(
                file, f"this {record.kind} has no first value: no initializer is called so", title, help=_AGAIN
            )


def _text(record: StateRecord, rank: int) -> str:
    """Returns a rank's shard as rank files write it: `fc1.weight[0:8, 16:32]`; a whole tensor's name."""
    shard = region(record.shard(rank), record.shape)
    spans = ", ".join(f"{begin}:{end}" for begin, end in zip(shard.begin, shard.end, strict=True))
    return record.tensor if shard == full_region(record.shape) else f"{record.tensor}[{spans}]"


def _violation(record: StateRecord, fact: str) -> Violation:
    return Violation(MANIFEST, fact, f"state '{record.value}'", help=_AGAIN)
