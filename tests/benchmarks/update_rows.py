"""The update of a table at the rows that were looked up, against PyTorch, one thread each, in turns.

    python tests/benchmarks/update_rows.py [--ids 2048] [--turns 10]

Merging rows of equal ids is counted where the update wants each once: lazy Adam against SparseAdam, plain SGD against SGD with a sparse
gradient. The table must not matter: a row of 1,000,000 is as near as one of 100,000. Prints the fastest of both, and the ratio.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import torch
from partc.compiler.training.optimizer_functions import function
from partc.runtime.artifact.graph.row_function import merge_function
from partc.runtime.devices.devices import HOST
from partc.runtime.program.ort import Binding, Session, new_session
from partc.runtime.updates.updater import row_model

HEAD = '<ir_version: 10, opset_import: ["" : 21, "partc.optimizer" : 1]>\n'
MERGE = "main (int64[n] ids, float[n, d] rows) => (int64[m] once, float[m, d] sums) { once, sums = partc.optimizer.MergeRows(ids, rows) }"
NUMBERS = {
    "lr_multiplier": 1.0,
    "beta1": 0.9,
    "one_minus_beta1": 0.1,
    "beta2": 0.999,
    "one_minus_beta2": 0.001,
    "eps": 1e-8,
}
SCALARS = ("lr", "bias1", "bias2")
CASES = (("AdamRows", 100_000, 64), ("AdamRows", 1_000_000, 16), ("SgdRows", 100_000, 64), ("SgdRows", 1_000_000, 16))


def bound(session: Session, given: Mapping[str, np.ndarray], made: Mapping[str, np.ndarray | None]) -> Binding:
    """A call on this memory; what has none is made anew."""
    binding = session.io_binding()
    for name, array in given.items():
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)  # type: ignore[arg-type]
    for name, one in made.items():
        place = () if one is None else ("cpu", 0, one.dtype, one.shape, one.ctypes.data)
        binding.bind_output(name, *place)
    return binding


def partc_step(name: str, rows: int, width: int, ids: np.ndarray, terms: np.ndarray) -> Callable[[], None]:
    """The update, with the merging where it wants that."""
    model = onnx.parser.parse_model(HEAD + MERGE)
    model.functions.append(merge_function(21))
    merge = new_session(model.SerializeToString(), 1, HOST, {}, exact=True)
    body = function(name)
    dims = {one: 2 for one in (*body.input, *body.output) if one not in SCALARS} | {"ids": 1}
    update = new_session(row_model(body, NUMBERS, 1, dims), 1, HOST, {})
    tables = {one: np.zeros((rows, width), np.float32) for one in body.output}
    given = {one.removesuffix("_next"): array for one, array in tables.items()}
    given |= {one: np.array(0.1, np.float32) for one in body.input if one in SCALARS}
    merging = bound(merge, {"ids": ids, "rows": terms}, {"once": None, "sums": None})
    whole = name == "SgdRows"
    binding = bound(update, {**given, "ids": ids, "rows": terms}, tables)

    def step(bound_to: object = (given, tables)) -> None:
        """`bound_to` is the memory that the call has addresses of."""
        if not whole:
            merge.run_with_iobinding(merging)
            for formal, value in zip(("ids", "rows"), merging.get_outputs(), strict=True):
                shape = tuple(value.shape())
                binding.bind_input(formal, "cpu", 0, value.element_type(), shape, value.data_ptr())
        update.run_with_iobinding(binding)

    return step


def torch_step(name: str, rows: int, width: int, ids: np.ndarray, terms: np.ndarray) -> Callable[[], None]:
    """The same in PyTorch."""
    weight = torch.nn.Parameter(torch.zeros(rows, width))
    kind = torch.optim.SGD if name == "SgdRows" else torch.optim.SparseAdam
    optimizer = kind([weight], lr=0.1)
    places, numbers = torch.from_numpy(ids)[None], torch.from_numpy(terms)

    def step() -> None:
        weight.grad = torch.sparse_coo_tensor(places, numbers, (rows, width), check_invariants=False)
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, rows, width in CASES:
        rng = np.random.default_rng(0)
        ids, terms = rng.integers(0, rows, options.ids), rng.standard_normal((options.ids, width)).astype(np.float32)
        steps = [make(name, rows, width, ids, terms) for make in (partc_step, torch_step)]
        times: list[list[float]] = [[], []]
        for _ in range(options.turns):
            for step, found in zip(steps, times, strict=True):
                step()
                for _ in range(20):
                    begin = time.perf_counter()
                    step()
                    found.append(time.perf_counter() - begin)
        own, other = (1e3 * min(found) for found in times)
        print(f"{name:9} {rows:9} x {width:3}: partc {own:.3f} ms, PyTorch {other:.3f} ms, ratio {own / other:.2f}")


if __name__ == "__main__":
    main()
