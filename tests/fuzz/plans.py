"""Plans that nobody would write, compiled: edits of text and of structure, and what YAML has in store.

python tests/fuzz/plans.py --minutes 5 --seed 1
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from pool import command, main
from small import model

Place: TypeAlias = "tuple[Any, Any]"
"""A mapping or a list, and a key or an index in it."""

PLANS: list[dict[str, Any]] = [
    {"ranks": 3, "placement": {"up": 0, "shift": [1, 2], "down": 2}, "outputs": {"y": [0, 2]}},
    {
        "ranks": 4,
        "mesh": {"dp": 2, "tp": 2},
        "symbols": {"n": {"divisor": 4, "min": 4, "max": 64}},
        "inputs": {"x": ["n", 6]},
        "dataset": {"x": ["dp", None]},
        "sharding": {"up": "colwise", "down": {"in": [[1, 2], [2, 1]]}, "last": "replicate"},
        "max_reshard_bytes": "64MB",
    },
    {
        "ranks": 2,
        "dataset": "data_parallel",
        "symbols": {"n": {"divisor": 4}},
        "train": {
            "loss": {"type": "softmax_cross_entropy", "logits": "y", "labels": "label", "ignore_index": -1},
            "optimizer": {"type": "adamw", "lr": 0.01, "weight_decay": 0.1, "shard": True},
            "schedule": {"type": "cosine", "steps": 100, "warmup": 10},
            "parameters": {"b": {"frozen": True}, "*": {"weight_decay": 0, "lr": 2}},
            "metrics": ["accuracy"],
            "clip": {"norm": 1.0},
            "accumulate": 2,
            "data": {"x": "x.npy", "label": "y.npy"},
            "batch": 8,
            "epochs": 2,
            "seed": 3,
            "on_nonfinite": "skip",
        },
    },
    {
        "ranks": 4,
        "mesh": {"pp": 2, "dp": 2},
        "placement": {"{up,shift}": {"pp": 0}, "[dl]*": {"pp": 1}, "act": {"pp": 0}},
        "sharding": {"up": {"in": [[2, 1], [1, 1]], "out": [[2, 1]]}},
        "full_batch": True,
    },
]
TEXTS = [
    "",
    "x",
    "y",
    "up",
    "down",
    "**",
    "*",
    "[0-",
    "{a,",
    "[9-0]",
    "[0-99999999999]",
    "{" * 60,
    "*" * 300,
    "a." * 500,
    "dp",
    "colwise",
]
TEXTS += [
    "data_parallel",
    "producer",
    "cut",
    "\0",
    "\x1b[31m",
    "\u202e",
    "\ud7ff",
    "名前",
    "e\u0301",
    "../../etc/passwd",
    "x" * 5000,
    "64MB",
    "-1GB",
]
TEXTS += [
    "1e999MB",
    "NaN",
    "n",
    "n+1",
    "__import__('os')",
    "%s{0}{x!r}",
    "adam",
    "mse",
    "file.py:function",
    "()",
    "b",
    "train",
    "null",
]
NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    2**31,
    2**63,
    2**64,
    10**30,
    -(10**12),
    0.5,
    -0.0,
    1e-320,
    1e308,
    10**400,
    True,
    False,
    None,
    1000,
    65537,
]
RAW = [
    ".inf",
    "-.inf",
    ".nan",
    "2026-01-01",
    "0o17",
    "0x1F",
    "1_000",
    "!!python/object/apply:os.system ['true']",
    "!!binary aGk=",
    "~",
    "&a [*a]",
]
RAW += [
    "*missing",
    "!!set {a, b}",
    "? [1, 2] : 3",
    "!!timestamp 9999-99-99",
    "!!int x",
    "!local 3",
    "|\n  text",
    "<<: 3",
    "{<<: [1]}",
    "!!omap [a: 1]",
]
RAW += [
    "!!float 1__",
    "12:30:45",
    "1e400",
    "0b2",
    "'",
    '"',
    "[",
    "{",
    "- - -",
    "%YAML 9.9",
    "---",
    "...",
    "\t",
    "key: : :",
    "!!null x",
    "!!bool maybe",
    "=",
    "@",
    "`",
]
HEADS = [
    "\ufeff",
    "%YAML 1.1\n---\n",
    "%TAG ! tag:x,2000:\n---\n",
    "---\n---\n",
    "\t",
    "\x00",
    "# \u2028\n",
    "--- !!map\n",
    "&root\n",
    "...\n",
]
KEYS = [
    "ranks",
    "mesh",
    "train",
    "loss",
    "type",
    "in",
    "out",
    "placement",
    "symbols",
    "n",
    "divisor",
    "x",
    "<<",
    "",
    "é",
    "unknown",
    "parameters",
    "accumulate",
]


def places(tree: Any) -> list[Place]:
    """Every place of a tree of mappings and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, one in items for place in [(tree, key), *places(one)]]


