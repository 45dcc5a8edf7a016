"""Tokens of an encoder with a decoder over ranks are those of the unsharded model; the encoder runs once for each request.

The model is a small one as exporters write both in one file:

    input_ids [batch, entries], encoder_attention_mask [batch, entries], or features [batch, 10, 32];  ids [batch, tokens], past_k.0, ..
        ->  logits, present_k.0, .., cross_k.0 [batch, 4, entries, 8], ..

The decoder's positions are a bias of its scores by distance, a table's rows by head, as in T5.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from decoder_layouts import STAGES, TENSOR
from decoders import HEADS, SIZE, VOCABULARY, WIDTH, Build, decoder
from mutated import rewrite_raw, texts
from onnx import TensorProto, helper
from partc.cli.main import invoke
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_model
from partc.runtime import InputError, Request, load_local_generator
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check
from rows import of_today

ENTRIES, BUCKETS, START = 10, 12, 1
_CROSS = TENSOR.replace('  "layers.*.up": colwise\n  "layers.*.down": rowwise\n', "")
_CROSS += "".join(f'  "layers.*.cross.{name}": {"rowwise" if name == "o" else "colwise"}\n' for name in "qkvo")
_STAGES = STAGES.replace("placement:\n", 'placement:\n  "encoder.*": {first}\n  "bias": {first}\n')
LAYOUTS = {
    "one rank": "ranks: 1\n",
    "tensor parallel": f"ranks: 2\nmesh: {{tp: 2}}\n{_CROSS}",
    "stages": "ranks: 2\n" + _STAGES.format(first=0, second=1),
    "data parallel": "ranks: 2\ndataset: data_parallel\n",
    "tensor parallel stages": "ranks: 4\nmesh: {pp: 2, tp: 2}\n"
    + _CROSS
    + _STAGES.format(first="{pp: 0}", second="{pp: 1}"),
}
RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(0, VOCABULARY, size).tolist() for size in (3, 12, 1, 7, 5)]
SOUNDS = [RNG.standard_normal((ENTRIES, WIDTH), np.float32) for _ in range(5)]
COUNTS = [9, 14, 4, 12, 7]
KEYS = f"slots: 2, length: 24, chunk: 3, start: [{START}]"


def encoder_decoder(features: bool = False, layers: int = 2) -> onnx.ModelProto:
    """The model; of `features`, an array of one size, or of tokens, of which a mask says how many are meant."""
    build = Build()
    float_, int_ = TensorProto.FLOAT, TensorProto.INT64
    values = {
        "input_ids": (int_, ["batch", "entries"]),
        "encoder_attention_mask": (int_, ["batch", "entries"]),
        "features": (float_, ["batch", ENTRIES, WIDTH]),
        "ids": (int_, ["batch", "tokens"]),
    }
    chosen = ("features", "ids") if features else ("input_ids", "encoder_attention_mask", "ids")
    given = [helper.make_tensor_value_info(name, *values[name]) for name in chosen]
    none, never = build.constant("none", np.float32(0)), build.constant("never", np.float32(-1e9))
    states, unseen = "features", ""
    if not features:
        states = build.op(
            "Gather", "encoder.embed", build.weight("encoder.embed.weight", VOCABULARY, WIDTH), "input_ids"
        )
        meant = build.op("Cast", "encoder.mask", "encoder_attention_mask", to=TensorProto.BOOL)
        unseen = build.op(
            "Where", "encoder.mask", build.op("Unsqueeze", "encoder.mask", meant, build.axes(1, 2)), none, never
        )
    states = _attend(build, "encoder", states, states, unseen)
    h = build.op("Gather", "embed.tokens", build.weight("embed.tokens.weight", VOCABULARY, WIDTH), "ids")
    bias = _bias(build, none, never)
    made = [helper.make_tensor_value_info("logits", float_, ["batch", "tokens", VOCABULARY])]
    crossing = []
    for layer in range(layers):
        for side in "kv":
            shape = ["batch", HEADS, "past", SIZE]
            given.append(helper.make_tensor_value_info(f"past_{side}.{layer}", float_, shape))
            made.append(
                helper.make_tensor_value_info(f"present_{side}.{layer}", float_, [*shape[:2], "past + tokens", SIZE])
            )
            entries = ENTRIES if features else "entries"
            crossing.append(helper.make_tensor_value_info(f"cross_{side}.{layer}", float_, [*shape[:2], entries, SIZE]))
        h = _attend(build, f"layers.{layer}", h, h, bias, ("past", "present", layer))
        h = _attend(build, f"layers.{layer}.cross", h, states, unseen, ("", "cross", layer))
    head = build.weight("head.weight", WIDTH, VOCABULARY)
    build.nodes.append(helper.make_node("MatMul", [h, head], ["logits"], "head.MatMul"))
    graph = helper.make_graph(build.nodes, "encoder_decoder", given, [*made, *crossing], build.weights)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])


def _bias(build: Build, none: str, never: str) -> str:
    """What is added to the scores of a step's tokens: by distance and head, and nothing of later ones."""
    zero, one = build.constant("zero", 0), build.constant("one", 1)
    tokens = build.op("Squeeze", "count", build.op("Shape", "count", "ids", start=1, end=2), build.axes(0))
    past = build.op("Squeeze", "past", build.op("Shape", "past", "past_k.0", start=2, end=3), build.axes(0))
    steps = build.op("Unsqueeze", "bias", build.op("Range", "steps", zero, tokens, one), build.axes(1))
    entries = build.op("Range", "entries", zero, build.op("Add", "entries", past, tokens), one)
    keys = build.op("Unsqueeze", "bias", entries, build.axes(0))
    distance = build.op("Sub", "bias", build.op("Add", "bias", steps, past), keys)
    bucket = build.op("Min", "bias", build.op("Max", "bias", distance, zero), build.constant("last", BUCKETS - 1))
    rows = build.op("Gather", "bias", build.weight("bias.weight", BUCKETS, HEADS), bucket)
    by_head = build.op("Unsqueeze", "bias", build.op("Transpose", "bias", rows, perm=[2, 0, 1]), build.axes(0))
    later = build.op("Unsqueeze", "mask", build.op("Less", "mask", distance, zero), build.axes(0, 1))
    return build.op("Add", "mask", by_head, build.op("Where", "mask", later, never, none))


