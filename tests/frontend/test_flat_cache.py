"""A folder or a model.py of a decoder of `transformers` is exported with its cache where the plan generates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from partc.cli.commands.export import command as export_command
from partc.cli.main import invoke
from partc.compiler import compile_model
from partc.compiler.errors import CompileError
from partc.compiler.frontend import load
from partc.compiler.frontend.huggingface.decoding import decoding
from partc.compiler.frontend.huggingface.flat_cache import flatten_cache
from partc.compiler.frontend.huggingface.rotary import longest
from partc.compiler.ir.declared import WINDOW
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.generation import Generation
from partc.compiler.proposal.propose import propose
from partc.runtime import Request, load_local_generator
from partc.runtime.artifact.manifest import open_artifact

torch = pytest.importorskip("torch")
transformers: Any = pytest.importorskip(
    "transformers", "5.0", reason='needs transformers: pip install "partc[transformers]"'
)

PLAN = "ranks: 1\ngenerate: {slots: 2, length: 16, chunk: 4}\n"
PROMPTS = ([3, 1, 4, 1, 5, 9, 2], [6, 5], [8])
COUNT = 6
SMALL = {
    "vocab_size": 12,
    "hidden_size": 32,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=12, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16, eos_token_id=None,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.3)  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def exported_once() -> Iterator[None]:
    """torch exports the model once: a folder that is compiled and `partc export --cache` ask it for the same, for four seconds each."""
    export, known = torch.onnx.export, {}

    def remembered(module: Any, **how: Any) -> Any:
        shapes = {name: tuple(tensor.shape) for name, tensor in how["kwargs"].items()}
        key = repr((type(module), shapes, how["dynamic_shapes"], how["opset_version"]))
        if key not in known:
            known[key] = export(module, **how)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", remembered)
        yield


def test_a_folder_generates_as_transformers_does(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    compile_model(llama, tmp_path / "plan.yaml", tmp_path / "build")
    for program in ("decode", "prefill"):
        kinds = [node.op_type for node in open_artifact(tmp_path / "build", program=program).model(0).graph.node]
        assert kinds.count("GroupQueryAttention") == 2
    with load_local_generator(tmp_path / "build", threads=1) as generator:
        made = [one.tokens for one in generator.run([Request(prompt, max_tokens=COUNT) for prompt in PROMPTS])]
    whole = transformers.LlamaForCausalLM.from_pretrained(llama, local_files_only=True)
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    wanted = [whole.generate(one, max_new_tokens=COUNT, do_sample=False)[0, one.shape[1] :].tolist() for one in ids]
    assert made == wanted


GPT2 = {"vocab_size": 12, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.3}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_caches_make_the_tokens_of_transformers(
    name: str, ranks: int, llama: Path, tmp_path: Path
) -> None:
    """A prompt of seven tokens has entries on all ranks; heads of keys are fewer than those of queries in one of the two."""
    folder, kind = llama, transformers.LlamaForCausalLM
    if name == "gpt2":
        torch.manual_seed(0)
        folder, kind = tmp_path / "gpt2", transformers.GPT2LMHeadModel
        kind(transformers.GPT2Config(**GPT2)).save_pretrained(folder)
    plan = (
        f"ranks: {ranks}\nmesh: {{cp: {ranks}}}\ncontext: {{axis: cp}}\ngenerate: {{slots: 2, length: 16, chunk: 2}}\n"
    )
    (tmp_path / "plan.yaml").write_text(plan)
    compile_model(folder, tmp_path / "plan.yaml", tmp_path / "build")
    with load_local_generator(tmp_path / "build", threads=1) as generator:
        made = [one.tokens for one in generator.run([Request(prompt, max_tokens=COUNT) for prompt in PROMPTS])]
    whole, wanted = kind.from_pretrained(folder, local_files_only=True), list[list[int]]()
    for prompt in PROMPTS:
        tokens = [*prompt]
        for _ in range(COUNT):
            tokens.append(int(whole(torch.tensor([tokens])).logits[0, -1].argmax()))
        wanted.append(tokens[len(prompt) :])
    assert made == wanted


@pytest.fixture(scope="module")
def exported(llama: Path) -> Path:
    path = llama.with_suffix(".onnx")
    result = CliRunner().invoke(export_command, [str(llama), "--cache", "-o", str(path)])
    assert result.exit_code == 0, result.output
    return path


def test_an_export_with_its_cache_has_past_and_present(exported: Path) -> None:
    graph = load(exported).model.graph
    names = [f"{layer}_{side}" for layer in range(2) for side in ("key", "value")]
    assert [value.name for value in graph.inputs] == ["input_ids", "position_ids", *(f"past_{name}" for name in names)]
    assert [value.name for value in graph.outputs] == ["logits", *(f"present_{name}" for name in names)]
    assert {str(value.shape) for value in graph.inputs[2:]} == {"[batch,2,past,16]"}
    assert "model.layers.1.self_attn.k_proj.weight" in graph.initializers


def test_an_export_is_quantized_by_its_plan_and_sharded(exported: Path, tmp_path: Path) -> None:
    made, weights = [], []
    for tp, stages in ((1, 1), (2, 1), (2, 2)):
        plan, build = tmp_path / f"{tp}_{stages}.yaml", tmp_path / f"{tp}_{stages}"
        degrees = ["--tp", str(tp), "--stages", str(stages), "--generate", "32", "--slots", "2", "--quantize", "4"]
        assert invoke(["plan", str(exported), *degrees, "-o", str(plan)]) == 0
        text = plan.read_text().replace("generate: {", "generate: {chunk: 4, ", 1).replace(", chunk: 32", "")
        plan.write_text(text)
        compile_model(exported, plan, build)
        graph = open_artifact(build).model(0).graph
        linears = [one for one in graph.initializer if "layers" in one.name and ".4bits." in one.name]
        weights.append(sum(math.prod(one.dims) for one in linears))
        assert sum(node.op_type == "MatMulNBits" for node in graph.node) == (15 if stages == 1 else 7)
        with load_local_generator(build, threads=1) as generator:
            made.append(
                [one.tokens for one in generator.run([Request(prompt, max_tokens=COUNT) for prompt in PROMPTS])]
            )
    assert made == [made[0]] * len(made)
    assert weights[1] * 2 == weights[0]


def test_a_model_without_such_a_cache_is_refused(tmp_path: Path) -> None:
    text = "import transformers\nmodel = transformers.BertModel(transformers.BertConfig(hidden_size=12, num_hidden_layers=1))\n"
    (tmp_path / "model.py").write_text(text)
    (tmp_path / "plan.yaml").write_text(PLAN)
    with pytest.raises(CompileError, match=r"model.py:2: BertModel is not a model that makes tokens"):
        compile_model(tmp_path / "model.py", tmp_path / "plan.yaml", tmp_path / "build")


def test_a_forward_without_a_cache_and_one_that_decides_by_numbers_are_told_apart() -> None:
    with torch.device("meta"):
        gpt = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(n_embd=16, n_layer=1, n_head=2))
        xlm = transformers.XLMWithLMHeadModel(transformers.XLMConfig(emb_dim=16, n_layers=1, n_heads=2))
    with pytest.raises(CompileError, match="OpenAIGPTLMHeadModel keeps no keys and values: its forward takes no cache"):
        flatten_cache(gpt, "gpt")
    with pytest.raises(
        CompileError, match=r"decides by numbers, and an export knows shapes: `.*item\(\).*` \(modeling_xlm"
    ):
        flatten_cache(xlm, "xlm")


def test_fused_attention_over_an_encoder_has_a_row_of_its_mask_for_each_token() -> None:
    """onnxruntime's Attention takes no row for all of them; and no number of a mask is there where weights have none."""
    config = transformers.BartConfig(
        vocab_size=12, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=16)  # fmt: skip
    with torch.device("meta"):
        _, names = flatten_cache(transformers.BartForConditionalGeneration(config), "bart")
    assert names == ["logits", "present_0_key", "present_0_value", "cross_0_key", "cross_0_value"]
    whole = transformers.BartForConditionalGeneration(config).eval()
    ids, mask, targets = (
        torch.tensor([[3, 1, 4], [5, 9, 0]]),
        torch.tensor([[1, 1, 1], [1, 1, 0]]),
        torch.tensor([[2, 7], [2, 6]]),
    )
    wanted = whole(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
    flatten_cache(whole, "bart")
    shapes = []
    for part in (whole.get_encoder(), whole.get_decoder()):
        part.register_forward_pre_hook(
            lambda _, __, given: shapes.append([*given.get("encoder_attention_mask", given["attention_mask"]).shape]),
            with_kwargs=True,
        )
    none = torch.zeros(2, 2, 0, 8)
    step = {"encoder_attention_mask": mask, "decoder_input_ids": targets, "past_0_key": none, "past_0_value": none}
    assert torch.allclose(whole(input_ids=ids, **step)["logits"], wanted, atol=1e-5)
    assert shapes == [[2, 1, 3, 3], [2, 1, 2, 3]]


def test_positions_are_those_of_each_slot_and_ends_those_of_the_model(tmp_path: Path) -> None:
    """Interleaved positions have one row for all sequences where a forward counts them itself."""
    torch.manual_seed(0)
    config = transformers.Glm4Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=32, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=None)  # fmt: skip
    whole = transformers.Glm4ForCausalLM(config).eval()
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]

    def tokens() -> list[list[int]]:
        every = [whole.generate(one, max_new_tokens=COUNT, do_sample=False, pad_token_id=0) for one in ids]
        return [one[0, given.shape[1] :].tolist() for one, given in zip(every, ids, strict=True)]

    ends = tokens()[0][3]
    whole.generation_config.eos_token_id = [ends, 95, 96]
    said = {
        "repetition_penalty": 1.3, "suppress_tokens": [tokens()[1][1], 96], "begin_suppress_tokens": [tokens()[0][0]],
        "forced_eos_token_id": 7, "num_beams": 2, "top_k": 50,
    }  # fmt: skip
    whole.generation_config.update(**said)
    whole.save_pretrained(tmp_path / "model")
    whole.generation_config.update(**{**said, "suppress_tokens": said["suppress_tokens"][:1], "num_beams": 1})
    with_settings = tokens()
    whole.generation_config.update(**dict.fromkeys(said))
    assert all(one != other for one, other in zip(with_settings, tokens(), strict=True))
    options = {"repetition_penalty": 1.3, "suppress": said["suppress_tokens"][:1],
               "suppress_first": said["begin_suppress_tokens"], "forced_last": 7}  # fmt: skip
    source = load(tmp_path / "model", cache=True)
    assert source.declared.decoding.stop == (ends, 95)
    text, _ = propose(source, "model", Degrees(), generation=Generation.over(Degrees(), 16, 2))
    assert f"stop: [{ends}, 95], defaults: {{repetition_penalty: 1.3, suppress: {options['suppress']}, " in text
    for plan, stop in (("", [ends, 95]), (", stop: []", [])):
        (tmp_path / "plan.yaml").write_text(PLAN.replace("}", f"{plan}}}"))
        report = compile_model(tmp_path / "model", tmp_path / "plan.yaml", tmp_path / "build")
        assert report.manifest.generation is not None
        assert report.manifest.generation.stop == stop
        assert report.manifest.generation.defaults.options == options
        assert any("num_beams: 2: tokens are made without" in warning for warning in report.warnings)
        assert any("has repetition_penalty: 1.3, suppress: [" in warning for warning in report.warnings)
        whole.generation_config.eos_token_id = stop or None
        with load_local_generator(tmp_path / "build", threads=1) as generator:
            assert [one.tokens for one in generator.run([Request(p, max_tokens=COUNT) for p in PROMPTS])] == tokens()
            found = generator.run([Request(p, max_tokens=COUNT, **options) for p in PROMPTS])
        if stop:
            assert [one.tokens for one in found] == with_settings


