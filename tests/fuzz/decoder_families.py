"""Decoders of `transformers`, one of each family, tiny and random: their tokens against `model.generate`.

    python tests/fuzz/decoder_families.py [--only Glm,Cohere2] [--layouts "1 slot,tp 2"]

Each is saved, exported once with its cache, planned and compiled for each layout, and continues prompts of 1, 5 and 23 tokens by 24.
A row says of each layout `equal`, `refused` with the text, or `DIFFERS`; the exit code is 1 if any differs or fails otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ["TQDM_DISABLE"] = "1"

import torch
import transformers
from partc.compiler import compile_model
from partc.compiler.errors import CompileError
from partc.compiler.frontend import load
from partc.compiler.frontend.exported import write_declared
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.torch.torch_module import quiet
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.generation import Generation
from partc.compiler.proposal.propose import propose
from partc.runtime import Request, load_local_generator

PROMPTS = ([7], [5, 9, 77, 3, 21], [(11 * k * k + 5) % 96 for k in range(23)])
NEW, LENGTH, CHUNK = 24, 64, 16
LAYOUTS: Mapping[str, tuple[Degrees, int]] = {
    "1 slot": (Degrees(), 1),
    "2 slots": (Degrees(), 2),
    "tp 2": (Degrees(tp=2), 2),
    "2 stages": (Degrees(stages=2), 2),
}
ABSENT = object()
"""Of a setting that a family has no field for."""
COMMON = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.15,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 96}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Apertus": ("ForCausalLM", {}),
    "Arcee": ("ForCausalLM", {}),
    "Bloom": ("ForCausalLM", {"n_head": 4, "n_layer": 2}),
    "CodeGen": ("ForCausalLM", {**GPT, "rotary_dim": 8}),
    "Cohere": ("ForCausalLM", {}),
    "Cohere2": ("ForCausalLM", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "Cohere2Moe": ("ForCausalLM", {**EXPERTS, "sliding_window": 8}),
    "Ernie4_5": ("ForCausalLM", {}),
    "Ernie4_5_Moe": ("ForCausalLM", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
    "Falcon": ("ForCausalLM", {"head_dim": ABSENT, "multi_query": True, "new_decoder_architecture": False, "alibi": False}),
    "Gemma": ("ForCausalLM", {}),
    "Gemma2": ("ForCausalLM", {"sliding_window": 8}),
    "Gemma3": ("ForCausalLM", {"sliding_window": 8}),
    "Glm": ("ForCausalLM", {}),
    "Glm4": ("ForCausalLM", {}),
    "GPT2": ("LMHeadModel", GPT),
    "GPTBigCode": ("ForCausalLM", {**GPT, "multi_query": True}),
    "GPTJ": ("ForCausalLM", {**GPT, "rotary_dim": 8}),
    "GPTNeo": ("ForCausalLM", {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4, "window_size": 8}),
    "GPTNeoX": ("ForCausalLM", {}),
    "Granite": ("ForCausalLM", {}),
    "Helium": ("ForCausalLM", {}),
    "Llama": ("ForCausalLM", {}),
    "Mistral": ("ForCausalLM", {"sliding_window": 8}),
    "Mixtral": ("ForCausalLM", EXPERTS),
    "ModernBertDecoder": ("ForCausalLM", {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2, "eos_token_id": 2}),
    "Mpt": ("ForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 128}),
    "Nemotron": ("ForCausalLM", {}),
    "Olmo2": ("ForCausalLM", {}),
    "OPT": ("ForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "Persimmon": ("ForCausalLM", {}),
    "Phi": ("ForCausalLM", {}),
    "Phi3": ("ForCausalLM", {}),
    "Qwen2": ("ForCausalLM", {}),
    "Qwen3": ("ForCausalLM", {}),
    "Qwen3Moe": ("ForCausalLM", EXPERTS),
    "StableLm": ("ForCausalLM", {}),
    "Starcoder2": ("ForCausalLM", {}),
    "XGLM": ("ForCausalLM", {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4}),
}  # fmt: skip
VARIANTS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "Falcon, grouped": ("Falcon", "ForCausalLM", {"head_dim": ABSENT, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "Falcon, alibi": ("Falcon", "ForCausalLM", {"head_dim": ABSENT, "multi_query": False, "alibi": True}),
    "Llama, dynamic": ("Llama", "ForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "Llama, yarn": ("Llama", "ForCausalLM", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}),
    "Phi3, longrope": ("Phi3", "ForCausalLM", {"original_max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}}),
}  # fmt: skip


def build(title: str) -> Any:
    """The model of a family with its random weights."""
    family, head, special = VARIANTS[title] if title in VARIANTS else (title, *FAMILIES[title])
    torch.manual_seed(0)
    with quiet():
        settings = {name: value for name, value in {**COMMON, **special}.items() if value is not ABSENT}
        config = getattr(transformers, f"{family}Config")(**settings)
        model = getattr(transformers, f"{family}{head}")(config).eval()
    model.generation_config.eos_token_id = None
    return model


def tokens_of_transformers(model: Any) -> list[list[int]]:
    """The likeliest tokens after each prompt."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with quiet(), torch.no_grad():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        found.append(made[0, len(prompt) :].tolist())
    return found


