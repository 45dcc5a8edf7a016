"""One sequence with drafts of 4 tokens against the same without, in float32 and in four bits.

    python tests/benchmarks/drafts.py [--turns 5] [--files FOLDER]

A Llama of 4 layers of width 512 with random weights, exported once by torch into `--files`, on one rank with one thread; times are of this
process's CPU, in turns. An answer that repeats itself is forced by a bias to three tokens; one that does not is drawn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from exported_decoders import exported
from partc.compiler import compile_model
from partc.runtime import Generator, Request, load_local_generator
from partc.runtime.generation.slots import Slots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "partc-decoders")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    path = exported(options.files, 4, 512, 4096)
    with tempfile.TemporaryDirectory() as place:
        print(of_drafts(path, Path(place), options.turns), flush=True)


def steps(generator: Generator, requests: list[Request]) -> tuple[list[float], list[list[int]]]:
    """The CPU seconds of each step, and the tokens of each request."""
    slots, found, made = Slots(generator.record), list[float](), [list[int]() for _ in requests]
    for number, request in enumerate(requests):
        slots.admit(number, request)
    while (step := slots.next()) is not None:
        begin = time.process_time()
        tokens = generator.begin(slots, step)()
        found.append(time.process_time() - begin)
        for one in tokens:
            made[one.request].append(one.token)
    return found, made


def of_drafts(path: Path, place: Path, turns: int) -> str:
    rng, rows = np.random.default_rng(0), []
    prompt = rng.integers(2, 4096, 32).tolist()
    requests = {
        "one that repeats": Request(
            prompt, max_tokens=200, logit_bias=dict.fromkeys((7, 70, 700), 50.0)
        ),  # one of three tokens
        "one that does not": Request(prompt, max_tokens=200, temperature=2.0, seed=3),
    }
    for kind, section in (("float32", ""), ("four bits", 'quantize: {"**": {bits: 4, block: 32}}\n')):
        builds = {}
        for name, more in (("drafts", "draft: {tokens: 4}, "), ("without", "")):
            folder = place / f"{kind} {name}"
            folder.mkdir()
            (folder / "plan.yaml").write_text(
                f"ranks: 1\n{section}generate: {{{more}slots: 1, length: 256, chunk: 64}}\n"
            )
            compile_model(path, folder / "plan.yaml", folder / "build")
            builds[name] = folder / "build"
        with (
            load_local_generator(builds["drafts"], threads=1) as drafts,
            load_local_generator(builds["without"], threads=1) as without,
        ):
            for name, request in requests.items():
                took: tuple[list[float], list[float]] = [], []
                answers = []
                for _ in range(turns):
                    for times, generator in zip(took, (drafts, without), strict=True):
                        found, made = steps(generator, [request])
                        answers.append(made)
                        times.append(sum(found) / 200)
                        if generator is drafts:
                            count = len(found)
                ratio = statistics.median(took[1]) / statistics.median(took[0])
                same = f"{sum(one == answers[0] for one in answers)} of {len(answers)} answers are the same"
                rows.append(
                    f"drafts: {kind}, {name}: {count} steps for 200 tokens, {1e3 * statistics.median(took[0]):.2f} ms CPU a token, "
                    f"without {1e3 * statistics.median(took[1]):.2f}: {ratio:.2f} times the tokens/s; {same}"
                )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
