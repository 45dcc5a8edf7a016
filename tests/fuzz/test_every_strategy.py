"""A few ops of `every_strategy.py`, which has all: the checker accepts them, and a training takes what inference takes."""

from __future__ import annotations

import numpy as np
import pytest
from every_strategy import faults
from rule_case import Case, case

CASES = [
    case("Conv", [(2, 6, 4), (4, 3, 1)], {"group": 2}),  # the convolution of a rank that has one group says `group` 1
    case("Conv", [(2, 4, 4), (4, 1, 1)], {"group": 4}),
    case("MatMul", [(4, 1, 3, 2), (2, 2, 3)]),  # a dim of the second operand is repeated for the first
    case(
        "GroupNormalization", [(2, 4, 3), (2,), (2,)], {"num_groups": 2}, opset=18
    ),  # which the standard has deprecated
    case(
        "MaxPool", [(2, 2, 6)], {"kernel_shape": [1], "strides": [2], "ceil_mode": 1}
    ),  # shape inference counts 4 windows
    case("ScatterElements", [(4, 2), np.array([[1, -1], [1, 0]]), (2, 2)], {"reduction": "add"}),  # both rows are cut
    case("Clip", [(4, 6), None, np.array(1.5, np.float32)]),  # an entry for an operand that is absent
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_checker_and_a_training_take_every_strategy(case: Case) -> None:
    found = list(faults(case))
    assert len(found) > 2
    assert [plan + wrong for plan, wrong in found if wrong] == []
