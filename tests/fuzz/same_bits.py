"""Trainings by `parts`, byte for byte the same on each number of ranks: all losses, and all weights and state after the last step.

python tests/fuzz/same_bits.py                         # 200 steps of each model on 1, 2, 3, 4, 6 and 8 ranks of this process
python tests/fuzz/same_bits.py --only resnet --steps 20 --mpi 2,3
python tests/fuzz/same_bits.py --only gpt --steps 20 --price   # time and bytes of a step, against `accumulate` with as many microbatches

gpt       dropout, AdamW in shards, a norm that clips
resnet    ResNet-18 with few channels: batch normalization of each part, momentum
llama     a tied table, Adam in shards, a norm that clips
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from partc.cli.main import invoke
from partc.cli.output.stats import all_rank_stats
from partc.compiler.pipeline import compile_model
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checkpoint.checkpoint import Checkpoint
from partc.runtime.checkpoint.newest import latest

SAMPLES = Path(__file__).parents[2] / "samples"
NUMBERS = (8, 6, 4, 3, 2, 1)
PARTS, BATCH, SEQUENCE, VOCABULARY, SIZE = 24, 48, 6, 40, 12

GPT = f"""
import sys
sys.path.insert(0, {str(SAMPLES / "gpt")!r})
import model as whole
from partc.compiler import Input, Symbol, nn

class Block(whole.Block):
    def __init__(self, sizes):
        super().__init__(sizes)
        self.drop = nn.Dropout(0.1)
    def forward(self, op, x, visible):
        x = op.Add(x, self.drop(op, self.attention(op, self.norm1(op, x), visible)))
        return op.Add(x, self.drop(op, self.mlp(op, self.norm2(op, x))))

class GPT(whole.GPT):
    block = Block

model = GPT(whole.Sizes(layers=2, width=24, heads=3, vocabulary={VOCABULARY}, context={SEQUENCE}))
inputs = {{"ids": Input([Symbol(divisor={PARTS}), {SEQUENCE}], "int64")}}
outputs = ["logits"]
"""
RESNET = f"""
from partc.compiler import Input, Symbol, nn
nn.seed(3)

