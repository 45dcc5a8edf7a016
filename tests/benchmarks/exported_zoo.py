"""Small models of Hugging Face's `transformers` with random weights, and the tensor-parallel plan of each.

Embeddings and heads are not tied: the exporter writes the transposed head as a weight of its own, and so they are not tied in the file.
A case has a module whose forward takes and gives tensors alone, inputs, the names of dims that may be dynamic, the rules that a
user would write, and how many AllReduce these must cost: two a layer and attention, as Megatron-LM counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

BATCH, SEQUENCE = {0: "batch"}, {0: "batch", 1: "seq"}
LAYERS = 2


@dataclass
class Case:
    """`arrives`: how inputs and outputs are spread beside the rules; `train`: the output that a cross entropy is taken of."""

    module: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    dynamic: dict[str, dict[int, str]]
    sharding: str
    ideal: int
    symbols: str = ""
    arrives: str = ""
    outputs: list[str] = field(default_factory=lambda: ["output"])
    trains: bool = True


class Tensors(torch.nn.Module):
    """A model of the library as a function of tensors."""

    def __init__(self, hf: torch.nn.Module, take: Callable[[Any], Any], **fixed: Any) -> None:
        super().__init__()
        self.hf, self.take, self.fixed = hf, take, fixed


class Text(Tensors):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.take(self.hf(input_ids=input_ids, attention_mask=attention_mask, **self.fixed))


class Image(Tensors):
    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.take(self.hf(pixel_values=pixel_values, **self.fixed))


class Translation(Tensors):
    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        return self.take(self.hf(input_ids=input_ids, decoder_input_ids=decoder_input_ids, **self.fixed))


class Pairs(Tensors):
    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, pixel_values: torch.Tensor
    ) -> torch.Tensor:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "pixel_values": pixel_values}
        return self.take(self.hf(**inputs, **self.fixed))


def _cache_argument(model: torch.nn.Module) -> str:
    """The name of the forward's argument for a cache, which transformers 5.24 renamed."""
    return next(name for name in ("past_key_values", "cache") if name in inspect.signature(model.forward).parameters)


class Cached(torch.nn.Module):
    """One step of a decoder with keys and values of all layers as inputs and outputs."""

    def __init__(self, hf: torch.nn.Module) -> None:
        super().__init__()
        self.hf = hf

    def forward(
        self, input_ids: torch.Tensor, k0: torch.Tensor, v0: torch.Tensor, k1: torch.Tensor, v1: torch.Tensor
    ) -> Any:
        cache = transformers.DynamicCache([(k0, v0), (k1, v1)])
        given = {_cache_argument(self.hf): cache}
        result = self.hf(input_ids=input_ids, use_cache=True, **given)
        made = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        return (result.logits, *made)


def _cached(hf: torch.nn.Module, heads: int, size: int, sharding: str, ideal: int, **more: Any) -> Case:
    """A step of a decoder of two layers whose cache comes and goes, cut by heads."""
    past = {name: torch.randn(2, heads, 10, size) for name in ("k0", "v0", "k1", "v1")}
    dynamic = {"input_ids": SEQUENCE, **{name: {0: "batch", 2: "past"} for name in past}}
    arrives = "dataset: {" + ", ".join(f"{name}: [1, 2, 1, 1]" for name in past) + '}\noutputs: {"present_*": cut}\n'
    outputs = ["logits", *(f"present_{name}" for name in past)]
    inputs = {"input_ids": _tokens(96, 2, 3), **past}
    return Case(Cached(hf), inputs, dynamic, sharding, ideal, arrives=arrives, outputs=outputs, trains=False, **more)


def _tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(1, vocabulary, shape, generator=torch.Generator().manual_seed(1))


def _text(hf: torch.nn.Module, take: Callable[[Any], Any], sharding: str, ideal: int, **more: Any) -> Case:
    ids = _tokens(96, 2, 12)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    inputs, dynamic = {"input_ids": ids, "attention_mask": mask}, {"input_ids": SEQUENCE, "attention_mask": SEQUENCE}
    return Case(Text(hf, take, **more.pop("fixed", {})), inputs, dynamic, sharding, ideal, **more)


