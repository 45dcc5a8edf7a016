"""More ranks than heads of keys: each head, and its cache, is on several ranks, however the plan or the model gives the ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import decoders
import onnx
import pytest
from click.testing import CliRunner
from decoder_layouts import COUNTS, PROMPTS, STAGES, TENSOR, requests
from decoders import Unsharded, decoder
from partc.cli.commands.plan import command as plan_command
from partc.compiler import compile_model
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import analyse
from partc.runtime import load_local_generator
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.units import size_text
from rows import of_today

GENERATE = "generate: {slots: 2, length: 64, chunk: 8}\n"
TWO_STAGES = {
    "slices of a mesh": "mesh: {pp: 2, tp: 4}\n" + STAGES.format(first="{pp: 0}", second="{pp: 1}"),
    "lists of ranks": STAGES.format(first="[0, 1, 2, 3]", second="[4, 5, 6, 7]"),
    "projections alone": 'placement: {"layers.0.*": [0, 1, 2, 3], "layers.1.*": [4, 5, 6, 7], head: [4, 5, 6, 7]}\n',
}
MODEL = """
from partc.compiler import Input, Symbol, nn, place
nn.seed(3)
WORDS, WIDTH, HEADS, KV, SIZE = 64, 24, 4, 2, 8

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * SIZE) for heads in (HEADS, KV, KV))
        self.o = nn.Linear(HEADS * SIZE, WIDTH)

    def heads(self, op, x):
        return op.Transpose(op.Reshape(x, op.Constant(value_ints=[0, 0, -1, SIZE])), perm=[0, 2, 1, 3])

    def forward(self, op, x, visible, past_k, past_v):
        q, k, v = (self.heads(op, one(op, x)) for one in (self.q, self.k, self.v))
        k, v = op.Concat(past_k, k, axis=2), op.Concat(past_v, v, axis=2)
        mixed = op.Transpose(op.Attention(q, k, v, visible), perm=[0, 2, 1, 3])
        return op.Add(x, self.o(op, op.Reshape(mixed, op.Constant(value_ints=[0, 0, HEADS * SIZE])))), k, v

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Parameter([WORDS, WIDTH], init=nn.init.normal(1.0))
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, op, ids, **caches):
        past = op.Squeeze(op.Shape(caches["past_k.0"], start=2, end=3))
        new = op.Squeeze(op.Shape(ids, start=1, end=2))
        numbers = op.Unsqueeze(op.Add(op.Range(0, new, 1), past), [0])
        visible = op.LessOrEqual(op.Range(0, op.Add(past, new), 1), op.Unsqueeze(numbers, [1, 3]))
        x, present = op.Gather(self.tokens, ids), []
        for k, layer in enumerate(self.layers):
            x, *made = layer(op, x, visible, caches[f"past_k.{k}"], caches[f"past_v.{k}"])
            present += made
        return self.head(op, x), *present

