"""`partc serve` against `Generator.run` of the same requests, in turns: tokens/s of streaming clients, and the first byte of one alone.

    python tests/benchmarks/server.py [--clients 8] [--tokens 100] [--turns 9]

The decoder of `samples/gpt` over two MPI ranks, with a slot for each client. The clients are one thread that reads sockets and looks at
nothing but the end, on the same cores. Prints the medians, and of the turns' ratios the median: tokens/s at least 0.9 of `run`'s, and the
first byte at most 30 ms behind the first token of `run` are wanted.
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
from collections.abc import Iterator
from pathlib import Path

from transformer import HERE, ROOT, mpi_command
from turns import Side, serve, told

sys.path.append(str(HERE.parent / "server"))
SAMPLE = HERE.parents[1] / "samples" / "gpt"
PLAN = """ranks: 2
sharding: {{"layers.*.*.project": colwise, "layers.*.*.out": rowwise, head: colwise}}
generate: {{slots: {slots}, length: 128, chunk: 16}}
"""
PROMPT = [*range(1, 15)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.clients, options.tokens)
        return
    from partc.compiler import compile_model
    from server_case import MpiServer

    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "plan.yaml").write_text(PLAN.format(slots=options.clients))
        compile_model(SAMPLE / "decoder.py", folder / "plan.yaml", folder / "build")
        for clients, tokens in ((options.clients, options.tokens), (1, 1)):
            numbers = ["--clients", str(clients), "--tokens", str(tokens)]
            command = mpi_command(2, str(HERE / "server.py"), "--rank", str(folder / "build"), *numbers)
            side, rows = Side("run", [command], [ROOT]), list[tuple[float, float]]()
            with MpiServer(folder=folder / "build") as server:
                for _ in range(options.turns + 1):
                    rows.append(
                        (statistics.median(side.turn(3)), statistics.median(streamed(server.port, clients, tokens)))
                    )
            side.close()
            run, served = (statistics.median(column) for column in zip(*rows[1:], strict=True))
            if tokens == 1:
                print(f"first token: run {run * 1e3:.2f} ms, first byte of the server {served * 1e3:.2f} ms")
            else:
                ratio = statistics.median(one / other for one, other in rows[1:])
                rates = f"run {clients * tokens / run:.0f} tokens/s, server {clients * tokens / served:.0f} tokens/s"
                print(f"{clients} clients, {tokens} tokens each: {rates}, ratio {ratio:.3f}")


def streamed(port: int, clients: int, tokens: int) -> list[float]:
    """The seconds of three rounds: until the end of all streams, or with one token until its first byte."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": tokens, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    found = []
    for _ in range(3):
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
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
        found.append(time.perf_counter() - begin)
    return found


def rank(folder: str, clients: int, tokens: int) -> None:
    """A rank of the other side."""
    from mpi4py import MPI
    from partc.runtime import Request, load_generator

    comm = MPI.COMM_WORLD
    some = [Request(PROMPT, max_tokens=tokens)] * clients

    def numbers() -> Iterator[int]:
        """How many runs are to be made, turn by turn; the other rank hears them, too."""
        for number in told():
            comm.send(number, 1)
            yield number
        comm.send(0, 1)

    def heard() -> Iterator[int]:
        """The same on the other rank, which waits without using a core."""
        while True:
            while not comm.iprobe():
                time.sleep(0.001)
            if not (number := comm.recv()):
                return
            yield number

    with load_generator(folder, comm) as generator:
        generator.run(some)
        serve(lambda: generator.run(some), numbers() if comm.rank == 0 else heard(), comm.rank == 0)


if __name__ == "__main__":
    main()
