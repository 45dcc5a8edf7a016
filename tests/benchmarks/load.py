"""Clients in a closed loop against `partc serve`, for a time: tokens/s against the same batch without HTTP, and the first token's wait.

    python tests/benchmarks/load.py [--clients 1,8,32] [--seconds 60] [--slots 8] [--cancel 3] [--ranks 2] [--build FOLDER]

The decoder of `samples/gpt` over MPI ranks, or an artifact of your own. Each client sends its next request, a stream, when the last one has
ended; prompts have 4 to 60
tokens and answers 16 to 60, drawn by a seed. With `--cancel 3` every third stream is closed after its first token: those make no tokens of
the rate, and at the end all slots must be free, and answer at once. Clients are one thread that reads sockets, on the same cores as the
ranks. The CPU of the server's process, of each rank and of the clients is printed for a token: that of one rank is the server's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformer import HERE, ROOT, mpi_command

sys.path.extend([str(path) for path in HERE.parent.iterdir() if path.is_dir()])
SAMPLE = HERE.parents[1] / "samples" / "gpt"
PLAN = """ranks: {ranks}
{sharding}generate: {{slots: {slots}, length: 128, chunk: 16}}
"""
SHARDING = 'sharding: {"layers.*.*.project": colwise, "layers.*.*.out": rowwise, head: colwise}\n'
_RANK = b"OMPI_COMM_WORLD_RANK="


@dataclass
class Stream:
    """A request that is under way."""

    body: dict[str, Any]
    cancelled: bool
    begun: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    data: bytearray = field(default_factory=bytearray)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cancel", type=int, default=0, help="every so manieth request is cancelled; 0: none")
    parser.add_argument("--build", type=Path, help="an artifact that generates")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank(Path(options.rank), options.build, int(options.clients))
    from partc.compiler import compile_model
    from partc.runtime.artifact.manifest import open_artifact
    from server_case import MpiServer

    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    leaked = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        sharding = SHARDING if options.ranks > 1 else ""
        text = PLAN.format(slots=options.slots, ranks=options.ranks, sharding=sharding)
        (folder / "plan.yaml").write_text(text)
        build = options.build or folder / "build"
        if options.build is None:
            compile_model(SAMPLE / "decoder.py", folder / "plan.yaml", build)
        manifest = open_artifact(build).manifest
        assert manifest.generation is not None
        ranks, slots, vocabulary = manifest.ranks, manifest.generation.slots, manifest.generation.vocabulary
        for clients in map(int, options.clients.split(",")):
            with MpiServer(folder=build, options=("--queue", "256")) as server:
                pid = server.process.pid
                processes = {"server": pid, **ranks_below(pid), "clients": os.getpid()}
                begin, before = time.perf_counter(), cpu_seconds(processes)
                done, cancelled = streamed(server.port, clients, options.seconds, options.cancel, vocabulary)
                seconds, after = time.perf_counter() - begin, cpu_seconds(processes)
                leaked += leaks(server, slots, vocabulary)
            tokens, waits = sum(one.body["max_tokens"] for one in done), sorted(one.first - one.begun for one in done)
            shown = [1e3 * waits[min(int(part * len(waits)), len(waits) - 1)] for part in (0.5, 0.99)]
            text = f"{clients} clients, {seconds:.0f} s: {len(done)} answers, {tokens / seconds:.0f} tokens/s, first token "
            text += f"p50 {shown[0]:.0f} ms, p99 {shown[1]:.0f} ms"
            taken = (f"{name} {1e6 * (after[name] - before[name]) / tokens:.1f}" for name in processes)
            text += f"; us of CPU a token: {', '.join(taken)}"
            if options.cancel:
                print(f"{text}; {cancelled} cancelled, {leaked} slots leaked", flush=True)
                continue
            (folder / "requests.json").write_text(json.dumps([one.body for one in done]))
            script = mpi_command(
                ranks,
                *(
                    str(HERE / "load.py"),
                    "--rank",
                    str(folder),
                    "--build",
                    str(build.resolve()),
                    "--clients",
                    str(clients),
                ),
            )
            ran = subprocess.run(script, env={**os.environ, **ROOT}, check=True, capture_output=True, text=True)
            alone = float(ran.stdout.split()[-1])
            rate = f"the same without HTTP {tokens / alone:.0f} tokens/s, ratio {alone / seconds:.2f}"
            print(f"{text}; {rate}; load {os.getloadavg()[0]:.1f}", flush=True)
    return int(leaked > 0)


def descendants(pid: int) -> Iterator[int]:
    """A process, and all that it has started, or those have."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from descendants(int(child))


