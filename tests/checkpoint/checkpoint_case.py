"""Ranks as threads that save checkpoints: layouts of some tensors, what each rank holds of them, and the text that ranks share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
from partc.runtime.artifact.format import Box, StateRecord
from partc.runtime.artifact.tensors.dtypes import Array, by_numpy
from partc.runtime.checkpoint.checkpoint import Checkpoint
from partc.runtime.checkpoint.index import INDEX, sealed
from partc.runtime.checkpoint.ownership import region_of_rank
from partc.runtime.checkpoint.run_list import Retention
from partc.runtime.checkpoint.save import save

META = {"epoch": 2, "data": {"position": 77, "seed": 5}, "optimizer": "adam"}


def record(
    tensor: str,
    array: Array,
    ranks: Sequence[int],
    cuts: Sequence[int] = (),
    kind: str = "parameter",
    value: str = "",
    parameter: str = "",
) -> StateRecord:
    """A tensor over ranks, its dims cut into so many pieces, the last dim's fastest; further ranks hold them again."""
    dtype = by_numpy(array.dtype)
    assert dtype is not None
    pieces = list(np.ndindex(*cuts)) if cuts else []
    boxes: list[Box] = [
        [[at, at + 1, of] for at, of in zip(pieces[k % len(pieces)], cuts, strict=True)]
        for k in range(len(ranks) if cuts else 0)
    ]
    return StateRecord(
        value=value or tensor,
        next="",
        tensor=tensor,
        kind=kind,  # type: ignore[arg-type]
        type=f"tensor({dtype.name})",
        shape=list(array.shape),
        ranks=list(ranks),
        boxes=boxes or None,
        parameter=parameter,
    )


def tensors(seed: int = 7) -> dict[str, Array]:
    """Whole tensors of several types, of odd and of even sizes, one a scalar and one empty."""
    random = np.random.default_rng(seed)
    return {
        "embed.weight": random.standard_normal((24, 7), np.float32),
        "embed.weight.exp_avg": random.standard_normal((24, 7), np.float32),
        "fc.weight": random.standard_normal((12, 24), np.float32).astype(ml_dtypes.bfloat16),
        "fc.bias": random.standard_normal(13, np.float32).astype(np.float16),
        "fc.cube": random.standard_normal((5, 24, 3)),
        "norm.count": np.array(random.integers(1 << 40), np.int64),
        "norm.mask": random.integers(0, 2, (3, 11)).astype(np.bool_),
        "nothing": np.empty((0, 3), np.float32),
    }


def layout(whole: Mapping[str, Array], ranks: int) -> list[StateRecord]:
    """Each tensor lying in its own way on 1, 6 or 8 ranks: cut by rows, columns, both, in several ways at once, on one rank."""
    every = range(ranks)
    half = {8: 4, 6: 3, 1: 1}[ranks]
    return [
        record("embed.weight", whole["embed.weight"], every),
        record("embed.weight", whole["embed.weight"], every, (ranks, 1), value="embed.weight.dp"),
        record(
            "embed.weight.exp_avg",
            whole["embed.weight.exp_avg"],
            every,
            (ranks, 1),
            kind="optimizer",
            parameter="embed.weight",
        ),
        record("fc.weight", whole["fc.weight"], list(every)[::-1], (2 if ranks > 1 else 1, half)),
        record("fc.bias", whole["fc.bias"], [ranks - 1]),
        record("fc.cube", whole["fc.cube"], every, (1, half, 1)),
        record("fc.cube", whole["fc.cube"], list(every)[half:] or [0], value="fc.cube.again"),
        record("norm.count", whole["norm.count"], every, kind="statistics"),
        record("norm.mask", whole["norm.mask"], every, (3 if ranks > 1 else 1, 1), kind="statistics"),
        record("nothing", whole["nothing"], every),
    ]


def held(records: Sequence[StateRecord], rank: int, whole: Mapping[str, Array]) -> list[tuple[StateRecord, Array]]:
    """What a rank hands over: its pieces, in memory of their own."""
    pieces = []
    for one in records:
        if rank in one.ranks:
            box = region_of_rank(one, rank)
            piece = tuple(slice(begin, end) for begin, end in zip(box.begin, box.end, strict=True))
            pieces.append((one, whole[one.tensor][piece].copy()))
    return pieces


def rewrite(folder: Path, old: str, new: str) -> None:
    """Puts other words into the index of a checkpoint, sealed as if they had been written."""
    text = (folder / INDEX).read_text()
    assert old in text
    (folder / INDEX).write_text(sealed(text[: text.rindex(',\n "sha256"')].replace(old, new, 1)))


def flip(file: Path, at: int, bit: int = 3) -> None:
    """Turns a bit of a byte around; from the end where `at` is negative."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


class Ranks:
    """As many threads as ranks; `share` gives every one the texts of all."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._texts = [""] * ranks
        self._barrier = threading.Barrier(ranks)

    def run(self, act: Callable[[int, Callable[[str], list[str]]], object]) -> list[object]:
        """What the act gives on each rank, or the exception that it raises there."""

        def one(rank: int) -> object:
            def share(text: str) -> list[str]:
                self._texts[rank] = text
                self._barrier.wait(60)
                texts = list(self._texts)
                self._barrier.wait(60)
                return texts

            try:
                return act(rank, share)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.ranks) as threads:
            return list(threads.map(one, range(self.ranks)))


def save_all(
    folder: Path,
    step: int,
    ranks: int,
    whole: Mapping[str, Array],
    keep: int | None = None,
    records: Sequence[StateRecord] | None = None,
) -> list[object]:
    """Saves whole tensors from so many ranks; the path, or the error, of each."""
    laid = layout(whole, ranks) if records is None else records
    return Ranks(ranks).run(
        lambda rank, share: save(folder, step, rank, held(laid, rank, whole), laid, META, share, Retention(keep))
    )


def load_all(checkpoint: Checkpoint, records: Sequence[StateRecord], ranks: int) -> list[list[Array]]:
    """What each rank has of the records, filled from a checkpoint."""
    found = []
    for rank in range(ranks):
        own = []
        for one in records:
            if rank in one.ranks:
                array = np.zeros(region_of_rank(one, rank).shape, checkpoint.read(one.tensor).dtype)
                checkpoint.load_into(one, rank, array)
                own.append(array)
        found.append(own)
    return found
