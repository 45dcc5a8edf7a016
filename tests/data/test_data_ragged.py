"""Sequences of unequal length: filled up to the longest of the whole batch, whoever reads a piece, and sorted into buckets."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from partc.runtime.artifact.format import Port
from partc.runtime.artifact.tensors.boxes import merge
from partc.runtime.artifact.training.data_spec import Spec
from partc.runtime.data.loader import open_loader
from partc.runtime.errors import UsageError
from partc.runtime.user_code import UserCodeError

LENGTHS = np.random.default_rng(1).integers(0, 40, 30)
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])
FLAT = np.arange(1, OFFSETS[-1] + 1, dtype=np.int32)
RECORDS = [FLAT[begin:end] for begin, end in pairwise(OFFSETS)]


def port(name: str, shape: list[int | str], type: str = "int64", boxes: list[list[list[int]]] | None = None) -> Port:
    ranks = list(range(len(boxes))) if boxes else [0]
    return Port(name=name, type=f"tensor({type})", shape=shape, ranks=ranks, boxes=boxes)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    tags = {"tags": (FLAT % 5).astype(np.int16), "tags.offsets": OFFSETS}
    np.savez(tmp_path / "c.npz", ids=FLAT, **{"ids.offsets": OFFSETS}, **tags, number=np.arange(30))
    return tmp_path / "c.npz"


SOURCES = """
import numpy as np
lengths = np.random.default_rng(1).integers(0, 40, 30)
offsets = np.concatenate([[0], np.cumsum(lengths)])
flat = np.arange(1, offsets[-1] + 1, dtype=np.int32)
records = [flat[begin:end] for begin, end in zip(offsets, offsets[1:])]
class Objects:
    reads = 0
    def __len__(self): return 30
    def __getitem__(self, indices):
        Objects.reads += len(indices)
        made = np.empty(len(indices), object)
        made[:] = [records[i] for i in indices]
        return {"ids": made, "number": indices, "tags": [(records[i] % 5).astype(np.int16) for i in indices]}
class Told(Objects):
    lengths = {"ids": lengths, "tags": lengths}
class Single:
    def __len__(self): return 30
    def __getitem__(self, index):
        return {"ids": records[index], "number": int(index), "tags": (records[index] % 5).astype(np.int16)}
