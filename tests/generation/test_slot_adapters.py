"""Several adapters in one batch of a decoder: a sequence has the logits that its adapter gives it alone, whatever others run beside it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from adapter_files import write_adapter
from decoder_layouts import LAYOUTS
from decoders import WIDTH, decoder
from onnx import numpy_helper
from partc.compiler.errors import CompileError
from partc.compiler.frontend.huggingface.adapter_folder import read_adapter
from partc.compiler.pipeline import compile_model
from partc.compiler.plan.precision import Blocks
from partc.compiler.quantize import _dequantized, _quantize
from partc.runtime import ContinuousBatch, Request, load_local_generator
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check_artifact
from partc.runtime.errors import InputError
from partc.runtime.generation.adapters import AdapterChange
from partc.runtime.generation.request import Answer
from rows import of_today
from safetensors.numpy import load_file, save_file

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
        ("tensor parallel", "slots: 9"),
        *of_today(
            [
                ("one rank", "slots: 9"),
                ("data parallel", "slots: 10"),
                ("tensor parallel stages", "slots: 10, groups: 2"),
            ],
            1,
        ),
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


def write_whole(folder: Path) -> None:
    """Writes an adapter with a weight in place of the model's."""
    write_adapter(folder, MODULES, {"layers.0.q": 2}, modules_to_save=["norm"])
    files = load_file(folder / "adapter_model.safetensors")
    save_file({**files, "norm.weight": np.ones(4, np.float32)}, folder / "adapter_model.safetensors")


def test_an_adapter_that_replaces_a_weight_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    write_whole(tmp_path / "whole")
    with pytest.raises(CompileError) as caught:
        compiled(tmp_path, "build", "ranks: 1\ngenerate: {slots: 2, length: 64}\nadapters: {one: one, two: whole}\n")
    assert "'two' replaces 'norm.weight'\n  sequences of a batch share the weights" in str(caught.value)


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


def change(folder: Path, name: str) -> AdapterChange:
    """The adapter of a folder as a server tells ranks of it."""
    scales = {module: added.scale for module, added in read_adapter(folder / name, name).products.items()}
    return AdapterChange(name, str(folder / name / "adapter_model.safetensors"), scales)


@pytest.mark.parametrize(
    ("layout", "slots"),
    of_today(
        [("one rank", "slots: 3"), ("tensor parallel", "slots: 3"), ("tensor parallel stages", "slots: 4, groups: 2")],
        1,
    ),
)
def test_adapters_that_join_and_leave_between_steps(layout: str, slots: str, tmp_path: Path) -> None:
    """They have the bits of adapters of the plan; a sequence keeps its own until it ends, and no prompt shares entries of another one."""
    write(tmp_path)
    head = f"{LAYOUTS[layout]}generate: {{{slots}, length: 64, chunk: 4"
    names = ["one", "two", "five"]
    entries = ", ".join(f"{name}: {name}" for name in names)
    static = compiled(tmp_path, "static", f"{head}, adapters: 3, adapter_rank: 8}}\nadapters: {{{entries}}}\n")
    prompt = [*range(20, 39)]

    def asked(name: str) -> Request:
        return Request(prompt, max_tokens=6, logprobs=0, adapter=name)

    wanted = dict(zip(["", *names], (scores(one) for one in answers(static, [*map(asked, ["", *names])])), strict=True))
    room = compiled(tmp_path, "room", f"{head}, adapters: 2, adapter_rank: 8}}\nadapters: {{one: one}}\n")
    assert "\n".join(map(str, check_artifact(room))) == ""
    with load_local_generator(room) as generator:
        batch, made = ContinuousBatch(generator), dict[int, Answer]()

        def run(steps: int = 1000) -> None:
            while steps and (not batch.idle or batch.slots.used):
                for token in batch.step() or ():
                    made.setdefault(token.request, Answer()).add(token)
                steps -= 1

        batch.change(change(tmp_path, "two"))
        run(1)
        with pytest.raises(InputError, match="no adapter 'five'"):
            batch.admit(0, asked("five"))
        for number, name in enumerate(["one", "two", ""]):
            batch.admit(number, asked(name))
        run(4)
        for one in (AdapterChange("two"), change(tmp_path, "five"), AdapterChange("seven"), change(tmp_path, "one")):
            batch.change(one)  # `two` leaves while it has a sequence: there is no place before that ends
        run()
        batch.change(change(tmp_path, "five"))
        run(1)
        for number, name in enumerate(["five", "one", "five", ""], 3):
            batch.admit(number, asked(name))
        run()
        refused = [fact.partition("'")[0] for fact in batch.changed]
        assert refused == ["", "", "no place of 2 is free", "there is no adapter ", "there is an adapter ", ""]
        for number, name in enumerate(["one", "two", "", "five", "one", "five", ""]):
            assert scores(made[number]) == wanted[name], name


