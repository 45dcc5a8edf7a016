"""A line of a plan that later lines overrule for every node is told; an exception behind its general line is not."""

from __future__ import annotations

import pytest
from partc.compiler.pipeline import step_program
from partc.compiler.plan.read import parse_plan
from training_equivalence import from_text

NET = """<ir_version: 10, opset_import: ["" : 21]>
m (float[4, 6] x) => (float[4, 5] y)
<float[6, 8] w, float[8, 5] v> {
    [up] a = MatMul (x, w)
    [act] b = Relu (a)
    [down] y = MatMul (b, v)
}"""


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("placement: {up: 0, '**': 1}", ["placement of 'up' decides nothing: '**' (plan.yaml:2)"]),
        ("placement: {'**': 1, up: 0}", []),
        (
            "placement: {'*': 1, up: 0, act: 1, down: 0}",
            ["placement of '*' decides nothing: 'up' (plan.yaml:2), 'act'"],
        ),
        ("target: {up: cpu, '**': cuda}", ["target of 'up' decides nothing"]),
        ("target: {'**': cuda, up: cpu}", []),
        ("placement: {'**': [0, 1]}\nsharding: {up: colwise, '?p': replicated}", ["sharding of 'up' decides nothing"]),
    ],
)
def test_a_line_that_decides_nothing_is_told(plan: str, told: list[str]) -> None:
    source = from_text(NET, {"w": (6, 8), "v": (8, 5)})
    parsed = parse_plan(f"ranks: 2\n{plan}\n", "plan.yaml")
    found = [one for one in step_program(source, parsed, "m").warnings if "decides nothing" in one]
    assert len(found) == len(told)
    assert all(words in one for words, one in zip(told, found, strict=True))
