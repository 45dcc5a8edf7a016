"""Attacks on a server, each by itself and all at once, next to honest clients with streams: these get the tokens of their prompts, and
none waits for long, while the server's memory, files and output stay small.

    python tests/fuzz/hostile_clients.py --seconds 600                       two ranks over MPI
    python tests/fuzz/hostile_clients.py --seconds 4 --only all --in-process

The server has 64 files and 1.5 GB of address space a process (`--files`, `--memory`), the attackers are a process of lower priority. Prints
for each attack the honest answers, the longest time from a request to its first event or between two events, and the server's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from threading import Event, Thread

import onnx

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from attacks import NAMES
from decoders import VOCABULARY, Unsharded, decoder
from partc.compiler.pipeline import compile_model
from server_case import Client, MpiServer, write_tokenizer

PLAN = "ranks: {ranks}\ngenerate: {{slots: 4, length: 128, chunk: 8}}\n"
SHARDING = 'sharding: {"layers.*.q": colwise, "layers.*.k": colwise, "layers.*.v": colwise, "layers.*.o": rowwise, head: colwise}\n'
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = "{% for m in messages %}{% if 'loop' in m.content %}" + LOOP + "{% endif %}{{ m.content }}{% endfor %}"
HONEST = 8
GROWTH, LINES = 128, 60
"""MiB by which an attack may make the server larger for a time, and lines that it may write because of it."""


class Honest:
    """Clients that ask one after another for streams, and know what they get."""

    def __init__(self, client: Client, answers: dict[tuple[int, ...], list[int]]) -> None:
        self._client, self._answers = client, answers
        self._ends = Event()
        self.waits = list[float]()
        self.count, self.wrong = 0, list[str]()
        self._threads = [Thread(target=self._ask, args=(number,)) for number in range(HONEST)]

    def __enter__(self) -> Honest:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, number: int) -> None:
        random = Random(number)
        while not self._ends.is_set():
            prompt, wanted = random.choice([*self._answers.items()])
            tokens, before = list[int](), time.monotonic()
            try:
                with self._client.streaming("/v1/completions", {"prompt": prompt, "max_tokens": len(wanted)}) as events:
                    for kind, data in events:
                        now = time.monotonic()
                        self.waits.append(now - before)
                        before = now
                        if kind == "error":
                            raise AssertionError(data)
                        tokens += [] if data == "[DONE]" else json.loads(data)["choices"][0]["token_ids"]
                assert tokens == wanted, f"{tokens}, not {wanted}"
            except (OSError, AssertionError, ValueError) as error:
                self.wrong.append(f"after {time.monotonic() - before:.1f} s: {type(error).__name__}: {error}"[:300])
            self.count += 1
            time.sleep(random.random() * 0.1)


def status_of(pid: int, name: str) -> int:
    """A number of a process's status file, KiB as bytes."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def measure(
    name: str, server: MpiServer, answers: dict[tuple[int, ...], list[int]], seconds: float, late: float
) -> bool:
    """Whether the honest clients get what they get alone, next to one attack or all, and the server stays small."""
    pid, before = server.process.pid, status_of(server.process.pid, "VmRSS")
    names = {"all": NAMES, "none": []}.get(name, [name])
    program = ("nice", "-n", "10", sys.executable, "-c", "import attacks; attacks.main()")
    command = [*program, str(server.port), str(seconds), ",".join(names)]
    largest = second_half = files = 0
    with (
        Honest(server, answers) as honest,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent) as attackers,
    ):
        begin = time.monotonic()
        while attackers.poll() is None:
            largest = max(largest, status_of(pid, "VmRSS"))
            if time.monotonic() - begin < seconds / 2:
                second_half = status_of(pid, "VmRSS")
            files = max(files, len(os.listdir(f"/proc/{pid}/fd")))
            time.sleep(0.1)
        assert attackers.stdout is not None
        attacks = attackers.stdout.read().strip()
    after = status_of(pid, "VmRSS")
    waits = sorted(honest.waits) or [float("inf")]
    before, largest, after, grown = (size / (1 << 20) for size in (before, largest, after, after - second_half))
    print(
        f"{name:14} {attacks or 0:>7} attacks  {honest.count:5} answers {len(honest.wrong):3} wrong  "
        f"waits: median {waits[len(waits) // 2] * 1e3:4.0f} ms, longest {waits[-1]:5.2f} s  "
        f"memory {before:.0f} -> {largest:.0f} -> {after:.0f} MiB, {grown:+.1f} in the second half  {files} files",
        flush=True,
    )
    print(*honest.wrong[:5], sep="\n", end="\n" if honest.wrong else "")
    healthy = server.get("/health")[0] == 200
    in_time = waits[-1] <= late or not late
    return (
        not honest.wrong
        and honest.count > 0
        and healthy
        and in_time
        and largest - before < GROWTH
        and attackers.returncode == 0
    )


def main() -> int:
    """Makes the attacks; 1 where one of them does harm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="of all at once; each by itself has a twentieth of it"
    )
    parser.add_argument("--only", help="names of attacks, or all, or none: separated by commas")
    parser.add_argument(
        "--late", type=float, default=2.0, help="the longest wait of an honest client in seconds; 0: any"
    )
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--memory", type=int, default=1_500_000, help="address space of a process in KiB")
    parser.add_argument("--in-process", action="store_true", help="the ranks are threads of one process")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, model, ranks = Path(place), decoder(), 1 if args.in_process else 2
        onnx.save(model, folder / "model.onnx")
        (folder / "plan.yaml").write_text(PLAN.format(ranks=ranks) + SHARDING * (ranks > 1))
        compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
        random, alone = Random(1), Unsharded(model)
        prompts = [tuple(random.randrange(VOCABULARY) for _ in range(size)) for size in (1, 2, 7, 30)]
        answers = {prompt: alone.tokens([*prompt], 60) for prompt in prompts}
        options = ("--tokenizer", str(write_tokenizer(folder, template=TEMPLATE)), *["--in-process"] * args.in_process)
        limits = ("bash", "-c", f'ulimit -v {args.memory}; ulimit -n {args.files}; exec "$@"', "bash")
        with MpiServer(folder=folder / "build", options=options, before=limits) as server:
            good = True
            for name in args.only.split(",") if args.only else ["none", *NAMES, "all"]:
                seconds = args.seconds if name == "all" else args.seconds / 20
                good = measure(name, server, answers, seconds, args.late) and good
            server.process.terminate()
            code, text = server.ended(60)
    lines = text.splitlines()
    print(f"exit code {code}, {len(lines)} lines written", *lines[:8], sep="\n  ")
    print("held" if good and code == 0 and len(lines) <= LINES else "not held")
    return 0 if good and code == 0 and len(lines) <= LINES else 1


if __name__ == "__main__":
    sys.exit(main())
