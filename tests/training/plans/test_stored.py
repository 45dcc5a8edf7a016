"""Parameters that ranks store in shards: trained as on one rank, in as many messages and bytes as the formulas say."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import expert_layers
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from mutated import change_file, rewrite_raw, texts
from partc.compiler import nn
from partc.compiler.errors import CompileError
from partc.compiler.frontend.inputs import Spec
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from partc.runtime.checker.check import check_artifact
from partc.runtime.checkpoint.checkpoint import Checkpoint
from rows import of_today
from training_command_case import built, train
from training_equivalence import run, same_training, source_of
from training_models import CrossEntropy, Model, gpt

SIZES: dict[str, Any] = {"width": 12, "layers": 3, "heads": 2, "vocabulary": 24, "context": 9}
TRAINED: dict[str, Any] = {**SIZES, "layers": 2}
"""Of trainings that are compared: a layer more would be another of what the second one is."""
TRAIN = """
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: labels, axis: 2}
  optimizer: {type: adamw, lr: 0.01, eps: 1.0e-3, weight_decay: 0.1}
"""
RECORDS = "[dp, null]"
STORED = 'parameters: {"**": {stored: dp}}\n'


def plan(ranks: int, mesh: str, records: str, more: str) -> str:
    """A plan of a GPT whose records lie along some axes."""
    return f"""