def test_positions_that_change_with_the_length_bound_it(tmp_path: Path) -> None:
    config = transformers.Phi3Config(
        vocab_size=12, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, original_max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
                         "short_factor": [1.0] * 8, "long_factor": [4.0] * 8})  # fmt: skip
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path / "phi3")
    whole = transformers.Phi3ForCausalLM(config)
    assert longest(whole) == (16, "longrope")
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    assert longest(transformers.LlamaModel(transformers.LlamaConfig(**SMALL, **dynamic))) == (24, "dynamic")
    with torch.device("meta"):  # where no number decides about frequencies
        inputs, _ = flatten_cache(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **dynamic)), "llama")
    assert "past_0_key" in inputs
    assert longest(transformers.LlamaModel(transformers.LlamaConfig(**SMALL))) is None
    with torch.device("meta"):  # Moshi's cache has a window, its mask has none; Mistral's mask has it
        moshi = transformers.MoshiForCausalLM(transformers.MoshiConfig(**SMALL, ffn_dim=48, sliding_window=8))
        mistral = transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=8))
    assert [(one.longest, one.positions) for one in map(decoding, (moshi, mistral))] == [(8, WINDOW), (0, "")]
    text = "import transformers\ntokens = Symbol(max=20)\ninputs = {'input_ids': Input(['batch', tokens], 'int64')}\n"
    made = f"transformers.Phi3ForCausalLM.from_pretrained({str(tmp_path / 'phi3')!r})"
    text = f"from partc.compiler import Input, Symbol\n{text}model = {made}\n"
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(CompileError, match=r"up to 20 tokens, and beyond 16 the frequencies of longrope"):
        load(tmp_path / "model.py")


