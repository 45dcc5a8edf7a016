"""Tokens of a decoder over ranks are those that the unsharded model makes of each prompt alone, in every layout, over MPI as well."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decoder_layouts import COUNTS, LAYOUTS, PROMPTS, REPLICAS, recording, requests
from decoders import HEADS, SIZE, VOCABULARY, Unsharded, decoder, with_mask
from partc.cli.main import invoke
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_model
from partc.compiler.rewrite.generation import fused_attention as masks
from partc.runtime import InputError, RankError, Request, load_local_generator
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check
from rows import of_today

Compiled = Callable[..., Path]
TODAY = ["tensor parallel", *of_today([*LAYOUTS][2:], 1)]
INPUTS: list[tuple[str, ...]] = [(), ("position_ids",), ("attention_mask",), ("position_ids", "attention_mask")]
TRAIN = "train: {loss: {type: output, output: logits}, optimizer: {type: sgd, lr: 0.1}, batch: 2}"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """An artifact of a decoder by a layout and the keys of `generate`, compiled once."""
    known: dict[Any, Path] = {}

    def build(layout: str = "one rank", keys: str = "slots: 2, length: 64, chunk: 8", **form: Any) -> Path:
        key = layout, keys, str(form)
        if key not in known:
            folder = tmp_path_factory.mktemp("decoder")
            onnx.save(decoder(**form), folder / "model.onnx")
            (folder / "plan.yaml").write_text(f"{LAYOUTS[layout]}generate: {{{keys}}}\n")
            compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
            known[key] = folder / "build"
        return known[key]

    return build


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """The tokens of each prompt alone."""
    model = Unsharded(decoder())
    return [model.tokens(prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]


@pytest.mark.parametrize("layout", TODAY)
def test_tokens_are_those_of_the_unsharded_model(compiled: Compiled, wanted: list[list[int]], layout: str) -> None:
    folder = compiled(layout)
    assert check(folder).violations == []
    with load_local_generator(folder) as generator:
        assert [answer.tokens for answer in generator.run(requests())] == wanted
        backwards = generator.run(
            requests()[::-1]
        )  # other slots, other neighbours, caches that are full of others' entries
        assert [answer.tokens for answer in backwards[::-1]] == wanted
        assert [*generator.stream(PROMPTS[2], max_tokens=5)] == wanted[2]


@pytest.mark.parametrize(
    ("inputs", "slots"),
    [(INPUTS[3], 1), (INPUTS[3], 3), *of_today([*itertools.product(INPUTS[:3], [1, 8])], 1)],
)
def test_positions_come_from_the_past_or_as_inputs(
    compiled: Compiled, wanted: list[list[int]], slots: int, inputs: tuple[str, ...]
) -> None:
    folder = compiled(keys=f"slots: {slots}, length: 64, chunk: 5", inputs=inputs)
    decode = open_artifact(folder)
    assert decode.programs[:2] == ["decode", "prefill"]
    assert {one.partition("_")[0] for one in decode.programs[2:]} <= {"decode"}
    shapes = {port.name: port.shape for port in decode.manifest.inputs}
    assert shapes == {"ids": [slots, 1], "position": [slots], "count": [slots]}
    shapes = {port.name: port.shape for port in decode.program_named("prefill").manifest.inputs}
    assert shapes == {"ids": [1, 5], "position": [1], "count": [1]}
    with load_local_generator(folder) as generator:
        assert [answer.tokens for answer in generator.run(requests())] == wanted


@pytest.mark.parametrize("slots", of_today([1, 2], 1))
def test_positions_that_a_model_counts_are_those_of_each_slot(
    compiled: Compiled, wanted: list[list[int]], slots: int
) -> None:
    with load_local_generator(compiled(keys=f"slots: {slots}, length: 64", rows=False)) as generator:
        assert [answer.tokens for answer in generator.run(requests())] == wanted


@pytest.mark.parametrize(
    ("layout", "slots"),
    [
        ("one rank", 1),
        ("tensor parallel stages", 4),
        *of_today([("one rank", 3), ("tensor parallel", 4), ("stages", 4), ("data parallel", 4)], 1),
    ],
)
def test_attention_is_fused_in_place_where_its_mask_is_causal(compiled: Compiled, layout: str, slots: int) -> None:
    model = Unsharded(decoder(fused=True))
    folder = compiled(layout, f"slots: {slots}, length: 64, chunk: 8", fused=True)
    for program in ("decode", "prefill"):
        artifact = open_artifact(folder, program=program)
        kinds = [node.op_type for rank in range(artifact.manifest.ranks) for node in artifact.model(rank).graph.node]
        assert kinds.count("GroupQueryAttention") == 2 * (2 if layout.startswith(("tensor", "data")) else 1)
        assert not {"Attention", "TensorScatter"} & {*kinds}
    checked = check(folder)
    assert (checked.violations, checked.state.copied) == ([], 0)
    assert checked.state.in_place == 2 * kinds.count("GroupQueryAttention")
    with load_local_generator(folder) as generator:
        found = [answer.tokens for answer in generator.run(requests())]
    assert found == [model.tokens(prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]


@pytest.mark.parametrize(
    ("layout", "own", "form"),
    [
        ("tensor parallel", 2, {"flat": True}),
        *of_today(
            [("one rank", 0, {}), ("tensor parallel", 2, {}), ("stages", 0, {}), ("one rank", 0, {"flat": True})], 1
        ),
    ],
)
def test_both_programs_run_by_the_same_sessions(
    compiled: Compiled, layout: str, own: int, form: dict[str, bool]
) -> None:
    """But for `own` ones: under tensor parallelism a prefill sums the last layer's terms behind the choice of the scored token."""
    folder = compiled(layout, "slots: 4, length: 64, chunk: 8", fused=True, **form)
    with load_local_generator(folder) as generator:
        assert [*generator.stream(PROMPTS[0], max_tokens=9)] == Unsharded(decoder(fused=True)).tokens(PROMPTS[0], 9)
        decode, prefill = (generator._programs[name].ranks for name in ("decode", "prefill"))  # type: ignore[union-attr]
        for one, other in zip(decode, prefill, strict=True):
            sessions = [[id(runner.session) for runner in rank._program.runners.values()] for rank in (one, other)]
            assert sum(pair[0] != pair[1] for pair in zip(*sessions, strict=True)) == own
            records = {record.value: record for record in one.state.records}
            for (
                runner
            ) in other._program.runners.values():  # else the fused op takes a cache for as long as its new entries
                for port in runner.session.get_inputs():
                    if port.name in records:
                        assert tuple(port.shape[1:]) == records[port.name].local_shape(one.rank)[1:]
    assert not [*folder.glob("weights/prefill*")]


