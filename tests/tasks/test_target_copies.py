"""Copies between the targets of a rank: no more than there must be, their bytes, what shows them, and forged files."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from equivalence import compiled, model, same_as_whole
from onnx import ModelProto, helper, parser
from partc.cli.main import invoke
from partc.compiler.errors import CompileError
from partc.compiler.ir import programs
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Compute
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime.artifact.format import TARGET, Manifest, Transfer
from partc.runtime.artifact.graph.targets import forget_copies
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check_artifact
from partc.runtime.checker.graph.nodes import check_targets
from partc.runtime.errors import ArtifactError
from partc.runtime.program.rank_file import transfers_of
from partc.runtime.program.steps import Copy, Send
from training_equivalence import from_text, same_training, source_of
from training_models import dlrm, gpt

TRAIN = "train:\n  loss: LOSS\n  optimizer: {type: adam, lr: 0.01, eps: 0.01MORE}\n"
ENTROPY = "{type: softmax_cross_entropy, logits: y, labels: labels}"


def trained(loss: str, more: str = "") -> str:
    return TRAIN.replace("LOSS", loss).replace("MORE", more)


def copies(program: Complete) -> list[tuple[str, str]]:
    """What is copied, but for numbers and inputs."""
    found = (step for step in program.parts[0].steps if isinstance(step, programs.Copy))
    return [
        (str(one.output), one.target) for one in found if not one.bytes.isdecimal() and "." in f"{one.path}{one.source}"
    ]


def test_an_embedding_on_the_cpu_is_one_copy_each_way(tmp_path: Path) -> None:
    one = gpt(16, 1, 2, 30, 8)
    steps = [one.feeds(np.random.default_rng(0), batch=4, seq=6)]
    plan = "ranks: 1\ntarget: {'**': cuda, tokens: cpu}\n" + trained(ENTROPY)
    program = same_training(lambda: source_of(gpt(16, 1, 2, 30, 8)), plan, tmp_path, steps, rtol=1e-5, atol=2e-4)
    moved = [one for one in copies(program) if "labels" not in one[0]]
    assert moved == [("tokens.Gather.cuda", "cuda"), ("Add.grad", "cpu")]


def test_tables_on_the_cpu(tmp_path: Path) -> None:
    """The rows of every table go up, their gradients come down, and the tables stay."""
    steps = [dlrm(2, 20, 4, 3, 8).feeds(np.random.default_rng(1), batch=4)]
    plan = "ranks: 1\ntarget: {'**': cuda, 'tables.*': cpu}\n" + trained("loss")
    program = same_training(lambda: source_of(dlrm(2, 20, 4, 3, 8)), plan, tmp_path, steps, rtol=1e-5, atol=2e-4)
    states = {one.tensor: one.target for one in program.parts[0].state}
    assert {target for tensor, target in states.items() if tensor.startswith("tables")} == {"cpu"}
    assert {target for tensor, target in states.items() if not tensor.startswith("tables")} == {"cuda"}
    ops = (step.target for step in program.parts[0].steps if isinstance(step, Compute))
    assert [target for target, _ in groupby(ops)] == ["cuda", "cpu", "cuda", "cpu", "cuda"], "the last are updates"
    rows = [one for one in copies(program) if one[0].startswith("tables")]
    assert len([one for one in rows if one[1] == "cuda"]) == 2
    assert not any(
        str(one.source).endswith(".weight") for one in program.parts[0].steps if isinstance(one, programs.Copy)
    )


LAYERS = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 6] x) => (float[batch, 4] y)
{ [one] a = MatMul(x, w)
  [plus] b = Add(a, s)
  [turn] c = Tanh(b)
  [two] y = MatMul(c, v) }"""
SHAPES = {"w": (6, 8), "s": (8,), "v": (8, 4)}
ELEMENTS = 6 * 8 + 8 + 8 * 4


DATA = "ranks: 2\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\n"


@pytest.mark.parametrize(("head", "shard"), [("ranks: 1\n", ""), (DATA, ""), (DATA, ", shard: true")])
def test_an_offloaded_optimizer_moves_four_bytes_an_element(head: str, shard: str, tmp_path: Path) -> None:
    """Also with ZeRO: what ranks send each other lies on the CPU, all of a gradient before it is shared and of a weight behind it."""
    plan = head + "target: cuda\nprecision: {compute: float16, loss_scale: 1024}\n"
    plan += trained("{type: mean_squared, prediction: y, target: t}", f", target: cpu{shard}")
    program = compile_source(from_text(LAYERS, SHAPES), parse_plan(plan, "plan.yaml"), tmp_path / "build").program
    assert check_artifact(tmp_path / "build") == []
    moved = [one for one in program.parts[0].steps if isinstance(one, programs.Copy)]
    weights = {f"{name}.float16" for name in SHAPES} | {f"{name}.float16.cuda" for name in SHAPES}
    of_weights = [one for one in moved if str(one.source) in weights or ".float16.grad" in str(one.output)]
    assert {one.target for one in of_weights} == {"cpu", "cuda"}
    assert sum(int(one.bytes) for one in of_weights) == 4 * ELEMENTS
    assert {one.target for one in program.parts[0].state} == {"cpu"}


