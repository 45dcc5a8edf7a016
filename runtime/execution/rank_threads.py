"""Ranks as threads of one process, which never keep it: whatever ends one of them ends the waits of the others, and Ctrl-C ends all.

    threads = RankThreads(world)
    results = threads.run([partial(work, rank) for rank in range(world.size)])

The threads are daemons: one that hangs in code of the user's, or in a long computation, is left behind at the end of the process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar, cast

from ..communication.in_process import LocalWorld
from ..communication.leaving import said
from ..errors import PartcError, RankError

Result = TypeVar("Result")

_NAME = "partc rank"
_PATIENCE = 1.0
_Job: TypeAlias = "tuple[Callable[[], Any], Future[Any]]"


class RankThreads:
    """A thread for each rank of a world, which runs one job after the other."""

    def __init__(self, world: LocalWorld) -> None:
        self.world = world
        self._queues: list[SimpleQueue[_Job | None]] = [SimpleQueue() for _ in range(world.size)]
        self._futures: list[Future[Any]] = []
        self.identifiers: set[int] = set()
        """Of the threads."""
        for rank, queue in enumerate(self._queues):
            thread = threading.Thread(target=_work, args=(queue,), name=f"{_NAME} {rank}", daemon=True)
            thread.start()
            self.identifiers.add(cast(int, thread.ident))
        # Who loads anew without closing, as in a cell of a notebook that runs twice, leaves no threads behind.
        self._end = weakref.finalize(self, _end, self._queues)

    @property
    def idle(self) -> bool:
        """Whether no rank runs a job."""
        return all(future.done() for future in self._futures)

    def await_idle(self) -> None:
        """Returns when no rank runs a job; those that have not begun will not."""
        wait([future for future in self._futures if not future.cancel()])

    def run(self, jobs: Sequence[Callable[[], Result]], patience: float | None = None) -> list[Result]:
        """What each rank's job returns; else the failure that is not another one's consequence.

        `patience`: seconds that the others have to end after the first failure; None: as long as they need.
        """
        futures: list[Future[Result]] = [Future() for _ in jobs]
        try:
            self._futures = futures
            for rank, job in enumerate(jobs):
                self._queues[rank].put((self._of_rank(rank, job), futures[rank]))
            wait(futures, return_when=FIRST_EXCEPTION)
            wait(futures, patience)
        except BaseException as error:
            self.world.fail(f"the job was ended: {type(error).__name__}")
            # A rank that has not begun will not: an interrupt may come between two of them.
            self._futures = begun = [future for future in futures if not future.cancel()]
            wait(begun, _PATIENCE)
            raise
        errors = [error for error in (future.exception() for future in futures if future.done()) if error is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, PartcError)), errors[0])
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ends the threads that have nothing to do; the others end with the process."""
        self._end()

    def _of_rank(self, rank: int, job: Callable[[], Result]) -> Callable[[], Result]:
        """The job, with word to the others of how it ended."""

        def told() -> Result:
            try:
                return job()
            except Exception as error:
                self.world.finish(rank, said(rank, error))
                raise
            except BaseException as error:
                # In a thread sys.exit ends nothing: it is a failure like any other.
                text = said(rank, error)
                self.world.fail(text)
                raise RankError(text) from error
            finally:
                self.world.finish(rank)

        return told


def left_behind() -> bool:
    """Whether a rank's thread runs on, so that the process cannot end in order."""
    return any(thread.name.startswith(_NAME) for thread in threading.enumerate())


def _end(queues: Sequence[SimpleQueue[_Job | None]]) -> None:
    for queue in queues:
        queue.put(None)


def _work(queue: SimpleQueue[_Job | None]) -> None:
    while (given := queue.get()) is not None:
        job, future = given
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
        del given, job, future