ranks: {ranks}
mesh: {mesh}
symbols: {{batch: {{divisor: 12, max: 12}}, seq: {{max: 8}}}}
dataset: {{x: {records}, labels: {records}}}
{more}{TRAIN}"""


@cache
def steps() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [gpt(**SIZES).feeds(rng, batch=12, seq=6) for _ in range(2)]


def compiled(text: str, out: Path) -> Complete:
    return compile_source(source_of(gpt(**SIZES)), parse_plan(text, "plan.yaml"), out, check=False).program


PLANS = {
    "freed": plan(3, "{dp: 3}", RECORDS, STORED),
    "replicas": plan(4, "{replica: 2, shard: 2}", "[[replica, shard], null]", 'parameters: {"**": {stored: shard}}\n'),
    "tensor parallel": plan(
        4, "{dp: 2, tp: 2}", RECORDS, f'{STORED}sharding: {{"**.mlp.project": colwise, "**.mlp.out": rowwise}}\n'
    ),
    "microbatches, kept": plan(
        2, "{dp: 2}", RECORDS, f"{STORED}stored: {{gather: step}}\npipeline: {{microbatches: 3}}\n"
    ),
    "replicas, each microbatch": plan(
        4,
        "{replica: 2, shard: 2}",
        "[[replica, shard], null]",
        'parameters: {"**": {stored: shard}}\nstored: {reduce: microbatch}\npipeline: {microbatches: 3}\n',
    ),
    "stages, recomputed": plan(
        4,
        "{pp: 2, dp: 2}",
        RECORDS,
        f'{STORED}stored: {{ahead: 2}}\npipeline: {{microbatches: 3, schedule: 1f1b, recompute: ["layers.*"], '
        'stages: ["tokens, positions, layers.0", "layers.1, norm, head"]}\n',
    ),
}


@pytest.mark.parametrize("case", of_today([*PLANS], 1))
def test_trains_as_on_one_rank(case: str, tmp_path: Path) -> None:
    """Losses and tensors are those of one rank, and the checker proves the peak that the manifest states."""
    program = same_training(lambda: source_of(gpt(**TRAINED)), PLANS[case], tmp_path, steps(), rtol=2e-5, atol=2e-3)
    assert program.stored is not None
    assert len(program.stored.units) == 6  # tokens, positions, two layers, norm and head


KEPT = STORED.replace("stored: dp", "stored: dp, after_forward: keep")
STAGES = 'microbatches: 3, schedule: 1f1b, stages: ["tokens, positions, layers.0", "layers.1, norm, head"]'
AGAIN = 'recompute: ["layers.*"]'
HALVES = {
    "kept, recomputed, stages": (4, "{pp: 2, dp: 2}", f"{KEPT}pipeline: {{{STAGES}, {AGAIN}}}\n"),
    "freed, recomputed, stages": (4, "{pp: 2, dp: 2}", f"{STORED}pipeline: {{{STAGES}, {AGAIN}}}\n"),
    "freed, stages": (4, "{pp: 2, dp: 2}", f"{STORED}pipeline: {{{STAGES}}}\n"),
    "freed, recomputed": (2, "{dp: 2}", f"{STORED}pipeline: {{microbatches: 1, {AGAIN}}}\n"),
}
"""All four together, and with `PLANS` all pairs of freed or kept, recomputed or not, in stages by 1f1b or not, in float16 or float32."""


@pytest.mark.parametrize("case", of_today([*HALVES], 1))
def test_trains_in_float16_as_on_one_rank(case: str, tmp_path: Path) -> None:
    ranks, mesh, more = HALVES[case]
    text = plan(ranks, mesh, RECORDS, more) + "precision: {compute: float16, loss_scale: 64}\n"
    program = same_training(lambda: source_of(gpt(**TRAINED)), text, tmp_path, steps(), rtol=2e-4, atol=2e-2)
    assert program.stored is not None
    assert {one.freed for one in program.stored.units} == {"freed" in case}


def test_messages_and_peak_are_the_formulas(tmp_path: Path) -> None:
    """Units that both passes read: 2 n - 1 gathers where they are freed, n where they are kept; n ReduceScatters; updates stay."""
    units = 'parameters: {"{layers.*,norm,head}": {stored: dp%s}}\n'
    layer = 4 * (12 * 36 + 36 + 12 * 12 + 12 + 12 * 48 + 48 + 48 * 12 + 12 + 4 * 12)
    norm, head = 4 * 2 * 12, 4 * 24 * 12
    for how, gathers, peak in (("", 2 * 5 - 1, 2 * layer), (", after_forward: keep", 5, 3 * layer + norm + head)):
        program = compiled(plan(3, "{dp: 3}", RECORDS, units % how), tmp_path / how.strip(" ,:_af"))
        counted = Counter(event.op_type for event in program.events if "parameter" in event.cause)
        assert counted == {
            "AllGather": gathers,
            "ReduceScatter": 4,
            "AllReduce": 1,
        }  # head.weight by its name; the embeddings
        assert program.stored is not None
        assert [(one.ranks, one.bytes <= peak, one.bytes > peak - layer) for one in program.stored.peaks] == [
            ([0, 1, 2], True, True)
        ]


def test_one_gradient_is_in_flight_while_the_next_is_computed(tmp_path: Path) -> None:
    """So whole gradients of two units are in memory at once."""
    program = compiled(plan(3, "{dp: 3}", RECORDS, STORED), tmp_path)
    sums = {str(event.tag) for event in program.events if event.op_type == "ReduceScatter"}
    (row,) = json.loads((tmp_path / "rank_0000.run.json").read_text())["rows"].values()
    begun, most = set[str](), 0
    for step in row.split():
        if step[1:] in sums and step[0] in "AW":
            (begun.add if step[0] == "A" else begun.remove)(step[1:])
        elif step[0] == "S":
            most = max(most, len(begun))
    assert len(sums) > 4
    assert most == 1


class Tied(nn.Module):
    """A table that is the head, too, and a parameter of 7 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(22, 12)
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
        self.scale = nn.Parameter([7], init=nn.init.normal(1.0))

    def forward(self, op: Any, x: Any) -> Any:
        h = op.Mul(self.tokens(op, x), op.ReduceMean(self.scale, keepdims=0))
        for layer in self.layers:
            h = op.Tanh(layer(op, h))
        return op.MatMul(h, op.Transpose(self.tokens.weight, perm=[1, 0]))


def tied() -> Model:
    """Its training."""
    inputs = tuple(Spec(name, ("batch", "seq"), ir.DataType.INT64) for name in ("x", "labels"))
    return Model("tied", CrossEntropy(Tied()), inputs, lambda rng: {}, {})


