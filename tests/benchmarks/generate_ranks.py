"""Tokens a second of a decoder over two MPI ranks against one: tensor parallel, and in stages whose groups of slots take turns.

    python tests/benchmarks/generate_ranks.py [--width 1024] [--layers 4] [--slots 16] [--prompt 32] [--tokens 48] [--rounds 5]

A Llama with random weights, exported once by torch into `--files`. All slots have a prompt of `--prompt` tokens, and so many tokens are
made behind each; one thread a rank, from the first call to the last token, prompts included. All layouts run in each round; printed are
medians of the rounds, their ratio to one rank, and milliseconds of CPU a token by rank. All make the same tokens. Wanted: at least 1.6
times one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI
from partc.compiler import compile_model
from partc.compiler.frontend import load
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.generation import Generation
from partc.compiler.proposal.propose import propose
from partc.runtime import Request, load_generator
from transformer import ROOT, mpi_command

VOCABULARY = 4096
LAYOUTS = {"one rank": Degrees(), "tp 2": Degrees(tp=2), "2 stages in 2 groups": Degrees(stages=2)}


def run_rank(build: Path, slots: int, prompt: int, tokens: int) -> None:
    """One rank of a layout; rank 0 prints seconds, CPU seconds of a token by rank, and all tokens."""
    comm, rng = MPI.COMM_WORLD, np.random.default_rng(0)
    prompts = [rng.integers(2, VOCABULARY, prompt).tolist() for _ in range(slots)]
    with load_generator(build, comm, threads=1) as generator:
        generator.run([Request(one, max_tokens=3) for one in prompts])
        begin, worked = time.perf_counter(), time.process_time()
        answers = generator.run([Request(one, max_tokens=tokens) for one in prompts])
        took, worked = time.perf_counter() - begin, time.process_time() - worked
        by_rank = comm.gather(worked / (slots * tokens))
    if comm.rank == 0:
        print(json.dumps([took, by_rank, [one.tokens for one in answers]]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "partc-decoders")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    for name, value in (("width", 1024), ("layers", 4), ("slots", 16), ("prompt", 32), ("tokens", 48), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.rank, options.slots, options.prompt, options.tokens)
        return
    from exported_decoders import exported

    path = exported(options.files, options.layers, options.width, VOCABULARY)
    seconds: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    cpu: dict[str, list[list[float]]] = {name: [] for name in LAYOUTS}
    made = set[str]()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {options.slots} slots, width {options.width}")
    with tempfile.TemporaryDirectory() as place:
        builds = {}
        for k, (name, degrees) in enumerate(LAYOUTS.items()):
            length = options.prompt + options.tokens + 1
            generation = Generation.over(degrees, length, options.slots)
            more = f"sampling: false{'' if generation.length < 64 else ', chunk: 32'}"
            text, _ = propose(load(path), path.name, degrees, generation=generation)
            plan = Path(place) / f"{k}.yaml"
            plan.write_text(text.replace("generate: {", f"generate: {{{more}, "))
            builds[name] = Path(place) / str(k)
            compile_model(path, plan, builds[name])
        for _ in range(options.rounds):
            for name, build in builds.items():
                numbers = [f"--{one}={getattr(options, one)}" for one in ("slots", "prompt", "tokens")]
                command = mpi_command(LAYOUTS[name].ranks, str(Path(__file__)), "--rank", str(build), *numbers)
                done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ROOT}, timeout=300)
                if done.returncode:
                    sys.exit(done.stderr)
                took, by_rank, tokens = json.loads(done.stdout.splitlines()[-1])
                seconds[name].append(took)
                cpu[name].append(by_rank)
                made.add(json.dumps(tokens))
    alone = statistics.median(seconds["one rank"])
    for name, some in seconds.items():
        took = statistics.median(some)
        busy = ", ".join(f"{1e3 * statistics.median(rank):.2f}" for rank in zip(*cpu[name], strict=True))
        speed = options.slots * options.tokens / took
        print(f"{name:22} {speed:8.1f} tokens/s  {alone / took:5.2f} times one rank   CPU ms a token by rank {busy}")
    print(f"{'the same tokens' if len(made) == 1 else f'{len(made)} different answers'}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