def test_states_are_replaced_next_to_caches_that_grow(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        layer_types=["conv", "full_attention"], max_position_embeddings=32, initializer_range=0.3,
        pad_token_id=0, bos_token_id=1, eos_token_id=None)  # fmt: skip
    whole = transformers.Lfm2ForCausalLM(config).eval()
    whole.save_pretrained(tmp_path / "model")
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    wanted = [whole.generate(one, max_new_tokens=COUNT, do_sample=False)[0, one.shape[1] :].tolist() for one in ids]
    source = load(tmp_path / "model", cache=True)
    names = [value.name for value in source.model.graph.inputs]
    assert names == ["input_ids", "position_ids", "past_0_conv", "past_1_key", "past_1_value"]
    text, _ = propose(source, "model", Degrees(), generation=Generation.over(Degrees(), 16, 2))
    assert "chunk: 1}    # the model keeps states: prompts are read a token a step" in text
    (tmp_path / "plan.yaml").write_text(text)
    report = compile_model(tmp_path / "model", tmp_path / "plan.yaml", tmp_path / "build")
    assert report.manifest.generation is not None
    assert report.manifest.generation.states == ["past_0_conv"]
    with load_local_generator(tmp_path / "build", threads=1) as generator:
        made = [one.tokens for one in generator.run([Request(prompt, max_tokens=COUNT) for prompt in PROMPTS])]
    assert made == wanted


def test_states_of_another_kind_are_named(tmp_path: Path) -> None:
    config = transformers.RwkvConfig(vocab_size=16, hidden_size=8, num_hidden_layers=2, attention_hidden_size=8)
    transformers.RwkvForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(CompileError, match="RwkvForCausalLM keeps states of a kind of its own") as caught:
        load(tmp_path, cache=True)
    assert "leave out 'generate'" in str(caught.value)
