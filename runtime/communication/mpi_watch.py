"""Reports long waits of a rank, with their duration and reason, by a thread, also while a call of MPI blocks.

    watch = Watch(rank, stall=30.0)
    with watch.during(lambda: "the start of MPI"):
        ...

MPI's blocking calls return only when all ranks have come, and Python's threads run meanwhile. A wait that lasts `stall` seconds is reported
in one line on stderr, and again after twice as long; the line names the ranks of this machine that are stopped, or hang in the system. A
rank whose launcher has ended is ended, too, because the ranks that it waits for never come.

    partc: rank 0 has waited 30 s: the agreement on the sizes of a step; rank 1 (process 4711) is stopped
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from threading import Event, Lock, Thread

from ..job.status_board import states
from .transport import stalled

_SHORTEST_LOOK = 0.02
_LONGEST_LOOK = 0.5
_LOOKS = 8
"""The number of checks by the thread before the first report."""
_ORPHANED = 3.0
_LAUNCHED_BY = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_STATES = {
    "T": "is stopped",
    "t": "is held by a debugger",
    "D": "hangs in the system",
    "Z": "has ended",
    "": "has ended",
}


class Watch:
    """The current wait of one rank. `processes` returns the process ids of the ranks on this machine, if known."""

    def __init__(self, rank: int, stall: float, processes: Callable[[], Mapping[int, int]] = dict) -> None:
        self.rank = rank
        self.stall = stall
        self.processes = processes
        self.orphaned = False
        """Whether the launcher of this process has ended."""
        self._what: Callable[[], str] | None = None
        self._waits = 0
        self._seen = 0
        self._since = self._report = 0.0
        self._parent = os.getppid() if any(name in os.environ for name in _LAUNCHED_BY) else None
        _look_after(self)

    def begin(self, what: Callable[[], str]) -> None:
        """Begins a wait; `what` names it in reports."""
        self._waits += 1
        self._what = what

    def end(self) -> None:
        """Ends the wait."""
        self._what = None

    @contextlib.contextmanager
    def during(self, what: Callable[[], str]) -> Iterator[None]:
        """Makes a block one wait."""
        self.begin(what)
        try:
            yield
        finally:
            self.end()

    def look(self, now: float) -> None:
        """Reports a wait that has lasted too long; called by the thread."""
        if self._parent is not None and os.getppid() != self._parent:
            self.orphaned = True
        what, number = self._what, self._waits
        if what is None or number != self._seen:
            self._seen, self._since, self._report = number, now, self.stall
            return
        waited = now - self._since
        if self.orphaned and waited >= _ORPHANED:
            # Nothing else ends a call that blocks.
            print(f"partc: rank {self.rank} ends, since its launcher has ended", file=sys.stderr, flush=True)
            os._exit(1)
        if waited >= self._report:
            self._report = 2 * waited
            told = "".join(f"; {one}" for one in idle(self.processes(), self.rank))
            print(f"{stalled(self.rank, waited, what())}{told}", file=sys.stderr, flush=True)


def idle(processes: Mapping[int, int], rank: int) -> list[str]:
    """Describes the other ranks that cannot proceed for a reason that the system knows."""
    found = []
    for other, process in processes.items():
        state = states([process])[0]
        if other != rank and state in _STATES:
            found.append(f"rank {other} (process {process}) {_STATES[state]}")
    return found


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_lock = Lock()
_threads: list[Thread] = []
_came = Event()


def _look_after(watch: Watch) -> None:
    with _lock:
        _watches.add(watch)
        if not _threads:
            _threads.append(Thread(target=_look, name="partc watch", daemon=True))
            _threads[0].start()
    _came.set()


def _look() -> None:
    while True:
        with _lock:
            every = list(_watches)
        shortest = min((watch.stall for watch in every), default=_LOOKS * _LONGEST_LOOK)
        _came.wait(min(max(shortest / _LOOKS, _SHORTEST_LOOK), _LONGEST_LOOK))
        _came.clear()
        for watch in every:
            with contextlib.suppress(Exception):
                # A text that cannot be made, or printed, must not end the thread.
                watch.look(time.monotonic())
        every.clear()
