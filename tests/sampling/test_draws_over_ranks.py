"""Drawn tokens over ranks are those of one rank, in any company, of few candidates and of many; and what ranks tell each other for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from batches import on_ranks
from decoder_layouts import LAYOUTS, PROMPTS, REPLICAS
from decoders import Unsharded, decoder
from mutated import change_file, rewrite_raw, texts
from partc.compiler.pipeline import compile_model
from partc.runtime import Generator, Request, load_local_generator
from partc.runtime.communication.in_process import LocalAgreements, LocalTransport
from partc.runtime.generation import draw, sampling
from partc.runtime.generation.request import Answer
from rows import of_today

LAYOUTS_OF_LOGITS = {**LAYOUTS, "replicas": REPLICAS}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_k": 20, "top_p": 0.95},
    {},
    {"temperature": 3.0},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 3, "min_p": 0.05},
    {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "logit_bias": {3: 2.0, 40: -100.0}},
    {"temperature": 5.0, "presence_penalty": 1.5, "min_p": 0.2, "min_tokens": 7, "stop": [*range(50)]},
]
"""Of each prompt how it goes on: one with its likeliest tokens."""
REQUESTS = [
    Request(prompt, max_tokens=7, seed=seed, **kind)
    for seed, (prompt, kind) in enumerate(zip([*PROMPTS, [9], [5, 6]], KINDS, strict=True))
]


def compiled(folder: Path, layout: str, keys: str = "slots: 4, length: 64, chunk: 8") -> Path:
    folder.mkdir(exist_ok=True)
    onnx.save(decoder(fused=True), folder / "model.onnx")
    (folder / "plan.yaml").write_text(f"{LAYOUTS_OF_LOGITS[layout]}generate: {{{keys}}}\n")
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    return folder / "build"


def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets draws begin with four candidates of a shard, where the vocabulary of tests has no more than it begins with."""
    for module in (draw, sampling):
        monkeypatch.setattr(module, "FIRST", 4)
        monkeypatch.setattr(module, "FURTHER", 2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of each request by itself, on one rank."""
    with load_local_generator(compiled(tmp_path_factory.mktemp("alone"), "one rank")) as generator:
        return [generator.run([one])[0].tokens for one in REQUESTS]


def in_company(generator: Generator) -> list[list[list[int]]]:
    """The tokens of the requests, in two orders, and of the greedy one alone."""
    found = [answer.tokens for answer in generator.run(REQUESTS)]
    others = [answer.tokens for answer in generator.run([REQUESTS[2], *REQUESTS[::-1]])][1:][::-1]
    return [found, others, [generator.run([REQUESTS[1]])[0].tokens]]


SCORED = [
    Request([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], max_tokens=5, logprobs=3, scores_prompt=True),
    Request([7, 8], max_tokens=6, temperature=2.0, seed=5, logprobs=0, repetition_penalty=1.5),
    Request([*range(64)], max_tokens=0, logprobs=20, scores_prompt=True),
    Request([9], max_tokens=0, logprobs=1, scores_prompt=True),
    Request([1, 2, 3], max_tokens=9),
]


def scored(generator: Generator) -> tuple[list[Answer], list[Answer]]:
    """The answers with scores, together and each alone."""
    return generator.run(SCORED), [generator.run([one])[0] for one in SCORED]


def check_scores(answers: list[Answer]) -> None:
    """Each score is that of the whole model, without the changes of its logits."""
    model = Unsharded(decoder(fused=True))
    for request, answer in zip(SCORED, answers, strict=True):
        assert (len(answer.tokens), answer.finish) == (request.max_tokens, "length")
        tokens, scores = [*request.prompt, *answer.tokens], [*answer.prompt_scores, *answer.scores]
        assert (len(answer.scores), len(answer.prompt_scores)) == (
            0 if request.logprobs is None else len(answer.tokens),
            len(request.prompt) - 1 if request.scores_prompt else 0,
        )
        rows = model.log_probabilities(tokens)
        first = 0 if request.scores_prompt else len(request.prompt) - 1
        for row, token, score in zip(rows[first:-1], tokens[first + 1 :], scores, strict=bool(scores)):
            assert abs(score.logprob - row[token]) < 1e-5
            assert [one for one, _ in score.top] == [*np.argsort(-row, kind="stable")[: request.logprobs]]
            assert np.allclose([number for _, number in score.top], np.sort(row)[::-1][: len(score.top)], atol=1e-5)


SHARED = [
    ("data parallel", 1),
    ("replicas", 1),
    ("stages", 2),
    ("tensor parallel stages", 1),
    ("tensor parallel stages", 2),
]


@pytest.mark.parametrize(("layout", "groups"), of_today(SHARED, 1))
def test_tokens_are_those_of_one_rank_in_any_company(
    tmp_path: Path, alone: list[list[int]], layout: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch)
    folder = compiled(tmp_path, layout, f"slots: 4, groups: {groups}, length: 64, chunk: 8")
    wanted = [alone, alone, [alone[1]]]
    with load_local_generator(folder) as generator:
        assert in_company(generator) == wanted
        together, alone_each = scored(generator)
    assert together == alone_each
    check_scores(together)
    found = on_ranks(folder, lambda _, generator: (in_company(generator), scored(generator)))
    assert found == [(wanted, (together, together))] * len(found)


@pytest.mark.parametrize(("layout", "shards"), [("tensor parallel", 2), ("data parallel", 1)])
def test_ranks_tell_each_other_nothing_but_candidates_and_tokens(
    tmp_path: Path, layout: str, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request that is drawn; beside it, and without it, nothing of one that takes its likeliest tokens."""
    folder, sizes = compiled(tmp_path, layout), (list[int](), list[int]())
    maxima: Callable[..., np.ndarray[Any, Any]] = LocalTransport.all_reduce_max

    def counted(self: LocalTransport, vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        sizes[self.rank].append(vector.size)
        return maxima(self, vector)

    def none(*_: object) -> None:
        raise AssertionError("an agreement has begun")

    def work(rank: int, generator: Generator) -> tuple[list[int], list[int]]:
        sizes[rank].clear()
        generator.run([Request([3, 1, 4], max_tokens=6)])
        of_greedy = [*sizes[rank]]
        generator.run([Request([3, 1, 4], max_tokens=9), Request([7], max_tokens=3, temperature=1.0, top_k=5)])
        return of_greedy, sizes[rank]

    monkeypatch.setattr(LocalTransport, "all_reduce_max", counted)
    monkeypatch.setattr(LocalAgreements, "begin", none)
    told = [] if shards == 1 else [2 * (1 + 32)]
    of_drawn = [
        *told,
        1 if shards == 2 else 2,
        *[*told, 2] * 2,
    ]  # after its prompt, then of two rows: a slot of each run
    assert on_ranks(folder, work) == [([], of_drawn)] * 2


def test_a_shard_of_logits_that_no_rank_has_is_named(tmp_path: Path) -> None:
    """The files are sound: the second rank does not give its half of the scores, and the manifest does not say so."""
    folder = compiled(tmp_path, "tensor parallel")

    def without(model: onnx.ModelProto) -> None:
        del model.graph.output[[port.name for port in model.graph.output].index("logits")]

    def told(data: dict[str, Any]) -> None:
        logits = next(port for port in data["programs"]["decode"]["outputs"] if port["name"] == "logits")
        logits.update(ranks=[0], boxes=logits["boxes"][:1])

    assert texts(folder) == ""
    change_file(folder, "rank_0001.onnx", without)
    rewrite_raw(folder, told)
    assert "logits: no rank has the part [0:4, 32:64] of the output 'logits'" in texts(folder)
