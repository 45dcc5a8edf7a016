"""Values that a field may have where it should not, and the places of a tree of mappings and lists."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

INTS = [0, 1, -1, 2, 3, 5, 6, 7, 12, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [0.0, 1.0, -1.0, 1e38, float("inf"), float("nan"), 1e-45]
NAMES = [
    "",
    "x",
    "y",
    "h",
    "w",
    "n",
    "no such value",
    "\x00",
    "é",
    "../up",
    "a" * 3000,
    "x ",
    "%d",
    "h.begin",
    "y.partial",
    "\x1b[2J",
]
TEXTS = [*NAMES, "rank_0000.onnx", "../rank_0000.onnx", "/etc/passwd", "weights", "evaluate", "manifest.json", "0-3"]
TEXTS += [
    "0-99999999999",
    "0,0",
    "3-1",
    "-",
    "sum",
    "tensor(float)",
    "tensor(int64)",
    "tensor(",
    "seq(tensor(float))",
    "n//0",
]
TEXTS += ["n**n**n**n", "n**99999999", "(" * 500, "9" * 5000, "batch", "1/3", "AllReduce", "__class__"]


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a tree of mappings and lists: the owner, and the key or index in it."""
    for key, one in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield tree, key
        yield from places(one)


def field(chance: random.Random, data: dict[str, Any]) -> tuple[Any, Any]:
    """A place; those that are few, such as the settings of a training, as often as those that are many."""
    top = chance.choice(sorted(key for key, one in data.items() if one))
    return chance.choice([(data, top), *places(data[top])])


def other(chance: random.Random, old: Any, data: dict[str, Any]) -> Any:
    """Another value for a field, mostly of the same type."""
    if chance.random() < 0.2:
        old = chance.choice([None, 1, 0.5, "", [], {}, True])
    match old:
        case bool():
            return not old
        case int():
            return chance.choice([old + 1, old - 1, old * 2, *INTS, 10**12, 10**30])
        case float():
            return chance.choice([old + 1, *FLOATS])
        case str():
            owner, key = chance.choice(list(places(data)))
            return owner[key] if chance.random() < 0.5 and isinstance(owner[key], str) else chance.choice(TEXTS)
        case list():
            grown = [*old, chance.choice(INTS)]
            return chance.choice([[], old[:-1], old + old, list(reversed(old)), [old], grown, [None], "x"])
        case dict():
            names = [*sorted(old), "x"]
            return chance.choice(
                [{}, {**old, "unknown": 1}, dict(list(old.items())[:-1]), {**old, chance.choice(names): None}, []]
            )
    return chance.choice([[], {}, 0, "", [[[0, 1, 2]]], {"ranks": "0-1", "mesh": [2], "cuts": [[0]]}])


def change(chance: random.Random, data: dict[str, Any], top: str = "") -> None:
    """One field of a manifest is another, away or there twice; of its part `top`, where one is named."""
    owner, key = field(chance, data if not top else {top: data[top]})
    if owner is not data and top and key == top:
        owner = data
    match chance.randrange(8):
        case 0:
            del owner[key]
        case 1 if isinstance(owner, list):
            owner.insert(key, owner[key])
        case 2 if isinstance(owner, dict):
            owner[chance.choice([*owner, *TEXTS])] = owner[key]
        case 3 if isinstance(owner, list):
            at = chance.randrange(len(owner))
            owner[key], owner[at] = owner[at], owner[key]
        case _:
            owner[key] = other(chance, owner[key], data)
