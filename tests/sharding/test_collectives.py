"""Collectives that a model.py writes: equal to the model with its local maps written out, forwards and in training."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from equivalence import same, whole_outputs
from partc.compiler import collectives
from partc.compiler.errors import CompileError
from partc.compiler.frontend import load
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.pipeline import compile_model, compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.rewrite.unrolled import unrolled
from partc.runtime import load_local
from partc.runtime.checker.check import check_artifact
from training_equivalence import run_whole, same_training, train_whole

MODEL = """
from partc.compiler import Input, nn
from partc.compiler import collectives as cc

nn.seed(5)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter([6, 12], "float32", init=nn.init.normal(0.5))
        self.v = nn.Parameter([12, 3], "float32", init=nn.init.normal(0.5))

    def forward(self, op, x):
        first, second = op.Constant(value_ints=[0]), op.Constant(value_ints=[1])

        def shards(op, x):
            h = op.MatMul(x, self.w)
            BODY

        y = cc.local_map(shards, in_specs=[IN], out_specs=OUT)(op, x)
        return op.MatMul(op.Tanh(y), self.v)

model = Net()
inputs = {"x": Input(["batch", 6], "float32")}
outputs = ["y"]
"""
ROWS, EVERYWHERE = '("dp", None)', "(None, None)"
BODIES = {
    "all_reduce": ('return op.Sub(h, cc.all_reduce(op.ReduceMean(h, first, keepdims=1), axis="dp"))', ROWS),
    "all_reduce to one value": (
        'return cc.all_reduce(op.ReduceSum(op.Mul(h, h), first, keepdims=1), axis="dp")',
        EVERYWHERE,
    ),
    "all_reduce max": (
        'return op.Sub(h, cc.all_reduce(op.ReduceMax(h, first, keepdims=1), axis="dp", reduce="max"))',
        ROWS,
    ),
    "all_reduce min": ('return op.Mul(h, cc.all_reduce(op.Round(h), axis="dp", reduce="min"))', ROWS),
    "all_gather": ('return op.Mul(cc.all_gather(h, axis="dp"), cc.all_gather(op.Neg(h), axis="dp"))', EVERYWHERE),
    "reduce_scatter": ('return cc.reduce_scatter(op.Exp(h), axis="dp", dim=1)', '(None, "dp")'),
    "reduce_scatter and all_gather": (
        'return cc.all_gather(cc.reduce_scatter(h, axis="dp", dim=1), axis="dp", dim=1)',
        EVERYWHERE,
    ),
    "all_to_all": ('return cc.all_to_all(op.Tanh(h), axis="dp", split_dim=1, concat_dim=0)', '(None, "dp")'),
    "broadcast": ('return op.Add(h, cc.broadcast(op.Exp(h), axis="dp", root=1))', ROWS),
    "reduce": ('return op.Add(h, cc.reduce(op.Exp(h), axis="dp", root=1))', ROWS),
    "gather": ('return op.Sub(cc.gather(h, axis="dp", dim=0, root=1), op.Concat(h, h, axis=0))', ROWS),
    "scatter": (
        'return op.Mul(op.Split(h, num_outputs=2, axis=1, _outputs=2)[0], cc.scatter(h, axis="dp", dim=1, root=1))',
        '("dp", None)',
    ),
    "send_recv": ('return op.Add(h, cc.send_recv(op.Exp(h), axis="dp", pairs=[(0, 1)]))', ROWS),
    "a ring": ('return op.Mul(h, cc.send_recv(h, axis="dp", pairs=[(0, 1), (1, 0)]))', ROWS),
    "axis_index": ('return op.Mul(h, op.CastLike(cc.axis_index(axis="dp"), h))', ROWS),
}
TWO = "ranks: 2\nmesh: {dp: 2}\nsymbols: {batch: {divisor: 2}}\n"
MESH = "ranks: 6\nmesh: {dp: 2, tp: 3}\nsymbols: {batch: {divisor: 6}}\ndataset: data_parallel\n"
PLACED = "ranks: 3\nmesh: {dp: 2}\nsymbols: {batch: {divisor: 2}}\nplacement: {shards: [2, 0], Tanh: 1}\n"
TRAIN = """train:
  loss: {type: mean_squared, prediction: y, target: t}
  optimizer: {type: sgd, lr: 0.05}
"""


def written(folder: Path, body: str, out: str, given: str = ROWS) -> Path:
    """The model with this body, as a file; `scatter` halves what the second layer takes."""
    text = MODEL.replace("BODY", body).replace("OUT", out).replace("[IN]", f"[{given}]")
    if "scatter(h" in body and "reduce" not in body:
        text = text.replace("[12, 3]", "[6, 3]")
    (folder / "model.py").write_text(text)
    return folder / "model.py"


def whole(model: Path, mesh: dict[str, int]) -> Callable[[], Source]:
    """What gives the model with its local maps written out."""
    return lambda: Source(unrolled(load(model).model, mesh))


def alone(plan: str) -> str:
    """The plan's training on one rank, with what it promises of the batch."""
    symbols = next(line for line in plan.splitlines() if line.startswith("symbols:"))
    return train_whole(plan).replace("ranks: 1\n", f"ranks: 1\n{symbols}\n")


