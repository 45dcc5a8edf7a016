"""What each rank reads of a batch: pieces join to the whole, transforms see what they need, read ahead and taken up anywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from data_case import port, whole
from partc.runtime.artifact.format import Port
from partc.runtime.artifact.training.data_spec import Spec
from partc.runtime.data.loader import Loader, open_loader
from partc.runtime.data.sampler import Position
from partc.runtime.errors import UsageError
from partc.runtime.user_code import UserCodeError
from waiting import until


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    x, label = rng.integers(0, 256, (50, 6, 4), np.uint8), rng.integers(0, 10, 50, np.uint8)
    np.savez(tmp_path / "digits.npz", x=x, label=label, number=np.arange(50))
    return tmp_path / "digits.npz"


def test_batches_are_the_records(digits: Path) -> None:
    ports = [port("x", "float", ["batch", 1, 6, 4]), port("label", "int64", ["batch"]), port("number", "int32", [8])]
    data = np.load(digits)
    with open_loader(Spec.parse(str(digits)), ports, 0, 8, seed=3, epochs=2) as loader:
        seen = list(loader)
    assert len(seen) == 12
    for batch in seen:
        assert {name: (value.dtype, value.shape) for name, value in batch.items()} == {
            "x": (np.dtype(np.float32), (8, 1, 6, 4)),
            "label": (np.dtype(np.int64), (8,)),
            "number": (np.dtype(np.int32), (8,)),
        }
        assert all(value.flags.c_contiguous and value.flags.writeable for value in batch.values())
        np.testing.assert_array_equal(batch["x"][:, 0], data["x"][batch["number"]])
        np.testing.assert_array_equal(batch["label"], data["label"][batch["number"]])
    assert len({int(n) for batch in seen[:6] for n in batch["number"]}) == 48
    assert loader.position() == Position(2, 0)


@pytest.mark.parametrize("interleave", [1, 3])
def test_pieces_join_to_the_whole(digits: Path, interleave: int) -> None:
    spec = Spec.parse(str(digits))
    cut = [
        port("x", "float", ["batch", 6, 4], 6, {0: 3, 2: 2}),
        port("label", "uint8", ["batch"], 3, {0: 3}),
        port("number", "int64", ["batch"], 6),
    ]
    plain = [port(one.name, one.type[7:-1], one.shape) for one in cut]
    drop_last: bool = interleave == 1  # 50 records leave 2, dealt to 3 they leave 3
    wanted = list(
        open_loader(spec, plain, 0, 12, seed=1, interleave=interleave, epochs=1, drop_last=drop_last, depth=0)
    )
    ranks = [
        list(open_loader(spec, cut, rank, 12, seed=1, interleave=interleave, epochs=1, drop_last=drop_last))
        for rank in range(6)
    ]
    assert [len(one) for one in ranks] == [4 if interleave == 1 else 5] * 6
    assert "label" not in ranks[4][0]
    for number, batch in enumerate(wanted):
        for one in cut:
            pieces = [ranks[rank][number][one.name] for rank in one.ranks]
            assert all(piece.flags.c_contiguous for piece in pieces)
            np.testing.assert_array_equal(whole(one, pieces), batch[one.name])


TRANSFORMS = """
import numpy as np
sizes = []
def plain(batch):
    sizes.append(len(batch["x"]))
    return {"y": batch["x"].sum(axis=2).astype(np.float32), "label": batch["label"]}
def noisy(batch, generator):
    sizes.append(len(batch["x"]))
    return {"y": batch["x"].sum(axis=2) + generator.random((len(batch["x"]), 1), np.float32), "label": batch["label"]}
def with_default(batch, scale=2): return {"y": scale * batch["x"][:, :, 0], "label": batch["label"]}
def with_generator(batch, generator=None): return {"y": generator.random((len(batch["x"]), 6)), "label": batch["label"]}
def short(batch): return {"y": batch["x"][1:], "label": 3}
def nothing(batch): pass
def failing(batch): raise KeyError("no such thing")
later = 0
def fails_later(batch):
    global later
    later += 1
    if later == 4:
        raise ZeroDivisionError("the fourth call")
    return with_default(batch)
