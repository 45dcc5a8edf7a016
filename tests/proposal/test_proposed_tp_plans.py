"""`partc plan --tp` begins with the `tp_plan` of a model of `transformers`, as far as it holds and is no dearer than what is derived."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partc.compiler.emit.whole import write_exported
from partc.compiler.frontend import load
from partc.compiler.frontend.huggingface.settings import tp_plan
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.propose import propose
from partc.runtime import load_local
from rows import of_today

torch = pytest.importorskip("torch")
transformers: Any = pytest.importorskip(
    "transformers", "5.0", reason='needs transformers: pip install "partc[transformers]"'
)

LAYERS = 2
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
LAYER = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
MLP = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
EXPERTS = {"experts.MatMul": "colwise", "experts.MatMul_1": "rowwise"}  # of gate_up_proj and of down_proj
MODELS: dict[str, tuple[dict[str, Any], Mapping[str, str]]] = {
    "Llama": ({}, MLP),
    "Mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True}, EXPERTS),
}


def saved(kind: str, folder: Path, **more: Any) -> Path:
    """A folder of a small model with random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Source]:
    """The folder of the Llama and what it is loaded as, which is `exported.onnx` there, too: to export it takes longer than all else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = saved("Llama", tmp_path_factory.mktemp("llama") / "model", attention_bias=True)
        source = load(folder)
    write_exported(source, folder / "exported.onnx")
    return folder, source


def run_by(model: Path, source: Source, text: str, place: Path) -> tuple[Counter[str], np.ndarray, np.ndarray]:
    """What a step sends by op, and the logits of the ranks and of transformers."""
    report = compile_source(source, parse_plan(text, "plan.yaml"), place / "build")
    ids = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (3, 7))
    with load_local(report.out) as program:
        have = program({"input_ids": ids})["logits"]
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        want = whole(torch.from_numpy(ids), use_cache=False).logits.numpy()
    return Counter(event.op_type for event in report.program.events), np.asarray(have), want


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", of_today([*MODELS], 1))
def test_the_tp_plan_is_what_is_proposed(kind: str, tmp_path: Path, llama: tuple[Path, Source]) -> None:
    """Each line of the configuration stands in the plan and names its class; two AllReduce a layer and one for the embedding are sent."""
    more, ffn = MODELS[kind]
    folder, source = llama
    if kind != "Llama":
        folder = saved(kind, tmp_path / "model", **more)
        source = load(folder)
        write_exported(source, folder / "exported.onnx")
    text, missing = propose(source, "model", Degrees(tp=2))
    assert not missing
    styles = {rule.pattern: rule.style for rule in parse_plan(text, "plan.yaml").sharding}
    want = {f"model.layers.*.self_attn.{name}": style for name, style in LAYER.items()}
    want |= {f"model.layers.*.mlp.{name}": style for name, style in ffn.items()}
    assert styles == {**want, "model.embed_tokens": "rowwise", "lm_head": "colwise"}
    assert text.count(f"  # tp_plan of {kind}Config: each rank computes") == 2
    assert f"# tp_plan of {kind}ForCausalLM: each rank" in text
    assert f"#   lm_head: colwise_gather_output ({kind}ForCausalLM): taken as colwise, since" in text
    sent, have, logits = run_by(folder, source, text, tmp_path)
    assert sent == {"AllReduce": 2 * LAYERS + 1, "Exchange": 1}
    np.testing.assert_allclose(have, logits, rtol=1e-4, atol=1e-6)
    assert propose(load(folder / "exported.onnx"), "model", Degrees(tp=2))[0] == text


def test_what_does_not_hold_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One head for keys, an odd hidden layer, a style without a counterpart, a module that is not there; the rest is taken and is equal."""
    own = transformers.LlamaConfig.base_model_tp_plan
    more = {"layers.*.input_layernorm": "sequence_parallel", "layers.*.gone": "colwise", "norm": "replicate"}
    more |= {"layers.[": "colwise", "layers.*.post_attention_layernorm": "rowwise"}
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_tp_plan", own | more)
    folder = saved("Llama", tmp_path / "model", num_hidden_layers=1, num_key_value_heads=1, intermediate_size=111)
    source = load(folder)
    text, _ = propose(source, "model", Degrees(tp=2))
    told = text.partition("# Of the model's tp_plan not taken as it stands:\n")[2].partition("# Not sharded by tp")[0]
    reasons = dict(line.removeprefix("#   ").split(": ", 1) for line in told.splitlines())
    odd = "(LlamaConfig): dim 0 of 'model.layers.0.mlp.gate_proj.weight' (111) is not divisible by 2"
    assert {name.rpartition(".")[2]: why for name, why in reasons.items() if ".mlp." in name} == {
        name: f"{style} {odd}" for name, style in MLP.items()
    }
    assert reasons["model.layers.*.input_layernorm"] == "sequence_parallel (LlamaConfig): partc has no such style"
    nothing = "colwise (LlamaConfig): matches no module and no weight of the model"
    assert reasons["model.layers.*.gone"] == reasons["model.layers.["] == nothing
    no_dim = "rowwise (LlamaConfig): no product with a weight inside has such a dim"
    assert reasons["model.layers.*.post_attention_layernorm"] == no_dim
    assert "needs it whole" in reasons["model.layers.*.self_attn.k_proj"]
    assert reasons.keys() & {"model.norm", "model.layers.*.self_attn.q_proj", "model.embed_tokens"} == set()
    sent, have, logits = run_by(folder, source, text, tmp_path)
    assert sent["AllReduce"] == 1 + 1
    np.testing.assert_allclose(have, logits, rtol=1e-4, atol=1e-6)


