"""Ranks that share the entries of a decoder's caches make the tokens that the unsharded model makes of each prompt alone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decoder_layouts import COUNTS, PROMPTS, STAGES, TENSOR, requests
from decoders import HEADS, SIZE, Unsharded, decoder
from mutated import change_file, rewrite_raw, texts
from onnx import ModelProto, helper, numpy_helper
from partc.cli.main import invoke
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import analyse, compile_model
from partc.runtime import Request, load_local_generator
from partc.runtime.artifact.generation import room_for_entries
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check
from rows import of_today

FORM = {"fused": True, "inputs": ("position_ids",)}
KEYS = "slots: 3, length: 64, chunk: 8"


def cut(ranks: int, more: str = "", axes: str = "", of: int = 1) -> str:
    """A plan whose axis cp, beside others of `of` ranks, cuts the caches."""
    return f"ranks: {ranks * of}\nmesh: {{{axes}cp: {ranks}}}\ncontext: {{axis: cp}}\n{more}"


PLANS = {
    "2 ranks": (cut(2), KEYS),
    "3 ranks, 1 slot": (cut(3), "slots: 1, length: 64, chunk: 8"),
    "4 ranks, chunks of 5": (cut(4), "slots: 3, length: 64, chunk: 5"),
    "3 ranks, a token a chunk": (cut(3), "slots: 2, length: 64, chunk: 1"),
    "2 ranks, narrow chunks": (cut(2), "slots: 5, length: 64, chunk: 32"),
    "tp": (cut(2, TENSOR, "tp: 2, ", 2), KEYS),
    "dp": (cut(2, "dataset: {ids: [dp, null]}\n", "dp: 2, ", 2), "slots: 4, length: 64, chunk: 8"),
    "stages": (cut(2, STAGES.format(first="{pp: 0}", second="{pp: 1}"), "pp: 2, ", 2), "slots: 4, length: 64, groups: 2, chunk: 8"),
}  # fmt: skip


def build(folder: Path, plan: str, keys: str, **form: Any) -> Path:
    onnx.save(decoder(**FORM | form), folder / "model.onnx")
    (folder / "plan.yaml").write_text(f"{plan}generate: {{{keys}}}\n")
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    return folder / "build"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("two"), *PLANS["2 ranks"])


@pytest.mark.parametrize(
    "name", ["2 ranks", "tp", *of_today([name for name in PLANS if name not in ("2 ranks", "tp")], 2)]
)
def test_tokens_are_those_of_the_unsharded_model(name: str, tmp_path: Path) -> None:
    """Prompts of 1 to 39 tokens in slots of different positions: of the short ones some ranks have no entry."""
    folder, model = build(tmp_path, *PLANS[name]), Unsharded(decoder(**FORM))
    found = check(folder)
    assert (found.violations, found.state.copied) == ([], 0)
    assert found.state.in_place > 0
    wanted = [model.tokens(prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]
    with load_local_generator(folder) as generator:
        assert [answer.tokens for answer in generator.run(requests())] == wanted
        again = generator.run(requests()[::-1])  # caches are full of other sequences' entries
        assert [answer.tokens for answer in again[::-1]] == wanted
        whole = generator.run([Request(PROMPTS[2], max_tokens=25)])  # up to the last entry
        assert whole[0].tokens == model.tokens(PROMPTS[2], 25)


def test_scores_are_those_of_the_unsharded_model(two: Path) -> None:
    """From the first token on, of which rank 1 has no entry, over the first block of each rank to later ones."""
    prompt = PROMPTS[2]
    wanted = Unsharded(decoder(fused=True)).log_probabilities(prompt)
    with load_local_generator(two) as generator:
        (answer,) = generator.run([Request(prompt, max_tokens=1, logprobs=1, scores_prompt=True)])
    found = [score.logprob for score in (*answer.prompt_scores, *answer.scores)]
    assert np.allclose(
        found, [row[token] for row, token in zip(wanted, [*prompt[1:], answer.tokens[0]], strict=True)], 0, 2e-5
    )


def test_prompts_share_entries_that_ranks_have(two: Path) -> None:
    """A slot copies the beginning of another slot's prompt on each rank; the room for entries is no other dim."""
    prompt, model = [*range(1, 44)], Unsharded(decoder(**FORM))
    with load_local_generator(two) as generator:
        first = generator.run([Request(prompt, max_tokens=4), Request([9], max_tokens=12)])
        again = generator.run(
            [Request([8, 9], max_tokens=3), *(Request([*prompt[:40], last], max_tokens=4) for last in (50, 60))]
        )
    assert first[0].tokens == model.tokens(prompt, 4)
    assert [one.tokens for one in again[1:]] == [model.tokens([*prompt[:40], last], 4) for last in (50, 60)]


