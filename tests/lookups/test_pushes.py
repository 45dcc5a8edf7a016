"""Training of tables whose rows are pulled: what a step gives to rows goes to their owners, and every rank updates its own rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from partc.compiler.errors import CompileError
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from partc.runtime.artifact.dim_expression import parse
from rows import of_today
from training_equivalence import fed, from_text, run_whole, same_training, train_whole

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
LOOKED_UP = """main (int64[batch, 3] ids, int64[batch] more) => (float[batch, 5] y) {
    [look] e = Gather(table, ids)
    [shape] shape = Constant <value_ints = [0, 12]> ()
    [flat] f = Reshape(e, shape)
    [again] g = Gather(table, more)
    [all] h = Concat <axis = 1> (f, g)
    [head] y = MatMul(h, weight)
}"""
WEIGHTS = {"table": (288, 4), "weight": (16, 5)}
SYMBOLS = "symbols: {batch: {divisor: 12, max: 24}}\n"
TRAIN = "train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: OPTIMIZER}\n"
SGD, ADAM = "{type: sgd, lr: 0.3}", "{type: adam, lr: 0.01, eps: 1.0e-3}"
LAZY = "{type: lazy_adam, lr: 0.01, eps: 1.0e-3}"
PULL = "dataset: data_parallel\nsharding: {look: pull, again: pull}\n"


def looked_up() -> Source:
    return from_text(HEAD + LOOKED_UP, WEIGHTS)


def batches(count: int = 3) -> list[dict[str, np.ndarray]]:
    """Few distinct ids, so that they stand twice on a rank and on several; some count from the end; batches of two sizes."""
    rng = np.random.default_rng(3)
    found = []
    for k in range(count):
        batch = 12 * (1 + k % 2)
        ids, more = rng.integers(-5, 5, (batch, 3)), rng.integers(-3, 8, batch)
        found.append({"ids": ids, "more": more, "t": rng.standard_normal((batch, 5)).astype(np.float32)})
    return found


def trained(plan: str, optimizer: str, more: str, folder: Path) -> Complete:
    """Trains whole and cut; the program."""
    said = plan + SYMBOLS + TRAIN.replace("OPTIMIZER}", f"OPTIMIZER{more}}}").replace("OPTIMIZER", optimizer)
    train = train_whole(said)
    whole = run_whole(looked_up(), "ranks: 1\n" + SYMBOLS + train[train.index("train:") :], batches())
    return same_training(looked_up, said, folder, batches(), rtol=1e-6, atol=2e-6, whole=whole)


def kinds(program: Complete) -> Counter[str]:
    return Counter(event.op_type for event in program.events)


NAMED = "mesh: {dp: 2, tp: 2}\n"
CUT = (
    "dataset: data_parallel\nsharding: {look: {in: [[ROW, COLUMN], [dp, null]]}, again: {in: [[ROW, COLUMN], [dp]]}}\n"
)
ROWS_ALONG_TP = CUT.replace("ROW", "tp").replace("COLUMN", "null")
STAGES = "placement: {look: [0, 1], again: [0, 1], head: 1}\npipeline: {microbatches: 3}\n"
COLUMNS_ALONG_TP = CUT.replace("ROW", "dp").replace("COLUMN", "tp")


@pytest.mark.parametrize(
    ("plan", "more", "optimizer", "moved"),
    of_today(
        [
            (f"ranks: 2\n{PULL}", "", SGD, "Pull 2, Push 2, AllReduce 2"),
            (f"ranks: 3\n{PULL}", ", clip: {norm: 0.1}", SGD, "Pull 2, Push 2, AllReduce 3"),
            (f"ranks: 3\n{PULL}", "", LAZY, "Pull 2, Push 2, AllReduce 2"),
            (f"ranks: 4\n{PULL}", ", accumulate: 3", SGD, "Pull 6, Push 6, AllReduce 4"),
            (f"ranks: 6\n{PULL}", ", on_nonfinite: skip", ADAM, "Pull 2, Push 2, AllReduce 3"),
            (f"ranks: 4\n{NAMED}{PULL}", "", ADAM, "Pull 2, Push 2, AllReduce 2"),
            (
                f"ranks: 4\n{NAMED}{COLUMNS_ALONG_TP}",
                ", clip: {norm: 0.1}",
                SGD,
                "Pull 2, Push 2, AllReduce 3, AllGather 2",
            ),
            ("ranks: 2\nsharding: {look: pull, again: pull}\n", "", SGD, "Pull 2, Push 2"),
            (f"ranks: 2\n{STAGES}sharding: {{look: pull, again: pull}}\n", "", ADAM, ""),
        ],
        4,
    ),
)
def test_a_pulled_table_trains_as_one_rank_does(
    plan: str, more: str, optimizer: str, moved: str, tmp_path: Path
) -> None:
    """Duplicates within a rank, over ranks, over two look-ups of one table and over parts of a batch."""
    program = trained(plan, optimizer, more, tmp_path)
    assert program.training is not None
    (table,) = program.training.notes.tables
    assert table.startswith(f"table [288, 4]: {'dense gradient' if optimizer is ADAM else 'gradient by rows'}: ")
    if moved:
        wanted = {one.split()[0]: int(one.split()[1]) for one in moved.split(", ")}
        assert kinds(program) == wanted


@pytest.mark.parametrize(
    "plan",
    [f"ranks: 4\n{NAMED}{ROWS_ALONG_TP}", "ranks: 2\ndataset: data_parallel\nsharding: {look: pull}\n"],
    ids=["masked", "one of two look-ups"],
)
def test_a_table_of_which_rows_are_also_masked_has_a_dense_gradient(plan: str, tmp_path: Path) -> None:
    program = trained(plan, SGD, "", tmp_path)
    assert program.training is not None
    assert program.training.notes.tables == ("table [288, 4]: dense gradient: its rows are cut",)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_bytes_that_the_artifact_states_are_those_that_come(ranks: int, tmp_path: Path) -> None:
    """Ids that are all distinct and even over the owners are the most there may be: then both are (P-1)/P u (8 + row), and row backward."""
    batch, each = 6 * ranks**2, 288 // ranks
    plan = f"ranks: {ranks}\n{PULL}symbols: {{batch: {{divisor: {ranks}}}}}\n" + TRAIN.replace("OPTIMIZER", SGD)
    compile_source(looked_up(), parse_plan(plan, "plan.yaml"), tmp_path)
    count = batch // ranks
    one = np.arange(count) // ranks + np.arange(count) % ranks * each
    three = np.arange(3 * count) // ranks + np.arange(3 * count) % ranks * each
    step = {
        "ids": np.tile(three, ranks).reshape(-1, 3),
        "more": np.tile(one, ranks),
        "t": np.ones((batch, 5), np.float32),
    }
    with load_local(tmp_path) as program:
        program({**fed(program, 0), **step})
        stated = {one.tag: parse(one.bytes)({"batch": batch}) for one in program.manifest.collectives}
        for rank in program.ranks:
            lookups = rank._program.messages.lookups
            assert {tag: one.moved.received for tag, one in lookups.items()} == {tag: stated[tag] for tag in lookups}
            found = Counter(one.call.op for one in lookups.values() for _ in range(one.moved.received))
            once = (3 * count + count) * (ranks - 1) // ranks
            assert found == {"Pull": once * (8 + 16), "Push": once * 16}


SERVED = "roles: {ps: SERVERS}\nplacement: {'{look,again}': {role: ps}}\ndataset: data_parallel\n"


@pytest.mark.parametrize(
    ("plan", "more", "optimizer", "moved"),
    [
        ("ranks: 3\n" + SERVED.replace("SERVERS", "2"), ", clip: {norm: 0.1}", SGD, {"AllReduce": 3}),
        ("ranks: 5\n" + SERVED.replace("SERVERS", "[3, 1]"), "", LAZY, {"AllReduce": 2}),
        ("ranks: 2\n" + SERVED.replace("SERVERS", "[0, 1]"), "", SGD, {"AllReduce": 2}),
        (f"ranks: 6\n{NAMED}" + SERVED.replace("SERVERS", "[4, 5]"), ", clip: {norm: 0.1}", ADAM, {"AllReduce": 3}),
    ],
    ids=["one server", "two servers, the last one first", "workers serve", "workers in a grid"],
)
def test_a_served_table_trains_as_one_rank_does(
    plan: str, more: str, optimizer: str, moved: dict[str, int], tmp_path: Path
) -> None:
    """Servers have the table, its update and the optimizer's tensors of it, and nothing else."""
    program = trained(plan, optimizer, more, tmp_path)
    assert kinds(program) == {"Pull": 2, "Push": 2, **moved}
    serving = {*range(program.plan.ranks)} - {*program.plan.workers}
    for part in program.parts if serving else ():
        kept = {one.tensor.split(".")[0] for one in part.state}
        assert kept == ({"table"} if part.rank in serving else {"weight"})


