"""Small decoders of transformers with random weights, exported with their cache as flat inputs and outputs, as exporters write them.

    python tests/benchmarks/exported_decoders.py FOLDER [--models llama,gpt2] [--opsets 18,23] [--forms plain,both]

    input_ids [b, s] (position_ids [b, s], attention_mask [b, p + s]), past.0.key [b, kv, p, d], past.0.value, ..
        -> logits [b, s, v], present.0.key [b, kv, p + s, d], present.0.value, ..

The initializer is wide, so that two best logits are rarely close.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from partc.cli.main import invoke
from transformers.cache_utils import DynamicCache

VOCABULARY = 212
MODELS = ("llama", "gpt2", "qwen2", "phi3", "mixtral", "gemma2")
WITH_ENCODER = ("t5", "whisper")
"""Models with an encoder before their decoder, which are exported as folders alone."""
FORMS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "rows": ("position_ids",),
    "mask": ("attention_mask",),
    "both": ("position_ids", "attention_mask"),
}
"""By form the inputs beside the tokens and the past."""
FOLDER = "folder"
"""The form of a folder that transformers has saved, as `partc export --cache` writes it; the opset is partc's."""


def model(name: str, layers: int = 2, width: int = 64, heads: int = 4, vocabulary: int = VOCABULARY) -> Any:
    """A model by its short name, in evaluation mode."""
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "vocab_size": vocabulary}
    special["tie_word_embeddings"] = False  # tied ones mostly say the last token again
    usual = {
        **special,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.06,
    }
    if name in WITH_ENCODER:
        torch.manual_seed(0)
        return _with_encoder(name, layers, width, heads, vocabulary).eval()
    settings: dict[str, Any] = {
        "llama": lambda: transformers.LlamaConfig(**usual),
        "gpt2": lambda: transformers.GPT2Config(
            **special, n_embd=width, n_layer=layers, n_head=heads, n_positions=4096, initializer_range=0.06
        ),
        "qwen2": lambda: transformers.Qwen2Config(**usual),
        "phi3": lambda: transformers.Phi3Config(**usual),
        "mixtral": lambda: transformers.MixtralConfig(**usual, num_local_experts=4, num_experts_per_tok=2),
        "gemma2": lambda: transformers.Gemma2Config(
            **usual, head_dim=width // heads, query_pre_attn_scalar=width // heads, sliding_window=8
        ),
    }
    torch.manual_seed(0)
    config = settings[name]()
    if name == "mixtral":
        config._experts_implementation = "batched_mm"
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def _with_encoder(name: str, layers: int, width: int, heads: int, vocabulary: int) -> Any:
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "vocab_size": vocabulary, "d_model": width}
    special["tie_word_embeddings"] = False
    if name == "t5":
        whole = transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                **special,
                d_kv=width // heads,
                d_ff=2 * width,
                num_layers=layers,
                num_heads=heads,
                decoder_start_token_id=0,
            )
        )
    else:
        sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": 2 * width}
        sides = {f"{side}_{key}": size for side in ("encoder", "decoder") for key, size in sizes.items()}
        positions = {"max_source_positions": 30, "max_target_positions": 448, "num_mel_bins": 8}
        whole = transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(
                **special, **sides, **positions, decoder_start_token_id=3, init_std=0.06, begin_suppress_tokens=None
            )
        )
    with torch.no_grad():  # else the last token alone says the next one
        for key, weight in whole.named_parameters():
            if weight.dim() > 1:
                scale = 3.0 if ".SelfAttention." in key or ".EncDecAttention." in key else 1.5
                weight.mul_(0.2 if key == "shared.weight" else scale)
    return whole


def exported(name: str, opset: int, form: str, folder: Path, **size: int) -> Path:
    """The file of a model in a form; written where it is not there yet."""
    path = folder / f"{name}-{opset}-{form}{''.join(f'-{key}{value}' for key, value in size.items())}.onnx"
    if form == FOLDER and not path.exists():
        model(name, **size).save_pretrained(folder / f"{name}-folder")
        invoke(["export", str(folder / f"{name}-folder"), "--cache", "-o", str(path)])
    elif not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        export(model(name, **size), path, opset, FORMS[form])
    return path


def export(whole: Any, path: Path, opset: int, extra: tuple[str, ...] = ()) -> None:
    """Writes a model with dynamic batch, tokens and past, and `extra` as inputs."""
    config = whole.config
    kv = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers, (batch, tokens, past) = (
        config.num_hidden_layers,
        (torch.export.Dim(one) for one in ("batch", "tokens", "past")),
    )
    given = [torch.randint(0, 99, (2, 3))]
    dims: list[Any] = [{0: batch, 1: tokens}]
    for one in extra:
        given.append(torch.arange(5, 8).repeat(2, 1) if one == "position_ids" else torch.ones(2, 8, dtype=torch.int64))
        dims.append({0: batch, 1: tokens if one == "position_ids" else torch.export.Dim("entries")})
    flat = [torch.randn(2, kv, 5, size) for _ in range(2 * layers)]
    dims += [{0: batch, 2: past} for _ in flat]
    names = [f"{layer}.{side}" for layer in range(layers) for side in ("key", "value")]

    class Flat(torch.nn.Module):
        """The model with its cache as flat tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.model = whole

        def forward(self, *values: torch.Tensor) -> list[torch.Tensor]:
            first = 1 + len(extra)
            cache = DynamicCache()
            for layer in range(layers):
                cache.update(values[first + 2 * layer], values[first + 2 * layer + 1], layer)
            more = dict(zip(extra, values[1:first], strict=True))
            made = self.model(input_ids=values[0], past_key_values=cache, use_cache=True, **more)
            return [made.logits, *(one for layer in cache.layers for one in (layer.keys, layer.values))]

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Flat(),
            (*given, *flat),
            path,
            dynamo=True,
            opset_version=opset,
            verbose=False,
            input_names=["input_ids", *extra, *(f"past.{one}" for one in names)],
            output_names=["logits", *(f"present.{one}" for one in names)],
            dynamic_shapes=(tuple(dims),),
        )


def main() -> None:
    """Writes the files, and says how long each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--opsets", default="18,23")
    parser.add_argument("--forms", default="plain,both")
    options = parser.parse_args()
    for form in options.forms.split(","):
        for opset in map(int, options.opsets.split(",")):
            for name in options.models.split(","):
                begin = time.perf_counter()
                try:
                    exported(name, opset, form, options.folder)
                    print(f"{name} {opset} {form} {time.perf_counter() - begin:.0f} s", flush=True)
                except Exception as error:  # what torch raises is of many kinds
                    print(f"{name} {opset} {form} {type(error).__name__}: {str(error)[:300]}", flush=True)


if __name__ == "__main__":
    main()
