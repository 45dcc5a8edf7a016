"""Tokens of llama.cpp behind a prompt, in turns; for an interpreter that has `xllamacpp` and `gguf`.

    python tests/benchmarks/generate_llama.py FOLDER PROMPT --threads 2    # a saved Llama, a JSON file with the prompt

Writes the weights as float32 into a GGUF file beside them. A turn is a request for so many tokens that goes on from those before, which
are in the cache. Says at its end which tokens there were.
"""

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from safetensors.numpy import load_file
from turns import answer, told

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


def write(folder: Path, path: Path, tensors: Iterable[tuple[str, Array]], four_bits: bool = False) -> Path:
    """Writes the weights of a saved LlamaForCausalLM to a GGUF file, in which the word of a token is its number.

    With `four_bits` all matrices are Q4_0.
    """
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
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0 if four_bits else gguf.LlamaFileType.ALL_F32)
    words = [f"{number};" for number in range(config["vocab_size"])]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))

    def add(name: str, array: Array) -> None:
        if not four_bits or array.ndim == 1:
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
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompt", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    tensors = load_file(options.folder / "model.safetensors").items()
    params.model.path = str(write(options.folder, options.folder / "model.gguf", tensors))
    params.n_ctx, params.n_parallel, params.warmup = 4096, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.verbosity = -1
    server = xllamacpp.Server(params)
    prompt, made = json.loads(options.prompt.read_text()), list[int]()

    def go_on(count: int) -> None:
        """So many tokens more."""
        given = {"prompt": [*prompt, *made], "n_predict": count, "cache_prompt": True}
        found = server.handle_completions({**given, "temperature": 0, "top_k": 1, "ignore_eos": True, "stream": False})
        made.extend(int(word) for word in found["choices"][0]["text"].split(";")[:-1])

    go_on(1)
    answer([])
    for count in told():
        begin, worked = time.perf_counter(), time.process_time()
        go_on(count)
        answer([time.perf_counter() - begin, time.process_time() - worked])
    print(json.dumps(made))


if __name__ == "__main__":
    main()