def numbers(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"x": random.standard_normal((rows, 6)).astype(np.float32)}


def same_as_unrolled(model: Path, plan: str, mesh: dict[str, int], out: Path) -> Complete:
    """Compares the outputs of two steps, and the artifact with its own laws."""
    program = compile_source(load(model), parse_plan(plan, "plan.yaml"), out, check=False).program
    assert check_artifact(out) == []
    proto = ir.to_proto(whole(model, mesh)().model)
    with load_local(out) as ranks:
        for rows in (12, 6):
            have, want = ranks(numbers(rows)), whole_outputs(proto, numbers(rows))
            for name, value in want.items():
                same(have[name], value, name, 1e-5, 1e-5)
    return program


@pytest.mark.parametrize("name", BODIES)
def test_each_collective(name: str, tmp_path: Path) -> None:
    """Two steps of training, with the gradient that its dual gives."""
    model = written(tmp_path, *BODIES[name])
    rows = {"all_reduce to one value": 1, "reduce_scatter": 6, "reduce_scatter and all_gather": 6, "gather": 24}
    steps = [{**numbers(12, k), "t": numbers(rows.get(name, 12), 9)["x"][:, :3]} for k in range(2)]
    unsharded = run_whole(whole(model, {"dp": 2})(), alone(TWO + TRAIN), steps)
    program = same_training(lambda: load(model), TWO + TRAIN, tmp_path, steps, rtol=1e-5, atol=2e-4, whole=unsharded)
    causes = [event.cause for event in program.events]
    assert any(cause.startswith("written at model.py:") for cause in causes) or name == "axis_index"


MEANINGS: dict[str, tuple[str, Callable[[list[np.ndarray]], np.ndarray]]] = {
    "all_reduce(x, axis='dp')": (ROWS, lambda x: np.tile(sum(x), (3, 1))),
    "all_reduce(x, 'max', axis='dp')": (EVERYWHERE, lambda x: np.maximum.reduce(x)),
    "all_gather(x, 1, axis='dp')": (EVERYWHERE, lambda x: np.concatenate(x, 1)),
    "reduce_scatter(x, 1, axis='dp')": ('(None, "dp")', lambda x: sum(x)),
    "all_to_all(x, 1, 0, axis='dp')": ('(None, "dp")', lambda x: np.concatenate(x)),
    "broadcast(x, 2, axis='dp')": (EVERYWHERE, lambda x: x[2]),
    "reduce(x, 1, axis='dp')": (ROWS, lambda x: np.concatenate([0 * x[0], sum(x), 0 * x[0]])),
    "gather(x, 0, 2, axis='dp')": (ROWS, lambda x: np.concatenate([0 * np.concatenate(x)] * 2 + x)),
    "scatter(x, 1, 1, axis='dp')": ('(None, "dp")', lambda x: x[1]),
    "send_recv(x, [(2, 0), (0, 1)], axis='dp')": (ROWS, lambda x: np.concatenate([x[2], x[0], 0 * x[0]])),
}


GUIDE = Path(__file__).parents[2] / "samples" / "guide" / "sharding.md"