"""


def transformed(digits: Path, function: str) -> Spec:
    (digits.parent / "t.py").write_text(TRANSFORMS)
    return Spec.parse({"source": digits.name, "transform": f"t.py:{function}"}, digits.parent)


@pytest.mark.parametrize("function", ["plain", "noisy", "with_default", "with_generator"])
def test_a_transform_does_not_see_how_a_batch_is_cut(digits: Path, function: str) -> None:
    spec = transformed(digits, function)
    cut = [port("y", "float", ["batch", 6], 4, {0: 2, 1: 2}), port("label", "int64", ["batch"], 4, {0: 4})]
    plain = [port(one.name, one.type[7:-1], one.shape) for one in cut]
    if function == "with_default":  # whole numbers that are no floats
        plain[0], cut[0] = (Port(**{**dict(one), "type": "tensor(uint8)"}) for one in (plain[0], cut[0]))
    wanted = list(open_loader(spec, plain, 0, 8, seed=5, epochs=2))
    ranks = [list(open_loader(spec, cut, rank, 8, seed=5, epochs=2)) for rank in range(4)]
    for number, batch in enumerate(wanted):
        for one in cut:
            np.testing.assert_array_equal(whole(one, [rank[number][one.name] for rank in ranks]), batch[one.name])
    first = [batch["y"] for batch in wanted]
    assert not any(np.array_equal(first[0], other) for other in first[1:])


@pytest.mark.parametrize(("function", "read"), [("plain", {2, 8}), ("noisy", {8})])
def test_only_what_is_needed_is_transformed(digits: Path, function: str, read: set[int]) -> None:
    ports = [port("label", "int64", ["batch"], 4, {0: 4})]
    loader = open_loader(transformed(digits, function), ports, 1, 8, depth=0, epochs=1)
    list(loader)
    transform = loader.source.reader._data.transform
    assert transform is not None
    assert set(transform.function.__globals__["sizes"]) == read  # the first, of a whole batch, tells what comes out


def test_position_and_seek(digits: Path) -> None:
    def fresh(depth: int) -> Loader:
        return open_loader(transformed(digits, "noisy"), [port("y", "float", ["b", 6])], 0, 7, 2, depth=depth)

    with fresh(3) as loader:
        positions, batches = [], []
        for _ in range(17):
            positions.append(loader.position())
            batches.append(next(loader)["y"])
        assert positions[6:9] == [Position(0, 6), Position(1, 0), Position(1, 1)]
        loader.seek(positions[3])
        np.testing.assert_array_equal(next(loader)["y"], batches[3])
        assert loader.position() == positions[4]
    for depth in (0, 1, 2):
        with fresh(depth) as other:
            for at in (16, 8, 0):
                other.seek(positions[at])
                np.testing.assert_array_equal(next(other)["y"], batches[at])
            with pytest.raises(UsageError, match="there is no batch 7 of epoch 0: an epoch has 7 batches"):
                other.seek(Position(0, 7))


@pytest.fixture
def threads() -> Callable[[], set[threading.Thread]]:
    """The threads that read ahead for this test; a loader that another test has not closed may have one until it is collected."""

    def found() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "partc data"}

    before = found()
    return lambda: found() - before


def test_reads_ahead_in_one_thread_that_ends(digits: Path, threads: Callable[[], set[threading.Thread]]) -> None:
    ports = [port("label", "int64", ["batch"])]
    loader = open_loader(transformed(digits, "plain"), ports, 0, 10, depth=3)
    assert not threads()
    next(loader)
    transform = loader.source.reader._data.transform
    assert transform is not None
    sizes = transform.function.__globals__["sizes"]
    until(lambda: len(sizes) >= 5)
    time.sleep(0.02)
    assert len(sizes) == 5  # one that tells what comes out, one taken, three ahead
    assert len(threads()) == 1
    loader.close()
    assert not threads()
    assert next(loader)["label"].shape == (10,)
    loader.close()
    for _ in open_loader(transformed(digits, "plain"), ports, 0, 10, epochs=2):
        pass
    assert not threads()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_of_the_thread_is_the_consumer_s(
    digits: Path, depth: int, threads: Callable[[], set[threading.Thread]]
) -> None:
    ports = [port("y", "uint8", ["b", 6])]
    loader = open_loader(transformed(digits, "fails_later"), ports, 0, 10, depth=depth)
    with pytest.raises(UserCodeError, match="the fourth call") as caught:
        for _ in loader:
            pass
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    head, doing, place, *_ = str(caught.value).splitlines()
    assert head.endswith(": ZeroDivisionError: the fourth call")
    assert doing == "  while transforming a batch of 10 records"
    assert place == "  in batch 2 of epoch 0 on rank 0"
    assert loader.position() == Position(0, 2)
    assert not threads()
    next(loader)
    assert loader.position() == Position(0, 3)
    loader.close()


def test_types_become_what_the_model_wants(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    fields = {
        "b2f": rng.integers(0, 2, 6).astype(bool),
        "d2f": rng.normal(size=6),
        "f2bf": rng.normal(size=6).astype(np.float32),
        "i2u": rng.integers(0, 200, 6),
        "be": rng.integers(-9, 9, 6).astype(">i2"),
        "text": np.array(["a", "bb", "c", "d", "e", "f"]),
        "i4": rng.integers(-8, 8, 6).astype(np.int64),
    }
    np.savez(tmp_path / "d.npz", **fields)
    types = {"b2f": "float", "d2f": "float", "f2bf": "bfloat16", "i2u": "uint8", "be": "int64", "i4": "int4"}
    ports = [port(name, types.get(name, "string"), ["n"]) for name in fields]
    batch = next(open_loader(Spec.parse(tmp_path / "d.npz"), ports, 0, 6, shuffle=False, depth=0))
    assert [batch[name].dtype for name in types] == [
        np.float32, np.float32, ml_dtypes.bfloat16, np.uint8, np.int64, ml_dtypes.int4,
    ]  # fmt: skip
    for name in ("b2f", "d2f", "i2u", "be", "i4"):
        np.testing.assert_array_equal(batch[name].astype(np.float64), fields[name].astype(batch[name].dtype))
    assert batch["text"].dtype == object
    assert batch["text"].tolist() == fields["text"].tolist()


def test_whole_numbers_that_do_not_fit(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.array([3, 4, 300, 5]))
    loader = open_loader(Spec.parse(tmp_path / "d.npz"), [port("x", "uint8", ["n"])], 0, 2, shuffle=False)
    assert next(loader)["x"].tolist() == [3, 4]
    with pytest.raises(UsageError, match=r"the data goes from 5 to 300, tensor\(uint8\) from 0 to 255"):
        next(loader)


def test_all_differences_are_told_at_once(digits: Path) -> None:
    ports = [
        port("x", "float", ["batch", 1, 6, 5]),
        port("label", "bool", ["batch"]),
        port("number", "float", ["batch", 2]),
        port("mask", "float", ["batch"]),
        port("cut", "float", ["batch"], 3, {0: 3}),
        Port(name="items", type="seq(tensor(float))", shape=None, ranks=[0]),
        Port(name="unused", type="tensor(float)", shape=["batch"], ranks=[]),
    ]
    spec = Spec.parse({"source": str(digits), "other": str(digits) + ":x"})
    with pytest.raises(UsageError) as caught:
        open_loader(spec, ports, 0, 8, drop_last=False)
    assert str(caught.value).splitlines() == [
        "data: input 'cut' is sharded into 3 along its batch, and batches have 8 records",
        "  help: take a multiple of 3",
        "data: 50 records in batches of 8 leave 2 for the last batch, and input 'cut' is sharded into 3 along its batch",
        "  help: write drop_last: true, or interleave: 3, which repeats 1 of the records; exact is to add 1 to the data whose labels "
        "the loss ignores (ignore_index)",
        "data: the model has no input 'other'; its inputs are 'x', 'label', 'number', 'mask', 'cut', 'items'",
        "data: input 'x': records are uint8 [6, 4], the model takes tensor(float) [batch, 1, 6, 5]",
        "  help: give records of its dims after the first, which is the batch",
        "data: input 'label': records are uint8 [], the model takes tensor(bool) [batch]",
        "  help: convert it by a transform",
        "data: input 'number': records are int64 [], the model takes tensor(float) [batch, 2]",
        "  int64 has values that float32 cannot hold",
        "  help: convert it by a transform",
        "data: input 'number': records are int64 [], the model takes tensor(float) [batch, 2]",
        "  help: give records of its dims after the first, which is the batch",
        "data: input 'mask' (tensor(float) [batch]) has no field; the fields are 'x', 'label', 'number', 'other'",
        "data: input 'cut' (tensor(float) [batch]) has no field; the fields are 'x', 'label', 'number', 'other'",
        "data: input 'items' (seq(tensor(float))) has no field; the fields are 'x', 'label', 'number', 'other'",
    ]


def test_records_that_ranks_cannot_share_are_read_with_interleave(digits: Path) -> None:
    ports = [port("number", "int64", ["batch"], 3, {0: 3})]
    seen: list[int] = []
    for rank in range(3):
        with open_loader(Spec.parse(str(digits)), ports, rank, 6, drop_last=False, interleave=3, epochs=1) as loader:
            seen += [int(number) for batch in loader for number in batch["number"]]
    assert set(seen) == set(range(50))
    assert len(seen) == 51


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ([8, 6, 5], "input 'x' axis 2: records have 4, the model takes 5, tensor(float) [8, 6, 5]"),
        ([9, 6, 4], "input 'x' axis 0: batches have 8, the model takes 9"),
        (["n", "n", 4], "input 'x' axis 1: records have 6, the model takes 8 by 'n'"),
        (["n", "m", "m - 1"], "input 'x' axis 2: records have 4, the model takes 5 by 'm - 1'"),
        ([], "records are uint8 [6, 4], the model takes tensor(float) []"),
    ],
)
def test_dims_are_held_against_the_model(digits: Path, shape: list[int | str], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_loader(Spec.parse(digits), [port("x", "float", shape)], 0, 8)
    assert told in str(caught.value)
    assert str(caught.value).count("data: ") == 1


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("short", "short: 'y' is [7, 6, 4] for 8 records"),
        ("nothing", "nothing returns a NoneType; it must return a dict of arrays"),
        ("missing", "t.py: it does not define `missing`"),
        ("later", "`later` is a int, not a function"),
    ],
)
def test_transforms_that_do_not_do(digits: Path, function: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_loader(transformed(digits, function), [port("y", "float", None)], 0, 8)
    assert told in str(caught.value)


def test_a_transform_s_own_error_keeps_its_words(digits: Path) -> None:
    with pytest.raises(UserCodeError, match="no such thing") as caught:
        open_loader(transformed(digits, "failing"), [port("y", "float", None)], 0, 8)
    assert isinstance(caught.value.__cause__, KeyError)


def test_fields_that_differ_in_their_number(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros(3), y=np.zeros(4))
    with pytest.raises(UsageError) as caught:
        open_loader(Spec.parse("d.npz", tmp_path, "plan.yaml:4"), [port("x", "float", ["n"])], 0, 2)
    assert str(caught.value).splitlines() == [
        "plan.yaml:4: its fields differ in the number of records: 'x' has 3, 'y' has 4",
        "  help: record i of all fields belongs together",
    ]
