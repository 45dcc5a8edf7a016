"""The memory of a training step of a small Llama whose tokens are cut over ranks in a ring, against one rank's, and what was predicted.

    python tests/benchmarks/context_memory.py [--ranks 1 2] [--tokens 32768] [--layers 8] [--width 256] [--steps 1]

All ranks compute attention in blocks (`attention: ring`), one rank too: without blocks the scores of 32,768 tokens alone are 17 GB a layer.
A rank's peak is the growth of its memory from just before it loads the artifact (`predicted_memory_rank.py`). The interpreter has
transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from predicted_memory import HERE, HOOK, MB, partc

PLAN = """
ranks: {ranks}
mesh: {{cp: {ranks}}}
context: {{axis: cp, attention: ring, order: runs}}
symbols: {{batch: {{min: 1, max: 1}}, sequence: {{divisor: 1024, max: {tokens}}}}}
train:
  loss: {{type: softmax_cross_entropy, logits: logits, labels: labels, axis: 2}}
  optimizer: {{type: adamw, lr: 0.001}}
"""
WORDS = 512


def write_model(folder: Path, layers: int, width: int) -> None:
    """Saves a random Llama with heads of 64, two of which share keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        max_position_embeddings=1 << 16,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def peaks_of(folder: Path, ranks: int, tokens: int, steps: int) -> list[tuple[float, float]]:
    """Returns the predicted and the measured peak of each rank in bytes."""
    plan, build, measured = folder / f"{ranks}.yaml", folder / f"build{ranks}", folder / f"measured{ranks}"
    plan.write_text(PLAN.format(ranks=ranks, tokens=tokens))
    measured.mkdir()
    partc("compile", str(folder / "model"), "--plan", str(plan), "-o", str(build))
    sizes = ["--set=batch=1", f"--set=sequence={tokens}"]
    memory = json.loads(partc("inspect", str(build), "--json", *sizes))["memory"]
    environment = {"PYTHONPATH": os.pathsep.join([str(folder), str(HERE)]), "MEASURED": str(measured)}
    data = ["--data", str(folder / "data.npz"), "--batch", "1", "--steps", str(steps)]
    partc("train", str(build), "--plan", str(plan), *data, environment=environment)
    return [(one["peak"], float((measured / f"{one['rank']}.txt").read_text())) for one in memory]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1)
    options = parser.parse_args()
    print(f"{'ranks':>5} {'rank':>4} {'predicted':>10} {'measured':>10}  of the first", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "sitecustomize.py").write_text(HOOK)
        write_model(folder / "model", options.layers, options.width)
        ids = np.random.default_rng(7).integers(0, WORDS, (options.steps, options.tokens))
        np.savez(folder / "data.npz", input_ids=ids, labels=ids)
        first = 0.0
        for ranks in options.ranks:
            begin = time.monotonic()
            for rank, (predicted, measured) in enumerate(peaks_of(folder, ranks, options.tokens, options.steps)):
                first = first or measured
                ratio = measured / first
                print(f"{ranks:5} {rank:4} {predicted / MB:10.1f} {measured / MB:10.1f}  {ratio:.2f}", flush=True)
            print(f"      {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