def test_a_server_loads_adapters_under_load(tmp_path: Path) -> None:
    """Beside requests without one, whose tokens stay; what does not fit is refused, and nothing else is touched."""
    from server_case import LocalServer

    write(tmp_path)
    write_adapter(
        tmp_path / "other", {"layers.0.q": (WIDTH, 8), "layers.9.q": (4, 4)}, {"layers.0.q": 2, "layers.9.q": 2}
    )
    write_adapter(tmp_path / "wide", MODULES, {"layers.0.q": 9})
    write_whole(tmp_path / "whole")
    write_adapter(tmp_path / "counted", MODULES, {"layers.0.q": 2})
    files = load_file(tmp_path / "counted" / "adapter_model.safetensors")
    numbers = {name: array.astype(np.int32) for name, array in files.items()}
    save_file(numbers, tmp_path / "counted" / "adapter_model.safetensors")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 1}')
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"none")
    head = "ranks: 1\ngenerate: {slots: 3, length: 64"
    static = compiled(tmp_path, "static", f"{head}}}\nadapters: {{five: five}}\n")
    wanted = [
        one.tokens
        for one in answers(static, [Request(PROMPTS[0], max_tokens=40, adapter=name) for name in ("", "five")])
    ]
    room = compiled(tmp_path, "room", f"{head}, adapters: 1, adapter_rank: 8}}\n")
    load, unload, body = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", {"max_tokens": 40, "temperature": 0}
    with LocalServer(room, adapters=str(tmp_path)) as server, ThreadPoolExecutor(2) as threads:
        plain = [threads.submit(server.complete, PROMPTS[0], **body) for _ in range(6)]
        for _ in range(3):
            status, _, text = server.request("POST", load, b'{"lora_name": "a", "lora_path": "five"}')
            assert (status, text) == (200, b"Success: LoRA adapter 'a' added successfully.\n")
            assert [one["id"] for one in server.get("/v1/models")[1]["data"]] == ["model.onnx", "a"]
            assert server.complete(PROMPTS[0], model="a", **body)["token_ids"] == wanted[1]
            assert server.post(load, {"lora_name": "b", "lora_path": "one"})[1]["error"]["code"] == "no_place"
            assert server.post(load, {"lora_name": "a", "lora_path": "one"})[0] == 400
            assert server.request("POST", unload, b'{"lora_name": "a"}')[0] == 200
            assert server.post("/v1/completions", {"prompt": [1], "model": "a"})[0] == 404
        assert [one.result()["token_ids"] for one in plain] == [wanted[0]] * 6
        for path, status, fact in (
            ("other", 400, "'layers.0.q' is [32, 32], and the adapter adds [32, 8]; it is of another model"),
            ("wide", 400, "'layers.0.q' has rank 9, and there is room for 8"),
            ("broken", 400, "adapter_model.safetensors"),
            ("whole", 400, "the adapter replaces 'norm.weight', which all requests share"),
            ("counted", 400, "'layers.0.q' is int32"),
            ("nowhere", 400, "is not a folder"),
            ("../..", 403, "not inside"),
            ("/etc", 403, "not inside"),
        ):
            have, refused = server.post(load, {"lora_name": "c", "lora_path": path})
            assert (have, fact in refused["error"]["message"]) == (status, True), refused
            assert {*refused["error"]} == {"message", "type", "param", "code"}
        assert server.post(unload, {"lora_name": "c"})[0] == 404
        assert server.post(load, {"lora_name": "c"})[0] == 400
    with LocalServer(room) as server:
        assert server.post(load, {"lora_name": "a", "lora_path": "five"})[0] == 403
    with LocalServer(static, adapters=str(tmp_path)) as server:
        assert server.post(load, {"lora_name": "a", "lora_path": "five"})[1]["error"]["code"] == "unsupported"
        assert server.post(unload, {"lora_name": "five"})[1]["error"]["code"] == "unsupported"


def test_a_base_of_four_bits(tmp_path: Path) -> None:
    """The adapter stays in floats: its weights and those of the base, dequantized, give the same logits as products in float32."""
    more = write(tmp_path)["five"]
    head = f"{LAYOUTS['tensor parallel']}generate: {{slots: 2, length: 64, chunk: 8}}\n"
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