def ranks_below(pid: int) -> dict[str, int]:
    """The ranks of a job of Open MPI that a process has started, as `rank 0`, `rank 1`, .."""
    found = {}
    for one in descendants(pid):
        for entry in Path(f"/proc/{one}/environ").read_bytes().split(b"\0"):
            if entry.startswith(_RANK):
                found[f"rank {int(entry.removeprefix(_RANK))}"] = one
    return dict(sorted(found.items()))


def cpu_seconds(processes: Mapping[str, int]) -> dict[str, float]:
    """By name the CPU time that a process has taken, of all threads."""
    ticks = {
        name: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for name, pid in processes.items()
    }
    return {name: sum(map(int, some)) / os.sysconf("SC_CLK_TCK") for name, some in ticks.items()}


def streamed(port: int, clients: int, seconds: float, cancel: int, vocabulary: int) -> tuple[list[Stream], int]:
    """The streams that have ended, and how many were cancelled."""
    draw, done, cancelled, count = random.Random(clients), list[Stream](), 0, 0
    end = time.perf_counter() + seconds

    def begin(selector: selectors.BaseSelector) -> None:
        nonlocal count
        count += 1
        prompt = [draw.randrange(vocabulary) for _ in range(draw.randint(4, 60))]
        body = {"prompt": prompt, "max_tokens": draw.randint(16, 60), "ignore_eos": True, "temperature": 0}
        text = json.dumps({**body, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall((head + text).encode())
        selector.register(connection, selectors.EVENT_READ, Stream(body, bool(cancel) and count % cancel == 0))

    with selectors.DefaultSelector() as selector:
        for _ in range(clients):
            begin(selector)
        while selector.get_map():
            for key, _ in selector.select():
                connection, one = key.fileobj, key.data
                assert isinstance(connection, socket.socket)
                data = connection.recv(1 << 16)
                one.data += data
                if not one.first and b"data: {" in one.data:
                    one.first = time.perf_counter()
                leaves = one.cancelled and one.first
                if data and not leaves:
                    continue
                selector.unregister(connection)
                connection.close()
                cancelled += bool(leaves)
                if not leaves:
                    assert b"data: [DONE]" in one.data, bytes(one.data[-500:])
                    done.append(one)
                if time.perf_counter() < end:
                    begin(selector)
    return done, cancelled


def leaks(server: Any, slots: int, vocabulary: int) -> int:
    """How many slots are still taken where no request is open."""
    for _ in range(100):
        used = int(server.metrics()["partc_slots_used"])
        if not used:
            break
        time.sleep(0.1)
    done, _ = streamed(server.port, slots, 0.0, 0, vocabulary)
    assert len(done) == slots
    return used


def rank(folder: Path, build: Path, clients: int) -> int:
    """A rank of the other side, with as many requests at once: prints the seconds that all take."""
    from mpi4py import MPI
    from partc.runtime import ContinuousBatch, Request, load_generator

    fields = json.loads((folder / "requests.json").read_text())
    waiting = [Request(one["prompt"], max_tokens=one["max_tokens"], ignore_end=True) for one in fields][::-1]
    with load_generator(build, MPI.COMM_WORLD) as generator:
        batch, leads = ContinuousBatch(generator), MPI.COMM_WORLD.rank == 0
        batch.warm_up()
        begin, admitted, made = time.perf_counter(), 0, 0
        while True:
            while leads and waiting and admitted - made < clients:
                batch.admit(admitted, waiting.pop())
                admitted += 1
            if leads and not waiting and admitted == made:
                batch.end()
            if (tokens := batch.step()) is None:
                break
            made += sum(bool(one.finish) for one in tokens)
        if leads:
            print(time.perf_counter() - begin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