def _attend(build: Build, path: str, h: str, states: str, away: str, caches: tuple[str, str, int] | None = None) -> str:
    """Attention of `h` to `states`; `caches`: how the past of its keys and values is called, and what is kept of them, of which layer."""
    rows = {"q": h, "k": states, "v": states}
    heads = {
        side: build.heads(f"{path}.{side}", build.linear(f"{path}.{side}", row, WIDTH, WIDTH))
        for side, row in rows.items()
    }
    for side in "kv" if caches is not None else "":
        past, kept, layer = caches  # type: ignore[misc]
        ends = [f"{past}_{side}.{layer}", heads[side]] if past else [heads[side]]
        kind = {"axis": -2} if past else {}
        node = helper.make_node(
            "Concat" if past else "Identity", ends, [f"{kept}_{side}.{layer}"], f"{path}.{side}.kept", **kind
        )
        build.nodes.append(node)
        heads[side] = node.output[0]
    scores = build.op(
        "MatMul", f"{path}.scores", heads["q"], build.op("Transpose", f"{path}.scores", heads["k"], perm=[0, 1, 3, 2])
    )
    scores = build.op("Mul", f"{path}.scores", scores, build.constant("scale", np.float32(SIZE**-0.5)))
    scores = build.op("Add", f"{path}.scores", scores, away) if away else scores
    mixed = build.op("MatMul", f"{path}.scores", build.op("Softmax", f"{path}.scores", scores, axis=-1), heads["v"])
    turned = build.op("Transpose", f"{path}.scores", mixed, perm=[0, 2, 1, 3])
    joined = build.op("Reshape", f"{path}.scores", turned, build.constant("join", [0, 0, WIDTH]))
    return build.op("Add", path, h, build.linear(f"{path}.o", joined, WIDTH, WIDTH))