_LLAMA = """\
  "**.[qkv]_proj": colwise
  "**.o_proj": rowwise
  "**.{gate,up}_proj": colwise
  "**.down_proj": rowwise
"""
_CAUSAL = {"fixed": {"use_cache": False}}


def _llama_config() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=112, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip


def llama() -> Case:
    """Llama with grouped queries: 8 heads over 4 of keys."""
    hf = transformers.LlamaForCausalLM(_llama_config())
    return _text(hf, lambda result: result.logits, _LLAMA, 2 * LAYERS, **_CAUSAL)


def llama_cache() -> Case:
    """A step of Llama with a cache."""
    return _cached(transformers.LlamaForCausalLM(_llama_config()), 4, 8, _LLAMA, 2 * LAYERS)


_GPT2 = '  "**.{c_attn,c_fc}": colwise\n  "**.c_proj": rowwise\n'


def gpt2() -> Case:
    """GPT-2: queries, keys and values in one weight."""
    config = transformers.GPT2Config(vocab_size=96, n_positions=64, n_embd=48, n_layer=LAYERS, n_head=6)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.tie_word_embeddings = False
    hf = transformers.GPT2LMHeadModel(config)
    return _text(hf, lambda result: result.logits, _GPT2, 2 * LAYERS, symbols="seq: {max: 64}", **_CAUSAL)


def gpt2_cache() -> Case:
    """A step of GPT-2 with a cache."""
    return _cached(gpt2().module.hf, 6, 8, _GPT2, 2 * LAYERS, symbols="seq: {max: 32}, past: {max: 32}")


_PHI3 = '  "**.{qkv_proj,gate_up_proj}": colwise\n  "**.{o_proj,down_proj}": rowwise\n'


def phi3() -> Case:
    """Phi-3: grouped queries with keys and values in one weight, gate and up in another."""
    config = transformers.Phi3Config(
        vocab_size=96, hidden_size=64, intermediate_size=112, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=64, original_max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    hf = transformers.Phi3ForCausalLM(config)
    return _text(hf, lambda result: result.logits, _PHI3, 2 * LAYERS, symbols="seq: {max: 64}", **_CAUSAL)


def phi3_cache() -> Case:
    """A step of Phi-3 with a cache."""
    return _cached(phi3().module.hf, 4, 8, _PHI3, 2 * LAYERS, symbols="seq: {max: 32}, past: {max: 32}")


def bert() -> Case:
    """BERT with learned positions."""
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=48, num_hidden_layers=LAYERS, num_attention_heads=6, intermediate_size=80,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        tie_word_embeddings=False,
    )  # fmt: skip
    sharding = '  "**.{query,key,value}": colwise\n  "**.output.dense": rowwise\n  "**.intermediate.dense": colwise\n'
    hf = transformers.BertForMaskedLM(config)
    return _text(hf, lambda result: result.logits, sharding, 2 * LAYERS, symbols="seq: {max: 64}")


def t5() -> Case:
    """T5: a relative bias by heads, an encoder and a decoder with attention to it. (torch 2.13 does not export its fused attention.)"""
    config = transformers.T5Config(
        vocab_size=96, d_model=48, d_kv=8, d_ff=80, num_layers=LAYERS, num_decoder_layers=LAYERS, num_heads=6,
        dropout_rate=0.0, decoder_start_token_id=0, attn_implementation="eager",
        tie_word_embeddings=False,
    )  # fmt: skip
    sharding = '  "**.[qkv]": colwise\n  "**.o": rowwise\n  "**.wi": colwise\n  "**.wo": rowwise\n'
    inputs = {"input_ids": _tokens(96, 2, 12), "decoder_input_ids": _tokens(96, 2, 7)}
    dynamic = {"input_ids": SEQUENCE, "decoder_input_ids": {0: "batch", 1: "target"}}
    hf = transformers.T5ForConditionalGeneration(config)
    hf.lm_head.weight = torch.nn.Parameter(hf.lm_head.weight.detach().clone())
    module = Translation(hf, lambda result: result.logits, use_cache=False)
    return Case(module, inputs, dynamic, sharding, 2 * LAYERS + 3 * LAYERS)


_CLIP = '  "**.[qkv]_proj": colwise\n  "**.out_proj": rowwise\n  "**.fc1": colwise\n  "**.fc2": rowwise\n'


