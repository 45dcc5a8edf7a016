"""Rows of tokens that travel to their experts and back in eight bits: what numpy computes with rounded rows, in a quarter of the bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from equivalence import compiled
from expert_layers import CHOICES, SGD, WIDTH, batches, kinds, model
from mutated import change_file, texts
from onnx import numpy_helper
from partc.cli.commands.verify import command as verify
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_model
from partc.runtime import Request, load_local, load_local_generator
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.checker.check import check_artifact
from rows import of_today
from training_equivalence import run

BLOCK = 6
DATA = "symbols: {batch: {divisor: 8}}\ndataset: data_parallel\n"
SHARED = f"ranks: 4\nmesh: {{dp: 4}}\n{DATA}experts: {{axis: dp}}\n"
EIGHT = f"messages: {{rows: {{bits: 8, block: {BLOCK}}}}}\n"
PLANS = {
    "four ranks": SHARED,
    "two axes shard the tokens, one the experts": "ranks: 4\nmesh: {dp: 2, ep: 2}\nsymbols: {batch: {divisor: 8}}\n"
    "dataset: {x: [[dp, ep], null]}\nexperts: {axis: ep}\n",
    "microbatches": SHARED + "pipeline: {microbatches: 2}\n",
    "matrices cut, too": "ranks: 4\nmesh: {dp: 2, tp: 2}\nsharding: {l0_up: colwise, l0_down: rowwise}\n"
    + DATA
    + "experts: {axis: dp}\n",
}


def rounded(rows: Array) -> Array:
    """Rows as they come: whole numbers of a scale in each block."""
    blocks = rows.reshape(-1, BLOCK).astype(np.float32)
    scales = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    codes = np.round(blocks / scales)
    assert np.abs(codes * scales - blocks).max(initial=0) <= np.abs(blocks).max() / 254 * 1.001
    return (codes * scales).reshape(rows.shape)


def expected(x: Array) -> Array:
    """The model's output where rows are rounded on their ways to an expert and back."""
    weight = {one.name: numpy_helper.to_array(one) for one in model().graph.initializer}
    tokens = x @ weight["first_weight"]
    logits = tokens @ weight["l0_router_weight"]
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :CHOICES]
    best = np.exp(np.take_along_axis(logits, chosen, 1))
    share = best / best.sum(1, keepdims=True)
    rows = rounded(tokens)[:, None, None, :]
    inner = np.tanh((rows @ weight["l0_up_weight"][chosen])[:, :, 0] + weight["l0_bias"][chosen])
    made = rounded((inner[:, :, None] @ weight["l0_down_weight"][chosen])[:, :, 0])
    return np.tanh((made * share[:, :, None]).sum(1)) @ weight["head_weight"]


@pytest.mark.parametrize("name", of_today([*PLANS], 2))
def test_outputs_are_those_of_rounded_rows(name: str, tmp_path: Path) -> None:
    program = compiled(model(), PLANS[name] + "outputs: sharded\n" + EIGHT, tmp_path, check=False)
    assert check_artifact(tmp_path) == []
    assert kinds(program)["Route"] == kinds(program)["Return"] == (4 if name == "microbatches" else 2)
    with load_local(tmp_path) as ranks:
        for step in batches(24, 8):
            np.testing.assert_allclose(ranks(step)["y"], expected(step["x"]), rtol=1e-4, atol=1e-5)


def test_a_message_has_a_byte_a_number_and_a_scale_a_block(tmp_path: Path) -> None:
    """Forward and backward: of four messages of float32 eight with (1 + 4 / block) / 4 of the bytes."""
    sent = []
    for name, more in (("exact", ""), ("packed", EIGHT)):
        program = compiled(model(), SHARED + SGD + more, tmp_path / name, check=False)
        routed = [event.bytes for event in program.events if event.op_type in ("Route", "Return")]
        sent.append([eval(text, {"batch": 32}) for text in routed])  # an expression of the symbol
    rows = 32 * CHOICES // 4 * 3 // 4
    assert sent == [[rows * WIDTH * 4] * 4, [rows * WIDTH, rows * WIDTH // BLOCK * 4] * 4]


TRAINED = {
    "float32": "",
    "recomputed": 'pipeline: {microbatches: 1, recompute: ["l0_*"]}\n',
    "bfloat16": "precision: {compute: bfloat16}\n",
    "eight bits of gradients": "",
    "a capacity": "",
}


@pytest.mark.parametrize("name", of_today([*TRAINED], 2))
def test_a_training_is_close_to_that_in_float32(name: str, tmp_path: Path) -> None:
    """Changes of parameters differ by less than a sixth of the largest: rows and cotangents are off by 1/254 at most, four times."""
    random, more = np.random.default_rng(3), TRAINED[name]
    steps = [{**one, "t": random.standard_normal((24, 4)).astype(np.float32)} for one in batches(24) * 3]
    plan = SHARED + SGD + more
    if name == "a capacity":
        plan = plan.replace("{axis: dp}", "{axis: dp, capacity: 1.5}")
    eight = EIGHT.replace("}}", "}, gradients: {block: 16}}") if "gradients" in name else EIGHT
    runs = [
        run(Source(from_proto(model(), Path("model.onnx"))), text, tmp_path / str(k), steps)
        for k, text in enumerate((plan, plan + eight))
    ]
    assert texts(tmp_path / "1") == ""
    losses = [[float(one["loss"]) for one in each.outputs] for each in runs]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.05)
    for weight, before in runs[0].before.items():
        change, other = runs[0].after[weight] - before, runs[1].after[weight] - before
        np.testing.assert_allclose(other, change, rtol=0, atol=0.15 * np.abs(change).max(), err_msg=weight)
        assert weight.startswith("head") or np.any(other != change)


def test_a_row_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    compiled(model(), SHARED + "outputs: sharded\n" + EIGHT, tmp_path, check=False)
    (step,) = batches(32)
    with load_local(tmp_path) as ranks:
        among = ranks(step)["y"]
        np.testing.assert_array_equal(ranks({"x": step["x"][8:16]})["y"], among[8:16])
        step["x"][3, 2] = np.nan
        found = ranks(step)["y"]
    assert np.isnan(found[3]).all()
    np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(among, 3, 0))


