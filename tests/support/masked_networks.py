"""Networks of `staged_networks.py` with dropouts wherever a value has records, and cuts of any node that reads one.

    masked(random.Random(3), net)

A dropout stands in the block of the node whose value it drops. `net.cut` gets cuts of records and of features, before a dropout, at it and
behind it, so that the value of a dropout may lie in other shards than what the network reads.
"""

from __future__ import annotations

import random

from staged_networks import Network

RATIOS = ("0.1", "0.3", "0.5", "0.75")
_SHAPES = ("Shape", "Slice", "Concat <axis = 0>", "Constant")
"""How nodes begin whose values are no numbers of records, next to those of weights."""


def masked(chance: random.Random, net: Network) -> None:
    """Puts one to three dropouts into a network, gives all of them another ratio, and has more nodes cut."""
    net.ratio = chance.choice(RATIOS)
    ranks = _ranks(net)
    there = [name for line in net.lines for name in _made(line) if name in ranks]
    for name in chance.sample(there, min(len(there), chance.choice([1, 1, 2, 3]))):
        _drop(net, name)
    ranks = _ranks(net)
    for line in net.lines:
        node, op, operands = _node(line), _op(line), _operands(line)
        rank = ranks.get(operands[0]) if operands else None
        if rank is None or op.startswith(("Shape", "Reshape", "Transpose", "Split")) or chance.random() < 0.6:
            continue
        numbers = [1] * rank
        numbers[0 if chance.random() < 0.6 or op != "Dropout" else rank - 1] = 2
        operands = [one for one in operands if one not in ("ratio", "on", "last", "half")]
        net.cut[node] = f"{{in: [{', '.join([str(numbers), *['null'] * (len(operands) - 1)])}]}}"


def _drop(net: Network, name: str) -> None:
    """A dropout of a value, which all its readers then read."""
    at = next(k for k, line in enumerate(net.lines) if name in _made(line))
    node, made = _node(net.lines[at]), f"{name}d"
    if name == "y":
        made = "kept"
        net.lines[at] = net.lines[at].replace(" y = ", f" {made} = ")
        inserted = f"[drop_y] y = Dropout ({made}, ratio, on)"
    else:
        for k, line in enumerate(net.lines[at + 1 :], at + 1):
            head, operands = line[: line.rindex("(")], _operands(line)
            net.lines[k] = f"{head}({', '.join(made if one == name else one for one in operands)})"
        inserted = f"[drop_{name}] {made} = Dropout ({name}, ratio, on)"
    net.lines.insert(at + 1, inserted)
    block = next(block for block in net.blocks if node in block)
    block.insert(block.index(node) + 1, _node(inserted))


def _ranks(net: Network) -> dict[str, int]:
    """The numbers of dims of all values that have records and are numbers."""
    found = {"x": 2 + net.positions}
    for line in net.lines:
        op, operands = _op(line), _operands(line)
        if op.startswith(_SHAPES):
            continue
        rank = max((found[name] for name in operands if name in found), default=0)
        if (op.startswith("Gather") and "ids" in operands) or op.startswith("Expand"):
            rank = found["x"]
        if op.startswith("Reshape") and rank:
            rank = 2 if "flat" in operands else _rank_of_shape(net, operands[1], found)
        if rank:
            found.update(dict.fromkeys(_made(line), rank))
    return found


def _rank_of_shape(net: Network, name: str, found: dict[str, int]) -> int:
    """The number of dims that a shape gives: of a value, or of records, and pairs behind."""
    made = next(line for line in net.lines if name in _made(line))
    return found[_operands(made)[0]] if _op(made) == "Shape" else found["x"] + 1


def _node(line: str) -> str:
    return line[1 : line.index("]")]


def _made(line: str) -> list[str]:
    """What a node makes; of a normalization of a batch not its statistics."""
    made = line[line.index("]") + 2 : line.index(" = ")].split(", ")
    return made[:1] if _op(line).startswith("Batch") else made


def _op(line: str) -> str:
    return line[line.index(" = ") + 3 : line.rindex("(")].strip()


def _operands(line: str) -> list[str]:
    return [one for one in line[line.rindex("(") + 1 : -1].split(", ") if one]