model = Decoder()
place(model.layers[0], [0, 1, 2, 3])
place(model.layers[1], [4, 5, 6, 7])
place(model.head, [4, 5, 6, 7])
names = [f"{side}.{k}" for k in (0, 1) for side in "kv"]
past = Symbol()
inputs = {"ids": Input([Symbol(), Symbol()], "int64")}
inputs |= {f"past_{name}": Input([Symbol(), KV, past, SIZE]) for name in names}
outputs = ["logits", *(f"present_{name}" for name in names)]
"""


def answers(build: Path) -> list[list[int]]:
    with load_local_generator(build, threads=1) as generator:
        return [one.tokens for one in generator.run(requests())]


def heads_kept(build: Path, rank: int) -> set[int]:
    inputs = open_artifact(build).model(rank).graph.input
    return {one.type.tensor_type.shape.dim[1].dim_value for one in inputs if one.name.startswith("past_")}


@pytest.mark.parametrize("ranks", of_today([*TWO_STAGES], 1))
def test_stages_of_a_plan_have_each_head_on_two_of_their_ranks(ranks: str, tmp_path: Path) -> None:
    model = decoder(fused=True)
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(f"ranks: 8\n{TENSOR}{TWO_STAGES[ranks]}{GENERATE}")
    compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    assert heads_kept(tmp_path / "build", 0) == heads_kept(tmp_path / "build", 7) == {1}
    alone = Unsharded(model)
    assert answers(tmp_path / "build") == [alone.tokens(*one) for one in zip(PROMPTS, COUNTS, strict=True)]


def test_stages_of_a_model_have_each_head_on_two_of_their_ranks(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    made = []
    for name, plan in (("one", 'ranks: 1\nplacement: {"**": 0}\n'), ("eight", f"ranks: 8\n{TENSOR}")):
        lines = [line for line in plan.splitlines(keepends=True) if "up" not in line and "down" not in line]
        (tmp_path / f"{name}.yaml").write_text("".join(lines) + GENERATE)
        compile_model(tmp_path / "model.py", tmp_path / f"{name}.yaml", tmp_path / name)
        made.append(answers(tmp_path / name))
    assert heads_kept(tmp_path / "eight", 0) == heads_kept(tmp_path / "eight", 7) == {1}
    assert made[0] == made[1]


def test_ranks_of_a_stage_that_heads_do_not_fit_are_refused(tmp_path: Path) -> None:
    onnx.save(decoder(fused=True), tmp_path / "model.onnx")
    stages = STAGES.format(first="[0, 1, 2]", second="[3, 4, 5]")
    (tmp_path / "plan.yaml").write_text(f"ranks: 6\n{TENSOR}{stages}{GENERATE}")
    with pytest.raises(CompileError, match=r"'layers.0.k.MatMul' makes 2 heads .* over 3 ranks(?s:.*)use 2, 4 ranks"):
        analyse(tmp_path / "model.onnx", tmp_path / "plan.yaml")


def test_stages_of_a_pipeline_are_refused(tmp_path: Path) -> None:
    onnx.save(decoder(fused=True), tmp_path / "model.onnx")
    stages = 'pipeline: {microbatches: 1, stages: ["embed, embed.*, layers.0", "layers.1, head"]}\n'
    (tmp_path / "plan.yaml").write_text(f"ranks: 8\n{TENSOR}{stages}{GENERATE}")
    with pytest.raises(CompileError, match="'generate' beside 'pipeline'"):
        analyse(tmp_path / "model.onnx", tmp_path / "plan.yaml")


FORMS: tuple[dict[str, Any], ...] = (
    *({"window": 3}, {"single": True}, {"single": True, "flat": True}),
    *({"normed": True}, {"normed": True, "window": 3}),
)


@pytest.mark.parametrize("form", of_today(FORMS, 2))
def test_attention_of_other_forms_has_each_head_on_two_ranks(form: dict[str, Any], tmp_path: Path) -> None:
    model = decoder(fused=True, **form)
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(f"ranks: 4\nmesh: {{tp: 4}}\n{TENSOR}{GENERATE}")
    report = compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    assert {event.op_type for event in report.program.events} == {"AllReduce"}
    assert report.warnings == ()
    assert heads_kept(tmp_path / "build", 0) == heads_kept(tmp_path / "build", 3) == {1}
    alone = Unsharded(model)
    assert answers(tmp_path / "build") == [alone.tokens(*one) for one in zip(PROMPTS, COUNTS, strict=True)]


@pytest.mark.parametrize(("stages", "window"), of_today([(2, 0), (1, 3)], 1))
def test_a_proposal_repeats_heads_and_says_what_their_caches_cost(stages: int, window: int, tmp_path: Path) -> None:
    model = decoder(fused=True, window=window)
    onnx.save(model, tmp_path / "model.onnx")
    given = [str(tmp_path / "model.onnx"), *f"--tp 4 --stages {stages} --generate 64 --slots 2".split()]
    made = CliRunner().invoke(plan_command, given)
    assert made.exit_code == 0, made.output
    assert "# 2 heads of keys and values over 4 ranks: each is repeated" in made.stdout
    (tmp_path / "plan.yaml").write_text(made.stdout)
    compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    inputs = [one for one in open_artifact(tmp_path / "build").model(0).graph.input if one.name.startswith("past_")]
    sizes = [[dim.dim_value for dim in one.type.tensor_type.shape.dim] for one in inputs]
    kept = sum(4 * slots * heads * entries * size for slots, heads, entries, size in sizes) * stages  # as many groups
    assert {heads for _, heads, _, _ in sizes} == {1}
    assert f"A rank keeps {size_text(kept)} of caches, as over 2 ranks" in made.stdout
    if stages == 1:  # what eight ranks make of such heads is shown above
        alone = Unsharded(model)
        assert answers(tmp_path / "build") == [alone.tokens(*one) for one in zip(PROMPTS, COUNTS, strict=True)]


def test_an_imported_plan_repeats_heads_as_a_proposal_does(tmp_path: Path) -> None:
    """Its words are those of a `tp_plan`; the plan repeats no heads where it makes no tokens."""
    onnx.save(decoder(fused=True), tmp_path / "model.onnx")
    styles = {**dict.fromkeys(("q", "k", "v", "up"), "colwise"), **dict.fromkeys(("o", "down"), "rowwise")}
    (tmp_path / "config.json").write_text(json.dumps({f"layers.*.{name}": style for name, style in styles.items()}))
    given = [str(tmp_path / "model.onnx"), "--from", str(tmp_path / "config.json"), "--tp", "4"]
    made = CliRunner().invoke(plan_command, [*given, "--generate", "64", "--slots", "2"])
    assert made.exit_code == 0, made.output
    assert "# 2 heads of keys and values over 4 ranks: each is repeated" in made.stdout
    (tmp_path / "plan.yaml").write_text(made.stdout)
    done = analyse(tmp_path / "model.onnx", tmp_path / "plan.yaml")
    assert {cache.shape[1] for cache in done.caches if cache.shape is not None} == {4}
    assert {event.op_type for event in done.events} == {"AllReduce"}
    assert 'layers.*.k": colwise' not in CliRunner().invoke(plan_command, given).stdout


@pytest.mark.parametrize(("form", "ranks"), [({}, 8), ({"fused": True}, 8)])
def test_a_proposal_leaves_heads_whole_that_cannot_be_repeated(
    form: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    onnx.save(decoder(**form), tmp_path / "model.onnx")
    made = CliRunner().invoke(plan_command, [str(tmp_path / "model.onnx"), "--tp", str(ranks), "--generate", "64"])
    assert made.exit_code == 0, made.output
    assert "heads of keys" not in made.stdout
    assert 'layers.*.k": colwise' not in made.stdout
    (tmp_path / "plan.yaml").write_text(made.stdout)
    analyse(tmp_path / "model.onnx", tmp_path / "plan.yaml")


@pytest.mark.parametrize(
    ("mesh", "placed", "shards"),
    [
        ("{tp: 256}", "", 256),
        ("{dp: 64, tp: 4}", "", 4),
        ("{pp: 2, tp: 128}", STAGES.format(first="{pp: 0}", second="{pp: 1}"), 128),
    ],
)
def test_tokens_are_reduced_in_as_many_shards_as_the_mesh_has(
    mesh: str, placed: str, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """768 tokens over 256 ranks: no shard is one token, which it would be where any number of the ranks had to divide them."""
    monkeypatch.setattr(decoders, "VOCABULARY", 768)
    onnx.save(decoder(), tmp_path / "model.onnx")
    dataset = "dataset: {ids: [dp, null]}\n" if "dp" in mesh else ""
    generate = f"generate: {{slots: {64 if dataset else 1}, length: 64, chunk: 8}}\n"
    text = f"ranks: 256\nmesh: {mesh}\n{dataset}{placed}sharding: {{head: colwise}}\n{generate}"
    (tmp_path / "plan.yaml").write_text(text)
    program = analyse(tmp_path / "model.onnx", tmp_path / "plan.yaml")
    (apart,) = [value for step in program.parts[255].steps for value in step.makes if "by_shard" in str(value)]
    assert apart.shape == (1, 1, 768 // shards)
    assert not [event for event in program.events if event.value.name == "logits"]
