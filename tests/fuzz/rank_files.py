"""Rank files and weights that partc did not write, hashes that fit: `partc check` refuses them, and so does a run.

What `check` does not refuse is loaded and run for a step.

python tests/fuzz/rank_files.py --minutes 5 --seed 1
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import onnx
from edits import FLOATS, INTS, NAMES, edit, flips
from manifests import copied, refit, run
from pool import command, main


def calls(chance: random.Random, model: onnx.ModelProto) -> None:
    """An attribute of a communication node, or of an update, is another one."""
    nodes = [node for node in model.graph.node if node.domain.startswith("partc") and node.attribute]
    if not nodes:
        return
    found = chance.choice(list(chance.choice(nodes).attribute))
    match found.type:
        case onnx.AttributeProto.INT:
            found.i = chance.choice([found.i + 1, *INTS])
        case onnx.AttributeProto.INTS:
            numbers = list(found.ints)
            numbers[chance.randrange(len(numbers) + 1) :] = [
                chance.choice(INTS) for _ in range(chance.choice((0, 1, 3)))
            ]
            found.ints[:] = numbers
        case onnx.AttributeProto.FLOAT:
            found.f = chance.choice(FLOATS)
        case _:
            found.s = chance.choice([b"", b"\xff", b"max", b"0-1", b"none such"])


def header(chance: random.Random, path: Path) -> None:
    """An entry of a safetensors header is another one."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    name = chance.choice(sorted(head))
    one = head[name]
    match chance.randrange(6):
        case 0:
            del head[name]
        case 1:
            head[chance.choice(NAMES)] = one
        case 2:
            head[name] = chance.choice([None, [], 3, "x", {}])
        case _ if isinstance(one, dict) and one:
            key = chance.choice(sorted(one))
            one[key] = chance.choice(
                [
                    None,
                    [],
                    [0, 10**30],
                    ["a", "b"],
                    [-1, 4],
                    [True, 4],
                    "F64",
                    "F32",
                    10**400,
                    chance.choice(INTS),
                    NAMES[-1],
                ]
            )
        case _:
            head["__metadata__"] = chance.choice([None, [], "x", {"a": 1}])
    text = json.dumps(head).encode()
    length = len(text) if chance.random() < 0.8 else chance.choice([0, 1, 2**63, 2**64 - 1, len(data)])
    path.write_bytes(length.to_bytes(8, "little") + text + data[8 + size :])


def work(chance: random.Random, folder: Path) -> str:
    """Checks such an artifact, and runs it if that finds nothing."""
    build = copied(chance, folder)
    tables = sorted(build.rglob("*.safetensors"))
    path = chance.choice(sorted(build.rglob("*.onnx")))
    kind = chance.choices(("edits", "calls", "bytes", "header", "weights"), (6, 3, 3, 2, 1))[0]
    if kind in ("header", "weights") and tables:
        path = chance.choice(tables)
        header(chance, path) if kind == "header" else path.write_bytes(flips(chance, path.read_bytes()))
    elif kind == "bytes":
        path.write_bytes(flips(chance, path.read_bytes()))
    else:
        model = onnx.load(path, load_external_data=False)
        edit(chance, model) if kind == "edits" else calls(chance, model)
        path.write_bytes(model.SerializeToString())
    if chance.random() < 0.95:
        refit(build)
    return command("check", str(build)) or run(build)


if __name__ == "__main__":
    main(work, "rank files and weights")
