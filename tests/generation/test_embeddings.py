"""Embeddings of prompts: the inputs of the head, pooled, whatever the layout, the company and the chunks."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from decoder_layouts import LAYOUTS, REPLICAS
from decoders import HEADS, SIZE, decoder
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_model
from partc.runtime import Request, load_local_generator
from partc.runtime.checker.check import check_artifact
from partc.runtime.errors import InputError
from rows import of_today

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [*range(1, 40)], [11, 12], [60, 2, 33, 4]]


def reference(pooling: str) -> list[np.ndarray]:
    """What the unsharded model's head reads of each prompt, pooled, of length 1."""
    model = decoder()
    hidden = next(node for node in model.graph.node if node.name == "head.MatMul").input[0]
    model.graph.output.append(onnx.helper.make_tensor_value_info(hidden, onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    past = {one.name: np.zeros((1, HEADS, 0, SIZE), np.float32) for one in session.get_inputs()[1:]}
    found = []
    for prompt in PROMPTS:
        (states,) = session.run([hidden], {"ids": np.array([prompt]), **past})
        whole = states[0].astype(float).mean(0) if pooling == "mean" else states[0, -1].astype(float)
        found.append(whole / np.linalg.norm(whole))
    return found


def compiled(folder: Path, head: str, **generate: object) -> Path:
    onnx.save(decoder(), folder / "model.onnx")
    options = ", ".join(f"{name}: {value}" for name, value in {"length": 64, "chunk": 8, **generate}.items())
    (folder / "plan.yaml").write_text(f"{head}generate: {{{options}}}\n")
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    return folder / "build"


@pytest.mark.parametrize(
    ("layout", "slots", "pooling"),
    [
        ("stages", "3", "last"),
        *of_today(
            [
                ("one rank", "1", "last"),
                ("replicas", "4", "mean"),
                ("tensor parallel stages", "4, groups: 2", "mean"),
            ],
            1,
        ),
    ],
)
def test_an_embedding_is_what_the_head_reads(layout: str, slots: str, pooling: str, tmp_path: Path) -> None:
    """Between requests that make tokens, whose tokens stay, and of the same bits alone."""
    build = compiled(tmp_path, {**LAYOUTS, "replicas": REPLICAS}[layout], slots=slots, embeddings=pooling)
    assert "\n".join(map(str, check_artifact(build))) == ""
    embeds = [Request(prompt, embeds=True) for prompt in PROMPTS]
    makes = [Request(prompt, max_tokens=6) for prompt in PROMPTS]
    with load_local_generator(build) as generator:
        alone = [generator.run([one])[0] for one in (*embeds, *makes)]
        mixed = generator.run([one for pair in zip(makes, embeds, strict=True) for one in pair])
    for want, one in zip(reference(pooling), alone[: len(embeds)], strict=True):
        assert (one.tokens, one.finish) == ([], "stop")
        assert one.embedding is not None
        np.testing.assert_allclose(one.embedding, want, atol=2e-6)
    assert [one.tokens for one in mixed[::2]] == [one.tokens for one in alone[len(embeds) :]]
    assert [one.embedding.tobytes() for one in mixed[1::2] if one.embedding is not None] == [
        one.embedding.tobytes() for one in alone[: len(embeds)] if one.embedding is not None
    ]


def test_what_gives_no_embedding_is_refused(tmp_path: Path) -> None:
    build = compiled(tmp_path, LAYOUTS["one rank"], embeddings="mean")
    with load_local_generator(build) as generator, pytest.raises(InputError) as caught:
        generator.run([Request([1], embeds=True, temperature=0.5), Request([1], embeds=True, max_tokens=3)])
    assert "request 0: it asks for an embedding and has temperature" in str(caught.value)
    assert "request 1: it asks for an embedding and has max_tokens" in str(caught.value)
    plain = compiled(tmp_path, LAYOUTS["one rank"])
    with load_local_generator(plain) as generator, pytest.raises(InputError, match="embeddings: mean"):
        generator.run([Request([1], embeds=True)])
    model = decoder()
    model.graph.node[-1].CopyFrom(onnx.helper.make_node("Relu", [model.graph.node[-1].input[0]], ["logits"]))
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text("ranks: 1\ngenerate: {length: 64, embeddings: mean}\n")
    with pytest.raises(CompileError, match="the model has no product with weights"):
        compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "other")


def test_a_server_gives_embeddings(tmp_path: Path) -> None:
    """Of several inputs, as numbers and as base64, shortened, counted; what it has no room for is refused."""
    from server_case import LocalServer, write_tokenizer

    build = compiled(tmp_path, LAYOUTS["one rank"], slots=2, embeddings="mean")
    want, path = reference("mean"), "/v1/embeddings"
    with LocalServer(build, tokenizer=write_tokenizer(tmp_path)) as server:
        status, found = server.post(path, {"input": PROMPTS, "model": "model.onnx", "user": "me"})
        assert status == 200
        assert found["usage"] == {"prompt_tokens": 57, "total_tokens": 57}
        assert [one["index"] for one in found["data"]] == [*range(5)]
        np.testing.assert_allclose([one["embedding"] for one in found["data"]], want, atol=2e-6)
        _, coded = server.post(path, {"input": PROMPTS, "encoding_format": "base64"})
        for one, same in zip(coded["data"], found["data"], strict=True):
            assert np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist() == same["embedding"]
        _, short = server.post(path, {"input": PROMPTS[0], "dimensions": 5})
        np.testing.assert_allclose(short["data"][0]["embedding"], want[0][:5] / np.linalg.norm(want[0][:5]), atol=2e-6)
        _, text = server.post(path, {"input": ["hd", "h"]})
        _, ids = server.post(path, {"input": [[7, 3], [7]]})
        assert [one["embedding"] for one in text["data"]] == [one["embedding"] for one in ids["data"]]
        for body, fact in (
            ({"input": []}, "input 0: its prompt has no token"),
            ({"input": [[1], []]}, "input 1: its prompt has no token"),
            ({"input": [[64]]}, "input 0: 64 is not a token"),
            ({"input": [*range(60)] * 2}, "a prompt of 120 tokens"),
            ({"input": [1], "dimensions": 33}, "'dimensions' is 33; the model has 32"),
            ({"input": [1], "encoding_format": "int8"}, "encoding_format"),
            ({"input": [[1]] * 2049}, "has 2,049 prompts; at most 2,048"),
        ):
            status, refused = server.post(path, body)
            assert (status, fact in refused["error"]["message"]) == (400, True), refused
        assert server.metrics()["partc_slots_used"] == 0
    plain = compiled(tmp_path, LAYOUTS["one rank"])
    with LocalServer(plain) as server:
        status, refused = server.post(path, {"input": [1]})
        assert (status, refused["error"]["code"]) == (400, "unsupported")
        assert "embeddings: mean" in refused["error"]["message"]
