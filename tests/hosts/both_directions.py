"""A rank of two, each on a host: what an exchange and a sum under way take, as a multiple of the time that their bytes take one way.

python both_directions.py BYTES SECONDS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import mpi4py
import numpy as np

if TYPE_CHECKING:
    from partc.runtime.communication.mpi import MpiTransport


def main() -> None:
    mpi4py.rc.initialize = False
    from partc.runtime.artifact.format import ALL_REDUCE, SUM
    from partc.runtime.artifact.tensors.dtypes import BY_NAME
    from partc.runtime.communication.mpi import MpiTransport
    from partc.runtime.communication.mpi_calls import begin, end
    from partc.runtime.communication.mpi_watch import Watch
    from partc.runtime.communication.transport import CollectiveArgs

    size, seconds = int(sys.argv[1]), float(sys.argv[2])
    watch = Watch(0, 30.0)
    transport = MpiTransport(begin(watch))
    assert not transport.shares_host
    transport.create_groups([(0, 1)])
    peer = 1 - transport.rank
    given, taken = np.full(size // 4, transport.rank + 1, np.float32), np.zeros(size // 4, np.float32)
    add = transport.prepare(
        CollectiveArgs(ALL_REDUCE, (0, 1), 0, given.view(np.uint8), taken.view(np.uint8), BY_NAME["float"], reduce=SUM)
    )

    def exchange() -> None:
        requests = [transport.irecv(taken.view(np.uint8), peer, 5), transport.isend(given.view(np.uint8), peer, 5)]
        for request in requests:
            transport.wait(request, lambda: "an exchange")
        assert (taken == peer + 1).all()

    def total() -> None:
        transport.wait(add(), lambda: "a sum")
        assert (taken == 3).all()

    for name, action in (("exchange", exchange), ("sum", total)):
        best = min(_took(transport, action) for _ in range(3))
        longest = transport.all_reduce_max(np.array([best * 1e6], np.int64))[0] / 1e6
        if transport.rank == 0:
            print(f"{name} {longest / seconds:.2f}", flush=True)
    transport.close()
    end(watch)


def _took(transport: MpiTransport, action: Callable[[], None]) -> float:
    transport.all_gather_text("")
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


if __name__ == "__main__":
    main()
