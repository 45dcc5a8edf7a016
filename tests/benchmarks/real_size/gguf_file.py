"""Writes the weights of a saved Llama as a GGUF file of four bits, for llama.cpp."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]
OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write(folder: Path, path: Path, tensors: Iterable[tuple[str, Array]]) -> None:
    """Writes `tensors` of the LlamaForCausalLM saved in `folder` to `path`: matrices are Q4_0, the word of a token is its number."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv, width = config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    words = [f"{number};" for number in range(config["vocab_size"])]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))

    def add(name: str, array: Array) -> None:
        if array.ndim == 1:
            return writer.add_tensor(name, np.ascontiguousarray(array))
        kind = gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)

    for name, array in tensors:
        own = name.removesuffix(".weight")
        layer, _, rest = own.removeprefix("model.layers.").partition(".")
        if own in WHOLE:
            add(f"{WHOLE[own]}.weight", array)
            continue
        if rest.endswith(("q_proj", "k_proj")):  # its rotation takes neighbours, that of transformers halves
            count = heads if rest.endswith("q_proj") else kv
            array = array.reshape(count, 2, -1, width).swapaxes(1, 2).reshape(array.shape)
        add(f"blk.{layer}.{OF_LAYER[rest]}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
