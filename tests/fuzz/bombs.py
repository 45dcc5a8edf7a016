"""Files that say much in little, or never end: every reader ends with a message, within 1 GiB of memory and 20 s of processor time.

A case takes a reader (manifest, rank file, weights, schedule's text, model, plan, times, profile, rows, checkpoint's index, data) and
gives it a bomb: a pipe, an endless device, nesting, counts and sizes that a few bytes state, truncated and lying headers. The memory is
what the process may take beyond its libraries (RLIMIT_AS), so that onnxruntime's address space does not count. A case is killed after
20 s of processor time, and after 60 s of waiting, since a machine may be busy.

python tests/fuzz/bombs.py --cases 300 --seed 1
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

import pool
from bombs_of_models import MODELS
from bombs_of_numbers import ARRAYS, HEADERS
from bombs_of_text import JSON, PLANS, ROWS, TEXTS
from partc.runtime.artifact.format import MANIFEST
from pool import Wrong, command, main
from small import artifact, model

MEMORY = 1 << 30
SECONDS, PATIENCE = 20, 60.0
Bomb: TypeAlias = Callable[[random.Random], bytes]


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _outside(path: Path) -> None:
    path.symlink_to("/proc/self/environ")


def _around(path: Path) -> None:
    path.symlink_to(path.name)


def _folder(path: Path) -> None:
    path.mkdir()


OTHERS: tuple[Callable[[Path], None], ...] = (_pipe, _endless, _outside, _around, _folder)
"""What is no regular file."""


def lay(chance: random.Random, path: Path, bombs: Mapping[str, Bomb]) -> str:
    """Puts a bomb in the place of a file; what it is called."""
    path.unlink(missing_ok=True)
    if chance.random() < 0.15:
        other = chance.choice(OTHERS)
        other(path)
        return other.__name__
    name = chance.choice(sorted(bombs))
    path.write_bytes(bombs[name](chance))
    return name


def copied(chance: random.Random, folder: Path, *kinds: str) -> Path:
    """An artifact."""
    return Path(shutil.copytree(artifact(chance.choice(kinds)), folder / "build"))


def corrected(build: Path) -> None:
    """The manifest's sizes and hashes of files that were changed."""
    from mutated import correct

    if all(
        stat.S_ISREG((build / name).lstat().st_mode) for name in json.loads((build / MANIFEST).read_text())["files"]
    ):
        correct(build)


def reads_manifest(chance: random.Random, folder: Path) -> str:
    build = copied(chance, folder, "placed", "pipeline", "zero")
    path = build / "manifest.json"
    data = json.loads(path.read_text())
    if chance.random() < 0.5:
        lay(chance, path, JSON)
    else:
        from bombs_of_text import swell

        swell(chance, data)
        path.write_text(json.dumps(data))
    return command(chance.choice(["check", "inspect", "simulate"]), str(build))


def reads_rank_file(chance: random.Random, folder: Path) -> str:
    build = copied(chance, folder, "placed", "pipeline")
    lay(chance, build / "rank_0000.onnx", MODELS)
    corrected(build)
    return command("check", str(build))


def reads_weights(chance: random.Random, folder: Path) -> str:
    build = copied(chance, folder, "placed")
    lay(chance, sorted(build.glob("weights/*"))[0], HEADERS)
    corrected(build)
    return command("check", str(build))


def reads_schedule_text(chance: random.Random, folder: Path) -> str:
    build = copied(chance, folder, "pipeline")
    lay(chance, build / "ir" / "schedule.txt", TEXTS)
    corrected(build)
    return command(chance.choice(["check", "simulate", "inspect"]), str(build)) or command("check", str(build))


def reads_model(chance: random.Random, folder: Path) -> str:
    name = lay(chance, folder / "model.onnx", MODELS)
    found = command("compile", str(folder / "model.onnx"), "-o", str(folder / "build"), "-q")
    return found or (f"compiled: {name}" if name in HARMLESS else "")


