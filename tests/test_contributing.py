"""CONTRIBUTING.md's diffs are all that a new op, optimizer, loss, metric, plan key, schedule, command, pass, check or collective needs."""

from __future__ import annotations

from pathlib import Path

from contributing import followed, output_of

BEGIN = r"""
import contextlib, io, sys, tempfile
from pathlib import Path
sys.path += ["tests/support", "tests/ops", "tests/training", "tests/checker"]
import numpy as np, onnx
import partc.compiler
from partc.cli.main import invoke
from partc.compiler.errors import CompileError
from partc.compiler.frontend import load
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from training_equivalence import run, same_training, train_whole

folder = Path(sys.argv[1])
assert partc.compiler.__file__.startswith(str(folder)), partc.compiler.__file__

def printed(*words):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        invoke([*words])
    return text.getvalue()
"""
PARTS = {
    "Add an op": r"""
from equivalence import same_as_whole
from gradient_case import cut_faults, faults
from gradient_cases_compute import CASES
from rule_prover import unclaimed, violations

(proof,) = [one for one in CASES if one.case.op_type == "CDist"]
assert not [*faults(proof, False), *faults(proof, True), *cut_faults(proof), *violations(proof.case), *unclaimed(proof.case)]
assert printed("ops", "CDist").splitlines()[1].split()[:4] == ["com.microsoft.CDist", "mk,nk->mn", "k", "yes"]
model = onnx.parser.parse_model('''
    <ir_version: 8, opset_import: ["": 21, "com.microsoft": 1]>
    model (float[6, 4] a, float[9, 4] b) => (float[6, 9] y) {
        [dist] y = com.microsoft.CDist <metric = "sqeuclidean"> (a, b)
    }''')
feeds = {"a": np.arange(24, dtype=np.float32).reshape(6, 4), "b": np.ones((9, 4), np.float32)}
for ranks, strategy, cut in (6, "[[2, 1], [3, 1]]", {"m": 2, "n": 3}), (2, "[[1, 2], [1, 2]]", {"k": 2}):
    plan = f"ranks: {ranks}\nsharding: {{dist: {{in: {strategy}}}}}\n"
    program = same_as_whole(model, plan, feeds, rtol=1e-5, atol=1e-5)
    assert [choice.cut for choice in program.choices.values()] == [cut]
""",
    "Add an optimizer": r"""
from optimizer_case import CASES as OPTIMIZED, assert_close, formula, trained
from partc.compiler.plan.schema import plan_schema
from plan_values import optimizer
from training_plans_case import CROSS_ENTROPY, batches, learns, sizes_of

chosen = [optimizer("adadelta", options) for type, options in OPTIMIZED if type == "adadelta"]
assert [one.hyper for one in chosen] == [{"rho": 0.9, "eps": 1e-06}, {"rho": 0.8, "eps": 0.001}]
for one in chosen:
    assert_close(trained(one, (4, 3), scale=0.5), formula(one, (4, 3), lambda g: 0.5 * g), 2e-6)
train = "train:\n  " + CROSS_ENTROPY + "\n  optimizer: {type: adadelta, lr: 0.5, eps: 0.01, weight_decay: 0.1}\n"
learns("mlp", "ranks: 2\n" + batches(2), sizes_of("mlp", 6, 4), folder / "optimizer", train, atol=5e-4)
keys = {"eps", "lr", "rho", "shard", "target", "type", "weight_decay"}
assert {*plan_schema()["$defs"]["TrainingAdadeltaOptions"]["properties"]} == keys
""",
    "Add a loss": r"""
from small_training import with_numbers, PERCEPTRON

rng = np.random.default_rng(5)
steps = [{"x": rng.normal(size=(12, 6)).astype("f"), "t": rng.normal(size=(12, 3)).astype("f")} for _ in range(3)]
PLANS = {
    "batch": "ranks: 3\nsymbols: {batch: {divisor: 12}}\ndataset: data_parallel\n",
    "columns": "ranks: 3\nsharding: {two: {in: [[1, 1], [1, 3]]}}\n",
    "microbatches": "ranks: 2\nsymbols: {batch: {divisor: 12}}\nplacement: {one: 0, plus: 0, turn: 0, two: 1}\n"
    "pipeline: {microbatches: 3, schedule: 1f1b}\n",
}

def source():
    return Source(from_proto(with_numbers(PERCEPTRON), Path("model.onnx")))

def check(train):
    for name, plan in PLANS.items():
        same_training(source, plan + train, folder / str(len(train)) / name, steps, rtol=1e-5, atol=1e-4)
    return run(source(), "ranks: 1\n" + train, folder / str(len(train)) / "one", steps)

def prediction(tensors, x):
    return np.tanh(x @ tensors["first"] + tensors["shift"]) @ tensors["second"]

found = check("train: {loss: {type: logcosh, prediction: y, target: t, width: 0.5}, optimizer: {type: sgd, lr: 0.1}}\n")
off = (prediction(found.before, steps[0]["x"]) - steps[0]["t"]) / 0.5
np.testing.assert_allclose(found.outputs[0]["loss"], np.log(np.cosh(off)).mean(), rtol=1e-5)
""",
    "Add a metric": r"""
from partc.runtime.artifact.training.metric_formula import FORMULAS

found = check("train: {loss: {type: l1, prediction: y, target: t}, metrics: [rmse], optimizer: {type: sgd, lr: 0.1}}\n")
off = prediction(found.before, steps[0]["x"]) - steps[0]["t"]
np.testing.assert_allclose(FORMULAS["root_mean"].number(found.outputs[0]["rmse"]), np.sqrt((off**2).mean()), rtol=1e-5)
""",
    "Add a plan key": r"""
train = "train: {loss: {type: l1, prediction: y, target: t}, optimizer: {type: adamw, lr: 0.1, weight_decay: 0.3}, KEY}\n"
found = check(train.replace("KEY", "decay_vectors: false"))
said = check(train.replace("KEY", "parameters: {shift: {weight_decay: 0}}"))
for name, value in said.after.items():
    np.testing.assert_array_equal(found.after[name], value)
""",
    "Add a schedule": r"""
def compiled(plan, out):
    model = onnx.parser.parse_model('''
        <ir_version: 8, opset_import: ["": 21]>
        model (float[batch, 6] x) => (float[batch, 6] y) { [one] h = Relu (x) [two] y = Tanh (h) }''')
    return compile_source(Source(from_proto(model, Path("model.onnx"))), parse_plan(plan, "plan.yaml"), folder / out).program

staged = "ranks: 2\nsymbols: {batch: {divisor: 3}}\nplacement: {one: 0, two: 1}\n"
program = compiled(staged + "pipeline: {microbatches: 3, schedule: last_first}\n", "staged")
assert program.tasks.schedule.name == "last_first"
assert "0F0 0F1 0F2 0B2 0B1 0B0" in printed("simulate", "--schedule", "last_first", "--ranks", "2", "-m", "3")
""",
    "Add a command": r"""
compiled("ranks: 1", "build")
assert "Show the files of an artifact." in printed("--help")
assert "rank_0000.onnx" in printed("files", str(folder / "build"))
""",
    "Add a pass": r"""
try:
    compiled("ranks: 2\nplacement: {one: 0, two: 0}", "other")
except CompileError as error:
    assert "ranks [1] have nothing to do" in str(error)
else:
    raise AssertionError("a rank without work is refused")
""",
    "Add a check": r"""
from artifact_edit import chain
from mutated import change_manifest
from partc.runtime.checker.check import check_artifact

chain(folder / "chain")
assert check_artifact(folder / "chain") == []
change_manifest(folder / "chain", lambda data: data["transfers"][0].update(cause=""))
(found,) = check_artifact(folder / "chain")
assert str(found).startswith("manifest.json: transfer ")
assert "has no cause" in found.fact
""",
    "Add a collective": r"""
from partc.compiler.rewrite.unrolled import unrolled

model = folder / "collective/model.py"
model.parent.mkdir()
model.write_text('''
from partc.compiler import Input, collectives as cc, nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter([6, 4], "float32", init=nn.init.normal(0.5))

    def forward(self, op, x):
        def shards(op, x):
            h = op.Tanh(op.MatMul(x, self.w))
            return op.Sub(cc.gather(h, axis="dp", dim=1, root=1), op.Concat(h, h, h, axis=1))

        return cc.local_map(shards, in_specs=[("dp", None)], out_specs=("dp", None))(op, x)

model, inputs, outputs = Net(), {"x": Input(["batch", 6], "float32")}, ["y"]
''')
plan = "ranks: 3\nmesh: {dp: 3}\nsymbols: {batch: {divisor: 3}}\n"
train = "train: {loss: {type: l1, prediction: y, target: t}, optimizer: {type: sgd, lr: 0.1}}\n"
rng = np.random.default_rng(2)
steps = [{"x": rng.normal(size=(6, 6)).astype("f"), "t": rng.normal(size=(6, 12)).astype("f")} for _ in range(2)]
alone = train_whole(plan + train).replace("ranks: 1\n", "ranks: 1\nsymbols: {batch: {divisor: 3}}\n")
whole = run(Source(unrolled(load(model).model, {"dp": 3})), alone, folder / "alone", steps)
program = same_training(lambda: load(model), plan + train, folder / "three", steps, rtol=1e-5, atol=1e-4, whole=whole)
assert [event.op_type for event in program.events if event.cause.startswith("written")] == ["Gather"]
""",
}
"""By section what is true once its diff is applied; names of one part are there in the next."""


def test_every_diff_adds_what_its_section_says(tmp_path: Path) -> None:
    """One copy and one process for all: each would begin with the imports of a compile."""
    output_of(followed(tmp_path, *PARTS), "-c", BEGIN + "\n".join(PARTS.values()), str(tmp_path))
