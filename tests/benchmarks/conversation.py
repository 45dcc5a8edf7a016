"""A conversation whose turns repeat all before: CPU time to the first token of each turn, with shared begins of prompts and without.

    python tests/benchmarks/conversation.py [--turns 10] [--width 512] [--layers 4] [--files FOLDER]

A Llama with random weights, exported once by torch into `--files`, four slots, one rank of one thread. A turn adds 40 tokens of a user
and an answer of 40. Both ways take turns in one process; their tokens must be equal. Prints by turn the prompt's tokens, the tokens that
are read, and the CPU time of both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from exported_decoders import exported
from partc.compiler.pipeline import compile_model
from partc.runtime import ContinuousBatch, Generator, Request, load_local_generator

NEW = 40


class Side:
    """A conversation in a batch of its own."""

    def __init__(self, generator: Generator, shares: bool) -> None:
        self.batch = ContinuousBatch(generator, shares)
        self.batch.warm_up()
        self.count = 0

    def answer(self, prompt: list[int]) -> tuple[list[int], int, float]:
        """The tokens of an answer, how many of the prompt's lay in a cache, and the CPU time to the first token."""
        self.batch.admit(self.count, Request(prompt, max_tokens=NEW, ignore_end=True))
        self.count += 1
        tokens, cached, first, begin = list[int](), 0, 0.0, time.process_time()
        while not self.batch.idle:
            for one in self.batch.step() or []:
                first = first or time.process_time() - begin
                tokens.append(one.token)
                cached += one.cached
        return tokens, cached, first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "partc_conversation")
    args = parser.parse_args()
    random, length = Random(1), 2 * NEW * (args.turns + 1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = exported(args.files, args.layers, args.width, 212)
        (folder / "plan.yaml").write_text(f"ranks: 1\ngenerate: {{slots: 4, length: {length}, chunk: 16}}\n")
        compile_model(model, folder / "plan.yaml", folder / "build")
        with (
            load_local_generator(folder / "build", threads=1) as one,
            load_local_generator(folder / "build", threads=1) as other,
        ):
            shared, whole = Side(one, True), Side(other, False)
            prompt, total = [random.randrange(50) for _ in range(NEW)], [0.0, 0.0]
            for turn in range(args.turns):
                tokens, cached, first = shared.answer(prompt)
                same, _, wanted = whole.answer(prompt)
                assert tokens == same
                total = [total[0] + first, total[1] + wanted]
                print(
                    f"turn {turn}: prompt of {len(prompt):4} tokens, read {len(prompt) - cached:4}: "
                    f"{first * 1e3:7.1f} ms, whole {wanted * 1e3:7.1f} ms, ratio {first / wanted:.2f}"
                )
                prompt = [*prompt, *tokens, *(random.randrange(50) for _ in range(NEW))]
    print(
        f"all turns: {total[0]:.2f} s of CPU to the first tokens, whole {total[1]:.2f} s, ratio {total[0] / total[1]:.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
