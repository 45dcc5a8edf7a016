"""Waits for other ranks of a host: a short spin, then a sleep in the kernel until another rank wakes this one.

Each rank has one word in shared memory: 1 while it sleeps, else 0. It may wait for any condition on shared memory.

    the waiting rank                          the rank that changes the memory
      word = 1                                  change the memory of the condition
      fence                                     fence
      ready? then word = 0, and go on           word of the waiting rank is 1? then word = 0, futex wake
      futex wait while the word is 1

Each of the two makes its own store visible before it reads the other's, so at least one of them sees the other's store: no wake is lost. An
unnecessary wake costs one check. The changing rank makes no system call if no rank sleeps. A sleep ends after at most `LOOK` seconds, and
then the rank checks whether another has failed; so a rank that is killed between any two of these stores delays the others by at most that
time.

Ranks that wait only for the growth of a number that they share sleep on that number (`Count`), and one system call wakes them all. A second
word of the rank says that it does so. Only the rank itself writes this second word, while the first one is also written by the rank that
wakes it.

The time of the spin adapts. Waking an idle core takes up to hundreds of microseconds, so a rank with a core of its own spins for
`LONGEST_SPIN`. If other processes want these cores, too, a spinning rank may occupy the core that the rank for which it waits needs. Linux
counts the time for which a thread could have run and had no core. If that is more than a tenth of the time for one rank, it tells the
others of its host, and all spin for only `SHORTEST_SPIN`: during `SHORTEST_CAUTION` at first, and twice as long each time that it happens
again.

If there are more ranks than cores, no rank spins: one that waits for a number gives its core up once (`YieldTurns`), and then sleeps.

Linux futexes (futex(2)), called by ctypes: a thread sleeps in the kernel until a 32-bit word in shared memory has changed.

ctypes releases Python's lock during the call, so that other threads of the process continue. The kernel compares the word with the caller's
expected value before the thread sleeps, so a wake between the caller's check and its sleep is not lost.

Waits by polling: a rank always yields its core between two polls.

    for _ in spins(2e-3):                   # the first poll at once, the next ones whenever no other process wants the core
        if request.Test():
            return
    for waited in sleeps(2e-5, 1e-4):       # 20 microseconds, and twice as long each time, up to a tenth of a millisecond
        if request.Test():
            break

A rank that polls without giving its core up may block the rank for which it waits: the system may have put both on one core, even with as
many cores as ranks, since another process may run on the other core. Each wait then takes a time slice of the system, some milliseconds,
until the other rank runs. Giving the core up costs less than a microsecond if no other process wants it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from time import perf_counter
from typing import Protocol

_NUMBERS = {"x86_64": 202}
"""Maps each machine to the number of the system call. Only x86: the order of stores on which `Parking` relies holds there alone."""
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF


class Futex:
    """The system call; OSError where the system lacks it or forbids it."""

    def __init__(self) -> None:
        number = _NUMBERS.get(platform.machine().lower()) if sys.platform == "linux" else None
        if number is None:
            raise OSError("no futex on this system")
        self._number = number
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        number_type, word = ctypes.c_long, ctypes.c_void_p
        self._syscall.argtypes = [number_type, word, ctypes.c_int, ctypes.c_uint32, word, word, ctypes.c_uint32]
        own = ctypes.c_uint32()
        if self._syscall(number, ctypes.addressof(own), _WAKE, 0, None, None, 0) < 0:
            raise OSError(ctypes.get_errno(), f"futex: {os.strerror(ctypes.get_errno())}")

    def timeout(self, seconds: float) -> ctypes.Array[ctypes.c_long]:
        """Converts seconds to a timeout for `wait`, which can be reused."""
        whole = int(seconds)
        return (ctypes.c_long * 2)(whole, int((seconds - whole) * 1e9))

    def wait(self, address: int, expected: int, timeout: ctypes.Array[ctypes.c_long]) -> None:
        """Sleeps while the word is `expected`, until a wake, a signal or the timeout; the caller must then check its condition again."""
        self._syscall(self._number, address, _WAIT, expected, ctypes.addressof(timeout), None, 0)

    def wake(self, address: int) -> None:
        """Wakes all threads that sleep on the word."""
        self._syscall(self._number, address, _WAKE, _ALL, None, None, 0)


LINE = 64
"""Bytes of a cache line: words of different ranks are in different lines."""
LOOK = 0.05
"""The longest sleep in seconds, after which a rank checks for failures of other ranks."""
SHORTEST_SPIN, LONGEST_SPIN = 5e-6, 2e-3
SHORTEST_CAUTION, LONGEST_CAUTION = 0.01, 0.32
"""The shortest and longest time in seconds of short spins after a rank has had to wait for a core."""
_WINDOW, _SHARE = 2e-3, 0.1
"""Seconds between two measurements of the time without a core, and the share of them above which spins become short."""
_LONG_TURN = 1e-3
"""Seconds of a turn above which a process other than waiting ranks has had the core."""
_LOOKS, _NO_LOOKS = range(16), range(0)
"""Checks of a number between two reads of the clock."""
_ON_WORD, _ON_COUNT = 0, 1
"""The indices of a rank's two words in its line."""
_LOW = 0xFFFFFFFF
"""The bits of a number that a futex compares: the low ones, which are first in memory on x86."""
_COUNTS = "/proc/thread-self/schedstat"
"""This file's numbers: the nanoseconds for which the thread has had a core, those for which it could run and had none, and more."""


