"""A Pull and a Push of skewed ids between MPI ranks, beside the Unique of onnxruntime on the same ids.

    python tests/benchmarks/pull.py [--ranks 2] [--ids 16384] [--columns 64] [--rows 100000] [--steps 50]

Each rank looks up so many ids of a table whose rows lie on all ranks, and gives a row for each back. Printed are the least
milliseconds of a whole step with the one op on rank 0, since ranks of a busy machine wait for their turn; their ratio to Unique and to the
sums of rows that a dense gradient needs; bytes that came from other ranks, beside the formula.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])


def graphs(op: str, ranks: int, ids: int, columns: int, rows: int) -> list[str]:
    """Each rank's Pull of a graph input, or its Push."""
    owners = ", ".join(map(str, range(ranks)))
    said = f'group = "all", tag = 0, owners = [{owners}], rows = {rows}, row = [{columns}]'
    if op == "Pull":
        return [
            f"""rank{rank} (float[{rows // ranks}, {columns}] t{rank}, int64[{ids}] i{rank}) => (int64 y{rank})
            <float[{ids}, {columns}] h, int64[1] first = {{0}}, float[1, {columns}] z>
            {{ h = partc.comm.Pull <{said}> (t{rank}, i{rank}) z = Gather(h, first) y{rank} = Size(z) }}"""
            for rank in range(ranks)
        ]
    return [
        f"""rank{rank} (int64[m{rank}] a{rank}, int64[{2 * ranks}] c{rank}, int64[{ids}] o{rank}, float[{ids}, {columns}] d{rank})
         => (int64[1] y{rank}) <int64[k] q, float[k, {columns}] g>
        {{ q, g = partc.comm.Push <{said}, givers = [{owners}]> (a{rank}, c{rank}, o{rank}, d{rank}) y{rank} = Shape(q) }}"""
        for rank in range(ranks)
    ]


def skewed(seed: int, count: int, rows: int):  # type: ignore[no-untyped-def]
    """Ids by Zipf's law with the exponent 1.2, spread over the table."""
    import numpy as np

    random = np.random.default_rng(seed)
    drawn = random.zipf(1.2, 4 * count)
    popular = drawn[drawn <= rows][:count] - 1
    return np.random.default_rng(0).permutation(rows)[popular]


def rank(folder: Path, op: str, ids: int, columns: int, rows: int, steps: int) -> None:
    """One rank of the job."""
    import time

    import numpy as np
    import onnxruntime
    from mpi4py import MPI
    from onnx.parser import parse_model
    from partc.runtime import load

    sys.path.append(str(Path(__file__).parents[1] / "support"))
    from reference_ops import pulled

    comm = MPI.COMM_WORLD
    mine = skewed(comm.rank + 1, ids, rows)
    values = np.random.default_rng(comm.rank).normal(size=(max(rows // comm.size, ids), columns)).astype(np.float32)
    given = {"i": mine, "t": values[: rows // comm.size], "d": values[:ids]}
    everyone = range(comm.size)
    asking = [(np.zeros((rows // comm.size, 0)), skewed(one + 1, ids, rows)) for one in everyone]
    _, *asked = pulled(asking, comm.rank, {"owners": everyone, "givers": everyone, "rows": rows})
    given |= dict(zip("aco", asked, strict=True))

    def least(action) -> float:  # type: ignore[no-untyped-def]
        found = []
        for _ in range(steps):
            comm.Barrier()
            begun = time.perf_counter()
            action()
            found.append(time.perf_counter() - begun)
        return 1e3 * min(found)

    def session(text: str):  # type: ignore[no-untyped-def]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        model = parse_model('<ir_version: 10, opset_import: ["" : 18]>' + text)
        return onnxruntime.InferenceSession(model.SerializeToString(), options)

    with load(folder, threads=1) as program:
        fed = {f"{name}{comm.rank}": one for name, one in given.items() if name in ("it" if op == "Pull" else "acod")}
        took = least(lambda: program(fed))
        (lookup,) = program._program.messages.lookups.values()
        moved = lookup.moved
    unique = session("g (int64[n] i) => (int64[u] y, int64[u] f, int64[n] v) { y, f, v = Unique(i) }")
    dense = session(
        'g (float[r, c] z, int64[n, 1] i, float[n, c] d) => (float[r, c] y) { y = ScatterND <reduction = "add"> (z, i, d) }'
    )
    alone = least(lambda: unique.run(None, {"i": mine}))
    zeros = np.zeros((rows, columns), np.float32)
    summed = least(lambda: dense.run(None, {"z": zeros, "i": mine[:, None], "d": values[:ids]}))
    if comm.rank == 0:
        share = moved.distinct / moved.ids
        print(f"{op:5} {took:6.2f} ms, Unique {alone:6.2f} ms: {took / alone:5.2f} of it", end="; ")
        print(f"dense sums {summed:6.2f} ms: {took / summed:5.2f}; {share:.1%} of {ids} ids are distinct", end="; ")
        even = (comm.size - 1) / comm.size * moved.distinct / moved.steps * (8 * (op == "Pull") + 4 * columns)
        print(f"{moved.received // moved.steps} bytes came a step, {even:.0f} where ids are even", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ids", type=int, default=16384)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.ids, options.columns, options.rows
    if options.rank:
        rank(Path(options.rank[0]), options.rank[1], *sizes, options.steps)
        return
    from artifact_text import write

    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OPENBLAS_NUM_THREADS": "1"}
    print(f"load average {os.getloadavg()[0]:.1f}, {options.ranks} ranks", flush=True)
    with tempfile.TemporaryDirectory() as place:
        for op in ("Pull", "Push"):
            groups = {"all": [list(range(options.ranks))]}
            folder = write(Path(place) / op, graphs(op, options.ranks, *sizes), groups=groups)
            said = [f"--{name}={getattr(options, name)}" for name in ("ids", "columns", "rows", "steps")]
            command = [mpiexec, "--oversubscribe", "-n", str(options.ranks), sys.executable, __file__, *said]
            subprocess.run([*command, "--rank", str(folder), op], env={**os.environ, **root}, check=True)


if __name__ == "__main__":
    main()
