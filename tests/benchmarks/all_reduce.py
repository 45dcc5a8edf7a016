"""What an AllReduce of ranks of one host costs against MPI_Allreduce, in the same processes in turns.

    python tests/benchmarks/all_reduce.py [--ranks 2] [--busy 0] [--rounds 7] [--cell 0.15] [--sizes 4,65536,1048576,4194304]

`--busy` starts so many processes beside that compute without end. Both ways are measured in turns, each for `--cell` seconds a round, so
that what else the machine does meets both alike. Printed are by size the medians of all calls of all ranks in microseconds, their
ratio, the ratio of the means, and the microseconds of CPU of a rank and call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from turns import busy

TIMED_AHEAD, LEAST, MOST = 8, 6, 4000


def rank(options: argparse.Namespace) -> None:
    """One rank of the job."""
    import numpy as np
    from mpi4py import MPI
    from partc.runtime.artifact.tensors.dtypes import BY_NAME
    from partc.runtime.communication.mpi import MpiTransport
    from partc.runtime.communication.transport import CollectiveArgs

    comm = MPI.COMM_WORLD
    transport = MpiTransport(comm)
    if transport.mpi_alone:
        raise SystemExit(f"the ranks share no memory: {transport.mpi_alone}")
    everyone = tuple(range(comm.size))
    transport.create_groups([everyone])

    def meet() -> None:
        transport.all_reduce_max(np.zeros(1, np.int64))

    def cell(call: Callable[[], object]) -> tuple[list[float], float]:
        """Microseconds of each call, and of CPU a call."""
        meet()
        begun = time.perf_counter()
        for _ in range(TIMED_AHEAD):
            call()
        each = int((time.perf_counter() - begun) / TIMED_AHEAD * 1e6)
        slowest = int(transport.all_reduce_max(np.array([each], np.int64))[0])
        count = min(max(int(options.cell * 1e6 / max(slowest, 1)), LEAST), MOST)
        meet()
        taken, cpu = [], time.process_time()
        for _ in range(count):
            begun = time.perf_counter()
            call()
            taken.append((time.perf_counter() - begun) * 1e6)
        return taken, (time.process_time() - cpu) / count * 1e6

    for size in map(int, options.sizes.split(",")):
        source = np.full(size // 4, comm.rank + 1, np.float32)
        made = np.empty_like(source)
        data = source.view(np.uint8), made.view(np.uint8)
        begin = transport.prepare(CollectiveArgs("AllReduce", everyone, 0, *data, BY_NAME["float"], "sum"))
        ways = {
            "partc": lambda begin=begin: transport.wait(begin(), lambda: "an AllReduce"),
            "MPI": lambda source=source, made=made: comm.Allreduce(source, made),
        }
        found: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in ways}
        for _ in range(options.rounds):
            for way, call in ways.items():
                made[:] = 0
                taken, cpu = cell(call)
                assert (made == comm.size * (comm.size + 1) / 2).all(), way
                found[way][0].extend(taken)
                found[way][1].append(cpu)
        meet()
        every = comm.gather(found)
        if every is not None:
            times = {way: statistics.median(t for one in every for t in one[way][0]) for way in ways}
            means = {way: statistics.fmean(t for one in every for t in one[way][0]) for way in ways}
            cpus = {way: statistics.median(c for one in every for c in one[way][1]) for way in ways}
            print(
                f"{size:9,} B  partc {times['partc']:10.1f} us  MPI {times['MPI']:10.1f} us  ratio {times['partc'] / times['MPI']:7.3f}"
                f" (of means {means['partc'] / means['MPI']:7.3f})"
                f"  CPU of a call: partc {cpus['partc']:8.1f} us, MPI {cpus['MPI']:8.1f} us",
                flush=True,
            )
    transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cell", type=float, default=0.15, help="seconds of one way and size in a round")
    parser.add_argument("--sizes", default="4,65536,1048576,4194304", help="bytes")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options)
        return
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["mpiexec", "--oversubscribe", "--bind-to", "none", "-n", str(options.ranks), sys.executable, __file__]
    print(f"{options.ranks} ranks", flush=True)
    with busy(options.busy):
        code = subprocess.run([*command, *sys.argv[1:], "--rank"], env={**os.environ, **root}, check=False).returncode
    sys.exit(code)


if __name__ == "__main__":
    main()
