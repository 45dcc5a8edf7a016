"""`partc serve` against `Generator.run` of the same requests, in turns: tokens/s of streaming clients, and the first byte of one alone.

    python tests/benchmarks/server.py [--only gpt,llama] [--clients 8] [--tokens 100] [--turns 9] [--width 512] [--layers 4]

Two decoders over two MPI ranks, with a slot for each client: that of `samples/gpt`, and a Llama with random weights, exported once by torch
into `--files`. The clients are one thread that reads sockets and looks at nothing but the end, on the same cores. Prints the medians, and
of the turns' ratios the median: tokens/s at least 0.9 of `run`'s, and the first byte at most 30 ms behind the first token of `run` are
wanted.

Of each side it prints what a token takes of the cores, by process: microseconds of CPU, microseconds for which a thread wanted a core and
had none, and how often one slept or was preempted. `server` is the process that answers clients, `other side` the ranks that wait for
their turn. Where cores are free, what the wall clock shows beyond a rank's CPU is the time for which it slept.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from cpu_account import TITLE, Account, ranks_below
from transformer import HERE, ROOT, mpi_command
from turns import Side, serve, told

sys.path.extend([str(path) for path in HERE.parent.iterdir() if path.is_dir()])
SAMPLE = HERE.parents[1] / "samples" / "gpt"
PLAN = """ranks: 2
sharding: {{"layers.*.*.project": colwise, "layers.*.*.out": rowwise, head: colwise}}
generate: {{slots: {slots}, length: {length}, chunk: 16}}
"""
ROUNDS = 3
"""How often a turn has all requests answered."""
LENGTH, VOCABULARY = 128, 4096
NUMBERS = "numbers"
"""The pipe by which rank 0 of the other side tells the other rank how many runs to make."""
PROMPT = [*range(1, 15)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--width", type=int, default=512, help="of the Llama, a multiple of 128")
    parser.add_argument("--layers", type=int, default=4, help="of the Llama")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "partc-decoders")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(Path(options.rank), options.clients, options.tokens)
        return
    if unknown := set(options.only.split(",")) - MODELS.keys():
        parser.error(f"--only: no model is called {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory() as place:
            MODELS[name](Path(place), options)
            for clients, tokens in ((options.clients, options.tokens), (1, 1)):
                measure(name, Path(place), clients, tokens, options.turns)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


def gpt(folder: Path, options: argparse.Namespace) -> None:
    """Compiles the decoder of the sample."""
    from partc.compiler import compile_model

    (folder / "plan.yaml").write_text(PLAN.format(slots=options.clients, length=LENGTH))
    compile_model(SAMPLE / "decoder.py", folder / "plan.yaml", folder / "build")


def llama(folder: Path, options: argparse.Namespace) -> None:
    """Compiles the Llama by the plan that is proposed."""
    from exported_decoders import exported
    from partc.compiler import compile_model
    from partc.compiler.frontend import load
    from partc.compiler.proposal.degrees import Degrees
    from partc.compiler.proposal.generation import Generation
    from partc.compiler.proposal.propose import propose

    size = {"layers": options.layers, "width": options.width, "heads": options.width // 64, "vocabulary": VOCABULARY}
    model = exported("llama", 23, "plain", options.files, **size)
    text, _ = propose(load(model), model.name, Degrees(tp=2), generation=Generation(LENGTH, options.clients))
    (folder / "plan.yaml").write_text(text)
    compile_model(model, folder / "plan.yaml", folder / "build")


MODELS: Mapping[str, Callable[[Path, argparse.Namespace], None]] = {"gpt": gpt, "llama": llama}


def measure(name: str, folder: Path, clients: int, tokens: int, turns: int) -> None:
    """Both sides in turns; prints the medians, and where there are several clients what a token takes of the cores."""
    from server_case import MpiServer

    numbers = ["--clients", str(clients), "--tokens", str(tokens)]
    command = mpi_command(2, str(HERE / "server.py"), "--rank", str(folder), *numbers)
    os.mkfifo(folder / NUMBERS)
    side, rows = Side("run", [command], [ROOT]), list[tuple[float, float]]()
    with MpiServer(folder=folder / "build") as server:
        own, theirs = ranks_below(side.processes[0].pid), ranks_below(server.process.pid)
        beside = {"server": [server.process.pid], "client": [os.getpid()]}
        accounts = (
            Account({**own, **beside, "other side": [pid for pids in theirs.values() for pid in pids]}),
            Account({**theirs, **beside, "other side": [pid for pids in own.values() for pid in pids]}),
        )
        sides = (lambda: side.turn(ROUNDS), lambda: streamed(server.port, clients, tokens))
        for one in sides:  # the first turn takes longer
            one()
        for _ in range(turns):
            found = []
            for one, account in zip(sides, accounts, strict=True):
                with account:
                    found.append(statistics.median(one()))
            rows.append((found[0], found[1]))
    side.close()
    (folder / NUMBERS).unlink()
    run, served = (statistics.median(column) for column in zip(*rows, strict=True))
    if tokens == 1:
        print(
            f"{name}: first token: run {run * 1e3:.2f} ms, first byte of the server {served * 1e3:.2f} ms", flush=True
        )
        return
    ratio = statistics.median(one / other for one, other in rows)
    rates = f"run {clients * tokens / run:.0f} tokens/s, server {clients * tokens / served:.0f} tokens/s"
    print(f"{name}: {clients} clients, {tokens} tokens each: {rates}, ratio {ratio:.3f}")
    for title, seconds, account in zip(("run", "server"), (run, served), accounts, strict=True):
        print(f"  {title}, {1e6 * seconds / (clients * tokens):.0f} us a token by the wall clock\n    {TITLE}")
        for line in account.lines(ROUNDS * turns * clients * tokens):
            print(f"    {line}", flush=True)


def streamed(port: int, clients: int, tokens: int) -> list[float]:
    """The seconds of each round: until the end of all streams, or with one token until its first byte."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": tokens, "stream": True})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    found = []
    for _ in range(ROUNDS):
        time.sleep(0.05)
        begin = time.perf_counter()
        with selectors.DefaultSelector() as selector:
            for _ in range(clients):
                end = socket.create_connection(("127.0.0.1", port))
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end.sendall((head + body).encode())
                selector.register(end, selectors.EVENT_READ, bytearray())
            while selector.get_map():
                for key, _ in selector.select():
                    data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                    key.data.extend(data)
                    if not data or (tokens == 1 and b"data: {" in key.data):
                        assert key.data.startswith(b"HTTP/1.1 200 "), bytes(key.data[:500])
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
        found.append(time.perf_counter() - begin)
    return found


def rank(folder: Path, clients: int, tokens: int) -> None:
    """A rank of the other side."""
    from mpi4py import MPI
    from partc.runtime import Request, load_generator

    comm = MPI.COMM_WORLD
    some = [Request(PROMPT, max_tokens=tokens)] * clients

    def numbers() -> Iterator[int]:
        """How many runs are to be made, turn by turn; the other rank reads them, which takes no core while it waits."""
        with (folder / NUMBERS).open("w", buffering=1) as other:
            for number in told():
                print(number, file=other)
                yield number

    def heard() -> Iterator[int]:
        """The same on the other rank."""
        with (folder / NUMBERS).open() as lines:
            yield from map(int, lines)

    with load_generator(folder / "build", comm) as generator:
        generator.run(some)
        serve(lambda: generator.run(some), numbers() if comm.rank == 0 else heard(), comm.rank == 0)


if __name__ == "__main__":
    main()
