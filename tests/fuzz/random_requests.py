"""Random requests to a server at once, a third of whose clients leave, with bad bodies between: what each of the others gets is what its
prompt has alone, every slot is free in the end, and memory does not grow.

    python tests/fuzz/random_requests.py --requests 1000 --seed 1             ranks as threads of this process
    python tests/fuzz/random_requests.py --requests 300 --seed 1 --mpi        two ranks over MPI
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import onnx

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from decoders import VOCABULARY, Unsharded, decoder
from partc.compiler.pipeline import compile_model
from partc.runtime import Request, load_local_generator
from server_case import Client, LocalServer, MpiServer, until, write_tokenizer

PLAN = "ranks: {ranks}\ngenerate: {{slots: 3, length: 96, chunk: 8}}\n"
SHARDING = 'sharding: {"layers.*.q": colwise, "layers.*.k": colwise, "layers.*.v": colwise, "layers.*.o": rowwise, head: colwise}\n'
BAD = (
    b"{", b"[]", b"\xff", b'{"prompt": []}', b'{"prompt": [64]}', b'{"prompt": [1], "top_p": 2}', b'{"prompt": [1], "temperature": NaN}',
    b'{"prompt": "\\ud800"}', b'{"prompt": [1], "n": 0}', b"x" * 1_100_000, b'{"prompt": [1], "max_tokens": 1e400}',
)  # fmt: skip
CLIENTS = 12
_GROWTH = 24 << 20
"""Bytes by which the second half of the requests may make the processes larger."""


class Case:
    """A request, and what its client does."""

    def __init__(self, random: Random) -> None:
        size = random.choice((1, 2, random.randint(3, 60)))
        self.prompt = [random.randrange(VOCABULARY) for _ in range(size)]
        self.options: dict[str, Any] = {"max_tokens": random.randint(1, 96 - size)}
        if random.random() < 0.3:
            self.options |= {"temperature": 0.8, "seed": random.randrange(1000), "top_k": random.choice((0, 5))}
        self.manner = random.choice(("whole", "stream", "bad", "whole", "stream", "leaves", "leaves", "never reads"))
        self.after = random.randint(0, 20)
        self.body = random.choice(BAD)

    def run(self, client: Client) -> str:
        """What became of it; a text that begins with `wrong` where it is not as it should be."""
        if self.manner == "bad":
            status = client.request("POST", "/v1/completions", self.body)[0]
            return "refused" if status in (400, 413) else f"wrong: {self.body[:40]!r} is answered with {status}"
        body = {"prompt": self.prompt, **self.options}
        if self.manner == "whole":
            return self._compared(client.complete(self.prompt, **self.options)["token_ids"])
        tokens: list[int] = []
        with client.streaming("/v1/completions", body) as events:
            for kind, data in events if self.manner != "never reads" else ():
                if kind == "error":
                    return f"wrong: {data}"
                tokens += [] if data == "[DONE]" else json.loads(data)["choices"][0]["token_ids"]
                if self.manner == "leaves" and len(tokens) > self.after:
                    break
        return "left" if self.manner != "stream" else self._compared(tokens)

    def _compared(self, tokens: list[int]) -> str:
        return "equal" if tokens == self.wanted else f"wrong: {tokens}, not {self.wanted}"

    def expect(self, wanted: list[int]) -> None:
        """What it gets alone."""
        self.wanted = wanted


def resident(pids: list[int]) -> int:
    """Bytes that processes have in memory."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def served(folder: Path, mpi: bool) -> Iterator[tuple[Client, list[int]]]:
    """A server with room for all clients, and its processes."""
    if mpi:
        with MpiServer(folder=folder, options=("--queue", "64")) as over_mpi:
            yield over_mpi, [over_mpi.process.pid, *over_mpi.ranks()]
    else:
        with LocalServer(folder, write_tokenizer(folder.parent), queue=64) as local:
            yield local, [os.getpid()]


def main() -> int:
    """Sends the requests; 1 where one is answered wrong, a slot is left, or memory grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mpi", action="store_true")
    args = parser.parse_args()
    random = Random(args.seed)
    with tempfile.TemporaryDirectory() as place:
        folder, model = Path(place), decoder()
        onnx.save(model, folder / "model.onnx")
        (folder / "plan.yaml").write_text(PLAN.format(ranks=2 if args.mpi else 1) + SHARDING * args.mpi)
        compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
        cases = [Case(random) for _ in range(args.requests)]
        alone = Unsharded(model)
        with load_local_generator(folder / "build") as generator:
            drawn = [case for case in cases if "seed" in case.options]
            found = generator.run([Request(case.prompt, **case.options) for case in drawn])
            for case, answer in zip(drawn, found, strict=True):
                case.expect(answer.tokens)
        for case in cases:
            if "seed" not in case.options:
                case.expect(
                    alone.tokens(case.prompt, case.options["max_tokens"]) if case.manner in ("whole", "stream") else []
                )
        with served(folder / "build", args.mpi) as (client, pids), ThreadPoolExecutor(CLIENTS) as pool:
            half, begin = len(cases) // 2, time.monotonic()
            results = [*pool.map(lambda case: case.run(client), cases[:half])]
            before = resident(pids)
            results += pool.map(lambda case: case.run(client), cases[half:])
            taken, grown = time.monotonic() - begin, resident(pids) - before
            until(lambda: client.metrics()["partc_slots_used"] == client.metrics()["partc_queue_length"] == 0)
    wrong = [text for text in results if text.startswith("wrong")]
    print(*wrong[:20], sep="\n", end="\n" if wrong else "")
    counts = Counter("wrong" if text.startswith("wrong") else text for text in results)
    print(f"{len(cases)} requests: {', '.join(f'{number} {what}' for what, number in sorted(counts.items()))}")
    print(f"in {taken:.1f} s; no slot is left; memory has grown by {grown / 1e6:.1f} MB in the second half")
    return 1 if wrong or grown > _GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
