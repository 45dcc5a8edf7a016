"""The first free spelling of a name."""

import itertools

from partc.runtime.spellings import counted, first_free, stroked


def test_a_free_name_is_kept() -> None:
    assert first_free("h", {"x"}.__contains__) == "h"


def test_a_taken_name_gets_as_many_strokes_as_make_it_free() -> None:
    assert first_free("h", {"h"}.__contains__) == "h'"
    assert first_free("h", {"h", "h'", "h'''"}.__contains__) == "h''"


def test_other_spellings_are_tried_in_order() -> None:
    others = itertools.chain(["a.h"], counted("a.h.", 2))
    assert first_free("h", {"h", "a.h", "a.h.2"}.__contains__, others) == "a.h.3"


def test_spellings_that_are_left_go_on_where_they_were() -> None:
    left = counted("Relu_")
    assert [first_free("Relu", {"Relu", "Relu_2"}.__contains__, left) for _ in range(3)] == [
        "Relu_1",
        "Relu_3",
        "Relu_4",
    ]


def test_spellings() -> None:
    assert [*itertools.islice(stroked("h"), 2)] == ["h'", "h''"]
    assert [*itertools.islice(counted("s.", 0), 3)] == ["s.0", "s.1", "s.2"]
    assert [*itertools.islice(counted("{0}_%s"), 1)] == ["{0}_%s1"]
