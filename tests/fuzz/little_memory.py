"""Commands in less memory than they need: each works, or says that memory ran out; none calls that a bug or a broken model.

    python tests/fuzz/little_memory.py --from 100 --to 520 --step 20
    python tests/fuzz/little_memory.py --from 900 --to 3000 --step 150 --only "run over MPI"

The limit, in MB, is one of the address space (`ulimit -v`), so that allocations, mappings and threads fail wherever they are asked for.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

from early_signals import prepare

COMMANDS = {
    "compile": ("compile", "model.onnx", "--plan", "plan.yaml", "-o", "built"),
    "run": ("run", "inferred", "--input", "x.npz", "--in-process"),
    "run over MPI": ("run", "inferred", "--input", "x.npz"),
    "check": ("check", "inferred"),
    "train": ("train", "trained", "--data", "data.npz", "--batch", "4", "--steps", "2", "--in-process"),
    "generate": ("generate", "generated", "--ids", "3,1", "--max-tokens", "3", "--in-process"),
}
_HONEST = re.compile(
    r"no memory is left|OpenBLAS (?:error: Memory|blas_thread_init)|cannot allocate memory for thread-local data|killed by signal"
    r"|MemoryError$|has waited \d+ s: |the launcher ended"
)
"""What partc says, and libraries that end the process themselves. A launcher and MPI, too, may be what has no memory."""
_WRONG = ("bug in partc", "is not a valid", "is broken", "the check itself failed", "violation")
_SECONDS = 40


def judged(command: str, limit: int, folder: Path) -> tuple[str, str]:
    """A word for how the command ends under the limit, in MB, and what it says."""
    allow = partial(resource.setrlimit, resource.RLIMIT_AS, (limit * 10**6, limit * 10**6))
    asked = [sys.executable, "-P", "-m", "partc.cli", *COMMANDS[command]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        asked,
        cwd=folder,
        env=environment,
        preexec_fn=allow,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = process.communicate(timeout=_SECONDS)[1]
    except subprocess.TimeoutExpired:
        process.terminate()
        said = process.communicate()[1]
    if any(words in said for words in _WRONG):
        return "wrong", said
    if process.returncode == 0:
        return "works", said
    return ("says so" if _HONEST.search(said) else "wrong"), said


def main() -> int:
    """The exit code: 1 where a command has ended in another way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="least", type=int, default=100)
    parser.add_argument("--to", dest="most", type=int, default=520)
    parser.add_argument("--step", type=int, default=20)
    parser.add_argument("--only", default=",".join(COMMANDS))
    given = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="memory-") as name:
        folder = Path(name)
        prepare(folder)
        for limit in range(given.least, given.most + 1, given.step):
            for command in given.only.split(","):
                word, said = judged(command, limit, folder)
                counts[command, word] += 1
                if word == "wrong":
                    print(f"WRONG {command} in {limit} MB:\n{said[-1500:]}", flush=True)
    for command in given.only.split(","):
        print(f"{command:14}" + ", ".join(f"{word} {counts[command, word]}" for word in ("works", "says so", "wrong")))
    wrong = sum(count for (_, word), count in counts.items() if word == "wrong")
    print(f"{counts.total()} commands, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
