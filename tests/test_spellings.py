"""The first free spelling of a name."""

from collections.abc import Iterator
from itertools import chain, islice

from partc.runtime.spellings import first_free, numbered, stroked


def test_a_free_name_is_kept_and_no_other_spelling_asked_for() -> None:
    def others(name: str) -> Iterator[str]:
        raise AssertionError(name)

    assert first_free("h", {"x"}.__contains__, others) == "h"


def test_a_taken_name_gets_as_many_strokes_as_make_it_free() -> None:
    assert first_free("h", {"h"}.__contains__) == "h'"
    assert first_free("h", {"h", "h'", "h'''"}.__contains__) == "h''"


def test_other_spellings_are_tried_in_order() -> None:
    taken = {"h", "a.h", "a.h.2"}
    assert first_free("h", taken.__contains__, lambda _: chain(["a.h"], numbered("a.h", ".", 2))) == "a.h.3"


def test_spellings_that_are_left_go_on_where_they_were() -> None:
    left, taken = numbered("Relu"), {"Relu", "Relu_2"}
    assert [first_free("Relu", taken.__contains__, lambda _: left) for _ in range(3)] == ["Relu_1", "Relu_3", "Relu_4"]


def test_spellings() -> None:
    assert [*islice(stroked("h"), 2)] == ["h'", "h''"]
    assert [*islice(numbered("Relu"), 2)] == ["Relu_1", "Relu_2"]
    assert [*islice(numbered("s", ".", 0), 2)] == ["s.0", "s.1"]
