"""What is simulated: small artifacts that use all that ranks do with each other, and the steps that they take.

Sizes are tiny and unlike each other; they change from step to step where the model lets them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from training_equivalence import from_text

SERVED = ", served"
Steps = Sequence[Mapping[str, Any]]
HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'


@dataclass(frozen=True)
class Sample:
    """An artifact and its steps. `native`: the transport reduces; `own_cores`: collectives may block; `tags`: the largest tag.

    `saves`: it writes checkpoints and reads the last; `recovers`: a step that fails is given up, and the next one runs.
    """

    name: str
    text: str
    weights: Mapping[str, tuple[int, ...]]
    plan: str
    steps: Callable[[np.random.Generator], Steps]
    tolerance: float = 1e-6
    native: bool = True
    own_cores: bool = False
    tags: int = 1 << 20
    saves: bool = False
    recovers: bool = False

    @property
    def trains(self) -> bool:
        """Whether the artifact trains."""
        return "\ntrain:" in self.plan

    @property
    def ranks(self) -> int:
        """How many ranks it has."""
        return int(self.plan.split("\n")[0].removeprefix("ranks: "))

    @property
    def model(self) -> str:
        """The name of what is compiled, which samples may share."""
        return self.name.removesuffix(SERVED)

    def compile(self, folder: Path, whole: bool = False) -> Path:
        """The artifact, or that of the same model on one rank."""
        plan = self.plan
        if whole:
            plan = "ranks: 1\n" + (plan[plan.index("train:") :].replace(", shard: dp", "") if self.trains else "")
        compile_source(Source(from_text(HEAD + self.text, self.weights).model), parse_plan(plan, "plan.yaml"), folder)
        return folder


def _floats(**shapes: tuple[int, ...]) -> Callable[[np.random.Generator, int], dict[str, Any]]:
    """Inputs of these shapes, a dim of -1 being the size of the step."""

    def give(random: np.random.Generator, size: int) -> dict[str, Any]:
        sizes = {name: [size if dim < 0 else dim for dim in shape] for name, shape in shapes.items()}
        return {name: random.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()}

    return give


def _sized(give: Callable[[np.random.Generator, int], dict[str, Any]], *sizes: int) -> Callable[..., Steps]:
    return lambda random: [give(random, size) for size in sizes]


def _labelled(
    give: Callable[[np.random.Generator, int], dict[str, Any]], classes: int
) -> Callable[..., dict[str, Any]]:
    def labelled(random: np.random.Generator, size: int) -> dict[str, Any]:
        label = random.integers(0, classes, size)
        label[: size // 4] = -1
        return {**give(random, size), "label": label}

    return labelled


def _ids(give: Callable[[np.random.Generator, int], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return lambda random, size: {**give(random, size), "ids": random.integers(-11, 12, (size, 2))}


DIAMOND = """m (float[B, 5] x) => (float[B, 5] y, float[B, 3] z) <float[5, 3] w> {
    [a] a = Relu (x) [b] b = Tanh (a) [c] c = Exp (a) [d] d = Sub (b, c) [e] e = Mul (d, a) [f] f = Add (e, c)
    [g] z = MatMul (f, w) [h] y = Sub (f, b) }"""
OBJECTS = """m (float[B, 3] x, string[B] s) => (float[k, 3] y, string[B] t) <int64[1] one = {1}, float zero = {0.1}> {
    [pos] p = ReduceMax <keepdims = 0> (x, one) [cond] c = Greater (p, zero) [pick] k = Compress <axis = 0> (x, c)
    [far] f = Neg (k) [back] y = Exp (f) [name] n = Identity (s) [both] t = Identity (n) }"""
MLP = """m (float[B, 6] x) => (float[B, 6] y) <float[6, 12] w, float[12, 18] v, float[18, 6] u> {
    [one] a = MatMul (x, w) [r1] b = Relu (a) [two] c = MatMul (b, v) [r2] d = Tanh (c) [three] y = MatMul (d, u) }"""
UNKNOWN = """m (float[B, 4] x) => (float[k, 4] y, float[k, 2] z) <int64[1] one = {1}, float zero = {0.1}, float[4, 2] w> {
    [pos] p = ReduceSum <keepdims = 0> (x, one) [cond] c = Greater (p, zero) [pick] k = Compress <axis = 0> (x, c)
    [far] y = Neg (k) [last] z = MatMul (k, w) }"""
SUMS = """m (float[B, 6, 3] x) => (float[B, 3] y, float[B, 3] z) <int64[1] one = {1}, float[3, 4] w, float[4, 3] v> {
    [halves] h = ReduceMax <keepdims = 0> (x, one) [head] y = Tanh (h)
    [first] f = MatMul (h, w) [second] z = MatMul (f, v) }"""
LOOKUP = """m (int64[batch, 2] ids, float[batch, 6] x) => (float[batch, 5] y) <float[12, 3] table, float[6, 5] w> {
    [ready] i = Neg (ids) [look] r = Gather (table, i) [shape] s = Constant <value_ints = [0, 6]> () [flat] f = Reshape (r, s)
    [add] a = Add (f, x) [down] y = MatMul (a, w) }"""
NET = """m (float[batch, 6] x) => (float[batch, 5] y) <float[6, 8] w, float[8, 5] v, float[5] shift> {
    [up] a = MatMul (x, w) [bend] b = Tanh (a) [down] c = MatMul (b, v) [add] y = Add (c, shift) }"""
WEIGHTS: dict[str, tuple[int, ...]] = {"w": (6, 8), "v": (8, 5), "shift": (5,)}
SQUARES = "\ntrain:\n  bucket_mb: 0.00001\n  loss: {type: mean_squared, prediction: y, target: t}\n"
CLASSES = (
    "\ntrain:\n  loss: {type: softmax_cross_entropy, logits: y, labels: label, ignore_index: -1, weights: [0.1, 3, 1, 0.5, 2]}\n"
    "  metrics: {right: {type: accuracy, logits: y, labels: label, ignore_index: -1}}\n"
)
PAIRS = _floats(x=(-1, 6), t=(-1, 5))

_ONCE: tuple[Sample, ...] = (
    Sample(
        "placed",
        DIAMOND,
        {"w": (5, 3)},
        "ranks: 3\nplacement: {a: 0, b: 1, c: 2, d: 1, e: 0, f: 2, g: 1, h: 0}\noutputs: {y: 1, z: 2}\n",
        _sized(_floats(x=(-1, 5)), 3, 2, 3),
    ),
    Sample(
        "few tags",
        DIAMOND,
        {"w": (5, 3)},
        "ranks: 2\nplacement: {a: 0, b: 1, c: 0, d: 1, e: 0, f: 1, g: 0, h: 1}\noutputs: {y: 0, z: 0}\n",
        _sized(_floats(x=(-1, 5)), 2, 4, 2),
        tags=2,
    ),
    Sample(
        "reshards",
        MLP,
        {"w": (6, 12), "v": (12, 18), "u": (18, 6)},
        "ranks: 6\nsymbols: {B: {divisor: 6}}\nsharding:\n  one: {in: [[2, 3], [3, 1]]}\n  r1: {in: [[6, 1]]}\n"
        "  two: {in: [[1, 6], [6, 1]]}\n  r2: {in: [[3, 2]]}\n  three: {in: [[2, 1], [1, 3]]}\n",
        _sized(_floats(x=(-1, 6)), 6, 12, 6),
        1e-5,
    ),
    Sample(
        "reduced here",
        MLP,
        {"w": (6, 12), "v": (12, 18), "u": (18, 6)},
        "ranks: 4\nplacement: {one: [0, 1], r1: [0, 1], two: [1, 2, 3], r2: [1, 2, 3], three: [3, 0]}\n"
        "sharding: {one: {in: [[1, 2], [2, 1]]}, two: {in: [[1, 3], [3, 1]]}, three: {in: [[1, 2], [2, 1]]}}\n",
        _sized(_floats(x=(-1, 6)), 2, 5, 2),
        1e-5,
        native=False,
    ),
    Sample(
        "rooted",
        SUMS,
        {"w": (3, 4), "v": (4, 3)},
        "ranks: 3\ndataset: {x: [1, 3, 1]}\nplacement: {halves: [0, 1, 2], head: 2, first: 1, second: [0, 1, 2]}\n"
        "sharding: {second: {in: [[1, 1], [1, 3]]}}\noutputs: {y: 2}\n",
        _sized(_floats(x=(-1, 6, 3)), 4, 1, 4),
        native=False,
    ),
    Sample(
        "blocking",
        MLP,
        {"w": (6, 12), "v": (12, 18), "u": (18, 6)},
        "ranks: 3\nsharding: {one: colwise, two: rowwise, three: colwise}\n",
        _sized(_floats(x=(-1, 6)), 3, 5, 3),
        1e-5,
        own_cores=True,
    ),
    Sample(
        "data parallel",
        NET,
        WEIGHTS,
        "ranks: 3\ndataset: data_parallel\nsymbols: {batch: {divisor: 3}}\n"
        f"{SQUARES}  optimizer: {{type: momentum, lr: 0.1, momentum: 0.9}}\n  clip: {{norm: 0.5}}\n",
        _sized(PAIRS, 6, 3, 6),
        2e-5,
    ),
    Sample(
        "sharded state",
        NET,
        WEIGHTS,
        "ranks: 4\nmesh: {dp: 2, tp: 2}\nsymbols: {batch: {divisor: 2}}\ndataset: {x: [dp, null], t: [dp, null]}\n"
        "sharding: {up: {parameters: {w: [null, tp]}}, down: {parameters: {v: [tp, null]}}}\n"
        f"{SQUARES}  optimizer: {{type: adam, lr: 0.1, shard: dp}}\n  on_nonfinite: skip\n".replace("0.00001", "1"),
        _sized(PAIRS, 4, 2, 4),
        2e-5,
    ),
    Sample(
        "pipeline",
        NET,
        WEIGHTS,
        "ranks: 4\nplacement: {up: [0, 1], bend: [0, 1], down: [2, 3], add: [2, 3]}\ndataset: data_parallel\n"
        f"symbols: {{batch: {{divisor: 2}}}}\n{SQUARES}  optimizer: {{type: sgd, lr: 0.1}}\n",
        _sized(PAIRS, 4, 2, 4),
        2e-5,
    ),
    Sample(
        "in parts",
        NET,
        WEIGHTS,
        "ranks: 2\ndataset: data_parallel\nsymbols: {batch: {divisor: 4}}\n"
        f"{CLASSES}  optimizer: {{type: momentum, lr: 0.1}}\n  accumulate: 2\n",
        _sized(_labelled(_floats(x=(-1, 6)), 5), 8, 16),
        2e-5,
        own_cores=True,
    ),
    Sample(
        "saving",
        NET,
        WEIGHTS,
        f"ranks: 3\nplacement: {{up: 0, bend: 1, down: 1, add: 2}}\n{CLASSES}  optimizer: {{type: adam, lr: 0.1}}\n",
        _sized(_labelled(_floats(x=(-1, 6)), 5), 4, 8),
        2e-5,
        saves=True,
    ),
    Sample(
        "looked up",
        LOOKUP,
        {"table": (12, 3), "w": (6, 5)},
        "ranks: 3\ndataset: data_parallel\nsymbols: {batch: {divisor: 3}}\nsharding: {look: pull}\n",
        _sized(_ids(_floats(x=(-1, 6))), 6, 3, 6),
    ),
    Sample(
        "rows of a server",
        LOOKUP,
        {"table": (12, 3), "w": (6, 5)},
        "ranks: 3\nroles: {ps: 1}\nplacement: {look: {role: ps}}\ndataset: data_parallel\nsymbols: {batch: {divisor: 2}}\n"
        f"{SQUARES}  optimizer: {{type: sgd, lr: 0.1}}\n",
        _sized(_ids(PAIRS), 4, 2, 4),
        2e-5,
    ),
    Sample(
        "unknown sizes",
        UNKNOWN,
        {"w": (4, 2)},
        "ranks: 2\ndataset: {x: [1, 2]}\n",
        _sized(_floats(x=(-1, 4)), 5, 2, 5),
    ),
    Sample(
        "objects",
        OBJECTS,
        {},
        "ranks: 3\nplacement: {pos: 0, cond: 1, pick: 1, far: 2, back: 0, name: 1, both: 2}\noutputs: {y: 1, t: 0}\n",
        lambda random: [
            {**_floats(x=(-1, 3))(random, size), "s": np.array([f"ö{k}" for k in range(size)], object)}
            for size in (4, 1, 4)
        ],
    ),
)
SAMPLES = (
    *_ONCE,
    *(replace(one, name=f"{one.name}{SERVED}", recovers=True) for one in _ONCE if not one.trains),
)
"""Those that keep nothing from step to step also as served programs are loaded."""
