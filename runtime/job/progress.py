"""Keeps messages in transit moving while a rank computes: MPI transfers a message of more than a few KB only during calls of MPI.

    run = progress.during(session_run)      # created once
    run()                                   # in each step

During a call that took a millisecond or more last time, a thread calls MPI every millisecond, which is possible since onnxruntime releases
Python's lock. After a shorter call there is one test, unless the last one was a moment ago. Only one thread is inside MPI at a time: the
accompanying thread holds a lock during each test, and the end of the call waits for that lock. If MPI was not initialized for several
threads, there are only the tests between calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import TypeAlias

Action: TypeAlias = Callable[[], object]

LONG = 1e-3
"""Seconds of a call from which the thread accompanies it, and between two tests of the thread."""
_SHORT, _UNSEEN = 1e-4, 15
"""Seconds of a call below which the next 15 calls are neither timed nor followed by a test."""
_OFTEN = 5e-4
"""The least seconds between two tests after short calls."""


class Progress:
    """Keeps messages in transit moving. `test` is a call of MPI that does not wait; `threads`: whether another thread may make it."""

    def __init__(self, test: Action, threads: bool) -> None:
        self.tests = 0
        """The number of tests that the accompanying thread has made."""
        self._test = test
        self._threads = threads
        self._tested = 0.0
        self._computing = Event()
        self._inside = Lock()
        self._thread: Thread | None = None
        self._closed = False

    def during(self, action: Action) -> Action:
        """Returns a function that runs `action`, with tests of MPI during or after it."""
        clock, took, unseen = time.perf_counter, LONG, 0

        def run() -> None:
            nonlocal took, unseen
            if unseen:
                unseen -= 1
                action()
                return
            begun = clock()
            if took < LONG or not self._threads:
                action()
            else:
                self._accompanied(action)
            ended = clock()
            took = ended - begun
            unseen = _UNSEEN if took < _SHORT else 0
            if ended - self._tested > _OFTEN:
                self._test()
                self._tested = ended

        return run

    def close(self) -> None:
        """Ends the accompanying thread."""
        self._closed = True
        self._computing.set()
        if self._thread is not None:
            self._thread.join()

    def _accompanied(self, action: Action) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._accompany, name="partc progress", daemon=True)
            self._thread.start()
        self._computing.set()
        try:
            action()
        finally:
            self._computing.clear()
            with self._inside:
                pass  # the thread has ended its test, and begins none before the next call

    def _accompany(self) -> None:
        while not self._closed:
            self._computing.wait()
            with self._inside:
                if self._computing.is_set() and not self._closed:
                    self._test()
                    self.tests += 1
            time.sleep(LONG)
