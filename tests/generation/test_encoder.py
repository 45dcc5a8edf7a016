"""Tokens of an encoder with a decoder over ranks are those of the unsharded model; the encoder runs once for each request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decoders import VOCABULARY, WIDTH, decoder
from encoder_decoders import ENTRIES, LAYOUTS, START, Unsharded, encoder_decoder
from partc.cli.main import invoke
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_model
from partc.runtime import InputError, Request, load_local_generator
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check

RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(0, VOCABULARY, size).tolist() for size in (3, 12, 1, 7, 5)]
SOUNDS = [RNG.standard_normal((ENTRIES, WIDTH), np.float32) for _ in range(5)]
COUNTS = [9, 14, 4, 12, 7]
KEYS = f"slots: 2, length: 24, chunk: 3, start: [{START}]"


def compiled(folder: Path, layout: str = "one rank", features: bool = False, keys: str = "encoder_length: 12") -> Path:
    onnx.save(encoder_decoder(features), folder / "model.onnx")
    (folder / "plan.yaml").write_text(f"{LAYOUTS[layout]}generate: {{{KEYS}{f', {keys}' if keys else ''}}}\n")
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    return folder / "build"


@pytest.mark.parametrize("layout", [one for one in LAYOUTS if one != "tensor parallel"])
def test_tokens_are_those_of_the_unsharded_model(tmp_path: Path, layout: str) -> None:
    folder, alone = compiled(tmp_path, layout), Unsharded(encoder_decoder())
    assert check(folder).violations == []
    requests = [Request(max_tokens=count, encoder=text) for count, text in zip(COUNTS, TEXTS, strict=True)]
    requests[1] = Request([5, 9, 2, 7], max_tokens=COUNTS[1], encoder=TEXTS[1])  # a prompt of its own, of two chunks
    wanted = [
        alone.tokens(one.encoder, one.prompt or [START], count) for one, count in zip(requests, COUNTS, strict=True)
    ]
    assert len({token for tokens in wanted for token in tokens}) > 8
    with load_local_generator(folder) as generator:
        assert [answer.tokens for answer in generator.run(requests)] == wanted
        assert [
            answer.tokens for answer in generator.run(requests[::-1])[::-1]
        ] == wanted  # caches full of others' entries


def test_an_input_of_one_size_has_no_length(tmp_path: Path) -> None:
    folder, alone = compiled(tmp_path, "tensor parallel", True, ""), Unsharded(encoder_decoder(True))
    assert check(folder).violations == []
    record = open_artifact(folder).manifest.generation
    assert record is not None
    assert record.encoder is not None
    assert (record.encoder.count, record.encoder.length) == ("", ENTRIES)
    np.save(tmp_path / "sound.npy", SOUNDS[0])
    (tmp_path / "prompts.jsonl").write_text(
        json.dumps({"features": "sound.npy", "decoder_ids": [START, 4], "max_tokens": 6}) + "\n"
    )
    wanted = alone.tokens(SOUNDS[0], [START, 4], 6)
    answers = tmp_path / "answers.jsonl"
    invoke(["generate", str(folder), "--in-process", "--prompts", str(tmp_path / "prompts.jsonl"), "-o", str(answers)])
    assert json.loads(answers.read_text())["ids"] == wanted


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (Request([1]), "request 0: it has no input for the encoder"),
        (Request([1], encoder=[]), "its input for the encoder has no token"),
        (Request([1], encoder=[3] * 13), "its input for the encoder has 13 tokens; there is room for 12"),
        (Request([1], encoder=[VOCABULARY]), f"{VOCABULARY} is not a token of the encoder"),
        (Request([1], encoder=SOUNDS[0]), "it is whole numbers, one for each token"),
    ],
)
def test_a_wrong_input_of_the_encoder_is_refused(encoded: Path, request_: Request, told: str) -> None:
    with load_local_generator(encoded) as generator, pytest.raises(InputError) as raised:
        generator.run([request_])
    assert told in str(raised.value)


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("encoded"))


@pytest.mark.parametrize(
    ("model", "keys", "told"),
    [
        (encoder_decoder, "", "the plan says no most entries of the encoder's input 'input_ids'"),
        (decoder, "encoder_length: 12", "the model has no encoder"),
        (
            lambda: encoder_decoder(True),
            "encoder_length: 12",
            "'encoder_length' is 12, and the model's encoder gives 10",
        ),
    ],
)
def test_a_length_that_no_encoder_has_is_refused(tmp_path: Path, model: Any, keys: str, told: str) -> None:
    onnx.save(model(), tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(f"ranks: 1\ngenerate: {{{KEYS}{f', {keys}' if keys else ''}}}\n")
    with pytest.raises(CompileError) as raised:
        compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    assert told in str(raised.value)
