"""Weights that are laws, in the programs of an artifact: tensors of the state, which begin as their law says, in place of bytes.

So a rank has its shard in memory of its own, drawn when it loads, in whatever program it is read. The main program's laws are those of
all: another program has bytes for a weight that the main one does not keep as it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from partc.compiler.ir.drawn import law_of
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import LocalTensor, RankProgram, StateTensor
from partc.compiler.ir.sharded import ShardedValue


def with_laws(programs: Sequence[Program]) -> list[Program]:
    """The programs of an artifact, the main one first, as its files have them."""
    found: list[Program] = []
    for program in programs:
        weights = {held.version.value for part, _ in program.alike for held in part.weights}
        if not any(law_of(value) is not None for value in weights):
            found.append(program)
            continue
        main = found[0].parts if found else None
        cache: dict[tuple[object, ...], RankProgram] = {}
        found.append(
            replace(
                program,
                parts=tuple(
                    _with_laws(part, None if main is None else _held(main[part.rank]), cache) for part in program.parts
                ),
            )
        )
    return found


def _held(part: RankProgram) -> Mapping[str, ShardedValue]:
    return {one.name: one.version for one in part.kept if one.initial != 0.0}


def _with_laws(
    part: RankProgram, main: Mapping[str, ShardedValue] | None, cache: dict[tuple[object, ...], RankProgram]
) -> RankProgram:
    """A program without weights that are laws; ranks that share what they keep share it still."""
    drawn = {held.name: held for held in part.weights if _is_law(held, main)}
    if not drawn:
        return part
    key = (part.likeness, tuple(drawn))
    if key not in cache:
        kept = {one.name: one for one in part.kept}
        for name, held in drawn.items():
            value = held.version.value
            law = law_of(value)
            assert law is not None
            own = kept.get(name) or StateTensor(name, held.version, "", value.name or "", "parameter")
            kept[name] = replace(own, initial=law)
        weights = tuple(held for held in part.weights if held.name not in drawn)
        cache[key] = replace(part, weights=weights, kept=tuple(kept.values()))
    like = cache[key]
    return replace(part, weights=like.weights, kept=like.kept)


def _is_law(held: LocalTensor, main: Mapping[str, ShardedValue] | None) -> bool:
    if law_of(held.version.value) is None:
        return False
    if main is None:
        return True
    there = main.get(held.name)
    return there is not None and (there.group, there.layout) == (held.version.group, held.version.layout)
