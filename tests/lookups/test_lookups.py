"""Pull and Push: rows of a table that several ranks have, against numpy; servers, refused ids, counted bytes, wrong files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from artifact_text import write
from partc.runtime import RankError, load, load_local
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.checker.check import check_artifact
from partc.runtime.communication.in_process import LocalWorld
from partc.runtime.errors import StepError
from partc.runtime.lookups.lookup import distinct
from run_collectives import run_reference_of_all, same, whole

ROWS, ROW = 12, (2, 3)


def graphs(
    ranks: int, owners: tuple[int, ...], askers: tuple[int, ...], rows: int = ROWS, type: str = "float"
) -> list[str]:
    """Each rank's lookup, and the way back of what it looked up, doubled."""
    each, row = rows // len(owners), ", ".join(map(str, ROW))
    said = f'group = "all", owners = [{", ".join(map(str, owners))}], rows = {rows}, row = [{row}]'
    said += f", givers = [{', '.join(map(str, askers))}]"
    asked = len(owners) + len(askers)
    found = []
    for rank in range(ranks):
        owns, asks = rank in owners, rank in askers
        given = [f"{type}[{each}, {row}] t{rank}"] * owns + [f"int64[n, 2] i{rank}"] * asks
        made = [f"{type}[n, 2, {row}] y{rank}"] * asks + [
            f"int64[m{rank}] p{rank}, {type}[m{rank}, {row}] s{rank}"
        ] * owns
        table, ids, rows_out = f"t{rank}" if owns else "", f"i{rank}" if asks else "", "h" if asks else ""
        asking = f"{'a' if owns else ''}, c, {'o' if asks else ''}"
        found.append(
            f"""rank{rank} ({", ".join(given)}) => ({", ".join(made)})
            <{f"{type}[n, 2, {row}] h, {type}[n, 2, {row}] d, " if asks else ""}
             {f"int64[k{rank}] a, int64[k{rank}] q, {type}[k{rank}, {row}] g, " if owns else ""}
             {"int64[n, 2] o, " if asks else ""} int64[{asked}] c>
            {{ {rows_out}, {asking} = partc.comm.Pull <tag = 0, {said}> ({table}, {ids})
               {f"d = Add(h, h)  y{rank} = Neg(h)" if asks else ""}
               {"q, g" if owns else ""} = partc.comm.Push <tag = 1, {said}> ({asking}, {"d" if asks else ""})
               {f"p{rank} = Neg(q)  s{rank} = Neg(g)" if owns else ""} }}"""
        )
    return found


def values(
    ranks: int, owners: tuple[int, ...], ids: dict[int, Array], rows: int = ROWS
) -> tuple[Array, dict[str, Array]]:
    """The table, and what is fed."""
    table = np.random.default_rng(rows).integers(-99, 99, (rows, *ROW)).astype(np.float32)
    parts = np.split(table, len(owners))
    fed = {f"t{rank}": part for rank, part in zip(owners, parts, strict=True)}
    return table, {**fed, **{f"i{rank}": one for rank, one in ids.items()}}


def wanted(table: Array, owners: tuple[int, ...], ids: dict[int, Array]) -> dict[str, Array]:
    """What ranks have to find, by loops."""
    found: dict[str, Array] = {f"y{rank}": -table[one] for rank, one in ids.items()}
    each = len(table) // len(owners)
    for k, owner in enumerate(owners):
        places, sums = [], []
        for rank in sorted(ids):
            flat = [int(one) % len(table) for one in ids[rank].reshape(-1)]
            for one in sorted({*flat}):
                if k * each <= one < (k + 1) * each:
                    places.append(one - k * each)
                    sums.append(2 * table[one] * flat.count(one))
        found[f"p{owner}"] = -np.array(places, np.int64)
        found[f"s{owner}"] = -np.array(sums, np.float32).reshape(-1, *ROW)
    return found


def random_ids(seed: int, records: int) -> Array:
    return np.random.default_rng(seed).integers(-ROWS, ROWS, (records, 2))