@pytest.mark.parametrize("form", ["softcap", *of_today(["scale"], 1)])
def test_scores_are_scaled_and_capped_as_the_model_does(form: str, tmp_path: Path) -> None:
    """Those of the new entries, which are subtracted, as those of the fused op."""
    model = decoder(**FORM)
    for node in (node for node in model.graph.node if node.op_type == "Attention"):
        if form == "softcap":
            node.attribute.append(helper.make_attribute("softcap", 0.5))
        else:
            next(one for one in node.attribute if one.name == "scale").f = 2.0
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(f"{cut(3)}generate: {{{KEYS}}}\n")
    compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    with load_local_generator(tmp_path / "build") as generator:
        found = [answer.tokens for answer in generator.run(requests())]
    unsharded = Unsharded(model)
    assert found == [unsharded.tokens(prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]
    assert found != [Unsharded(decoder(**FORM)).tokens(*one) for one in zip(PROMPTS, COUNTS, strict=True)]


def test_two_ranks_over_mpi(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    onnx.save(decoder(**FORM), tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(f"{cut(2)}generate: {{{KEYS}}}\n")
    command = ["verify", str(tmp_path / "model.onnx"), "--plan", str(tmp_path / "plan.yaml"), "--random", "5"]
    assert invoke([*command, "--json", "--mpi"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["equal"]
    assert len(found["compared"]) >= 6


def test_embeddings_are_those_of_one_rank(tmp_path: Path) -> None:
    found = list[Any]()
    for plan in (cut(2), "ranks: 1\n"):
        (tmp_path / plan[7]).mkdir()
        folder = build(tmp_path / plan[7], plan, f"{KEYS}, embeddings: mean")
        assert check(folder).violations == []
        with load_local_generator(folder) as generator:
            answers = generator.run([Request(prompt, embeds=True) for prompt in PROMPTS])
            found.append([answer.embedding for answer in answers])
    assert np.allclose(found[0], found[1], 0, 1e-5)


@pytest.mark.parametrize("ranks", [2, *of_today([3, 4], 1)])
def test_a_rank_has_its_share_and_receives_two_reductions_of_each_layer(ranks: int, tmp_path: Path) -> None:
    """AllReduces of a number for each head, and of a result and its weight together, of 2 layers with 3 slots."""
    onnx.save(decoder(**FORM), tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(f"{cut(ranks)}generate: {{{KEYS}}}\n")
    program = analyse(tmp_path / "model.onnx", tmp_path / "plan.yaml")
    assert [event.op_type for event in program.events] == ["AllReduce"] * 4
    one = 3 * HEADS * 4 * 2 * (ranks - 1) // ranks
    assert [int(event.bytes) for event in program.events] == [one, one * (SIZE + 1)] * 2
    caches = [one.value.shape for one in program.parts[0].state if one.kind == "cache"]
    entries = room_for_entries(64, 8, ranks)
    assert entries == {2: 40, 3: 32, 4: 24}[ranks]
    assert caches == [(3, HEADS // 2, entries, SIZE)] * 4


SHARED = "in shards is read by ONNX's Attention over four dims, perhaps with repeated heads"
WHOLE_STEP = "beside 'generate' it shards the entries of caches, and a step's tokens are on every rank"


@pytest.mark.parametrize(
    ("plan", "keys", "form", "told"),
    [
        (
            cut(2).replace("axis: cp", "axis: cp, attention: ring, order: fold, memory: 1MB"),
            f"{KEYS}, draft: {{tokens: 3}}, cache: int8",
            {},
            f"plan.yaml:3: 'attention: ring' of tokens that 'context' does not cut\n  {WHOLE_STEP}\n  help: leave it out\n"
            f"plan.yaml:3: 'order: fold' of tokens that 'context' does not cut\n  {WHOLE_STEP}\n  help: leave it out\n"
            f"plan.yaml:3: 'memory' of keys and values that no rank sends\n  {WHOLE_STEP}\n"
            "  help: leave it out; 'memory' of 'generate' limits a rank\n"
            "plan.yaml:3: 'context' beside 'draft'\n"
            "  the entries of a step are in one block of a chunk, and drafts begin at any position\n"
            "  help: leave out one of them\n"
            "plan.yaml:3: 'context' beside 'cache: int8'\n"
            "  each rank attends the new entries, and all but one of these terms are subtracted again: rounded ones would not cancel\n"
            "  help: leave out one of them",
        ),
        (
            cut(2, "dataset: {ids: [cp, null]}\n"),
            "slots: 2, length: 64, chunk: 8",
            {},
            "plan.yaml:4: dataset of 'ids' cuts it along 'cp'\n"
            "  'cp' shards the entries of caches, and a step's tokens are on every rank along it\n"
            "  help: cut slots along an axis of their own in the mesh",
        ),
        (
            cut(3),
            "length: 64, chunk: 40",
            {},
            "plan.yaml:3: 'cp' has 3 ranks, and a sequence of 64 tokens has 2 blocks of 40\n"
            "  entries are dealt out in blocks of a chunk, and each rank has some\n"
            "  help: write chunk: 22 or less",
        ),
        (
            cut(2),
            KEYS,
            {"fused": False},
            f"plan.yaml:3: model.onnx: the cache 'past_k.0' is read by other nodes than an Attention\n  a cache {SHARED}\n"
            "  help: export the model at opset 23 or later, with attention as one op, or leave out 'context'",
        ),
        (
            cut(2),
            KEYS,
            {"window": 5},
            "plan.yaml:3: model.onnx: the mask of Attention 'layers.0.attention.Attention' is not proven causal\n"
            "  a rank attends all of its entries that are not after a token\n"
            "  help: leave out 'context'; an axis tp shards the heads of caches",
        ),
        (
            cut(2, 'placement: {"layers.1": 0}\n'),
            KEYS,
            {},
            "plan.yaml:3: 'generate.attention' has its caches on 1 of the 2 ranks along 'cp'\n"
            "  it runs on rank 0 (follows its reader generate.masked), and needs one shard of the caches on each\n"
            "  help: place it on ranks that have all of 'cp', or leave out 'context'",
        ),
        (
            cut(2, TENSOR, "tp: 4, ", 4),
            KEYS,
            {"layers": 1},
            "plan.yaml:6: 'layers.0.k.MatMul' makes 2 heads of keys or values, and is cut over 4 ranks\n"
            "  heads of caches whose entries ranks share are not repeated: each rank has whole heads\n"
            "  help: use 2 ranks for it, or leave it whole, or leave out 'context'\n"
            "plan.yaml:7: 'layers.0.v.MatMul' makes 2 heads of keys or values, and is cut over 4 ranks\n"
            "  heads of caches whose entries ranks share are not repeated: each rank has whole heads\n"
            "  help: use 2 ranks for it, or leave it whole, or leave out 'context'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(plan: str, keys: str, form: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as error:
        build(tmp_path, plan, keys, **form)
    assert str(error.value).replace(f"{tmp_path}/", "") == told


def test_annotations_have_no_op_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(decoder(**FORM), tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(f"{cut(2)}generate: {{{KEYS}}}\n")
    model, plan, file = (str(tmp_path / name) for name in ("model.onnx", "plan.yaml", "annotated.onnx"))
    assert invoke(["compile", model, "--plan", plan, "-o", str(tmp_path / "build"), "--annotated", file]) == 2
    told = capsys.readouterr().err
    assert "is attention over caches whose entries ranks share, which --annotated cannot write" in told
    assert "help: leave out --annotated" in told


Change = Callable[[ModelProto], None]


def made_by(model: ModelProto, value: str) -> Any:
    return next(node for node in model.graph.node if value in node.output)


def constant(name: str, number: int) -> Change:
    """A constant of the positions is another number."""

    def change(model: ModelProto) -> None:
        (one,) = (one for one in model.graph.initializer if one.name == f"generate.constant.cut_{name}")
        one.CopyFrom(numpy_helper.from_array(np.full([*one.dims], number, np.int64), one.name))

    return change


def overlapping(model: ModelProto) -> None:
    """Both ranks have the entries of the first."""
    made_by(model, "generate.places").input[1:3] = ["generate.places.first", "generate.places.length"]
    zero = numpy_helper.from_array(np.array([0], np.int64), "generate.places.first")
    model.graph.initializer.append(zero)


def always(model: ModelProto) -> None:
    """The last block counts on all ranks."""
    made_by(model, "generate.in_last_block").input[2] = "generate.in_block"


def later(model: ModelProto) -> None:
    """A token attends all new entries."""
    made_by(model, "generate.last_seen").input[1] = "generate.tokens"


def unmasked(model: ModelProto) -> None:
    where = made_by(model, "generate.masked")
    where.CopyFrom(helper.make_node("Identity", where.input[1:2], where.output, name=where.name))


FAULTS: list[tuple[Change, str]] = [
    (constant("others", 0), "on rank 1 the new entries at position 0 end at"),
    (constant("ranks", 3), "the new entries at position .* end at"),
    (
        constant("chunk", 4),
        "on rank 0 the new entries at position 5 end at 4; they end at 5, after the rank's 5 entries",
    ),
    (constant("room", 8), "it attends up to 8 entries of at least 32, and there is room for 40|its mask at position"),
    (
        overlapping,
        "on rank 1 the new entries at position 1 end at 1; they end at 0, after the rank's 0 entries of the sequence",
    ),
    (always, "on rank 1 the new entries at position 1 end at 1; they end at 0"),
    (later, "its mask at position 0 is not that of the rank's 0 entries and the step's"),
    (unmasked, "no Where hides the scores of entries that are not in the rank's shard"),
]


@pytest.mark.parametrize(
    ("change", "fact"), FAULTS, ids=[change.__name__ + str(k) for k, (change, _) in enumerate(FAULTS)]
)
def test_an_entry_on_another_rank_than_its_own_is_found(change: Change, fact: str, two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path / "build")
    change_file(tmp_path / "build", "rank_0000.onnx", change)
    told = texts(tmp_path / "build")
    assert re.search(fact, told), told


def test_another_number_of_ranks_is_found(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path / "build")
    rewrite_raw(tmp_path / "build", lambda data: data["generation"].update(cut=1))
    assert "'past_k.0' is cut along its entries, and the generation names no ranks" in texts(tmp_path / "build")
    rewrite_raw(tmp_path / "build", lambda data: data["generation"].update(cut=4))
    assert "has room for 80 entries; sequences of 64 tokens in chunks of 8 need 96" in texts(tmp_path / "build")


def test_a_plan_is_proposed(tmp_path: Path) -> None:
    onnx.save(decoder(**FORM), tmp_path / "model.onnx")
    model, plan = str(tmp_path / "model.onnx"), str(tmp_path / "plan.yaml")
    assert invoke(["plan", model, "--generate", "64", "--slots", "2", "--context", "2", "-o", plan]) == 0
    text = (tmp_path / "plan.yaml").read_text()
    assert "# Proposed by `partc plan`: context parallel over 2, generation.\n" in text
    assert "\ncontext: {axis: cp}   # each rank has its share of the entries of every cache\n" in text
    assert "\ngenerate: {slots: 2, length: 64, chunk: 32}\n" in text
    assert invoke(["compile", model, "--plan", plan, "-o", str(tmp_path / "build")]) == 0
    assert open_artifact(tmp_path / "build").generation.cut == 2
