"""One tensor over ranks: every layout of a mesh is found again from its shards, and what is no layout is not."""

from __future__ import annotations

import pytest
from partc.compiler.annotations.spread import Spread, any_layout, fused_shards, layout_on, meshes, spread_of
from partc.compiler.layout.layout import Layout


@pytest.mark.parametrize("size", [4, 6, 12])
def test_every_layout_of_a_mesh_is_found_again(size: int) -> None:
    group = tuple(range(3, 3 + size))
    for mesh in meshes(size):
        for cuts in [((0,), ()), ((), (1, 0)), ((1,), (0,)), (tuple(range(len(mesh))), ())]:
            spread = spread_of(Layout(mesh, cuts), group)
            assert layout_on(mesh, spread, group) == Layout(mesh, cuts)
            found = any_layout(spread, group)
            assert found is not None
            assert spread_of(found, group) == spread


def test_shards_that_are_no_grid() -> None:
    assert any_layout(Spread((4,), ((0,), (1,), (3,), (2,))), (0, 1, 2, 3)) is None
    assert any_layout(Spread((2,), ((1,), (0,))), (0, 1)) is None


@pytest.mark.parametrize(
    ("entries", "shards"),
    [([(6, 3), (5, 1)], 3), ([(6, 6), (4, 2)], 12), ([(6, 3), (4, 2)], None), ([(None, 2)], 2), ([], 1)],
)
def test_fused_dims(entries: list[tuple[int | None, int]], shards: int | None) -> None:
    assert fused_shards(entries) == shards