@pytest.mark.parametrize(("slots", "window"), [(1, 63), (3, 5)])
def test_attention_of_another_mask_stays(compiled: Compiled, slots: int, window: int) -> None:
    """A window of 63 differs from causal at the last positions alone: the proof looks at each."""
    model = Unsharded(decoder(fused=True, window=window))
    folder = compiled("one rank", f"slots: {slots}, length: 64, chunk: 8", fused=True, window=window)
    for program in ("decode", "prefill"):
        assert "Attention" in {node.op_type for node in open_artifact(folder, program=program).model(0).graph.node}
    with load_local_generator(folder) as generator:
        found = [answer.tokens for answer in generator.run(requests())]
    assert found == [model.tokens(prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]


def test_of_many_positions_the_proof_looks_at_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "MOST", 10)
    for window, kind in ((63, "Attention"), (64, "GroupQueryAttention")):
        onnx.save(decoder(fused=True, window=window), tmp_path / "model.onnx")
        (tmp_path / "plan.yaml").write_text("ranks: 1\ngenerate: {length: 64, chunk: 8}\n")
        compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / f"build{window}")
        nodes = open_artifact(tmp_path / f"build{window}").model(0).graph.node
        assert {node.op_type for node in nodes} & {"Attention", "GroupQueryAttention"} == {kind}


@pytest.mark.parametrize(("program", "tokens", "scored"), [("decode", 2, 2), ("prefill", 8, 1)])
def test_a_step_sends_nothing_that_grows_with_what_is_kept(
    compiled: Compiled, program: str, tokens: int, scored: int
) -> None:
    """`tokens` of all its slots together, of which `scored` are, the last of each."""
    folder = compiled("tensor parallel", "slots: 2, length: 200, chunk: 8")
    artifact = open_artifact(folder, program=program)
    manifest = artifact.manifest
    assert artifact.model(0).graph.node[-1].op_type == "AllReduce"  # no session is behind it
    assert [one.op for one in manifest.collectives] == ["AllReduce"] * 6  # two a layer, and two for the token
    sizes = {one.value: one.bytes for one in manifest.collectives}
    assert [sizes.pop("next_token"), sizes.pop("generate.top")] == [str(8 * scored), str(4 * scored)]
    row = HEADS * SIZE * 4
    assert sorted(map(int, sizes.values())) == [row * scored, *[row * tokens] * 3]


