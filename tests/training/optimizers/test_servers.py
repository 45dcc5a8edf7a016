"""Parameters on ranks that only serve: tables, whose lookups run there, and weights, which workers pull and whose gradients they push."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.cli.main import invoke
from partc.compiler import nn
from partc.compiler.errors import CompileError
from partc.compiler.frontend.inputs import Spec
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.trace import trace
from partc.compiler.ir.programs import Comm
from partc.compiler.pipeline import compile_model, compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from partc.runtime.checkpoint.checkpoint import Checkpoint
from rows import of_today
from training_equivalence import run_whole, same_training
from training_models import INT64

TRAIN = """
symbols: {batch: {divisor: 12, max: 48}}
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label}
  optimizer: {type: momentum, lr: 0.3, momentum: 0.9}
"""
CLIPPED = TRAIN + "  clip: {norm: 0.3}\n  parameters: {'*.bias': {lr: 0.5}}\n"
DP = "dataset: data_parallel\n"
PLANS = {
    "one server": ("ranks: 3\nroles: {ps: 2}\nplacement: {'*': {role: ps}}\n" + DP, TRAIN),
    "servers in front": ("ranks: 4\nroles: {ps: [0, 1]}\nplacement: {'*': {role: ps}}\n" + DP, CLIPPED),
    "three servers": ("ranks: 5\nroles: {ps: [1, 2, 4]}\nplacement: {up: {role: ps}, table: {role: ps}}\n" + DP, TRAIN),
    "two roles": (
        "ranks: 4\nroles: {tables: 3, weights: 2}\nplacement: {table: {role: tables}, 'up.*': {role: weights}}\n" + DP,
        CLIPPED,
    ),
    "everyone serves": ("ranks: 2\nroles: {ps: [0, 1]}\nplacement: {'*': {role: ps}}\n" + DP, TRAIN),
    "tensor parallel": (
        "ranks: 6\nmesh: {dp: 2, tp: 2}\nroles: {ps: [4, 5]}\nplacement: {'*': {role: ps}}\n"
        "sharding: {up: colwise, down: rowwise}\n" + DP,
        TRAIN,
    ),
    "by names of parameters": (
        "ranks: 4\nroles: {ps: [2, 3]}\nplacement: {table.weight: {role: ps}, up: {role: ps}, '*.weight': {role: ps}}\n"
        + DP,
        TRAIN,
    ),
    "stages": (
        "ranks: 4\nroles: {ps: [2, 3]}\nplacement: {up: 0, down: 1, table: {role: ps}}\npipeline: {microbatches: 3}\n",
        TRAIN,
    ),
    "accumulated": ("ranks: 3\nroles: {ps: 2}\nplacement: {'*': {role: ps}}\n" + DP, TRAIN + "  accumulate: 2\n"),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 6, init=nn.init.normal(0.5))
        self.up, self.act, self.down = nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, op, ids):  # type: ignore[no-untyped-def]
        rows = op.Reshape(self.table(op, ids), op.Constant(value_ints=[0, -1]))
        return self.down(op, self.act(op, self.up(op, rows)))


def net() -> Source:
    return Source(trace(Net(), [Spec("ids", ("batch", 2), INT64)], ["y"], "net"))


def batches(count: int) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(5)
    return [{"ids": random.integers(0, 30, (12, 2)), "label": random.integers(0, 4, 12)} for _ in range(count)]


@pytest.mark.parametrize("name", of_today([*PLANS], 3))
def test_workers_train_what_servers_have(tmp_path: Path, name: str) -> None:
    plan, train = PLANS[name]
    whole = run_whole(net(), "ranks: 1\n" + train, batches(3))
    program = same_training(net, plan + train, tmp_path, batches(3), rtol=3e-6, atol=3e-6, whole=whole)
    serving = {*range(program.plan.ranks)} - {*program.plan.workers}
    homes = {
        one.tensor: {part.rank for part in program.parts for kept in part.state if kept.tensor == one.tensor}
        for part in program.parts
        for one in part.state
    }
    assert not serving or homes["table.weight"] <= serving
    for rank in serving:
        nodes = {step.node.op_type for step in program.parts[rank].steps if hasattr(step, "node")}
        assert not nodes & {"MatMul", "Gemm", "Relu"}, nodes
    for body in (body for part in program.parts for body in part.bodies):
        moved = {step.op_type for step in body.steps if isinstance(step, Comm)}
        assert moved <= {"Pull", "Push", "Send", "Recv"}, "gradients of weights are added up, and sent once"


def test_servers_of_a_model_that_is_not_trained(tmp_path: Path) -> None:
    plan = PLANS["three servers"][0] + "symbols: {batch: {divisor: 12}}"
    compile_source(net(), parse_plan(plan, "plan.yaml"), tmp_path / "cut")
    compile_source(net(), parse_plan("ranks: 1", "plan.yaml"), tmp_path / "whole")
    ids = batches(1)[0]["ids"]
    with load_local(tmp_path / "cut") as cut, load_local(tmp_path / "whole") as whole:
        np.testing.assert_allclose(cut({"ids": ids})["y"], whole({"ids": ids})["y"], rtol=1e-6, atol=1e-6)


MODEL = """
from partc.compiler import Input, nn
table = nn.Embedding(12, 4, init=nn.init.normal(0.5))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = table
    def forward(self, op, ids):
        return {"y": self.table(op, ids)}
