"""A test over rows of a table fails by the names of all rows that fail; a row has fixtures of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from rows import first_and_of_today, of_today, pairwise, rows


def test_each_row_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[int, str]]()

    @rows("number, word", [(1, "a"), (2, "b"), (3, "c")], 2)
    def checked(number: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen.append((number, word))
        assert not [*tmp_path.iterdir()]
        (tmp_path / word).touch()
        assert Path.home != "patched"
        monkeypatch.setattr(Path, "home", "patched")
        if word == "a":
            pytest.skip("no reason")
        assert number % 2, "even"

    (mark,) = checked.pytestmark  # type: ignore[attr-defined]
    assert [group.id for group in mark.args[1]] == ["(1, 'a') to (2, 'b')", "(3, 'c') to (3, 'c')"]
    with pytest.raises(ExceptionGroup, match="1 of 3 rows fail") as caught:
        checked(group=[(1, "a"), (2, "b"), (3, "c")], tmp_path=tmp_path, monkeypatch=monkeypatch)  # type: ignore[call-arg]
    assert caught.value.exceptions[0].__notes__ == ["row: (2, 'b')"]
    assert seen == [(1, "a"), (2, "b"), (3, "c")]


def test_pairs_of_all_columns_are_in_some_row() -> None:
    columns = ([0, 1], "ab", [None, 1.0, 2.0], "xyz")
    taken = pairwise(*columns)
    assert len(taken) < 15
    for first in range(4):
        for second in range(first):
            assert {(row[first], row[second]) for row in taken} == {
                (a, b) for a in columns[first] for b in columns[second]
            }


def test_each_row_has_its_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARTC_TEST_ALL", raising=False)
    for size, count in ((9, 3), (6, 3), (3, 1), (7, 3)):
        days = []
        for day in range(20786, 20786 + size):
            monkeypatch.setenv("PARTC_TEST_DAY", str(day))
            days.append(of_today(range(size), count))
        assert {len(rows) for rows in days} == {count}
        assert {row for rows in days for row in rows} == {*range(size)}
    words = ["ab", "ac", "b", "ad", "ae", "ba", "af"]
    for day in ("0", "1", "5"):
        monkeypatch.setenv("PARTC_TEST_DAY", day)
        first = first_and_of_today(words, lambda word: word[0])
        assert (first[:2], len(first)) == (["ab", "b"], 4)
    monkeypatch.setenv("PARTC_TEST_ALL", "1")
    assert of_today("abc", 1) == ["a", "b", "c"]
    assert sorted(first_and_of_today(words, lambda word: word[0])) == sorted(words)
