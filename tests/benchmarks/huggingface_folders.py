"""From a local folder of a model of Hugging Face to ranks that run: the commands, their seconds, and what a step sends.

    python tests/benchmarks/huggingface_folders.py [--models llama,gpt2]

Needs torch and transformers; nothing is fetched, weights are random. Each model is saved with `save_pretrained` and taken through
`partc plan --tp 2`, compile, verify and run; then the same again from the file that `partc export` writes. Ideal are two AllReduce for
each layer (three for a decoder's with attention to an encoder), and one for each table that is looked up by ranks that have rows of it.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import transformers as hf
from through_commands import both_ways

LAYERS = 2
DECODER = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
ENCODER = {"hidden_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 6, "intermediate_size": 80}
T5 = {
    "vocab_size": 96,
    "d_model": 48,
    "d_kv": 8,
    "d_ff": 80,
    "num_layers": LAYERS,
    "num_heads": 6,
    "decoder_start_token_id": 0,
}
WHISPER = {
    "vocab_size": 96, "num_mel_bins": 16, "d_model": 48, "encoder_layers": LAYERS, "encoder_attention_heads": 6,
    "encoder_ffn_dim": 80, "decoder_layers": LAYERS, "decoder_attention_heads": 6, "decoder_ffn_dim": 80,
    "max_source_positions": 32, "max_target_positions": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
GPT2 = {
    "vocab_size": 96,
    "n_positions": 64,
    "n_embd": 48,
    "n_layer": LAYERS,
    "n_head": 6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ZOO: Mapping[str, Callable[[], hf.PreTrainedModel]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER, tie_word_embeddings=True)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**ENCODER, vocab_size=96, max_position_embeddings=64)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**ENCODER, image_size=32, patch_size=8, num_labels=10)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)),
    "whisper": lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**WHISPER)),
}
IDEAL = dict.fromkeys(ZOO, 2 * LAYERS + 1) | {"t5": 5 * LAYERS + 2, "vit": 2 * LAYERS, "whisper": 5 * LAYERS + 2}


def made(name: str, folder: Path) -> str:
    """The folder of a model with random weights."""
    torch.manual_seed(0)
    ZOO[name]().eval().save_pretrained(folder / name)
    return name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(ZOO))
    return both_ways(parser.parse_args().models.split(","), made, IDEAL)


if __name__ == "__main__":
    sys.exit(main())