def test_tied_and_odd_parameters(tmp_path: Path) -> None:
    """A table is gathered for each run of its readers; what no rank can have a half of stays whole, and is named."""
    text = plan(2, "{dp: 2}", RECORDS, 'parameters: {"**": {stored: dp, after_forward: free}}\n')
    rng = np.random.default_rng(4)
    feeds = [{name: rng.integers(0, 22, (12, 5)) for name in ("x", "labels")} for _ in range(2)]
    program = same_training(lambda: source_of(tied()), text, tmp_path, feeds, rtol=2e-5, atol=2e-3)
    assert program.stored is not None
    gathers = {one.unit: one.gathers for one in program.stored.units}
    assert gathers == {"tokens": 2, "layers.0": 2, "layers.1": 2, "layers.2": 2}  # the table as the head of both passes
    assert [text for text in program.warnings if "'scale' [7] stays whole on each rank: no dim of" in text]


def test_stacks_of_experts_that_ranks_do_not_divide_are_cut_along_another_dim(tmp_path: Path) -> None:
    """Of 12 matrices five ranks have columns, none of which are padded, in messages of their own, as the compile says."""
    text = f"ranks: 5\nmesh: {{dp: 5}}\nsymbols: {{batch: {{divisor: 10}}}}\ndataset: data_parallel\n{STORED}{expert_layers.SGD}"
    random = np.random.default_rng(2)
    steps = [{**one, "t": random.standard_normal((20, 4)).astype(np.float32)} for one in expert_layers.batches(20) * 2]

    def source() -> Source:
        return Source(from_proto(expert_layers.model(), Path("model.onnx")))

    program = same_training(source, text, tmp_path, steps, rtol=1e-5, atol=1e-5)
    said = "'l0_up_weight' [12, 6, 10], 'l0_bias' [12, 10], 'l0_down_weight' [12, 10, 6] have messages of their own: the first dim"
    assert [text for text in program.warnings if f"{said} is not divisible by 5" in text]


def test_a_model_that_is_not_trained_is_gathered_unit_by_unit(tmp_path: Path) -> None:
    """Every program that reads stored weights has its gathers, also where some ranks do not need what is gathered last."""
    more = f'{STORED}sharding: {{"**.mlp.project": colwise, "**.mlp.out": rowwise}}\n'
    text = plan(4, "{dp: 2, tp: 2}", RECORDS, more).partition("train:")[0].replace(f", labels: {RECORDS}", "")
    made = []
    for name, one in (("stored", text), ("whole", "ranks: 1\n")):
        compile_source(source_of(gpt(**SIZES)), parse_plan(one, "plan.yaml"), tmp_path / name, check=False)
        assert check_artifact(tmp_path / name) == []
        with load_local(tmp_path / name) as ranks:
            made.append(ranks({"x": steps()[0]["x"]})["y"])
    np.testing.assert_allclose(*made, rtol=0, atol=1e-6)


MODEL = """
from partc.compiler import Input, Symbol, nn
nn.seed(3)
batch = Symbol()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
        self.head = nn.Linear(12, 6)
    def forward(self, op, x):
        for layer in self.layers:
            x = op.Tanh(layer(op, x))
        return self.head(op, x)
model, inputs, outputs = Net(), {"x": Input([batch, 12], "float32")}, ["y"]
"""
STEPS = """
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label}
  optimizer: {type: adamw, lr: 0.01%s}
  data: data.npz
  batch: 12
"""
DATA = "symbols: {batch: {divisor: 12}}\ndataset: {x: [dp, null], label: [dp]}\n"
OTHERS = {
    "one": "ranks: 1\n" + STEPS % "",
    "parallel": "ranks: 3\nmesh: {dp: 3}\n" + DATA + STEPS % "",
    "zero": "ranks: 3\nmesh: {dp: 3}\n" + DATA + STEPS % ", shard: dp",
    "tp": "ranks: 2\nsharding: {layers.0: colwise, layers.1: rowwise}\n" + STEPS % "",
    "stages": 'ranks: 2\npipeline: {microbatches: 3, stages: ["layers.[0-1]", "layers.2, head"]}\n' + STEPS % "",
    "kept": 'ranks: 2\nmesh: {dp: 2}\nparameters: {"**": {stored: dp, after_forward: keep}}\n' + DATA + STEPS % "",
}
"""Other plans of the same training."""


