"""Optimizers by rows: twenty steps equal torch's sparse ones and the formulas on touched rows; plans equal the whole; what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from optimizer_case import Array, Tensors, assert_close, begun, drawn, fed, session_of
from partc.compiler.errors import CompileError
from partc.compiler.plan.training.optimizer import Optimizer
from partc.compiler.training.optimizer_functions import functions
from partc.compiler.training.optimizers import merge_node, row_update_node
from plan_values import optimizer
from row_gradients_case import SYMBOLS, TRAIN, batches, looked_up
from rows import of_today
from training_equivalence import run, same_tensors, same_training

ROWS, WIDTH, STEPS = 12, 5, 20
CASES: list[tuple[str, dict[str, object]]] = [
    ("adagrad", {"lr": 0.1, "initial_accumulator": 0.1}),
    ("row_adagrad", {"lr": 0.1, "eps": 1e-3}),
    ("lazy_momentum", {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.2}),
    ("lazy_adam", {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-12}),
    ("lazy_ftrl", {"lr": 0.2, "l1": 0.5, "l2": 0.1}),
    ("lazy_ftrl", {"lr": 0.2, "l1": 0.2, "lr_power": -0.7}),
]


def looked(step: int) -> tuple[Array, Array]:
    """Ids of some rows, most of them several times, and their gradients."""
    random = np.random.default_rng(step)
    ids = random.integers(0, ROWS, 3 + step % 4)
    return np.concatenate([ids, ids[:2], [3]]), drawn((len(ids) + 3, WIDTH), 50 + step)


def merged(ids: Array, rows: Array) -> tuple[Array, Array]:
    """Each id once, with the sum of its rows."""
    once, place = np.unique(ids, return_inverse=True)
    sums = np.zeros((len(once), rows.shape[1]))
    np.add.at(sums, place, rows)
    return once, sums


def by_rows(chosen: Optimizer) -> Tensors:
    """The table and its slots after all steps, by the functions in stock onnxruntime."""
    float32, int64 = ir.TensorType(ir.DataType.FLOAT), ir.TensorType(ir.DataType.INT64)
    ids, once = (ir.Value(name=name, type=int64) for name in ("ids", "once"))
    rows, sums, *tables = (
        ir.Value(name=name, type=float32) for name in ("rows", "sums", "w", *begun(chosen, (ROWS, WIDTH)))
    )
    scalars = {name: ir.Value(name=name, type=float32) for name in chosen.scalars}
    outputs = [ir.Value(name=f"{table.name}.next", type=float32) for table in tables]
    node = row_update_node(chosen, tables[0], once, sums, tables[1:], scalars, outputs)
    nodes = [merge_node(ids, rows, [once, sums]), node]
    inputs = [ids, rows, *tables, *scalars.values()]
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 21, "partc.optimizer": 1}, name="rows")
    proto = ir.serde.serialize_model(ir.Model(graph, ir_version=10))
    proto.functions.extend(functions({one.op_type for one in nodes}))
    session = session_of(proto.SerializeToString())
    slots = {slot: value.astype(np.float32) for slot, value in begun(chosen, (ROWS, WIDTH)).items()}
    state: Tensors = {"w": drawn((ROWS, WIDTH), 1), **slots}
    for step in range(STEPS):
        given = dict(zip(("ids", "rows"), looked(step), strict=True))
        made = session.run(None, {**given, **state, **fed(chosen.scalars, step, {**chosen.hyper, "lr": chosen.lr})})
        state = dict(zip(state, made, strict=True))
    return state


@pytest.mark.parametrize(("type", "options"), CASES)
def test_twenty_steps_are_the_formula_on_touched_rows(type: str, options: Mapping[str, object]) -> None:
    chosen = optimizer(type, options)
    state = {"w": drawn((ROWS, WIDTH), 1).astype(np.float64), **begun(chosen, (ROWS, WIDTH))}
    for step in range(STEPS):
        ids, g = merged(*looked(step))
        changed = law(chosen, step + 1, {name: value[ids] for name, value in state.items()}, g)
        for name, value in changed.items():
            state[name][ids] = value
    assert_close(by_rows(chosen), state, 1e-6)


def law(chosen: Optimizer, t: int, old: Tensors, g: Array) -> Tensors:
    """The next rows of the table and of the slots."""
    h, lr, w = chosen.hyper, chosen.lr, old["w"]
    g = g + chosen.weight_decay * w
    match chosen.type:
        case "adagrad" | "row_adagrad":
            squares = g**2 if chosen.type == "adagrad" else np.mean(g**2, axis=1, keepdims=True)
            s = old["sum"] + squares
            return {"w": w - lr * g / (np.sqrt(s) + h["eps"]), "sum": s}
        case "lazy_momentum":
            m = h["momentum"] * old["momentum"] + g
            return {"w": w - lr * m, "momentum": m}
        case "lazy_ftrl":
            n, p = old["accumulator"], h["lr_power"]
            more = n + g**2
            z = old["linear"] + g - (more**-p - n**-p) / lr * w
            quadratic = more**-p / lr + 2 * h["l2"]
            return {
                "w": np.where(np.abs(z) > h["l1"], (np.sign(z) * h["l1"] - z) / quadratic, 0),
                "accumulator": more,
                "linear": z,
            }
    m = h["beta1"] * old["exp_avg"] + (1 - h["beta1"]) * g
    v = h["beta2"] * old["exp_avg_sq"] + (1 - h["beta2"]) * g**2
    d = m / (1 - h["beta1"] ** t) / (np.sqrt(v / (1 - h["beta2"] ** t)) + h["eps"])
    return {"w": w - lr * d, "exp_avg": m, "exp_avg_sq": v}


@pytest.mark.parametrize("type", ["lazy_adam", "adagrad", "sgd"])
def test_twenty_steps_are_torchs_by_sparse_gradients(type: str) -> None:
    """With a tiny eps, which SparseAdam adds before it corrects the second moment."""
    torch = pytest.importorskip("torch")
    chosen = optimizer(type, next((options for one, options in CASES if one == type), {"lr": 0.1}))
    h, weight = chosen.hyper, torch.nn.Parameter(torch.from_numpy(drawn((ROWS, WIDTH), 1)))
    stepped = {
        "lazy_adam": lambda: torch.optim.SparseAdam([weight], chosen.lr, (h["beta1"], h["beta2"]), h["eps"]),
        "adagrad": lambda: torch.optim.Adagrad([weight], chosen.lr, initial_accumulator_value=h["initial_accumulator"]),
        "sgd": lambda: torch.optim.SGD([weight], chosen.lr),
    }[type]()
    for step in range(STEPS):
        ids, rows = looked(step)
        with torch.sparse.check_sparse_tensor_invariants():
            weight.grad = torch.sparse_coo_tensor(torch.from_numpy(ids[None]), torch.from_numpy(rows), (ROWS, WIDTH))
            stepped.step()
    held = {slot: stepped.state[weight][slot].numpy() for slot in chosen.slots}
    assert_close(by_rows(chosen), {"w": weight.detach().numpy(), **held}, 1e-6)


PLANS = [
    "ranks: 2\ndataset: data_parallel\n",
    "ranks: 2\nplacement: {look: 0, again: 1, head: 1}\npipeline: {microbatches: 3}\n",
    "ranks: 2\nmesh: {tp: 2}\nsharding: {look: {in: [[1, 2], [1, 1]]}, again: {in: [[1, 2], [1]]}}\n",
    "ranks: 2\ndataset: data_parallel\nsharding: {look: pull, again: pull}\n",
    "ranks: 3\nroles: {ps: 2}\nplacement: {'*': {role: ps}}\ndataset: data_parallel\n",
]


@pytest.mark.parametrize(
    ("type", "plan"),
    of_today(
        [
            ("row_adagrad", PLANS[0]),
            ("lazy_adam", PLANS[0]),
            ("lazy_momentum", PLANS[1]),
            ("lazy_ftrl", PLANS[1]),
            ("row_adagrad", PLANS[2]),
            ("lazy_adam", PLANS[2]),
            ("lazy_adam", PLANS[3]),
            ("row_adagrad", PLANS[4]),
        ],
        3,
    ),
)
def test_every_plan_updates_rows_as_the_whole(type: str, plan: str, tmp_path: Path) -> None:
    """Ids stand twice on a rank, on several ranks, and in several microbatches."""
    train = TRAIN.replace("OPTIMIZER", f"{{type: {type}, lr: 0.1, shard: true}}, clip: {{norm: 0.2}}")
    program = same_training(looked_up, plan + SYMBOLS + train, tmp_path, batches(), rtol=1e-6, atol=1e-5)
    assert program.training is not None
    form = (
        "dense gradient: row_adagrad needs whole" if (type, plan) == ("row_adagrad", PLANS[2]) else "gradient by rows"
    )
    assert f"table [90, 4]: {form}" in program.training.notes.tables[0]


def test_lazy_adam_is_adam_on_rows_that_every_step_touches(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    steps = [
        {
            "ids": np.arange(18).reshape(6, 3) % 9,
            "more": np.full(6, k),
            "t": rng.standard_normal((6, 5)).astype(np.float32),
        }
        for k in range(3)
    ]
    lazy, whole = (
        run(
            looked_up(),
            "ranks: 1\n" + SYMBOLS + TRAIN.replace("OPTIMIZER", f"{{type: {type}, lr: 0.1}}"),
            tmp_path / type,
            steps,
        )
        for type in ("lazy_adam", "adam")
    )
    same_tensors(lazy.after, whole.after, whole.before, 1e-6)
    np.testing.assert_array_equal(lazy.after["table"][9:], lazy.before["table"][9:])


def test_a_lazy_optimizer_needs_to_know_which_rows_are_looked_up(tmp_path: Path) -> None:
    plan = "ranks: 2\nsharding: {look: {in: [[2, 1], [1, 1]]}}\n" + SYMBOLS
    with pytest.raises(CompileError) as caught:
        run(looked_up(), plan + TRAIN.replace("OPTIMIZER", "{type: lazy_adam, lr: 0.1}"), tmp_path / "build", [])
    assert (
        str(caught.value)
        == """parameter 'table': the rows of 'table' are cut
  lazy_adam wants the rows that were looked up, and ranks with a part of them know no ids
  help: let ranks pull its rows, cut its columns, or give it another optimizer"""
    )
    equal = plan + TRAIN.replace("OPTIMIZER", "{type: adagrad, lr: 0.1}")
    same_training(looked_up, equal, tmp_path / "equal", batches(), rtol=1e-6, atol=1e-5)
