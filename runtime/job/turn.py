"""Calls of a program, a trainer, and all that shares their state, take turns: the law of threads, callbacks, forks and the end.

One call is under way at a time. A call of another thread waits for it where one process has all ranks (`load_local`, a job of one rank).
Among ranks that are processes it is refused, for there a wait would put calls in an order that other ranks do not know, and one rank's
call would meet another one's. Refused, too, is a call

- from inside a call: by a schedule that partc asks for a rate, by the batches of an evaluation or their transform;
- after the end: `close` waits for the call under way, and those that wait then are refused;
- in a fork of the process, whose copy has neither threads nor connections; `close` does nothing there.

    turn = Turn(waits=True)
    with turn.taken(STEP, "a step"):
        ...
        with turn.lent("the schedule"):     # code of the user's runs, within which no call can be made
            rate(step)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ..errors import RankError, UsageError

Given = ParamSpec("Given")
Result = TypeVar("Result")

TRAINER, PROGRAM = 1, 2
"""Levels: a call of a trainer makes calls of programs, no call makes one of its own level."""
_SHORT = 0.05
_users_code = threading.local()


def enters_users_code(by: int) -> None:
    """Counts the blocks of code of the user's that this thread is in, which partc calls."""
    _users_code.depth = getattr(_users_code, "depth", 0) + by


class _Held:
    """Who has the turn of what shares a state: the thread, the level and the name of its call, and whose code it runs meanwhile."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.owner = self.level = 0
        self.doing = self.lent = ""


class Turn:
    """The turns of one program or trainer. `waits`: whether calls of other threads wait for the one under way.

    `admits`: which threads, by their identifiers, may make calls at all.
    """

    def __init__(self, waits: bool, admits: Callable[[int], bool] | None = None, held: _Held | None = None) -> None:
        self.waits = waits
        self.ended: str | None = None
        """Why no call is taken any more."""
        self.working: Collection[int] = ()
        """Threads that work for a call, and so cannot wait for it to end."""
        self._admits = admits
        self._process = os.getpid()
        self._held = held or _Held()

    def shared(self) -> Turn:
        """The turn of something else over the same state, which ends by itself."""
        return Turn(self.waits, self._admits, self._held)

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that has loaded."""
        return os.getpid() != self._process

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._held.owner != 0

    def has(self, thread: int) -> bool:
        """Whether a thread has the turn."""
        return self._held.owner == thread

    def taken(self, level: int, what: str, ending: bool = False, local: bool = False) -> AbstractContextManager[None]:
        """The turn, for a call named `what`; UsageError where it may not be made, RankError after the end.

        `ending`: it ends all calls, and waits in any case. `local`: it takes one rank alone.
        """
        return _Taken(self, level, what, ending, local)

    def take(self, level: int, what: str, ending: bool, local: bool) -> None:
        """Takes the turn, as `taken` says; the caller leaves it, whatever this raises."""
        me, held = threading.get_ident(), self._held
        if self.forked:
            fact = f"{what} in process {os.getpid()}, a fork of process {self._process}, which has loaded the program"
            raise UsageError(f"{fact}\n  a fork has none of its threads and connections\n  help: load it in the fork")
        if held.owner == me:
            if held.lent or level <= held.level:
                raise self._inside(what)
            self._refuse_ended(ending)
            held.level = level
            return
        if me in self.working:
            raise self._inside(what)
        if not local and self._admits is not None and not self._admits(me):
            fact = f"{what} of one rank of a program whose ranks are threads"
            raise UsageError(
                f"{fact}\n  every rank takes part in a call\n  help: call the program that load_local gave"
            )
        with held.changed:
            self._await(what, ending)
            self._refuse_ended(ending)
            held.owner, held.level, held.doing = me, level, what

    @property
    def level(self) -> int | None:
        """The level of the call that this thread is in; None where it is in none."""
        return self._held.level if self._held.owner == threading.get_ident() else None

    def leave(self, level: int | None) -> None:
        """Goes back to the call of a level that this thread was in; where it was in none, tells the next thread."""
        me, held = threading.get_ident(), self._held
        if level is not None:
            held.level = level
            return
        with held.changed:
            if held.owner == me:
                held.owner, held.doing, held.lent = 0, "", ""
            if not held.owner:
                held.changed.notify()  # also where this one was refused after its wait: the next one has not been told

    @contextmanager
    def lent(self, to: str) -> Iterator[None]:
        """A block in which code of the user's runs inside a call."""
        self._held.lent = to
        try:
            yield
        finally:
            self._held.lent = ""

    def _refuse_ended(self, ending: bool) -> None:
        if self.ended is not None and not ending:
            raise RankError(f"the program has stopped: {self.ended}")

    def _await(self, what: str, ending: bool) -> None:
        held = self._held
        while held.owner:
            if not (self.waits or ending):
                fact = f"{what} while another thread is in {held.doing}"
                law = "the ranks of a job make the same calls in one order, which threads of a rank do not have"
                raise UsageError(f"{fact}\n  {law}\n  help: make all calls from one thread, or take a lock around each")
            if not getattr(_users_code, "depth", 0):
                held.changed.wait()
            elif held.lent:
                raise self._inside(what)  # the call under way may wait for what this thread makes
            else:
                held.changed.wait(_SHORT)

    def _inside(self, what: str) -> UsageError:
        by = f", by {self._held.lent}" if self._held.lent else ""
        fact = f"{what} inside of {self._held.doing or 'a call'} of the same program{by}"
        return UsageError(f"{fact}\n  one call is under way at a time\n  help: make it when that one has returned")


class Taking(Protocol):
    """What has a turn."""

    @property
    def turn(self) -> Turn: ...


class _Taken:
    """The block of a call. It is entered in each step, twice, and so no generator."""

    __slots__ = ("before", "of", "turn")

    def __init__(self, turn: Turn, *of: Any) -> None:
        self.turn, self.of = turn, of
        self.before: int | None = None

    def __enter__(self) -> None:
        self.before = self.turn.level
        try:  # Ctrl-C may come anywhere, and must not leave the turn with a call that has gone
            self.turn.take(*self.of)
        except BaseException:
            self.turn.leave(self.before)
            raise

    def __exit__(self, *error: object) -> None:
        self.turn.leave(self.before)


Self = TypeVar("Self", bound=Taking)


def one_at_a_time(
    level: int, local: bool = False
) -> Callable[[Callable[Concatenate[Self, Given], Result]], Callable[Concatenate[Self, Given], Result]]:
    """A method that takes the turn for as long as it lasts."""

    def decorated(method: Callable[Concatenate[Self, Given], Result]) -> Callable[Concatenate[Self, Given], Result]:
        what = f"{method.__name__.strip('_')}()"

        @wraps(method)
        def call(self: Self, /, *given: Given.args, **named: Given.kwargs) -> Result:
            with self.turn.taken(level, what, local=local):
                return method(self, *given, **named)

        return call

    return decorated
