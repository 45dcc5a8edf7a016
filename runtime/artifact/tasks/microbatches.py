"""Checks that a rank file states the same number of microbatches, m, everywhere.

1. Every function of a task is called m times.
2. A Split whose parts are read by calls of one function, one part by each call, has m parts.
3. A Sum or a Concat of outputs of calls of one function, or of parts of a Split, takes all m, each once and in order.
4. The constant that divides such a Sum, to make it a mean, is m.
5. The first cotangent of a loss is 1/m if the loss is such a mean, and 1 if it is a sum; times the number of shards of the batch where
   gradients are those of the sum over ranks, and times the loss scale.

Without these checks, a part that no row reads would be left out of the training silently, since rows, messages and sums may all leave it
out. The checker compares all rank files with one number; loading a rank file compares it with its own rows.

    'ids' is split into 8 parts, but the rows have 7 microbatches
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from partc.runtime.artifact.format import TASK, Manifest
from partc.runtime.artifact.graph.onnx_graph import integer_of
from partc.runtime.artifact.tasks.rows import Row, row_of
from partc.runtime.artifact.tensors.boxes import divisor
from partc.runtime.errors import ArtifactError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

LAW = "because the rows, the parts of inputs, what is joined of them and its divisor state one number of microbatches"
_JOINS = ("Sum", "Concat")
_SMALL = 64
"""Only scalar constants of fewer bytes are read as divisors."""
_SHOWN = 12
_SEED, _HALF = "loss.seed", 2e-3
_FACTORS = (_SEED, f"{_SEED}.factor", "gradients.scale", "gradients.inverse")
"""Names of constants: the loss' first cotangent, or its factor if the loss scale is dynamic; the inverse of a constant loss scale."""


def refuse_left_out(model: ModelProto, manifest: Manifest, where: str) -> None:
    """Raises ArtifactError where a rank file states different numbers of microbatches."""
    row = row_of(model, where)
    if row is None:
        return
    calls = Counter(call.node.op_type for call in row.calls)
    count = max(calls.values(), default=0)
    facts = [
        f"'{name}' is called for {calls[name]} of {count} microbatches"
        for name in row.functions
        if calls[name] != count
    ]
    facts += other_counts(row, model, count, manifest)
    if facts:
        raise ArtifactError(
            "\n".join([*(f"{where}: {fact}" for fact in facts), f"  {LAW}", "  help: compile the model again"])
        )


def other_counts(row: Row, model: ModelProto, count: int, manifest: Manifest) -> Iterator[str]:
    """Yields a text for each place in a rank file that states another number of microbatches than `count`."""
    kept = {record.value for record in manifest.state}
    rows = f"the rows have {count} microbatch{'es' if count > 1 else ''}"
    nodes = [node for node in model.graph.node if all(entry.key != TASK for entry in node.metadata_props)]
    splits = {name: node for node in nodes if node.op_type == "Split" and not node.domain for name in node.output}
    given = {port.name for port in model.graph.input} - kept
    parts = {name for name in _splits_read(row) if name in splits and (count > 1 or splits[name].input[0] in given)}
    split_apart = {id(splits[name]): splits[name] for name in sorted(parts)}
    for node in split_apart.values():
        stated = integer_of(node, "num_outputs", len(node.output))
        if stated != len(node.output):
            yield f"'{node.input[0]}' is split into {len(node.output)} parts, and its num_outputs is {stated}"
        if len(node.output) != count:
            yield f"'{node.input[0]}' is split into {len(node.output)} parts, but {rows}"
    parts_made = {
        name: (call.node.op_type, k, call.microbatch) for call in row.calls for k, name in enumerate(call.node.output)
    }
    parts_made |= {
        name: (id(node), 0, k) for node in split_apart.values() for k, name in enumerate(node.output) if name in parts
    }
    joined: dict[str, NodeProto] = {}
    for node in nodes:
        if node.op_type not in _JOINS or node.domain:
            continue
        of = [parts_made[name] for name in node.input if name in parts_made]
        source = next((place for place, times in Counter(one[:2] for one in of).items() if times > 1), None)
        if source is None:
            continue
        joined[node.output[0]] = node
        found = [k for *place, k in of if tuple(place) == source]
        if found != [*range(count)]:
            shown = ", ".join(map(str, found[:_SHOWN])) + (", ..." if len(found) > _SHOWN else "")
            yield f"'{node.output[0]}' is the {node.op_type} of what the microbatches {shown} make, but {rows}"
    yield from _divided(model, nodes, joined, count, rows)
    yield from _seeded(model, nodes, joined, count, manifest)


def _divided(
    model: ModelProto, nodes: list[NodeProto], joined: Mapping[str, NodeProto], count: int, rows: str
) -> Iterator[str]:
    """Yields the means of microbatches whose divisor is not `count`."""
    numbers = {one.name: one for one in model.graph.initializer if not one.dims and one.ByteSize() < _SMALL}
    for node in nodes:
        if node.op_type != "Div" or node.domain or node.input[0] not in joined or node.input[1] not in numbers:
            continue
        number = float(_array(numbers[node.input[1]]))
        if number != count:
            yield f"'{node.output[0]}' is the Sum of microbatches divided by {number:g}, but {rows}"


def _seeded(
    model: ModelProto, nodes: list[NodeProto], joined: Mapping[str, NodeProto], count: int, manifest: Manifest
) -> Iterator[str]:
    """Yields each first cotangent that does not fit the loss in the file: the mean over microbatches, or their sum."""
    training = manifest.training
    numbers = {one.name: one for one in model.graph.initializer if not one.metadata_props and one.name in _FACTORS}
    seeds = [one for name, one in numbers.items() if name.startswith(_SEED)]
    if training is None or not seeds:
        return
    made = {name: node for node in nodes for name in node.output if name in (training.loss, f"{training.loss}.partial")}
    mean = any(node.op_type == "Div" and node.input[0] in joined for node in made.values())
    added = any(name in joined for name in made)
    boxes = [port.boxes for port in manifest.inputs if port.boxes and port.shape] if training.sum_over_ranks else []
    shards = max((divisor(one, 0) for one in boxes), default=1)
    scales = [_array(one).item() for name, one in numbers.items() if not name.startswith(_SEED)]
    wanted = [shards / m for m in dict.fromkeys((count,) if mean else (1,) if added else (1, count))]
    for one in seeds:
        found = _array(one).astype(np.float64) * (scales[0] if scales else 1)
        if not any(np.allclose(found, number, rtol=_HALF) for number in wanted):
            of = f"the mean of {count} microbatches" if mean else "the loss"
            begins = f"'{one.name}', {found.flat[0]:g} but for the loss scale"
            yield f"the gradient of {of} begins with {begins}; it is {' or '.join(f'{n:g}' for n in wanted)}"


def _splits_read(row: Row) -> set[str]:
    """Returns the operands that differ from call to call of a function at the same index, or are those of its only call: values of a
    microbatch.
    """
    by_place: dict[tuple[str, int], list[str]] = {}
    for call in row.calls:
        for k, name in enumerate(call.node.input):
            by_place.setdefault((call.node.op_type, k), []).append(name)
    return {name for names in by_place.values() if len(names) == 1 or len({*names}) > 1 for name in names}


def _array(tensor: TensorProto) -> np.ndarray[Any, Any]:
    from onnx import numpy_helper

    found: np.ndarray[Any, Any] = numpy_helper.to_array(tensor)
    return found