def test_a_decoder_makes_the_tokens_of_each_prompt_alone(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", "5.0")
    sizes = {"vocab_size": 24, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    counts = {"num_hidden_layers": 1, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    transformers.set_seed(0)
    config = transformers.MixtralConfig(**sizes, **counts, max_position_embeddings=32)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "mixtral")
    text = "ranks: 2\nmesh: {dp: 2}\ndataset: data_parallel\nexperts: {axis: dp}\n"
    text += "messages: {rows: {block: 8}}\ngenerate: {slots: 4, length: 24, chunk: 4}\n"
    (tmp_path / "plan.yaml").write_text(text)
    compile_model(tmp_path / "mixtral", tmp_path / "plan.yaml", tmp_path / "build")
    assert texts(tmp_path / "build") == ""
    requests = [Request(ids, max_tokens=6) for ids in ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9], [3, 2])]
    with load_local_generator(tmp_path / "build") as generator:
        together = [answer.tokens for answer in generator.run(requests)]
        assert [answer.tokens for one in requests for answer in generator.run([one])] == together


def scales_of_other_rows(file: onnx.ModelProto) -> None:
    """Cotangents that come by the first layer's Route have the scales of its rows."""
    unpacks = [node for node in file.graph.node if node.op_type == "DequantizeLinear"]
    unpacks[-2].input[1] = unpacks[0].input[1]


def scales_by_another_route(file: onnx.ModelProto) -> None:
    routes = [node for node in file.graph.node if node.op_type == "Route"]
    routes[-1].input[2:] = routes[0].output[2:]


FAULTS = [
    (scales_of_other_rows, SGD, "and not its scales"),
    (scales_by_another_route, "outputs: sharded\n", "manifest.json says 'l1_rows.scales"),
]


@pytest.mark.parametrize(("fault", "more", "fact"), FAULTS)
def test_the_checker_finds_codes_with_other_scales(
    fault: Callable[[onnx.ModelProto], None], more: str, fact: str, tmp_path: Path
) -> None:
    compiled(model(2), SHARED + more + EIGHT, tmp_path, check=False)
    change_file(tmp_path, "rank_0000.onnx", fault)
    assert fact in texts(tmp_path)


REFUSED = [
    (SHARED + EIGHT.replace("6}", "5}"), f"plan.yaml:6: a row of {WIDTH} numbers", "help: write block: 6"),
    (SHARED + EIGHT.replace("block: 6", "block: 2"), "messages.rows.block", "4"),
    (SHARED + EIGHT.replace("bits: 8", "bits: 4"), "messages.rows.bits", "8"),
    (f"ranks: 4\nmesh: {{dp: 4}}\n{DATA}{EIGHT}", "'messages.rows' without 'experts'", "experts: {axis: dp}"),
    (
        f"ranks: 4\nmesh: {{dp: 2, ep: 2}}\n{DATA}experts: {{axis: ep}}\n{EIGHT}",
        "plan.yaml:6: no rows are sent to experts",
        "help: leave out 'messages.rows', or shard the tokens along that axis",
    ),
]


@pytest.mark.parametrize(("plan", "fact", "help"), REFUSED)
def test_what_cannot_be_is_refused(plan: str, fact: str, help: str, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as refused:
        compiled(model(), plan, tmp_path, check=False)
    assert fact in str(refused.value)
    assert help in str(refused.value)


def test_rows_in_eight_bits_are_not_verified(tmp_path: Path) -> None:
    """Before the model is read."""
    (tmp_path / "plan.yaml").write_text(SHARED + EIGHT)
    ended = CliRunner().invoke(verify, ["none.onnx", "--plan", str(tmp_path / "plan.yaml")])
    assert "plan.yaml:6: rows in eight bits are not verified\n" in str(ended.exception)
