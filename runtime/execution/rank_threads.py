"""Ranks as threads of one process, which never keep it: whatever ends one of them ends the waits of the others, and Ctrl-C ends all.

    threads = RankThreads(world)
    results = threads.run([partial(work, rank) for rank in range(world.size)])

The threads are daemons: one that hangs in code of the user's, or in a long computation, is left behind at the end of the process.

Ctrl-C may come between any two steps of the thread that waits, also between the taking of a lock and the block that gives it back. So
that thread takes no lock that a rank's thread takes, but puts into queues, reads flags, and pops from lists, of which each is one step.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from ..communication.in_process import LocalWorld
from ..communication.leaving import leaving_message
from ..errors import PartcError, RankError

Result = TypeVar("Result")

_NAME = "partc rank"
_PATIENCE = 1.0
_LOOK = 0.2
"""Seconds after which flags are looked at again: a word that came just before Ctrl-C may be lost."""


@dataclass(eq=False)
class _Round:
    """Jobs of all ranks that belong together: `after` is done by the last one that ends, if none has failed."""

    left: list[int]
    after: Callable[[], None]
    ended: SimpleQueue[None] = field(default_factory=SimpleQueue)
    failed: bool = False

    def end(self) -> None:
        """One job has ended."""
        if self.left.pop() == 0 and not self.failed:
            self.after()


@dataclass(eq=False)
class _Job:
    """The work of one rank in a round."""

    work: Callable[[], Any]
    round: _Round
    free: list[bool] = field(default_factory=lambda: [True])
    done: bool = False
    result: Any = None
    error: BaseException | None = None

    def taken(self) -> bool:
        """Whether the caller is the first to take it: the rank's thread to run it, or who gives it up."""
        try:
            return self.free.pop()
        except IndexError:
            return False

    def run(self) -> None:
        """Runs it, unless it was given up."""
        if not self.taken():
            return
        try:
            self.result = self.work()
        except BaseException as error:
            self.error, self.round.failed = error, True
        self.end()

    def end(self) -> None:
        try:
            self.round.end()
        except BaseException as error:
            self.error = self.error or error
        self.done = True
        self.round.ended.put(None)


class RankThreads:
    """A thread for each rank of a world, which runs one job after the other."""

    def __init__(self, world: LocalWorld) -> None:
        self.world = world
        self._queues: list[SimpleQueue[_Job | None]] = [SimpleQueue() for _ in range(world.size)]
        self._jobs: list[_Job] = []
        self.identifiers: set[int] = set()
        """The identifiers of the threads."""
        for rank, queue in enumerate(self._queues):
            thread = threading.Thread(target=_work, args=(queue,), name=f"{_NAME} {rank}", daemon=True)
            thread.start()
            self.identifiers.add(cast(int, thread.ident))
        # Who loads anew without closing, as in a cell of a notebook that runs twice, leaves no threads behind.
        self._end = weakref.finalize(self, _end, self._queues)

    @property
    def idle(self) -> bool:
        """Whether no rank runs a job."""
        return all(job.done for job in self._jobs)

    def await_idle(self) -> None:
        """Returns when no rank runs a job; those that have not begun will not."""
        for job in self._jobs:
            _give_up(job)
        _wait(self._jobs, lambda: self.idle)

    def run(
        self,
        jobs: Sequence[Callable[[], Result]],
        patience: float | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> list[Result]:
        """The results of all ranks' jobs; else the failure that is not another one's consequence.

        `patience`: seconds that the others have to end after the first failure; None: as long as they need. `after`: what the last one does
        when all have ended well.
        """
        of_all = _Round([*range(len(jobs))], after)
        given = [_Job(self._of_rank(rank, job), of_all) for rank, job in enumerate(jobs)]
        try:
            self._jobs = given
            for queue, one in zip(self._queues, given, strict=True):
                queue.put(one)
            _wait(given, lambda: of_all.failed or all(one.done for one in given))
            _wait(given, lambda: all(one.done for one in given), patience)
        except BaseException as error:
            threading.Thread(target=self.world.fail, args=(f"the job was ended: {type(error).__name__}",)).start()
            for one in given:
                _give_up(one)  # a rank that has not begun will not: an interrupt may come between two of them
            _wait(given, lambda: all(one.done for one in given), _PATIENCE)
            raise
        errors = [one.error for one in given if one.done and one.error is not None]
        if errors:
            own = [error for error in errors if not isinstance(error, RankError)]
            raise next((error for error in own if not isinstance(error, PartcError)), (own or errors)[0])
        return [one.result for one in given]

    def close(self) -> None:
        """Ends the threads that have nothing to do; the others end with the process."""
        self._end()

    def _of_rank(self, rank: int, job: Callable[[], Result]) -> Callable[[], Result]:
        """The job, with word to the others of how it ended."""

        def reported() -> Result:
            try:
                return job()
            except Exception as error:
                self.world.finish(rank, leaving_message(rank, error))
                raise
            except BaseException as error:
                # In a thread sys.exit ends nothing: it is a failure like any other.
                text = leaving_message(rank, error)
                self.world.fail(text)
                raise RankError(text) from error
            finally:
                self.world.finish(rank)

        return reported


def is_rank_running() -> bool:
    """Whether a rank's thread runs on, so that the process cannot end in order."""
    return any(thread.name.startswith(_NAME) for thread in threading.enumerate())


def _end(queues: Sequence[SimpleQueue[_Job | None]]) -> None:
    for queue in queues:
        queue.put(None)


def _work(queue: SimpleQueue[_Job | None]) -> None:
    while (job := queue.get()) is not None:
        job.run()
        del job


def _give_up(job: _Job) -> None:
    """A job that has not begun will not."""
    if job.taken():
        job.round.failed = True
        job.end()


def _wait(jobs: Sequence[_Job], ready: Callable[[], bool], patience: float | None = None) -> None:
    """Returns when `ready`, or after so many seconds."""
    end = None if patience is None else time.monotonic() + patience
    while jobs and not ready():
        left = _LOOK if end is None else min(_LOOK, end - time.monotonic())
        if left <= 0:
            return
        with contextlib.suppress(Empty):
            jobs[0].round.ended.get(timeout=left)
