"""When reference cycles are looked for: not in blocks that make what lives on, and not all of it when such a block ends."""

import gc
import weakref
from collections.abc import Iterator

import pytest
from partc.runtime import garbage_collection
from partc.runtime.garbage_collection import uncollected


class Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations that have been collected since; what the suite has frozen is not, meanwhile."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    if frozen:
        gc.freeze()


def test_what_a_block_makes_counts_as_old_when_it_ends(collections: list[int]) -> None:
    with uncollected():
        made = [[k] for k in range(10_000)]
        assert not gc.isenabled()
    young = gc.get_count()[0]
    assert gc.isenabled()
    assert collections == []
    assert young < 1_000 < len(made)


def test_cycles_of_a_block_are_freed_before_another_one(
    collections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage_collection, "MANY", 1_000)
    monkeypatch.setattr(garbage_collection, "_waiting", [0])
    with uncollected():
        lost = weakref.ref(Cycle())
        made = [[k] for k in range(10_000)]
    assert lost() is not None
    with uncollected():
        assert lost() is None
    assert collections == [2]
    assert made


def test_what_is_frozen_stays_so(collections: list[int]) -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with uncollected():
        assert not collections
    assert gc.get_freeze_count() == count > 0
    gc.unfreeze()
