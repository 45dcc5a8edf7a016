"""Ranks of `samples/minimal_runtime` as threads, and as the tests of all samples compare them with partc's runtime."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from partc.runtime import load_local
from partc.runtime.artifact.format import CACHE
from training_equivalence import fed, tensors

FILE = Path(__file__).parents[2] / "samples/minimal_runtime/minimal_runtime.py"
_SPEC = importlib.util.spec_from_file_location("minimal_runtime", FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
minimal_runtime = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(minimal_runtime)

Arrays = dict[str, np.ndarray]


class Comm:
    """The part of mpi4py's communicator that the minimal runtime calls, for a rank that is a thread."""

    def __init__(self, rank: int, boxes: list[list[SimpleQueue[Any]]]) -> None:
        self.rank, self.boxes = rank, boxes

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return len(self.boxes)

    def isend(self, value: Any, dest: int) -> Comm:
        self.boxes[dest][self.rank].put(value)
        return self

    def wait(self) -> None:
        pass

    def recv(self, source: int) -> Any:
        return self.boxes[self.rank][source].get(timeout=60)


def run(folder: Path, ranks: int, steps: Sequence[Mapping[str, Any]]) -> tuple[list[Arrays], Arrays]:
    """The outputs of steps of the minimal runtime, and the state after them."""
    boxes: list[list[SimpleQueue[Any]]] = [[SimpleQueue() for _ in range(ranks)] for _ in range(ranks)]

    def of_rank(rank: int) -> tuple[list[Arrays], Arrays]:
        runtime = minimal_runtime.Runtime(folder, Comm(rank, boxes))
        return [runtime(step) for step in steps], runtime.tensors()

    with ThreadPoolExecutor(ranks) as threads:
        return next(iter(threads.map(of_rank, range(ranks))))


def same_as_partc(
    folder: Path, ranks: int, steps: Sequence[Mapping[str, Any]], rtol: float, of_state: float | None = None
) -> None:
    """Compares outputs and state with those of partc's runtime.

    `rtol`, and for the state `of_state`, limit the norm of a difference divided by the norm of the array.
    """
    outputs, state = run(folder, ranks, steps)
    with load_local(folder, devices={"cuda": "cpu"}, threads=1) as program:
        is_training = program.manifest.training is not None
        wanted = [program({**(fed(program, k) if is_training else {}), **step}) for k, step in enumerate(steps)]
        wanted.append(tensors(program))
        caches = {record.tensor for record in program.manifest.state if record.kind == CACHE}
    limits = [rtol] * len(steps) + [rtol if of_state is None else of_state]
    for have, want, limit in zip([*outputs, state], wanted, limits, strict=True):
        assert have.keys() == want.keys()
        for name in have.keys() - caches:  # entries of a cache that are not read yet may be anything
            assert have[name].dtype == want[name].dtype
            norm = np.linalg.norm(np.asarray(want[name], np.float64))
            distance = np.linalg.norm(np.asarray(have[name], np.float64) - want[name])
            assert distance <= limit * norm, f"{name}: {distance:.3g} of {norm:.3g}"
