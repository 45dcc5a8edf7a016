"""Merges the local forms of ranks that differ in constants alone, where each constant follows a law over the rank's place.

offset 0, 16, 32, 48 on the places 0 to 3    ->    16*place
once   1, 0, 0, 0                            ->    Max(1 - place, 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from partc.compiler.ir.constants import Constant, RankConstant
from partc.compiler.ir.local_form import LocalForm
from partc.compiler.ir.sharded import Group
from partc.compiler.ir.value_info import Array
from partc.compiler.ops.node import node_key

_MOST_ITEMS = 64
"""So many items of a constant are told one by one."""


def by_place(forms: Sequence[tuple[LocalForm, Sequence[int]]], sets: tuple[tuple[Group, ...], str]) -> LocalForm | None:
    """One form for all ranks, whose constants are laws over a rank's place; None where the forms differ otherwise.

    `forms`: each with its ranks. `sets`: the lists of ranks in which a rank has its place, and their name.
    """
    lists, group = sets
    form_of = {rank: form for form, ranks in forms for rank in ranks}
    rows = [[form_of[rank] for rank in ranks] for ranks in lists]
    row = rows[0]
    if len(row) < 2 or any(one is not two for other in rows[1:] for one, two in zip(row, other, strict=True)):
        return None
    first, *others = row
    nodes = [[node_key(node) for node in one.nodes] for one in row]
    names = first.constants.keys()
    if any(one != nodes[0] for one in nodes) or any(one.constants.keys() != names for one in others):
        return None
    constants: dict[str, Constant] = {}
    for name in first.constants:
        law = _law([one.constants[name] for one in row], group)
        if law is None:
            return None
        constants[name] = law
    laws = [name for name, one in constants.items() if isinstance(one, RankConstant)]
    ends = tuple({name: _array(one.constants[name]) for name in laws} for one in (first, row[-1]))
    return replace(first, constants=constants, ends=ends)


def _array(constant: Constant) -> Array:
    assert not isinstance(constant, RankConstant)
    return constant


def _law(row: Sequence[Constant], group: str) -> Constant | None:
    """The law of a constant that has one array per place; None where there is none."""
    arrays = [_array(one) for one in row]
    first = arrays[0]
    if any(one.dtype != first.dtype or one.shape != first.shape for one in arrays):
        return None
    if all(np.array_equal(one, first) for one in arrays):
        return first
    if first.size > _MOST_ITEMS or first.dtype.kind not in "iufb":
        return None
    columns = zip(*(one.reshape(-1).tolist() for one in arrays), strict=True)
    items = [item_of(column) for column in columns]
    if any(item is None for item in items):
        return None
    return RankConstant(group, first.dtype, first.shape, tuple(filter(None, items)))


def item_of(column: Sequence[float]) -> str | None:
    """Whole numbers by place as an expression: a multiple of it and a number, or one number on all but the first or last."""
    if not all(float(number).is_integer() for number in column):
        return None
    numbers = [int(number) for number in column]
    begin, step = numbers[0], numbers[1] - numbers[0]
    if all(number == begin + step * place for place, number in enumerate(numbers)):
        return _sum(step, "place", begin)
    if len({*numbers[1:]}) == 1:
        return _sum(-step, "Max(1 - place, 0)", numbers[1])
    if len({*numbers[:-1]}) == 1:
        return _sum(numbers[-1] - begin, f"Max(place - {len(numbers) - 2}, 0)", begin)
    return None


def _sum(times: int, term: str, number: int) -> str:
    """`16*place + 3`, without what is 0 or 1."""
    product = term if times == 1 else f"{times}*{term}" if times else ""
    return f"{product} + {number}" if product and number else product or str(number)
