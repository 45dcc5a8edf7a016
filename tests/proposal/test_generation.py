"""The section `generate` of a proposed plan."""

import pytest
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.generation import Generation


@pytest.mark.parametrize(
    ("degrees", "slots", "line"),
    [
        (Degrees(), None, "generate: {slots: 1, length: 16, chunk: 16}"),
        (Degrees(dp=2), None, "generate: {slots: 2, length: 16, chunk: 16}"),
        (Degrees(tp=2, dp=2, stages=3), None, "generate: {slots: 6, length: 16, groups: 3, chunk: 16}"),
        (Degrees(stages=2), 8, "generate: {slots: 8, length: 16, groups: 2, chunk: 16}"),
        (Degrees(dp=2, stages=2), 6, "generate: {slots: 6, length: 16, chunk: 16}"),
    ],
)
def test_groups_are_as_many_as_stages_where_they_divide_the_slots(
    degrees: Degrees, slots: int | None, line: str
) -> None:
    assert Generation.over(degrees, 16, slots).line == line
