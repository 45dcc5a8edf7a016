"""Small random networks to be placed on stages, as ONNX text: towers of blocks with skips, shared weights, tables and shape arithmetic.

net = grown(random.Random(3))
net.text, net.weights        the model, and the shapes of its weights
net.blocks                   the names of the nodes, block by block in an order in which they can run
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

IN, WIDTH, HIDDEN, CLASSES, ROWS, LENGTH = 6, 8, 12, 5, 14, 3
CONSTANTS = (
    "bool on = {1}, float half = {0.5}, int64[1] at0 = {0}, int64[1] at1 = {1}, "
    "int64[2] pair = {2, 4}, int64[2] flat = {-1, 8}, int64[1] last = {-1}, int64[1] two = {2}"
)


@dataclass
class Network:
    """A network while it grows, and then. `positions`: whether a record has several, of a dynamic number."""

    chance: random.Random
    positions: bool
    blocks: list[list[str]] = field(default_factory=list)
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    cut: dict[str, str] = field(default_factory=dict)
    """Nodes of which a group may cut the weight, and how."""
    ratio: str = "0.3"
    """How much a dropout drops."""

    @property
    def dims(self) -> str:
        """The dims before the features."""
        return "batch, seq" if self.positions else "batch"

    @property
    def text(self) -> str:
        """The model."""
        inputs = [f"float[{self.dims}, {IN}] x"]
        if "ids" in self.read:
            inputs.append(f"int64[{self.dims}] ids")
        shapes = [f"float[{', '.join(map(str, shape))}] {name}" for name, shape in self.weights.items()]
        constants = f"float ratio = {{{self.ratio}}}, {CONSTANTS}"
        return (
            f'<ir_version: 10, opset_import: ["" : 21]>\n'
            f"m ({', '.join(inputs)}) => (float[{self.dims}, {CLASSES}] y)\n<{', '.join(shapes)}, {constants}> {{\n"
            + "\n".join(f"    {line}" for line in self.lines)
            + "\n}"
        )

    def add(self, op: str, *inputs: str, out: str = "") -> str:
        """Writes a node of the last block and gives what it makes."""
        name = f"n{len(self.lines)}"
        made = out or f"v{len(self.lines)}"
        self.lines.append(f"[{name}] {made} = {op} ({', '.join(inputs)})")
        self.read.update(inputs)
        self.blocks[-1].append(name)
        return made

    def weight(self, *shape: int, shared: bool = True) -> str:
        """A parameter; now and then one that is there already."""
        known = [name for name, there in self.weights.items() if there == shape]
        if shared and known and self.chance.random() < 0.3:
            return self.chance.choice(known)
        name = f"w{len(self.weights)}"
        self.weights[name] = shape
        return name

    def matmul(self, x: str, *shape: int, cut: str = "") -> str:
        """A product with a parameter; `cut` says how ranks of a group may share it."""
        made = self.add("MatMul", x, self.weight(*shape))
        if cut:
            self.cut[self.blocks[-1][-1]] = cut
        return made


def _linear(net: Network, x: str) -> str:
    made = net.matmul(x, WIDTH, WIDTH)
    return net.add("Add", made, net.weight(WIDTH)) if net.chance.random() < 0.5 else made


def _layers(net: Network, x: str) -> str:
    """Two layers and what is between them, around which the input may go."""
    up = net.matmul(x, WIDTH, HIDDEN, cut="colwise")
    if net.chance.random() < 0.3:
        up = net.add("Add", up, net.weight(HIDDEN))
    bent = net.add(net.chance.choice(["Relu", "Tanh", "Sigmoid", "Gelu", 'Gelu <approximate = "tanh">']), up)
    down = net.matmul(bent, HIDDEN, WIDTH, cut="rowwise")
    return net.add("Add", x, down) if net.chance.random() < 0.6 else down


def _norm(net: Network, x: str) -> str:
    operands = [x, net.weight(WIDTH)] + ([net.weight(WIDTH)] if net.chance.random() < 0.5 else [])
    return net.add("LayerNormalization <epsilon = 0.01>", *operands)


def _softmax(net: Network, x: str) -> str:
    return net.add("Mul", net.add("Softmax <axis = -1>", x), x)


def _dropout(net: Network, x: str) -> str:
    return net.add("Dropout", x, "ratio", "on")


def _skip(net: Network, x: str) -> str:
    return net.add(net.chance.choice(["Add", "Mul", "Sub"]), x, net.chance.choice(net.values))


def _concat(net: Network, x: str) -> str:
    both = net.add("Concat <axis = -1>", x, net.chance.choice(net.values))
    return net.matmul(both, 2 * WIDTH, WIDTH)


def _lookup(net: Network, x: str) -> str:
    return net.add("Add", x, net.add("Gather", net.weight(ROWS, WIDTH), "ids"))


def _reshape(net: Network, x: str) -> str:
    """Features as pairs, turned around and back; the shape is made of the input's."""
    shape = net.add("Shape", x)
    records = net.add("Slice", shape, "at0", "last")
    whole = net.add("Concat <axis = 0>", records, "pair")
    pairs = net.add("Reshape", x, whole)
    perm = "0, 1, 3, 2" if net.positions else "0, 2, 1"
    return net.add("Reshape", net.add(f"Transpose <perm = [{perm}]>", pairs), shape)


