"""The pages of the guide as commands, and a reader who follows them in a fresh environment.

A block whose language is followed by a file's name is that file. In a `console` block a line that begins with `$` is a
command, run in the folder that the last `cd` left, and a line `...` stands for any lines.

    python tests/samples/guide_pages.py [PAGE ...]      # the course, or these pages, with the seconds of each
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "samples"
INDEX = SAMPLES / "README.md"
FENCE = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ANY_LINES = "...\n"


@dataclass(frozen=True)
class Command:
    """A line of a console, and what is shown below it."""

    line: str
    shown: str

    @property
    def exit_code(self) -> int:
        """1 where the text tells a failure, 2 where it refuses what the user gave."""
        refused = "help:" in self.shown or "run it with" in self.shown
        return 1 if "violation" in self.shown else 2 if refused else 0

    def matches(self, output: str) -> bool:
        shards = [re.escape(shard) for shard in comparable(self.line, self.shown).split(ANY_LINES)]
        return re.fullmatch(r"(?:.*\n)*?".join(shards), comparable(self.line, output)) is not None


def comparable(line: str, text: str) -> str:
    """The text without what another machine or moment changes: times, progress of a slow run, and computed values in tables."""
    text = re.sub(r"^step \d+ of \d+\n", "", text, flags=re.MULTILINE)
    if re.search(r"partc (run|verify)", line):
        text = re.sub(r"^(output|logits) .*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\d[\d,]*(\.\d+)? (us|ms|s\b|steps/s)", "<time>", text)


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Language, file name and text of every fenced block of a page."""
    for found in FENCE.finditer(page.read_text()):
        yield found[1], found[2], found[3]


def commands(text: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, shown = part.partition("\n")
        yield Command(line, shown)


def course() -> list[Path]:
    """The pages of the index's first table."""
    table = INDEX.read_text().partition("## The course")[2].partition("\n## ")[0]
    return [SAMPLES / path for path in re.findall(r"\((guide/.*?)\)", table)]


def follow(page: Path, folder: Path, environment: dict[str, str]) -> tuple[int, list[str]]:
    """Runs a page's commands in shells, ranks over MPI; how many there are, and what is shown otherwise than it happens."""
    number, trouble = 0, []
    for language, name, text in blocks(page):
        if language != "console":
            if name:
                (folder / name).write_text(text)
            continue
        for command in commands(text):
            number += 1
            if command.line.startswith("cd "):
                folder = folder / command.line[3:]
                continue
            shell = ["bash", "-o", "pipefail", "-c", command.line]
            done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
            if done.returncode != command.exit_code or not command.matches(done.stdout + done.stderr):
                trouble.append(f"$ {command.line}\n{done.stdout}{done.stderr}exit code {done.returncode}")
    return number, trouble


def main(pages: list[Path]) -> int:
    """Installs partc as the guide says, follows each page in a fresh copy of the samples, and prints its times."""
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        begin = time.monotonic()
        venv.create(home / "venv", with_pip=True)
        binaries = home / "venv" / "bin"
        subprocess.run([binaries / "pip", "install", "--quiet", "-e", f"{ROOT}[mpi]"], check=True)
        print(f"installed in {time.monotonic() - begin:.0f} s", flush=True)
        path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        for page in pages:
            folder = home / page.stem
            shutil.copytree(SAMPLES, folder, ignore=shutil.ignore_patterns("build*", "resnet18.*", "__pycache__"))
            begin = time.monotonic()
            number, trouble = follow(page, folder, {**os.environ, **as_root, "PATH": path})
            words = len(page.read_text().split())
            print(f"{page.stem}: {words} words, {number} commands in {time.monotonic() - begin:.0f} s", flush=True)
            print(*trouble, sep="\n", end="\n" if trouble else "", flush=True)
            failed += len(trouble)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main([Path(page).resolve() for page in sys.argv[1:]] or course()))
