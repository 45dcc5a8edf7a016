"""What is wrong with a source, told in one message with its place, the fact, the law and the remedy."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import active_children
from typing import Any

import numpy as np
import pytest
from data_case import port, sharded
from partc.runtime.artifact.training.data_spec import Spec
from partc.runtime.data.loader import Loader, open_loader
from partc.runtime.errors import PartcError, UsageError
from partc.runtime.user_code import UserCodeError

X, LABEL = np.zeros((12, 4), np.float32), np.arange(12)


def opened(source: object, batch: int | None = 4, said: Mapping[str, Any] | None = None, **options: Any) -> Loader:
    spec = Spec.parse({"source": "source.py", **(said or {})})
    return open_loader(Spec(**{**vars(spec), "source": None}), sharded(1), 0, batch, depth=0, source=source, **options)


def fails(source: object, *told: str, kind: type[PartcError] = UsageError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        for _ in zip(opened(source, **options), range(20), strict=False):
            pass
    for part in told:
        assert part in str(caught.value)
    return str(caught.value)


def given(*batches: Any, batch_size: int | None = 4, **attributes: Any) -> Any:
    """A loader that gives these batches."""

    class Given:
        dataset, sampler, batch_sampler, generator, collate_fn = None, None, None, None, None

        def __iter__(self) -> Iterator[Any]:
            return iter(batches)

    found = Given()
    for name, value in {"batch_size": batch_size, **attributes}.items():
        setattr(found, name, value)
    return found


WHOLE = {"x": X[:4], "label": LABEL[:4]}


def test_batches_that_change() -> None:
    fails(
        given(WHOLE, {**WHOLE, "x": X[:4, :3]}),
        "data: batch 1 of epoch 0: input 'x'",
        "records have 3, the model takes 4",
        "batches before had 'x' float32 [4]",
    )
    fails(
        given(WHOLE, {**WHOLE, "label": LABEL[:4].astype(np.int32)}),
        "batch 1 of epoch 0: 'label' is int32, and was int64 before\n  help: give every batch the same types",
    )
    fails(given(WHOLE, {"x": X[:4]}), "batch 1 of epoch 0: it has no 'label', which batches had before; it has 'x'")
    fails(
        given({"x": X[:3], "label": LABEL[:3]}, WHOLE),
        "batch 0 of epoch 0 has 3 records, and is not the last; batches have 4",
    )
    fails(given({"x": X[:5], "label": LABEL[:5]}), "batch 0 of epoch 0 has 5 records; batches have 4")
    fails(
        given({"x": X[:4], "label": 3}), "'label' is [] in a batch of 4 records\n  help: its first dim counts records"
    )


def test_a_shape_may_change_where_the_model_has_a_symbol() -> None:
    ports = [port("x", "float", ["n", "s"], 2, {0: 2}), port("label", "int64", ["n"], 2, {0: 2})]
    source = given(WHOLE, {**WHOLE, "x": X[:4, :3]})
    first, second = open_loader(Spec(), ports, 1, 4, depth=0, epochs=1, source=source)
    assert [first["x"].shape, second["x"].shape] == [(2, 4), (2, 3)]


def test_names_that_do_not_fit() -> None:
    fails(
        given({"x": X[:4], "labels": LABEL[:4]}),
        "batch 0 of epoch 0: input 'label' (tensor(int64) [n]) has no field; the fields are 'x'",
    )
    records = [{"x": x, "Labels": y} for x, y in zip(X, LABEL, strict=True)]
    fails(records, "has no field; the fields are 'x', 'Labels'\n  help: write fields: {label: Labels}")
    next(opened(records, said={"fields": {"label": "Labels"}}))
    fails(
        records,
        "has no 'lables', from which `fields` takes 'label'; it has 'x', 'Labels'\n  help: write fields: {label: Labels}",
        said={"fields": {"label": "lables"}},
    )
    three = [(x, y, 1.0) for x, y in zip(X, LABEL, strict=True)]
    for source in (three, lambda: iter(three), given((X[:4], LABEL[:4], LABEL[:4]))):
        fails(source, "has 3 values, and the model has the inputs 'x', 'label'", "help: give 2, or name all of them")
    next(opened(three, said={"fields": ["x", "label", "weight"]}))
    fails(
        lambda: iter([{"x": X[0], "label": 1}, {"x": X[0]}] * 2),
        "batch 0 of epoch 0: record 1 of it has no 'label'; it has 'x'",
    )
    fails(records, "a record is a mapping, which names its fields itself", said={"fields": ["x", "label"]})


def test_types_that_do_not_fit() -> None:
    fails(
        lambda: iter([{"x": X[0], "label": 0.5}] * 4),
        "batch 0 of epoch 0: input 'label': records are float64 [], the model takes tensor(int64) [n]",
        "help: whole numbers are not made of floats; convert it by a transform",
    )
    uneven = [{"x": X[0, :k], "label": k} for k in (4, 3, 4, 2)]
    fails(lambda: iter(uneven), "batch 0 of epoch 0: records of 'x' have unequal lengths, 2 to 4", "pad: {x: 0}")
    padded = next(opened(lambda: iter(uneven), said={"pad": {"x": 7}}))
    assert padded["x"].tolist() == [[0, 0, 0, 0], [0, 0, 0, 7], [0, 0, 0, 0], [0, 0, 7, 7]]


def test_streams_that_end() -> None:
    two = [{"x": X[0], "label": 1}] * 2
    fails(lambda: iter(two), "epoch 0 has ended before its first batch of 4 records\n  help: choose a smaller batch")
    fails(lambda: iter([]), "epoch 0 has ended before its first batch of 4 records")
    fails(
        iter(two * 5),
        "its `source` is a list_iterator, which has ended and cannot start again for epoch 1",
        "help: make `source` a function that returns a new one, or train for one epoch",
    )
    assert len(list(opened(iter(two * 5), epochs=1))) == 2
    short = opened(lambda: iter(two * 5))
    short.restore({"position": [0, 5], "batch": 4}, 5)
    with pytest.raises(UsageError, match="epoch 0 has fewer than the 5 batches after which the checkpoint was saved"):
        next(short)


def test_a_stream_that_waits_for_ever_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partc.runtime.data.loader.STREAM_PATIENCE", 0.2)
    come, waited_out = threading.Event(), list[bool]()

    def source() -> Iterator[Any]:
        yield from [(X[0], 1)] * 9
        waited_out.append(not come.wait(60))

    with open_loader(Spec(), sharded(1), 0, 4, source=source) as loader:
        next(loader)
    assert not waited_out
    come.set()


def test_code_that_raises() -> None:
    def stream(epoch: int) -> Iterator[Any]:
        yield from [(X[0], 1)] * 5
        raise KeyError("images")

    text = fails(
        stream, "KeyError: 'images'", "while reading records 4 to 7 of epoch 0", "on rank 0", kind=UserCodeError
    )
    assert text.startswith(f"{__file__}:")

    def leaves() -> Iterator[Any]:
        raise SystemExit(3)
        yield

    fails(leaves, "it ends the process: SystemExit(3)", kind=UserCodeError)


def test_sources_that_are_none() -> None:
    fails(
        lambda seeds: [],
        "its `source` takes 'seeds', and is called with 'batch', 'seed', 'epoch' alone\n  help: did you mean 'seed'?",
    )
    fails(3, "a int, which has neither `__len__` and `__getitem__` nor `__iter__`")
    fails("x.npz", "its `source` is a path")
    fails(lambda batch: iter([]), "its `source` takes the global batch size, which is not known", batch=None)
    fails(lambda: iter([]), "the global batch size is not known", batch=None)
    fails(given(WHOLE, batch_size=None), "the batch size of its DataLoader is not known", batch=None)
    fails(
        given(WHOLE),
        "has batches of 4, and the global batch is 8\n  help: the batch of the loader is that of all",
        batch=8,
    )
    fails({"x": X, "label": LABEL[:5]}, "its fields differ in the number of records: 'x' has 12, 'label' has 5")


def test_options_that_need_an_index() -> None:
    stream: Callable[[], Any] = lambda: iter([(X[0], 1)] * 4)  # noqa: E731
    fails(
        stream,
        "whose records come in an order of their own: 'length', 'interleave' cannot be had",
        interleave=2,
        said={"length": "x"},
    )
    fails(stream, "'weight' cannot be files beside it", said={"weight": "w.npy"})
    fails(given(WHOLE), "`pad` is for records, and a DataLoader gives batches", said={"pad": {"x": 0}})


def torch_loader(dataset: Any, **options: Any) -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed: a DataLoader is its")
    return torch.utils.data.DataLoader(dataset, batch_size=4, **options)


class Dies:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 6:
            os._exit(7)
        return X[index], LABEL[index]


class Raises(Dies):
    def __getitem__(self, index: int) -> Any:
        if index == 6:
            raise KeyError("images")
        return X[index], LABEL[index]


def test_workers_that_die_or_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch_loader(Dies(), num_workers=2)
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    looks = _MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(
        looks, "__defaults__", (0.2,)
    )  # seconds after which torch looks whether workers live, by default 5
    text = fails(
        source,
        "data: a worker process of its DataLoader has ended: ",
        "while reading batch 1 of epoch 0",
        kind=UserCodeError,
    )
    assert text.splitlines()[-1].startswith("  help: a worker ends like this where it is killed")
    for workers in (0, 1):
        text = fails(
            torch_loader(Raises(), num_workers=workers), "KeyError: 'images'", "batch 1 of epoch 0", kind=UserCodeError
        )
        assert text.startswith(f"{__file__}:")
        assert "Traceback" not in text


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_failure_keeps_no_workers(depth: int, persistent: bool) -> None:
    """Not while it is kept, nor until the garbage collector comes, which waits 5 seconds for each of them, in whatever runs then."""
    before = {one.pid for one in active_children()}
    gc.disable()
    try:
        source = torch_loader(Raises(), num_workers=2, persistent_workers=persistent)
        spec = Spec.parse({"source": "source.py"})
        reader = open_loader(Spec(**{**vars(spec), "source": None}), sharded(1), 0, 4, depth=depth, source=source)
        with pytest.raises(UserCodeError, match="KeyError: 'images'") as kept:
            for _ in reader:
                pass
        reader.close()
        assert "in worker process" in str(kept.value)
        del source, reader
        if persistent:
            del kept  # workers that stay are those of the loader, to which its reader's frames refer
        assert {one.pid for one in active_children()} <= before
    finally:
        gc.enable()


def test_loaders_of_torch_that_do_not_do() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: a DataLoader is its")
    tensors = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(LABEL))
    sampler = torch.utils.data.DistributedSampler(tensors, 2, 0)
    fails(
        torch_loader(tensors, sampler=sampler),
        "has a DistributedSampler, which deals records to 2 ranks\n  help: leave the sampler out",
    )
    with pytest.raises(UsageError, match="12 records do not fill one batch of 16"):
        opened(torch.utils.data.DataLoader(tensors, batch_size=16), batch=None)
    ports = sharded(3)
    with pytest.raises(UsageError, match="input 'x' is sharded into 3 along its batch, and batches have 4 records"):
        open_loader(Spec(), ports, 0, None, source=torch_loader(tensors))


def test_splits_are_not_a_dataset() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    data = datasets.Dataset.from_dict({"x": X, "label": LABEL})
    splits = datasets.DatasetDict({"train": data, "test": data})
    fails(
        splits,
        "its `source` has the splits 'train', 'test'\n  help: take one of them, such as source = dataset['train']",
    )
    missing = datasets.Dataset.from_dict({"x": X, "label": [None, *LABEL[1:].tolist()]})
    fails(missing, "column 'label' has records without a value\n  help: filter or fill them")
    fails(data.rename_column("label", "labels"), "help: write fields: {label: labels}")
