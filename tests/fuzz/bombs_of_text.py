"""Bombs in texts: JSON, YAML, rows of schedules, and manifests whose fields stand for much."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

Bomb = Callable[[random.Random], bytes]


def of(text: str) -> Bomb:
    return lambda chance: text.encode()


JSON: Mapping[str, Bomb] = {
    "deep lists": lambda chance: b"[" * chance.choice([2000, 100_000, 3_000_000]),
    "deep mappings": lambda chance: b'{"a":' * chance.choice([2000, 1_000_000]),
    "a number of many digits": lambda chance: b'{"0F": %s}' % (b"9" * chance.choice([400, 4000, 1_000_000])),
    "a large number": of('{"0F": 1e999, "format": 2}'),
    "no number": of('{"0F": NaN, "format": 2}'),
    "many lists": lambda chance: b"[" + b"[]," * 10_000_000 + b"1]",
    "many keys": lambda chance: b"{" + b",".join(b'"%d":1' % k for k in range(700_000)) + b"}",
    "a long text": lambda chance: b'{"format": "' + b"a" * 20_000_000 + b'"}',
    "not UTF-8": of("") if False else lambda chance: b'{"format": "\xff\xfe"}',
    "UTF-16": lambda chance: '{"format": 2}'.encode("utf-16"),
    "zeros": lambda chance: bytes(5_000_000),
    "nothing": of(""),
    "null": of("null"),
    "a list": of("[1, 2]"),
    "an empty mapping": of('{"format": 2}'),
    "cut short": of('{"format": 2, "ranks": '),
    "a key twice": of('{"format": 2, "format": {}, "0F": "x"}'),
    "a negative time": of('{"0F": -1}'),
    "controls": of('{"0F\\u001b[31m": "\\u001b[0m"}'),
}


def _set(chance: random.Random, data: dict[str, Any]) -> dict[str, Any]:
    return data["programs"][next(iter(data["programs"]))]


def swell(chance: random.Random, data: dict[str, Any]) -> None:
    """Lets a field of a manifest stand for much."""
    own = data["programs"][next(iter(data["programs"]))]
    many = chance.choice([300, 3000, 12_000])
    match chance.randrange(14):
        case 0:
            data["groups"]["g"] = ["0-65535"] * many
        case 1:
            data["groups"] |= {f"g{k}": ["0-65535"] for k in range(many)}
        case 2:
            data["groups"]["g"] = [f"{k}-65535" for k in range(many)]
        case 3:
            data["ranks"] = 65536
            own["rank_files"] = {"rank_0000.onnx": "0-65535"}
            data["groups"] |= {f"g{k}": ["0-65535"] for k in range(many)}
        case 4:
            own["rank_files"] = {f"{k}.onnx": "0-65535" for k in range(many)}
        case 5:
            data["programs"] |= {"p" * (k + 2): own for k in range(chance.choice([70, 500]))}
        case 6:
            own["inputs"] = [{**own["inputs"][0], "name": f"x{k}", "ranks": f"{k}-65535"} for k in range(many)]
        case 7:
            own["inputs"][0]["boxes"] = {"mesh": [10**17] * many, "cuts": [[], []]}
        case 8:
            own["inputs"][0]["boxes"] = {"mesh": [1] * 1_000_000, "cuts": [[], []]}
        case 9:
            own["inputs"][0]["shape"] = ["(" * many + "n" + ")" * many]
        case 10:
            own["inputs"][0]["shape"] = ["n" + "*n" * many]
        case 11:
            own["inputs"][0]["shape"] = ["999999999999999999" + "*999999999999999999" * many]
        case 12:
            own["inputs"][0]["ranks"] = ",".join(["0-65535"] * many)
        case _:
            data["ranks"] = 65536
            own["rank_files"] = {"rank_0000.onnx": "0-65535"}
            data["groups"]["g"] = [[2 * k, 2 * k + 1] for k in range(32768)]


def _profile(**fields: object) -> Bomb:
    rank = {"rank": 0, "step": [0.1], "tasks": {"0F0": [0.1]}, "waits": {}, "kinds": {}, "arena": 0}
    return lambda chance: json.dumps({"profile": 1, "ranks": [rank | fields]}).encode()


PROFILES: Mapping[str, Bomb] = {
    "deep": lambda chance: b'{"profile": 1, "ranks": ' + b"[" * 1_000_000,
    "many ranks": lambda chance: b'{"profile": 1, "ranks": [' + b"{}," * 400_000 + b"{}]}",
    "many times": lambda chance: b'{"profile": 1, "ranks": [[' + b"0," * 18_000_000 + b"0]]}",
    "no times": _profile(step=[]),
    "no number": lambda chance: b'{"profile": 1, "ranks": [{"rank": 0, "step": [NaN]}]}',
    "times of nothing": _profile(step=[0.0], tasks={f"{s}{k}{m}": [0.0] for s in "01" for k in "FB" for m in range(4)}),
    "other steps": _profile(tasks={"0F0": [0.1, 0.2]}),
    "unknown tasks": _profile(tasks={f"{'9' * 400}F0": [0.1]}),
    "a wait of no task": _profile(waits={"7F7": [0.1]}),
    "a huge time": _profile(step=[1e308] * 3, tasks={"0F0": [1e308] * 3}),
    "a rank of many digits": lambda chance: b'{"profile": 1, "ranks": [{"rank": %s}]}' % (b"9" * 5000),
}


def _index(**fields: object) -> Bomb:
    def make(chance: random.Random) -> bytes:
        record = {"dtype": "float32", "shape": [4], "kind": "parameter", "pieces": []}
        data = {"format": 2, "partc": "0", "step": 2, "ranks": 1, "meta": {}, "tensors": {"t": record}, "files": {}}
        text = json.dumps(data | fields)[:-1]
        return f'{text},\n "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'.encode()

    return make


def _tensor(**fields: object) -> dict[str, object]:
    return {"t": {"dtype": "float32", "shape": [4], "kind": "parameter", "pieces": []} | fields}


_FILE = "rank_0000.safetensors"
INDEXES: Mapping[str, Bomb] = {
    "no pieces": _index(),
    "a huge tensor": _index(tensors=_tensor(shape=[10**9] * 60)),
    "a piece of much": _index(tensors=_tensor(pieces=[{"file": _FILE, "key": "t", "begin": [0], "end": [10**15]}])),
    "a piece outside": _index(tensors=_tensor(pieces=[{"file": "../x", "key": "t", "begin": [0], "end": [4]}])),
    "many pieces": _index(
        tensors=_tensor(
            shape=[30_000],
            pieces=[{"file": _FILE, "key": f"t{k}", "begin": [k], "end": [k + 1]} for k in range(30_000)],
        ),
        files={_FILE: {"bytes": 8, "header": ""}},
    ),
    "pieces that overlap": _index(
        tensors=_tensor(
            shape=[20_000],
            pieces=[{"file": _FILE, "key": "t", "begin": [0], "end": [1]} for _ in range(20_000)],
        ),
        files={_FILE: {"bytes": 8, "header": ""}},
    ),
    "many ranks": _index(ranks=10**15),
    "a step of many digits": _index(step=10**30),
    "a deep meta": lambda chance: b'{"format": 2, "meta": ' + b"[" * 500_000,
    "a file outside": _index(files={"/etc/passwd": {"bytes": 8, "header": ""}}),
}

TEXTS: Mapping[str, Bomb] = {
    "not UTF-8": lambda chance: b"\xff\n",
    "a long line": lambda chance: b"rank 0: " + b"0F0 " * 3_000_000,
    "a large number": lambda chance: b"# Schedule: x   Stages: 1   Microbatches: " + b"9" * 1_000_000,
    "many ranks": lambda chance: b"# Schedule: x   Stages: 2   Microbatches: 4\nranks 0-65535: 0F0\n" * 1000,
    "nothing": of(""),
    "controls": of("# Schedule: \x1b[31m   Stages: 2   Microbatches: 4\nrank 0: \x1b[0m\n"),
    "zeros": lambda chance: bytes(70_000_000),
}

ROWS: Mapping[str, Bomb] = {
    "not UTF-8": lambda chance: b"\xff\n",
    "a long row": lambda chance: b"0F0 " * 1_000_000,
    "many rows": lambda chance: b"0F0\n" * 1_000_000,
    "a large stage": lambda chance: b"999999999F0\n1F0\n",
    "a large microbatch": lambda chance: b"0F%s\n1F0\n" % (b"9" * chance.choice([9, 5000])),
    "one word": lambda chance: b"a" * 20_000_000,
    "nothing": of(""),
    "repeated": lambda chance: b"0F0 0F0\n1F0 1F0\n",
    "controls": of("\x1b[31m0F0\n"),
    "zeros": lambda chance: bytes(70_000_000),
}


def _aliases(depth: int, width: int) -> str:
    lines = ["a0: &a0 [1, 1, 1]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * width)}]" for k in range(1, depth)]
    return "\n".join(lines)


PLANS: Mapping[str, Bomb] = {
    "aliases": lambda chance: f"ranks: 2\n{_aliases(chance.choice([8, 30]), 9)}\n".encode(),
    "an alias of itself": of("ranks: 2\nplacement: &a {up: *a}\n"),
    "deep lists": lambda chance: b"ranks: 2\nplacement: " + b"[" * chance.choice([200, 20_000]),
    "deep mappings": lambda chance: b"ranks: 2\nplacement: " + b"{a: " * 5000,
    "names in a pattern": lambda chance: f'ranks: 2\nplacement: {{"{"a." * 5000}**": 1}}\n'.encode(),
    "stars": lambda chance: f'ranks: 2\nplacement: {{"{"**." * chance.choice([40, 3000])}x": 1}}\n'.encode(),
    "stars in a name": lambda chance: f'ranks: 2\nplacement: {{"{"*p" * chance.choice([40, 4000])}z": 1}}\n'.encode(),
    "alternatives": lambda chance: f'ranks: 2\nplacement: {{"{"{a,u}" * chance.choice([30, 2000])}": 1}}\n'.encode(),
    "alternatives in each other": lambda chance: f'ranks: 2\nplacement: {{"{"{a," * 500}b{"}" * 500}": 1}}\n'.encode(),
    "a wide range": of('ranks: 2\nplacement: {"layers[0-999999999999]": 1}\n'),
    "ranges": lambda chance: f'ranks: 2\nplacement: {{"{"[0-99]." * 1000}x": 1}}\n'.encode(),
    "many ranks": of("ranks: 999999999\n"),
    "a large mesh": of("ranks: 4\nmesh: {dp: 1000000000000, tp: 1000000000000}\n"),
    "many axes": lambda chance: f"ranks: 1\nmesh: {{{', '.join(f'a{k}: 1' for k in range(20_000))}}}\n".encode(),
    "many microbatches": of("ranks: 2\nplacement: {up: 0, down: 1}\npipeline: {microbatches: 1000000000}\n"),
    "a large divisor": of("ranks: 2\nsymbols: {n: {divisor: 1000000000000000000}}\n"),
    "a deep expression": lambda chance: f"ranks: 2\ninputs: {{x: ['{'(' * 5000}n{')' * 5000}', 6]}}\n".encode(),
    "a long expression": lambda chance: f"ranks: 2\ninputs: {{x: ['n{'*n' * 3000}', 6]}}\n".encode(),
    "a large strategy": of("ranks: 2\nsharding: {up: {in: [[1000000000000, 1], [1, 1]]}}\n"),
    "a long strategy": lambda chance: f"ranks: 2\nsharding: {{up: {{in: [[{'1,' * 50_000}]]}}}}\n".encode(),
    "a wide range of ranks": of('ranks: 2\nplacement: {up: "0-999999999"}\n'),
    "a number of many digits": lambda chance: b"ranks: " + b"9" * 5000,
    "a large float": of("ranks: 1\ntrain: {optimizer: {type: sgd, lr: 1e999}}\n"),
    "not UTF-8": lambda chance: b"ranks: \xff",
    "zeros": lambda chance: bytes(1_000_000),
    "a tag": of("ranks: !!python/object/apply:os.system [id]\n"),
    "two documents": of("ranks: 2\n---\nranks: 3\n"),
    "controls": of('ranks: 2\nplacement: {"\\e[31m": 1}\n'),
    "a long line": lambda chance: b"ranks: 2\noutputs: " + b"a" * 3_000_000,
    "many entries": lambda chance: b"ranks: 2\nplacement: {" + b"a: 1," * 300_000 + b"}\n",
}
