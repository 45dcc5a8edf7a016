"""Tests over the rows of long tables: a test of some 30 rows costs what a test of one does beside its body, which is 3 ms.

    @rows("case", CASES)
    def test_it_holds(case: Case, tmp_path: Path) -> None: ...

The test is called for each row with fixtures of its own; a failure has each row that fails, by name.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row")
Test = TypeVar("Test", bound=Callable[..., None])


def rows(names: str, table: Sequence[Any], size: int = 32, ids: Callable[[Any], str] = str) -> Callable[[Test], Test]:
    """Parametrizes a test as `pytest.mark.parametrize` does, by groups of `size` rows of the table."""
    keys = names.split(", ")
    groups = [
        pytest.param(table[k : k + size], id=f"{ids(table[k])} to {ids(table[min(k + size, len(table)) - 1])}")
        for k in range(0, len(table), size)
    ]

    def wrap(test: Test) -> Test:
        own = inspect.signature(test)

        @functools.wraps(test)
        def of_group(group: Sequence[Any], **fixtures: Any) -> None:
            failures, skipped = list[Exception](), 0
            for number, row in enumerate(group):
                given = dict(zip(keys, row if len(keys) > 1 else (row,), strict=True))
                try:
                    _call(test, given | fixtures, number)
                except pytest.skip.Exception:
                    skipped += 1
                except Exception as error:
                    error.add_note(f"row: {ids(row)}")
                    failures.append(error)
            if failures:
                raise ExceptionGroup(f"{len(failures)} of {len(group)} rows fail", failures)
            if skipped == len(group):
                pytest.skip("each row is skipped")

        kept = [parameter for name, parameter in own.parameters.items() if name not in keys]
        group = inspect.Parameter("group", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        of_group.__signature__ = own.replace(parameters=[group, *kept])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("group", groups)(of_group)  # type: ignore[return-value]

    return wrap


def _call(test: Callable[..., None], given: dict[str, Any], number: int) -> None:
    """Calls the test for a row, with a folder of its own, and undoes its patches."""
    if isinstance(folder := given.get("tmp_path"), Path):
        given["tmp_path"] = folder / str(number)
        given["tmp_path"].mkdir()
    if "monkeypatch" in given:
        with given["monkeypatch"].context() as given["monkeypatch"]:
            test(**given)
    else:
        test(**given)


def of_today(table: Sequence[Row], count: int) -> list[Row]:
    """Returns so many of the rows, others each day, so that each row has its day; all of them with `PARTC_TEST_ALL=1`.

    Of rows that combine what other tests prove one by one. The rows of a day are spread over the table. A day is repeated by
    `PARTC_TEST_DAY=739949`.
    """
    if os.environ.get("PARTC_TEST_ALL"):
        return [*table]
    first, step = count * int(os.environ.get("PARTC_TEST_DAY", 0)), max(1, len(table) // max(1, count))
    order = [at for begin in range(step) for at in range(begin, len(table), step)]
    return [table[at] for at in sorted({order[(first + k) % len(table)] for k in range(count)})]


def first_and_of_today(table: Sequence[Row], key: Callable[[Row], object]) -> list[Row]:
    """Returns the first row of each key, in the table's order, and a quarter of the others, another one each day."""
    first = sorted({key(row): at for at, row in reversed([*enumerate(table)])}.values())
    others = [at for at in range(len(table)) if at not in {*first}]
    return [table[at] for at in [*first, *of_today(others, -(-len(others) // 4))]]


def pairwise(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The rows of a product, in its order, that suffice for each pair of choices of two columns to be in one of them."""
    every = [*itertools.product(*map(range, map(len, columns)))]
    pairs = {row: {*itertools.combinations(enumerate(row), 2)} for row in every}
    missing, taken = set().union(*pairs.values()), set[tuple[int, ...]]()
    while missing:
        best = max(every, key=lambda row: len(pairs[row] & missing))
        taken.add(best)
        missing -= pairs[best]
    return [tuple(column[k] for column, k in zip(columns, row, strict=True)) for row in every if row in taken]
