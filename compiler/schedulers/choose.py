"""Builds the schedule that a plan requests, by name or as rows, for the stages that result from the placement.

    pipeline: {microbatches: 8, schedule: 1f1b, memory: 4GB}

| schedule | homes | overhead, F = B = W | keeps at most, microbatches |
|---|---|---|---|
| `gpipe` | any | (p - 1)/m | m |
| `1f1b` | one stage each | (p - 1)/m | p - r on rank r |
| `interleaved` | a loop, 0 1 0 1 | (p - 1)/(v m) | p + (p - 1)/v |
| `zb_h1` | one stage each | (p - 1)/(3 m) | p |
| `zbv` | a V, 0 1 1 0 | (p - 1)/(6 m) | p |
| `auto` | any | the least that is found | the limit |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from partc.compiler.errors import CompileError, Problem
from partc.compiler.schedule.costs import BYTES, MICROBATCHES, Costs, unit_costs
from partc.compiler.schedule.memory import TOLERANCE, Limit, amount_text, one_microbatch, parse_limit, peaks, within
from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.stages import Stages
from partc.compiler.schedule.text import schedule_of_text
from partc.compiler.schedulers import named
from partc.compiler.schedulers.auto import auto
from partc.runtime.spellings import nearest
from partc.runtime.units import first_of, size_text

_SHOWN = 12


@dataclass(frozen=True)
class Named:
    """A schedule's function, whether homes fit it, what it says of them, and what to do where they do not fit."""

    make: Callable[[Stages, int], Schedule]
    fits: Callable[[Stages], bool]
    law: str
    help: str


_ONE_EACH = "every stage needs a rank or group of its own"
NAMED: Mapping[str, Named] = {
    "gpipe": Named(named.gpipe, lambda _: True, "", ""),
    "1f1b": Named(
        named.one_f_one_b, lambda stages: stages.is_one_each, _ONE_EACH, "place every stage on a group of its own"
    ),
    "interleaved": Named(
        named.interleaved,
        lambda stages: stages.turns > 1,
        "groups must be named again in the same order: 0 1 0 1",
        "name each group again in the placement",
    ),
    "zb_h1": Named(
        named.zb_h1, lambda stages: stages.is_one_each, _ONE_EACH, "place every stage on a group of its own"
    ),
    "zbv": Named(
        named.zbv,
        lambda stages: stages.is_vee,
        "groups must be named again in the opposite order: 0 1 1 0",
        "place the second half of the stages on the groups in the opposite order",
    ),
}
NAMES = (*NAMED, "auto")


def choose(
    stages: Stages,
    microbatches: object,
    schedule: object = None,
    memory: object = None,
    costs: Costs | None = None,
    where: str = "pipeline",
    rows_where: Sequence[str] | None = None,
) -> Schedule:
    """The valid schedule of a plan's words, within the limit if there is one; CompileError with all that is wrong.

    `schedule`: a name, rows of text, or None: 1f1b where every stage has a home of its own, else auto. `memory`: as `parse_limit` takes it.
    `where`: the place of all that in the plan; `rows_where`: of each row.
    """
    count, limit = _count(microbatches, where), _limit(memory, where)
    name = _name(schedule, stages, where)
    if wrong := [one for one in (count, limit, name) if isinstance(one, Problem)]:
        raise CompileError(wrong)
    assert isinstance(count, int) and not isinstance(limit, Problem) and not isinstance(name, Problem)  # noqa: PT018
    costs = costs or unit_costs(stages)
    if limit is not None and limit.unit == MICROBATCHES != costs.unit:
        costs = costs.in_microbatches(stages)
    if limit is not None and limit.unit == BYTES and (costs.unit != BYTES or costs.unbounded):
        law, help = "sizes of stages are not known here", "give the limit in microbatches, such as '2.5 microbatches'"
        if costs.unbounded:
            law = f"'{costs.unbounded}' has no largest size, so a microbatch may have any number of bytes"
            help = f"declare it in 'symbols', such as {{max: 512}}, or {help}"
        raise CompileError(Problem(where, f"memory: {limit} cannot be held against rows", law, help))
    if name == "auto":
        return _auto(stages, count, limit, costs, where)
    rows = schedule if isinstance(schedule, Sequence) and not isinstance(schedule, str) else ()
    made = (
        NAMED[name].make(stages, count)
        if name in NAMED
        else schedule_of_text([str(row) for row in rows], stages, count, rows_where or where)
    )
    return _within_limit(made, limit, costs, where)


