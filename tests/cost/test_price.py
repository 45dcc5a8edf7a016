"""The seconds of a node: columns of a product are computed in blocks of 16, those of a convolution are the pixels of its images."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from machines import machine
from partc.compiler.cost.price import Operand, cost_of

Shape = tuple[int, ...]


@pytest.mark.parametrize(
    ("op", "given", "made", "operations", "columns"),
    [
        ("Conv", [(2, 512, 2, 2), (512, 512, 3, 3)], (2, 512, 2, 2), 2 * 2 * 512 * 512 * 9 * 4, 16 / 4),
        ("Conv", [(2, 512, 4, 4), (512, 512, 3, 3)], (2, 512, 4, 4), 2 * 2 * 512 * 512 * 9 * 16, 1.0),
        ("Conv", [(2, 512, 5, 5), (512, 512, 3, 3)], (2, 512, 5, 5), 2 * 2 * 512 * 512 * 9 * 25, 32 / 25),
        ("ConvTranspose", [(2, 64, 2, 2), (64, 32, 2, 2)], (2, 32, 4, 4), 2 * 2 * 64 * 32 * 4 * 4, 16 / 4),
        ("MatMul", [(300, 700), (700, 20)], (300, 20), 2 * 300 * 700 * 20, 32 / 20),
        ("MatMul", [(300, 700), (700, 1)], (300, 1), 2 * 300 * 700, 1.0),
    ],
)
def test_columns_are_computed_in_blocks(
    op: str, given: list[Shape], made: Shape, operations: int, columns: float
) -> None:
    node = ir.Node("", op, inputs=[ir.Value(name=f"i{k}", shape=ir.Shape(one)) for k, one in enumerate(given)])
    cost = cost_of(node, [Operand(one, 4) for one in given], [Operand(made, 4)])
    assert cost.operations == operations
    assert cost.seconds(machine().processors["cpu"]) == pytest.approx(max(columns * operations, cost.moved) / 1e9)


def test_rows_are_written_as_they_are_moved() -> None:
    """ScatterND copies its data and writes rows; elements one by one take longer."""
    shapes: list[Shape] = [(5000, 16), (256, 1), (256, 16)]
    costs = [
        cost_of(ir.Node("", op, inputs=[ir.Value(name=f"i{k}") for k in range(3)]), some, [Operand((5000, 16), 4)])
        for op, some in (
            ("ScatterND", [Operand(one, 4) for one in shapes]),
            ("ScatterElements", [Operand(one, 4) for one in (shapes[0], shapes[2], shapes[2])]),
        )
    ]
    assert [(one.kernel, one.moved) for one in costs] == [
        ("layout", 2 * 4 * 5000 * 16),
        ("scatter", 4 * (2 * 5000 + 2 * 256) * 16),
    ]
