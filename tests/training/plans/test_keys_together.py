"""Keys of a plan beside each other: a small decoder trains as on one rank, and the checker accepts it, or the compile refuses the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from keys_together import outcome, plan, source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime.artifact.manifest import open_artifact
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
    ["adapters", "replicas"],
    ["stored along tp", "target"],
    ["stored along tp", "gather"],
    ["stored", "target", "accumulate"],
    ["scan", "stored", "elastic"],
    ["turns cut", "stored", "microbatches"],
    ["stored", "packed", "float16", "stages"],
    ["replicas", "packed"],
    ["replicas", "gather", "target"],
    ["fold", "float16"],
    ["fold", "pull"],
    ["float16", "replicas", "recompute"],
    ["zero", "packed", "ring"],
]


@pytest.mark.parametrize("names", of_today(EQUAL, 2), ids=" + ".join)
def test_keys_are_equal_together(names: list[str]) -> None:
    found, text = outcome(names)
    assert found == "equal", text


def test_what_adapters_add_to_is_stored_in_shards(tmp_path: Path) -> None:
    """Gathered twice, as the adapters of its layer, and no gradient is sent for it."""
    program = compile_source(source(False), parse_plan(plan(["stored", "adapters"])[0], "plan.yaml"), tmp_path).program
    stored = open_artifact(tmp_path).manifest.stored
    assert stored is not None
    gathers = {one.unit: (one.gathers, "layers.0.experts.up" in one.tensors) for one in stored.units}
    assert gathers == {"tokens": (1, False), "head": (1, False), "layers.0": (2, True), "layers.1": (2, False)}
    sums = [event.cause for event in program.events if event.op_type == "ReduceScatter"]
    assert sums == [f"gradients of 4 parameters of 'layers.{k}'" for k in (1, 0)]


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