model, inputs = Net(), {"ids": Input(["batch"], "int64")}
"""


def test_a_training_with_lookups_is_verified(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    plan = "ranks: 3\nroles: {ps: 2}\nplacement: {table: {role: ps}}\n" + DP + TRAIN
    (tmp_path / "plan.yaml").write_text(plan + "  batch: 12\n")
    assert invoke(["verify", str(tmp_path / "model.py"), "--plan", str(tmp_path / "plan.yaml")]) == 0


def test_a_model_may_give_its_tables_to_a_role(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL.replace("self.table = table", 'self.table = table.place(role="ps")'))
    (tmp_path / "plan.yaml").write_text("ranks: 3\nroles: {ps: 2}\n" + DP + TRAIN)
    report = compile_model(tmp_path / "model.py", tmp_path / "plan.yaml", tmp_path / "build")
    assert [bool(part.state) for part in report.program.parts] == [False, False, True]
    (tmp_path / "plan.yaml").write_text("ranks: 3\nroles: {servers: 2}\n" + DP + TRAIN)
    with pytest.raises(
        CompileError, match=r"model.py:7: place of 'table': the string 'ps' is no role\n  the roles are servers"
    ):
        compile_model(tmp_path / "model.py", tmp_path / "plan.yaml", tmp_path / "build")
    (tmp_path / "plan.yaml").write_text("ranks: 3\nroles: {ps: 2}\nplacement: {table: 1}\n" + TRAIN)
    report = compile_model(tmp_path / "model.py", tmp_path / "plan.yaml", tmp_path / "build")
    assert "table.weight" in [one.tensor for one in report.program.parts[1].state], "the plan wins"


def test_a_table_goes_on_under_other_ranks(tmp_path: Path) -> None:
    """Rows that were drawn, and slots of rows, from servers to ranks that pull from each other, by a checkpoint."""
    (tmp_path / "model.py").write_text(MODEL)
    random = np.random.default_rng(2)
    np.savez(tmp_path / "data.npz", ids=random.integers(0, 12, 48), label=random.integers(0, 4, 48))
    train = TRAIN[: TRAIN.index("  optimizer")] + (
        "  optimizer: {type: lazy_adam, lr: 0.1}\n  parameters: {'*': {initial: {uniform: 0.5, seed: 3}}}\n"
        "  data: data.npz\n  batch: 12\n  steps: 4\n  shuffle: false\n"
    )
    plans = {
        "whole": "ranks: 1\n",
        "served": "ranks: 4\nroles: {ps: [1, 3]}\nplacement: {table: {role: ps}}\n" + DP,
        "pulled": "ranks: 3\nsharding: {table: pull}\n" + DP,
    }
    for name, plan in plans.items():
        (tmp_path / f"{name}.yaml").write_text(plan + train)
        compiled = ["compile", str(tmp_path / "model.py"), "--plan", str(tmp_path / f"{name}.yaml")]
        assert invoke([*compiled, "-o", str(tmp_path / name)]) == 0

    def steps(name: str, *more: str) -> None:
        plan, kept = str(tmp_path / f"{name}.yaml"), "one" if name == "whole" else "kept"
        command = ["train", str(tmp_path / name), "--plan", plan, "--checkpoint", str(tmp_path / kept), "--in-process"]
        assert invoke([*command, *more]) == 0

    steps("whole")
    steps("served", "--steps", "2")
    steps("pulled", "--resume")
    want, have = (Checkpoint.open(tmp_path / kept) for kept in ("one", "kept"))
    assert (have.index.step, have.index.ranks) == (4, 3)
    assert want.index.tensors.keys() == have.index.tensors.keys() > {"table.weight", "table.weight.exp_avg"}
    for name in want.index.tensors:
        np.testing.assert_allclose(have.read(name), want.read(name), rtol=1e-5, atol=1e-6, err_msg=name)


WRONG = {
    "placement: {table: {role: pz}}": """\