def _flat(net: Network, x: str) -> str:
    """All positions as records, for a product."""
    made = net.matmul(net.add("Reshape", x, "flat"), WIDTH, WIDTH)
    return net.add("Reshape", net.add("Tanh", made), net.add("Shape", x))


def _expand(net: Network, x: str) -> str:
    rows = net.add("Expand", net.weight(1, WIDTH), net.add("Shape", x))
    return net.add("Mul", x, rows)


def _constant(net: Network, x: str) -> str:
    return net.add("Add", net.add("Mul", x, "half"), net.add("Constant <value = float {0.25}>"))


def _attention(net: Network, x: str) -> str:
    """Between positions; without any, between the features of a record."""
    if not net.positions:
        return net.add("Sub", x, net.add("ReduceMean <keepdims = 1>", x, "last"))
    scores = net.add("MatMul", net.matmul(x, WIDTH, WIDTH), net.add("Transpose <perm = [0, 2, 1]>", x))
    shares = net.add("Softmax <axis = -1>", net.add("Mul", scores, "half"))
    return net.add("Add", x, net.add("MatMul", shares, net.matmul(x, WIDTH, WIDTH)))


def _split(net: Network, x: str) -> str:
    name = f"n{len(net.lines)}"
    net.lines.append(f"[{name}] {name}a, {name}b = Split <axis = -1, num_outputs = 2> ({x})")
    net.blocks[-1].append(name)
    return net.add("Concat <axis = -1>", net.add("Sigmoid", f"{name}b"), f"{name}a")


BLOCKS: tuple[Callable[[Network, str], str], ...] = (
    _linear,
    _layers,
    _layers,
    _layers,
    _norm,
    _softmax,
    _dropout,
    _skip,
    _concat,
    _lookup,
    _reshape,
    _flat,
    _expand,
    _constant,
    _attention,
    _split,
)


def _statistics(net: Network, x: str) -> str:
    """A normalization by the statistics of the batch, of features or of those of all positions."""
    name = f"n{len(net.lines)}"
    given = [net.weight(WIDTH, shared=False) for _ in range(4)]
    flat = net.add("Reshape", x, "flat") if net.positions else x
    name = f"n{len(net.lines)}"
    net.lines.append(
        f"[{name}] {name}a, {name}b, {name}c = BatchNormalization <training_mode = 1, momentum = 0.8> ({flat}, {', '.join(given)})"
    )
    net.read.update(given)
    net.blocks[-1].append(name)
    return net.add("Reshape", f"{name}a", net.add("Shape", x)) if net.positions else f"{name}a"


def grown(chance: random.Random, statistics: bool = False) -> Network:
    """A network of one tower, or two that are joined; the head may share the table. `statistics`: a block has those of a batch."""
    net = Network(chance, chance.random() < 0.3)
    towers = []
    for _ in range(chance.choice([1, 1, 1, 2])):
        net.blocks.append([])
        x = net.matmul("x", IN, WIDTH)
        if chance.random() < 0.5:
            x = net.add("Tanh", x)
        net.values = [*net.values, x] if chance.random() < 0.5 else [x]
        for _ in range(chance.randint(1, 4)):
            net.blocks.append([])
            x = chance.choice(BLOCKS)(net, x)
            net.values.append(x)
        if statistics and not towers:
            net.blocks.append([])
            x = _statistics(net, x)
        towers.append(x)
    net.blocks.append([])
    x = towers[0] if len(towers) == 1 else net.add(chance.choice(["Add", "Mul"]), *towers)
    net.blocks.append([])
    tables = [name for name, shape in net.weights.items() if shape == (ROWS, WIDTH)]
    if tables and chance.random() < 0.5:
        scores = net.add("MatMul", x, net.add("Transpose <perm = [1, 0]>", chance.choice(tables)))
        net.add("MatMul", scores, net.weight(ROWS, CLASSES), out="y")
    elif chance.random() < 0.5:
        net.add("Add", net.matmul(x, WIDTH, CLASSES), net.weight(CLASSES), out="y")
    else:
        net.add("MatMul", x, net.weight(WIDTH, CLASSES), out="y")
    net.blocks = [block for block in net.blocks if block]
    return net


def batch(net: Network, seed: int, records: int, ignored: int, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Numbers for all that a network may read; of the first `ignored` records no label counts, and of others few."""
    rng = np.random.default_rng(seed)
    sizes = (records, length) if net.positions else (records,)
    label = rng.integers(0, CLASSES, sizes)
    label[:ignored] = -1
    label[ignored:][rng.random(label[ignored:].shape) < 0.3] = -1
    label.reshape(-1)[-1:] = 2
    return {
        "x": rng.normal(size=(*sizes, IN)).astype(np.float32),
        "ids": rng.integers(0, ROWS, sizes),
        "label": label,
        "t": rng.normal(size=(*sizes, CLASSES)).astype(np.float32),
    }