HARMLESS = (
    *("a large ConstantOfShape", "a large Expand", "a large Range", "a large Tile", "a large Pad", "bodies of If"),
    *("a deep dim", "a long dim", "a dim that overflows", "a long chain of functions"),
)
"""Models that may be compiled, since it takes little, and what they compute is onnxruntime's."""


def reads_plan(chance: random.Random, folder: Path) -> str:
    (folder / "model.onnx").write_bytes(model())
    lay(chance, folder / "plan.yaml", PLANS)
    plan = ["--plan", str(folder / "plan.yaml")]
    return command("compile", str(folder / "model.onnx"), *plan, "-o", str(folder / "build"), "-q")


def reads_times(chance: random.Random, folder: Path) -> str:
    lay(chance, folder / "times.json", JSON)
    return command("simulate", "--schedule", "1f1b", "--ranks", "2", "-m", "4", "--times", str(folder / "times.json"))


def reads_profile(chance: random.Random, folder: Path) -> str:
    build = copied(chance, folder, "pipeline")
    from bombs_of_text import PROFILES

    lay(chance, folder / "times.json", PROFILES)
    return command("simulate", str(build), "--times", str(folder / "times.json"))


def reads_rows(chance: random.Random, folder: Path) -> str:
    lay(chance, folder / "rows.txt", ROWS)
    return command("simulate", "--rows", str(folder / "rows.txt"), "--placement", "0,1", "-m", "2")


def reads_index(chance: random.Random, folder: Path) -> str:
    from bombs_of_text import INDEXES

    place = folder / "step_00000002"
    place.mkdir()
    (place / "rank_0000.safetensors").write_bytes(HEADERS[chance.choice(sorted(HEADERS))](chance))
    lay(chance, place / "checkpoint.json", {**JSON, **INDEXES})
    return command("checkpoint", chance.choice(["show", "verify"]), str(place))


def reads_data(chance: random.Random, folder: Path) -> str:
    build = copied(chance, folder, "data parallel")
    path = folder / chance.choice(["d.npz", "x.npy", "x-ubyte", "x-ubyte.gz"])
    lay(chance, path, ARRAYS)
    words = ["--data", str(path) if path.suffix == ".npz" else f"x={path}", "--batch", "4", "--steps", "1", "-q"]
    return command("train", str(build), *words, "--in-process", "--max-bytes", "256MiB")


READERS: dict[str, Callable[[random.Random, Path], str]] = {
    "manifest": reads_manifest,
    "rank file": reads_rank_file,
    "weights": reads_weights,
    "schedule's text": reads_schedule_text,
    "model": reads_model,
    "plan": reads_plan,
    "times": reads_times,
    "profile": reads_profile,
    "rows": reads_rows,
    "index": reads_index,
    "data": reads_data,
}


def work(chance: random.Random, folder: Path) -> str:
    """Lays a bomb for a reader; what it says, which may not be nothing."""
    reader = chance.choice(sorted(READERS))
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (spent + SECONDS, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    said = READERS[reader](chance, folder)
    if not said:
        raise Wrong("accepted", f"{reader}: nothing is said of {sorted(path.name for path in folder.iterdir())}")
    if len(said) > MOST_SAID:
        raise Wrong("endless message", f"{reader}: {len(said):,} characters: {said[:400]}")
    return f"{reader}: {said}"


MOST_SAID = 20_000


def load_first() -> None:
    """Loads the libraries and compiles the artifacts that cases copy, before processes are forked and limited."""
    for kind in ("placed", "pipeline", "zero", "data parallel"):
        command("check", str(artifact(kind)))
        command("simulate", str(artifact(kind)))
    build = str(artifact("data parallel"))
    command("train", build, "--data", "none.npz", "--batch", "4", "--steps", "1", "--in-process")


if __name__ == "__main__":
    pool.MEMORY = MEMORY
    load_first()
    main(work, "bombs", seconds=PATIENCE, reason=lambda said: said.partition(":")[0])