def new_fence() -> Callable[[], None]:
    """Returns a function that makes all of this rank's stores visible before its next load: on x86 an atomic exchange does so."""
    held = Lock()
    held.acquire()
    release, acquire = held.release, held.acquire

    def fence() -> None:
        release()
        acquire()

    return fence


class Cell(Protocol):
    """Numbers in shared memory."""

    def __getitem__(self, at: int, /) -> int: ...
    def __setitem__(self, at: int, number: int, /) -> None: ...


class Words(Protocol):
    """The words of all ranks, and sleeps on them."""

    @property
    def cells(self) -> Sequence[Cell]: ...

    def sleep(self, place: int) -> None:
        """Sleep while the word at `place` is 1, until a wake or a timeout."""
        ...

    def wake(self, place: int) -> None:
        """Wake the rank that sleeps on the word at `place`."""
        ...


class Count(Protocol):
    """A number in shared memory that only grows, on which ranks sleep."""

    @property
    def cell(self) -> Cell: ...

    def sleep(self, seen: int) -> None:
        """Sleep while the number is `seen`, until a wake or a timeout."""
        ...

    def wake(self) -> None:
        """Wake all ranks that sleep on the number."""
        ...


class FutexWords:
    """Words in shared memory, one line for each rank; `address` is that of the memory, `seconds` the longest sleep."""

    def __init__(self, futex: Futex, memory: memoryview, address: int, ranks: int, seconds: float) -> None:
        self.cells = [memory[at : at + LINE].cast("i") for at in range(0, LINE * ranks, LINE)]
        self._futex, self._address, self._timeout = futex, address, futex.timeout(seconds)

    def sleep(self, place: int) -> None:
        self._futex.wait(self._address + LINE * place, 1, self._timeout)

    def wake(self, place: int) -> None:
        self._futex.wake(self._address + LINE * place)


class FutexCount:
    """A number in shared memory, whose line begins at `address`; `seconds` is the longest sleep."""

    def __init__(self, futex: Futex, line: memoryview, address: int, seconds: float) -> None:
        self.cell = line.cast("q")
        self._futex, self._address, self._timeout = futex, address, futex.timeout(seconds)

    def sleep(self, seen: int) -> None:
        self._futex.wait(self._address, seen & _LOW, self._timeout)

    def wake(self) -> None:
        self._futex.wake(self._address)


class ShortSpin:
    """A time during which the ranks of a host spin briefly to leave cores to others; it doubles if it begins again soon after its end.

    `until`: the end of that time, in memory that the ranks share.
    """

    def __init__(self, until: memoryview[float]) -> None:
        self._until = until
        self._seconds, self._quiet = SHORTEST_CAUTION, 0.0

    def begin(self, now: float) -> None:
        """Begins the time for all ranks of the host."""
        self._seconds = min(2 * self._seconds, LONGEST_CAUTION) if now < self._quiet else SHORTEST_CAUTION
        self._quiet = now + 2 * self._seconds
        self._until[0] = max(self._until[0], now + self._seconds)

    def lasts(self, now: float) -> bool:
        """Whether the time, begun by any rank, still lasts."""
        return now < self._until[0]


class SpinTime:
    """Chooses the time of spins for a rank with a core of its own, from the creating thread's time without a core.

    OSError where Linux does not count that time.
    """

    def __init__(self, caution: ShortSpin) -> None:
        self._short = caution
        self._file = os.open(_COUNTS, os.O_RDONLY | os.O_CLOEXEC)
        self._looked, self._waited = perf_counter(), self._without_core()

    def at(self, now: float) -> float:
        """Returns the seconds that a spin beginning at `now` may last."""
        if now - self._looked >= _WINDOW:
            waited = self._without_core()
            if waited - self._waited > _SHARE * (now - self._looked):
                self._short.begin(now)
            self._looked, self._waited = now, waited
        return SHORTEST_SPIN if self._short.lasts(now) else LONGEST_SPIN

    def close(self) -> None:
        """Closes the file of the thread's times."""
        os.close(self._file)

    def _without_core(self) -> float:
        """Returns the seconds for which this thread could have run and had no core."""
        return int(os.pread(self._file, 64, 0).split()[1]) * 1e-9


