"""The numbers of a whole batch that every microbatch reads, such as the weight of all labels: made before the first task.

    loss.weights.of_batch = Gather(class weights, label)     loss.weight_sum = ReduceSum(loss.weights.of_batch)

A model of one size says what a microbatch has, and nothing of a batch: there each number is made of those of the microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import CommOp, ComputeOp, made_names
from partc.compiler.pipelines.phases import in_order
from partc.compiler.pipelines.row import Names, Row, named

Renamed: TypeAlias = Callable[[CommOp, Mapping[str, str], Mapping[str, str], int | None], CommOp]
"""A message or collective with these names and a tag of its own, listed by the names that any rank has, in a microbatch or once."""


def write_totals(totals: Program, rows: Sequence[Row], names: Names, renamed: Renamed, summed: Collection[str]) -> None:
    """Writes what makes them into rows in which microbatches have their records; those `summed` are sums over records, others means."""
    if not _is_of_one_size(totals, rows):
        _write(totals, rows, names, renamed, None)
        return
    made = [_write(totals, rows, names, renamed, k) for k in range(len(rows[0].micro))]
    for at, row in enumerate(rows):
        for name in made[0][at]:
            parts = [some[at][name] for some in made]
            row.put_together(parts, name, name in summed, names)


def _name_given(row: Row, step: CommOp, names: dict[str, str], listed: Mapping[str, str]) -> None:
    """Gives what a rank was given, and sends on, the name that it has on the ranks that receive it."""
    for name in step.inputs:
        wanted = listed.get(name, name)
        if names.get(name, name) != wanted:
            here = names.get(name, name)
            row.types[wanted] = row.types[here]
            row.emit("Identity", [here], [wanted])
            names[name] = wanted


def _is_of_one_size(totals: Program, rows: Sequence[Row]) -> bool:
    dealt = {name for row in rows for name in row.micro[0]}
    records = {held.version.value for part in totals.parts for held in part.inputs if held.name in dealt}
    shapes = [totals.values[value].shape for value in records]
    return any(shape and isinstance(shape[0], int) for shape in shapes)


def _write(
    totals: Program, rows: Sequence[Row], names: Names, renamed: Renamed, part: int | None
) -> list[dict[str, str]]:
    """Writes the ops for the whole batch, or for a microbatch; per row what the numbers are called then."""
    by_rank = {one.rank: one for one in totals.parts}
    units = [by_rank[row.unit.program.rank] for row in rows]
    suffix = "of_batch" if part is None else f"of_batch.{part}"
    own, made = list[dict[str, str]](), list[dict[str, str]]()
    for row, unit in zip(rows, units, strict=True):
        given = {held.name for held in (*unit.inputs, *unit.weights)}
        out = [held.name for held in unit.outputs]
        inside = [name for step in unit.steps for name in made_names(step) if name]
        called = {
            name: names.of(name, suffix) for name in (*inside, *unit.constants) if part is not None or name not in out
        }
        row.constants |= {called[name]: array for name, array in unit.constants.items()}
        row.types |= {called.get(name, name): one for name, one in unit.types.items() if name not in given}
        row.types |= {name: unit.types[name] for name in out}
        row.types |= {held.name: unit.types[held.name] for held in unit.weights if held.name not in row.types}
        made.append({name: called[name] for name in out if name in called})
        own.append(called if part is None else {**row.micro[part], **called})
    listed = {name: one for names_there in own for name, one in names_there.items()}
    for places in in_order([unit.steps for unit in units]):
        for at, k in places:
            step = units[at].steps[k]
            if isinstance(step, CommOp):
                _name_given(rows[at], step, own[at], listed)
                rows[at].steps.append(renamed(step, own[at], listed, part))
            elif isinstance(step, ComputeOp):
                rows[at].steps.append(named(step, own[at]))
    return made
