"""Adapters of peft over models of transformers: logits on one rank, tp 2 and two stages, a base of four bits, and trainings, against peft.

    python tests/benchmarks/peft_families.py [--only llama,qwen2,gpt2,t5,bart,bert] [--steps 20]

Small models with random weights and a random adapter. An error is the largest difference of a logit from peft's in float64, next to that of
peft itself in float32: additions in another order differ by as much. `trained`: the largest difference of an adapter's number from peft's
after `--steps` steps of SGD in float32. BART and BERT classify sequences; peft saves BERT's head whole. `four bits`: the largest
difference on tp 2 from one rank, both of the same quantized base.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from transformer import HERE

sys.path.extend([str(path) for path in HERE.parent.iterdir() if path.is_dir()])

import peft
import torch
import transformers
from partc.compiler.frontend import load
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.propose import propose
from partc.runtime import load_local
from partc.runtime.artifact.tensors.dtypes import Array

TOKENS = 96
_SMALL = {"vocab_size": TOKENS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_LLAMA = {
    **_SMALL,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaForCausalLM", _LLAMA, "q_proj|v_proj|down_proj"),
    "qwen2": ("Qwen2ForCausalLM", _LLAMA, "q_proj|o_proj|up_proj"),
    "gpt2": (
        "GPT2LMHeadModel",
        {**_SMALL, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
        "c_attn|c_proj",
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {**_SMALL, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 2},
        "q|v|wo",
    ),
    "bart": (
        "BartForSequenceClassification",
        {
            **_SMALL, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2,
        },
        "q_proj|v_proj|fc1",
    ),
    "bert": (
        "BertForSequenceClassification",
        {**_SMALL, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "query|value",
    ),
}  # fmt: skip
"""The class, the sizes, and the modules that have an adapter, of each family."""


def adapted(family: str, folder: Path) -> Any:
    """Writes the base and its adapter as folders; returns peft's model in float64."""
    kind, sizes, modules = FAMILIES[family]
    torch.manual_seed(0)
    made = getattr(transformers, kind)
    whole = made(made.config_class(**sizes)).eval()
    whole.save_pretrained(folder / family)
    options = {"r": 3, "lora_alpha": 6, "target_modules": modules.split("|"), "fan_in_fan_out": family == "gpt2"}
    task = {"task_type": "SEQ_CLS"} if kind.endswith("Classification") else {}
    net = peft.get_peft_model(whole, peft.LoraConfig(**options, **task))
    for name, weight in net.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(weight, std=0.1)
    net.save_pretrained(folder / "adapter")
    return net.eval()


def inputs_of(source: Any) -> dict[str, Array]:
    """Random tokens for each input of tokens of a model; masks are ones."""
    rng, found = np.random.default_rng(0), dict[str, Array]()
    for value in source.model.graph.inputs:
        shape = (2, 7)
        found[value.name] = np.ones(shape, np.int64) if "mask" in value.name else rng.integers(3, TOKENS, shape)
        if value.name == "input_ids":
            found[value.name][:, -1] = 1
    return found


def plan_of(source: Any, family: str, degrees: Degrees) -> str:
    """Returns the proposed plan, or that of one rank."""
    return "ranks: 1\n" if degrees.ranks == 1 else propose(source, family, degrees)[0] + "\n"


def logits_of(net: Any, given: dict[str, Array], kind: torch.dtype) -> Array:
    """Returns peft's logits, computed in a type."""
    with torch.no_grad():
        found: Array = (
            copy.deepcopy(net).to(kind)(**{name: torch.from_numpy(one) for name, one in given.items()}).logits.numpy()
        )
    return found


def compared(family: str, steps: int, folder: Path) -> str:
    """Returns a family's row of the table."""
    net = adapted(family, folder)
    source = load(folder / family)
    given = inputs_of(source)
    exact = logits_of(net, given, torch.float64)
    own = np.abs(logits_of(net, given, torch.float32) - exact).max()
    row, quantized = [f"{family}: logits up to {np.abs(exact).max():.2f}; peft {own:.1e}"], list[Array]()
    for name, degrees in (("1 rank", Degrees()), ("tp 2", Degrees(tp=2)), ("2 stages", Degrees(stages=2))):
        text = plan_of(source, family, degrees)
        plan = parse_plan(f"{text}adapters: {{mine: adapter}}\n", str(folder / "plan.yaml"))
        compile_source(source, plan, folder / "build")
        with load_local(folder / "build") as ranks:
            row.append(f"{name} {np.abs(ranks(given)['logits'] - exact).max():.1e}")
        if name != "2 stages" and family not in ("bart", "bert"):
            whole = ', "**.relative_attention_bias.*": null' if family == "t5" else ""  # its 4 rows are no block
            more = f'quantize: {{"**": {{bits: 4, block: 16}}{whole}}}\nadapters: {{mine: adapter}}\n'
            compile_source(source, parse_plan(text + more, str(folder / "plan.yaml")), folder / "build")
            with load_local(folder / "build") as ranks:
                quantized.append(ranks(given)["logits"])
    if quantized:
        row.append(f"four bits {np.abs(quantized[0] - quantized[1]).max():.1e}")
    if family not in ("t5", "bart", "bert"):
        row.append(f"trained {trained(net, source, plan_of(source, family, Degrees(tp=2)), family, steps, folder):.1e}")
    return ", ".join(row)


def trained(net: Any, source: Any, text: str, family: str, steps: int, folder: Path) -> float:
    """Returns the largest difference of a number of the adapter after training it here on tp 2, and by peft."""
    from training_equivalence import fed, tensors

    rng = np.random.default_rng(1)
    ids, labels = (rng.integers(3, TOKENS, (steps, 4, 7)) for _ in range(2))
    train = "train:\n  loss: {type: softmax_cross_entropy, logits: logits, labels: label}\n  optimizer: {type: sgd, lr: 0.5}\n  batch: 4\n"
    plan = parse_plan(f"{text}adapters: {{mine: {{source: adapter, train: true}}}}\n{train}", str(folder / "plan.yaml"))
    compile_source(source, plan, folder / "build")
    optimizer = torch.optim.SGD([weight for weight in net.parameters() if weight.requires_grad], lr=0.5)
    with load_local(folder / "build") as ranks:
        more = {port.name: np.ones((4, 7), np.int64) for port in ranks.manifest.inputs if "mask" in port.name}
        for k in range(steps):
            logits = net(input_ids=torch.from_numpy(ids[k])).logits
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                logits.reshape(-1, TOKENS), torch.from_numpy(labels[k]).reshape(-1)
            ).backward()
            optimizer.step()
            ranks({"input_ids": ids[k], **more, "label": labels[k], **fed(ranks, k + 1)})
        now = tensors(ranks)
    wanted = peft.get_peft_model_state_dict(net)
    return max(
        float(np.abs(now[name.removeprefix("base_model.model.")] - weight.detach().numpy()).max())
        for name, weight in wanted.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    for family in options.only.split(","):
        with tempfile.TemporaryDirectory() as place:
            print(compared(family, options.steps, Path(place)), flush=True)


if __name__ == "__main__":
    main()
