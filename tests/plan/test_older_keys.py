"""Keys of a plan that have better names now: the older ones mean the same, and schema and guide show the new ones alone."""

from __future__ import annotations

import json

import pytest
from partc.compiler.errors import CompileError
from partc.compiler.plan.read import parse_plan
from partc.compiler.plan.training.rules import TrainRules

TRAIN = "ranks: 1\ntrain:\n  loss: {type: mse, prediction: y, target: t}\n  optimizer: {type: sgd, lr: 0.1}\n"


def settings(text: str) -> dict[str, object]:
    train = parse_plan(TRAIN + text, "plan.yaml").train
    assert train is not None
    return train.settings().model_dump()


@pytest.mark.parametrize(
    ("older", "newer"),
    [("  last: keep\n", "  drop_last: false\n"), ("  last: drop\n", ""), ("  deal: 4\n", "  interleave: 4\n")],
)
def test_an_older_key_means_the_newer(older: str, newer: str) -> None:
    assert settings(older) == settings(newer)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("  last: pad\n", ["plan.yaml:5", "'last' is the string 'pad'", "write drop_last"]),
        ("  deal: 4\n  interleave: 4\n", ["plan.yaml:5", "'deal' and 'interleave' are two names", "leave 'deal' out"]),
        ("  interleave: 0\n", ["plan.yaml:5", "interleave"]),
    ],
)
def test_older_keys_that_say_nothing(text: str, said: list[str]) -> None:
    with pytest.raises(CompileError) as caught:
        settings(text)
    assert all(part in str(caught.value) for part in said), str(caught.value)


def test_the_schema_shows_the_newer() -> None:
    keys = json.loads(json.dumps(TrainRules.model_json_schema()))["properties"].keys()
    assert {"drop_last", "interleave"} <= keys
    assert keys.isdisjoint({"last", "deal"})
