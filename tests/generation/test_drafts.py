"""Drafts change no bit of a request's tokens: with any look-up, alone or in company, drawn, scored or limited."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from decoder_layouts import LAYOUTS
from decoders import Unsharded, decoder
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_model
from partc.runtime import Generator, Request, load_local_generator
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check
from partc.runtime.generation.drafts import Drafts
from partc.runtime.generation.request import NewToken
from partc.runtime.generation.slots import Slots, Step
from partc.runtime.generation.turns import Turns
from rows import of_today

TEXT = [5, 9, 2, 31] * 5
PROMPTS = [TEXT, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [11, 12]]
SAID = "slots: 3, length: 64, chunk: 8, draft: {tokens: 3, lookup: 2}"


def compiled(folder: Path, layout: str = "ranks: 1\n", said: str = SAID, **form: object) -> Path:
    onnx.save(decoder(fused=True, **form), folder / "model.onnx")  # type: ignore[arg-type]
    (folder / "plan.yaml").write_text(f"{layout}generate: {{{said}}}\n")
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    return folder / "build"


def made(generator: Generator, requests: Sequence[Request]) -> tuple[dict[int, list[NewToken]], Slots]:
    """The tokens of each request, and the slots in which they were made."""
    slots, found = generator.slots(), dict[int, list[NewToken]]()
    for number, request in enumerate(requests):
        slots.admit(number, request)
    turns = Turns(generator, slots)
    while (tokens := turns.next()) is not None:
        for one in tokens:
            found.setdefault(one.request, []).append(one)
    return found, slots


def test_drafts_follow_the_last_occurrence() -> None:
    drafts = Drafts(2, [7, 3, 9, 4, 1, 7, 3])
    assert drafts.next(3) == [9, 4, 1]
    drafts.add([9, 5])
    assert drafts.next(2) == []  # 5 did not occur before
    drafts.add([7, 3])
    assert drafts.next(4) == [9, 5, 7, 3]
    assert Drafts(3, [1, 2, 1, 2]).next(5) == [1, 2, 1, 2, 1]  # beyond the end it continues with itself
    assert Drafts(3, [8, 6, 8]).next(2) == [6, 8]  # two last tokens did not occur, one did
    assert Drafts(3, []).next(2) == Drafts(1, [4]).next(2) == []


@pytest.mark.parametrize("layout", of_today(["stages", "data parallel", "tensor parallel stages"], 1))
def test_tokens_are_those_of_the_unsharded_model_in_fewer_steps(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = SAID.replace("slots: 3", "slots: 4, groups: 2" if layout == "stages" else "slots: 4")
    folder = compiled(tmp_path, LAYOUTS[layout], said)
    assert check(folder).violations == []
    record = open_artifact(folder).manifest.generation
    assert record is not None
    assert record.narrow == ["draft_2", "draft_4"]
    whole, requests = Unsharded(decoder(fused=True)), [Request(prompt, max_tokens=24) for prompt in PROMPTS]
    wanted = {number: whole.tokens(one.prompt, 24) for number, one in enumerate(requests)}
    with load_local_generator(folder) as generator:
        found, slots = made(generator, requests)
        assert {number: [one.token for one in tokens] for number, tokens in found.items()} == wanted
        assert slots.drafted > slots.accepted > 10
        # planted: a draft counts though the result before it is another token
        monkeypatch.setattr(
            Step,
            "valid",
            lambda self, row, chosen: (
                range(row * 4, row * 4 + self.taking[row][1]) if self._of_row == 4 else range(row, row + 1)
            ),
        )
        assert {
            number: [one.token for one in tokens] for number, tokens in made(generator, requests)[0].items()
        } != wanted


def test_no_draft_and_no_company_change_a_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and the bits of their scores; the requests draw, are limited by changes of logits, end at tokens, or score their prompt."""
    requests = [
        Request(TEXT, max_tokens=24, logprobs=3),
        Request(TEXT, max_tokens=20, temperature=0.9, seed=4, logprobs=2),
        Request(TEXT, max_tokens=20, temperature=0.4, top_k=5, seed=2, logit_bias={5: 3.0, 9: 3.0}, logprobs=2),
        Request(TEXT, max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2),
        Request(TEXT, max_tokens=30, stop=(31, 9), min_tokens=6, logprobs=2),
        Request(TEXT, max_tokens=4, logprobs=1, scores_prompt=True),
    ]
    with load_local_generator(compiled(tmp_path, LAYOUTS["tensor parallel"])) as generator:
        together, slots = made(generator, requests)
        assert slots.accepted > 10
        with monkeypatch.context() as patch:
            patch.setattr(Drafts, "next", lambda self, count: [])
            alone, slots = made(generator, requests)
            assert slots.drafted == 0
        assert together == alone
        for number, request in enumerate(requests):
            found = alone_as_together(generator, request, together[number])
            of_answer = [one for one in found if not one.of_prompt]
            assert len(of_answer) <= (request.max_tokens or 0)
            assert bool(of_answer[-1].finish)
            assert not any(one.finish for one in of_answer[:-1])


