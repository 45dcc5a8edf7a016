"""Waiting between ranks of a host: a short spin, then a sleep in the kernel until another rank wakes this one.

Each rank has one word in shared memory: 1 while it sleeps, else 0. What it waits for is any condition over shared memory.

    who waits                               who changes something
      word = 1                                change what the other waits for
      fence                                   fence
      ready? then word = 0, and go on         word of the other 1? then word = 0, futex wake
      futex wait while the word is 1

Each of the two makes its own store seen before it looks at the other's, so one of them sees the other's: no wake is lost. A wake too many
costs a look. Who changes something makes no system call where no rank sleeps. A sleep ends after `LOOK` seconds at the latest, and then the
rank looks whether another has failed; so a rank that is killed between any two of these stores delays the others by that time at most.

Ranks that wait for a number that they have in common, and for nothing else, sleep on that number (`Count`), and one system call wakes them
all. A second word of the rank says so; it alone writes that, while its first word is also written by who wakes it.

The spin adapts. To wake a core that has nothing to do takes as long as hundreds of microseconds, so a rank with a core of its own spins for
`LONGEST_SPIN`. Where others want these cores, too, a rank that spins keeps one from whom it waits for. Linux counts the time for which a
thread could have run and had no core. A rank for which that is more than a tenth of the time tells the others of its host, and all spin
for `SHORTEST_SPIN`: for `SHORTEST_CAUTION` at first, and twice as long each time that it happens again.

Where ranks outnumber cores none spins: one that waits for a number gives its core up once (`YieldTurns`), and then sleeps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from threading import Lock
from time import perf_counter
from typing import Protocol

from .futex import Futex

LINE = 64
"""Bytes of a cache line: words of different ranks share none."""
LOOK = 0.05
"""Seconds of a sleep after which a rank looks for failures."""
SHORTEST_SPIN, LONGEST_SPIN = 5e-6, 2e-3
SHORTEST_CAUTION, LONGEST_CAUTION = 0.01, 0.32
"""Seconds of short spins after a rank has had to wait for a core."""
_WINDOW, _SHARE = 2e-3, 0.1
"""Seconds from which the time without a core is looked at, and the share of them that is too much."""
_LONG_TURN = 1e-3
"""Seconds of a turn in which others than ranks that only communicate have had the core."""
_LOOKS, _NO_LOOKS = range(16), range(0)
"""Looks at a number between two at the clock."""
_ON_WORD, _ON_COUNT = 0, 1
"""The places of a rank's two words in its line."""
_LOW = 0xFFFFFFFF
"""The bits of a number that a futex compares: the low ones, which come first on x86."""
_COUNTS = "/proc/thread-self/schedstat"
"""Nanoseconds with a core, nanoseconds for which the thread wanted one and had none, and more."""


def new_fence() -> Callable[[], None]:
    """Makes all stores of this rank visible to all before it loads anything more: on x86 an atomic exchange does."""
    held = Lock()
    held.acquire()
    release, acquire = held.release, held.acquire

    def fence() -> None:
        release()
        acquire()

    return fence


class Cell(Protocol):
    """Numbers in shared memory, of which one rank writes."""

    def __getitem__(self, at: int, /) -> int: ...
    def __setitem__(self, at: int, number: int, /) -> None: ...


class Words(Protocol):
    """A word of each rank, and the sleeps on them."""

    @property
    def cells(self) -> Sequence[Cell]: ...

    def sleep(self, place: int) -> None:
        """Sleep while the word of a place is 1, until woken, or for a time."""
        ...

    def wake(self, place: int) -> None:
        """Wake who sleeps on the word of a place."""
        ...


class Count(Protocol):
    """A number in shared memory that only grows, on which ranks sleep."""

    @property
    def cell(self) -> Cell: ...

    def sleep(self, seen: int) -> None:
        """Sleep while the number is that, until woken, or for a time."""
        ...

    def wake(self) -> None:
        """Wake all that sleep on it."""
        ...


class FutexWords:
    """Words in shared memory, one a line; `address` is that of the memory, `seconds` the longest sleep."""

    def __init__(self, futex: Futex, memory: memoryview, address: int, ranks: int, seconds: float) -> None:
        self.cells = [memory[at : at + LINE].cast("i") for at in range(0, LINE * ranks, LINE)]
        self._futex, self._address, self._timeout = futex, address, futex.timeout(seconds)

    def sleep(self, place: int) -> None:
        self._futex.wait(self._address + LINE * place, 1, self._timeout)

    def wake(self, place: int) -> None:
        self._futex.wake(self._address + LINE * place)


