"""The seconds of a node: columns of a product are computed in blocks of 16, those of a convolution are the pixels of its images."""

from __future__ import annotations

import math

import onnx_ir as ir
import pytest
from machines import machine
from partc.compiler.cost.machine import Curve, Processor
from partc.compiler.cost.price import NodeCost, cost_of
from partc.compiler.cost.sizes import Operand

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
    """ScatterND copies its data and writes rows as they are looked up; elements one by one take longer."""
    shapes: list[Shape] = [(5000, 16), (256, 1), (256, 16)]
    costs = [cost("ScatterND", shapes, (5000, 16)), cost("ScatterElements", [shapes[k] for k in (0, 2, 2)], (5000, 16))]
    assert [(one.kernel, one.moved, one.copied) for one in costs] == [
        ("lookup", 2 * 4 * 256 * 16, 2 * 4 * 5000 * 16),
        ("scatter", 4 * (2 * 5000 + 2 * 256) * 16, 0),
    ]


@pytest.mark.parametrize(
    ("op", "given", "made", "row", "attributes"),
    [
        ("Gather", [(30, 16), (70,)], (70, 16), 16, {}),
        ("Gather", [(30, 16, 24), (70,)], (30, 70, 24), 24, {"axis": 1}),
        ("Gather", [(4, 7168), (1024,)], (1024, 7168), 7168, {}),
        ("GatherND", [(4, 112, 60), (1024, 1)], (1024, 112, 60), 112 * 60, {}),
        ("GatherND", [(4, 112, 600), (1024, 2)], (1024, 600), 600, {}),
        ("GatherElements", [(30, 1000), (7, 1000)], (7, 1000), 1, {}),
        ("TensorScatter", [(2, 3, 64, 80), (2, 3, 1, 80)], (2, 3, 64, 80), 80, {}),
    ],
)
def test_long_rows_are_copied(op: str, given: list[Shape], made: Shape, row: int, attributes: dict[str, int]) -> None:
    """Of a row 256 bytes are as slow as a look-up of it, the others follow side by side."""
    found, taken = cost(op, given, made, **attributes), math.prod(given[1] if op == "TensorScatter" else made)
    in_rows = 2 * 4 * taken * min(1, 64 / row)
    assert found.moved == pytest.approx(in_rows)
    copies = 2 * 4 * math.prod(made) if op == "TensorScatter" else 0
    assert found.copied == pytest.approx(copies + 2 * 4 * taken - in_rows)


def test_a_sort_takes_what_it_makes() -> None:
    """The few greatest of many are read as all are, and sorted as few."""
    all_, few = (cost("TopK", [(50_000,), (1,)], (count,)) for count in (50_000, 50))
    assert [(one.kernel, one.moved, one.copied) for one in (all_, few)] == [
        ("sort", 4 * 50_000, 4 * 50_001),
        ("sort", 4 * 50, 4 * 50_001),
    ]


def test_nothing_is_faster_than_memory() -> None:
    """A reduction that was measured in the caches alone takes what an elementwise op takes of as many bytes."""
    memory, cached = Curve(((1e3, 1e-7), (1e6, 1e-4), (1e8, 1.0))), Curve(((1e3, 1e-7), (1e6, 1e-4)))
    processor = Processor(0.0, 0.0, {}, {"elementwise": memory, "reduction": cached})
    assert cost("ReduceSum", [(25, 1_000_000)], (25,)).seconds(processor) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("matrices", "vectors", "seconds"),
    [
        ((100, 16, 16), (100, 16, 16), 1e-6 + 100 * 2e-7),
        ((16, 16), (16, 16), 2e-6),
        ((100, 64, 16), (100, 16, 1), 4 * 100 * (64 * 16 + 64 + 16) * 1e-10),
        ((100, 1, 16), (100, 16, 64), 4 * 100 * (64 * 16 + 64 + 16) * 1e-10),
    ],
)
def test_a_batch_is_one_call(matrices: Shape, vectors: Shape, seconds: float) -> None:
    """Of many small matrices each takes a part of what a node takes that multiplies one, and matrices are read once for a vector."""
    products = {"matmul": Curve(((1e3, 2e-6), (1e4, 2e-6))), "batch": Curve(((1e3, 2e-7), (1e4, 2e-7)))}
    kernels = {"elementwise": Curve(((1e3, 1e-6), (1e6, 1e-5))), "vectors": Curve(((1e3, 1e-7), (1e6, 1e-4)))}
    found = cost("MatMul", [matrices, vectors], (*matrices[:-1], vectors[-1]))
    assert found.seconds(Processor(0.0, 0.0, products, kernels)) == pytest.approx(seconds)


def cost(op: str, given: list[Shape], made: Shape, **attributes: int) -> NodeCost:
    """The cost of a node whose operands are of four bytes an element."""
    node = ir.Node(
        "", op, [ir.Value(name=f"i{k}") for k in range(len(given))], ir.convenience.convert_attributes(attributes)
    )
    return cost_of(node, [Operand(one, 4) for one in given], [Operand(made, 4)])
