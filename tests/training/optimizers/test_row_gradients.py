"""Tables that are looked up: their gradient by rows gives what the dense one gives, wherever their look-ups run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.training.optimizer_functions import function
from partc.runtime.artifact.graph.optimizer_function import is_in_place
from partc.runtime.artifact.graph.row_function import adds_up, is_merge, is_rowwise, merge_function
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.training.in_place import unsafe_state
from row_gradients_case import HEAD, LOOKED_UP, SYMBOLS, TRAIN, WEIGHTS, batches, looked_up
from rows import of_today
from training_equivalence import from_text, run, same_training

SGD, DENSE = "{type: sgd, lr: 0.3}", "{type: momentum, momentum: 0.0, lr: 0.3}"


@pytest.mark.parametrize(
    ("plan", "clip"),
    of_today(
        [
            ("ranks: 1\n", ""),
            ("ranks: 1\n", "clip: {norm: 0.1}"),
            ("ranks: 1\n", "clip: {value: 0.01}"),
            ("ranks: 2\ndataset: data_parallel\n", ""),
            ("ranks: 3\ndataset: data_parallel\n", "clip: {norm: 0.1}"),
            ("ranks: 2\nplacement: {again: 0, head: 1}\n", "on_nonfinite: skip"),
            ("ranks: 2\nplacement: {look: 0, again: 1, head: 1}\n", "clip: {norm: 0.1}"),
            ("ranks: 2\nmesh: {tp: 2}\nsharding: {look: {in: [[1, 2], [1, 1]]}, again: {in: [[1, 2], [1]]}}\n", ""),
            ("ranks: 1\n", "accumulate: 3"),
            ("ranks: 2\ndataset: data_parallel\n", "clip: {norm: 0.1}, accumulate: 3"),
            ("ranks: 2\nplacement: {look: 0, again: 1, head: 1}\npipeline: {microbatches: 3}\n", ""),
            ("ranks: 4\nmesh: {dp: 2, tp: 2}\nsharding: {look: {in: [[1, 2], [2, 1]]}}\n", "clip: {norm: 0.1}"),
        ],
        4,
    ),
)
def test_rows_give_what_a_dense_gradient_gives(plan: str, clip: str, tmp_path: Path) -> None:
    train = TRAIN.replace("OPTIMIZER}", "OPTIMIZER" + (f", {clip}}}" if clip else "}"))
    dense = run(looked_up(), "ranks: 1\n" + SYMBOLS + train.replace("OPTIMIZER", DENSE), tmp_path / "dense", batches())
    dense.after.pop("table.momentum")
    dense.after.pop("weight.momentum")
    whole = plan + SYMBOLS + train.replace("OPTIMIZER", SGD)
    program = same_training(looked_up, whole, tmp_path, batches(), rtol=1e-6, atol=1e-6, whole=dense)
    assert program.training is not None
    (told,) = program.training.notes.tables
    assert told.startswith("table [90, 4]: gradient by rows: ")


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        ("{type: adam, lr: 0.1}", "adam changes all rows in every step"),
        ("{type: sgd, lr: 0.1, weight_decay: 0.1}", "the weight decay of sgd changes all rows in every step"),
    ],
)
def test_an_update_of_all_rows_takes_a_dense_gradient(optimizer: str, told: str, tmp_path: Path) -> None:
    plan = parse_plan("ranks: 1\n" + SYMBOLS + TRAIN.replace("OPTIMIZER", optimizer), "plan.yaml")
    training = compile_source(looked_up(), plan, tmp_path / "build").program.training
    assert training is not None
    assert training.notes.tables == (f"table [90, 4]: dense gradient: {told}",)


def test_rows_travel_for_an_update_of_all_rows_too(tmp_path: Path) -> None:
    plan = "ranks: 3\ndataset: data_parallel\n" + SYMBOLS + TRAIN.replace("OPTIMIZER", "{type: adam, lr: 0.01}")
    program = same_training(looked_up, plan, tmp_path, batches(), rtol=1e-6, atol=1e-4)
    assert program.training is not None
    told = "adam changes all rows in every step"
    assert program.training.notes.tables == (
        f"table [90, 4]: gradient by rows between ranks, dense in the update: {told}",
    )
    assert {event.op_type for event in program.events if event.name.startswith("table")} == {"AllGather"}


def test_copies_stay_equal_where_rows_travel_in_bfloat16(tmp_path: Path) -> None:
    low = "precision: {compute: bfloat16, messages: bfloat16}\n"
    plan = "ranks: 2\nplacement: {look: 0, again: 1, head: 1}\n" + SYMBOLS + low + TRAIN.replace("OPTIMIZER", SGD)
    bent = LOOKED_UP.replace("Reshape(e,", "Reshape(bent,").replace(
        "    [again] g =", "    [bend] bent = Tanh(e)\n    [again] l ="
    )
    source = from_text(HEAD + bent.replace("    [all]", "    [turn] g = Tanh(l)\n    [all]"), WEIGHTS)
    have = run(source, plan, tmp_path / "cut", batches())  # compares copies bit by bit
    assert have.program.training is not None
    assert "by rows" in have.program.training.notes.tables[0]


def test_a_table_that_is_read_whole_or_mostly_looked_up_has_a_dense_gradient(tmp_path: Path) -> None:
    tied = """main (int64[batch, 2] ids, int64[batch, 2] few) => (float[batch, 90] y) {
        [look] e = Gather(table, ids)
        [few] s = Gather(small, few)
        [add] a = Add(e, s)
        [mean] m = ReduceMean <keepdims = 0> (a, axes)
        [turned] columns = Transpose(table)
        [head] y = MatMul(m, columns)
    }"""
    source = from_text(
        HEAD + tied.replace("axes)", "axes)").replace(" {\n", " <int64[1] axes = {1}> {\n", 1),
        {"table": (90, 4), "small": (20, 4)},
    )
    plan = "ranks: 1\n" + SYMBOLS + TRAIN.replace("OPTIMIZER", SGD)
    training = compile_source(source, parse_plan(plan, "plan.yaml"), tmp_path / "build").program.training
    assert training is not None
    assert training.notes.tables == (
        "table [90, 4]: dense gradient: turned reads it whole",
        "small [20, 4]: dense gradient: 12 of its rows are looked up a step, more than half",
    )


def test_ranks_gather_rows_and_not_tables(tmp_path: Path) -> None:
    plan = "ranks: 2\ndataset: data_parallel\n" + SYMBOLS + TRAIN.replace("OPTIMIZER", SGD)
    manifest = compile_source(looked_up(), parse_plan(plan, "plan.yaml"), tmp_path / "build").manifest
    found = {one.value: (one.op, one.bytes) for one in manifest.collectives if one.value.startswith("table")}
    assert found == {"table.grad.ids": ("AllGather", "16*batch"), "table.grad.rows": ("AllGather", "32*batch")}


def test_tables_of_equally_many_rows_share_two_messages(tmp_path: Path) -> None:
    text = """main (int64[batch, 2] ids, int64[batch, 2] more) => (float[batch, 5] y) {
        [one] a = Gather(first, ids)
        [two] b = Gather(second, more)
        [three] c = Gather(third, ids)
        [all] d = Concat <axis = 2> (a, b, c)
        [mean] e = ReduceMean <keepdims = 0> (d, axes)
        [head] y = MatMul(e, weight)
    }""".replace(" {\n", " <int64[1] axes = {1}> {\n", 1)
    weights = {"first": (90, 4), "second": (60, 3), "third": (70, 2), "weight": (9, 5)}
    plan = "ranks: 3\ndataset: data_parallel\n" + SYMBOLS + TRAIN.replace("OPTIMIZER", SGD)
    steps = [{**step, "ids": step["ids"][:, :2], "more": step["ids"][:, 1:]} for step in batches()]
    program = same_training(lambda: from_text(HEAD + text, weights), plan, tmp_path, steps, rtol=1e-6, atol=1e-5)
    gathered = [event.name for event in program.events if event.op_type == "AllGather"]
    assert gathered == ["third.grad.ids.joined", "third.grad.rows.joined"]


def test_functions_over_rows_are_proven_by_their_bodies() -> None:
    for name in ("SgdRows", "SgdRowsScaledDouble", "AdamRowsScaled", "MomentumRowsDecayed", "AdagradRowsScaledClipped"):
        body = function(name)
        assert is_rowwise(body), name
        assert is_in_place(body), name
        assert adds_up(body) == name.startswith("Sgd"), name
    assert not adds_up(function("SgdRowsScaledClipped"))
    assert is_merge(function("MergeRows"))
    changed = onnx.FunctionProto()
    changed.CopyFrom(merge_function(21))
    changed.node[-1].attribute[0].s = b"none"
    assert not is_merge(changed)
    reads_more = function("MomentumRows")
    spoilt = onnx.FunctionProto()
    spoilt.CopyFrom(reads_more)
    spoilt.node.insert(0, onnx.helper.make_node("Neg", ["parameter"], ["all"]))
    assert not is_rowwise(spoilt)


def test_rows_that_may_stand_twice_are_refused_where_an_update_wants_each_once(tmp_path: Path) -> None:
    train = TRAIN.replace("OPTIMIZER}", "OPTIMIZER, clip: {value: 0.1}}").replace("OPTIMIZER", SGD)
    compile_source(looked_up(), parse_plan("ranks: 1\n" + SYMBOLS + train, "plan.yaml"), tmp_path / "build")
    artifact = open_artifact(tmp_path / "build")
    model = artifact.model(0)
    assert unsafe_state(artifact.manifest, 0, model) == []
    (update,) = [node for node in model.graph.node if node.op_type == "SgdRowsClipped"]
    merged = update.input[1:3]
    update.input[1:3] = ["table.grad.ids", "table.grad.rows"]
    (found,) = unsafe_state(artifact.manifest, 0, model)
    assert "nothing proves that each row stands once among 'table.grad.ids'" in str(found)
    update.input[1:3] = merged
    (merge,) = [one for one in model.functions if one.name == "MergeRows"]
    merge.node[-1].attribute[0].s = b"max"
    (found,) = unsafe_state(artifact.manifest, 0, model)
    assert "SgdRowsClipped overwrites rows" in str(found)


def test_merged_rows_are_each_id_once() -> None:
    calls = """main (int64[n] ids, float[n, 2] rows) => (int64[m] once, float[m, 2] sums) {
        once, sums = partc.optimizer.MergeRows(ids, rows)
    }"""
    model = onnx.parser.parse_model(HEAD.replace("21]", '21, "partc.optimizer" : 1]') + calls)
    model.functions.append(merge_function(21))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    ids, sums = session.run([], {"ids": np.array([7, 2, 7, 0, 2]), "rows": rows})
    assert ids.tolist() == [0, 2, 7]
    assert sums.tolist() == [[6, 7], [10, 12], [4, 6]]
    ids, sums = session.run([], {"ids": np.zeros(0, np.int64), "rows": rows[:0]})
    assert (ids.shape, sums.shape) == ((0,), (0, 2))