CASES = [
    pytest.param(1, (0,), (0,), id="one rank"),
    pytest.param(2, (0, 1), (0, 1), id="all own and ask"),
    pytest.param(3, (2, 0, 1), (0, 1, 2), id="owners in another order"),
    pytest.param(3, (1,), (0, 2), id="one server"),
    pytest.param(6, (4, 5), (0, 1, 2, 3), id="two servers"),
    pytest.param(4, (0, 1, 2, 3), (2,), id="one asks"),
    pytest.param(3, (1, 2), (0, 1), id="one does both"),
]


@pytest.mark.parametrize(("ranks", "owners", "askers"), CASES)
def test_rows_come_and_go_back(tmp_path: Path, ranks: int, owners: tuple[int, ...], askers: tuple[int, ...]) -> None:
    """Duplicates within a rank and over ranks, ids from the end; the same as by the reference."""
    write(tmp_path, graphs(ranks, owners, askers), groups=whole(ranks))
    assert check_artifact(tmp_path) == []
    for records in (4, 0, 9):
        ids = {rank: random_ids(rank + records, records) for rank in askers}
        table, fed = values(ranks, owners, ids)
        want = wanted(table, owners, ids)
        with load_local(tmp_path) as program:
            for _ in range(2):
                found = program(fed)
                assert found.keys() == want.keys()
                same([np.asarray(found[name]) for name in want], [*want.values()])
        if records == 4:
            found = run_reference_of_all(tmp_path, ranks, fed)
            same([found[name] for name in want], [*want.values()])


def test_all_ids_of_one_owner(tmp_path: Path) -> None:
    """The others are asked nothing, and get nothing."""
    write(tmp_path, graphs(3, (0, 1, 2), (0, 1, 2)), groups=whole(3))
    ids = {rank: np.array([[4, 5], [7, 4], [-5, 6]]) for rank in range(3)}
    table, fed = values(3, (0, 1, 2), ids)
    with load_local(tmp_path) as program:
        found = program(fed)
    want = wanted(table, (0, 1, 2), ids)
    same([np.asarray(found[name]) for name in want], [*want.values()])
    assert [len(np.asarray(found[f"p{rank}"])) for rank in range(3)] == [0, 12, 0]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("ids", ["each once", "repeated", "of one owner", "an empty owner"])