class Block(nn.Module):
    def __init__(self, given, made, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(given, made, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(made, made, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(made), nn.BatchNorm2d(made)
        self.downsample = None if stride == 1 else nn.Conv2d(given, made, 1, stride=stride, bias=False)
        self.bn3 = None if stride == 1 else nn.BatchNorm2d(made)
    def forward(self, op, x):
        y = self.bn2(op, self.conv2(op, op.Relu(self.bn1(op, self.conv1(op, x)))))
        return op.Relu(op.Add(y, x if self.downsample is None else self.bn3(op, self.downsample(op, x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        widths, blocks = [6, 6, 10, 14, 18], []
        for given, made in zip(widths, widths[1:]):
            blocks += [Block(given, made, 1 if given == made else 2), Block(made, made, 1)]
        self.layers = nn.ModuleList(blocks)
        self.fc = nn.Linear(18, {VOCABULARY})
    def forward(self, op, x):
        x = op.Relu(self.bn(op, self.conv(op, x)))
        for layer in self.layers:
            x = layer(op, x)
        return self.fc(op, op.Flatten(op.GlobalAveragePool(x)))

model = Net()
inputs = {{"x": Input([Symbol(divisor={BATCH}), 3, {SIZE}, {SIZE}], "float32")}}
outputs = ["logits"]
"""
LLAMA = f"""
import torch
from partc.compiler import Input, Symbol
from transformers import LlamaConfig, LlamaForCausalLM

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.lm = LlamaForCausalLM(LlamaConfig(
            hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size={VOCABULARY}, max_position_embeddings=16, tie_word_embeddings=True))
    def forward(self, ids):
        return self.lm(input_ids=ids, use_cache=False).logits

model = Net()
inputs = {{"ids": Input([Symbol(divisor={PARTS}), {SEQUENCE}], "int64")}}
outputs = ["logits"]
"""
ELASTIC, ACCUMULATE = "elastic: {{ranks: {numbers}, parts: {parts}{more}}}", "accumulate: {share}"
PLAN = """
ranks: {most}
{elastic}
dataset: data_parallel
train:
  loss: {{type: softmax_cross_entropy, logits: logits, labels: labels{axis}}}
  optimizer: {optimizer}
  {clip}
  data: data.npz
  batch: {batch}
  {accumulate}
  log: 1
"""
ADAM, MOMENTUM = "{type: adamw, lr: 0.002, weight_decay: 0.1, shard: true}", "{type: momentum, lr: 0.05, momentum: 0.9}"
MODELS = {
    "gpt": (GPT, "", ", axis: 2", ADAM, "clip: {norm: 0.5}"),
    "resnet": (RESNET, ", statistics: part", "", MOMENTUM, ""),
    "llama": (LLAMA, "", ", axis: 2", ADAM, "clip: {norm: 0.5}"),
}
"""Maps each model to its file, and what its plan says of statistics, labels, optimizer and clipping."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument(
        "--ranks", default=",".join(map(str, NUMBERS)), help="numbers of ranks that train in this process"
    )
    parser.add_argument("--mpi", default="", help="numbers of ranks that train over MPI, besides")
    parser.add_argument("--price", action="store_true", help="train by `accumulate`, too, in this process")
    options = parser.parse_args()
    ways = [(int(one), True) for one in options.ranks.split(",") if one]
    ways += [(int(one), False) for one in options.mpi.split(",") if one]
    wrong = 0
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory() as place:
            os.chdir(place)
            wrong += different(name, options.steps, ways, options.price)
            os.chdir("/")
    print(f"{len(options.only.split(','))} models, {len(ways)} trainings of each, {wrong} with other bits")
    sys.exit(1 if wrong else 0)


def different(name: str, steps: int, ways: list[tuple[int, bool]], price: bool) -> int:
    """Compiles a model in the current folder and trains it on each number of ranks; returns how many differ from the first."""
    data(name)
    Path("net.py").write_text(MODELS[name][0])
    numbers = sorted({ranks for ranks, _ in ways}, reverse=True)
    begun = time.process_time()
    build(name, numbers, "build")
    print(f"{name}: compiled in {time.process_time() - begun:.0f} s of the processor", file=sys.stderr, flush=True)
    first: tuple[list[float], dict[str, bytes]] | None = None
    wrong = 0
    for ranks, here in ways:
        kept = f"on{ranks}{'' if here else '_mpi'}"
        losses, tensors, seconds = trained("build", ranks, steps, kept, here)
        first = first or (losses, tensors)
        others = [tensor for tensor in first[1] if tensors[tensor] != first[1][tensor]]
        equal = losses == first[0] and not others
        wrong += not equal
        verdict = "the same bits" if equal else f"OTHER BITS: losses {losses == first[0]}, {others[:3]}"
        print(
            f"{name}, {ranks} ranks{'' if here else ' over MPI'}: {len(losses)} losses, {len(tensors)} tensors, last loss "
            f"{losses[-1]:.6f}: {verdict}",
            flush=True,
        )
        if price and here:
            build(name, [ranks], "today", by_parts=False)
            today = trained("today", ranks, steps, "kept_today", here)[2]
            parts = "build" if ranks == numbers[0] else f"build/r{ranks}"
            print(
                f"    {seconds:.1f} s of the processor with the load, a rank sends {sent(parts):,} bytes a step; by `accumulate` "
                f"{today:.1f} s, {sent('today'):,} bytes",
                flush=True,
            )
    return wrong


def build(name: str, numbers: Sequence[int], folder: str, by_parts: bool = True) -> None:
    """Compiles `net.py` of the current folder for these numbers of ranks; without parts for the first, with as many microbatches."""
    _, more, axis, optimizer, clip = MODELS[name]
    elastic = ELASTIC.format(numbers=list(numbers), parts=PARTS, more=more) if by_parts else ""
    accumulate = "" if by_parts else ACCUMULATE.format(share=PARTS // numbers[0])
    words = {"most": numbers[0], "elastic": elastic, "accumulate": accumulate, "axis": axis, "batch": BATCH}
    Path("plan.yaml").write_text(PLAN.format(**words, optimizer=optimizer, clip=clip))
    compile_model(Path("net.py"), Path("plan.yaml"), Path(folder))


def trained(folder: str, ranks: int, steps: int, kept: str, here: bool) -> tuple[list[float], dict[str, bytes], float]:
    """Trains; returns all losses, the bytes of all tensors, and the seconds of this processor in all."""
    words = ["train", folder, "--trust-code", "-n", str(ranks), "--threads", "1", "-q", "--checkpoint", kept]
    words += ["--save", str(steps), "--metrics", f"{kept}.jsonl", *["--in-process"] * here]
    shutil.rmtree(kept, ignore_errors=True)
    Path(f"{kept}.jsonl").unlink(missing_ok=True)
    begun = time.process_time()
    assert invoke([*words, "--steps", str(steps)]) == 0, words
    seconds = time.process_time() - begun
    newest = latest(Path(kept))
    assert newest is not None
    checkpoint = Checkpoint.open(newest)
    tensors = {tensor: checkpoint.read(tensor).tobytes() for tensor in checkpoint.index.tensors}
    return [line["loss"] for line in map(json.loads, Path(f"{kept}.jsonl").read_text().splitlines())], tensors, seconds


def sent(folder: str) -> int:
    """The most bytes that a rank of an artifact sends in a step."""
    return max(one.sent.bytes for one in all_rank_stats(open_artifact(folder), {}))


def data(name: str) -> None:
    """Writes the records: images of numbers, or texts whose next token follows from two before it."""
    chance = np.random.default_rng(1)
    if name == "resnet":
        images = chance.standard_normal((4 * BATCH, 3, SIZE, SIZE)).astype(np.float32)
        np.savez("data.npz", x=images, labels=images.reshape(len(images), -1)[:, :VOCABULARY].argmax(1))
        return
    ids = chance.integers(0, VOCABULARY, (4 * BATCH, SEQUENCE))
    np.savez("data.npz", ids=ids, labels=(ids + np.roll(ids, 1, 1)) % VOCABULARY)


if __name__ == "__main__":
    main()
