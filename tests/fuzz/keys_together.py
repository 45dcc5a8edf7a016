"""Keys of a plan beside each other: each pair, or random sets, trains a small decoder as one rank does, or is refused.

    python tests/fuzz/keys_together.py                       each key, and each pair
    python tests/fuzz/keys_together.py --keys ring zero      this set
    python tests/fuzz/keys_together.py --cases 200 --seed 1  random sets of three to five

A training with other numbers than on one rank, one that `check` refuses and a traceback are faults. The last line has the numbers.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import traceback
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from partc.compiler import nn
from partc.compiler.errors import CompileError
from partc.compiler.frontend.inputs import Spec
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.trace import trace
from partc.runtime.checker.check import check_artifact
from training_equivalence import Run, from_text, run, run_whole, same_tensors

WIDTH, HEADS, KEYS, DEPTH, EXPERTS, WORDS = 16, 4, 2, 4, 4, 12
AXES = ("pp", "dp", "cp", "ep", "tp")


class Attention(nn.Module):
    """Causal attention of which two heads of queries share keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, KEYS * DEPTH, bias=False) for _ in range(2))

    def forward(self, op: Any, x: Any, visible: Any) -> Any:
        def by_head(y: Any, heads: int) -> Any:
            return op.Transpose(op.Reshape(y, op.Constant(value_ints=[0, 0, heads, DEPTH])), perm=[0, 2, 1, 3])

        def repeated(y: Any) -> Any:
            wide = op.Expand(op.Unsqueeze(y, [2]), op.Constant(value_ints=[1, 1, HEADS // KEYS, 1, 1]))
            return op.Reshape(wide, op.Constant(value_ints=[0, HEADS, -1, DEPTH]))

        k, v = repeated(by_head(self.k(op, x), KEYS)), repeated(by_head(self.v(op, x), KEYS))
        scores = op.MatMul(op.Mul(by_head(self.q(op, x), HEADS), 0.5), op.Transpose(k, perm=[0, 1, 3, 2]))
        shares = op.Softmax(op.Where(visible, scores, -1e4), axis=-1)
        mixed = op.Transpose(op.MatMul(shares, v), perm=[0, 2, 1, 3])
        return self.out(op, op.Reshape(mixed, op.Constant(value_ints=[0, 0, WIDTH])))


class Experts(nn.Module):
    """Two of four experts for each token, as exporters of `transformers` write them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter([EXPERTS, WIDTH, 24], init=nn.init.normal(0.2))
        self.down = nn.Parameter([EXPERTS, 24, WIDTH], init=nn.init.normal(0.2))

    def forward(self, op: Any, x: Any) -> Any:
        flat = op.Reshape(x, op.Constant(value_ints=[-1, WIDTH]))
        best, chosen = op.TopK(self.router(op, flat), [2], _outputs=2)
        experts = op.Reshape(chosen, op.Constant(value_ints=[-1]))
        wide = op.Expand(op.Unsqueeze(flat, [1]), op.Constant(value_ints=[1, 2, 1]))
        rows = op.Reshape(wide, op.Constant(value_ints=[-1, 1, WIDTH]))
        h = op.Tanh(op.MatMul(rows, op.Gather(self.up, experts)))  # at a kink rounding alone would turn a gradient on
        y = op.Reshape(op.MatMul(h, op.Gather(self.down, experts)), op.Constant(value_ints=[-1, 2, WIDTH]))
        y = op.ReduceSum(op.Mul(y, op.Unsqueeze(op.Softmax(best), [2])), [1], keepdims=0)
        return op.Reshape(y, op.Shape(x))


class Block(nn.Module):
    """A layer of a decoder with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.experts = nn.LayerNorm(WIDTH), Experts()

    def forward(self, op: Any, x: Any, visible: Any) -> Any:
        x = op.Add(x, self.attention(op, self.norm(op, x), visible))
        return op.Add(x, self.experts(op, self.norm2(op, x)))


class Decoder(nn.Module):
    """Two layers with an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, op: Any, ids: Any) -> Any:
        places = op.Range(0, op.Squeeze(op.Shape(ids, start=1, end=2)), 1)
        visible = op.LessOrEqual(places, op.Unsqueeze(places, [1]))
        x = self.tokens(op, ids)
        for layer in self.layers:
            x = layer(op, x, visible)
        return self.head(op, x)


STACK = """<ir_version: 8, opset_import: ["" : 21]>
net (float[batch, 8] ids) => (float[batch, 12] y) {
    [tokens] f = MatMul(ids, first)
    [layers] g = Scan <num_scan_inputs = 2, body = layer (float[batch, 8] h, float[8, 24] w, float[24, 8] v) => (float[batch, 8] out) {
        [up] u = MatMul(h, w)
        [act] a = Tanh(u)
        [down] d = MatMul(a, v)
        [add] out = Add(d, h) }> (f, up_weights, down_weights)
    [head] y = MatMul(g, last)
}"""
"""A loop over two layers, whose weights are stacks; its nodes are called as the decoder's modules."""


def source(stack: bool) -> Source:
    """The decoder, or the `stack`, with the same weights each time."""
    if stack:
        shapes = {"first": (8, 8), "up_weights": (2, 8, 24), "down_weights": (2, 24, 8), "last": (8, WORDS)}
        return from_text(STACK, shapes)
    nn.seed(3)
    return Source(trace(Decoder(), [Spec("ids", ("batch", "seq"), ir.DataType.INT64)], ["y"], "decoder.py"))


@cache
def steps(stack: bool) -> list[dict[str, np.ndarray]]:
    """Two batches."""
    chance = np.random.default_rng(0)
    if stack:
        arrays = {"ids": chance.standard_normal((2, 16, 8), np.float32), "labels": chance.integers(0, WORDS, (2, 16))}
        return [{name: both[step] for name, both in arrays.items()} for step in range(2)]
    return [dict(zip(("ids", "labels"), chance.integers(0, WORDS, (2, 16, 8)), strict=True)) for _ in range(2)]


@cache
def whole_run(one: str, stack: bool) -> Run:
    """The training on one rank by its plan."""
    return run_whole(source(stack), one, steps(stack))


@dataclass
class Key:
    """The lines that a key adds to a plan: its axes, lines of the plan, of `pipeline` and of the training.

    `kind`: of keys of one kind a plan has one. `everywhere`: lines of one rank's plan, too, or 'train': `train` is in it.
    `tolerance`: how far numbers may lie apart, of the change that the steps made; of 16 bits far, since a token whose scores of two
    experts are within rounding may take the other one. `stack`: of the loop alone.
    """

    kind: str
    axes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    pipeline: tuple[str, ...] = ()
    optimizer: str = ""
    train: str = ""
    everywhere: str = ""
    tolerance: float = 0.0
    stack: bool = False


SHARED = 'sharding: {"layers.*.attention.{q,k,v}": colwise, "layers.*.attention.out": rowwise}'
TABLE: dict[str, Key] = {
    "stored": Key("stored", ("dp",), ('parameters: {"**": {stored: dp}}',)),
    "kept": Key("stored", ("dp",), ('parameters: {"**": {stored: dp, after_forward: keep}}',)),
    "stored along cp": Key("stored", ("cp",), ('parameters: {"**": {stored: cp}}',)),
    "stored along tp": Key("stored", ("tp",), ('parameters: {"**": {stored: tp}}',)),
    "replicas": Key("stored", ("dp", "cp"), ('parameters: {"layers.*": {stored: cp}, head: {stored: true}}',)),
    "stored by all": Key("stored", (), ('parameters: {"**": {stored: true}}',)),
    "each microbatch": Key(
        "stored", ("dp",), ('parameters: {"**": {stored: dp}}', "stored: {reduce: microbatch}"), ("microbatches: 2",)
    ),
    "routed": Key("experts", ("dp",), ("experts: {axis: dp}",)),
    "routed in eight bits": Key(
        "experts", ("dp",), ("experts: {axis: dp}", "messages: {rows: {bits: 8, block: 16}}"), tolerance=0.1
    ),
    "routed along cp": Key("experts", ("cp",), ("experts: {axis: cp}",)),
    "shared": Key("experts", ("ep",), ("experts: {axis: ep}",)),
    "shared along tp": Key("experts", ("tp",), ("experts: {axis: tp}",)),
    "gather": Key("context", ("cp",), ("context: {axis: cp, attention: gather}",)),
    "heads": Key("context", ("cp",), ("context: {axis: cp, attention: heads}",)),
    "ring": Key("context", ("cp",), ("context: {axis: cp, attention: ring}",)),
    "fold": Key("context", ("cp",), ("context: {axis: cp, attention: ring, order: fold}",)),
    "elastic": Key("elastic", ("dp",), ("elastic: {ranks: [RANKS, HALF]}",)),
    "parts": Key("elastic", ("dp",), ("elastic: {ranks: [RANKS, HALF], parts: 4}",)),
    "packed": Key("messages", ("dp",), ("messages: {gradients: {bits: 8, block: 16}}",), tolerance=0.1),
    "tp": Key("sharding", ("tp",), (SHARED,)),
    "experts cut": Key(
        "sharding", ("tp",), ('sharding: {"layers.*.experts.MatMul": colwise, "layers.*.experts.MatMul_1": rowwise}',)
    ),
    "scan": Key("sharding", stack=True),
    "turns cut": Key(
        "sharding", ("tp",), ('sharding: {"layers.*.up": colwise, "layers.*.down": rowwise}',), stack=True
    ),
    "dp": Key("data", ("dp",)),
    "stages": Key("stages", ("pp",), (), ("microbatches: 2", 'stages: ["tokens, layers.0", "layers.1, head"]')),
    "gpipe": Key(
        "stages", ("pp",), (), ("microbatches: 4", "schedule: gpipe", 'stages: ["tokens, layers.0", "layers.1, head"]')
    ),
    "zb": Key(
        "stages", ("pp",), (), ("microbatches: 4", "schedule: zb_h1", 'stages: ["tokens, layers.0", "layers.1, head"]')
    ),
    "zero": Key("zero", ("dp",), optimizer=", shard: dp"),
    "recompute": Key("recompute", (), (), ("microbatches: 1", "recompute: ['layers.*']")),
    "microbatches": Key("microbatches", (), (), ("microbatches: 4",)),
    "accumulate": Key("accumulate", train="  accumulate: 2\n"),
    "clip": Key("clip", train="  clip: {norm: 0.05}\n", everywhere="train"),
    "frozen": Key("frozen", train='  parameters: {"{tokens,layers.0}": {frozen: true}}\n', everywhere="train"),
    "target": Key("target", lines=('target: {"layers.0": cuda, "head": cuda}',)),
    "pull": Key("sharding", ("dp",), ("sharding: {tokens: pull}",)),
    "ema": Key("ema", train="  ema: {decay: 0.9}\n", everywhere="train"),
    "bfloat16": Key("precision", everywhere="precision: {compute: bfloat16}\n", tolerance=0.15),
    "adapters": Key(
        "adapters", everywhere='adapters: {a: {on: "layers.*.attention.{q,v}", rank: 2, alpha: 4, train: true}}\n'
    ),
    "float16": Key("precision", everywhere="precision: {compute: float16, loss_scale: 64}\n", tolerance=0.1),
}


def plan(names: list[str]) -> tuple[str, str, float]:
    """The plan with these keys, that of one rank, and how far the numbers may lie apart."""
    keys = [TABLE[name] for name in names]
    axes = [axis for axis in AXES if any(axis in key.axes for key in keys)] or ["dp"]
    ranks = 2 ** len(axes)
    lines = [f"ranks: {ranks}", f"mesh: {{{', '.join(f'{axis}: 2' for axis in axes)}}}"]
    stack = any(key.stack for key in keys)
    lines.append(f"symbols: {{batch: {{divisor: 16, max: 16}}{'' if stack else ', seq: {divisor: 4, max: 16}'}}}")
    if "dp" in axes:
        lines.append(f"dataset: {{ids: [dp, null], labels: [dp{'' if stack else ', null'}]}}")
    lines += [line.replace("RANKS", str(ranks)).replace("HALF", str(ranks // 2)) for key in keys for line in key.lines]
    piped: dict[str, str] = {}
    for key in keys:
        for entry in key.pipeline:
            name, _, value = entry.partition(": ")
            piped[name] = max(piped.get(name, ""), value) if name == "microbatches" else value
    if piped:
        lines.append(f"pipeline: {{{', '.join(f'{name}: {value}' for name, value in piped.items())}}}")
    optimizer = "".join(key.optimizer for key in keys)
    extra = "".join(key.everywhere for key in keys if key.everywhere != "train")
    plain = "".join(key.train for key in keys if key.everywhere == "train")

    def train(optimizer: str, more: str) -> str:
        return (
            f"train:\n  loss: {{type: softmax_cross_entropy, logits: y, labels: labels, axis: {1 if stack else 2}}}\n"
            f"  optimizer: {{type: momentum, lr: 0.1, momentum: 0.9{optimizer}}}\n{more}{extra}"
        )

    whole = f"ranks: 1\n{train('', plain)}"
    return (
        "\n".join([*lines, train(optimizer, "".join(key.train for key in keys))]),
        whole,
        max([2e-4, *(key.tolerance for key in keys)]),
    )


def outcome(names: list[str]) -> tuple[str, str]:
    """What comes of keys beside each other, and the text that says more."""
    text, one, tolerance = plan(names)
    stack = any(TABLE[name].stack for name in names)
    try:
        whole = whole_run(one, stack)
        with tempfile.TemporaryDirectory() as folder:
            have = run(source(stack), text, Path(folder) / "cut", steps(stack), check=False)
            faults = "\n".join(map(str, check_artifact(Path(folder) / "cut")))
        for own, other in zip(have.outputs, whole.outputs, strict=True):
            for name in other.keys() & own.keys():
                np.testing.assert_allclose(own[name], other[name], rtol=max(2e-5, tolerance / 10), atol=tolerance / 10)
        kept = {name: have.after[name] for name in whole.after}
        same_tensors(kept, whole.after, whole.before, tolerance)
        assert not faults, faults
    except CompileError as error:
        return ("fault" if "a bug in partc" in str(error) else "refused"), str(error)
    except AssertionError as error:
        return "different", str(error)
    except Exception:
        return "fault", traceback.format_exc()
    return "equal", ""


def together(names: list[str]) -> bool:
    """Whether a plan can say all of them: one of each kind, a key of a plan once, and those that the model has.

    Of an adapter that begins with zeros eight bits leave nothing that could be compared.
    """
    kinds = [TABLE[name].kind for name in names]
    stack = any(TABLE[name].stack for name in names)
    others = {"experts", "context", "adapters", "frozen", "target"} if stack else set()
    written = [line.partition(":")[0] for name in names for line in TABLE[name].lines]
    once = len({*kinds}) == len(kinds) and len({*written}) == len(written)
    return once and others.isdisjoint(kinds) and not {"messages", "adapters"} <= {*kinds}


def main(sets: list[list[str]]) -> int:
    """Tries these sets; the number of faults."""
    counts = {"equal": 0, "refused": 0, "different": 0, "fault": 0}
    for names in sets:
        found, text = outcome(names)
        counts[found] += 1
        print(f"{' + '.join(names)}: {found}" + (f"\n{text}\n{plan(names)[0]}" if found != "equal" else ""), flush=True)
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return counts["different"] + counts["fault"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=0, help="random sets instead of all pairs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keys", nargs="+", choices=[*TABLE], help="this set alone")
    parser.add_argument("--of", nargs="+", choices=[*TABLE], help="pairs that have one of these")
    said = parser.parse_args()
    chance = random.Random(said.seed)
    if said.keys:
        tried = [said.keys]
    elif said.cases:
        drawn = ([*chance.sample([*TABLE], chance.choice([3, 4, 5]))] for _ in iter(int, 1))
        fitting = (names for names in drawn if together(names))
        tried = [next(fitting) for _ in range(said.cases)]
    else:
        tried = [[name] for name in TABLE] + [[*pair] for pair in combinations(TABLE, 2) if together([*pair])]
        tried = [pair for pair in tried if not said.of or {*said.of} & {*pair}]
    sys.exit(bool(main(tried)))
