"""CONTRIBUTING.md as it is followed: the diff of a section, and a copy of the project to which it is applied."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def patched(section: str) -> dict[str, str]:
    """By path the text of each file that the section's diff makes or changes, once it is applied."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    lines = text.split("```diff\n")[1].split("```")[0].splitlines()
    texts: dict[str, str] = {}
    path, last = "", ""
    for line in lines:
        if line.startswith("+++ b/"):
            path, last = line.removeprefix("+++ b/"), ""
            texts[path] = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        elif line.startswith("+"):
            assert last or not (ROOT / path).exists(), "an added line follows one that is there"
            whole = f"{last}{line[1:]}\n"
            texts[path] = texts[path].replace(last, whole, 1) if last else texts[path] + whole
            last = whole if last else ""
        elif line.startswith(" "):
            last = f"{line[1:]}\n"
            assert texts[path].count(last) == 1, f"{path} has no line {line[1:]!r}"
    return texts


def followed(folder: Path, *sections: str) -> Path:
    """A copy of the project's packages and tests to which the diffs of sections are applied, each to other files."""
    copy = folder / "partc"
    ignored = shutil.ignore_patterns("benchmarks", "golden", "fuzz", "simulation")
    for name in ("cli", "compiler", "runtime", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "__init__.py"):
        shutil.copy(ROOT / name, copy)
    changed = [item for section in sections for item in patched(section).items()]
    assert len(dict(changed)) == len(changed)
    for path, text in changed:
        (copy / path).write_text(text)
    return copy


def output_of(copy: Path, *arguments: str) -> str:
    """What Python prints, run in a copy of the project with these arguments; fails where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
    run = [sys.executable, *arguments]
    made = subprocess.run(run, cwd=copy, env=environment, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout
