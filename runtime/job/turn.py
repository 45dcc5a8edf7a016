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

Ctrl-C may come between any two steps of a thread, also at the first one of what would give a turn back. So no turn has to be given back:
a call has it for as long as its frame is on its thread's stack, and giving it back early is one assignment that spares others the look.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR, CO_ITERABLE_COROUTINE
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ..errors import RankError, UsageError
from ..garbage_collection import uncollected

Given = ParamSpec("Given")
Result = TypeVar("Result")

TRAINER, PROGRAM = 1, 2
"""Levels: a call of a trainer makes calls of programs, no call makes one of its own level."""
_LOOK = 0.05
"""Seconds after which who waits looks again: a call may have gone without a word."""
_LOOKS = 1000
"""Looks that end at a generator after which it is where its thread has begun."""
_SUSPENDED = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR | CO_ITERABLE_COROUTINE
"""Code whose frames leave their thread's stack before they have returned."""
_users_code = threading.local()


def enters_users_code(by: int) -> None:
    """Counts the blocks of code of the user's that this thread is in, which partc calls."""
    _users_code.depth = getattr(_users_code, "depth", 0) + by


@dataclass(eq=False, slots=True)
class _Call:
    """A call that has the turn: its thread, level, name and frame, the call that it is made in, and whose code it runs meanwhile."""

    thread: int
    level: int
    doing: str
    frame: FrameType
    within: _Call | None
    lent: str = ""

    def goes_on(self) -> bool:
        """Whether its frame is on its thread's stack.

        That thread runs on meanwhile. A frame that has returned still has the one that called it, so the look passes by all that are below;
        a generator's that has been suspended has none, so a look that ends there has seen nothing, and is repeated.
        """
        for _ in range(_LOOKS):
            frame = sys._getframe() if self.thread == threading.get_ident() else _stack_of(self.thread)
            last = None
            while frame is not None and frame is not self.frame:
                last, frame = frame, frame.f_back
            if frame is not None or last is None or not last.f_code.co_flags & _SUSPENDED:
                return frame is not None
        return False


def _stack_of(thread: int) -> FrameType | None:
    """The innermost frame of another thread; None where it has ended.

    Meanwhile cycles stay: a collection inside of `sys._current_frames` may let another thread run while the interpreter's list of
    threads is locked, and both wait for ever (CPython's gh-106883, in 3.11.9, 3.12.3 and before).
    """
    with uncollected():
        return sys._current_frames().get(thread)


class _Owner:
    """Which call has the turn of what shares a state. The lock is taken for moments alone, by `with`, which no Ctrl-C comes between."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.call: _Call | None = None
        self.freed: SimpleQueue[None] = SimpleQueue()
        """Has an item when the turn was given back: one of those that wait looks at once."""

    def now(self) -> _Call | None:
        """The innermost call that has the turn and goes on."""
        call = self.call
        while call is not None and not call.goes_on():
            call = call.within
        return call


class Turn:
    """The turns of one program or trainer. `waits`: whether calls of other threads wait for the one under way.

    `admits`: which threads, by their identifiers, may make calls at all.
    """

    def __init__(self, waits: bool, admits: Callable[[int], bool] | None = None, held: _Owner | None = None) -> None:
        self.waits = waits
        self.ended: str | None = None
        """Why no call is taken any more."""
        self.working: Collection[int] = ()
        """Threads that work for a call, and so cannot wait for it to end."""
        self._admits = admits
        self._process = os.getpid()
        self._held = held or _Owner()

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
        return self._held.now() is not None

    def has(self, thread: int) -> bool:
        """Whether a thread has the turn."""
        call = self._held.call
        return call is not None and call.thread == thread

    def taken(self, level: int, what: str, ending: bool = False, local: bool = False) -> AbstractContextManager[None]:
        """The turn, for a call named `what`; UsageError where it may not be made, RankError after the end.

        The block must be all that its function does: the turn lasts as long as the function's frame at most. `ending`: it ends all calls,
        and waits in any case. `local`: it takes one rank alone.
        """
        return _Taken(self, level, what, ending, local)

    def take(self, frame: FrameType, level: int, what: str, ending: bool, local: bool) -> _Call:
        """Gives the turn to the call of a frame, as `taken` says."""
        me, held = threading.get_ident(), self._held
        if self.forked:
            fact = f"{what} in process {os.getpid()}, a fork of process {self._process}, which has loaded the program"
            raise UsageError(f"{fact}\n  a fork has none of its threads and connections\n  help: load it in the fork")
        if self.has(me) and (outer := held.now()) is not None:
            if outer.lent or level <= outer.level:
                raise _inside(what, outer)
            self._refuse_ended(ending)
            held.call = inner = _Call(me, level, outer.doing, frame, outer)
            return inner
        if me in self.working:
            raise _inside(what, held.call)
        if not local and self._admits is not None and not self._admits(me):
            fact = f"{what} of one rank of a program whose ranks are threads"
            raise UsageError(
                f"{fact}\n  every rank takes part in a call\n  help: call the program that load_local gave"
            )
        call = _Call(me, level, what, frame, None)
        while (other := self._try(call, ending)) is not None:
            self._refuse_waiting(what, ending, other)
            with suppress(Empty):
                held.freed.get(timeout=_LOOK)
        return call

    def give_back(self, call: _Call) -> None:
        """Ends a call before its frame has gone: the one that it was made in has the turn again, or who waits."""
        held = self._held
        held.call = call.within
        if call.within is None and held.freed.empty():
            held.freed.put(None)

    @contextmanager
    def lent(self, to: str) -> Iterator[None]:
        """A block in which code of the user's runs inside a call."""
        call = self._held.call
        assert call is not None, "only a call lends its turn"
        call.lent = to
        try:
            yield
        finally:
            call.lent = ""

    def _refuse_ended(self, ending: bool) -> None:
        if self.ended is not None and not ending:
            raise RankError(f"the program has stopped: {self.ended}")

    def _try(self, call: _Call, ending: bool) -> _Call | None:
        """The call that has the turn; None where that is the given one from now on."""
        with self._held.lock:
            other = self._held.now()
            if other is None:
                self._refuse_ended(ending)
                self._held.call = call
            return other

    def _refuse_waiting(self, what: str, ending: bool, other: _Call) -> None:
        if not (self.waits or ending):
            fact = f"{what} while another thread is in {other.doing}"
            law = "the ranks of a job make the same calls in one order, which threads of a rank do not have"
            raise UsageError(f"{fact}\n  {law}\n  help: make all calls from one thread, or take a lock around each")
        if getattr(_users_code, "depth", 0) and other.lent:
            raise _inside(what, other)  # the call under way may wait for what this thread makes


def _inside(what: str, call: _Call | None) -> UsageError:
    by = f", by {call.lent}" if call is not None and call.lent else ""
    fact = f"{what} inside of {'a call' if call is None else call.doing} of the same program{by}"
    return UsageError(f"{fact}\n  one call is under way at a time\n  help: make it when that one has returned")


class Taking(Protocol):
    """What has a turn."""

    @property
    def turn(self) -> Turn: ...


class _Taken:
    """The block of a call. It is entered in each step, twice, and so no generator."""

    __slots__ = ("call", "of", "turn")

    def __init__(self, turn: Turn, *of: Any) -> None:
        self.turn, self.of = turn, of

    def __enter__(self) -> None:
        self.call = self.turn.take(sys._getframe(1), *self.of)

    def __exit__(self, *error: object) -> None:
        self.turn.give_back(self.call)


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
