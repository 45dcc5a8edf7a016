"""The numbers of a whole batch that every microbatch reads, such as the weight of all labels: computed before the first task.

    loss.weights.of_batch = Gather(class weights, label)     loss.weight_sum = ReduceSum(loss.weights.of_batch)

A model of one size says what a microbatch has, and nothing of a batch: there each number is made of those of the microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from partc.compiler.ir.program import Lowered
from partc.compiler.ir.programs import Comm, Compute, RankTensor, Value, with_values
from partc.compiler.pipelines.phases import in_order
from partc.compiler.pipelines.records import Records
from partc.compiler.pipelines.row import Row

Moved: TypeAlias = Callable[[Comm, Mapping[Value, Value], Mapping[Value, Value], int | None], Comm]
"""A message or collective over these values, with a tag of its own, listed by the values that any rank has, in a microbatch or once."""


def with_inputs(program: Lowered, totals: Lowered) -> Lowered:
    """The program of a microbatch, whose ranks are also fed what they read for the whole batch's numbers alone."""
    graph = {value.name: value for value in program.model.graph.inputs}
    more: dict[RankTensor, RankTensor] = {}
    parts = []
    for part, other in zip(program.parts, totals.parts, strict=True):
        fed = {str(held.value) for held in part.inputs}
        counted = [held for held in other.inputs if str(held.value) not in fed and held.version.value.name in graph]
        for held in counted:
            if held not in more:
                more[held] = replace(held, version=replace(held.version, value=graph[held.version.value.name]))
        parts.append(replace(part, inputs=(*part.inputs, *(more[held] for held in counted))) if counted else part)
    return replace(program, parts=tuple(parts))


def is_per_microbatch(totals: Lowered) -> bool:
    """Whether the numbers are made of those of the microbatches: a model of one size says what one of these has."""
    sizes = [(totals.values[value].shape or {dim: ""})[dim] for value, dim in totals.batch_dims.items()]
    return any(isinstance(size, int) for size in sizes)


def write_totals(totals: Lowered, rows: Sequence[Row], records: Records, moved: Moved, summed: Collection[str]) -> None:
    """Writes what makes them into rows in which microbatches have their records; those `summed` are sums over records, others means."""
    if not is_per_microbatch(totals):
        _write(totals, rows, records, moved, None)
        return
    made = [_write(totals, rows, records, moved, k) for k in range(len(rows[0].micro))]
    for at, row in enumerate(rows):
        for value in made[0][at]:
            row.put_together([some[at][value] for some in made], value, str(value) in summed)


def _write(
    totals: Lowered, rows: Sequence[Row], records: Records, moved: Moved, k: int | None
) -> list[dict[Value, Value]]:
    """Writes the ops for the whole batch, or for a microbatch; per row, by number as the step has it, what it is there."""
    by_rank = {one.rank: one for one in totals.parts}
    units = [by_rank[row.unit.program.rank] for row in rows]
    suffix = ".of_batch" if k is None else f".of_batch.{k}"
    inside = dict.fromkeys(value for unit in units for step in unit.steps for value in step.makes)
    step_has = {str(one.value): row.clones.of_batch(one.value) for row in rows for one in row.unit.program.inputs}
    results = {one.value: step_has.get(str(one.value), one.value) for unit in units for one in unit.outputs}
    anew = {value: value.derived(suffix) for value in inside}
    if k is None:
        anew |= {value: one for value, one in results.items() if value in inside}
    own, values_of_rows = list[dict[Value, Value]](), list[dict[Value, Value]]()
    for row, unit in zip(rows, units, strict=True):
        there = _given(row, records, k)
        values = {held.value: there.get(str(held.value), held.value) for held in (*unit.inputs, *unit.weights)}
        values |= {value: anew[value] for step in unit.steps for value in step.makes}
        if k is None:
            values |= {held.value: results[held.value] for held in unit.outputs}
        else:
            values_of_rows.append({results[one.value]: anew[one.value] for one in unit.outputs if one.value in anew})
        own.append(values)
    for places in in_order([unit.steps for unit in units]):
        for at, place in places:
            step = units[at].steps[place]
            if isinstance(step, Comm):
                _make_as_received(rows[at], step, own[at], anew)
                rows[at].steps.append(moved(step, own[at], anew, k))
            elif isinstance(step, Compute):
                rows[at].steps.append(with_values(step, own[at]))
    return values_of_rows


def _given(row: Row, records: Records, k: int | None) -> dict[str, Value]:
    """Maps each name to the value that a row has of a microbatch, or of the whole batch, before it computes anything."""
    program = row.unit.program
    held = (*(one.value for one in program.weights), *(one.value for one in program.state))
    found = {str(value): row.clones.of_batch(value) for value in held}
    found |= {str(held.value): records.of_step(held) for held in program.inputs}
    if k is not None:
        found |= {str(plain): value for plain, value in row.micro[k].items()}
    return found


def _make_as_received(row: Row, step: Comm, values: dict[Value, Value], anew: Mapping[Value, Value]) -> None:
    """Makes of what a rank was given, and sends on, the value that it is on the ranks that receive it."""
    for value in step.reads:
        here = values.get(value, value)
        wanted = anew.get(value, here)
        if here is not wanted:
            row.emit("Identity", [here], [wanted])
            values[value] = wanted
