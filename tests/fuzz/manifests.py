"""Manifests that partc did not write, and damaged files beside them: `partc check` refuses them, and so does a run.

Every field of every record is changed in some case: to another value of its type, to one of another type, or away; hashes of files
fit. What `check` does not refuse is loaded and run for a step.

python tests/fuzz/manifests.py --minutes 5 --seed 1
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edits import FLOATS, INTS, NAMES, flips
from pool import command, main
from small import artifact

KINDS = (
    "placed",
    "sharded",
    "exchanged",
    "two groups",
    "data parallel",
    "zero",
    "tensor parallel training",
    "parts of a batch",
)
TEXTS = [
    *NAMES,
    "rank_0000.onnx",
    "../rank_0000.onnx",
    "/etc/passwd",
    "weights",
    "evaluation",
    "manifest.json",
    "0-3",
    "0-99999999999",
    "0,0",
    "3-1",
    "-",
    "sum",
]
TEXTS += [
    "tensor(float)",
    "tensor(int64)",
    "tensor(",
    "seq(tensor(float))",
    "n//0",
    "n**n**n**n",
    "n**99999999",
    "(" * 500,
    "9" * 5000,
    "batch",
    "1/3",
    "AllReduce",
    "__class__",
]


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a tree of mappings and lists."""
    for key, one in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield tree, key
        yield from places(one)


def field(chance: random.Random, data: dict[str, Any]) -> tuple[Any, Any]:
    """A place; those that are few, such as the settings of a training, as often as those that are many."""
    top = chance.choice(sorted(key for key, one in data.items() if one))
    inner = [(data, top), *places(data[top])]
    return chance.choice(inner)


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
            return chance.choice(
                [[], old[:-1], old + old, list(reversed(old)), [old], [*old, chance.choice(INTS)], [None], "x"]
            )
        case dict():
            names = sorted(old)
            return chance.choice(
                [
                    {},
                    {**old, "unknown": 1},
                    dict(list(old.items())[:-1]),
                    {**old, chance.choice([*names, "x"]): None},
                    [],
                ]
            )
    return chance.choice([[], {}, 0, "", [[[0, 1, 2]]], {"ranks": "0-1", "mesh": [2], "cuts": [[0]]}])


def change(chance: random.Random, folder: Path) -> None:
    """A few fields of a manifest are others."""
    path = chance.choice(sorted(folder.rglob("manifest.json")))
    data = json.loads(path.read_text())
    for _ in range(chance.choice((1, 1, 1, 1, 2, 4))):
        owner, key = field(chance, data)
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
    path.write_text(json.dumps(data))
    if chance.random() < 0.15:
        path.write_bytes(flips(chance, path.read_bytes()))
    elif chance.random() < 0.05:
        path.write_text(
            chance.choice(
                ["", "null", "[]", "{}", "[" * 100_000, '{"format": 1}', "\ufeff{}", '{"format": NaN}', "9" * 5000]
            )
        )


def refit(folder: Path) -> None:
    """The outer manifest's hashes of the inner ones, where there are such."""
    from mutated import correct

    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        correct(folder)


def run(folder: Path) -> str:
    """What a step in this process ends with; '' where it gives something."""
    from mutation_kinds import KINDS as ALL
    from mutation_kinds import run as step

    kind = next(ALL[name] for name in KINDS if name in folder.parent.name)
    found = step(kind, folder)
    return found if isinstance(found, str) else ""


def copied(chance: random.Random, folder: Path) -> Path:
    """An artifact of any kind, in a folder that says which."""
    kind = chance.choice(KINDS)
    target = folder / kind / "build"
    shutil.copytree(artifact(kind), target)
    return target


def work(chance: random.Random, folder: Path) -> str:
    """Checks such an artifact, and runs it if that finds nothing."""
    build = copied(chance, folder)
    change(chance, build)
    refit(build)
    return command("check", str(build)) or run(build)


if __name__ == "__main__":
    main(work, "manifests")
