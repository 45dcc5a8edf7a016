"""Heads of keys and values that a proposal repeats, since `tp` has more ranks than there are heads.

The compiler repeats them where attention is fused and its projections are cut, and a proposal is compiled before it is given: what is
told of them is what the compiler did (`rewrite/generation/repeated_heads.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from partc.compiler.cost.decoder_memory import cache_bytes
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Complete, Typed
from partc.compiler.proposal.generation import Generation
from partc.compiler.proposal.tensor_parallel import TensorParallel
from partc.runtime.units import size_text

_HEADS = 1
"""The dim of a cache, [slots, heads, entries, size]."""


def are_repeated(program: Typed, cut: TensorParallel, shards: int, done: Complete) -> bool:
    """Whether the compiler repeated the heads of all caches that these shardings of a program cut into more shards than they have."""
    few = {
        name_of(value)
        for one in cut.sets
        if one.heads_to_repeat(program, shards)
        for value, _ in one.places
        if value.is_graph_input()
    }
    return few <= _repeated(program, done).keys()


def repeated_lines(program: Typed, done: Complete, generation: Generation) -> Iterator[str]:
    """A comment line for each number of heads that is repeated, with what a rank's caches cost."""
    found = set(_repeated(program, done).values())
    kept = size_text(generation.groups * max(map(cache_bytes, done.parts)))
    for heads, ranks in sorted(found):
        yield (
            f"# {heads} heads of keys and values over {ranks} ranks: each is repeated, and is with its cache on {ranks // heads} ranks. "
            f"A rank keeps {kept} of caches, as over {heads} ranks."
        )


def _repeated(program: Typed, done: Complete) -> dict[str, tuple[int, int]]:
    """By name the caches whose heads the compiler repeated: how many they were, and are."""
    shapes = {name_of(value): program.values[value].shape for value in program.model.graph.inputs}
    found = dict[str, tuple[int, int]]()
    for cache in done.caches:
        before, after = shapes.get(name_of(cache)), done.values[cache].shape
        if before is None or after is None:
            continue
        heads, made = before[_HEADS], after[_HEADS]
        if isinstance(heads, int) and isinstance(made, int) and heads != made:
            found[name_of(cache)] = heads, made
    return found