def test_what_a_tp_plan_replicates_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: tuple[Path, Source]
) -> None:
    plan = {f"layers.*.self_attn.{name}": style for name, style in LAYER.items()} | {"layers.*.mlp": "replicate"}
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_tp_plan", plan)
    folder, source = llama[0], load(llama[0] / "exported.onnx")
    said = tp_plan(transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True))
    source = replace(source, declared=replace(source.declared, tp_plan=said))
    text, _ = propose(source, "model", Degrees(tp=2))
    assert "mlp" not in text.partition("sharding:")[2].partition("# outputs")[0]
    assert "the tp_plan of LlamaConfig says replicate of model.layers.*.mlp" in text
    sent, have, logits = run_by(folder, source, text, tmp_path)
    assert sent["AllReduce"] == LAYERS + 1
    np.testing.assert_allclose(have, logits, rtol=1e-4, atol=1e-6)


DEARER = """
import torch
from transformers import PreTrainedModel, PretrainedConfig
from partc.compiler import Input

class FfnConfig(PretrainedConfig):
    model_type = "ffn"
    base_model_tp_plan = {"up": "rowwise", "down": "colwise"}

class Ffn(PreTrainedModel):
    config_class = FfnConfig

    def __init__(self, config):
        super().__init__(config)
        self.up, self.down = torch.nn.Linear(4, 64), torch.nn.Linear(64, 6)
        self.post_init()

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

class Around(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Ffn(FfnConfig())

    def forward(self, x):
        return self.inner(x)

torch.manual_seed(0)
model = Around().eval()
inputs = {"x": Input([8, 4], "float32")}
"""


def test_the_cheaper_proposal_is_taken(tmp_path: Path) -> None:
    """This plan sums 64 columns up and gathers 6; what is derived sums 6. The model is inside of another module."""
    (tmp_path / "model.py").write_text(DEARER)
    source = load(tmp_path / "model.py")
    assert [(entry.pattern, entry.source) for entry in source.declared.tp_plan] == [
        ("inner.up", "FfnConfig"),
        ("inner.down", "FfnConfig"),
    ]
    text, _ = propose(source, "model.py", Degrees(tp=2))
    styles = {rule.pattern: rule.style for rule in parse_plan(text, "plan.yaml").sharding}
    assert styles == {"inner.up": "colwise", "inner.down": "rowwise"}
    summed, columns = 8 * 64 * 4, 8 * 6 * 4
    told = f"# The tp_plan of FfnConfig is not followed: it sends {summed + columns // 2} bytes to a rank, this plan {columns}, in a step"
    assert told in text
    assert "# tp_plan of" not in text
