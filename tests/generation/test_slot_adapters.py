"""Several adapters in one batch of a decoder: a sequence has the logits that its adapter gives it alone, whatever others run beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from adapter_files import write_adapter
from decoder_layouts import LAYOUTS
from decoders import WIDTH, decoder
from onnx import numpy_helper
from partc.compiler.pipeline import compile_model
from partc.compiler.plan.quantize import Blocks
from partc.compiler.quantize import _dequantized, _quantize
from partc.runtime import Request, load_local_generator
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check_artifact
from partc.runtime.errors import InputError
from partc.runtime.generation.request import Answer

MODULES = {f"layers.{k}.{name}": (WIDTH, WIDTH // 2 if name in "kv" else WIDTH) for k in range(2) for name in "qkvo"}
RANKS = {name: k + 1 for k, name in enumerate(["one", "two", "three", "four", "five", "six", "seven", "eight"])}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [60, 2, 33, 4]]


def write(folder: Path, flat: bool = False) -> dict[str, dict[str, np.ndarray]]:
    """The decoder, and eight adapters of different ranks and modules; what each adds."""
    onnx.save(decoder(fused=True, flat=flat), folder / "model.onnx")
    return {
        name: write_adapter(
            folder / name, MODULES, {module: rank for k, module in enumerate(MODULES) if (k + rank) % 3}, seed=rank
        )
        for name, rank in RANKS.items()
    }


def compiled(folder: Path, name: str, plan: str) -> Path:
    (folder / "plan.yaml").write_text(plan)
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / name)
    return folder / name


def answers(artifact: Path, requests: list[Request]) -> list[Answer]:
    with load_local_generator(artifact) as generator:
        return generator.run(requests)


def scores(answer: Answer) -> list[tuple[int, float]]:
    """The tokens of an answer with their logarithms, whose bits are those of the logits."""
    return [(token, one.logprob) for token, one in zip(answer.tokens, answer.scores, strict=True)]


@pytest.mark.parametrize(
    ("layout", "slots"),
    [
        ("one rank", "slots: 9"),
        ("tensor parallel", "slots: 9"),
        ("data parallel", "slots: 10"),
        ("tensor parallel stages", "slots: 10, groups: 2"),
    ],
)
def test_eight_adapters_in_one_batch(layout: str, slots: str, tmp_path: Path) -> None:
    """Each has the bits that it has alone, a request without one those of the model without adapters; one is compared with W + s B A."""
    more = write(tmp_path, flat=layout == "one rank")
    head = f"{LAYOUTS[layout]}generate: {{{slots}, length: 64, chunk: 8}}\n"
    entries = ", ".join(f"{name}: {name}" for name in RANKS)
    artifact = compiled(tmp_path, "build", f"{head}adapters: {{{entries}}}\n")
    if layout == "tensor parallel":
        assert "\n".join(map(str, check_artifact(artifact))) == ""
        plain = compiled(tmp_path, "plain", head)
        sent = [[one.op for one in open_artifact(path).manifest.collectives] for path in (artifact, plain)]
        assert sent[0] == sent[1]
    asked = [Request(PROMPTS[k % 3], max_tokens=5, logprobs=0, adapter=name) for k, name in enumerate(("", *RANKS))]
    with load_local_generator(artifact) as generator:
        together = [scores(one) for one in generator.run(asked)]
        assert [scores(answer) for one in asked for answer in generator.run([one])] == together
    assert len({str(one) for one in together}) == 9
    if layout == "tensor parallel":
        assert scores(answers(plain, [Request(PROMPTS[0], max_tokens=5, logprobs=0)])[0]) == together[0]
    if layout in ("one rank", "tensor parallel"):
        model = onnx.load(tmp_path / "model.onnx")
        for one in model.graph.initializer:
            added = more["five"].get(one.name.removesuffix(".weight"))
            if added is not None:
                whole = (numpy_helper.to_array(one) + added.T).astype(np.float32)
                one.CopyFrom(numpy_helper.from_array(whole, one.name))
        onnx.save(model, tmp_path / "model.onnx")
        merged = scores(answers(compiled(tmp_path, "merged", head), [Request(PROMPTS[2], max_tokens=5, logprobs=0)])[0])
        assert [token for token, _ in merged] == [token for token, _ in together[5]]
        np.testing.assert_allclose([one for _, one in merged], [one for _, one in together[5]], atol=1e-4)


def test_prompts_of_other_adapters_share_no_entries(tmp_path: Path) -> None:
    """One prompt under two adapters and none; the second one of each copies what its own kind has read."""
    write(tmp_path)
    artifact = compiled(
        tmp_path, "build", "ranks: 1\ngenerate: {slots: 2, length: 64, chunk: 4}\nadapters: {one: one, two: two}\n"
    )
    prompt = [*range(20, 39)]
    for name in ("", "one", "two"):
        whole = scores(answers(artifact, [Request(prompt, max_tokens=3, logprobs=0, adapter=name)])[0])
        others = [Request(prompt, max_tokens=3, logprobs=0, adapter=other) for other in ("one", "two", "", name)]
        assert scores(answers(artifact, others)[3]) == whole


def test_an_unknown_adapter_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    artifact = compiled(
        tmp_path, "build", "ranks: 1\ngenerate: {slots: 1, length: 64}\nadapters: {one: one, two: two}\n"
    )
    with load_local_generator(artifact) as generator, pytest.raises(InputError) as caught:
        generator.run([Request([1], adapter="three")])
    assert "there is no adapter 'three'\n  help: those of the artifact are one, two" in str(caught.value)


def test_a_server_has_each_adapter_as_a_model(tmp_path: Path) -> None:
    """Chosen by `model`, listed, and named in the answer; another name is not found."""
    from server_case import LocalServer

    write(tmp_path)
    artifact = compiled(
        tmp_path, "build", "ranks: 1\ngenerate: {slots: 3, length: 64}\nadapters: {one: one, two: two}\n"
    )
    names = ("", "one", "two")
    wanted = answers(artifact, [Request(PROMPTS[0], max_tokens=5, adapter=name) for name in names])
    with LocalServer(artifact) as server:
        _, models = server.get("/v1/models")
        assert [(one["id"], one.get("parent")) for one in models["data"]] == [
            ("model.onnx", None),
            ("one", "model.onnx"),
            ("two", "model.onnx"),
        ]
        for name, want in zip(names, wanted, strict=True):
            body = {"prompt": PROMPTS[0], "max_tokens": 5, "temperature": 0, "model": name or "model.onnx"}
            _, answer = server.post("/v1/completions", body)
            assert answer["model"] == (name or "model.onnx")
            assert answer["choices"][0]["token_ids"] == want.tokens
        status, refused = server.post("/v1/completions", {"prompt": [1], "model": "three"})
        assert (status, refused["error"]["param"]) == (404, "model")
        assert server.get("/v1/models/two")[1]["id"] == "two"


@pytest.mark.parametrize("layout", ["one rank", "tensor parallel"])
def test_a_base_of_four_bits(layout: str, tmp_path: Path) -> None:
    """The adapter stays in floats: its weights and those of the base, dequantized, give the same logits as products in float32."""
    more = write(tmp_path)["five"]
    head = f"{LAYOUTS[layout]}generate: {{slots: 2, length: 64, chunk: 8}}\n"
    quantize = 'quantize: {"layers.**": {bits: 4, block: 16, accuracy_level: 1}}\n'
    request = Request(PROMPTS[0], max_tokens=5, logprobs=0, adapter="five")
    have = answers(compiled(tmp_path, "build", f"{head}{quantize}adapters: {{five: five}}\n"), [request])[0]
    model = onnx.load(tmp_path / "model.onnx")
    for one in model.graph.initializer:
        module = one.name.removesuffix(".weight")
        if module.startswith("layers.") and len(one.dims) == 2:
            array = numpy_helper.to_array(one)
            packed, scales = _quantize(np.ascontiguousarray(array), Blocks(block=16))
            whole = _dequantized(packed, scales, 4).T + more.get(module, np.zeros(array.T.shape)).T
            one.CopyFrom(numpy_helper.from_array(whole.astype(np.float32), one.name))
    onnx.save(model, tmp_path / "model.onnx")
    want = answers(compiled(tmp_path, "merged", head), [Request(PROMPTS[0], max_tokens=5, logprobs=0)])[0]
    assert have.tokens == want.tokens
    np.testing.assert_allclose([one.logprob for one in have.scores], [one.logprob for one in want.scores], atol=1e-4)