def test_the_guide_writes_what_the_calls_take() -> None:
    """Each call in the guide's table of collectives has its arguments in the order of the function's, before `axis`."""
    table = GUIDE.read_text().split("| MegEngine | partc", 1)[1].split("\n\n")[0]
    calls = re.findall(r"`(\w+)\(x(?:, ([^)]*))?\)`", table)
    assert {name for name, _ in calls} == {*collectives.__all__} - {"axis_index", "local_map"}
    for name, given in calls:
        parameters = inspect.signature(getattr(collectives, name)).parameters
        places = [one.name for one in parameters.values() if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        words = [word.partition("=")[0] for word in given.split(", ")] if given else []
        assert places == ["x", *words]
        assert list(parameters) == [*places, "axis"]


@pytest.mark.parametrize("call", MEANINGS)
def test_what_each_means(call: str, tmp_path: Path) -> None:
    """On 3 ranks, by the shards of `x` in numpy; the checker knows the artifact."""
    out, numpy = MEANINGS[call]
    (tmp_path / "model.py").write_text(
        f"""
from partc.compiler import Input, nn
from partc.compiler.collectives import *

class Net(nn.Module):
    def forward(self, op, x):
        return local_map(lambda op, x: {call}, in_specs=[("dp", None)], out_specs={out})(op, x)

model, inputs, outputs = Net(), {{"x": Input(["batch", 6], "float32")}}, ["y"]
"""
    )
    plan = parse_plan("ranks: 3\nmesh: {dp: 3}\nsymbols: {batch: {divisor: 3}}\n", "plan.yaml")
    compile_source(load(tmp_path / "model.py"), plan, tmp_path / "build")
    assert check_artifact(tmp_path / "build") == []
    x = numbers(18)["x"]
    with load_local(tmp_path / "build") as ranks:
        found = ranks(x=x)["y"]
    np.testing.assert_allclose(found, numpy(np.split(x, 3)), rtol=1e-6, atol=1e-6)


def test_along_one_axis_of_a_mesh(tmp_path: Path) -> None:
    """Shards by both axes, a sum along the one and then the other, as one program for all ranks."""
    body = """p = cc.reduce_scatter(h, axis="tp", dim=1)
            q = cc.all_reduce(op.ReduceMean(p, first, keepdims=1), axis="dp")
            return op.Sub(p, q)"""
    model = written(tmp_path, body, '("dp", "tp")', '("dp", None)')
    mesh = {"dp": 2, "tp": 3}
    program = same_as_unrolled(model, MESH, mesh, tmp_path / "build")
    found = [(event.op_type, event.ranks) for event in program.events if event.cause.startswith("written")]
    assert found == [("ReduceScatter", ((0, 1, 2), (3, 4, 5))), ("AllReduce", ((0, 3), (1, 4), (2, 5)))]
    steps = [{**numbers(12, k), "t": numbers(12, 9)["x"][:, :3]} for k in range(2)]
    unsharded = run_whole(whole(model, mesh)(), alone(MESH + TRAIN), steps)
    program = same_training(lambda: load(model), MESH + TRAIN, tmp_path, steps, rtol=1e-5, atol=2e-4, whole=unsharded)
    kinds = Counter(event.op_type for event in program.events if "'shards." in event.cause or "written" in event.cause)
    assert kinds == {"ReduceScatter": 1, "AllReduce": 2, "AllGather": 1}


MODULES = """
from partc.compiler import Input, nn
from partc.compiler import collectives as cc

nn.seed(3)

@cc.local_map(in_specs=[("dp", None), None], out_specs=[("dp", None), None])
def stats(op, x, b):
    h = op.Add(x, b)
    return h, cc.all_reduce(op.ReduceMean(op.Mul(h, h), op.Constant(value_ints=[0]), keepdims=1), axis="dp")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(6, 12), nn.Linear(12, 3)
        self.b = nn.Parameter([12], "float32", init=nn.init.uniform())

    def forward(self, op, x):
        h = cc.local_map(lambda op, x: self.fc(op, x), in_specs=[("dp", None)], out_specs=("dp", None))(op, x)
        h, s = stats(op, h, self.b)
        h, t = stats(op, op.Div(h, op.Sqrt(s)), self.b)
        return self.out(op, op.Sub(op.Relu(h), t))

model, inputs, outputs = Net(), {"x": Input(["batch", 6], "float32")}, ["y"]
"""


def test_modules_inside_several_results_and_an_optimizer_that_is_shared_out(tmp_path: Path) -> None:
    """One function mapped twice over `dp`, beside a layer that `tp` cuts."""
    model = tmp_path / "model.py"
    model.write_text(MODULES)
    plan = "ranks: 4\nmesh: {dp: 2, tp: 2}\nsymbols: {batch: {divisor: 4}}\ndataset: data_parallel\n"
    plan += "sharding: {out: rowwise}\n" + TRAIN.replace("lr: 0.05", "lr: 0.05, shard: dp")
    steps = [{**numbers(12, k), "t": numbers(12, 9)["x"][:, :3]} for k in range(2)]
    unsharded = run_whole(whole(model, {"dp": 2, "tp": 2})(), alone(plan).replace(", shard: dp", ""), steps)
    program = same_training(lambda: load(model), plan, tmp_path, steps, rtol=1e-5, atol=5e-4, whole=unsharded)
    found = [event.op_type for event in program.events if event.cause.startswith("written")]
    assert found == ["AllReduce", "AllReduce"]


def test_on_a_group_of_ranks(tmp_path: Path) -> None:
    model = written(tmp_path, *BODIES["all_reduce"])
    program = same_as_unrolled(model, PLACED, {"dp": 2}, tmp_path / "build")
    assert ((2, 0),) in [event.ranks for event in program.events if event.cause.startswith("written")]


def test_without_a_mesh_on_one_rank_an_axis_has_one_coordinate(tmp_path: Path) -> None:
    model = written(tmp_path, *BODIES["all_reduce"])
    program = same_as_unrolled(model, "ranks: 1\n", {}, tmp_path / "build")
    assert program.events == ()


def test_equal_extremes_share_over_ranks(tmp_path: Path) -> None:
    """Of equal elements on both ranks each gets half of the cotangent, as elements of one tensor do."""
    model = written(tmp_path, *BODIES["all_reduce max"])
    steps = [{"x": np.tile(numbers(3)["x"], (4, 1)), "t": numbers(12, 9)["x"][:, :3]}]
    unsharded = run_whole(whole(model, {"dp": 2})(), alone(TWO + TRAIN), steps)
    same_training(lambda: load(model), TWO + TRAIN, tmp_path, steps, rtol=1e-5, atol=2e-4, whole=unsharded)


MISTAKES = {
    "an axis that the mesh has not": (
        *("return h", ROWS, "ranks: 2\nmesh: {tp: 2}\n"),
        ["model.py:20: the local map names the axis 'dp'", "plan.yaml is tp=2"],
    ),
    "no mesh": (*("return h", ROWS, "ranks: 2\n"), ["plan.yaml has no mesh", "{dp: 2}"]),
    "an axis that the map has not": (
        *('return cc.all_reduce(h, axis="tp")', ROWS, TWO),
        ["model.py:18: all_reduce: no axis 'tp' here", 'write axes=["tp"] there'],
    ),
    "a result that may differ": (
        *("return h", EVERYWHERE, TWO),
        ["result 0 may differ along 'dp'", "all_reduce, all_gather or broadcast it, or name 'dp' in its spec"],
    ),
    "shards that are not equal": (
        *('return cc.reduce_scatter(op.MatMul(h, self.v), axis="dp", dim=1)', '(None, "dp")', TWO),
        ["ReduceScatter: cannot cut", "dim 1 (3) into 2", "the axis 'dp' has 2 ranks"],
    ),
    "a batch that is not divisible": (
        *("return h", ROWS, "ranks: 2\nmesh: {dp: 2}\n"),
        ["cannot cut 'x' dim 0 (batch) into 2", "declare `batch: {divisor: 2}`"],
    ),
    "a root beyond the axis": (
        *('return cc.broadcast(h, axis="dp", root=2)', ROWS, TWO),
        ["Broadcast names place 2", "places along 'dp' are 0 to 1"],
    ),
    "ranks that do not take part": (
        *("return h", ROWS, "ranks: 2\nmesh: {dp: 2}\nsymbols: {batch: {divisor: 2}}\nplacement: {shards: 1}\n"),
        ["runs on rank 1 (plan.yaml:4 'shards')", "its axis 'dp' has 2 ranks, all of which take part"],
    ),
    "a spec of another rank": (*("return h", '("dp",)', TWO), ["out_specs[0] has 1 entries, and the result 2 dims"]),
    "a value from outside": (
        *("return op.Add(h, outer)", ROWS, TWO),
        ["Add reads", "which is made outside of the local map", "hand it in as an argument"],
    ),
    "a cut inside": (
        *("return h", ROWS, TWO + "sharding: {shards.MatMul: {in: [[1, 1], [1, 2]]}}\n"),
        ["plan.yaml:4: MatMul (shards.MatMul) is cut, and it is inside of a local map"],
    ),
    "what training changes": (
        *("return op.Dropout(h)", ROWS, TWO + TRAIN),
        ["shards.Dropout: a Dropout is inside of a local map, in a plan that trains"],
    ),
    "an axis in the place of a dim": (
        *('return cc.all_gather(h, "dp")', EVERYWHERE, TWO),
        ["all_gather: a dim or root is 'dp'", "write all_gather(x, ..., axis='dp')"],
    ),
    "an axis in the place of pairs": (
        *('return cc.send_recv(h, "dp")', ROWS, TWO),
        ["send_recv: pairs is 'dp'", "write send_recv(x, [(0, 1)], axis='dp')"],
    ),
    "no axis": (
        *("return cc.all_reduce(h)", ROWS, TWO),
        ["all_reduce: no axis is given", "write all_reduce(..., axis='dp')"],
    ),
    "outside of a map": (
        *("return h", ROWS, TWO),
        ["all_gather is called outside of a local map", "call it in a function that `local_map` runs"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, tmp_path: Path) -> None:
    body, out, plan, words = MISTAKES[name]
    model = written(tmp_path, body, out)
    text = model.read_text()
    if name == "outside of a map":
        text = text.replace("y = cc.local_map", 'x = cc.all_gather(x, axis="dp")\n        y = cc.local_map')
    if name == "a value from outside":
        text = text.replace("def shards", "outer = op.MatMul(x, self.w)\n\n        def shards")
    model.write_text(text)
    (tmp_path / "plan.yaml").write_text(plan)
    with pytest.raises(CompileError) as caught:
        compile_model(model, tmp_path / "plan.yaml", tmp_path / "build")
    for word in words:
        assert word in str(caught.value)
