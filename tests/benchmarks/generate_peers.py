"""What a token costs beside other ways to make it: onnxruntime by hand, torch, onnxruntime-genai, llama.cpp, and partc without `generate`.

    python tests/benchmarks/generate_peers.py [--only in_place,torch] [--turns 9] [--tokens 8] [--files FOLDER]
    python tests/benchmarks/generate_peers.py --genai-python VENV/bin/python --llama-python VENV/bin/python

A Llama with random weights, exported once by torch into `--files`. Each row is one peer at one number of tokens before: both are processes
of their own that make the same tokens, in turns, with as many threads. Printed are medians of CPU milliseconds a token, of all ranks
together, and those by the wall clock; the ratio and the goal are of CPU time, but against llama.cpp, whose threads wait by computing as
ranks do, of the wall clock. An interpreter with onnxruntime-genai has `onnxruntime-genai`, one with llama.cpp `xllamacpp gguf safetensors`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import llama_by_hand
import numpy as np
from exported_decoders import exported, model
from partc.compiler import compile_model
from partc.compiler.frontend import load
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.generation import Generation
from partc.compiler.proposal.propose import propose
from transformer import HERE, ROOT, available, mpi_command
from turns import Side

VOCABULARY, ROOM = 4096, 600
SCRIPT = str(HERE / "generate_sides.py")


@dataclass(frozen=True)
class Row:
    """A peer, and by how much partc's time is to be below or above its own.

    `most` is of the ratio; `slack` are milliseconds by which it may be above instead.
    """

    peer: str
    before: int
    most: float
    width: int = 512
    ranks: int = 1
    slack: float = 0.0
    wall: bool = False


ROWS = (
    Row("in_place", 64, 1.05, slack=0.1),
    Row("in_place", 2048, 1.05, slack=0.1),
    Row("copied", 2048, 0.65),
    Row("copied", 4000, 0.45),
    Row("torch", 64, 0.35),
    Row("torch", 2048, 0.35),
    Row("genai", 64, 1.1),
    Row("genai", 2048, 1.1),
    Row("llama", 64, 1.2, width=1024, ranks=2, wall=True),
    Row("loop", 64, 0.2, ranks=2),
)


@dataclass(frozen=True)
class Case:
    """The files that the sides of a row read: a folder for what is made of the model, and one for what the row makes."""

    row: Row
    files: Path
    scratch: Path
    options: argparse.Namespace

    @property
    def size(self) -> dict[str, int]:
        return {"layers": 4, "width": self.row.width, "heads": self.row.width // 64, "vocabulary": VOCABULARY}

    @property
    def prompt(self) -> Path:
        path = self.scratch / "prompt.json"
        path.write_text(json.dumps(np.random.default_rng(0).integers(3, VOCABULARY, self.row.before).tolist()))
        return path

    @property
    def exported(self) -> Path:
        return exported("llama", 23, "plain", self.files, **self.size)

    @property
    def saved(self) -> Path:
        """As transformers saves it."""
        folder = self.files / f"llama-saved-{self.row.width}"
        if not folder.exists():
            model("llama", **self.size).save_pretrained(folder)
        return folder

    @property
    def by_hand(self) -> Path:
        folder = self.scratch / "by_hand"
        return llama_by_hand.write(model("llama", **self.size), folder, self.row.before + ROOM)

    def built(self, generation: Generation | None) -> Path:
        """The artifact by the plan that is proposed."""
        folder = self.scratch / ("loop" if generation is None else "partc")
        folder.mkdir()
        degrees = Degrees(tp=self.row.ranks)
        text, _ = propose(load(self.exported), self.exported.name, degrees, generation=generation)
        (folder / "plan.yaml").write_text(text.replace("generate: {", "generate: {sampling: false, "))
        compile_model(self.exported, folder / "plan.yaml", folder / "build")
        return folder / "build"

    def side(self, name: str, model: Path) -> Side:
        """A side in this interpreter, on the ranks of the row where it has ranks."""
        arguments = [SCRIPT, name, str(model), str(self.prompt)]
        if name not in ("partc", "loop") or self.row.ranks == 1:
            return Side(name, [[sys.executable, *arguments]])
        return Side(name, [mpi_command(self.row.ranks, *arguments)], [ROOT])


def in_genai(case: Case) -> Side | None:
    python = case.options.genai_python
    if not available(python, "onnxruntime_genai", "--genai-python"):
        return None
    return Side("genai", [[python, str(HERE / "generate_genai.py"), str(case.by_hand.parent), str(case.prompt)]])


def in_llama(case: Case) -> Side | None:
    python = case.options.llama_python
    if not available(python, "xllamacpp, gguf, safetensors", "--llama-python"):
        return None
    arguments = [str(case.saved), str(case.prompt), "--threads", str(case.row.ranks)]
    return Side("llama", [[python, str(HERE / "generate_llama.py"), *arguments]])


PEERS: dict[str, Callable[[Case], Side | None]] = {
    "in_place": lambda case: case.side("in_place", case.by_hand),
    "copied": lambda case: case.side("copied", case.exported),
    "torch": lambda case: case.side("torch", case.saved),
    "genai": in_genai,
    "llama": in_llama,
    "loop": lambda case: case.side("loop", case.built(None)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PEERS))
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "partc-decoders")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=8, help="of a side in a turn")
    parser.add_argument("--genai-python", help="an interpreter with onnxruntime-genai")
    parser.add_argument("--llama-python", help="an interpreter with xllamacpp, gguf and safetensors")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - PEERS.keys():
        parser.error(f"--only: no peer is called {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    print(
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; milliseconds a token, by the wall clock in brackets"
    )
    print(f"{'peer':9} {'before':>6} {'width':>5} {'ranks':>5}  {'partc':>15} {'peer':>15}  ratio  goal")
    for row in ROWS:
        if row.peer in options.only.split(","):
            with tempfile.TemporaryDirectory() as place:
                told = measured(Case(row, options.files, Path(place), options))
            print(f"{row.peer:9} {row.before:6} {row.width:5} {row.ranks:5}  {told}", flush=True)


def measured(case: Case) -> str:
    """The end of a row."""
    row, options = case.row, case.options
    if (peer := PEERS[row.peer](case)) is None:
        return "-"
    sides = [case.side("partc", case.built(Generation(row.before + ROOM, 1))), peer]
    took: list[list[list[float]]] = [[], []]
    for turn in range(options.turns + 1):
        for side, times in zip(sides, took, strict=True):
            found = [1e3 * one / options.tokens for one in side.turn(options.tokens)]
            times += [found] * (turn > 0)
    (wall, cpu), (peer_wall, peer_cpu) = ([statistics.median(one) for one in zip(*side, strict=True)] for side in took)
    ours, theirs = (wall, peer_wall) if row.wall else (cpu, peer_cpu)
    met = ours <= max(row.most * theirs, theirs + row.slack if row.slack else 0.0)
    made = [json.loads(side.close()) for side in sides]
    both = min(map(len, made))
    same = "" if made[0][:both] == made[1][:both] else "  NOT THE SAME TOKENS"
    goal = f"{row.most:.2f}{f' or {1e3 * row.slack:.0f} us' if row.slack else ''}{' wall' if row.wall else ''}"
    figures = f"{cpu:7.2f} ({wall:5.2f}) {peer_cpu:7.2f} ({peer_wall:5.2f})  {ours / theirs:5.2f}"
    return f"{figures}  {goal} {'met' if met else 'missed'}{same}"


if __name__ == "__main__":
    main()
