"""`place` in a model.py: the origin's forms, groups and slices of the mesh, functions and ops, and what is said of mistakes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.compiler.ir.program import Complete
from shard_call_models import collectives, compiled, line, load, refused, said_by_compile, same_on_all_ranks

NET = """
from partc.compiler import Symbol, place

def attend(op, x, w):
    return op.Tanh(op.MatMul(x, w))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 10)
        self.fc2 = nn.Linear(10, 8)
        self.w = nn.Parameter([8, 8], init=nn.init.normal(0.5))
        SETUP

    def forward(self, op, x):
        x = op.Relu(self.fc2(op, self.fc1(op, x)))
        return CALL

model = Net()
inputs = {"x": [12, 6]}
"""
X = np.random.default_rng(0).standard_normal((12, 6), dtype=np.float32)


def net(setup: str = "pass", call: str = "op.MatMul(x, self.w)") -> str:
    return NET.replace("SETUP", setup).replace("CALL", call)


def ranks_of(program: Complete) -> dict[str, tuple[int, ...]]:
    return {program.paths[node]: placed.ranks for node, placed in program.placement.items()}


@pytest.mark.parametrize(
    "call",
    [
        'self.fc1.place("MS_WORKER", 2)',
        'self.fc1.place(role="MS_WORKER", rank_id=2)',
        "self.fc1.place(2)",
        "self.fc1.place(rank=2)",
        'place(self.fc1, "MS_WORKER", 2)',
        "place(self.fc1, rank=2)",
        'self.fc1 = place(self.fc1, 2, role="MS_WORKER")',
        'place("fc1", [2])',
    ],
)
def test_every_spelling_of_a_rank(tmp_path: Path, call: str) -> None:
    program = same_on_all_ranks(tmp_path, net(call), "ranks: 3\n", {"x": X}, rtol=1e-5, atol=1e-6)
    assert ranks_of(program)["fc1.Gemm"] == (2,)
    (rule,) = [placed.rule for node, placed in program.placement.items() if program.paths[node] == "fc1.Gemm"]
    assert rule == f"model.py:{line(tmp_path, call)} 'fc1'"


@pytest.mark.parametrize(
    ("call", "paths"),
    [
        ("place(op.MatMul, 1)(x, self.w)", {"MatMul"}),
        ("place(attend, 1)(op, x, self.w)", {"attend.MatMul", "attend.Tanh"}),
        ("place(lambda op, x: op.Exp(op.Neg(x)), 'MS_WORKER', 1)(op, x)", {"function.Neg", "function.Exp"}),
        ("op.Add(place(op.Neg, 0)(x), place(op.Neg, 1)(op.Exp(x)))", {"Neg_1"}),
    ],
)
def test_an_op_and_a_function(tmp_path: Path, call: str, paths: set[str]) -> None:
    text = net("self.fc1.place(0); self.fc2.place(0)", call)
    program = same_on_all_ranks(tmp_path, text, "ranks: 2\n", {"x": X}, rtol=1e-5, atol=1e-6)
    assert {path for path, ranks in ranks_of(program).items() if ranks == (1,)} - {"Add"} == paths


def test_a_group_of_ranks(tmp_path: Path) -> None:
    setup = "self.fc1.place([0, 1]).shard(((2, 1),)); place(self.fc2, [2, 3]).shard(((1, 2),))"
    program = same_on_all_ranks(tmp_path, net(setup), "ranks: 4\n", {"x": X}, rtol=1e-5, atol=1e-6)
    assert ranks_of(program)["fc1.Gemm"] == (0, 1)
    assert ranks_of(program)["fc2.Gemm"] == (2, 3)
    assert ("AllReduce", "fc2.Gemm", ((2, 3),)) in collectives(program)


def test_a_slice_of_the_mesh(tmp_path: Path) -> None:
    setup = 'self.fc1.place({"pp": 0}).shard((("tp", None),)); self.fc2.place({"pp": 1}).shard(((None, "tp"),))'
    plan = "ranks: 6\nmesh: {pp: 3, tp: 2}\nplacement: {MatMul: {pp: 2}}\n"
    program = same_on_all_ranks(tmp_path, net(setup), plan, {"x": X}, rtol=1e-5, atol=1e-6)
    placed = ranks_of(program)
    assert (placed["fc1.Gemm"], placed["fc2.Gemm"], placed["MatMul"]) == ((0, 1), (2, 3), (4, 5))


@pytest.mark.parametrize(
    "call",
    [
        "shard(place(attend, [2, 3]), ((2, 1), None))(op, x, self.w)",
        "place(shard(attend, ((2, 1), None)), [2, 3])(op, x, self.w)",
        "shard(place(op.MatMul, [2, 3]), ((2, 1), (1, 1)))(x, self.w)",
        "place(shard(op.MatMul, ((2, 1), (1, 1))), [2, 3])(x, self.w)",
    ],
)
def test_place_and_shard_of_one_function(tmp_path: Path, call: str) -> None:
    text = net("self.fc1.place(0); self.fc2.place(1)", call)
    program = same_on_all_ranks(tmp_path, text, "ranks: 4\n", {"x": X}, rtol=1e-5, atol=1e-6)
    (path,) = [path for path in ranks_of(program) if path.endswith("MatMul")]
    assert path in ("attend.MatMul", "MatMul")
    assert ranks_of(program)[path] == (2, 3)
    assert [c.strategy() for i, c in program.choices.items() if i.node.op_type == "MatMul"] == ["((2, 1), (1, 1))"]


def test_the_plan_wins(tmp_path: Path) -> None:
    report = compiled(tmp_path, net("self.fc1.place([0, 1])"), "ranks: 3\nplacement: {fc1: 2}\n")
    assert ranks_of(report.program)["fc1.Gemm"] == (2,)


PLACE = "a place is a rank, a list of ranks, or a slice of the plan's mesh: 3, [0, 1], {'pp': 1}"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            'self.fc1.place("MS_PSERVER", 0)',
            "role is 'MS_PSERVER'\n  ranks that are given run operators, which is the role 'MS_WORKER'; a role of the plan has ranks of its"
            " own\n  help: write 'MS_WORKER', or the role without ranks: role=\"ps\"",
        ),
        ("self.fc1.place()", f"place is given no rank\n  {PLACE}"),
        ('self.fc1.place("MS_WORKER")', f"place is given 'MS_WORKER'\n  {PLACE}"),
        (
            "self.fc1.place(0, 1)",
            f"place is given 2 ranks: [0, 1]\n  {PLACE}\n  help: write the ranks of a group as one list",
        ),
        ("self.fc1.place(-1)", f"place is given -1\n  {PLACE}\n  help: a rank is 0 or more"),
        ("self.fc1.place(True)", f"place is given True\n  {PLACE}\n  help: a rank is 0 or more"),
        ("self.fc1.place([])", f"place is given []\n  {PLACE}\n  help: name at least one rank"),
        ("self.fc1.place([0, 1, 0])", "place is given [0, 1, 0], where rank 0 stands twice\n  help: name it once"),
        ("self.fc1.place({'pp': 'a'})", f"place is given {{'pp': 'a'}}\n  {PLACE}"),
        ("place('', 0)", "place got an empty pattern\n  help: write '**' for the whole model"),
        (
            "place(nn.Linear, 0)",
            "place takes a module, but got the class Linear\n  help: make an instance of it: Linear()",
        ),
        (
            "place(lambda op, x: x, 0)",
            "'function' is never called while the model is built\n  help: call what place returns, in forward",
        ),
    ],
)
def test_mistakes(tmp_path: Path, call: str, message: str) -> None:
    said = refused(tmp_path, net(call))
    assert said == f"model.py:{line(tmp_path, call)}: {message}"


@pytest.mark.parametrize(
    ("call", "plan", "message"),
    [
        (
            "self.fc1.place([0, 4])",
            "ranks: 4\n",
            "place of 'fc1': rank 4, but there are 4 ranks\n  help: choose a rank from 0 to 3, or set 'ranks' to at least 5",
        ),
        (
            'self.fc1.place({"pp": 0})',
            "ranks: 4\n",
            "place of 'fc1': a slice of the mesh, but there is no mesh\n"
            "  a slice of the mesh fixes the coordinate of one or more of its axes: {pp: 1}\n"
            "  help: declare 'mesh: {pp: 2, tp: 4}'",
        ),
        (
            'self.fc1.place({"pp": 2})',
            "ranks: 4\nmesh: {pp: 2, tp: 2}\n",
            "place of 'fc1': index 2 along 'pp', whose size is 2\n  help: choose an index from 0 to 1",
        ),
    ],
)
def test_ranks_are_held_against_the_plan(tmp_path: Path, call: str, plan: str, message: str) -> None:
    assert said_by_compile(tmp_path, net(call), plan) == f"model.py:{line(tmp_path, call)}: {message}"


def test_a_level_that_changes_nothing_is_told_by_its_line(tmp_path: Path) -> None:
    report = compiled(tmp_path, net("self.fc1.shard(((2, 1),), device='cpu', level=2)"), "ranks: 2\n")
    (told,) = report.warnings
    assert told.startswith(f"model.py:{line(tmp_path, 'level=2')}: level 2 changes nothing: ")
    report = compiled(tmp_path, net(), "ranks: 2\nsharding:\n  fc1: {in: [[2, 1]], level: 1}\n")
    assert report.warnings[0].startswith("plan.yaml:3: level 1 changes nothing: ")
    assert load(tmp_path, net()).declared.placements == ()


def test_a_head_that_training_does_not_need_may_be_placed(tmp_path: Path) -> None:
    text = net("self.aux = nn.Linear(8, 3).place(1)", '{"y": op.MatMul(x, self.w), "z": self.aux(op, x)}')
    train = "train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: {type: sgd, lr: 0.1}}\n"
    plan = "ranks: 2\nplacement: {MatMul: 0, aux: 1}\nsharding: {aux: {in: [[1, 1]]}}\n"
    assert ranks_of(compiled(tmp_path, text, plan.replace("sharding", "#")).program)["aux.Gemm"] == (1,)
    assert "aux.Gemm" not in ranks_of(compiled(tmp_path, text, plan + train).program)
    said = said_by_compile(tmp_path, text, plan.replace("aux: 1", "auks: 1") + train)
    assert said.startswith("plan.yaml:2: 'auks' matches no module or node of the model")


def test_a_region_with_what_nobody_reads_is_no_fault(tmp_path: Path) -> None:
    both = "shard(lambda op: (op.ReduceMax(self.w, [0]), op.Neg(self.w))[1], out_strategy=(None,))(op)"
    text = net("self.fc1.place(0); self.fc2.place(0)", f"place(op.MatMul, 1)(x, {both})")
    said = said_by_compile(tmp_path, text, "ranks: 2\n")
    assert said.startswith(f"model.py:{line(tmp_path, both)}: sharding of 'function': runs on rank 1 alone (constant)")
    text = net("pass", f"op.MatMul(x, {both})")
    same_on_all_ranks(tmp_path, text, "ranks: 2\n", {"x": X}, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "call", ["self.fc2.place(device='cuda')", "place(self.fc2, 0, device='GPU')", "place('fc2', device='cuda')"]
)
def test_a_call_may_name_a_device(tmp_path: Path, call: str) -> None:
    program = same_on_all_ranks(tmp_path, net(call), "ranks: 1\n", {"x": X}, rtol=1e-5, atol=1e-6)
    found = {program.paths[node]: target for node, target in program.targets.items()}
    assert found == {"fc1.Gemm": "device", "fc2.Gemm": "cuda", "Relu": "device", "MatMul": "device"}


def test_a_device_is_held_against_the_kinds(tmp_path: Path) -> None:
    call = "self.fc1.place(0, device='tpu')"
    said = said_by_compile(tmp_path, net(call), "ranks: 1\n")
    assert (
        said
        == f"model.py:{line(tmp_path, call)}: device is 'tpu'\n  a device is 'cpu' or 'cuda', or 'Ascend' for the job's\n"
        "  help: write 'cpu', or leave it out"
    )
