"""A Llama of transformers written by hand with onnxruntime's fused ops, caches in place, as onnxruntime-genai's model builder writes one.

    input_ids [b, s], attention_mask [b, entries], past_key_values.0.key [b, kv, p, d], past_key_values.0.value, ..
        -> logits [b, s, v], present.0.key [b, kv, entries, d], present.0.value, ..

Query, key and value are one product, GroupQueryAttention rotates and attends, and each norm takes the sum before it. With its
`genai_config.json` the folder is a model of onnxruntime-genai.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

MODEL = "model.onnx"


def write(whole: Any, folder: Path, length: int) -> Path:
    """Writes a LlamaForCausalLM into a folder, with angles for so many positions; gives the model's path."""
    config, weights = whole.config, {name: value.detach().numpy() for name, value in whole.state_dict().items()}
    heads, kv, layers = config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers
    size = config.hidden_size // heads
    constants: dict[str, np.ndarray] = {"one": np.array([1], np.int64), "axis": np.array(1, np.int64)}
    constants["embed"] = weights["model.embed_tokens.weight"]
    angles = np.outer(np.arange(length), whole.model.rotary_emb.inv_freq.numpy().astype(np.float64))
    constants["cos"], constants["sin"] = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    norm = f"epsilon = {config.rms_norm_eps}"
    nodes = [
        "valid = ReduceSum <keepdims = 0> (attention_mask, one)",
        "last = Sub (valid, one)",
        "seqlens = Cast <to = 6> (last)",
        "shape = Shape (attention_mask)",
        "entries = Gather <axis = 0> (shape, axis)",
        "total = Cast <to = 6> (entries)",
        "h0 = Gather (embed, input_ids)",
        f"n0 = SimplifiedLayerNormalization <axis = -1, {norm}> (h0, norm0)",
    ]
    ends: tuple[list[str], list[str]] = ([], [])
    for n in range(layers):
        of = f"model.layers.{n}"
        constants[f"norm{n}"] = weights[f"{of}.input_layernorm.weight"]
        constants[f"after{n}"] = weights[f"{of}.post_attention_layernorm.weight"]
        constants[f"qkv{n}"] = np.concatenate([weights[f"{of}.self_attn.{one}_proj.weight"] for one in "qkv"]).T
        constants[f"out{n}"] = weights[f"{of}.self_attn.o_proj.weight"].T
        for one in ("gate", "up", "down"):
            constants[f"{one}{n}"] = weights[f"{of}.mlp.{one}_proj.weight"].T
        past, present = (
            ", ".join(f'"{way}.{n}.{side}"' for side in ("key", "value")) for way in ("past_key_values", "present")
        )
        for names, entries, found in ((past, "past", ends[0]), (present, "entries", ends[1])):
            found += [f"float[batch, {kv}, {entries}, {size}] {name}" for name in names.split(", ")]
        skip = f"com.microsoft.SkipSimplifiedLayerNormalization <{norm}>"
        nodes += [
            f"p{n} = MatMul (n{n}, qkv{n})",
            f"a{n}, {present} = com.microsoft.GroupQueryAttention <num_heads = {heads}, kv_num_heads = {kv}, do_rotary = 1> "
            f'(p{n}, "", "", {past}, seqlens, total, cos, sin)',
            f"o{n} = MatMul (a{n}, out{n})",
            f'm{n}, "", "", r{n} = {skip} (h{n}, o{n}, after{n})',
            f"g{n} = MatMul (m{n}, gate{n})",
            f"u{n} = MatMul (m{n}, up{n})",
            f"s{n} = Sigmoid (g{n})",
            f"w{n} = Mul (g{n}, s{n})",
            f"x{n} = Mul (w{n}, u{n})",
            f"d{n} = MatMul (x{n}, down{n})",
            f'n{n + 1}, "", "", h{n + 1} = {skip} (r{n}, d{n}, norm{n + 1})',
        ]
    constants[f"norm{layers}"] = weights["model.norm.weight"]
    constants["head"] = weights["lm_head.weight"].T
    nodes.append(f"logits = MatMul (n{layers}, head)")
    inputs = ["int64[batch, tokens] input_ids", "int64[batch, entries] attention_mask", *ends[0]]
    outputs = [f"float[batch, tokens, {config.vocab_size}] logits", *ends[1]]
    text = f"({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {' '.join(nodes)} }}"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> llama {text}')
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in constants.items()
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{MODEL}.data").unlink(missing_ok=True)
    onnx.save(proto, folder / MODEL, save_as_external_data=True, location=f"{MODEL}.data", size_threshold=4096)
    (folder / "genai_config.json").write_text(json.dumps(genai_config(config, length), indent=1))
    return folder / MODEL


def genai_config(config: Any, length: int) -> dict[str, Any]:
    """What onnxruntime-genai wants to know of the model: one thread, caches that are one buffer for past and present."""
    pairs = {side: f"past_key_values.%d.{side}" for side in ("key", "value")}
    made = {side: f"present.%d.{side}" for side in ("key", "value")}
    decoder = {
        "session_options": {"intra_op_num_threads": 1, "inter_op_num_threads": 1, "provider_options": []},
        "filename": MODEL,
        "head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            **{f"past_{side}_names": name for side, name in pairs.items()},
        },
        "outputs": {"logits": "logits", **{f"present_{side}_names": name for side, name in made.items()}},
    }
    return {
        "model": {
            "type": "llama",
            "vocab_size": config.vocab_size,
            "context_length": length,
            "bos_token_id": 1,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "decoder": decoder,
        },
        "search": {"max_length": length, "do_sample": False, "past_present_share_buffer": True},
    }
