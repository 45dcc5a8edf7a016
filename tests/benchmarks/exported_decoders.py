"""A Llama of transformers with random weights, exported with its cache as flat inputs and outputs, as exporters write them.

    input_ids [b, s], past.0.key [b, kv, p, d], past.0.value, .. -> logits [b, s, v], present.0.key [b, kv, p + s, d], ..

The initializer is wide, so that two best logits are rarely close.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache


def exported(folder: Path, layers: int, width: int, vocabulary: int) -> Path:
    """The file of a Llama with heads of 64, two to a head of keys, at opset 23; written where it is not there yet."""
    path = folder / f"llama-{layers}-{width}-{vocabulary}.onnx"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
            vocab_size=vocabulary,
            tie_word_embeddings=False,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 128,
            max_position_embeddings=4096,
            initializer_range=0.06,
        )
        _export(transformers.AutoModelForCausalLM.from_config(config).eval(), path)
    return path


def _export(whole: Any, path: Path) -> None:
    """Writes a model with dynamic batch, tokens and past."""
    layers = whole.config.num_hidden_layers
    batch, tokens, past = (torch.export.Dim(one) for one in ("batch", "tokens", "past"))
    flat = [torch.randn(2, whole.config.num_key_value_heads, 5, whole.config.head_dim) for _ in range(2 * layers)]
    names = [f"{layer}.{side}" for layer in range(layers) for side in ("key", "value")]

    class Flat(torch.nn.Module):
        """The model with its cache as flat tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.model = whole

        def forward(self, *values: torch.Tensor) -> list[torch.Tensor]:
            cache = DynamicCache()
            for layer in range(layers):
                cache.update(values[1 + 2 * layer], values[2 + 2 * layer], layer)
            made = self.model(input_ids=values[0], past_key_values=cache, use_cache=True)
            return [made.logits, *(one for layer in cache.layers for one in (layer.keys, layer.values))]

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Flat(),
            (torch.randint(0, 99, (2, 3)), *flat),
            path,
            dynamo=True,
            opset_version=23,
            verbose=False,
            input_names=["input_ids", *(f"past.{one}" for one in names)],
            output_names=["logits", *(f"present.{one}" for one in names)],
            dynamic_shapes=(({0: batch, 1: tokens}, *({0: batch, 2: past} for _ in flat)),),
        )
