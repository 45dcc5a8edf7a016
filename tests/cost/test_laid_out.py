"""What nodes cost beside their operations: second operands and windows are laid out first; views, and functions over flat memory."""

from __future__ import annotations

import onnx
import pytest
from machines import curve
from partc.compiler.cost.actions import shown
from partc.compiler.cost.machine import Curve, Processor
from partc.compiler.cost.price import cost_of, function_seconds
from partc.compiler.cost.sizes import Operand

US = 1e-6
CPU = Processor(
    2 * US,
    0.0,
    {"matmul": Curve(((1e3, 1e-7), (1e9, 0.1)))},  # 10 GFLOP/s
    {
        "elementwise": Curve(((1e3, 1e-8), (1e9, 0.01))),  # 100 GB/s
        "unfold": Curve(((1e3, 1e-6), (1e9, 1.0))),  # 1 GB/s
        "pack": Curve(((1e3, 5e-7), (1e9, 0.5))),  # 2 GB/s
        "view": curve(1e18, 3 * US),
    },
)


def seconds(text: str, given: list[tuple[int, ...] | None], made: tuple[int, ...], constant: bool = False) -> float:
    """The seconds of a node whose second operand may be a constant; elements are of four bytes."""
    node = onnx.parser.parse_node(text)
    operands = [None if one is None else Operand(one, 4, constant and k == 1) for k, one in enumerate(given)]
    return cost_of(shown(node), operands, [Operand(made, 4)]).seconds(CPU)


def test_a_product_lays_out_its_second_operand_unless_that_is_constant() -> None:
    given: list[tuple[int, ...] | None] = [(48, 160), (160, 320)]
    computed = 2 * 48 * 160 * 320 / 1e10
    assert seconds("z = MatMul (x, y)", given, (48, 320)) == pytest.approx(computed + 160 * 320 * 4 / 2e9, rel=1e-3)
    assert seconds("z = MatMul (x, y)", given, (48, 320), constant=True) == pytest.approx(computed, rel=1e-3)


def test_a_convolution_is_products_and_the_columns_of_its_windows() -> None:
    """Two images of 6 channels, 24 x 24 places of 5 x 5 windows, in two groups: the columns of a group are of its channels alone."""
    x, w, y = (2, 6, 28, 28), (10, 6, 5, 5), (2, 10, 24, 24)
    products = 2 * 2 * 10 * 576 * 150 / 1e10
    assert seconds("y = Conv (x, w)", [x, w], y) == pytest.approx(products + 4 * 2 * 576 * 150 / 1e9, rel=1e-3)
    grouped = seconds("y = Conv <group = 2> (x, w)", [x, (10, 3, 5, 5)], y)
    assert grouped == pytest.approx(products / 2 + 4 * 2 * 576 * 150 / 1e9, rel=1e-3)
    flat = seconds("y = Conv (x, w)", [x, (10, 6, 1, 1)], (2, 10, 28, 28))
    assert flat == pytest.approx(2 * 2 * 10 * 784 * 6 / 1e10, rel=1e-3)


def test_a_view_is_a_call_and_a_constant_is_folded() -> None:
    assert seconds("y = Reshape (x, s)", [(6, 5), (1,)], (30,)) == pytest.approx(3 * US)
    assert seconds("y = Constant <value_int = 1> ()", [], ()) == 0.0


def test_a_function_of_flat_memory_goes_through_it_in_shards() -> None:
    """What is one number moves next to nothing; each of the two nodes moves what it reads and makes, and all comes once from memory."""
    function = onnx.parser.parse_function(
        """<domain: "d", opset_import: ["" : 21]> f (lr, x, g) => (y) { s = Mul (g, lr) y = Sub (x, s) }"""
    )
    count = 1_000_000
    operands = [Operand((), 4), Operand((count,), 4), Operand((count,), 4)]
    found = function_seconds(function, operands, CPU, 250_000)
    assert found == pytest.approx(4 * 2 * US + (2 + 3 + 3) * 4 * count / 1e11, rel=1e-2)
