"""Checks that an artifact states one number of microbatches, m, wherever it states one.

1. The rows call every function of a task for the microbatches 0 to m - 1 (`rows.py`).
2. A Split whose parts are read by calls of one function, a part each, has m parts.
3. A Sum or a Concat of what calls of one function make, or of parts of a Split, takes all m, each once and in order.
4. The constant that divides such a Sum, so that it is a mean, is m.

A part that no row takes is left out of the training without a word, since rows, messages and sums may leave it out alike.

    rank_0000.onnx: rank 0: 'ids' is split into 8 parts, but the rows have 7 microbatches
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from onnx import ModelProto, NodeProto, numpy_helper
from partc.runtime.artifact.format import TASK, ranks_text
from partc.runtime.artifact.rows import Row
from partc.runtime.checker.subject import Subject
from partc.runtime.errors import Violation

_JOINS = ("Sum", "Concat")
_LAW = "because the rows, the parts of inputs, what is joined of them and its divisor state one number of microbatches"
_SMALL = 64
"""A constant of so many bytes may be a number."""


def check_microbatches(subject: Subject) -> Iterator[Violation]:
    """Statements of rank files that differ from the number of microbatches of the rows."""
    files: dict[str, list[int]] = {}
    for rank in subject.rows:
        files.setdefault(subject.manifest.program(rank), []).append(rank)
    rows = [subject.rows[ranks[0]] for ranks in files.values()]
    count = 1 + max((task.microbatch for row in rows for task in row.tasks if task is not None), default=0)
    for (file, ranks), row in zip(files.items(), rows, strict=True):
        label = f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"
        kept = {record.value for record in subject.manifest.state}
        for fact in _others(row, subject.models[ranks[0]], count, kept):
            yield Violation(file, f"{label}: {fact}\n  {_LAW}", help="compile the model again")


def _others(row: Row, model: ModelProto, count: int, kept: AbstractSet[str]) -> Iterator[str]:
    """What states another number in a file."""
    rows = f"the rows have {count} microbatch{'es' if count > 1 else ''}"
    nodes = [node for node in model.graph.node if all(entry.key != TASK for entry in node.metadata_props)]
    splits = {name: node for node in nodes if node.op_type == "Split" and not node.domain for name in node.output}
    given = {port.name for port in model.graph.input} - kept
    parts = {name for name in _parts_read(row) if name in splits and (count > 1 or splits[name].input[0] in given)}
    for node in {id(splits[name]): splits[name] for name in sorted(parts)}.values():
        if len(node.output) != count:
            yield f"'{node.input[0]}' is split into {len(node.output)} parts, but {rows}"
    made = _made(row)
    made |= {name: (id(node), 0, k) for node in splits.values() for k, name in enumerate(node.output) if name in parts}
    joined: dict[str, NodeProto] = {}
    for node in nodes:
        if node.op_type not in _JOINS or node.domain:
            continue
        of = [made[name] for name in node.input if name in made]
        source = next((one[:2] for one in of if sum(other[:2] == one[:2] for other in of) > 1), None)
        if source is None:
            continue
        joined[node.output[0]] = node
        found = [k for *place, k in of if tuple(place) == source]
        if found != [*range(count)]:
            shown = ", ".join(map(str, found[:_SHOWN])) + (", ..." if len(found) > _SHOWN else "")
            yield f"'{node.output[0]}' is the {node.op_type} of what the microbatches {shown} make, but {rows}"
    yield from _divided(model, nodes, joined, count, rows)


_SHOWN = 12


def _divided(
    model: ModelProto, nodes: list[NodeProto], joined: Mapping[str, NodeProto], count: int, rows: str
) -> Iterator[str]:
    """Means of microbatches with another divisor."""
    numbers = {one.name: one for one in model.graph.initializer if not one.dims and one.ByteSize() < _SMALL}
    for node in nodes:
        if node.op_type != "Div" or node.domain or node.input[0] not in joined or node.input[1] not in numbers:
            continue
        number = float(numpy_helper.to_array(numbers[node.input[1]]))
        if number != count:
            yield f"'{node.output[0]}' is the Sum of microbatches divided by {number:g}, but {rows}"


def _parts_read(row: Row) -> set[str]:
    """Values that the calls of one function read in one place, each call another one: what is of a microbatch."""
    by_place: dict[tuple[str, int], list[str]] = {}
    for call in row.calls:
        for k, name in enumerate(call.node.input):
            by_place.setdefault((call.node.op_type, k), []).append(name)
    return {name for names in by_place.values() if len(names) == 1 or len({*names}) > 1 for name in names}


def _made(row: Row) -> dict[str, tuple[object, int, int]]:
    """By value that a call makes the function, the place among its outputs, and the microbatch."""
    return {
        name: (call.node.op_type, k, call.microbatch) for call in row.calls for k, name in enumerate(call.node.output)
    }