def test_ops_stand_in_the_fewest_runs() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    m (float[4, 6] x) => (float[4, 6] y) {
    [a0] a0 = Relu(x)  [b0] b0 = Neg(x)  [a1] a1 = Tanh(a0)  [b1] b1 = Abs(b0)  [a2] a2 = Sin(a1)  [b2] b2 = Cos(b1)
    [end] y = Add(a2, b2) }"""
    x = {"x": np.random.default_rng(2).standard_normal((4, 6)).astype(np.float32)}
    program = same_as_whole(
        model(text), "ranks: 1\ntarget: {'a*': cuda, 'b*': cpu, end: cuda}\n", x, rtol=1e-6, atol=1e-6
    )
    ops = [step for step in program.parts[0].steps if isinstance(step, Compute)]
    assert [op.target for op in ops] == ["cpu"] * 3 + ["cuda"] * 4


def test_shapes_stay_on_the_cpu() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    m (float[n, 6] x) => (float[k, 3] y) <int64[1] two = {3}, int64[1] all = {-1}> {
    [up] a = Tanh(x)  [size] s = Shape <start = 0, end = 1> (a)  [double] d = Add(s, s)
    [join] t = Concat <axis = 0> (d, two)  [fold] y = Reshape(a, t) }"""
    x = {"x": np.random.default_rng(3).standard_normal((5, 6)).astype(np.float32)}
    program = same_as_whole(model(text), "ranks: 1\ntarget: cuda\n", x, rtol=1e-6, atol=1e-6)
    targets = {op.node.op_type: op.target for op in program.parts[0].steps if isinstance(op, Compute)}
    assert targets == {"Shape": "cpu", "Concat": "cpu", "Add": "cpu", "Tanh": "cuda", "Reshape": "cuda"}
    assert [str(one.output) for one in program.parts[0].steps if isinstance(one, programs.Copy)] == ["x.cuda", "y"]


def test_what_a_branch_reads_is_copied_for_it() -> None:
    """The condition is read on the host; what the body reads from around it lies on the node's target."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    m (float[n, 6] x, bool c) => (float[n, 6] y) {
    [up] a = Tanh(x)
    [branch] d = If(c) <then_branch = t () => (float[n, 6] r) { r = Neg(a) }, else_branch = e () => (float[n, 6] s) { s = Abs(a) }>
    [end] y = Add(d, a) }"""
    x = np.random.default_rng(4).standard_normal((5, 6)).astype(np.float32)
    steps = [{"x": x, "c": np.array(value)} for value in (True, False)]
    plan = "ranks: 1\ntarget: {up: cpu, branch: cuda, end: cpu}\n"
    program = same_as_whole(model(text), plan, *steps, rtol=1e-6, atol=1e-6)
    assert [str(one.output) for one in program.parts[0].steps if isinstance(one, programs.Copy)] == ["a.cuda", "d"]