def test_received_bytes_are_those_of_the_formula(tmp_path: Path, ranks: int, ids: str) -> None:
    """Of the distinct ids those of other ranks: 8 + D b bytes each forward, for the ids and the rows, and D b backward, for rows alone."""
    rows, each, row_bytes = 16 * ranks, 16, 6 * 4
    everyone = tuple(range(ranks))
    write(tmp_path, graphs(ranks, everyone, everyone, rows), groups=whole(ranks))
    given = {
        "each once": np.arange(0, rows, 2),
        "repeated": np.repeat(np.arange(0, rows, 2), 4),
        "of one owner": np.arange(16, 28),
        "an empty owner": np.arange(0, rows - 16),
    }[ids].reshape(-1, 2)
    asked = dict.fromkeys(everyone, given)
    table, fed = values(ranks, everyone, asked, rows)
    with load_local(tmp_path) as program:
        for _ in range(3):
            found = program(fed)
        want = wanted(table, everyone, asked)
        same([np.asarray(found[name]) for name in want], [*want.values()])
        for at, rank in enumerate(program._ranks):
            once = np.unique(given)
            others = np.count_nonzero(once // each != at)
            owned = (once.size - others) * (ranks - 1)
            pull, push = (one.moved for one in rank._program.messages.lookups.values())
            assert [(one.steps, one.ids, one.distinct) for one in (pull, push)] == [
                (3, 3 * given.size, 3 * once.size)
            ] * 2
            assert pull.received == 3 * (others * row_bytes + owned * 8)
            assert push.received == 3 * owned * row_bytes


@pytest.mark.parametrize("wrong", [12, -13, 1 << 40])
def test_an_id_that_is_no_row_is_refused_by_all(tmp_path: Path, wrong: int) -> None:
    write(tmp_path, graphs(3, (1, 2), (0, 1, 2)), groups=whole(3))
    ids = {rank: random_ids(rank, 4) for rank in range(3)}
    fed = values(3, (1, 2), ids)[1]
    bad = {**fed, "i1": np.array([[0, 1], [2, 3], [4, wrong], [0, 0]])}
    text = (
        f"record 2 on rank 1 has the id {wrong}\n  the table has 12 rows: ids are -12 to 11\n  help: look at the data"
    )
    with load_local(tmp_path) as program, pytest.raises(RankError, match=text):
        program(bad)
    world = LocalWorld(3)

    def rank(index: int) -> list[str]:
        told = []
        with load(tmp_path, world.transport(index), on_error="recover") as program:
            for one in (bad, fed):
                try:
                    program({name: value for name, value in one.items() if name.endswith(str(index))})
                except StepError as error:
                    told.append(str(error))
        return told

    with ThreadPoolExecutor(3) as threads:
        first, *others = threads.map(rank, range(3))
    assert len(first) == 1
    assert f"Gather 'net.h': {text}" in first[0]
    assert others == [first, first]


def test_a_rank_that_fails_between_a_pull_and_its_push_gives_zeros(tmp_path: Path) -> None:
    """All give the step up, and the next one is right."""
    everyone = (0, 1, 2)
    texts = [
        text.replace(") =>", f", int64[n] j{rank}) =>", 1)
        .replace("d = Add(h, h)", f"r = Gather(h, j{rank})  d = Add(h, r)")
        .replace("<float[n, 2, 2, 3] h,", "<float[n, 2, 2, 3] h, float[n, 2, 2, 3] r,")
        for rank, text in enumerate(graphs(3, everyone, everyone))
    ]
    write(tmp_path, texts, groups=whole(3))
    ids = {rank: random_ids(rank, 4) for rank in everyone}
    table, fed = values(3, everyone, ids)
    fine = {**fed, **{f"j{rank}": np.arange(4) for rank in everyone}}
    with load_local(tmp_path, on_error="recover") as program:
        with pytest.raises(StepError, match="indices element out of data bounds"):
            program({**fine, "j1": np.full(4, 99)})
        found = program(fine)
    want = wanted(table, everyone, ids)
    same([np.asarray(found[name]) for name in want], [*want.values()])


@pytest.mark.parametrize(
    ("old", "new", "fact"),
    [
        ("owners = [0, 1]", "owners = [0, 0]", "its owners are [0, 0]: different places are needed"),
        ("rows = 12", "rows = 13", "13 rows do not divide into equal runs for 2 owners"),
        ("rows = 12", "rows = 24", "its 't0' has the shape [6, 2, 3], and it is [12, 2, 3]"),
        ("owners = [0, 1]", "owners = [0, 2]", "its owner 2 is not an index in a list of 2 ranks"),
        (
            'Pull <tag = 0, group = "all", owners = [0, 1]',
            'Pull <tag = 0, group = "all", owners = [0]',
            "a rank that is not an owner gives a table",
        ),
        ("(t0, i0)", "(t0, )", "a giver has no ids"),
        ("(a, c, o, d)", "(a, , o, d)", "it leaves out counts, and is an owner and a giver"),
        ("givers = [0, 1]> (t0", "givers = [1]> (t0", "it has places, and is an owner"),
        ("(a, c, o, d)", "(a, c, o)", "a giver has no rows to give"),
        ("givers = [0, 1]", "givers = [0, 0]", "its givers are [0, 0]: different places are needed"),
        ("givers = [0, 1]", "givers = [0, 2]", "its giver 2 is not an index in a list of 2 ranks"),
        ("(t0, i0)", "(, i0)", "an owner gives no table"),
        ("row = [2, 3]", "row = [3, 2]", "row"),
    ],
)
def test_wrong_nodes_are_refused(tmp_path: Path, old: str, new: str, fact: str) -> None:
    texts = graphs(2, (0, 1), (0, 1))
    write(tmp_path, [one.replace(old, new) for one in texts], groups=whole(2))
    assert fact in "\n".join(map(str, check_artifact(tmp_path)))


@pytest.mark.parametrize(
    ("rank", "old", "new", "fact"),
    [
        (0, "(a, c, o, h)", "(k, c, o, h)", "its 'k' is not the ids asked of an owner of a Pull"),
        (1, "(a, c, o, h)", "(a, c, i1, h)", "its 'i1' is not the places of a Pull"),
        (0, "(a, c, o, h)", "(a, c, w, h)", "it reads what Pull 'Pull.e' of group 'all', tag 1 asked, and on rank 0"),
        (0, "(a, c, o, h)", "(b, c, o, h)", "and on rank 0 what Pull 'Pull.e'"),
        (1, "(a, c, o, h)", "(b, d, w, h)", "and on rank 0 what Pull 'Pull.h'"),
        (None, "(a, c, o, h)", "(v, x, y, h)", "its owners are ranks [0, 1], and those of Pull 'Pull.z'"),
        (
            None,
            'tag = 3, group = "all", owners = [0, 1], rows = 12',
            'tag = 3, group = "all", owners = [0, 1], rows = 14',
            "of a table",
        ),
    ],
)
def test_rows_that_do_not_belong_to_the_ids_are_refused(
    tmp_path: Path, rank: int | None, old: str, new: str, fact: str
) -> None:
    """Two Pulls of one table, and one whose owners stand in another order; the Push goes back along the first."""
    said, turned = (
        'group = "all", owners = [OWNERS], rows = 12, givers = [0, 1]'.replace("OWNERS", one)
        for one in ("0, 1", "1, 0")
    )
    texts = [
        f"""rank{k} (float[6] t{k}, int64[n] i{k}) => (float[n] u{k}, float[m] s{k}, int64[m] p{k})
        <float[n] h, float[n] e, float[n] z, int64[m] q, float[m] g, int64[m] k, int64[m] a, int64[m] b, int64[m] v,
         int64[4] c, int64[4] d, int64[4] x, int64[n] o, int64[n] w, int64[n] y>
        {{ h, a, c, o = partc.comm.Pull <tag = 0, {said}> (t{k}, i{k})
           e, b, d, w = partc.comm.Pull <tag = 1, {said}> (t{k}, i{k})
           z, v, x, y = partc.comm.Pull <tag = 2, {turned}> (t{k}, i{k})
           k = Neg(a)
           q, g = partc.comm.Push <tag = 3, {said}> (a, c, o, h)
           u{k} = Add(e, z) s{k} = Neg(g) p{k} = Neg(q) }}"""
        for k in range(2)
    ]
    texts = [one.replace(old, new) if rank in (None, k) else one for k, one in enumerate(texts)]
    write(tmp_path, texts, groups=whole(2))
    assert fact in "\n".join(map(str, check_artifact(tmp_path)))


def test_ranks_that_differ_in_owners_are_refused(tmp_path: Path) -> None:
    one, two = graphs(2, (0, 1), (0, 1))
    write(tmp_path, [one, two.replace("owners = [0, 1]", "owners = [1, 0]")], groups=whole(2))
    assert "it differs from the node of rank 0 in op, owners, givers, rows, row or capacity" in str(
        check_artifact(tmp_path)[0]
    )


def test_each_id_once() -> None:
    random = np.random.default_rng(3)
    for count, most in ((0, 1), (1, 1), (50, 9), (50, 1 << 20), (20, 1 << 40)):
        given = random.integers(0, most, count)
        found = distinct(given)
        ids, inverse = np.unique(given, return_inverse=True)
        same([found.ids, found.inverse.astype(np.int64)], [ids, inverse])