def test_checkpoints_continue_under_every_other_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step by each other plan of the day, and one by the stored plan after it: all tensors are those of one rank that trains through."""
    rng = np.random.default_rng(1)
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((180, 12), np.float32), label=rng.integers(0, 6, 180))
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    stored = 'ranks: 3\nmesh: {dp: 3}\nparameters: {"**": {stored: dp}}\n' + DATA + STEPS % ""
    others = of_today([*OTHERS], 2)
    for name, text in {"stored": stored, "one": OTHERS["one"], **{name: OTHERS[name] for name in others}}.items():
        built(tmp_path, text, name)
    turns = ["stored", *(name for other in others for name in (other, "stored"))]
    saved = ("--save", "1", "--keep", "99")
    assert train("one", "--steps", str(len(turns)), "--checkpoint", "whole", *saved) == 0
    for step, name in enumerate(turns, 1):
        resumed = ("--resume", "turns") if step > 1 else ()
        assert train(name, "--steps", str(step), "--checkpoint", "turns", *resumed, *saved) == 0
        whole, found = (Checkpoint.open(tmp_path / runs / f"step_{step:08}") for runs in ("whole", "turns"))
        assert found.index.tensors.keys() == whole.index.tensors.keys()
        for tensor in whole.index.tensors:
            error = f"step {step}, {name}: {tensor}"
            np.testing.assert_allclose(found.read(tensor), whole.read(tensor), 2e-5, 2e-6, err_msg=error)


def test_sixteen_bits_travel(tmp_path: Path) -> None:
    """Weights that products alone read are cast on their shards; the numbers are those of data parallel ranks."""
    half = "precision: {compute: bfloat16}\n"
    stored = run(source_of(gpt(**TRAINED)), plan(2, "{dp: 2}", RECORDS, STORED) + half, tmp_path / "a", steps())
    whole = run(source_of(gpt(**TRAINED)), plan(2, "{dp: 2}", RECORDS, "") + half, tmp_path / "b", steps())
    assert all(np.array_equal(stored.after[name], value) for name, value in whole.after.items())
    gathers = [event for event in stored.program.events if event.cause == "parameters of 'layers.1'"]
    types = {str(event.value.dtype): int(event.bytes) for event in gathers}
    low = 2 * (12 * 36 + 36 + 12 * 12 + 12 + 12 * 48 + 48 + 48 * 12 + 12)
    assert types == {"BFLOAT16": low // 2, "FLOAT": 4 * 4 * 12 // 2}


def test_planted_faults_are_named(tmp_path: Path) -> None:
    """A wrong peak, a number of gathers, a unit of other parameters; a region that reads what another gathered, a late gather."""
    sound = tmp_path / "sound"
    compiled(PLANS["freed"], sound)
    weight = "layers.1.mlp.out.weight"

    def records(data: dict[str, Any]) -> None:
        stored = data["programs"]["train"]["stored"]
        stored["peaks"][0]["bytes"] -= 4
        stored["units"][2]["gathers"] = 1
        stored["units"][3]["tensors"].append(stored["units"][4]["tensors"].pop())

    def sizes(data: dict[str, Any]) -> None:
        units = data["programs"]["train"]["stored"]["units"]
        units[-1]["tensors"].pop()
        for own in units[:-1]:
            own["bytes"] += 4

    def other_region(model: onnx.ModelProto) -> None:
        first, again = [
            node.output for node in model.graph.node if node.op_type == "AllGather" and weight in node.input
        ]
        old, new = (next(name for name in names if name.startswith(weight)) for names in (again, first))
        reader = next(node for node in model.graph.node if old in node.input)
        reader.input[[*reader.input].index(old)] = new

    def late(model: onnx.ModelProto) -> None:
        nodes = [*model.graph.node]
        at = max(k for k, node in enumerate(nodes) if node.op_type == "AllGather" and weight in node.input)
        nodes.append(nodes.pop(at))
        del model.graph.node[:]
        model.graph.node.extend(nodes)

    stored = json.loads((sound / "manifest.json").read_text())["programs"]["train"]["stored"]
    peak, unit = stored["peaks"][0]["bytes"], stored["units"][2]
    file = "in rank_0000.onnx, and the manifest says"
    size_facts = [
        f"unit '{own['unit']}' have {own['bytes']:,} bytes {file} {own['bytes'] + 4:,}" for own in stored["units"][:-1]
    ]
    size_facts.append(f"unit '{stored['units'][-1]['unit']}' have ")
    for change, facts in (
        (
            records,
            (
                f"has {peak:,} bytes of gathered parameters at once, and the manifest says {peak - 4}",
                f"gathers unit '{unit['unit']}' {unit['gathers']} times, and the manifest says 1",
                "which are not of one unit",
            ),
        ),
        (sizes, tuple(size_facts)),
        (other_region, ("has been gathered again since",)),
        (late, (f"it reads '{weight}' after AdamWDecayed",)),
    ):
        folder = shutil.copytree(sound, tmp_path / change.__name__)
        if change in (records, sizes):
            rewrite_raw(folder, change)
        else:
            change_file(folder, "rank_0000.onnx", change)
        found = texts(folder)
        assert [fact for fact in facts if fact not in found] == [], found


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        (
            'parameters: {"layer.*": {stored: dp}}\n',
            ["plan.yaml:6", "'layer.*' matches no module with parameters", "layers"],
        ),
        ('parameters: {"**": {stored: db}}\n', ["plan.yaml:6", "'db' is not an axis of the mesh", "its axes are dp"]),
        (
            'parameters: {"norm": {stored: dp}}\n',
            ["plan.yaml:6", "nothing can be shared by the 5 ranks of 'dp'", "divisible by 5"],
        ),
        (
            'parameters: {"**": {stored: dp, after_forward: free}}\nstored: {gather: step}\n',
            ["plan.yaml:7", "'gather: step', and 'after_forward: free'"],
        ),
        (
            'parameters: {"layers.*.mlp.gelu": {stored: dp}}\n',
            ["plan.yaml:6", "'layers.*.mlp.gelu' matches no module with parameters"],
        ),
        ("stored: {ahead: 2}\n", ["plan.yaml:6", "'stored' without 'parameters'"]),
    ],
)
def test_refusals(more: str, facts: list[str], tmp_path: Path) -> None:
    with pytest.raises(CompileError) as error:
        compiled(plan(5, "{dp: 5}", "[null, null]", more), tmp_path)
    assert all(fact in str(error.value) for fact in facts), str(error.value)


def test_tokens_are_not_made_of_stored_parameters() -> None:
    text = f"ranks: 2\nmesh: {{dp: 2}}\ngenerate: {{slots: 2, length: 80}}\n{STORED}"
    with pytest.raises(
        CompileError, match="'parameters' beside 'generate'\n  each token would gather all that is stored"
    ):
        parse_plan(text, "plan.yaml")


def test_what_frees_nothing_is_refused(tmp_path: Path) -> None:
    """Both of two units are there while one computes: where the plan does not ask for it, they are kept."""
    said = 'parameters: {"layers.[0-1]": {stored: dp%s}}\n'
    with pytest.raises(
        CompileError, match=r"is freed, and rank 0 has (\S+ \S+) at once, and \1 if it is kept"
    ) as error:
        compiled(plan(2, "{dp: 2}", RECORDS, said % ", after_forward: free"), tmp_path)
    assert "2 units are there at once" in str(error.value)
    program = compiled(plan(2, "{dp: 2}", RECORDS, said % ""), tmp_path)
    assert program.stored is not None
    assert [one.freed for one in program.stored.units] == [False, False]
