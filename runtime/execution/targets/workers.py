"""Runs the lanes of a step at the same time: the first in the calling thread, each other one in a thread of its own.

    workers = Workers(2)
    workers.run(plan, actions, ...)     returns, or raises, when every lane has stopped

Each lane counts its completed actions. An action that must wait for another lane reads that lane's count, and sleeps on one condition for
all lanes until it is large enough. An action that fails stops all lanes: each ends its current action, and begins no other. The error of
another lane is raised in the calling thread, whose waits in communication are interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeAlias

from .dependencies import Waits

Action: TypeAlias = Callable[[], object]


@dataclass(frozen=True)
class LanePlan:
    """The lanes of a step and the waits of its actions.

    `lanes`: for each lane the positions of its actions in the order of the file; `waits`: for each position the lanes that its action waits
    for.
    """

    lanes: Sequence[Sequence[int]]
    waits: Sequence[Waits]
    watched: frozenset[int] = field(init=False)
    """The positions of actions that another lane waits for."""

    def __post_init__(self) -> None:
        watched = {self.lanes[lane][count - 1] for waits in self.waits for lane, count in waits}
        object.__setattr__(self, "watched", frozenset(watched))


class LaneFailed(Exception):
    """An action of another lane has failed; `index` is its step, `cause` its exception."""

    def __init__(self, index: int, cause: Exception) -> None:
        super().__init__(f"step {index} has failed: {cause}")
        self.index, self.cause = index, cause


class _Stopped(Exception):
    """Another lane has failed."""


class Workers:
    """A thread for each lane except the first; the threads live until they are closed."""

    def __init__(self, lanes: int, name: str = "") -> None:
        self._queues: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in range(lanes - 1)]
        for queue in self._queues:
            threading.Thread(target=_work, args=(queue,), name=f"partc target {name}".rstrip(), daemon=True).start()

    def run(
        self,
        plan: LanePlan,
        actions: Sequence[tuple[int, Action]],
        tell: Callable[[int], None],
        waiting: Callable[[Action], None],
        interrupt: Callable[[int, Exception], None],
    ) -> None:
        """Runs all lanes; LaneFailed where a lane other than the first has failed.

        `actions` are those of all lanes, each with its step; `tell` is called with the step before each action of the first lane, and with
        the step that it waits for; `waiting` runs a wait of the first lane; `interrupt` is called once, in the thread of a lane that fails,
        with its step and error.
        """
        run = _Run(plan, actions)
        for lane, queue in enumerate(self._queues, 1):
            queue.put(run.in_thread(lane, interrupt))
        try:
            run.follow(0, tell, waiting)
        except BaseException as error:
            run.stop()
            run.settle()
            if run.failure is not None and not isinstance(error, KeyboardInterrupt):
                raise LaneFailed(*run.failure) from error
            raise

    def close(self) -> None:
        """Ends the threads."""
        for queue in self._queues:
            queue.put(None)


class _Run:
    """The run of the lanes for one step."""

    def __init__(self, plan: LanePlan, actions: Sequence[tuple[int, Action]]) -> None:
        self.plan, self.actions = plan, actions
        self.done = [0] * len(plan.lanes)
        self.running = len(plan.lanes) - 1
        self.stopped = False
        self.failure: tuple[int, Exception] | None = None
        self.changed = threading.Condition()

    def follow(self, lane: int, tell: Callable[[int], None] | None, waiting: Callable[[Action], None] | None) -> None:
        """Runs the actions of a lane."""
        actions, waits, watched, done = self.actions, self.plan.waits, self.plan.watched, self.done
        for count, place in enumerate(self.plan.lanes[lane], 1):
            for other, needed in waits[place]:
                if done[other] < needed:
                    if tell is not None:
                        tell(actions[self.plan.lanes[other][needed - 1]][0])
                    self._await(other, needed, waiting)
            if self.stopped:
                raise _Stopped
            index, action = actions[place]
            if tell is not None:
                tell(index)
            action()
            done[lane] = count
            if place in watched:
                with self.changed:
                    self.changed.notify_all()

    def _await(self, other: int, needed: int, waiting: Callable[[Action], None] | None) -> None:
        def wait() -> None:
            with self.changed:
                while self.done[other] < needed and not self.stopped:
                    self.changed.wait()

        if waiting is None:
            wait()
        else:
            waiting(wait)
        if self.stopped:
            raise _Stopped

    def in_thread(self, lane: int, interrupt: Callable[[int, Exception], None]) -> Callable[[], None]:
        """Returns the function that runs a lane in its thread."""

        def follow() -> None:
            try:
                self.follow(lane, None, None)
            except _Stopped:
                pass
            except BaseException as thrown:
                # In a thread sys.exit ends nothing: it is a failure like any other.
                error = thrown if isinstance(thrown, Exception) else RuntimeError(f"{type(thrown).__name__}: {thrown}")
                place = self.plan.lanes[lane][self.done[lane]]
                with self.changed:
                    first = self.failure is None and not self.stopped
                    if first:
                        self.failure = self.actions[place][0], error
                self.stop()
                if first:
                    interrupt(self.actions[place][0], error)
            finally:
                with self.changed:
                    self.running -= 1
                    self.changed.notify_all()

        return follow

    def stop(self) -> None:
        """Stops all lanes before their next actions."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def settle(self) -> None:
        """Returns when the threads have ended their current actions."""
        with self.changed:
            while self.running:
                self.changed.wait()


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (follow := queue.get()) is not None:
        follow()
        del follow
