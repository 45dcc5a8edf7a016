"""Causal models of `transformers`, one of each family, tiny and random: their tokens against `model.generate`.

    python tests/fuzz/decoder_families.py [--only "Glm;Cohere2"] [--layouts "1 slot,tp 2"] [--results families.jsonl] [--jobs 2]
    python tests/fuzz/decoder_families.py --kind encoder [--only "BertForMaskedLM;ViTForImageClassification"]
    python tests/fuzz/decoder_families.py --kind training [--only "Mixtral;Qwen3Moe"]

The families are the classes of `AutoModelForCausalLM` of the installed version. Each is saved, exported once with its cache, planned and
compiled for each layout, and continues prompts of 1, 5 and 23 tokens by 24, in a process of its own. Of `--kind encoder` they are the
classes that fill masks, that classify sequences, images or sounds, and that have an encoder with a decoder: what the export gives is
compared with the model, and the plan of `--tp 2` is verified. Of `--kind training` each causal model is exported with its own loss, whose
gradients are compared with torch's, on one rank and data parallel; experts also over the ranks. A row says of each layout `equal`,
`refused` with the text, `no small model`, or `DIFFERS`; the exit code is 1 if any differs or fails
otherwise. Families that end otherwise than in `families.json`, which `--record` writes, are listed, but of
trainings: what a version of transformers, or of this compiler, changes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any

os.environ["TQDM_DISABLE"] = "1"
sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

import numpy as np
import onnxruntime
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
from partc.runtime.checker.check import check_artifact
from pool import command
from training_equivalence import run

RECORD = Path(__file__).with_name("families.json")
"""How families ended with a version of transformers, and by family the cause of a known gap."""
MEMORY = 6 << 30
"""The most that a family's process may have; some do not become small by their configuration."""
PROMPTS = ([7], [5, 9, 77, 3, 21], [(11 * k * k + 5) % 96 for k in range(23)])
NEW, LENGTH, CHUNK = 24, 64, 16
LAYOUTS: Mapping[str, tuple[Degrees, int]] = {
    "1 slot": (Degrees(), 1),
    "2 slots": (Degrees(), 2),
    "tp 2": (Degrees(tp=2), 2),
    "2 stages": (Degrees(stages=2), 2),
    "cp 2": (Degrees(cp=2), 2),
}
TRAINED: Mapping[str, str] = {
    "1 rank": "ranks: 1\n",
    "dp 2": "ranks: 2\nmesh: {dp: 2}\ndataset: data_parallel\n",
    "dp 4, ep 4": "ranks: 4\nmesh: {dp: 4}\ndataset: data_parallel\nexperts: {axis: dp}\n",
    "dp 4, ep 2": "ranks: 4\nmesh: {dp: 2, ep: 2}\ndataset: {'*': [[dp, ep], null]}\nexperts: {axis: ep}\n",
}
"""Maps layouts of trainings to their plans; those with experts are for models that have any."""
STEP = "symbols: {batch: {divisor: 4}}\ntrain: {loss: loss, optimizer: {type: sgd, lr: 1.0}}\n"
NO_EXPERTS = "product with the matrices of experts"
TASKS = (
    "MASKED_LM",
    "SEQUENCE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
)
SYMBOLS = {"batch": 2, "sequence": 7, "target": 5, "samples": 4000}
ABSENT = object()
"""Of a setting that a family has no field for."""
_WIDTH, _INNER, _LAYERS, _HEADS, _EXPERTS = 64, 96, 2, 4, 4
SIZES: Mapping[str, Any] = {
    "is_decoder": True, "vocab_size": 96, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.15, "init_std": 0.15,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim", "lru_width"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dff", "dim_ff",
        "shared_intermediate_size", "ffn_hidden_size", "mlp_dim", "intermediate_size_mlp"), _INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_decoder_layers",
        "num_encoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads", "decoder_attention_heads", "encoder_attention_heads",
        "num_decoder_attention_heads", "num_encoder_attention_heads", "num_heads", "linear_num_value_heads"), _HEADS),
    "num_kv_shared_layers": 0,
    "num_key_value_heads": 2, "num_kv_heads": 2, "linear_num_key_heads": 2, "head_dim": 16, "kv_channels": 16, "attention_head_dim": 16,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "rotary_dim": 8,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "qk_head_dim": 32, "v_head_dim": 16,
    "max_position_embeddings": 128, "n_positions": 128, "max_seq_len": 128, "max_sequence_length": 128, "max_target_positions": 128,
    "sliding_window": 8, "window_size": 8, "local_attention": 8, "attention_window": 8, "attention_chunk_size": 8,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_num_experts"), _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk"), 2),
    "moe_intermediate_size": 32, "moe_ffn_hidden_size": 32, "expert_ffn_hidden_size": 32, "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_n_groups": 1,
    "mamba_dt_rank": 4, "mamba_chunk_size": 8, "n_groups": 1, "state_size": 8, "time_step_rank": 4, "attention_hidden_size": 64,
}  # fmt: skip
"""The sizes of a family's configuration, as far as it has fields of these names."""
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Bamba": {"attn_layer_indices": [1]},
    "CohereCompass": {"layer_types": ["full_attention", "full_attention"]},
    "Falcon": {
        "head_dim": ABSENT,
        "num_kv_heads": ABSENT,
        "multi_query": True,
        "new_decoder_architecture": False,
        "alibi": False,
    },
    "FalconH1": {"mamba_d_ssm": 128, "mamba_d_head": 16, "mamba_n_heads": 8},
    "Gemma4Assistant": {"hidden_size_per_layer_input": 0},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]]},
    "GraniteMoeHybrid": {"layer_types": ["mamba", "attention"]},
    "Inkling2": {"vocab_size": 96, "unpadded_vocab_size": 96},
    "Inkling2Loop": {"vocab_size": 96, "unpadded_vocab_size": 96},
    "Jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"]},
    "Mamba2": {"num_heads": 8, "head_dim": 16, "chunk_size": 8},
    "ModernBertDecoder": {"cls_token_id": 1, "sep_token_id": 2, "eos_token_id": 2},
    "Moshi": {"sliding_window": 128},
    "Mpt": {"expansion_ratio": 2},
    "NemotronH": {"layers_block_type": ["mamba", "attention"]},
    "ProphetNet": {"num_hidden_layers": ABSENT},
    "RecurrentGemma": {"block_types": ["recurrent", "attention"]},
    "Reformer": {"is_decoder": True, "axial_pos_embds_dim": (32, 32), "axial_pos_shape": (8, 16)},
    "XLNet": {"max_position_embeddings": ABSENT},
    "xLSTM": {"qk_head_dim": ABSENT, "v_head_dim": ABSENT},
    "Xmod": {"default_language": "en_XX"},
    "Zamba": {"layers_block_type": ["mamba", "hybrid"], "attention_hidden_size": 128, "attention_head_dim": 32},
    "Zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "use_mem_rope": True,
    },
    "Zaya": {"num_experts_per_tok": 1},
}
"""By family what differs from that table."""
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Falcon, grouped": ("Falcon", {"multi_query": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "Falcon, 6 layers": ("Falcon", {"num_hidden_layers": 6}),
    "Falcon, alibi": ("Falcon", {"multi_query": False, "alibi": True}),
    "GPT2, 6 layers": ("GPT2", {"n_layer": 6}),
    "Llama, 6 layers": ("Llama", {"num_hidden_layers": 6}),
    "Llama, dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "Llama, yarn": ("Llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}),
    "Mixtral, 6 layers": ("Mixtral", {"num_hidden_layers": 6}),
    "Moshi, cut": ("Moshi", {"sliding_window": 8}),
    "Phi3, 6 layers": ("Phi3", {"num_hidden_layers": 6}),
    "Phi3, longrope": ("Phi3", {"original_max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}}),
}  # fmt: skip
"""Other configurations of a family."""


@cache
def encoders() -> list[str]:
    """The names of their classes."""
    from transformers.models.auto import modeling_auto as auto

    mappings = (getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS)
    names = (name for mapping in mappings for name in mapping.values())
    return [*dict.fromkeys(one if isinstance(one, str) else one[0] for one in names)]


@cache
def families() -> dict[str, str]:
    """Maps families to the names of their classes, which several kinds of configurations share; importing all takes 7 s."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    end = "For(CausalLM|ConditionalGeneration)|(Model)?(With)?LMHead(Model)?$"
    return {re.sub(end, "", name): name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}


def settings(config: type, special: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The settings of a small model: sizes of the table, and two entries of a list by layer: the first and the last kind."""
    usual = config()
    chosen = {name: size for name, size in SIZES.items() if not isinstance(getattr(usual, name, []), list | tuple)}
    layers = getattr(usual, "num_hidden_layers", None) or getattr(usual, "num_layers", None)
    for name, entries in vars(usual).items():
        if isinstance(entries, list | tuple) and len(entries) == layers and layers > _LAYERS:
            kinds = sorted(entries, key=lambda one: entries.index(one))
            chosen[name] = [kinds[0], kinds[-1]]
    if "kv_lora_rank" in chosen:  # each head has its own keys
        chosen["num_key_value_heads"] = _HEADS
    nested = getattr(usual, "text_config", None)
    if nested is not None and not isinstance(nested, dict):
        chosen["text_config"] = settings(type(nested))
    return {name: value for name, value in {**chosen, **special}.items() if value is not ABSENT}


def build(title: str) -> Any:
    """The model of a family with its random weights."""
    family, special = VARIANTS.get(title, (title, {}))
    kind: Any = getattr(transformers, title if title in encoders() else families()[family])
    torch.manual_seed(0)
    with quiet():
        special = {**FAMILIES.get(family, {}), **special}
        if title.endswith(
            "ForSequenceClassification"
        ):  # of T5 and BART the state at the token that ends a text is classified
            special = {"eos_token_id": 2, **special}
        model = kind(kind.config_class(**settings(kind.config_class, special))).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
                tensor.add_(
                    0.15 * torch.randn_like(tensor)
                )  # biases of 0 hide errors, and experts of equal scores have no order
    if model.can_generate():
        model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
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
    try:
        model = build(title)
        wanted = tokens_of_transformers(model)
    except Exception as error:
        yield "", f"no small model: {type(error).__name__}: {' '.join(str(error).split())}"
        return
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
            if ", chunk:" not in text:  # a model with states has chunks of one token
                text = text.replace("generate: {", f"generate: {{chunk: {CHUNK}, ", 1)
            (folder / "plan.yaml").write_text(text)
            report = compile_model(file, folder / "plan.yaml", folder / "build")
            with load_local_generator(folder / "build", threads=1) as generator:
                made = [one.tokens for one in generator.run([Request(prompt, max_tokens=NEW) for prompt in PROMPTS])]
            yield layout, "equal" if made == wanted else f"DIFFERS {made} is not {wanted}"
            yield from ((layout, f"warns: {one}") for one in report.warnings)
        except CompileError as error:
            yield layout, _refusal(error)
        except Exception as error:
            yield layout, f"FAILS {type(error).__name__}: {error}"


def training_rows(title: str, folder: Path) -> Iterator[tuple[str, str]]:
    """By layout the largest difference of a gradient from torch's: of a step of SGD, at a rate of 1, what it changes."""
    try:
        model = build(title)
        rng = np.random.default_rng(1)
        fed = {name: rng.integers(3, 90, (4, 7)) for name in ("input_ids", "labels")}
        with quiet(), torch.enable_grad():
            model(**{name: torch.from_numpy(array) for name, array in fed.items()}, use_cache=False).loss.backward()
    except Exception as error:
        yield "", f"no small model: {type(error).__name__}: {' '.join(str(error).split())}"
        return
    wanted = {name: one.grad.numpy() for name, one in model.named_parameters() if one.grad is not None}
    model.save_pretrained(folder / "model")
    lines = (
        "import transformers",
        f"model = transformers.{type(model).__name__}.from_pretrained({str(folder / 'model')!r})",
    )
    (folder / "model.py").write_text("\n".join([*lines, 'inputs = ["input_ids", "labels"]']))
    for layout, plan in TRAINED.items():
        try:
            source = load(folder / "model.py")
            done = run(source, plan + STEP, folder / layout, [fed])
            apart = {name: abs(done.before[name] - done.after[name] - one).max() for name, one in wanted.items()}
            worst = max(apart, key=lambda name: apart[name])
            problems = check_artifact(folder / layout)
            fine = apart[worst] <= 1e-5 * max(1.0, abs(wanted[worst]).max()) and not problems
            yield layout, "equal" if fine else f"DIFFERS by {apart[worst]} in {worst}; check: {problems[:1]}"
        except CompileError as error:
            if NO_EXPERTS not in str(error):
                yield layout, _refusal(error)
        except Exception as error:
            yield layout, f"FAILS {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def encoder_rows(title: str, folder: Path) -> Iterator[tuple[str, str]]:
    """The result of one rank, the export against the model, and of two."""
    try:
        model = build(title)
    except Exception as error:
        yield "", f"no small model: {type(error).__name__}: {' '.join(str(error).split())}"
        return
    model.save_pretrained(folder / "model")
    try:
        source = load(folder / "model")
        _write(source, folder / "model" / "encoder.onnx")
        session, rng = onnxruntime.InferenceSession(folder / "model" / "encoder.onnx"), np.random.default_rng(0)
        fed = {}
        for port in session.get_inputs():
            shape = [SYMBOLS.get(dim, dim) for dim in port.shape]
            fed[port.name] = np.ones(shape, np.int64) if "mask" in port.name else rng.integers(3, 90, shape)
            if "float" in port.type:
                fed[port.name] = rng.normal(0, 1, shape).astype(np.float32)
            if port.name == "input_ids" and title.endswith("ForSequenceClassification"):
                fed[port.name][:, -1] = 2
        (made,) = session.run(["logits"], fed)
        with quiet(), torch.no_grad():
            wanted = model(**{name: torch.from_numpy(array) for name, array in fed.items()}).logits.numpy()
        if not np.isfinite(wanted).all():
            yield "", "no small model: its random weights give numbers that are not finite in torch"
            return
        apart = float(abs(made - wanted).max())
        yield "1 rank", "equal" if apart < 1e-3 * abs(wanted).max() else f"DIFFERS by {apart} of {abs(wanted).max()}"
        file, plan = folder / "model" / "encoder.onnx", folder / "plan.yaml"
        plan.write_text(propose(load(file), file.name, Degrees(tp=2))[0])
        said = command("verify", str(file), "--plan", str(plan), "--atol", "1e-3")
        yield "tp 2", f"refused: {' '.join(said.split())}" if said else "equal"
    except CompileError as error:
        yield "", _refusal(error)
    except Exception as error:
        yield "", f"FAILS {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _refusal(error: CompileError) -> str:
    kind = "FAILS" if "bug in partc" in str(error) else "refused:"
    return f"{kind} {' '.join(str(error).split())}"


def _write(source: Source, file: Path) -> None:
    import onnx_ir as ir

    write_declared(source.model, source.declared, None)
    ir.save(source.model, file)


def main() -> int:
    """Prints the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="families, separated by semicolons")
    parser.add_argument("--layouts", default="1 slot,2 slots,tp 2,2 stages", help="'cp 2', too: caches in shards")
    parser.add_argument(
        "--results", type=Path, help="a file of JSON lines, one a family; those in it are not run again"
    )
    parser.add_argument("--seconds", type=int, default=600, help="the most that a family may take")
    parser.add_argument("--jobs", type=int, default=1, help="how many families run at a time")
    parser.add_argument("--kind", choices=("decoder", "encoder", "training"), default="decoder")
    parser.add_argument("--record", action="store_true", help=f"write how families end into {RECORD.name}")
    options = parser.parse_args()
    every = [*encoders()] if options.kind == "encoder" else [*families(), *VARIANTS]
    titles = options.only.split(";") if options.only else every
    known = {}
    if options.results and options.results.exists():
        known = {line["family"]: line for line in map(json.loads, options.results.read_text().splitlines())}
    lines = itertools.chain(
        (known[title] for title in titles if title in known),
        _in_processes([title for title in titles if title not in known], options),
    )
    counts, ends = Counter[str](), dict[str, str]()
    for line in lines:
        title = line["family"]
        ends[title] = _end(line["results"])
        if options.results and title not in known:
            with options.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
        for layout, result in line["results"]:
            counts[result.split()[0].strip(":")] += 1
            print(f"{title:20} {layout:10} {result[:240]}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    if options.kind == "training":
        return int(bool(counts["DIFFERS"] or counts["FAILS"]))
    record = json.loads(RECORD.read_text())
    before = record["results"]
    for title, end in ends.items():
        if end.split()[0] != before.get(title, "unknown").split()[0]:
            print(f"{title}: with transformers {record['transformers']} {before.get(title, 'unknown')}; now {end}")
        elif title in record["gaps"]:
            print(f"{title}: known gap: {record['gaps'][title]}")
    if options.record:
        record |= {"transformers": transformers.__version__, "results": dict(sorted({**before, **ends}.items()))}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return int(bool(counts["DIFFERS"] or counts["FAILS"]))


def _end(results: list[list[str]]) -> str:
    """How a family ended: equal in all layouts, or the first other result."""
    others = [f"{text} ({layout})" for layout, text in results if text != "equal" and not text.startswith("warns")]
    return others[0][:300] if others else "equal"


def _in_processes(titles: list[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The results of families as they end, each of a fork of this process, which has the libraries loaded and may end in any way."""
    context, waiting = multiprocessing.get_context("fork"), titles[::-1]
    running: dict[str, tuple[Any, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            title = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(title, options.kind, options.layouts.split(","), sender))
            process.start()
            sender.close()
            running[title] = process, receiver, time.monotonic() + options.seconds
        wait([receiver for _, receiver, _ in running.values()], timeout=5)
        for title, (process, receiver, end) in [*running.items()]:
            if receiver.poll():
                try:
                    line = receiver.recv()
                except EOFError:
                    process.join()
                    line = {"family": title, "results": [("", f"FAILS with exit code {process.exitcode}")]}
            elif time.monotonic() > end:
                process.kill()
                line = {"family": title, "results": [("", f"FAILS after {options.seconds} s")]}
            else:
                continue
            process.join()
            del running[title]
            yield line


def _send(title: str, kind: str, layouts: list[str], sender: Connection) -> None:
    """Sends a family's results: pairs of a layout and text, the text of all where the model itself does not run."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    with tempfile.TemporaryDirectory() as folder:
        try:
            if kind == "training":
                results = [*training_rows(title, Path(folder))]
            elif title in encoders():
                results = [*encoder_rows(title, Path(folder))]
            else:
                results = [*rows(title, layouts, Path(folder))]
        except Exception as error:
            results = [("", f"FAILS {type(error).__name__}: {str(error)[:300]}")]
    sender.send({"family": title, "results": results})


if __name__ == "__main__":
    sys.exit(main())