CHAIN = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 6] x) => (float[batch, 6] y) { [one] a = Tanh(x)  [two] b = Neg(a)  [three] y = Abs(b) }"""
BETWEEN = "ranks: 1\nsymbols: {batch: {max: 10}}\ntarget: {one: cuda, two: cpu, three: cuda}\n"


def test_what_shows_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled(model(CHAIN), BETWEEN, tmp_path / "build")
    text = (tmp_path / "build" / "ir" / "step_parallel_end.ir").read_text()
    assert "%a = Copy(%a.cuda) {to: cpu}" in text
    assert "Bytes: 24*batch   Cause: read by two on cpu" in text
    assert "%a.cuda = Tanh(%x.cuda) {target: cuda}" in text
    assert invoke(["inspect", str(tmp_path / "build")]) == 0
    memory, shown = capsys.readouterr().out.split("\ntargets\n")
    assert "switches from it" in shown
    assert [line.split()[1] for line in memory.split("\nmemory\n")[1].splitlines() if line.startswith("   0")] == [
        "cpu",
        "cuda",
    ]
    assert [line.split()[1:3] for line in shown.splitlines() if " cuda " in line or " cpu " in line] == [
        ["cpu", "1"],
        ["cuda", "2"],
    ]
    with pytest.raises(
        CompileError, match="0 bytes to a rank per step, copies between its targets 960, the plan allows"
    ):
        compiled(model(CHAIN), f"{BETWEEN}max_reshard_bytes: 959\n", tmp_path / "other")
    compiled(model(CHAIN), f"{BETWEEN}max_reshard_bytes: 960\n", tmp_path / "other")


def _without_target(file: ModelProto) -> None:
    node = next(one for one in file.graph.node if one.op_type == "Neg")
    del node.metadata_props[:]


def _on_the_other(file: ModelProto) -> None:
    node = next(one for one in file.graph.node if one.op_type == "Neg")
    next(one for one in node.metadata_props if one.key == TARGET).value = "cuda"


def _past_the_copy(file: ModelProto) -> None:
    next(one for one in file.graph.node if one.op_type == "Neg").input[0] = "a.cuda"


def _one_more(file: ModelProto) -> None:
    file.graph.node.append(helper.make_node("Copy", ["x"], ["more"], domain="partc.comm", to="cuda"))


def _to_where_it_is(file: ModelProto) -> None:
    next(one for one in file.graph.node if one.op_type == "Copy").attribute[0].s = b"cpu"


FORGED: dict[str, tuple[Callable[[ModelProto], None], str]] = {
    "no target": (_without_target, "it has no target"),
    "another target": (_on_the_other, "it reads 'a' on cuda, and that lies on cpu"),
    "past the copy": (_past_the_copy, "it reads 'a.cuda' on cpu, and that lies on cuda"),
    "one copy more": (_one_more, "nothing reads 'more'"),
    "no way": (_to_where_it_is, "it copies 'x' to cpu, where it lies"),
}


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("between") / "build"
    compiled(model(CHAIN), BETWEEN, folder)
    return folder


@pytest.mark.parametrize("name", FORGED)
def test_forged_files_are_refused(name: str, between: Path) -> None:
    change, fact = FORGED[name]
    artifact = open_artifact(between)
    file = artifact.model(0)
    assert [*check_targets("rank_0000.onnx", file, artifact.manifest.state)] == []
    change(file)
    assert fact in [one.fact for one in check_targets("rank_0000.onnx", file, artifact.manifest.state)]


def test_a_node_may_say_its_target() -> None:
    proto = model(CHAIN)
    proto.graph.node[1].metadata_props.add(key=TARGET, value="cuda")
    x = {"x": np.ones((2, 6), np.float32)}
    program = same_as_whole(proto, "ranks: 1\n", x, rtol=1e-6, atol=1e-6)
    assert [program.targets[node] for node in program.model.graph] == ["device", "cuda", "device"]
    proto.graph.node[1].metadata_props[0].value = "tpu"
    with pytest.raises(CompileError, match=r"two: its metadata 'partc.target' is 'tpu'"):
        same_as_whole(proto, "ranks: 1\n", x, rtol=1e-6, atol=1e-6)


SENT = """<ir_version: 10, opset_import: ["" : 21, "partc.comm" : 1]>
main (float[4] a) => (float[4] next) {
    next_cuda = Neg (a)
    next = partc.comm.Copy <to = "cpu"> (next_cuda)
    c = partc.comm.Copy <to = "cpu"> (next_cuda)
    d = Neg (c)
}"""


@pytest.mark.parametrize(
    ("lasting", "nodes"),
    [
        ([], ["Neg: a -> c", "Neg: c -> d"]),
        (["next"], ["Neg: a -> next", "Neg: next -> d"]),
        (
            ["next_cuda"],
            ["Neg: a -> next_cuda", "Identity: next_cuda -> next", "Identity: next_cuda -> c", "Neg: c -> d"],
        ),
        (["next", "c"], ["Neg: a -> c", "Identity: c -> next", "Neg: c -> d"]),
    ],
)
def test_copies_are_forgotten_but_for_the_names_of_what_is_kept(lasting: list[str], nodes: list[str]) -> None:
    file = parser.parse_model(SENT)
    forget_copies(file, lasting)
    assert [f"{node.op_type}: {node.input[0]} -> {node.output[0]}" for node in file.graph.node] == nodes


def test_a_copy_of_what_is_kept_is_sent_by_its_name() -> None:
    """A tensor of the state keeps its name wherever it lies, so that its copy has another one."""
    record = Transfer.model_construct(tag=3, value="w", source=0, target=1)
    manifest = Manifest.model_construct(transfers=[record])
    steps = [Copy("w", "w.cpu", "cpu", ""), Send("w.cpu", 1, 3, "")]
    assert transfers_of(steps, manifest, 0, "rank_0000.onnx") == {3: record}
    with pytest.raises(ArtifactError, match=r"lists no transfer 3 for the Send of 'v\.cpu'"):
        transfers_of([Copy("v", "v.cpu", "cpu", ""), Send("v.cpu", 1, 3, "")], manifest, 0, "rank_0000.onnx")
