"""What exchanges and reductions of two ranks on two hosts take, in multiples of what their bytes take one way, and the share of a core.

    python tests/benchmarks/both_directions.py [--bytes 4194304] [--gbit 0.1]

On a link so slow that nothing else counts: one direction after the other takes twice as long as both at once. The hosts are namespaces of
this machine, which needs root. Aims: at most 1.2 times, and 0.1 of a core.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import mpi4py
import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "hosts"))

if TYPE_CHECKING:
    from partc.runtime.communication.mpi import MpiTransport

Action = Callable[[], None]


def main() -> None:
    """Starts two ranks, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=4 << 20)
    parser.add_argument("--gbit", type=float, default=0.1)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.bytes, options.bytes * 8 / (options.gbit * 1e9))
        return
    from partc.cli.launch.launcher import find_launcher
    from two_hosts import two_hosts

    with tempfile.TemporaryDirectory() as place, two_hosts(Path(place), options.gbit, delay=1.0) as slow:
        command = [find_launcher(2).path, "-n", "2", sys.executable, __file__, *sys.argv[1:], "--rank"]
        subprocess.run(slow.over_both(command, 2), env=slow.environment, check=True)


def rank(size: int, seconds: float) -> None:
    """A rank, on a link that takes so many seconds for so many bytes."""
    mpi4py.rc.initialize = False
    from partc.runtime.communication.mpi import MpiTransport
    from partc.runtime.communication.mpi_calls import begin, end
    from partc.runtime.communication.mpi_watch import Watch

    watch = Watch(0, 30.0)
    transport = MpiTransport(begin(watch))
    assert not transport.shares_host
    transport.create_groups([(0, 1)])
    for name, action, share in (
        ("exchange", exchanged(transport, size), 1.0),
        ("AllReduce", reduced(transport, "AllReduce", size, at_once=False), 1.0),
        ("AllReduce-at-once", reduced(transport, "AllReduce", size, at_once=True), 1.0),
        ("ReduceScatter", reduced(transport, "ReduceScatter", size, at_once=False), 0.5),
    ):
        took, busy = min(_took(transport, action) for _ in range(3))
        most = transport.all_reduce_max(np.array([1e6 * took / (share * seconds), 1e6 * busy / took], np.int64)) / 1e6
        if transport.rank == 0:
            print(f"{name} {most[0]:.2f} {most[1]:.2f}", flush=True)
    transport.close()
    end(watch)


def exchanged(transport: MpiTransport, size: int) -> Action:
    """A message to the other rank beside one from it."""
    peer = 1 - transport.rank
    given, taken = np.full(size, transport.rank, np.uint8), np.zeros(size, np.uint8)

    def run() -> None:
        for request in (transport.irecv(taken, peer, 5), transport.isend(given, peer, 5)):
            transport.wait(request, lambda: "an exchange")
        assert (taken == peer).all()

    return run


def reduced(transport: MpiTransport, op: str, size: int, at_once: bool) -> Action:
    """A sum that is under way, as a bucket of gradients is beside the backward pass, or that is waited for at once."""
    from partc.runtime.artifact.comm.collective_node import CollectiveCall
    from partc.runtime.artifact.tensors.dtypes import BY_NAME
    from partc.runtime.artifact.tensors.tensor import Tensor
    from partc.runtime.communication.collective import CollectivePlan

    kind, shape = BY_NAME["float"], (size // 4,)
    call = CollectiveCall(op, "all", 3, "", source="given", result="taken", reduce="sum")
    plan = CollectivePlan(call, (0, 1), shape, kind, transport, 3)
    given, taken = Tensor.empty(kind, shape), Tensor.empty(kind, plan.result)
    given.array()[:] = transport.rank + 1
    packed, landing = np.empty(plan.packed, np.uint8), np.empty(plan.landing, np.uint8)
    bound = plan.bind(given, taken, packed, landing, at_once)

    def run() -> None:
        for step in (bound.before, lambda: transport.wait(bound.start(), lambda: op), bound.after):
            if step is not None:
                step()
        assert (taken.array() == 3).all()

    return run


def _took(transport: MpiTransport, action: Action) -> tuple[float, float]:
    """Seconds, and those of a core."""
    transport.all_gather_text("")
    begun, busy = time.monotonic(), time.process_time()
    action()
    return time.monotonic() - begun, time.process_time() - busy


if __name__ == "__main__":
    main()