def vit() -> Case:
    """ViT: patches by a convolution, a class token in front."""
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=LAYERS, num_attention_heads=6, intermediate_size=80, image_size=32, patch_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=10,
    )  # fmt: skip
    module = Image(transformers.ViTForImageClassification(config), lambda result: result.logits)
    sharding = (
        '  "**.{query,key,value,q_proj,k_proj,v_proj}": colwise\n  "**.{output.dense,o_proj}": rowwise\n'
        '  "**.{intermediate.dense,fc1}": colwise\n  "**.fc2": rowwise\n'
    )
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))}
    return Case(module, inputs, {"pixel_values": BATCH}, sharding, 2 * LAYERS)


def clip() -> Case:
    """CLIP: a tower of text and one of images."""
    both = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": LAYERS, "num_attention_heads": 6}
    config = transformers.CLIPConfig(
        text_config={**both, "vocab_size": 96, "max_position_embeddings": 64, "eos_token_id": 95},
        vision_config={**both, "image_size": 32, "patch_size": 8},
        projection_dim=40,
    )
    module = Pairs(transformers.CLIPModel(config), lambda result: result.logits_per_image)
    ids = _tokens(96, 3, 12)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    text = {0: "texts", 1: "seq"}
    dynamic = {"input_ids": text, "attention_mask": text, "pixel_values": BATCH}
    return Case(module, inputs, dynamic, _CLIP, 4 * LAYERS, symbols="seq: {max: 64}", trains=False)


_MIXTRAL = (
    '  "**.[qkv]_proj": colwise\n  "**.o_proj": rowwise\n'
    '  "**.experts.MatMul": colwise\n  "**.experts.MatMul_1": rowwise\n'
)


def mixtral() -> Case:
    """Mixtral: 4 experts of which a token takes 2; the experts' weights are cut in their inner dim."""
    config = transformers.MixtralConfig(
        vocab_size=96, hidden_size=64, intermediate_size=56, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=64, num_local_experts=4, num_experts_per_tok=2,
        experts_implementation="batched_mm",
    )  # fmt: skip
    hf = transformers.MixtralForCausalLM(config)
    return _text(hf, lambda result: result.logits, _MIXTRAL, 2 * LAYERS, trains=False, **_CAUSAL)


def mixtral_cache() -> Case:
    """A step of Mixtral with a cache."""
    return _cached(mixtral().module.hf, 4, 8, _MIXTRAL, 2 * LAYERS)


ZOO: Mapping[str, Callable[[], Case]] = {
    case.__name__: case
    for case in (llama, gpt2, bert, t5, vit, clip, mixtral, phi3, llama_cache, gpt2_cache, mixtral_cache, phi3_cache)
}

_REDUCED = dict.fromkeys(ZOO, 2 * LAYERS + 1) | {"t5": 5 * LAYERS + 2, "vit": 2 * LAYERS, "clip": 4 * LAYERS + 1}
"""Two a layer and one for the rows of a table (T5 looks its table up twice, and its decoder's layers have three; CLIP has two towers)."""
_GATHERED = {name: {} if name in ("vit", "clip") else {"Exchange": 1} for name in ZOO}
"""Logits of which each rank has a part; classifiers have too few classes."""
_IN_PARTS = {"t5", "clip"}
"""Models of two layers whose stages are even at dynamic sizes only if a layer is cut behind its attention, and two values cross.

T5's decoder begins before its encoder's output is read; the tower of text that CLIP cuts is read beside that of images.
"""


def proposed(name: str, title: str, dynamic: bool) -> dict[str, int]:
    """What a proposal must send in a step: of stages what one hands on, on each of its ranks, and the result to rank 0.

    Of CLIP's tower of images the next stage reads one token alone, in shards: its last sum is a ReduceScatter, in half the bytes.
    """
    tensor = {"AllReduce": _REDUCED[name], **_GATHERED[name]}
    crossing = 2 if dynamic and name in _IN_PARTS else 1
    if title == "tp 2":
        return tensor
    if title == "stages 2":
        return {"Send": crossing + 1}
    if (name, dynamic) == ("clip", False):
        return {"AllReduce": 4 * LAYERS, "ReduceScatter": 1, "Exchange": 1, "Send": 1}
    return {**tensor, "Send": 2 * crossing + (not _GATHERED[name])}