"""


@pytest.mark.parametrize("kind", ["npz", "Objects", "Told", "Single", "function"])
@pytest.mark.parametrize("bucketed", [False, True])
def test_every_record_comes_once_and_is_filled_up(corpus: Path, kind: str, bucketed: bool) -> None:
    if kind != "npz":
        line = "def source(): return Single()" if kind == "function" else f"source = {kind}()"
        corpus = corpus.with_name("c.py")
        corpus.write_text(f"{SOURCES}\n{line}\n")
    said = {"source": str(corpus), "pad": {"tags": -1, "ids": 0}, "multiple": 4}
    if bucketed:
        said |= {"length": "ids", "window": 6, "buckets": [10, 20, 30]}
    ports = [port("ids", ["batch", "seq"]), port("tags", ["batch", "seq"], "int32"), port("number", ["batch"])]
    seen, filled = [], 0
    for batch in open_loader(Spec.parse(said), [*ports, port("ids.length", ["batch"])], 0, 5, seed=2, epochs=1):
        longest = max(LENGTHS[batch["number"]].max(), 1)
        assert batch["ids"].shape == batch["tags"].shape == (5, -(-longest // 4) * 4)
        for row, number in enumerate(batch["number"]):
            seen.append(number)
            length = LENGTHS[number]
            assert batch["ids.length"][row] == length
            np.testing.assert_array_equal(batch["ids"][row, :length], RECORDS[number])
            np.testing.assert_array_equal(batch["tags"][row, :length], RECORDS[number] % 5)
            assert (batch["ids"][row, length:] == 0).all()
            assert (batch["tags"][row, length:] == -1).all()
        filled += batch["ids"].size
    assert sorted(seen) == list(range(30))
    assert bool(filled < 1.5 * LENGTHS.sum()) is bucketed


@pytest.mark.parametrize(("kind", "reads"), [("Objects", 3 + 30), ("Told", 3)])
def test_lengths_that_a_source_tells_are_not_read(tmp_path: Path, kind: str, reads: int) -> None:
    (tmp_path / "s.py").write_text(f"{SOURCES}\nsource = {kind}()\n")
    said = {"source": str(tmp_path / "s.py"), "length": "ids"}
    loader = open_loader(Spec.parse(said), [port("ids", ["n", "s"])], 0, 5, depth=0)
    assert loader.source.reader._data.sources[0]._object.reads == reads  # type: ignore[attr-defined]


def test_pieces_have_the_length_of_the_whole(corpus: Path) -> None:
    boxes = [[[a, a + 1, 2], [b, b + 1, 3]] for a in range(2) for b in range(3)]
    spec = Spec.parse({"source": str(corpus), "length": "ids"})
    wanted = list(open_loader(spec, [port("ids", ["n", "s"])], 0, 4, epochs=2))
    cut = port("ids", ["n", "s"], boxes=boxes)
    ranks = [list(open_loader(spec, [cut], rank, 4, epochs=2)) for rank in range(6)]
    for number, batch in enumerate(wanted):
        whole = merge(boxes, [rank[number]["ids"] for rank in ranks])
        assert whole.shape[1] % 24 == 0
        assert batch["ids"].shape[1] % 8 == 0
        same = min(whole.shape[1], batch["ids"].shape[1])
        np.testing.assert_array_equal(whole[:, :same], batch["ids"][:, :same])
        assert not whole[:, same:].any()
        assert not batch["ids"][:, same:].any()


def test_a_dim_that_is_a_number(corpus: Path) -> None:
    batch = next(open_loader(Spec.parse(corpus), [port("ids", ["n", 41])], 0, 3, depth=0))
    assert batch["ids"].shape == (3, 41)
    with pytest.raises(UsageError) as caught:
        open_loader(Spec.parse(corpus), [port("ids", ["n", 32]), port("tags", ["n", 20, 2], "int16")], 0, 3)
    longer = [sum(length > size for length in LENGTHS) for size in (32, 20)]
    assert str(caught.value).splitlines() == [
        f"data: input 'ids' takes records of 32; {longer[0]} of 30 are longer, up to {LENGTHS.max()}",
        "  help: shorten them, or compile the model for a dynamic dim",
        f"data: input 'tags' takes records of 20; {longer[1]} of 30 are longer, up to {LENGTHS.max()}",
        "  help: shorten them, or compile the model for a dynamic dim",
        "data: input 'tags': records are int16 [*], the model takes tensor(int16) [n, 20, 2]",
        "  help: give records of its dims after the first, which is the batch",
    ]


def test_a_transform_sees_filled_records(corpus: Path) -> None:
    (corpus.parent / "t.py").write_text(
        "import numpy as np\n"
        "def next_word(batch):\n"
        "    ids = batch['ids']\n"
        "    inside = np.arange(ids.shape[1] - 1) < batch['ids.length'][:, None] - 1\n"
        "    return {'x': ids[:, :-1], 'y': np.where(inside, ids[:, 1:], -100)}\n"
    )
    spec = Spec.parse({"source": "c.npz", "transform": "t.py:next_word", "multiple": 9}, corpus.parent)
    with open_loader(spec, [port("x", ["n", "s"]), port("y", ["n", "s"])], 0, 30, shuffle=False) as loader:
        batch = next(loader)
    assert batch["x"].shape == (30, 44)
    for row, record in enumerate(RECORDS):
        inside = max(len(record) - 1, 0)
        np.testing.assert_array_equal(batch["y"][row, :inside], record[1:])
        assert (batch["y"][row, inside:] == -100).all()


def test_options_that_name_no_ragged_field(corpus: Path) -> None:
    said = {"source": str(corpus), "length": "number", "pad": {"idx": 0, "tags": 1e9, "ids": 0.5}}
    with pytest.raises(UsageError) as caught:
        open_loader(Spec.parse(said), [port("ids", ["n", "s"])], 0, 2)
    assert str(caught.value).splitlines() == [
        "data: length: 'number' is not ragged, int64 []; the ragged ones are 'ids', 'tags'",
        "data: pad: there is no field 'idx'; the ragged ones are 'ids', 'tags'",
        "data: pad: 'tags' is int16, which cannot be 1000000000.0",
        "data: pad: 'ids' is int32, which cannot be 0.5",
    ]


def test_unequal_lengths_that_nobody_spoke_of(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import numpy as np\n"
        "class source:\n"
        "    def __len__(self): return 6\n"
        "    def __getitem__(self, at): return {'x': [np.zeros(3 + (i == 2)) for i in at]}\n"
    )
    loader = open_loader(Spec.parse(tmp_path / "s.py"), [port("x", ["n", "s"], "float")], 0, 3, shuffle=False)
    with pytest.raises(UsageError) as caught:
        next(loader)
    assert str(caught.value) == (
        f"{tmp_path / 's.py'}: records of 'x' have unequal lengths, 3 to 4\n  help: say what fills them up: pad: {{x: 0}}"
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("source = 3", "its `source` is a int, which has neither `__len__` and `__getitem__` nor `__iter__`"),
        ("other = 3", "it does not define `source`"),
        (
            "class source:\n    def __len__(self): return 3\n    def __getitem__(self, at): return at / 0",
            "ZeroDivision",
        ),
        (
            "class source:\n    def __len__(self): return 3\n    def __getitem__(self, at): return (1, 2)",
            "by one index: a record has 2 values, and the model has the inputs 'y'",
        ),
        (
            "class source:\n    def __len__(self): return 3\n    def __getitem__(self, at): return {'x': 1.5}",
            "has no field",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_sources_that_do_not_do(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "s.py").write_text(text)
    with pytest.raises(UsageError) as caught:
        open_loader(Spec.parse(tmp_path / "s.py"), [port("y", ["n"], "float")], 0, 2)
    assert told in str(caught.value)


def test_a_source_s_own_error_goes_through(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("raise ValueError('mine')")
    with pytest.raises(UserCodeError) as caught:
        open_loader(Spec.parse(tmp_path / "s.py"), [port("y", ["n"], "float")], 0, 2)
    file = tmp_path / "s.py"
    assert str(caught.value).splitlines() == [
        f"{file}:1: ValueError: mine",
        "  while running the file",
        "  on rank 0",
        f'  File "{file}", line 1, in <module>',
        "    raise ValueError('mine')",
    ]


def test_a_dataset_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "s.py").write_text(
        "import torch\n"
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 7\n"
        "    def __getitem__(self, at): return {'x': torch.full((2, 3), float(at)), 'y': at * at}\n"
        "source = Squares()\n"
    )
    ports = [port("x", ["n", 2, 3], "float"), port("y", ["n"])]
    batch = next(open_loader(Spec.parse(tmp_path / "s.py"), ports, 0, 7, depth=0))
    assert sorted(batch["y"].tolist()) == [at * at for at in range(7)]
    np.testing.assert_array_equal(batch["x"][:, 1, 2] ** 2, batch["y"])
    assert torch.from_numpy(batch["x"]).shape == (7, 2, 3)
