"""Which records a batch has: the same on every rank, each once an epoch, dealt as MegEngine deals, similar lengths together."""

from __future__ import annotations

import numpy as np
import pytest
from partc.runtime.data.sampler import Buckets, Order, Position
from partc.runtime.errors import UsageError


def epoch_of(order: Order, epoch: int) -> list[list[int]]:
    return [order.indices(Position(epoch, batch)).tolist() for batch in range(order.batches)]


def megengine(records: int, ranks: int, batch: int, drop_last: bool, order: list[int]) -> list[list[list[int]]]:
    """By rank its batches, as MegEngine's MapSampler makes them; `batch` is one rank's."""
    total = -(-records // ranks) * ranks
    indices = list(order) + list(order)[: total - records]
    found = []
    for rank in range(ranks):
        own = indices[rank:total:ranks]
        batches = [own[at : at + batch] for at in range(0, len(own), batch)]
        found.append([one for one in batches if not drop_last or len(one) == batch])
    return found


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [4, 4]), (False, [4, 4, 3])])
def test_an_epoch_has_every_record_once(drop_last: bool, sizes: list[int]) -> None:
    order = Order(records=11, batch=4, seed=3, drop_last=drop_last)
    for epoch in range(3):
        batches = epoch_of(order, epoch)
        seen = [index for batch in batches for index in batch]
        assert [len(batch) for batch in batches] == sizes
        assert len(set(seen)) == len(seen)
        assert set(seen) <= set(range(11))
    assert epoch_of(order, 0) != epoch_of(order, 1)
    assert epoch_of(order, 1) == epoch_of(Order(records=11, batch=4, seed=3, drop_last=drop_last), 1)
    assert epoch_of(order, 1) != epoch_of(Order(records=11, batch=4, seed=4, drop_last=drop_last), 1)


def test_a_known_permutation_stays() -> None:
    assert Order(records=8, batch=4, seed=1).epoch(0).tolist() == [5, 0, 1, 4, 2, 6, 3, 7]


def test_without_shuffling_records_stand_as_they_are() -> None:
    order = Order(records=7, batch=3, shuffle=False, drop_last=False)
    assert epoch_of(order, 5) == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("records", "ranks", "batch"), [(10, 2, 2), (11, 2, 3), (23, 3, 2), (24, 3, 4), (25, 6, 2)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_dealt_as_megengine_deals(records: int, ranks: int, batch: int, drop_last: bool, shuffle: bool) -> None:
    plain = Order(records, 1, seed=5, shuffle=shuffle).epoch(2).tolist()
    wanted = megengine(records, ranks, batch, drop_last, plain)
    order = Order(records, ranks * batch, seed=5, shuffle=shuffle, drop_last=drop_last, interleave=ranks)
    assert order.batches == len(wanted[0])
    for number, whole in enumerate(epoch_of(order, 2)):
        pieces = np.array(whole).reshape(ranks, -1).tolist()
        assert pieces == [wanted[rank][number] for rank in range(ranks)]
        assert len(whole) == (order.batch if number + 1 < order.batches or not order.rest else order.rest)


def test_positions_follow_each_other() -> None:
    order = Order(records=7, batch=3, drop_last=False)
    position, seen = Position(), []
    for _ in range(4):
        seen.append((position.epoch, position.batch))
        position = order.after(position)
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0)]
    with pytest.raises(UsageError, match="there is no batch 3 of epoch 1: an epoch has 3 batches"):
        order.check(Position(1, 3))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"records": 3, "batch": 4}, "3 records do not fill one batch of 4\n  help: take batches of at most 3"),
        ({"records": 0, "batch": 4, "drop_last": False}, "0 records do not fill"),
        ({"records": 9, "batch": 4, "interleave": 3}, "batches of 4 cannot be dealt to 3 ranks"),
        ({"records": 9, "batch": 0, "interleave": 0}, "the batch size is 0; it must be at least 1\ninterleave is 0"),
        ({"records": 9, "batch": 3, "seed": -1}, "the seed is -1; it must be at least 0"),
        (
            {"records": 9, "batch": 4, "interleave": 2, "buckets": Buckets.of(np.arange(9))},
            "`interleave` and `length` each say",
        ),
    ],
)
def test_orders_that_make_no_sense(given: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        Order(**given)  # type: ignore[arg-type]
    assert told in str(caught.value)


def test_one_small_batch_can_be_kept() -> None:
    assert epoch_of(Order(3, 4, shuffle=False, drop_last=False), 0) == [[0, 1, 2]]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("boundaries", [(), (16, 64)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_buckets_bring_similar_lengths_together(drop_last: bool, boundaries: tuple[int, ...], shuffle: bool) -> None:
    lengths = np.random.default_rng(0).geometric(0.03, 1003)
    plain = Order(1003, 8, seed=2, shuffle=shuffle, drop_last=drop_last)
    order = Order(
        1003, 8, seed=2, shuffle=shuffle, drop_last=drop_last, buckets=Buckets.of(lengths, boundaries, window=40)
    )
    padded = {}
    for name, one in (("plain", plain), ("order", order)):
        batches = epoch_of(one, 4)
        seen = [index for batch in batches for index in batch]
        assert len(batches) == (126 if not drop_last else 125)
        assert [len(batch) for batch in batches[:125]] == [8] * 125
        assert len(set(seen)) == len(seen) == (1003 if not drop_last else 1000)
        padded[name] = sum(len(batch) * lengths[batch].max() for batch in batches)
    assert padded["order"] < (0.75 if boundaries else 0.6) * padded["plain"]
    assert (epoch_of(order, 0) == epoch_of(order, 1)) is not shuffle


def test_windows_are_shuffled_apart() -> None:
    lengths = np.arange(12)[::-1]
    order = Order(12, 2, shuffle=False, buckets=Buckets.of(lengths, (2, 5, 8), window=3))
    assert epoch_of(order, 0) == [[3, 4], [5, 0], [1, 2], [9, 10], [11, 6], [7, 8]]


def test_buckets_that_do_not_rise() -> None:
    with pytest.raises(UsageError, match="buckets are"):
        Buckets.of(np.arange(4), (3, 3))
    with pytest.raises(UsageError, match="window is 0 batches"):
        Buckets.of(np.arange(4), window=0)