plan.yaml:3: placement of 'table': the string 'pz' is no role
  the roles are ps
  help: declare it: 'roles: {pz: [2, 3]}'""",
    "placement: {tabel: {role: ps}}": """\
plan.yaml:3: 'tabel' matches no parameter, and no module or node that has parameters
  help: the nearest are 'table'""",
    "placement: {table: {role: [ps]}}": """\
plan.yaml:3: placement of 'table': expected the name of a role, but got a list
  help: write {role: ps}""",
    "placement: {table: ps}": """\
plan.yaml:3: placement of 'table': expected a rank, ranks or a role, but got the string 'ps'
  help: write {role: ps}""",
    "placement: {table: {roles: ps}}": """\
plan.yaml:3: placement of 'table': expected a rank, ranks or a role, but got a mapping
  help: write {role: ps}""",
    "placement: {table: {role: ps}}\nsharding: {table: pull}": """\
plan.yaml:4: sharding of 'table': pull, but its rows are pulled from the ranks that serve them
  help: take this line out, or the role in 'placement'""",
    "placement: {table: {role: ps}}\nsharding: {table: {in: [[1, 2], [1, 1]]}}": """\
plan.yaml:4: sharding of 'table' (Gather): input 0, dim 1 is cut into 2, but stays whole
  its rows lie on the ranks that serve them
  help: write 1""",
    "placement: {act: {role: ps}}": "plan.yaml:3: 'act' matches no parameter, and no module or node that has parameters",
    "mesh: {dp: 3}": "the mesh dp=3 has 3 ranks, but there are 4 ranks, of which 2 work",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_no_role_can_be(tmp_path: Path, line: str) -> None:
    plan = f"ranks: 4\nroles: {{ps: [2, 3]}}\n{line}\n{TRAIN}"
    with pytest.raises(CompileError) as error:
        compile_source(net(), parse_plan(plan, "plan.yaml"), tmp_path / "build")
    assert WRONG[line] in str(error.value)


def test_a_rank_has_one_role() -> None:
    for roles, fact in (
        ("{ps: [2, 3], tables: [3]}", "rank 3 is of the role 'ps', too"),
        ("{ps: [2, 4]}", "rank 4, but there are 4 ranks"),
        ("{ps: []}", "the list of ranks is empty"),
    ):
        with pytest.raises(CompileError, match=fact):
            parse_plan(f"ranks: 4\nroles: {roles}\n", "plan.yaml")
    for roles, fact in (
        ("[2, 3]", "'roles': expected a mapping"),
        ("{ps: three}", "role 'ps': expected a rank, an integer, but got the string 'three'"),
        ("{ps: [-1]}", "role 'ps': rank -1, but there are 4 ranks"),
    ):
        with pytest.raises(CompileError, match=fact) as error:
            parse_plan(f"ranks: 4\nroles: {roles}\nplacement: {{table: {{role: ps}}}}\n", "plan.yaml")
        assert len(error.value.problems) == 1, "who names the role is not at fault"
    with pytest.raises(CompileError, match="give the roles the ranks from 2 on"):
        parse_plan("ranks: 4\nmesh: {dp: 2}\nroles: {ps: [0, 1]}\n", "plan.yaml")