def test_servers_that_cannot_share_rows_are_refused(tmp_path: Path) -> None:
    plan = "ranks: 7\n" + SERVED.replace("SERVERS", "[2, 3, 4, 5, 6]") + SYMBOLS
    with pytest.raises(CompileError, match="'table' has 288 rows, which 5 servers cannot share equally"):
        compile_source(looked_up(), parse_plan(plan, "plan.yaml"), tmp_path / "build")


PLACES = (
    HEAD
    + """main (int64[batch, seq] ids) => (float[batch, seq, 5] y) <int64 zero = {0}, int64 one = {1}> {
    [words] e = Gather(table, ids)
    [size] n = Shape <start = 1, end = 2> (ids)
    [length] m = Squeeze(n)
    [range] at = Range(zero, m, one)
    [places] p = Gather(places, at)
    [sum] h = Add(e, p)
    [head] y = MatMul(h, weight)
}"""
)


@pytest.mark.parametrize(
    ("served", "layout"),
    [
        ("places", "mesh: {dp: 2, tp: 2}\ndataset: {ids: [dp, null], t: [dp, null, null]}\n"),
        ("'{words,places}'", "dataset: data_parallel\n"),
    ],
)
def test_rows_that_every_rank_asks_for_get_the_sum_of_what_all_give(served: str, layout: str, tmp_path: Path) -> None:
    """Positions are the same ids on all ranks, and each has only its records' part of their gradient."""
    workers = 4 if "tp" in layout else 2
    plan = f"ranks: {workers + 2}\n{layout}roles: {{ps: [{workers}, {workers + 1}]}}\nplacement: {{{served}: {{role: ps}}}}\n"
    symbols = "symbols: {batch: {divisor: 4}, seq: {max: 8}}\n"
    random = np.random.default_rng(5)
    steps = [
        {"ids": random.integers(0, 12, (8, seq)), "t": random.standard_normal((8, seq, 5)).astype(np.float32)}
        for seq in (6, 7)
    ]
    same_training(
        lambda: from_text(PLACES, {"table": (12, 4), "places": (8, 4), "weight": (4, 5)}),
        plan + symbols + TRAIN.replace("OPTIMIZER", SGD),
        tmp_path,
        steps,
        rtol=1e-6,
        atol=1e-6,
    )
