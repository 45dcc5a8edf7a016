"""Converts a strategy, the cuts of an op's tensor inputs, to the mesh axes that shard each factor of its rule.

By integers: each factor has the number of shards of its dims, and dims of one factor agree. The device matrix is the factors' numbers of
shards in the rule's factor order, row-major, and the rest of the group is a replication axis, last: neighbouring ranks are replicas. By
names: each factor is sharded by the named axes of its dims, major first. In both every axis is refined into its prime factors, ascending,
so that strategies with different device matrices use the same mesh:

    mk,kn->mn   [[2, 4], [4, 1]] on 8     m: 2, k: 4, n: 1     mesh (2, 2, 2)   m (0,), k (1, 2), n ()
    mk,kn->mn   [[2, 2], [2, 1]] on 8     m: 2, k: 2, n: 1     mesh (2, 2, 2)   m (0,), k (1,), n (), the last axis replicates
    mk,kn->mn   [[dp, tp], [tp, null]]    dp: 2, tp: 4         mesh (2, 2, 2)   m (0,), k (1, 2), n ()

A factor that only derived inputs (null) have stays open: it is not in the result.

Looked-up rows may have the axes of the ids: by names always, by integers where both have the same number of shards and the group has no
room for separate axes. Then the rows are pulled.

    vb,i->ib    [[4, 1], [4]] on 4        v: 4, i: 4           mesh (2, 2)      v (0, 1), i (0, 1)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from partc.compiler.errors import Problem
from partc.compiler.layout.layout import Mesh, primes
from partc.compiler.ops.rule import WHOLE, Rule
from partc.compiler.plan.groups import Axes, shown_mesh
from partc.runtime.options import Refused

Shard = TypeVar("Shard", int, tuple[str, ...])


class WrongStrategy(ValueError):
    """Raised for a strategy that an op or its group cannot have, with all its violations."""

    def __init__(self, violations: Sequence[Refused]) -> None:
        super().__init__("; ".join(violation.fact for violation in violations))
        self.violations = tuple(violations)

    def problems(self, where: str, subject: str) -> list[Problem]:
        """Returns the problems of `subject`, such as `sharding of 'matmul1' (MatMul)`, at the line that declares the strategy."""
        return [Problem.of(violation, where, subject) for violation in self.violations]


def assign_integers(rule: Rule, cuts: Sequence[Sequence[int] | None], group_size: int) -> dict[str, int]:
    """Maps each factor to its number of shards; raises WrongStrategy.

    `cuts`: one entry for each tensor input, None for an input that is derived. Dims of one factor have the same number of shards, an
    unsharded dim has 1, and the product of all factors' numbers of shards divides the group's size.
    """
    shards, violations = _by_factor(rule, cuts, 1)
    product = math.prod(shards.values())
    if group_size % product and shares_rows(rule, shards):
        product //= shards[rule.looked_up]
    if not violations and group_size % product:
        fact = f"the strategy has {product} shards, but the group has {group_size} ranks"
        counts = " * ".join(str(count) for count in shards.values() if count > 1)
        law = f"the product of the cuts, {counts}, divides the number of ranks"
        *fewer, most = (str(count) for count in range(1, group_size + 1) if group_size % count == 0)
        help = f"cut into {', '.join(fewer)} or {most} shards" if fewer else "cut nothing"
        violations.append(Refused(fact, law, help))
    if violations:
        raise WrongStrategy(violations)
    return shards


def shares_rows(rule: Rule, shards: Mapping[str, int]) -> bool:
    """Whether looked-up rows have the same number of shards, more than one, as the ids."""
    rows = shards.get(rule.looked_up, 1)
    return rows > 1 and rows == math.prod(shards.get(letter, 1) for letter in rule.ids)


def shared_axes(rule: Rule, shards: Mapping[str, int], group_size: int) -> tuple[Mesh, dict[str, tuple[int, ...]]]:
    """Same as `to_axes` for a result of `assign_integers`; in a group too small for both, looked-up rows share the axes of the ids."""
    if group_size % math.prod(shards.values()):
        rest = {letter: count for letter, count in shards.items() if letter != rule.looked_up}
        mesh, axes = to_axes(rest, rule.factors, group_size)
        return mesh, axes | {rule.looked_up: tuple(axis for letter in rule.ids for axis in axes.get(letter, ()))}
    return to_axes(shards, rule.factors, group_size)


def to_axes(
    shards: Mapping[str, int], factors: Sequence[str], group_size: int
) -> tuple[Mesh, dict[str, tuple[int, ...]]]:
    """Returns the refined mesh of a group, and maps each factor in `shards` to the axes that shard it; `factors` is the rule's order."""
    product = math.prod(shards.values())
    if group_size % product or not set(shards) <= set(factors):
        raise ValueError(f"{dict(shards)} of the factors {''.join(factors)} is no cut over {group_size} ranks")
    given = [(factor, shards[factor]) for factor in factors if factor in shards]
    mesh, axes = refined((*given, ("", group_size // product)))
    return mesh, {factor: axes[factor] for factor, _ in given}


def from_names(rule: Rule, cuts: Sequence[Sequence[tuple[str, ...]] | None], mesh: Axes) -> dict[str, tuple[int, ...]]:
    """Maps each factor to the axes of the refined mesh that shard it, major first; raises WrongStrategy.

    `cuts`: as for `assign_integers`, but each dim has the names of the axes that shard it. An axis shards at most one factor of an op.
    """
    names, violations = _by_factor(rule, cuts, ())
    known = dict(mesh)
    unknown = [name for name in dict.fromkeys(itertools.chain.from_iterable(names.values())) if name not in known]
    if unknown:
        listed = ", ".join(f"'{name}'" for name in unknown)
        there = f"the group's mesh is {shown_mesh(mesh)}" if mesh else "the group has no mesh"
        violations.append(Refused(f"{listed} {'is not an axis' if len(unknown) == 1 else 'are not axes'} of it", there))
    for one, other in itertools.combinations(names, 2):
        if rule.looked_up in (one, other) and {one, other} & {*rule.ids}:
            continue
        if shared := [name for name in names[one] if name in names[other]]:
            fact = f"the axis '{shared[0]}' cuts {_dims_of(rule, one)} and {_dims_of(rule, other)}, which differ"
            violations.append(Refused(fact, "an axis cuts one factor of an op: dims that correspond"))
    if violations:
        raise WrongStrategy(violations)
    _, axes = refined(mesh)
    return {factor: tuple(axis for name in cut for axis in axes[name]) for factor, cut in names.items()}


def refined(mesh: Axes) -> tuple[Mesh, dict[str, tuple[int, ...]]]:
    """Returns the mesh with every axis refined into its prime factors, ascending, and maps each name to its refined axes, major first."""
    sizes: list[int] = []
    axes: dict[str, tuple[int, ...]] = {}
    for name, size in mesh:
        parts = primes(size)
        axes[name] = tuple(range(len(sizes), len(sizes) + len(parts)))
        sizes += parts
    return tuple(sizes), axes


def _by_factor(
    rule: Rule, cuts: Sequence[Sequence[Shard] | None], uncut: Shard
) -> tuple[dict[str, Shard], list[Refused]]:
    """Maps each factor, in the rule's order, to the shards or axes that the cuts give its dims; also returns the violations."""
    by_letter: dict[str, tuple[Shard, str]] = {}
    violations: list[Refused] = []
    for index, letters, cut in _operands(rule, cuts):
        if cut is None:
            continue
        if len(cut) != len(letters):
            fact = f"input {index} is cut in {len(cut)} dims, but has {len(letters)}"
            violations.append(Refused(fact, "a cut has one entry for each dim"))
            continue
        for dim, (letter, shard) in enumerate(zip(letters, cut, strict=True)):
            at = f"input {index}, dim {dim}"
            if letter not in rule.factors:
                if shard != uncut:
                    law = "it broadcasts, or the op needs it replicated" if letter == WHOLE else "the op needs it whole"
                    law = "its rows lie on the ranks that serve them" if rule.served and index == 0 else law
                    violations.append(
                        Refused(f"{at} is cut {_into(shard)}, but stays whole", law, f"write {uncut or 'null'}")
                    )
                continue
            other, first = by_letter.setdefault(letter, (shard, at))
            if other != shard:
                fact = f"{first} is cut {_into(other)}, but {at} {_into(shard)}"
                violations.append(Refused(fact, "these dims correspond: they are cut alike"))
    return {factor: by_letter[factor][0] for factor in rule.factors if factor in by_letter}, violations


def _operands(rule: Rule, cuts: Sequence[Sequence[Shard] | None]) -> list[tuple[int, str, Sequence[Shard] | None]]:
    """Returns the op's tensor inputs, each with its index, letters and cut; entries for absent inputs may be missing, None or empty."""
    tensors = [(index, letters) for index, letters in enumerate(rule.inputs) if letters is not None]
    if len(cuts) == len(rule.inputs):
        absent = [k for k, letters in enumerate(rule.inputs) if letters is None and cuts[k]]
        if absent:
            raise WrongStrategy([Refused(f"input {k} is cut, but is absent or no tensor") for k in absent])
        return [(index, letters, cuts[index]) for index, letters in tensors]
    if len(cuts) != len(tensors):
        fact = f"the strategy has {len(cuts)} input{'s' * (len(cuts) != 1)}, but the op has {len(tensors)}"
        help = "write null for an input whose cut is to be derived"
        raise WrongStrategy([Refused(fact, "a strategy has one entry for each tensor input", help)])
    return [(index, letters, cut) for (index, letters), cut in zip(tensors, cuts, strict=True)]


def _into(shard: int | tuple[str, ...]) -> str:
    if isinstance(shard, int):
        return f"into {shard}"
    return f"along {', '.join(shard)}" if shard else "not at all"


def _dims_of(rule: Rule, factor: str) -> str:
    """Describes the first dim that has a factor: `input 0, dim 1`."""
    for index, letters in enumerate(rule.inputs):
        if letters and factor in letters:
            return f"input {index}, dim {letters.index(factor)}"
    return f"the factor {factor}"
