"""Weights that are laws, in the programs of an artifact: tensors of the state, which begin as their law says, in place of bytes.

So a rank has its shard in memory of its own, drawn when it loads, in whatever program it is read. The main program's laws are those of
all: another program has bytes for a weight that the main one does not keep as it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from partc.compiler.ir.drawn import law_of
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import RankProgram, State


def with_laws(programs: Sequence[Complete]) -> list[Complete]:
    """The programs of an artifact, the main one first, as its files have them."""
    found: list[Complete] = []
    for program in programs:
        weights = {held.version.value for part, _ in program.distinct_programs for held in part.weights}
        if not any(law_of(value) is not None for value in weights):
            found.append(program)
            continue
        main = found[0].parts if found else None
        cache: dict[tuple[object, ...], RankProgram] = {}
        found.append(
            replace(
                program,
                parts=tuple(
                    _with_laws(part, None if main is None else main[part.rank], cache) for part in program.parts
                ),
            )
        )
    return found


def _with_laws(
    part: RankProgram, main: RankProgram | None, cache: dict[tuple[object, ...], RankProgram]
) -> RankProgram:
    """A program without weights that are laws; ranks that share what they keep share it still."""
    drawn = {held.value: held for held in part.weights if law_of(held.version.value) is not None}
    if main is not None:
        begun = {one.version.across for one in main.state if one.initial != 0.0}
        drawn = {value: held for value, held in drawn.items() if held.version.across in begun}
    if not drawn:
        return part
    key = (part.share_key, tuple(drawn))
    if key not in cache:
        kept = {one.value: one for one in part.state}
        for value, held in drawn.items():
            law = law_of(held.version.value)
            assert law is not None
            own = kept.get(value) or State(value, held.version, None, name_of(held.version.value), "parameter")
            kept[value] = replace(own, initial=law)
        weights = tuple(held for held in part.weights if held.value not in drawn)
        cache[key] = replace(part, weights=weights, state=tuple(kept.values()))
    like = cache[key]
    return replace(part, weights=like.weights, state=like.state)
