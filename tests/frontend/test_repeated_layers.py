"""A folder of many equal layers is exported by three of them, or by three periods; layers that differ are exported whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from partc.compiler.directives.recorder import recording
from partc.compiler.frontend.huggingface import folder as folders
from partc.compiler.frontend.huggingface.folder import load_folder
from partc.compiler.frontend.huggingface.ports import usual_inputs
from partc.compiler.frontend.huggingface.repeated_layers import Stack, repeat, shortened, stack_of
from partc.compiler.frontend.inputs import DimNames

torch = pytest.importorskip("torch")
transformers: Any = pytest.importorskip(
    "transformers", "5.0", reason='needs transformers: pip install "partc[transformers]"'
)

from partc.compiler.frontend.torch.torch_module import export  # noqa: E402, reads torch

LAYERS = 6
LLAMA = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each export of a stack was repeated."""
    answers = list[bool]()

    def recorded(*arguments: Any) -> bool:
        answers.append(repeat(*arguments))
        return answers[-1]

    monkeypatch.setattr(folders, "repeat", recorded)
    return answers


def llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | settings))


def gemma3(**settings: Any) -> Any:
    """Layers with a sliding window and without one, in turns; the last period is not full."""
    torch.manual_seed(0)
    types = [("full" if layer % 2 else "sliding") + "_attention" for layer in range(9)]
    own = {"num_hidden_layers": 9, "layer_types": types, "_sliding_window_pattern": 2, "sliding_window": 8}
    config = transformers.Gemma3TextConfig(**LLAMA | {"head_dim": 8} | own | settings)
    return transformers.Gemma3ForCausalLM(config)


def gpt_oss() -> Any:
    torch.manual_seed(0)
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "num_hidden_layers": 8}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**LLAMA | own))


@pytest.mark.parametrize("module", [llama, gemma3])
def test_the_graph_is_that_of_all_layers(
    module: Any, tmp_path: Path, exported: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    module().save_pretrained(tmp_path)
    repeated = load_folder(tmp_path, keep=False).model
    stack = stack_of(module())
    assert stack is not None
    monkeypatch.setattr(folders, "stack_of", lambda module: None)
    whole = load_folder(tmp_path, keep=False).model
    texts = [
        [
            *[(value.name, str(value.shape)) for value in (*graph.inputs, *graph.outputs)],
            *[(name, value.const_value.numpy().tobytes()) for name, value in graph.initializers.items()],
            *[
                (
                    node.op_type,
                    node.name,
                    *[value and value.name for value in node.inputs],
                    *node.attributes.items(),
                    *((value.name, str(value.shape), value.dtype) for value in node.outputs),
                )
                for node in graph
            ],
        ]
        for graph in (repeated.graph, whole.graph)
    ]
    assert exported == [True]
    assert texts[0] == texts[1]
    scopes = [
        node.metadata_props["pkg.torch.onnx.name_scopes"]
        for node in repeated.graph
        if f".{stack.layers - 1}.mlp" in str(node.name)
    ]
    assert scopes
    assert all(f"'model.layers.{stack.layers - 1}'" in one for one in scopes)


@pytest.mark.parametrize("module", [llama, gpt_oss])
def test_a_decoder_with_its_cache_equals_torch(module: Any, tmp_path: Path, exported: list[bool]) -> None:
    decoder = module()
    decoder.save_pretrained(tmp_path)
    model = load_folder(tmp_path, cache=True, compare=True, keep=False).model
    layers = decoder.config.num_hidden_layers
    names = [f"present_{layer}_{side}" for layer in range(layers) for side in ("key", "value")]
    assert exported == [True]
    assert [value.name for value in model.graph.outputs] == ["logits", *names]


def test_layers_whose_nodes_differ_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of a layer depends on its number, which no setting of a module says."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward = LlamaDecoderLayer.forward

    def scaled(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(layer, *args, **kwargs) / (layer.self_attn.layer_idx + 1)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    module = llama()
    stack = stack_of(module)
    assert stack == Stack("model.layers", LAYERS)
    inputs = usual_inputs(module, None, "config.json")
    with recording(Path()) as recorder, shortened(module, stack):
        model = export(module, inputs, None, DimNames({}, set(), {}), [], "config.json", recorder)
    before = [node.name for node in model.graph]
    assert len(module.model.layers) == LAYERS
    assert not repeat(model, stack, [*inputs], [])
    assert [node.name for node in model.graph] == before


def test_layers_that_differ_are_no_stack() -> None:
    assert stack_of(llama()) == Stack("model.layers", LAYERS)
    assert stack_of(llama(num_hidden_layers=5)) is None
    assert stack_of(llama(eos_token_id=[1, 2])) == Stack("model.layers", LAYERS)
    assert stack_of(llama(pruned=[2, 4])) is None
    assert stack_of(llama(global_attention_interval=4)) is None

    assert stack_of(gemma3()) == Stack("model.layers", 9, 2)
    assert stack_of(gemma3(_sliding_window_pattern=4)) is None
    others = gemma3()
    others.model.layers[4].mlp.act_fn = torch.nn.ReLU()
    assert stack_of(others) is None

    def changed(change: Any) -> Any:
        module = llama()
        change(module.model.layers)
        return stack_of(module)

    assert changed(lambda layers: setattr(layers[4].self_attn, "scaling", 0.5)) is None
    assert changed(lambda layers: setattr(layers[4].mlp, "act_fn", torch.nn.ReLU())) is None
    assert changed(lambda layers: setattr(layers[4], "mlp", layers[3].mlp)) is None
    assert changed(lambda layers: setattr(layers[4].mlp, "up_proj", torch.nn.Linear(16, 24))) is None
    assert changed(lambda layers: layers[4].register_forward_hook(lambda *_: None)) is None
    several = llama()
    several.model.others = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(LAYERS))
    assert stack_of(several) is None
    listed = llama()
    listed.model.rates = [0.1 * layer for layer in range(LAYERS)]
    assert stack_of(listed) is None