def rows(title: str, layouts: list[str], folder: Path) -> Iterator[tuple[str, str]]:
    """By layout the result."""
    model = build(title)
    wanted = tokens_of_transformers(model)
    model.save_pretrained(folder / "model")
    try:
        source = load(folder / "model", cache=True)
    except CompileError as error:
        yield from ((layout, _refusal(error)) for layout in layouts)
        return
    file = folder / "model" / "decoder.onnx"  # next to its weights
    _write(source, file)
    for layout in layouts:
        degrees, slots = LAYOUTS[layout]
        try:
            text, _ = propose(load(file), file.name, degrees, generation=Generation.over(degrees, LENGTH, slots))
            (folder / "plan.yaml").write_text(
                text.replace("generate: {", f"generate: {{chunk: {CHUNK}, ", 1).replace(f", chunk: {LENGTH}", "")
            )
            report = compile_model(file, folder / "plan.yaml", folder / "build")
            with load_local_generator(folder / "build", threads=1) as generator:
                made = [one.tokens for one in generator.run([Request(prompt, max_tokens=NEW) for prompt in PROMPTS])]
            yield layout, "equal" if made == wanted else f"DIFFERS {made} is not {wanted}"
            yield from ((layout, f"warns: {one}") for one in report.warnings)
        except CompileError as error:
            yield layout, _refusal(error)
        except Exception as error:
            yield layout, f"FAILS {type(error).__name__}: {error}"


def _refusal(error: CompileError) -> str:
    kind = "FAILS" if "bug in partc" in str(error) else "refused:"
    return f"{kind} {' '.join(str(error).split())}"


def _write(source: Source, file: Path) -> None:
    import onnx_ir as ir

    write_declared(source.model, source.declared, None)
    ir.save(source.model, file)


def main() -> int:
    """Prints the table; the exit code."""
    options = argparse.ArgumentParser(description=__doc__)
    titles = [*FAMILIES, *VARIANTS]
    options.add_argument("--only", default=";".join(titles), help="families, separated by semicolons")
    options.add_argument("--layouts", default=",".join(LAYOUTS))
    given = options.parse_args()
    counts = Counter[str]()
    for title in given.only.split(";"):
        with tempfile.TemporaryDirectory() as folder:
            try:
                for layout, result in rows(title, given.layouts.split(","), Path(folder)):
                    counts[result.split()[0].strip(":")] += 1
                    print(f"{title:20} {layout:10} {result[:240]}", flush=True)
            except Exception as error:
                counts["FAILS"] += 1
                print(f"{title:20} {'':10} FAILS {type(error).__name__}: {str(error)[:200]}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return int(bool(counts["DIFFERS"] or counts["FAILS"]))


if __name__ == "__main__":
    sys.exit(main())
