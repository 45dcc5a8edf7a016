"""When a message arrives that was sent before a long segment, with and without tests while the segment runs: two MPI ranks.

    python tests/benchmarks/arrivals.py [--transport tcp] [--segment 50] [--steps 20]

Rank 0 sends a value and then multiplies matrices for about so many milliseconds; rank 1 does nothing but receive. Printed are medians of
the milliseconds from the send to the end of rank 1's step, and of rank 0's segment. `--transport sm` is shared memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

SIZES = {"64 KB": 1 << 14, "1 MB": 1 << 18, "16 MB": 1 << 22}
SIDE = 512


def graphs(elements: int, products: int) -> list[str]:
    """Rank 0 sends `h` and computes; rank 1 receives it."""
    chain = "".join(f" m{k + 1} = MatMul(m{k}, w)" for k in range(products))
    return [
        f"""rank0 (float[{elements}] x, float[{SIDE}, {SIDE}] m0, float[{SIDE}, {SIDE}] w) => (float[{SIDE}, {SIDE}] m{products})
        <float[{elements}] h>
        {{ h = Neg(x) = partc.comm.Send <peer = 1, tag = 0> (h){chain} }}""",
        f"""rank1 () => (float[1] y) <float[{elements}] h, int64[1] at = {{0}}>
        {{ h = partc.comm.Recv <peer = 0, tag = 0> () y = Gather(h, at) }}""",
    ]


def rank(folder: Path, name: str, steps: int, still: bool) -> None:
    """One rank of the job."""
    import numpy as np
    from mpi4py import MPI
    from partc.runtime import load
    from partc.runtime.communication.mpi import MpiTransport
    from partc.runtime.program.steps import Segment

    comm = MPI.COMM_WORLD
    transport = MpiTransport(comm)
    if still:
        transport.with_progress = lambda action: action  # type: ignore[method-assign]
    segments: list[float] = []
    sent: list[float] = []
    ended: list[float] = []
    with load(folder, transport, threads=1) as program:
        shapes = {port.name: port.shape or [] for port in program.inputs}
        given = {key: np.full(shape, 1e-3, np.float32) for key, shape in shapes.items()}
        program(given)
        (schedule,) = program._schedules.values()

        def timed(index, action):  # type: ignore[no-untyped-def]
            def run() -> None:
                begun = time.time()
                action()
                if isinstance(schedule.program.steps[index], Segment) and comm.rank == 0:
                    segments.append(time.time() - begun)
                elif comm.rank == 0 and len(sent) < len(ended) + 1:
                    sent.append(begun)

            return run

        schedule.actions[:] = [(index, timed(index, action)) for index, action in schedule.actions]
        for _ in range(steps + 2):
            comm.Barrier()
            program(given)
            ended.append(time.time())
        arrived = (comm.gather(ended) or [[], []])[-1]
        if comm.rank == 0:
            late = [end - begun for end, begun in zip(arrived, sent, strict=True)][2:]
            long = [seconds for seconds in segments if seconds > 1e-3][2:]
            print(
                f"{name:6} {'without' if still else 'with':8} arrives after {1e3 * statistics.median(late):6.1f} ms, "
                f"the segment takes {1e3 * statistics.median(long):6.1f} ms",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="tcp", help="of Open MPI: tcp or sm")
    parser.add_argument("--segment", type=float, default=50.0, help="milliseconds")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        folder, name, still = options.rank
        rank(Path(folder), name, options.steps, still == "without")
        return
    import numpy as np
    from artifact_text import write

    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OPENBLAS_NUM_THREADS": "1"}
    matrix = np.ones((SIDE, SIDE), np.float32)
    begun = time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    products = max(1, int(options.segment / 1e3 / ((time.perf_counter() - begun) / 20)))
    print(f"load average {os.getloadavg()[0]:.1f}, {options.transport}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        for name, elements in SIZES.items():
            folder = write(Path(place) / name.replace(" ", ""), graphs(elements, products))
            for how in ("without", "with"):
                command = [
                    mpiexec,
                    "--oversubscribe",
                    "-n",
                    "2",
                    sys.executable,
                    __file__,
                    "--steps",
                    str(options.steps),
                ]
                subprocess.run(
                    [*command, "--rank", str(folder), name, how],
                    env={**os.environ, **root, "OMPI_MCA_btl": f"self,{options.transport}", "PARTC_SHARED_MEMORY": "0"},
                    check=True,
                )


if __name__ == "__main__":
    main()
