"""Messages under way go on while a rank computes: MPI moves a message of more than a few KB only while it is called.

    run = progress.during(session_run)      # made once
    run()                                   # in each step

A call that took a millisecond or more last time is accompanied by a thread that calls MPI every millisecond, which it can since onnxruntime
gives up Python's lock. Shorter calls are followed by one test, unless the last one was a moment ago. One thread at a time is inside MPI:
the accompanying one holds a lock during each test, and the end of the call takes it. Where MPI was not begun for several threads, there
are only the tests in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import TypeAlias

Action: TypeAlias = Callable[[], object]

LONG = 1e-3
"""Seconds from which a call is accompanied, and between two tests."""
_SHORT, _UNSEEN = 1e-4, 15
"""Seconds below which a call is left alone, but for each 16th."""
_OFTEN = 5e-4
"""Seconds between the tests after short calls."""


class Progress:
    """Lets messages under way go on. `test` is a call of MPI that does not wait; `threads`: whether another thread may make it."""

    def __init__(self, test: Action, threads: bool) -> None:
        self.tests = 0
        """The number of tests that the thread has made."""
        self._test = test
        self._threads = threads
        self._tested = 0.0
        self._computing = Event()
        self._inside = Lock()
        self._thread: Thread | None = None
        self._closed = False

    def during(self, action: Action) -> Action:
        """The action, while and after which messages go on."""
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
        """Ends the thread."""
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
