"""Pass: what communication may cost: `--strict` refuses changes of layout that nobody asked for, `max_reshard_bytes` bounds their bytes.

A change of layout is asked for where the plan or the model gave its reader's cut, or placed it; reducing the terms that a given cut
leaves is no change of layout. Bytes are what a rank receives, at the largest sizes that the symbols may have, the smallest where
there is no bound.
"""

from __future__ import annotations

from collections.abc import Iterator

from partc.compiler.dims.facts import facts_of
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.program import Program, ProgramKind
from partc.compiler.ir.rank_program import Event
from partc.runtime.artifact.format import ALL_GATHER, ALL_TO_ALL, EXCHANGE, SEND

_RESHARDS = (ALL_GATHER, ALL_TO_ALL, EXCHANGE)


def check_budget(program: Program) -> Program:
    """Pass: the program itself. Raises CompileError for what `strict` and the plan's `max_reshard_bytes` forbid in a step."""
    if program.kind is not ProgramKind.STEP:
        return program
    problems = list(_unasked(program)) if program.strict else []
    budget = program.plan.max_reshard_bytes
    if budget is not None:
        costs = [(bytes_at(program, event), event) for event in program.events if event.op_type != SEND]
        total = sum(cost for cost, _ in costs)
        if total > budget:
            largest = sorted(costs, key=lambda pair: -pair[0])[:5]
            listed = "; ".join(f"{event.op_type} of '{event.name}' {cost}" for cost, event in largest)
            fact = f"reshards send {total} bytes to a rank per step, the plan allows {budget}"
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


def bytes_at(program: Program, event: Event) -> int:
    """An event's bytes at the largest, or else smallest, sizes of the symbols; 0 where they are unknown."""
    if event.bytes == "unknown":
        return 0
    known = {name: info.facts for name, info in program.symbols.items()}
    found = facts_of(event.bytes, known)
    return found.max if found.max is not None else max(0, found.min or 0)


def largest_first(program: Program) -> list[Event]:
    """All communication by its bytes, largest first."""
    return sorted(program.events, key=lambda event: (-bytes_at(program, event), event.tag))


def _unasked(program: Program) -> Iterator[Problem]:
    for event in program.events:
        if event.derived and event.op_type in _RESHARDS:
            yield Problem(
                event.name,
                f"{event.op_type} of {event.bytes} bytes, {event.cause}",
                "--strict allows no reshard for a reader whose layout is derived",
                "add a strategy for the reader, or compile without --strict",
            )