def alone_as_together(generator: Generator, request: Request, together: Sequence[NewToken]) -> list[NewToken]:
    """The tokens of a request alone, which have the bits that they have among others."""
    (found,) = made(generator, [request])[0].values()
    bits = [[(one.token, one.score, one.finish) for one in tokens] for tokens in (found, together)]
    assert bits[0] == bits[1]
    return found


@pytest.mark.parametrize(
    ("layout", "form"),
    of_today(
        [
            ("ranks: 1\n", "bits: 4, accuracy_level: 4"),
            (LAYOUTS["tensor parallel"], "bits: 4, accuracy_level: 1"),
            ("ranks: 1\n", "bits: 8"),
        ],
        1,
    ),
)
def test_drafts_of_quantized_products_and_rounded_caches(
    tmp_path: Path, layout: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose kernels round differently for one row: each token but the first is made by the kernels of several."""
    plan = f'{layout}quantize: {{"**": {{block: 16, {form}}}}}\n'
    with load_local_generator(compiled(tmp_path, plan, f"{SAID}, cache: int8")) as generator:
        requests = [Request(prompt, max_tokens=24, logprobs=2) for prompt in PROMPTS]
        requests.append(Request(TEXT[1:], max_tokens=20, temperature=0.9, seed=4, logprobs=2))
        together, slots = made(generator, requests)
        assert slots.accepted > 5
        for number, request in enumerate(requests):
            alone_as_together(generator, request, together[number])
        monkeypatch.setattr(Drafts, "next", lambda self, count: [])
        assert made(generator, requests)[0] == together


@pytest.mark.parametrize(
    ("said", "form", "fact"),
    [
        ("slots: 2, length: 32, chunk: 4, draft: {tokens: 4}", {}, "longer than a chunk, 4"),
        ("slots: 2, length: 32, chunk: 8, draft: {tokens: 2, lookup: 0}", {}, "expected at least 1, but got 0"),
        (
            "slots: 2, length: 32, chunk: 8, draft: {tokens: 2}",
            {"window": 5},
            "is not read by onnxruntime's fused attention",
        ),
    ],
)
def test_plans_whose_drafts_would_change_tokens_are_refused(
    tmp_path: Path, said: str, form: dict[str, object], fact: str
) -> None:
    with pytest.raises(CompileError, match=fact) as error:
        compiled(tmp_path, said=said, **form)
    assert "plan.yaml:2" in str(error.value)


def test_a_server_counts_drafts(tmp_path: Path) -> None:
    from server_case import LocalServer

    wanted = Unsharded(decoder(fused=True)).tokens(TEXT, 24)
    with LocalServer(compiled(tmp_path)) as server:
        assert server.complete(TEXT, max_tokens=24, temperature=0)["token_ids"] == wanted
        counts = server.metrics()
        assert counts["partc_drafted_tokens_total"] >= counts["partc_accepted_tokens_total"] > 5
