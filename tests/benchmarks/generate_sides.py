"""A program that makes tokens behind a prompt, in turns: one side of `generate_peers.py`, in this interpreter.

    python tests/benchmarks/generate_sides.py SIDE MODEL PROMPT    # a JSON file with the prompt
    mpiexec -n 2 python tests/benchmarks/generate_sides.py partc BUILD PROMPT

    side       MODEL                            how a token is made
    partc      an artifact                      `Generator.stream`
    in_place   the file of `llama_by_hand.py`   onnxruntime with caches that past and present share, bound once
    copied     a file as torch exports it       onnxruntime with past and present through `run`
    torch      a folder of transformers         `generate`, its steps one by one
    loop       an artifact without `generate`   past and present through `Program.__call__`, a shard on each rank

A step is a token, sides have one thread a rank. A turn answers with seconds by the wall clock and with CPU seconds of all ranks; at its
end the side says which tokens there were.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from mpi4py import MPI
from partc.runtime import load, load_generator
from turns import answer, told

Tokens = Generator[int]
Array = np.ndarray[Any, Any]
MOST = 512
"""Tokens that are made behind a prompt at most."""


def session(path: Path) -> onnxruntime.InferenceSession:
    """A session of one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def partc(path: Path, prompt: list[int]) -> Tokens:
    """All ranks have the prompt."""
    with load_generator(path, MPI.COMM_WORLD, threads=1) as generator:
        room = generator.record.length - len(prompt)
        yield from generator.stream(prompt, max_tokens=min(room, MOST))


def in_place(path: Path, prompt: list[int]) -> Tokens:
    """Caches, logits and tokens are arrays that the session reads and writes where they are; a step binds its mask alone."""
    whole, first = session(path), len(prompt)
    caches = {
        port.name: onnxruntime.OrtValue.ortvalue_from_numpy(
            np.zeros((1, port.shape[1], first + MOST, port.shape[3]), np.float32)
        )
        for port in whole.get_inputs()
        if port.name.startswith("past")
    }
    vocabulary, mask = whole.get_outputs()[0].shape[-1], np.ones((1, first + MOST), np.int64)

    def bound(tokens: Array) -> tuple[Any, Array]:
        """What binds a step of these tokens, and where its logits are written."""
        binding, logits = whole.io_binding(), np.empty((1, tokens.shape[1], vocabulary), np.float32)
        for name, cache in caches.items():
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), cache)
        binding.bind_ortvalue_input("input_ids", onnxruntime.OrtValue.ortvalue_from_numpy(tokens))
        binding.bind_ortvalue_output("logits", onnxruntime.OrtValue.ortvalue_from_numpy(logits))
        return binding, logits

    token = np.zeros((1, 1), np.int64)
    step = bound(token)
    for entries in range(first, first + MOST):
        binding, logits = bound(np.array([prompt])) if entries == first else step
        binding.bind_cpu_input("attention_mask", mask[:, :entries])
        whole.run_with_iobinding(binding)
        token[0, 0] = logits[0, -1].argmax()
        yield int(token[0, 0])


def copied(path: Path, prompt: list[int]) -> Tokens:
    """The past grows, and is copied by each layer's Concat."""
    whole = session(path)
    ports = [port for port in whole.get_inputs() if port.name.startswith("past")]
    past = {port.name: np.zeros((1, port.shape[1], 0, port.shape[3]), np.float32) for port in ports}
    given = prompt
    while True:
        logits, *present = whole.run(None, {"input_ids": np.array([given]), **past})
        past = dict(zip(past, present, strict=True))
        given = [int(logits[0, -1].argmax())]
        yield given[0]


def torch(path: Path, prompt: list[int]) -> Tokens:
    """The thread of `generate` waits behind each token until the next is wanted."""
    import torch
    import transformers

    torch.set_num_threads(1)
    whole = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    wanted, there, made = threading.Semaphore(0), threading.Semaphore(0), list[int]()

    class Streamer(transformers.generation.BaseStreamer):
        """Takes tokens, and waits."""

        def put(self, value: Any) -> None:
            if value.numel() == 1:
                made.append(int(value))
                there.release()
                wanted.acquire()

        def end(self) -> None: ...

    options = {"max_new_tokens": MOST, "do_sample": False, "streamer": Streamer()}
    threading.Thread(target=whole.generate, args=(torch.tensor([prompt]),), kwargs=options, daemon=True).start()
    while True:
        there.acquire()
        yield made[-1]
        wanted.release()


def loop(path: Path, prompt: list[int]) -> Tokens:
    """Each rank has its own shard of the past; what is made is told to all ranks."""
    comm = MPI.COMM_WORLD
    with load(path, comm, threads=1) as program:
        ports = [port for port in program.inputs if port.name.startswith("past")]
        past = {port.name: np.zeros((1, port.shape[1] // comm.size, 0, port.shape[3]), np.float32) for port in ports}
        given = np.array([prompt])
        while True:
            outputs = program({"input_ids": given, **past})
            present = [value for name, value in outputs.items() if name.startswith("present")]
            past = dict(zip(past, present, strict=True))
            token = int(outputs["logits"][0, -1].argmax()) if comm.rank == 0 else 0
            given = np.array([[comm.bcast(token)]])
            yield int(given[0, 0])


SIDES: dict[str, Callable[[Path, list[int]], Tokens]] = {
    one.__name__: one for one in (partc, in_place, copied, torch, loop)
}


def main() -> None:
    side, model, prompt = sys.argv[1:]
    comm = MPI.COMM_WORLD
    tokens = SIDES[side](Path(model), json.loads(Path(prompt).read_text()))
    made = [next(tokens)]
    if comm.rank == 0:
        answer([])
    for count in told_ranks(comm):
        begin, worked = time.perf_counter(), time.process_time()
        made += [next(tokens) for _ in range(count)]
        took, worked = time.perf_counter() - begin, time.process_time() - worked
        whole = comm.allreduce(worked)
        if comm.rank == 0:
            answer([took, whole])
    if comm.rank == 0:
        print(json.dumps(made), flush=True)
    tokens.close()


def told_ranks(comm: MPI.Intracomm) -> Iterator[int]:
    """What rank 0 is told, on all ranks; the others wait without using a core."""
    if comm.rank == 0:
        for count in told():
            for other in range(1, comm.size):
                comm.send(count, other)
            yield count
        for other in range(1, comm.size):
            comm.send(0, other)
        return
    while True:
        while not comm.iprobe():
            time.sleep(0.001)
        if not (count := comm.recv()):
            return
        yield count


if __name__ == "__main__":
    main()
