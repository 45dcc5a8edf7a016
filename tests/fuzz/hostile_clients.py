"""Attacks on a server, each by itself and all at once, next to honest clients with streams: these get the tokens of their prompts, and
none waits for long, while the server's memory, files and output stay small.

    python tests/fuzz/hostile_clients.py --seconds 600                       two ranks over MPI
    python tests/fuzz/hostile_clients.py --seconds 4 --only all --in-process

The server has 64 files and 1.5 GB of address space a process (`--files`, `--memory`), the attackers are a process of lower priority. Prints
for each attack the honest answers, the longest waits (for a connection, for the head of an answer, from there to the first event, which a
request without a slot waits for, and from event to event), and the server's memory.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
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
        self.ends = Event()
        self.waits = list[float]()
        self.longest = dict.fromkeys(("connect", "head", "slot", "token"), 0.0)
        """The longest wait for a connection, for the head of the answer, for the first event, and for each further one."""
        self.count, self.wrong = 0, list[str]()
        self._threads = [Thread(target=self._ask, args=(number,)) for number in range(HONEST)]

    def __enter__(self) -> Honest:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ends.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, number: int) -> None:
        random = Random(number)
        while not self.ends.is_set():
            prompt, wanted = random.choice([*self._answers.items()])
            tokens = list[int]()
            try:
                with closing(http.client.HTTPConnection("127.0.0.1", self._client.port, timeout=60)) as connection:
                    before = time.monotonic()
                    connection.connect()
                    before = self._waited("connect", before)
                    body = {"prompt": prompt, "max_tokens": len(wanted), "stream": True}
                    connection.request("POST", "/v1/completions", json.dumps(body))
                    response = connection.getresponse()
                    assert response.status == 200, response.read()
                    before, kind = self._waited("head", before), "slot"
                    for line in response:
                        if line.startswith(b"data: {"):
                            before, kind = self._waited(kind, before), "token"
                            tokens += json.loads(line[6:])["choices"][0]["token_ids"]
                assert tokens == wanted, f"{tokens}, not {wanted}"
            except (OSError, AssertionError, ValueError, LookupError, http.client.HTTPException) as error:
                self.wrong.append(f"after {time.monotonic() - before:.1f} s: {type(error).__name__}: {error}"[:300])
            self.count += 1
            time.sleep(random.random() * 0.1)

    def _waited(self, kind: str, since: float) -> float:
        """Notes a wait; the time now."""
        now = time.monotonic()
        self.longest[kind] = max(self.longest[kind], now - since)
        self.waits.append(now - since)
        return now


def mebibytes(pid: int) -> tuple[float, float]:
    """A process's resident memory and address space in MiB; zeros of a process that has ended, which has neither."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    resident, size = (int(lines.get(name, "0").split()[0]) / 1024 for name in ("VmRSS", "VmSize"))
    return resident, size


def measure(
    name: str, server: MpiServer, answers: dict[tuple[int, ...], list[int]], seconds: float, late: float
) -> bool:
    """Whether the honest clients get what they get alone, next to one attack or all, and the server stays small."""
    pid = server.process.pid
    before, largest, second_half, space, files = mebibytes(pid)[0], 0.0, 0.0, 0.0, 0
    names = {"all": NAMES, "none": []}.get(name, [name])
    program = ("nice", "-n", "10", sys.executable, "-c", "import attacks; attacks.main()")
    command = [*program, str(server.port), str(seconds), ",".join(names)]
    with (
        Honest(server, answers) as honest,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent) as attackers,
    ):
        begin = time.monotonic()
        while attackers.poll() is None and server.process.poll() is None:
            now, size = mebibytes(pid)
            largest, space = max(largest, now), max(space, size)
            if time.monotonic() - begin < seconds / 2:
                second_half = now
            with contextlib.suppress(OSError):  # it has ended
                files = max(files, len(os.listdir(f"/proc/{pid}/fd")))
            time.sleep(0.1)
        if server.process.poll() is not None:
            attackers.kill()
            honest.ends.set()
        assert attackers.stdout is not None
        attacks = attackers.stdout.read().strip()
    waits = sorted(honest.waits) or [float("inf")]
    ended = server.process.poll() is not None
    after = 0.0 if ended else mebibytes(pid)[0]
    kinds = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in honest.longest.items())
    print(
        f"{name:14} {attacks or 0:>7} attacks  {honest.count:5} answers {len(honest.wrong):3} wrong  "
        f"waits: median {waits[len(waits) // 2] * 1e3:4.0f} ms, longest {waits[-1]:5.2f} s ({kinds})  "
        f"memory {before:.0f} -> {largest:.0f} -> {after:.0f} MiB, {after - second_half:+.1f} in the second half, "
        f"of {space:,.0f} MiB of addresses  {files} files",
        flush=True,
    )
    print(*honest.wrong[:5], sep="\n", end="\n" if honest.wrong else "")
    if ended:
        return False
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
        limits = f'ulimit -v {args.memory}; ulimit -n {args.files}; exec "$@" 2> "$0"'
        before = ("bash", "-c", limits, str(folder / "stderr"))
        with MpiServer(folder=folder / "build", options=options, before=before) as server:
            good = True
            for name in args.only.split(",") if args.only else ["none", *NAMES, "all"]:
                seconds = args.seconds if name == "all" else args.seconds / 20
                good = measure(name, server, answers, seconds, args.late) and good
                if server.process.poll() is not None:
                    print("the server has ended")
                    good = False
                    break
            server.process.terminate()
            code = server.process.wait(60)
        lines = (folder / "stderr").read_text().splitlines()
    print(f"exit code {code}, {len(lines)} lines written", *lines, sep="\n  ")
    print("held" if good and code == 0 and len(lines) <= LINES else "not held")
    return 0 if good and code == 0 and len(lines) <= LINES else 1


if __name__ == "__main__":
    sys.exit(main())