class FutexCount:
    """A number in shared memory, in a line that begins at `address`; `seconds` is the longest sleep."""

    def __init__(self, futex: Futex, line: memoryview, address: int, seconds: float) -> None:
        self.cell = line.cast("q")
        self._futex, self._address, self._timeout = futex, address, futex.timeout(seconds)

    def sleep(self, seen: int) -> None:
        self._futex.wait(self._address, seen & _LOW, self._timeout)

    def wake(self) -> None:
        self._futex.wake(self._address)


class ShortSpin:
    """A time for which the ranks of a host leave the cores to others, doubled each time that one of them begins it again soon.

    `until`: its end, in memory that they share.
    """

    def __init__(self, until: memoryview[float]) -> None:
        self._until = until
        self._seconds, self._quiet = SHORTEST_CAUTION, 0.0

    def begin(self, now: float) -> None:
        """Begins it for all."""
        self._seconds = min(2 * self._seconds, LONGEST_CAUTION) if now < self._quiet else SHORTEST_CAUTION
        self._quiet = now + 2 * self._seconds
        self._until[0] = max(self._until[0], now + self._seconds)

    def lasts(self, now: float) -> bool:
        """Whether any of them has begun it."""
        return now < self._until[0]


class SpinTime:
    """Measures how long the thread that made it spins, for a rank with a core of its own; OSError where Linux does not count times
    without a core.
    """

    def __init__(self, caution: ShortSpin) -> None:
        self._short = caution
        self._file = os.open(_COUNTS, os.O_RDONLY | os.O_CLOEXEC)
        self._looked, self._waited = perf_counter(), self._without_core()

    def at(self, now: float) -> float:
        """Seconds of a spin that begins now."""
        if now - self._looked >= _WINDOW:
            waited = self._without_core()
            if waited - self._waited > _SHARE * (now - self._looked):
                self._short.begin(now)
            self._looked, self._waited = now, waited
        return SHORTEST_SPIN if self._short.lasts(now) else LONGEST_SPIN

    def close(self) -> None:
        """Gives the file back."""
        os.close(self._file)

    def _without_core(self) -> float:
        """Seconds for which this thread has wanted a core and had none."""
        return int(os.pread(self._file, 64, 0).split()[1]) * 1e-9


class YieldTurns:
    """How a rank that shares its core lets others run before it sleeps: of these it waits for most, and they need not wake it then.

    A process of another job that wants the core gets it, too, and keeps it for long. After such a turn the ranks sleep at once for a time.
    """

    def __init__(self, caution: ShortSpin, give_up_core: Callable[[], object] = os.sched_yield) -> None:
        self._none, self._give_up_core = caution, give_up_core

    def is_ready_after(self, ready: Callable[[], bool]) -> bool:
        """Whether it is ready after a turn of the others, if there was one."""
        begun = perf_counter()
        if self._none.lasts(begun):
            return False
        self._give_up_core()
        now = perf_counter()
        if now - begun > _LONG_TURN:
            self._none.begin(now)
        return ready()


class RankWait:
    """The place of one rank among those of its host. `spin`: how long it spins; `turns`: those of a rank that shares its core.

    A rank that has neither sleeps at once.
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
        """On what this rank sleeps if that is not its word."""

    def wake(self, places: Sequence[int], count: Count | None = None) -> None:
        """Wakes the ranks of these places that sleep, of those on a number all that sleep on `count`.

        After a `fence`, behind the change that they may wait for.
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
        """From another thread: this rank looks again at what it waits for, and for failures."""
        new_fence()()  # one of its own, since two threads cannot use one
        self.wake([self._place], self._count)

    def word(self, place: int) -> Cell:
        """The two words of a rank, which `wake` looks at: both are 0 while it does not sleep."""
        return self._words.cells[place]

    def spins(self, ready: Callable[[], bool], count: Count | None = None) -> bool:
        """Whether it was ready within the spin, or after a turn of others; without these, `wait` looks itself.

        `count` as there: what is asked of it takes no call, and without it no turn is given.
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
        """Returns when `ready`, which was not so within the spin; `look` raises where a rank has failed, and ends the wait.

        `count`: the number whose growth alone can make it ready.
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
