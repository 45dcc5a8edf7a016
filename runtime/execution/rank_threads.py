"""Runs ranks as threads of one process that can always end: a rank that ends also ends the waits of the others, and Ctrl-C ends all.

    threads = RankThreads(world)
    results = threads.run([partial(work, rank) for rank in range(world.size)])

The threads are daemons: the end of the process abandons a thread that hangs in the user's code or in a long computation.

Ctrl-C may interrupt the waiting thread between any two instructions, also between taking a lock and entering the block that releases it. So
that thread takes no lock that a rank's thread takes; it only puts into queues, reads flags, and pops from lists, each of which is atomic.
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
"""Seconds after which flags are read again: a notification that came just before Ctrl-C may be lost."""


@dataclass(eq=False)
class _Round:
    """One job for each rank, run together; the last job to end calls `after`, if none has failed."""

    left: list[int]
    after: Callable[[], None]
    ended: SimpleQueue[None] = field(default_factory=SimpleQueue)
    failed: bool = False

    def end(self) -> None:
        """Notes the end of one job."""
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
        """Whether the caller is the first to claim the job: the rank's thread to run it, or the waiting thread to cancel it."""
        try:
            return self.free.pop()
        except IndexError:
            return False

    def run(self) -> None:
        """Runs the job, unless it was cancelled."""
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
    """A thread for each rank of a world; each thread runs its jobs one after another."""

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
        # A program that is dropped without `close`, as by a notebook cell that runs twice, leaves no threads.
        self._end = weakref.finalize(self, _end, self._queues)

    @property
    def idle(self) -> bool:
        """Whether no rank runs a job."""
        return all(job.done for job in self._jobs)

    def await_idle(self) -> None:
        """Cancels the jobs that have not begun, and returns when no rank runs a job."""
        for job in self._jobs:
            _give_up(job)
        _wait(self._jobs, lambda: self.idle)

    def run(
        self,
        jobs: Sequence[Callable[[], Result]],
        patience: float | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> list[Result]:
        """Returns the results of all ranks' jobs, or raises the failure that caused the others.

        `patience`: the seconds in which the other jobs must end after the first failure; None: no limit. `after`: called by the last job to
        end, if all have succeeded.
        """
        of_all = _Round([*range(len(jobs))], after)
        of_ranks = [_Job(self._of_rank(rank, job), of_all) for rank, job in enumerate(jobs)]
        try:
            self._jobs = of_ranks
            for queue, rank_job in zip(self._queues, of_ranks, strict=True):
                queue.put(rank_job)
            _wait(of_ranks, lambda: of_all.failed or all(one.done for one in of_ranks))
            _wait(of_ranks, lambda: all(one.done for one in of_ranks), patience)
        except BaseException as error:
            threading.Thread(target=self.world.fail, args=(f"the job was ended: {type(error).__name__}",)).start()
            for rank_job in of_ranks:
                _give_up(
                    rank_job
                )  # cancels jobs that have not begun: an interrupt may come between the starts of two jobs
            _wait(of_ranks, lambda: all(one.done for one in of_ranks), _PATIENCE)
            raise
        errors = [one.error for one in of_ranks if one.done and one.error is not None]
        if errors:
            own = [error for error in errors if not isinstance(error, RankError)]
            raise next((error for error in own if not isinstance(error, PartcError)), (own or errors)[0])
        return [one.result for one in of_ranks]

    def close(self) -> None:
        """Ends the threads that have no job; the others end with the process."""
        self._end()

    def _of_rank(self, rank: int, job: Callable[[], Result]) -> Callable[[], Result]:
        """Returns a job that also informs the other ranks when it ends or fails."""

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
    """Whether a rank's thread still runs, so that the process cannot end in order."""
    return any(thread.name.startswith(_NAME) for thread in threading.enumerate())


def _end(queues: Sequence[SimpleQueue[_Job | None]]) -> None:
    for queue in queues:
        queue.put(None)


def _work(queue: SimpleQueue[_Job | None]) -> None:
    while (job := queue.get()) is not None:
        job.run()
        del job


def _give_up(job: _Job) -> None:
    """Cancels a job, unless it has begun."""
    if job.taken():
        job.round.failed = True
        job.end()


def _wait(jobs: Sequence[_Job], ready: Callable[[], bool], patience: float | None = None) -> None:
    """Returns when `ready()` is true, or after `patience` seconds."""
    end = None if patience is None else time.monotonic() + patience
    while jobs and not ready():
        left = _LOOK if end is None else min(_LOOK, end - time.monotonic())
        if left <= 0:
            return
        with contextlib.suppress(Empty):
            jobs[0].round.ended.get(timeout=left)
