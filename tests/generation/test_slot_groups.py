"""Groups of slots that take turns: tokens are those of each prompt alone, and all stages work at once."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event
from typing import Any

import onnx
import pytest
from batches import cases, follow, lead, on_ranks
from batches import check as check_tokens
from decoder_layouts import COUNTS, LAYOUTS, PROMPTS, recording, requests
from decoders import Unsharded, decoder
from partc.cli.main import invoke
from partc.compiler.pipeline import compile_model
from partc.runtime import ContinuousBatch, Generator, Request, load_local_generator
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check
from rows import of_today

GROUPS = "slots: 4, groups: 2, length: 64, chunk: 8"


def compiled(folder: Path, layout: str, keys: str = GROUPS) -> Path:
    onnx.save(decoder(fused=True), folder / "model.onnx")
    (folder / "plan.yaml").write_text(f"{LAYOUTS[layout]}generate: {{{keys}}}\n")
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    return folder / "build"


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of two stages and two groups."""
    return compiled(tmp_path_factory.mktemp("stages"), "stages")


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """The tokens of each prompt alone."""
    model = Unsharded(decoder(fused=True))
    return [model.tokens(prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]


def tokens_of(generator: Generator, some: list[Request]) -> list[list[int]]:
    return [answer.tokens for answer in generator.run(some)]


@pytest.mark.parametrize("layout", ["tensor parallel stages", *of_today(["one rank", "data parallel"], 1)])
def test_tokens_are_those_of_each_prompt_alone(tmp_path: Path, wanted: list[list[int]], layout: str) -> None:
    folder = compiled(tmp_path, layout)
    checked = check(folder)
    assert (checked.violations, checked.state.copied) == ([], 0)
    with load_local_generator(folder) as generator:
        assert tokens_of(generator, requests()) == wanted
    found = on_ranks(folder, lambda _, generator: tokens_of(generator, requests()[::-1])[::-1])
    assert found == [wanted] * len(found)


def test_no_program_of_stages_brings_tokens_back(stages: Path) -> None:
    """A step of decode sends one value from the first stage to the second one, and ends there."""
    for program, rows in (("decode", 2), ("prefill", 1)):
        manifest = open_artifact(stages, program=program).manifest
        assert {(one.source, one.target) for one in manifest.transfers} == {(0, 1)}
        assert [(port.name, port.ranks, port.shape and port.shape[0]) for port in manifest.outputs] == [
            ("next_token", [1], rows),
            ("logits", [1], rows),
        ]


def test_a_stage_goes_on_with_the_other_group(stages: Path, wanted: list[list[int]]) -> None:
    """The second stage holds each step until the first one has begun with the next one, of the other group; but for the last step."""
    begun, late = [Event() for _ in range(2 + 2 * 8)], list[int]()

    def work(rank: int, generator: Generator) -> list[list[int]]:
        outputs, numbers = generator._outputs, iter(range(len(begun)))

        def watched(step: Any) -> dict[str, Any]:
            number = next(numbers)
            if rank == 0:
                begun[number].set()
            elif number + 1 < len(begun) and not late and not begun[number + 1].wait(60):
                late.append(number)
            return outputs(step)

        generator._outputs = watched  # type: ignore[method-assign]
        return tokens_of(generator, [Request([3, 1, 4], max_tokens=9), Request([2, 7], max_tokens=9)])

    found = on_ranks(stages, work)
    model = Unsharded(decoder(fused=True))
    assert found == [[model.tokens([3, 1, 4], 9), model.tokens([2, 7], 9)]] * 2
    assert not late


def test_logits_are_the_same_bits_in_any_company(stages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bits: dict[tuple[int, int], set[bytes]] = {}
    recording(monkeypatch, lambda request, number, logits: bits.setdefault((request.seed, number), set()).add(logits))
    some = [Request(prompt, max_tokens=12, temperature=1.0, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    companies = [*([one] for one in some), some, some[::-1], [some[2], some[4], *some], [*requests(), *some]]

    def work(_: int, generator: Generator) -> None:
        for company in companies:
            generator.run(company)

    on_ranks(stages, work)
    assert len(bits) == 12 * len(some)
    assert {len(one) for one in bits.values()} == {1}


def test_requests_join_and_leave_between_turns(stages: Path) -> None:
    asked, leaving = cases()

    def work(rank: int, generator: Generator) -> dict[int, list[int]] | None:
        if rank == 0:
            return lead(ContinuousBatch(generator), asked, leaving)
        follow(generator)
        return None

    check_tokens(on_ranks(stages, work)[0], asked, leaving, fused=True)


def test_over_mpi(stages: Path, wanted: list[list[int]], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = ({"ids": prompt, "max_tokens": count} for prompt, count in zip(PROMPTS, COUNTS, strict=True))
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert invoke(["generate", str(stages), "--prompts", str(tmp_path / "prompts.jsonl"), "--json"]) == 0
    assert [answer["ids"] for answer in json.loads(capfd.readouterr().out)["answers"]] == wanted


@pytest.mark.parametrize(
    ("layout", "keys", "told"),
    [
        ("one rank", "slots: 5, groups: 2", ["5 slots are not 2 equal groups", "slots: 4 or 6"]),
        ("data parallel", "slots: 6, groups: 2", ["6 slots in 2 groups that take turns", "slots: 4 or 8"]),
    ],
)
def test_slots_that_do_not_divide_are_refused(
    tmp_path: Path, layout: str, keys: str, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(decoder(), tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(f"{LAYOUTS[layout]}generate: {{{keys}, length: 64}}\n")
    assert invoke(["compile", str(tmp_path / "model.onnx"), "--plan", str(tmp_path / "plan.yaml")]) == 2
    error = capsys.readouterr().err
    assert all(text in error for text in told), error