class Unsharded:
    """The model itself, a sequence at a time, with a past that grows; its encoder runs in each step."""

    def __init__(self, model: onnx.ModelProto) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        data = model.SerializeToString()
        self.session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        self.pasts = [one.name for one in self.session.get_inputs() if one.name.startswith("past_")]

    def tokens(self, given: Any, prompt: Sequence[int], count: int) -> list[int]:
        """The likeliest tokens behind a prompt, where the encoder is given this."""
        array = np.asarray(given)[None]
        encoded = {"features": array}
        if array.dtype.kind == "i":
            encoded = {"input_ids": array, "encoder_attention_mask": np.ones_like(array)}
        past = {name: np.zeros((1, HEADS, 0, SIZE), np.float32) for name in self.pasts}
        ids, found = np.asarray([prompt], np.int64), list[int]()
        while len(found) < count:
            logits, *rest = self.session.run(None, {"ids": ids, **encoded, **past})
            past = dict(zip(past, rest, strict=False))
            found.append(int(logits[0, -1].argmax()))
            ids = np.asarray([found[-1:]], np.int64)
        return found


def compiled(folder: Path, layout: str = "one rank", features: bool = False, keys: str = "encoder_length: 12") -> Path:
    onnx.save(encoder_decoder(features), folder / "model.onnx")
    (folder / "plan.yaml").write_text(f"{LAYOUTS[layout]}generate: {{{KEYS}{f', {keys}' if keys else ''}}}\n")
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    return folder / "build"


@pytest.mark.parametrize("layout", of_today([one for one in LAYOUTS if one != "tensor parallel"], 1))
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
        (encoder_decoder, "encoder_length: 12, cache: int8", "model.onnx has an encoder"),
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


@pytest.mark.parametrize(
    ("key", "value", "fact"),
    [
        ("length", 9, "the cache 'cross_k.0' has 12 entries; the encoder gives 9"),
        ("length", 9, "the encoder's input has the shape [12], and at most 9 entries"),
        (
            "shape",
            [9],
            "the encoder's input: the input 'input_ids' is tensor(int64), [1, 12]; it must be tensor(int64), [1, 9]",
        ),
        ("type", "tensor(int32)", "it must be tensor(int32), [1, 12]"),
        ("input", "odd", "the encoder's input: there is no input 'odd'"),
        ("count", "odd", "the encoder's count: there is no input 'odd'"),
        (
            "count",
            "ids",
            "the encoder's count: the input 'ids' is tensor(int64), [2, 1]; it must be tensor(int64), [2]",
        ),
        ("vocabulary", 65, "the encoder knows 65 tokens, and its table 'encoder.embed.weight' has 64 rows"),
        ("start", [64], "a decoder begins with 64, which is not a token; tokens are 0 to 63"),
    ],
)
def test_a_check_names_what_is_wrong_with_the_record_of_an_encoder(
    encoded: Path, tmp_path: Path, key: str, value: Any, fact: str
) -> None:
    shutil.copytree(encoded, tmp_path / "build")
    rewrite_raw(tmp_path / "build", lambda data: data["generation"]["encoder"].update({key: value}))
    assert fact in texts(tmp_path / "build")


def test_a_check_names_an_encoder_without_its_program_or_its_record(encoded: Path, tmp_path: Path) -> None:
    shutil.copytree(encoded, tmp_path / "build")
    rewrite_raw(tmp_path / "build", lambda data: data["programs"].pop("encode"))
    assert "there is no program 'encode', and the generation has an encoder" in texts(tmp_path / "build")
    shutil.copytree(encoded, tmp_path / "other")
    rewrite_raw(tmp_path / "other", lambda data: data["generation"].update(encoder=None))
    assert "there is a program 'encode', and the generation has no encoder" in texts(tmp_path / "other")
