"""The reference of the guide is what the code says, and leaves nothing out."""

from __future__ import annotations

import pytest
from partc.compiler.plan.schema import plan_schema
from partc.compiler.plan.training.losses import LOSSES
from partc.compiler.plan.training.metrics import METRICS
from reference_pages import PAGES, PARTS, REFERENCE, SCHEDULES, TRAIN_PARTS


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name: str) -> None:
    assert (REFERENCE / f"{name}.md").read_text() == PAGES[name](), "run `python tests/samples/reference_pages.py`"


def test_no_part_of_a_plan_is_left_out() -> None:
    """The options of optimizers are on the page that is made from their table."""
    forms = {name for name in plan_schema()["$defs"] if not name.endswith("Options")}
    types = {kind.__name__ for kind in (*LOSSES.values(), *METRICS.values())}
    assert forms == {*PARTS, *TRAIN_PARTS, *SCHEDULES, "TrainRules"} | types


def test_every_page_of_the_reference_is_generated() -> None:
    assert {path.stem for path in REFERENCE.glob("*.md")} == {*PAGES}
