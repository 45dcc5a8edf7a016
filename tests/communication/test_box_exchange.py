"""Exchanges, cut inputs and outputs, and groups in one shared file, on in-process ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from artifact_text import write
from partc.runtime import InputError, Whole, load_local
from partc.runtime.artifact.tensors.dtypes import Array
from run_collectives import run, run_reference, same, shards, whole


def test_exchange_from_2x3_to_3x2(tmp_path: Path) -> None:
    """6 ranks hold a grid of 2x3 shards and get one of 3x2; ranks keep what they have already."""

    def span(at: int, parts: int) -> tuple[int, int]:
        return at * 6 // parts, (at + 1) * 6 // parts

    old = [(span(rank // 3, 2), span(rank % 3, 3)) for rank in range(6)]
    new = [(span(rank // 2, 3), span(rank % 2, 2)) for rank in range(6)]

    def common(one: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> list[tuple[int, int]] | None:
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)]
        return both if all(begin < end for begin, end in both) else None

    def boxes(mine: tuple[tuple[int, int], ...], theirs: list[tuple[tuple[int, int], ...]]) -> tuple[str, str]:
        peers, numbers = [], []
        for peer, other in enumerate(theirs):
            if box := common(mine, other):
                peers.append(peer)
                for (begin, end), (first, last) in zip(box, mine, strict=True):
                    numbers += [begin - first, end - first, last - first]
        return str(peers), str(numbers)

    graphs = []
    for rank in range(6):
        (give, give_boxes), (take, take_boxes) = boxes(old[rank], new), boxes(new[rank], old)
        graphs.append(f"""rank{rank} (float[6, 4] x{rank}) => (float[4, 6] y{rank}) <float[6, 4] h, float[4, 6] k>
        {{ h = Neg(x{rank})
           k = partc.comm.Exchange <group = "all", tag = 5, rank = 2, send_peers = {give}, send_boxes = {give_boxes},
                                   recv_peers = {take}, recv_boxes = {take_boxes}> (h)
           y{rank} = Neg(k) }}""")
    write(tmp_path, graphs, groups=whole(6), shapes={"h": [6, 4]})
    value = np.arange(144, dtype=np.float32).reshape(12, 12)

    def part(shard: tuple[tuple[int, int], ...]) -> Array:
        (a, b), (c, d) = shard
        return value[2 * a : 2 * b, 2 * c : 2 * d]

    same(run(tmp_path, [part(one) for one in old]), [part(one) for one in new])


def test_exchange_between_two_groups(tmp_path: Path) -> None:
    """Rank 0 has it all; ranks 1 and 2 get a half of the columns each, and rank 0 has no output."""
    graphs = [
        """rank0 (float[n, 6] x) => () <float[n, 6] h>
        { h = Neg(x)
          = partc.comm.Exchange <group = "all", tag = 5, rank = 2, send_peers = [1, 2],
                                 send_boxes = [0, 1, 1, 0, 1, 2, 0, 1, 1, 1, 2, 2]> (h) }""",
        *(
            f"""rank{rank} () => (float[n, 3] y{rank}) <float[n, 3] k>
            {{ k = partc.comm.Exchange <group = "all", tag = 5, rank = 2, recv_peers = [0], recv_boxes = [0, 1, 1, 0, 1, 1]> ()
               y{rank} = Neg(k) }}"""
            for rank in (1, 2)
        ),
    ]
    write(tmp_path, graphs, groups=whole(3))
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    with load_local(tmp_path) as program:
        for value in (x, x + 7):
            found = program(x=value)
            same([np.asarray(found["y1"]), np.asarray(found["y2"])], [value[:, :3], value[:, 3:]])


def test_cut_inputs_and_outputs(tmp_path: Path) -> None:
    """Rows are cut over 3 ranks, which share one file; the mean of the columns is whole everywhere."""
    graph = """rank (float[n_third, 2] x) => (float[n_third, 2] y, float[2] total) <float[2] part, int64[1] axis = {0}>
    { y = Neg(x)
      part = ReduceSum <keepdims = 0> (x, axis)
      total = partc.comm.AllReduce <group = "all", tag = 0, reduce = "sum"> (part) }"""
    boxes = [[[rank, rank + 1, 3], [0, 1, 1]] for rank in range(3)]
    cut = {"x": (["n", 2], boxes), "y": (["n", 2], boxes)}
    write(tmp_path, [graph.replace("n_third", "third")] * 3, groups=whole(3), boxes=cut)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["manifest.json", "rank_0000.onnx"]
    x = np.arange(24, dtype=np.float32).reshape(12, 2)
    with load_local(tmp_path) as program:
        found = program(x=x)
        same([np.asarray(found["y"]), np.asarray(found["total"])], [-x, x.sum(0)])
        with pytest.raises(InputError, match="input 'x' axis 0 in all is 11, and it is sharded into 3"):
            program(x=x[:11])
        with pytest.raises(InputError, match="input 'x' axis 1 is 1, the model was compiled for 2"):
            program(x=x[:, :1])
        same([np.asarray(program(x=Whole(x[:3]))["y"])], [-x[:3]])


SHARED = """rank (float[4, 6] x) => (float[8, 2] y) <float[4, 6] h, float[8, 6] k, float[8, 2] p>
{ h = Neg(x)
  k = partc.comm.AllGather <group = "pairs", tag = 0, axis = 0> (h)
  p = partc.comm.ReduceScatter <group = "triples", tag = 1, axis = 1, reduce = "sum"> (k)
  y = Abs(p) }"""
GROUPS = {"pairs": [[0, 3], [1, 4], [2, 5]], "triples": [[2, 1, 0], [3, 4, 5]]}


def test_two_groups_of_six_ranks_in_one_shared_file(tmp_path: Path) -> None:
    write(tmp_path, [SHARED] * 6, groups=GROUPS)
    given = shards((4, 6), 6)
    gathered = {rank: np.concatenate([-given[one] for one in pair]) for pair in GROUPS["pairs"] for rank in pair}
    wanted = {}
    for triple in GROUPS["triples"]:
        total = np.add.reduce([gathered[rank] for rank in triple])
        wanted.update(zip(triple, (np.abs(part) for part in np.split(total, 3, 1)), strict=True))
    expected = [wanted[rank] for rank in range(6)]
    same(run(tmp_path, given), expected)
    same(run_reference(tmp_path, given), expected)


@pytest.mark.parametrize("rows", [0, 1])
def test_values_of_no_and_one_row(tmp_path: Path, rows: int) -> None:
    graph = SHARED.replace('"pairs"', '"triples"').replace("[4,", f"[{rows},").replace("[8,", f"[{3 * rows},")
    write(tmp_path, [graph] * 3, groups={"triples": [[0, 1, 2]]})
    given = shards((rows, 6), 3)
    total = 3 * np.concatenate(given)
    same(run(tmp_path, given), [np.abs(part) for part in np.split(total, 3, 1)])