class YieldTurns:
    """Lets other ranks run before a rank that shares its core sleeps: mostly it waits for one of these, which then need not wake it.

    A process of another job that wants the core gets it, too, and keeps it for long. After such a turn the ranks sleep without one for a
    time.
    """

    def __init__(self, caution: ShortSpin, give_up_core: Callable[[], object] = os.sched_yield) -> None:
        self._none, self._give_up_core = caution, give_up_core

    def is_ready_after(self, ready: Callable[[], bool]) -> bool:
        """Gives the core up once, unless a long turn was recent; returns whether `ready` holds after that."""
        begun = perf_counter()
        if self._none.lasts(begun):
            return False
        self._give_up_core()
        now = perf_counter()
        if now - begun > _LONG_TURN:
            self._none.begin(now)
        return ready()


class RankWait:
    """The waits of one rank of a host, whose word is at `place`.

    `spin` chooses the time of spins, `turns` is for a rank that shares its core; a rank with neither sleeps at once.
    """

    def __init__(
        self,
        words: Words,
        place: int,
        fence: Callable[[], None],
        spin: SpinTime | None,
        turns: YieldTurns | None = None,
    ) -> None:
        self._words, self._place, self.fence = words, place, fence
        self._own = words.cells[place]
        self._spin, self._turns = spin, turns
        self._count: Count | None = None
        """The number on which this rank sleeps, if it does not sleep on its word."""

    def wake(self, places: Sequence[int], count: Count | None = None) -> None:
        """Wakes the sleeping ranks at these places; if any of them sleeps on a number, all ranks that sleep on `count`.

        The caller must first make the change for which the ranks may wait, and then call `fence`.
        """
        cells = self._words.cells
        on_count = False
        for place in places:
            cell = cells[place]
            if cell[_ON_WORD]:
                cell[_ON_WORD] = 0
                self._words.wake(place)
            elif cell[_ON_COUNT]:
                on_count = True
        if on_count and count is not None:
            count.wake()

    def wake_own(self) -> None:
        """Makes this rank check its condition and failures again; called from another thread."""
        new_fence()()  # a new fence, since two threads cannot share one
        self.wake([self._place], self._count)

    def word(self, place: int) -> Cell:
        """Returns the two words of a rank, which `wake` checks: both are 0 while it does not sleep."""
        return self._words.cells[place]

    def spins(self, ready: Callable[[], bool], count: Count | None = None) -> bool:
        """Whether `ready` held during the spin, or after a turn of other ranks; without `spin` and `turns` it is not called.

        `count` is as for `wait`: between two calls of `ready` only the number is checked. Turns are given only with a `count`.
        """
        if self._spin is None:
            return count is not None and self._turns is not None and self._turns.is_ready_after(ready)
        looks, cell = (_NO_LOOKS, self._own) if count is None else (_LOOKS, count.cell)
        end = 0.0
        while True:
            seen = cell[0]
            if ready():
                return True
            for _ in looks:
                if cell[0] != seen:
                    break
            else:
                now = perf_counter()
                if not end:
                    end = now + self._spin.at(now)
                elif now >= end:
                    return False

    def wait(self, ready: Callable[[], bool], look: Callable[[], object], count: Count | None = None) -> None:
        """Sleeps until `ready` holds, after a spin in which it did not; `look` raises where a rank has failed, which ends the wait.

        `count`: the number whose growth alone can make the condition true.
        """
        own, place = self._own, self._place
        word = _ON_WORD if count is None else _ON_COUNT
        self._count = count
        try:
            while True:
                own[word] = 1
                self.fence()
                seen = 0 if count is None else count.cell[0]
                if ready():
                    break
                if count is None:
                    self._words.sleep(place)
                else:
                    count.sleep(seen)
                if ready():
                    break
                look()
        finally:
            own[word] = 0


_LONG_WAIT = 0.1
_SLEEP_OF_A_LONG_WAIT = 1e-3

give_way = getattr(os, "sched_yield", None) or (lambda: time.sleep(0))
"""Gives the core to another process or thread that wants it, if there is one."""


def spins(seconds: float) -> Iterator[None]:
    """Yields at once, and then repeatedly for `seconds`; in between any other process that wants the core gets it."""
    yield
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        give_way()
        yield


def sleeps(shortest: float, longest: float | None = None, within: float | None = None) -> Iterator[float]:
    """Yields the seconds waited so far, at once and after each sleep.

    The first sleep takes `shortest` seconds, each further one twice as long, up to `longest`; after a tenth of a second up to at least a
    millisecond. With `within` the last value comes after that many seconds.
    """
    begun, sleep, most = time.monotonic(), shortest, longest or shortest
    waited = 0.0
    yield waited
    while within is None or waited < within:
        time.sleep(sleep)
        waited = time.monotonic() - begun
        yield waited
        sleep = min(2 * sleep, most if waited < _LONG_WAIT else max(most, _SLEEP_OF_A_LONG_WAIT))
