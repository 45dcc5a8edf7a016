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
from pathlib import Path

from edits import flips
from odd_values import change
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


def damage(chance: random.Random, folder: Path) -> None:
    """A few fields of a manifest are others."""
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    for _ in range(chance.choice((1, 1, 1, 1, 2, 4))):
        change(chance, data)
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
    """The manifest's hashes of files that were changed."""
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
    damage(chance, build)
    refit(build)
    return command("check", str(build)) or run(build)


if __name__ == "__main__":
    main(work, "manifests")
