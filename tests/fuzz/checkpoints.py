"""Checkpoints that a disk, a copy or a hand has damaged, and ones that lie: refused by all ranks alike, or harmless to the byte.

python tests/fuzz/checkpoints.py --minutes 5 --seed 1
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pool import command, main
from trainer_case import PARALLEL, batch, built, on_all

FILES = ("checkpoint.json", "rank_0000.safetensors", "rank_0001.safetensors")
STEPS = (1, 2, 3)
PLACE = "PARTC_FUZZ_CHECKPOINTS"
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    2**31,
    2**63,
    2**70,
    -(2**70),
    10**400,
    1.5,
    1e308,
    float("nan"),
    "",
    "w",
    "../step_00000001/rank_0000.safetensors",
    "/etc/passwd",
    "rank_0000.safetensors",
    "C:\\w",
    "\x1b[2J\nw",
    "x" * 3000,
    "float64",
    "F64",
    "BOOL",
    [],
    {},
    [0, 8],
    [4, 0],
    [2**60, 2**60 + 4],
    [1] * 100,
    [[0]],
    {"w": {}},
]


@functools.cache
def material() -> tuple[Path, dict[str, dict[str, str]]]:
    """An artifact of two ranks beside its checkpoints, and by step what they keep; `make` has made it, in a process before the cases."""
    folder = Path(os.environ[PLACE])
    return folder, json.loads((folder / "truth.json").read_text())


def make(folder: Path) -> None:
    """Trains for some steps."""
    plan = PARALLEL.replace("type: momentum", "type: adam").replace("lr: 0.1", "lr: 0.1, shard: true")
    built(folder / "build", plan)
    truth: dict[str, dict[str, str]] = {str(step): {} for step in STEPS}

    def train(trainer: Any) -> None:
        for step in STEPS:
            trainer.train(batch(step, slice(4 * trainer.rank, 4 * trainer.rank + 4)))
            trainer.save(folder / "runs")
            truth[str(step)].update(held(trainer))
            trainer.program.all_gather_text("")

    on_all(folder / "build", 2, train)
    (folder / "truth.json").write_text(json.dumps(truth))


def held(trainer: Any) -> dict[str, str]:
    """What a rank keeps, under names of its own."""
    return {f"{trainer.rank} {record.value}": array.tobytes().hex() for record, array in trainer.program.state.arrays()}


Damage = Callable[[random.Random, Path], None]
"""Does harm to something in a folder of checkpoints."""


def a_file(chance: random.Random, runs: Path) -> Path:
    """A file of a checkpoint, of the newest most often."""
    return runs / f"step_0000000{chance.choice([*STEPS, 3, 3, 3, 3])}" / chance.choice(FILES)


def a_place(chance: random.Random, size: int) -> int:
    """A byte of a file, in half of all cases one of its beginning, where the header is."""
    return chance.randrange(min(size, chance.choice([16, 400, size, size])))


def flip(chance: random.Random, runs: Path) -> None:
    file = a_file(chance, runs)
    data = bytearray(file.read_bytes())
    data[a_place(chance, len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def overwrite(chance: random.Random, runs: Path) -> None:
    file = a_file(chance, runs)
    data = bytearray(file.read_bytes())
    begin = a_place(chance, len(data))
    end = min(len(data), begin + chance.choice([1, 4, 64, 4096]))
    data[begin:end] = chance.choice([bytes(end - begin), chance.randbytes(end - begin)])
    file.write_bytes(data)


def lengthen(chance: random.Random, runs: Path) -> None:
    file = a_file(chance, runs)
    data = file.read_bytes()
    at = a_place(chance, len(data) + 1)
    file.write_bytes(data[:at] + chance.randbytes(chance.choice([1, 8, 100])) + data[at:])


def truncate(chance: random.Random, runs: Path) -> None:
    file = a_file(chance, runs)
    os.truncate(file, a_place(chance, file.stat().st_size))


def delete(chance: random.Random, runs: Path) -> None:
    a_file(chance, runs).unlink()


def swap(chance: random.Random, runs: Path) -> None:
    one, other = a_file(chance, runs), a_file(chance, runs)
    if one != other:
        one.rename(runs / "aside")
        other.rename(one)
        (runs / "aside").rename(other)


def copy(chance: random.Random, runs: Path) -> None:
    one, other = a_file(chance, runs), a_file(chance, runs)
    if one != other:
        shutil.copy(one, other)


def swap_folders(chance: random.Random, runs: Path) -> None:
    one, other = (runs / f"step_0000000{step}" for step in chance.sample(STEPS, 2))
    one.rename(runs / "aside")
    if chance.random() < 0.7:
        other.rename(one)
    (runs / "aside").rename(other if not other.exists() else runs / ".step_00000009.old")


def other_kind(chance: random.Random, runs: Path) -> None:
    file = a_file(chance, runs)
    away = runs / chance.choice(["away", "step_00000001/away"])
    file.rename(away)
    match chance.randrange(5):
        case 0:
            os.mkfifo(file)
        case 1:
            file.mkdir()
        case 2:
            file.symlink_to(away)
        case 3:
            file.symlink_to("/dev/zero")
        case _:
            file.symlink_to(file)


def edited(chance: random.Random, data: Any) -> Any:
    """JSON with some places set to what should not be there, taken out, or doubled."""
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        node = data
        while isinstance(node, dict | list) and node:
            key = chance.choice(list(node)) if isinstance(node, dict) else chance.randrange(len(node))
            inner = node[key]
            if isinstance(inner, dict | list) and inner and chance.random() < 0.8:
                node = inner
                continue
            match chance.randrange(6):
                case 0:
                    del node[key]
                case 1 if isinstance(node, dict):
                    node[chance.choice(["x", "\x1b[2J", "../w", "w"])] = inner
                case 2 if isinstance(inner, int):
                    node[key] = inner + chance.choice([-1, 1, 4, -4, 8])
                case _:
                    node[key] = chance.choice(VALUES)
            break
    return data


def reseal(step: Path, data: Any) -> None:
    """Writes an index as a hand that knows the format would."""
    from partc.runtime.checkpoint.index import sealed

    data.pop("sha256", None)
    (step / FILES[0]).write_text(sealed(json.dumps(data)[:-1]))


def lie_in_index(chance: random.Random, runs: Path) -> None:
    step = a_file(chance, runs).parent
    reseal(step, edited(chance, json.loads((step / FILES[0]).read_text())))


def lie_in_header(chance: random.Random, runs: Path) -> None:
    step = a_file(chance, runs).parent
    name = chance.choice(FILES[1:])
    data = (step / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = edited(chance, json.loads(data[8 : 8 + length]))
    text = json.dumps(header).encode()
    said = chance.choice([len(text), len(text), len(text), 2**60, 2**63, 0, len(text) - 1, len(text) + 8])
    begin = (said % 2**64).to_bytes(8, "little") + text
    (step / name).write_bytes(begin + data[8 + length :])
    index = json.loads((step / FILES[0]).read_text())
    index["files"][name] = {
        "bytes": len(begin) + len(data) - 8 - length,
        "header": hashlib.sha256(begin).hexdigest(),
    }
    reseal(step, index)


DAMAGES: list[Damage] = [flip, flip, flip, overwrite, lengthen, truncate, delete, swap, copy, swap_folders, other_kind]
BOTH = (swap, copy, swap_folders)
"""What may harm two checkpoints at once."""
LIES: list[Damage] = [lie_in_index, lie_in_header]


def case(chance: random.Random, folder: Path) -> str:
    """Harms one thing, then goes on from the newest, from the folder, and exports, each told apart."""
    made, truth = material()
    runs = folder / "runs"
    shutil.copytree(made / "runs", runs)
    lies = chance.random() < 0.4
    damage = chance.choice(LIES if lies else DAMAGES)
    damage(chance, runs)
    texts = []
    out = folder / "out.safetensors"
    for asked in (runs / "step_00000003", runs):

        def load(trainer: Any, asked: Path = asked) -> tuple[int, dict[str, str], str]:
            before = held(trainer)
            try:
                trainer.load(asked, "--resume")
            except Exception as error:
                assert held(trainer) == before, "what was refused has changed something"
                return -1, {}, told(error)
            return trainer.step, held(trainer), ""

        ends = on_all(made / "build", 2, load)
        assert len({text for _, _, text in ends}) == 1, f"ranks end unlike each other: {[text for _, _, text in ends]}"
        step, text = ends[0][0], ends[0][2]
        texts.append(text)
        if not text and not lies:
            have = ends[0][1] | ends[1][1]
            assert have == truth[str(step)], f"{damage.__name__}: step {step} is silently another one"
            assert asked != runs or step >= 2 or damage in BOTH, "the newest intact one is not taken"
        texts.append(command("checkpoint", "export", str(asked), "-o", str(out), "--all"))
        if not texts[-1] and not lies:
            assert not texts[-2], "what cannot be gone on from was exported"
        texts.append(command("checkpoint", "verify", str(asked)))
        if not lies and asked != runs:
            assert bool(texts[-1]) == bool(text) or damage is other_kind, f"verify: {texts[-1]!r}, load: {text!r}"
        assert "\x1b" not in "".join(texts), "an escape sequence is printed"
    return "\n".join(filter(None, texts))


def told(error: Exception) -> str:
    """What a user would see."""
    from partc.runtime.errors import PartcError

    return str(error) if isinstance(error, PartcError) else "".join(traceback.format_exception(error))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--make":
        make(Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as place:
            os.environ[PLACE] = place
            subprocess.run([sys.executable, __file__, "--make", place], check=True)
            main(case, __doc__ or "")
