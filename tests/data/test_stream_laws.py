"""Every record once an epoch, on any number of ranks, stopped after any step and resumed on others: for each kind of source."""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_case import joined, sharded
from partc.runtime.artifact.training.data_spec import Spec
from partc.runtime.data.loader import Loader, open_loader
from partc.runtime.data.sampler import Position
from partc.runtime.data.streams.loader_stream import says_its_place
from rows import of_today

RECORDS, BATCH, EPOCHS = 41, 6, 2
X = np.arange(RECORDS * 4, dtype=np.float32).reshape(RECORDS, 4)
LABEL = np.arange(RECORDS, dtype=np.int64)
TORCH = pytest.importorskip("torch", reason="torch is not installed: most sources here are its")


class Single(TORCH.utils.data.Dataset):  # type: ignore[misc, name-defined]
    """Records one by one: an array of indices is none of its business."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[Any, int]:
        assert isinstance(index, int)
        return TORCH.from_numpy(X[index]), int(LABEL[index])


class Many(Single):
    """Records by a list of indices."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{"label": LABEL[index], "x": X[index]} for index in indices]


class Iterable(TORCH.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
    """Records in their own order."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(X, LABEL, strict=True)


def loader(dataset: Any = None, **options: Any) -> Any:
    tensors = TORCH.utils.data.TensorDataset(TORCH.from_numpy(X), TORCH.from_numpy(LABEL))
    return TORCH.utils.data.DataLoader(dataset or tensors, **{"batch_size": BATCH, **options})


def generator_of_its_own() -> Any:
    return loader(shuffle=True, generator=TORCH.Generator().manual_seed(11))


def collated() -> Any:
    return loader(
        shuffle=True, collate_fn=lambda rows: {"x": np.stack([x for x, _ in rows]), "label": [y for _, y in rows]}
    )


class Batches:
    """A batch sampler of the user's, another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng(self.epoch).permutation(RECORDS).tolist()
        return (order[begin : begin + BATCH] for begin in range(0, RECORDS, BATCH))


def records(epoch: int) -> Iterator[dict[str, Any]]:
    for k in np.random.default_rng(epoch).permutation(RECORDS).tolist():
        yield {"x": X[k].tolist(), "label": k}


def arrow() -> Any:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    features = datasets.Features(
        {
            "x": datasets.Sequence(datasets.Value("float32")),
            "label": datasets.Value("int64"),
            "s": {"a": datasets.Value("int8")},
        }
    )
    return datasets.Dataset.from_dict({"x": X, "label": LABEL, "s": [{"a": 1}] * RECORDS}, features=features)


def arrow_stream() -> Any:
    return arrow().remove_columns("s").to_iterable_dataset(num_shards=3)


def shuffled_stream() -> Any:
    return arrow_stream().shuffle(seed=5, buffer_size=7)


def stateful() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks torch for all of its names, deprecated ones too
        data = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
        return data.StatefulDataLoader(Single(), batch_size=BATCH, shuffle=True)


SOURCES = {
    "tensors": lambda: TORCH.utils.data.TensorDataset(TORCH.from_numpy(X), TORCH.from_numpy(LABEL)),
    "mapping": lambda: {"x": X, "label": TORCH.from_numpy(LABEL)},
    "list": lambda: [{"x": x, "label": y} for x, y in zip(X, LABEL, strict=True)],
    "single": Single,
    "many": Many,
    "arrow": arrow,
    "loader": lambda: loader(shuffle=True),
    "own": generator_of_its_own,
    "workers": lambda: loader(Single(), shuffle=True, num_workers=2),
    "collated": collated,
    "sampler": lambda: TORCH.utils.data.DataLoader(Single(), batch_sampler=Batches()),
    "persistent": lambda: loader(Many(), shuffle=True, num_workers=1, persistent_workers=True),
    "arrow_loader": lambda: loader(arrow().remove_columns("s").with_format("torch"), shuffle=True),
    "iterable_loader": lambda: loader(Iterable()),
    "iterable": Iterable,
    "records": lambda: records,
    "arrow_stream": arrow_stream,
    "shuffled_stream": shuffled_stream,
    "stateful": stateful,
}
STATEFUL = ("arrow_stream", "stateful")
FOUND_AGAIN = ("iterable_loader", "iterable", "records", "shuffled_stream")
STOPS = ((1, 1, 3), (4, 2, 1), (6, 3, 2), (9, 2, 3), (11, 1, 2))
"""Steps after which a run is stopped, and its ranks before and after."""
WITH_PROCESSES = {"workers": STOPS[1:3], "persistent": STOPS[3:]}
"""Sources that start processes for each reader have fewer stops: inside of an epoch, between two, and inside of the second one."""


def opened(source: Any, ranks: int, drop_last: bool = True, depth: int = 0) -> list[Loader]:
    """The loaders of the ranks, each with a source of its own, as processes have."""
    ports = sharded(ranks)
    return [
        open_loader(Spec(), ports, rank, BATCH, 3, drop_last=drop_last, depth=depth, epochs=EPOCHS, source=source())
        for rank in range(ranks)
    ]


def run(loaders: list[Loader], steps: int | None = None) -> list[dict[str, np.ndarray]]:
    """The global batches of some steps, by default of all that there are."""
    ports = sharded(len(loaders))
    found = []
    while steps is None or len(found) < steps:
        shards = [next(loader, None) for loader in loaders]
        if shards[0] is None:
            assert all(shard is None for shard in shards)
            break
        found.append(joined(ports, [shard for shard in shards if shard is not None]))
    return found


def same(have: list[dict[str, np.ndarray]], want: list[dict[str, np.ndarray]]) -> None:
    assert len(have) == len(want)
    for one, other in zip(have, want, strict=True):
        assert one.keys() == other.keys()
        for name in other:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("kind", SOURCES)
def test_ranks_share_each_batch_and_an_epoch_has_every_record_once(kind: str) -> None:
    whole = run(opened(SOURCES[kind], 1))
    each = RECORDS // BATCH
    assert len(whole) == EPOCHS * each
    for epoch in range(EPOCHS):
        labels = np.concatenate([batch["label"] for batch in whole[epoch * each :][:each]])
        assert len(set(labels.tolist())) == each * BATCH
        np.testing.assert_array_equal(np.concatenate([one["x"] for one in whole[epoch * each :][:each]]), X[labels])
    for ranks in of_today((2, 3), 1):
        same(run(opened(SOURCES[kind], ranks)), whole)


@pytest.mark.parametrize("kind", SOURCES)
def test_what_was_stopped_goes_on_on_other_ranks(kind: str) -> None:
    whole = run(opened(SOURCES[kind], 1))
    for steps, before, after in of_today(WITH_PROCESSES.get(kind, STOPS), 1 if kind in WITH_PROCESSES else 3):
        first = opened(SOURCES[kind], before, depth=2)
        same(run(first, steps), whole[:steps])
        saved = json.loads(json.dumps(first[0].saved(lambda text: ["", text])))
        assert saved["position"] == [*divmod(steps, RECORDS // BATCH)]
        assert ("stream" in saved) == (kind in STATEFUL)
        for loader in first:
            loader.close()
        then = opened(SOURCES[kind], after, depth=2)
        said = [loader.restore(saved, steps) for loader in then]
        same(run(then), whole[steps:])
        inside = steps % (RECORDS // BATCH)
        assert said == ([said[0]] * after if inside and kind in FOUND_AGAIN else [""] * after)
        if said[0]:
            assert f"skips its first {inside * BATCH} records" in said[0]
        for loader in then:
            loader.close()


@pytest.mark.filterwarnings("ignore")
def test_the_state_of_a_shuffle_buffer_is_not_its_place() -> None:
    """What `datasets` says of it leaves records out: were it not so any more, such a stream need not be read again."""
    source = shuffled_stream()
    assert not says_its_place(source)
    assert says_its_place(arrow_stream())
    whole, exact = [one["label"] for one in source], []
    for place in range(1, RECORDS):
        first = [one["label"] for one in islice(source, place)]
        records = iter(source)
        assert [next(records)["label"] for _ in range(place)] == first
        resumed = shuffled_stream()
        resumed.load_state_dict(source.state_dict())
        exact.append(first + [one["label"] for one in resumed] == whole)
    assert not all(exact)


def test_workers_that_stay_end_with_the_last_reader() -> None:
    """Not with a cycle that the garbage collector finds some day: torch then waits 5 seconds for each of them."""
    before = {one.pid for one in active_children()}
    gc.disable()
    try:
        (reader,) = opened(SOURCES["persistent"], 1, depth=2)
        run([reader], 4)
        assert {one.pid for one in active_children()} > before
        reader.close()
        del reader
        assert {one.pid for one in active_children()} <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["single", "loader", "collated", "iterable_loader", "records", "arrow_stream"])
def test_the_last_smaller_batch_is_read_where_it_is_not_dropped(kind: str) -> None:
    whole = run(opened(SOURCES[kind], 1, drop_last=False))
    assert [len(batch["label"]) for batch in whole] == [6, 6, 6, 6, 6, 6, 5] * EPOCHS
    for epoch in range(EPOCHS):
        labels = np.concatenate([batch["label"] for batch in whole[epoch * 7 :][:7]])
        assert sorted(labels.tolist()) == LABEL.tolist()


def test_batches_of_another_size_go_on_where_one_begins() -> None:
    whole = np.concatenate([one["label"] for one in run(opened(SOURCES["records"], 1))])
    first = opened(SOURCES["records"], 1)
    run(first, 4)
    saved = first[0].saved(lambda text: [text])
    other = open_loader(Spec(), sharded(1), 0, 8, 3, epochs=1, source=records)
    other.restore(saved, 4)
    np.testing.assert_array_equal(next(other)["label"], whole[24:32])
    five = open_loader(Spec(), sharded(1), 0, 5, 3, epochs=1, source=records)
    with pytest.raises(
        Exception, match=r"after 24 records of epoch 0, in batches of 6, and no batch of 5 begins there"
    ):
        five.restore(saved, 4)
    ordered = open_loader(Spec(), sharded(1), 0, 8, 3, epochs=1, source={"x": X, "label": LABEL})
    ordered.restore(saved, 4)
    assert ordered.position().batch == 3


@pytest.mark.parametrize("kind", ["loader", "workers"])
def test_an_epoch_is_what_torch_draws_after_its_seed(kind: str) -> None:
    found = [batch["label"] for batch in run(opened(SOURCES[kind], 2))]
    own = SOURCES[kind]()
    drawn = []
    for epoch in range(EPOCHS):
        TORCH.manual_seed(3 + epoch)
        drawn += [label.numpy() for _, label in own][:-1]
    for one, other in zip(found, drawn, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_rank_loads_no_records_but_its_own() -> None:
    class Counted(Single):
        read: list[int]

        def __getitem__(self, index: int) -> tuple[Any, int]:
            self.read.append(index)
            return super().__getitem__(index)

    datasets = [Counted() for _ in range(3)]
    for dataset in datasets:
        dataset.read = []
    rank = iter(datasets)
    whole = run(opened(lambda: loader(next(rank), shuffle=True), 3))
    assert len(whole) == EPOCHS * 6
    for number, dataset in enumerate(datasets):
        assert dataset.read == [int(label) for batch in whole for label in batch["label"][2 * number :][:2]]


def test_a_rank_without_inputs_reads_nothing_and_is_told_the_end() -> None:
    def never() -> Iterator[Any]:
        raise AssertionError("it was read")
        yield

    told = iter([2 * BATCH, 2 * BATCH, 2 * 5 + 1, 2 * BATCH])
    asked = []

    def largest(number: int) -> int:
        asked.append(number)
        return next(told)

    idle = open_loader(Spec(), sharded(2), 2, BATCH, epochs=2, drop_last=False, source=never, largest=largest)
    found = [(next(idle), idle.size, idle.position()) for _ in range(4)]
    assert found == [({}, 6, Position(0, 1)), ({}, 6, Position(0, 2)), ({}, 5, Position(1, 0)), ({}, 6, Position(1, 1))]
    assert asked == [0] * 4
    known = open_loader(
        Spec(), sharded(1), 1, None, epochs=1, drop_last=False, source=loader(Single()), largest=largest
    )
    assert [known.size for _ in known] == [6] * 6 + [5]


def test_a_tensor_is_not_copied() -> None:
    x = TORCH.from_numpy(X.copy())
    batches = [{"x": x[:6], "label": list(range(6))}]
    given = loader(batches, batch_size=1, collate_fn=lambda one: one[0])
    batch = next(open_loader(Spec(), sharded(2), 1, 6, depth=0, source=_Whole(given)))
    assert batch["x"].ctypes.data == x.data_ptr() + 3 * 4 * 4


class _Whole:
    """A loader of a kind that nothing is known of."""

    batch_size, sampler, batch_sampler, generator, collate_fn = 6, None, None, None, None

    def __init__(self, batches: Any) -> None:
        self.dataset = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


def test_neither_torch_nor_datasets_is_imported_for_others() -> None:
    import subprocess

    code = (
        "import sys, numpy as np\nfrom data_case import sharded\n"
        "from partc.runtime.artifact.training.data_spec import Spec\nfrom partc.runtime.data.loader import open_loader\n"
        "next(open_loader(Spec(), sharded(1), 0, 2, source=lambda: iter([((1., 2., 3., 4.), 1)] * 4)))\n"
        "print([name for name in ('torch', 'datasets', 'pyarrow', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
