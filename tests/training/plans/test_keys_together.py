"""Keys of a plan beside each other: a small decoder trains as on one rank, and the checker accepts it, or the compile refuses the plan."""

from __future__ import annotations

import pytest
from keys_together import outcome
from rows import of_today

EQUAL = [
    ["routed", "stored"],
    ["gather", "zero"],
    ["stored", "ring"],
    ["shared", "heads"],
    ["routed along cp", "packed"],
    ["routed", "stages", "recompute"],
    ["stored", "elastic", "clip"],
    ["stored", "adapters"],
    ["stored along tp", "target"],
    ["stored along tp", "gather"],
    ["stored", "target", "accumulate"],
    ["scan", "stored", "elastic"],
    ["turns cut", "stored", "microbatches"],
    ["stored", "packed", "float16", "stages"],
    ["replicas", "packed"],
    ["fold", "float16"],
    ["zero", "packed", "ring"],
]


@pytest.mark.parametrize("names", of_today(EQUAL, 2), ids=" + ".join)
def test_keys_are_equal_together(names: list[str]) -> None:
    found, text = outcome(names)
    assert found == "equal", text


REFUSED = [
    (["parts", "packed"], "'parts' beside 'messages'\n  gradients are whole on a rank"),
    (["parts", "ring"], "'parts', and the mesh has axes besides 'dp': dp=2 x cp=2"),
    (
        ["each microbatch", "packed"],
        "'keep_rest' beside 'reduce: microbatch'\n  what rounding leaves is kept from step",
    ),
]


@pytest.mark.parametrize(("names", "words"), REFUSED, ids=[" + ".join(names) for names, _ in REFUSED])
def test_keys_are_refused_together(names: list[str], words: str) -> None:
    found, text = outcome(names)
    assert found == "refused"
    assert text.startswith("plan.yaml:")
    assert words in text