def test_replicas_share_their_programs_and_gather_tokens_at_once(tmp_path: Path, wanted: list[list[int]]) -> None:
    onnx.save(decoder(), tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(f"{REPLICAS}generate: {{slots: 4, length: 64, chunk: 8}}\n")
    compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    manifest = open_artifact(tmp_path / "build").manifest
    files = [manifest.program(rank) for rank in range(4)]
    assert files[0] == files[2]
    assert files[1] == files[3]
    assert [one.op for one in manifest.collectives if one.value == "next_token"].count("AllGather") == 1
    assert not [one for one in manifest.collectives if one.value == "next_token" and one.op == "Exchange"]
    with load_local_generator(tmp_path / "build") as generator:
        assert [answer.tokens for answer in generator.run(requests())] == wanted


@pytest.mark.parametrize("layout", TODAY)
def test_caches_lie_where_they_are_written_and_are_appended_to_in_place(compiled: Compiled, layout: str) -> None:
    folder = compiled(layout)
    manifest = open_artifact(folder).manifest
    caches = [record for record in manifest.state if record.kind == "cache"]
    assert {record.tensor for record in caches} == {f"past_{side}.{layer}" for side in "kv" for layer in (0, 1)}
    assert {tuple(record.shape) for record in caches} == {(2, HEADS, 64 + 8 - 1, SIZE)}
    held = sum(np.prod(record.local_shape(rank)) for record in caches for rank in record.ranks)
    assert held == 4 * 2 * HEADS * (64 + 8 - 1) * SIZE  # each rank its own, nothing twice
    checked = check(folder)
    assert (checked.state.in_place, checked.state.copied) == (sum(len(record.ranks) for record in caches), 0)


def test_a_sequence_may_fill_its_slot_and_ends_where_it_is_to_stop(
    compiled: Compiled, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Unsharded(decoder())
    whole = model.tokens([5, 6, 7], 61)
    stop = whole[3]
    with load_local_generator(compiled(keys=f"slots: 2, length: 64, chunk: 8, stop: [{stop}]")) as generator:
        first, other = generator.run(
            [Request([5, 6, 7], max_tokens=61), Request([1], max_tokens=4, stop=range(VOCABULARY))]
        )
        assert (first.tokens, first.finish) == (model.tokens([5, 6, 7], 61, stop=[stop]), "stop")
        assert (len(other.tokens), other.finish) == (1, "stop")
    with load_local_generator(compiled()) as generator:
        for request in (Request([5, 6, 7], max_tokens=61), Request([5, 6, 7])):
            answer = generator.run([request])[0]
            assert (answer.tokens, answer.finish) == (whole, "length")
    assert invoke(["generate", str(compiled()), "--ids", "5,6,7", "--in-process"]) == 0
    assert [int(token) for token in capsys.readouterr().out.split()] == whole


@pytest.mark.parametrize("layout", ["tensor parallel stages", *of_today(["one rank", "data parallel"], 1)])
def test_logits_of_a_request_are_the_same_bits_in_any_company(
    compiled: Compiled, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits: dict[tuple[int, int], bytes] = {}
    recording(monkeypatch, lambda request, number, logits: bits.update({(request.seed, number): logits}))
    some = [Request(prompt, max_tokens=12, temperature=1.0, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    greedy = [Request(prompt, max_tokens=5) for prompt in PROMPTS]
    mixed = [one for pair in zip(greedy, some, strict=True) for one in pair]
    # alone; all at once; in reversed order; behind others, in another slot that is not empty; beside greedy ones
    companies = [*([one] for one in some), some, some[::-1], [some[2], some[4], *some], mixed]
    found: dict[tuple[int, int], set[bytes]] = {}
    with load_local_generator(compiled(layout, "slots: 4, length: 64, chunk: 8", fused=True)) as generator:
        for company in companies:
            bits.clear()
            generator.run(company)
            for key, one in bits.items():
                found.setdefault(key, set()).add(one)
    assert len(found) == 12 * len(some)
    assert {len(one) for one in found.values()} == {1}


def test_requests_that_cannot_be_met_are_named_all_at_once(compiled: Compiled) -> None:
    some = [
        Request([]),
        Request([1, VOCABULARY]),
        Request([1] * 60, max_tokens=10),
        Request([1], max_tokens=0),
        Request([1], temperature=-1.0),
        Request([1], top_p=0.0, seed=-1),
        Request([1] * 64),
    ]
    with load_local_generator(compiled()) as generator, pytest.raises(InputError) as error:
        generator.run(some)
    for number, words in enumerate(
        [
            "no token",
            f"{VOCABULARY} is not a token",
            "are 70",
            "asks for 0",
            "temperature is -1",
            "top_p is 0",
            "are 65",
        ]
    ):
        assert any(f"request {number}: " in line and words in line for line in str(error.value).splitlines()), words
    with load_local_generator(compiled(keys="length: 64, sampling: false")) as generator:
        assert generator.run([Request([7], max_tokens=20)])[0].tokens == Unsharded(decoder()).tokens([7], 20)
        with pytest.raises(InputError, match="sampling: false"):
            generator.run([Request([1], temperature=1.0)])


def test_the_command_makes_the_same_tokens_over_mpi(
    compiled: Compiled, wanted: list[list[int]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of ranks that share each layer; those of stages are of `test_slot_groups.py`."""
    folder = str(compiled("tensor parallel"))
    prompts = tmp_path / "prompts.jsonl"
    lines: list[dict[str, object]] = [
        {"ids": prompt, "max_tokens": count} for prompt, count in zip(PROMPTS, COUNTS, strict=True)
    ]
    lines.append({"ids": [3], "max_tokens": 2, "logit_bias": {"9": 100}, "logprobs": 1})
    lines.append({"ids": [3, 1, 4], "max_tokens": 8, "temperature": 0.8, "seed": 5})
    prompts.write_text("\n".join(map(json.dumps, lines)))
    capfd.readouterr()
    assert invoke(["generate", folder, "--prompts", str(prompts), "--json"]) == 0
    answers = json.loads(capfd.readouterr().out)["answers"]
    *likeliest, biased, drawn = (answer["ids"] for answer in answers)
    assert (likeliest, biased, len(answers[-2]["logprobs"])) == (wanted, [9, 9], 2)
    asked = ["--ids", "3", "--max-tokens", "2", "--logit-bias", "9=100", "--json", "--in-process"]
    assert invoke(["generate", folder, *asked, "--logprobs", "1"]) == 0
    own, together = json.loads(capfd.readouterr().out)["answers"][0]["logprobs"], answers[-2]["logprobs"]
    for one, other in zip(own, together, strict=True):
        assert one["top"].keys() == other["top"].keys()
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-5)
    asked = ["--ids", "3,1,4", "--temperature", "0.8", "--seed", "5", "--max-tokens", "8"]
    assert invoke(["generate", folder, *asked, "--in-process"]) == 0
    assert [int(token) for token in capfd.readouterr().out.split()] == drawn
    assert len(drawn) == 8


def test_wrong_prompts_end_the_command_before_a_rank_begins(
    compiled: Compiled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, prompts = str(compiled()), tmp_path / "prompts.jsonl"
    assert invoke(["generate", folder]) == 2
    assert "no prompt is given" in capsys.readouterr().err
    assert invoke(["generate", folder, "--ids", "1,two"]) == 2
    assert "is not a list of tokens" in capsys.readouterr().err
    assert invoke(["generate", folder, "--ids", "1", "--logit-bias", "a=1"]) == 2
    assert "'a' is not a token, such as 306" in capsys.readouterr().err
    assert invoke(["generate", folder, "--prompt", "Once"]) == 2
    assert "needs a tokenizer" in capsys.readouterr().err
    prompts.write_text('{"ids": [1]}\n{"ids": "1"}\nno json\n{"id": [1]}\n{"ids": [1], "seed": "x"}\n')
    assert invoke(["generate", folder, "--prompts", str(prompts)]) == 2
    told = capsys.readouterr().err
    for line, words in (
        (2, "'ids' is a list of whole numbers"),
        (3, "is not JSON"),
        (4, "'id' is not a key"),
        (5, "'seed' is"),
    ):
        assert f"prompts.jsonl:{line}: {words}" in told
    prompts.write_bytes(b'{"ids": [1]}\n\xff\xfe\n')
    assert invoke(["generate", folder, "--prompts", str(prompts)]) == 2
    assert "prompts.jsonl: is not UTF-8 text" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text("{}")
    assert invoke(["generate", folder, "--prompt", "Once", "--tokenizer", str(tmp_path / "tokenizer.json")]) == 2
    assert "is not a tokenizer" in capsys.readouterr().err


def test_artifacts_and_models_without_caches_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = Path(__file__).parents[2] / "samples" / "lenet"
    compile_model(sample / "model.py", sample / "plan.yaml", tmp_path / "build")
    assert invoke(["generate", str(tmp_path / "build"), "--ids", "1"]) == 1
    assert "the artifact makes no tokens" in capsys.readouterr().err
    (tmp_path / "plan.yaml").write_text("ranks: 1\ngenerate: {length: 64}\n")
    assert (
        invoke(["compile", str(sample / "model.py"), "--plan", str(tmp_path / "plan.yaml"), "-o", str(tmp_path / "b")])
        == 2
    )
    assert "plan.yaml:2: the model has no cache" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "fact"),
    [
        ("{slots: 0, length: 64}", "slots"),
        ("{slots: 2, length: 64, memory: 10KB}", "not one slot fits"),
        ("{length: 4000}", "the table of positions 'embed.positions.weight' has 256, and 'length' is 4000"),
        (
            "{slots: 3, length: 64}\nranks: 2\ndataset: data_parallel",
            "3 slots cannot be dealt out to 2 groups of ranks",
        ),
        ("{length: 8, chunk: 9}", "a chunk of 9 tokens is longer than a sequence, 8"),
        ("{length: 64, stop: [2, 64]}", "plan.yaml:2: 64 is not a token of the model"),
        ("{slots: 2}", "length"),
        (
            "{length: 64}\ntrain: {loss: {type: output, output: logits}, optimizer: {type: sgd, lr: 0.1}, batch: 2}",
            "'generate' beside 'train'",
        ),
        ("{length: 64}\npipeline: {microbatches: 2}", "'generate' beside 'pipeline'"),
    ],
)
def test_wrong_plans_are_named(keys: str, fact: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(decoder(), tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(f"{'' if 'ranks' in keys else 'ranks: 1'}\ngenerate: {keys}\n")
    assert invoke(["compile", str(tmp_path / "model.onnx"), "--plan", str(tmp_path / "plan.yaml")]) == 2
    assert fact in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mask", "window", "fused"), [("all", 0, False), ("prefix", 0, True), ("prefix", 5, False), ("far", 0, True)]
)
def test_a_mask_of_later_tokens_is_refused(mask: str, window: int, fused: bool, tmp_path: Path) -> None:
    """Of a prompt in chunks, or token by token, the tokens are others than of all at once."""
    onnx.save(with_mask(decoder(rows=False, fused=fused, window=window), mask), tmp_path / "model.onnx")
    for chunk in (8, 1):
        (tmp_path / "plan.yaml").write_text(f"ranks: 1\ngenerate: {{slots: 1, length: 64, chunk: {chunk}}}\n")
        with pytest.raises(CompileError, match=r"layers\.0\.attention.*a token sees later ones"):
            compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")


def test_after_the_end_no_token_is_made(compiled: Compiled) -> None:
    with load_local_generator(compiled()) as generator:
        pass
    with pytest.raises(RankError, match="closed"):
        generator.run([Request([1], max_tokens=1)])


def test_the_decoder_needs_its_positions() -> None:
    """The tests above would see a position that is off: the logits change with it."""
    model = Unsharded(decoder(inputs=("position_ids",)))
    past = {name: np.zeros((1, HEADS, 0, SIZE), np.float32) for name in model.names if name.startswith("past_")}
    first, shifted = (
        model.session.run(None, {"ids": np.array([[7, 8]]), "position_ids": np.array([row]), **past})[0]
        for row in ([0, 1], [1, 2])
    )
    assert int(first[0, -1].argmax()) == Unsharded(decoder()).tokens([7, 8], 1)[0]
    assert abs(first - shifted).max() > 0.1
