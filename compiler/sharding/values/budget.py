"""Pass: limits on communication. `--strict` refuses changes of layout that were not requested, `max_reshard_bytes` bounds their bytes.

A change of layout counts as requested where the plan or the model declares the reader's sharding or placement; the reduction of the partial
sums of a declared sharding does not count as a change. Copies between a rank's targets count, too. Bytes are those that a rank receives, at
the largest sizes that the symbols may have, or the smallest where there is no bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from partc.compiler.dims.expression import facts_of
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Call, Copy, Event, RankProgram
from partc.compiler.ir.training import ProgramKind
from partc.runtime.artifact.format import ALL_GATHER, ALL_TO_ALL, EXCHANGE, SEND

_RESHARDS = (ALL_GATHER, ALL_TO_ALL, EXCHANGE)


def check_budget(program: Complete) -> Complete:
    """Pass: returns the program. Raises CompileError for communication in a step that `strict` or `max_reshard_bytes` forbids."""
    if program.kind not in (ProgramKind.STEP, ProgramKind.PREFILL, ProgramKind.ENCODE):
        return program
    problems = list(_unrequested(program)) if program.strict else []
    budget = program.plan.max_reshard_bytes
    if budget is not None:
        costs = [(bytes_at(program, event), event) for event in program.events if event.op_type != SEND]
        named = [(cost, f"{event.op_type} of '{event.name}'") for cost, event in costs]
        copies = max((copied(program, part) for part, _ in program.distinct_programs), key=_sum, default=[])
        total = _sum(named) + _sum(copies)
        if total > budget:
            largest = sorted((*named, *copies), key=lambda pair: -pair[0])[:5]
            listed = "; ".join(f"{what} {cost}" for cost, what in largest)
            more = f", copies between its targets {_sum(copies)}" if copies else ""
            fact = f"reshards send {total - _sum(copies)} bytes to a rank per step{more}, the plan allows {budget}"
            problems.append(
                Problem(
                    program.plan.file,
                    fact,
                    f"the largest: {listed}",
                    "raise max_reshard_bytes, or shard these differently",
                )
            )
    if problems:
        raise CompileError(problems)
    return program


def copied(program: Complete, part: RankProgram) -> list[tuple[int, str]]:
    """Lists the copies between targets in a step of a rank, with their bytes."""
    calls = Counter(step.body for step in part.steps if isinstance(step, Call))
    steps = [(step, 1) for step in part.steps]
    steps += [(step, count) for body, count in calls.items() for step in body.steps]
    return [
        (bytes_at(program, step) * count, f"Copy of '{step.source}'") for step, count in steps if isinstance(step, Copy)
    ]


def _sum(costs: Iterable[tuple[int, str]]) -> int:
    return sum(cost for cost, _ in costs)


def bytes_at(program: Complete, event: Event | Copy) -> int:
    """The bytes of an event or a copy at the largest, or else smallest, sizes of the symbols; 0 where they are unknown."""
    if event.bytes == "unknown":
        return 0
    known = {name: info.facts for name, info in program.symbols.items()}
    found = facts_of(event.bytes, known)
    return found.max if found.max is not None else max(0, found.min or 0)


def largest_first(program: Complete) -> list[Event]:
    """Returns all communication events, largest bytes first."""
    return sorted(program.events, key=lambda event: (-bytes_at(program, event), event.tag))


def _unrequested(program: Complete) -> Iterator[Problem]:
    for event in program.events:
        if event.derived and event.op_type in _RESHARDS:
            yield Problem(
                event.name,
                f"{event.op_type} of {event.bytes} bytes, {event.cause}",
                "--strict allows no reshard for a reader whose layout is derived",
                "add a strategy for the reader, or compile without --strict",
            )