def value(chance: random.Random, depth: int = 0) -> Any:
    """Anything that may stand in a plan where it should not."""
    kind = chance.randrange(7 if depth < 3 else 3)
    if kind < 2:
        return chance.choice(NUMBERS)
    if kind < 4:
        return chance.choice(TEXTS)
    if kind == 4:
        return [value(chance, depth + 1) for _ in range(chance.choice((0, 1, 2, 3, 40)))]
    if kind == 5:
        return {chance.choice(KEYS + TEXTS): value(chance, depth + 1) for _ in range(chance.choice((0, 1, 2, 5)))}
    found = chance.choice(places(chance.choice(PLANS)))
    return copy.deepcopy(found[0][found[1]])


def structure(chance: random.Random) -> str:
    """A sound plan with a few values, keys or entries that are others."""
    plan = copy.deepcopy(chance.choice(PLANS))
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        owner, key = chance.choice(places(plan) or [(plan, "ranks")])
        match chance.randrange(6):
            case 0:
                del owner[key]
            case 1 if isinstance(owner, dict):
                owner[chance.choice(KEYS + TEXTS)] = owner.pop(key)
            case 2 if isinstance(owner, dict):
                owner[chance.choice(KEYS + TEXTS)] = value(chance)
            case 3 if isinstance(owner, list):
                owner[key:key] = [owner[key]] * chance.choice((1, 2, 100))
            case 4 if isinstance(owner[key], int):
                owner[key] += chance.choice((-2, -1, 1, 2, 5))
            case _:
                owner[key] = value(chance)
    return json.dumps(plan, ensure_ascii=chance.random() < 0.5, indent=chance.choice((None, 1)))


def edited(chance: random.Random) -> str:
    """A sound plan's text with characters or lines taken out, doubled or put in."""
    text = block(chance.choice(PLANS))
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at, end = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        lines = text.splitlines(keepends=True) or [""]
        match chance.randrange(6):
            case 0:
                text = text[:at] + text[min(end, at + 9) :]
            case 1:
                text = (
                    text[:at]
                    + chance.choice(
                        [
                            "{",
                            "}",
                            "[",
                            "]",
                            ":",
                            "-",
                            "'",
                            '"',
                            "&",
                            "*",
                            "!",
                            "#",
                            "|",
                            "\n",
                            "\t",
                            "\0",
                            "\r",
                            "é",
                            "\u2028",
                            "\ufffe",
                            "%",
                            "@",
                            ",",
                        ]
                    )
                    + text[at:]
                )
            case 2:
                text = text[:at] + chance.choice(RAW) + text[at:]
            case 3:
                lines.insert(chance.randrange(len(lines)), chance.choice(lines))
                text = "".join(lines)
            case 4:
                line = chance.randrange(len(lines))
                lines[line] = " " * chance.choice((1, 2, 3, 8)) + lines[line]
                text = "".join(lines)
            case _:
                text = chance.choice(HEADS) + text
    return text


