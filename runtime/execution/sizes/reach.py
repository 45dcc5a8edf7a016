"""The part of a rank's program that depends on symbols: values, promises and steps that change when a symbol's size does."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from ...artifact.dim_expression import symbols_in
from ...artifact.format import Shape, SymbolRecord
from ...program.steps import Copy, LookUp, PostRecv, Segment, Send, StartCollective, Step, Update
from ..rank_program import RankProgram


@dataclass(frozen=True)
class SizeRange:
    """The parts of a program that depend on some symbols: values, promises by tag, collectives and lookups, and by step the values that
    it binds.
    """

    names: Collection[str]
    tags: Collection[int]
    moved: list[Step]
    steps: dict[int, list[str]]


def reached(program: RankProgram, changed: Set[str]) -> SizeRange | None:
    """The dependents of symbols; None if one of them is a step that cannot be changed."""
    values, symbols = program.values, program.binder.manifest.symbols
    names = dict.fromkeys(name for name, shape in values.shapes.items() if _has(shape, symbols, changed))
    tags = [tag for tag, promise in program.messages.promises.items() if _has(promise, symbols, changed)]
    moved: list[Step] = []
    for step in program.steps:
        if isinstance(step, StartCollective | LookUp) and step.call.tag in program.messages.promises:
            ends = (*step.call.inputs, *step.call.outputs) if isinstance(step, StartCollective) else ()
            if step.call.tag in tags or not names.keys().isdisjoint(ends):
                moved.append(step)
                names.update(dict.fromkeys(step.call.outputs) if isinstance(step, StartCollective) else {})
    steps = dict[int, list[str]]()
    for index, step in enumerate(program.steps):
        own = [name for name in _bound(step) if name in names]
        own += [""] if isinstance(step, StartCollective) and step in moved else []
        if own and isinstance(step, Copy | Update):
            return None
        if own and not isinstance(step, LookUp):
            steps[index] = own
    if any(name in values.flat_places for name in names):
        return None
    return SizeRange([name for name in names if name in values.shapes], tags, moved, steps)


def _has(shape: Shape, symbols: Mapping[str, SymbolRecord], changed: Set[str]) -> bool:
    return any(not changed.isdisjoint(symbols_in(dim, symbols)) for dim in shape or ())


def _bound(step: Step) -> Iterable[str]:
    """The values whose places a step's action holds."""
    match step:
        case Segment():
            return (*step.inputs, *step.outputs)
        case Copy():
            return step.source, step.result
        case Send() | PostRecv():
            return (step.value,)
        case StartCollective():
            return (*step.call.inputs, *step.call.outputs)
        case Update():
            return (*step.inputs, *(out for node in step.nodes for out in node.output))
    return ()