def _count(microbatches: object, where: str) -> int | Problem:
    if isinstance(microbatches, int) and not isinstance(microbatches, bool) and microbatches >= 1:
        return microbatches
    return Problem(
        where, f"microbatches: {microbatches!r} is not a number of microbatches", "it is an integer of at least 1"
    )


def _limit(memory: object, where: str) -> Limit | Problem | None:
    if memory is None or isinstance(memory, Limit):
        return memory
    try:
        return parse_limit(memory if isinstance(memory, int) else str(memory))
    except ValueError as error:
        return Problem(where, f"memory: {memory!r} is not a limit", str(error))


def _name(schedule: object, stages: Stages, where: str) -> str | Problem:
    """The schedule's name, `text` for rows; or what is wrong with it."""
    if schedule is None:
        return "1f1b" if stages.is_one_each else "auto"
    if isinstance(schedule, Sequence) and not isinstance(schedule, str):
        return "text"
    text = str(schedule)
    if text not in NAMES:
        plain = text.lower().replace("-", "_").replace(" ", "_")
        like = [name for name in NAMES if name.replace("_", "") == plain.replace("_", "")] or nearest(plain, NAMES, 2)
        help = f"the nearest {'name is' if len(like) == 1 else 'names are'} {', '.join(like)}" if like else ""
        return Problem(
            where, f"schedule: '{text}' is not known", f"schedules are {', '.join(NAMES)}, or a list of rows", help
        )
    if text in NAMED and not NAMED[text].fits(stages):
        fitting = [name for name, other in NAMED.items() if name != "gpipe" and other.fits(stages)]
        help = f"{NAMED[text].help}, or write schedule: {' or '.join([*fitting, 'auto'])}"
        homes = first_of([stages.label(*homes) for homes in stages.stage_ranks], _SHOWN)
        return Problem(where, f"schedule: {text} does not fit stages on {homes}", NAMED[text].law, help)
    return text


def _auto(stages: Stages, microbatches: int, limit: Limit | None, costs: Costs, where: str) -> Schedule:
    if limit is None:
        return auto(stages, microbatches, costs).schedule
    least = one_microbatch(stages, costs)
    if over := _over(least, limit, stages, costs):
        fact = f"no schedule keeps to memory: {limit}: {over}"
        law = "a rank keeps at least what one microbatch saves in all of its stages"
        raise CompileError(Problem(where, fact, law, _remedy(limit, stages, costs)))
    room = [limit.amount - costs.constant_memory(home) for home in range(stages.rows)]
    return auto(stages, microbatches, costs, room).schedule


def _within_limit(schedule: Schedule, limit: Limit | None, costs: Costs, where: str) -> Schedule:
    """The schedule, if it keeps to the limit."""
    stages = schedule.stages
    if limit is None or not (over := _over(peaks(schedule, costs), limit, stages, costs, schedule)):
        return schedule
    fact = f"schedule: {schedule.name} does not keep to memory: {limit}: {over}"
    possible = not _over(one_microbatch(stages, costs), limit, stages, costs)
    help = f"{'write schedule: auto, or ' if possible else ''}{_remedy(limit, stages, costs)}"
    raise CompileError(Problem(where, fact, "a rank keeps what F saves until the backward pass has read it", help))


def _over(kept: Sequence[float], limit: Limit, stages: Stages, costs: Costs, schedule: Schedule | None = None) -> str:
    """The homes whose saved bytes exceed the limit, and by how much; without a schedule, those of one microbatch."""
    counts = peaks(schedule, costs.in_microbatches(stages)) if schedule is not None else (1.0,) * stages.rows
    texts = []
    for home, one in enumerate(kept):
        besides = costs.constant_memory(home)
        if within([one + besides], [limit.amount]):
            continue
        text = f"{stages.label(home)} keeps {amount_text(one + besides, limit.unit)}"
        if limit.unit != MICROBATCHES:
            more = (
                f", and {amount_text(besides, limit.unit)} of parameters, state, batch and one task" if besides else ""
            )
            text += f" ({amount_text(counts[home], MICROBATCHES)}{more})"
        texts.append(text)
    return first_of(texts, _SHOWN)


def _remedy(limit: Limit, stages: Stages, costs: Costs) -> str:
    least = max(one + costs.constant_memory(home) for home, one in enumerate(one_microbatch(stages, costs)))
    if limit.unit == MICROBATCHES:
        return f"raise the limit: from {amount_text(least, MICROBATCHES)} on there is a schedule"
    enough = size_text(least * (1 - TOLERANCE), at_least=True)
    return f"take more and smaller microbatches, recompute layers, or raise the limit: from {enough} on there is a schedule"