def block(plan: dict[str, Any]) -> str:
    """A plan in lines, the inner values as flows."""
    lines = []
    for key, one in plan.items():
        if isinstance(one, dict):
            lines += [f"{key}:", *(f"  {json.dumps(name)}: {json.dumps(inner)}" for name, inner in one.items())]
        else:
            lines.append(f"{key}: {json.dumps(one)}")
    return "\n".join(lines) + "\n"


def raw(chance: random.Random) -> str:
    """A value that only YAML can write, somewhere in a sound plan."""
    plan = copy.deepcopy(chance.choice(PLANS))
    owner, key = chance.choice(places(plan))
    owner[key] = "@@"
    return block(plan).replace('"@@"', chance.choice(RAW))


def grown(chance: random.Random) -> str:
    """What is deep, long or many: nesting, aliases that multiply, long lists, many keys."""
    many = chance.choice((30, 300, 3_000, 30_000))
    place = chance.choice(
        ["placement", "sharding", "mesh", "symbols", "inputs", "dataset", "outputs", "train", "ranks", "a"]
    )
    forms: list[Callable[[], str]] = [
        lambda: f"ranks: 2\n{place}: " + "[" * many + "]" * many,
        lambda: f"ranks: 2\n{place}: " + '{"a": ' * many + "1" + "}" * many,
        lambda: "ranks: 2\n" + "".join(f"{' ' * at}k:\n" for at in range(min(many, 3_000))),
        lambda: f"ranks: 2\n{place}:\n" + "".join(f"  k{at}: {at}\n" for at in range(many)),
        lambda: f"ranks: 2\n{place}: [{', '.join(map(str, range(many)))}]\n",
        lambda: f"ranks: {many * 1000}\nplacement: {{up: [{', '.join(map(str, range(many)))}]}}\n",
        lambda: (
            "a0: &a0 [x, x]\n"
            + "".join(f"a{at}: &a{at} [*a{at - 1}, *a{at - 1}]\n" for at in range(1, 40))
            + "ranks: 2\n"
        ),
        lambda: f"ranks: {'9' * many}\n",
        lambda: f"ranks: 2\nplacement: {{'{'*' * many}': 0}}\n",
        lambda: f"ranks: 2\nplacement: {{'{'*.' * min(many, 3_000)}x': 0, '{'**.' * 30}y': 1}}\n",
        lambda: f"ranks: 2\nplacement: {{'{'{a,b}' * min(many, 300)}': 0}}\n",
        lambda: (
            f"ranks: 2\nmesh: {{{', '.join(f'm{at}: 1' for at in range(min(many, 300)))}, dp: 2}}\nsharding: {{up: colwise}}\n"
        ),
        lambda: (
            f"ranks: 64\nsharding: {{up: {{in: [[{chance.choice((2, 4, 64))}, 1], [1, {chance.choice((1, 3, 12))}]]}}}}\n"
        ),
        lambda: (
            "ranks: 2\ntrain: {loss: {type: mse, prediction: y, target: t}, optimizer: sgd, "
            f"accumulate: {many}, batch: {10**9}, epochs: {10**12}}}\n"
        ),
    ]
    return chance.choice(forms)()


def text_of(chance: random.Random) -> str:
    """The text of a plan."""
    return chance.choices((structure, edited, raw, grown), (10, 6, 3, 1))[0](chance)


def work(chance: random.Random, folder: Path) -> str:
    """Compiles the model by such a plan."""
    (folder / "model.onnx").write_bytes(model())
    text = text_of(chance)
    data = text.encode("utf-8", "surrogatepass")
    if chance.random() < 0.05:
        at = chance.randrange(len(data) + 1)
        data = data[:at] + chance.choice([b"\xff", b"\xfe\xff", b"\x80", b"\xed\xa0\x80", b"\x00\x00"]) + data[at:]
    (folder / "plan.yaml").write_bytes(data)
    return command("compile", str(folder / "model.onnx"), "--plan", str(folder / "plan.yaml"), "-o", str(folder / "b"))


if __name__ == "__main__":
    main(work, "plans")
