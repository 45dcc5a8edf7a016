"""When a message arrives that was sent before a long segment, with and without tests while the segment runs: two MPI ranks.

    python tests/benchmarks/arrivals.py [--transport tcp] [--segment 50] [--steps 20]
    python tests/benchmarks/arrivals.py --hosts [--gbit 1] [--delay 1]

Rank 0 sends a value and then multiplies matrices for about so many milliseconds; rank 1 does nothing but receive, or multiplies as long
before it waits. Printed are medians of the milliseconds from the send to the end of rank 1's step, of rank 1's wait, and of the segment.
`--transport sm` is shared memory; with `--hosts` the ranks are on two hosts, namespaces of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from transformer import mpi_command

SIZES = {"64 KB": 1 << 14, "1 MB": 1 << 18, "16 MB": 1 << 22}
SIDE = 512


def graphs(elements: int, products: int, both: bool) -> list[str]:
    """Rank 0 sends `h` and computes; rank 1 receives it, after as much computing where `both` do."""
    chain = "".join(f" m{k + 1} = MatMul(m{k}, w)" for k in range(products))
    given, made = f"float[{SIDE}, {SIDE}] m0, float[{SIDE}, {SIDE}] w", f"float[{SIDE}, {SIDE}] m{products}"
    return [
        f"""rank0 (float[{elements}] x, {given}) => ({made})
        <float[{elements}] h>
        {{ h = Neg(x) = partc.comm.Send <peer = 1, tag = 0> (h){chain} }}""",
        f"""rank1 ({given if both else ""}) => (float[1] y{f", {made}" if both else ""})
        <float[{elements}] h, int64[1] at = {{0}}>
        {{ {chain if both else ""} h = partc.comm.Recv <peer = 0, tag = 0> () y = Gather(h, at) }}""",
    ]


def rank(folder: Path, name: str, steps: int, still: bool) -> None:
    """One rank of the job."""
    import mpi4py
    import numpy as np

    mpi4py.rc.initialize = False  # MPI is begun as `partc run` begins it
    from partc.runtime import load
    from partc.runtime.communication.mpi import MpiTransport
    from partc.runtime.communication.mpi_calls import begin, end
    from partc.runtime.communication.mpi_watch import Watch
    from partc.runtime.program.steps import Segment, Send, WaitRecv

    watch = Watch(0, 30.0)
    comm = begin(watch)
    transport = MpiTransport(comm)
    if still:
        transport.with_progress = lambda action: action  # type: ignore[method-assign]
    took: dict[type, list[float]] = {Segment: [], WaitRecv: []}
    sent: list[float] = []
    ended: list[float] = []
    with load(folder, transport, threads=1) as program:
        shapes = {port.name: port.shape or [] for port in program.inputs}
        given = {key: np.full(shape, 1e-3, np.float32) for key, shape in shapes.items()}
        program(given)
        (schedule,) = program._schedules.values()

        def timed(index, action):  # type: ignore[no-untyped-def]
            kind = type(schedule.program.steps[index])

            def run() -> None:
                begun = time.time()
                action()
                if kind is Send and len(sent) == len(ended):
                    sent.append(begun)
                elif kind in took:
                    took[kind].append(time.time() - begun)

            return run

        schedule.actions[:] = [(index, timed(index, action)) for index, action in schedule.actions]
        for _ in range(steps + 2):
            comm.Barrier()
            program(given)
            ended.append(time.time())
        arrived = (comm.gather(ended) or [[], []])[-1]
        waited = (comm.gather(took[WaitRecv]) or [[], []])[-1]
        if comm.rank == 0:
            late = [1e3 * (end - begun) for end, begun in zip(arrived, sent, strict=True)][2:]
            long = [1e3 * seconds for seconds in took[Segment] if seconds > 1e-3][2:]
            waits = [1e3 * seconds for seconds in waited][2:]
            print(
                f"{name:14} {'without' if still else 'with':8} arrives after {statistics.median(late):6.1f} ms, waited for "
                f"{statistics.median(waits):5.1f} ms (p90 {sorted(waits)[len(waits) * 9 // 10]:5.1f}), the segment takes "
                f"{statistics.median(long):6.1f} ms",
                flush=True,
            )
    end(watch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="tcp", help="of Open MPI: tcp or sm")
    parser.add_argument("--segment", type=float, default=50.0, help="milliseconds")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hosts", action="store_true", help="over two hosts; needs root, and Linux's namespaces")
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--delay", type=float, default=1.0)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        folder, name, still = options.rank
        rank(Path(folder), name, options.steps, still == "without")
        return
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OPENBLAS_NUM_THREADS": "1"}
    os.environ.update(root)  # before numpy begins
    import numpy as np
    from artifact_text import write
    from two_hosts import two_hosts

    matrix = np.ones((SIDE, SIDE), np.float32)
    product = min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=50))
    products = max(1, int(options.segment / 1e3 / product))
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = {**os.environ, "OMPI_MCA_btl": f"self,{options.transport}", "PARTC_SHARED_MEMORY": "0"}
        hosts = stack.enter_context(two_hosts(place, options.gbit, options.delay)) if options.hosts else None
        if hosts is not None:
            environment = hosts.environment
        link = options.transport if hosts is None else f"{options.gbit:g} Gbit/s, {options.delay:g} ms ({hosts.link})"
        print(f"load average {os.getloadavg()[0]:.1f}, {link}", flush=True)
        for (name, elements), both in itertools.product(SIZES.items(), (False, True)):
            folder = write(place / f"{elements}{both}", graphs(elements, products, both))
            for how in ("without", "with"):
                given = ["--rank", str(folder), f"{name}, {'both' if both else 'one'}", how]
                command = mpi_command(2, __file__, "--steps", str(options.steps), *given)
                if hosts is not None:
                    command = hosts.over_both(command, 2)
                subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
