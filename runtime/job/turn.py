"""Allows one call of a program or trainer at a time: a lock with an owner, shared by all programs and trainers over the same state.

If one process has all ranks (`load_local`, a job of one rank), calls of other threads wait. If ranks are processes, such calls are refused:
waiting would order them by chance, and ranks must make the same calls in the same order. Also refused are calls

- inside of another call: by a schedule that computes a rate, by the batches of an evaluation or their transform;
- after the end: `close` waits for the current call, and calls that wait at that time are refused;
- in a fork of the process, whose copy has neither threads nor connections; `close` does nothing there.

    class Trainer:
        @one_call(TRAINER)
        def train(self, batch): ...

Ctrl-C does not leave the lock taken: up to CPython 3.13 no signal is handled between acquiring a lock and entering its `with` block. In
later versions the interrupted thread can continue, because the lock is reentrant.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ..errors import RankError, UsageError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

TRAINER, PROGRAM = 1, 2
"""The levels of calls: a call of a trainer makes calls of programs, and no call makes another one of its own level."""
_user_code = threading.local()


def count_user_code(by: int) -> None:
    """Adds `by` to the number of blocks of the user's code, called by partc, in which this thread is."""
    _user_code.depth = getattr(_user_code, "depth", 0) + by


@dataclass(eq=False)
class _Call:
    """A current call: its thread, level and name, and the user's code that it runs at the moment."""

    thread: int
    level: int
    name: str
    user_code: str = ""


@dataclass(eq=False)
class _Shared:
    """The lock of a state, the innermost call that has it, and the number of outermost calls so far."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    call: _Call | None = None
    calls: int = 0


class CallGuard:
    """Guards the calls of one program or trainer. `waits`: whether calls of other threads wait for the current one.

    `admits`: whether the thread with a given identifier may make calls at all.
    """

    def __init__(self, waits: bool, admits: Callable[[int], bool] | None = None, state: _Shared | None = None) -> None:
        self.waits, self._admits = waits, admits
        self.ended: str | None = None
        """The reason why calls are refused for good."""
        self.working: Collection[int] = ()
        """Identifiers of threads that work for a call, and so cannot wait for it to end."""
        self._process = os.getpid()
        self.state = state or _Shared()

    def shared(self) -> CallGuard:
        """Returns the guard of another program over the same state; it can end separately."""
        return CallGuard(self.waits, self._admits, self.state)

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the process that has loaded the program."""
        return os.getpid() != self._process

    @property
    def over(self) -> bool:
        """Whether there is nothing to close: the program was closed, or belongs to another process."""
        return self.forked or self.ended is not None

    @property
    def busy(self) -> bool:
        """Whether there is a current call."""
        return self.state.call is not None

    def has(self, thread: int) -> bool:
        """Whether the current call was made by this thread."""
        call = self.state.call
        return call is not None and call.thread == thread

    @contextmanager
    def running(self, user_code: str) -> Iterator[None]:
        """A block in which the current call runs the user's code; `user_code` describes that code."""
        call = self.state.call
        assert call is not None, "only a call runs the user's code"
        call.user_code = user_code
        try:
            yield
        finally:
            call.user_code = ""

    def refuse(self, call: _Call, local: bool, ending: bool) -> None:
        """Raises UsageError for a call that may not be made or cannot wait for its turn."""
        other = self.state.call
        if self.forked:
            fact = (
                f"{call.name} in process {os.getpid()}, a fork of process {self._process}, which has loaded the program"
            )
            raise UsageError(f"{fact}\n  a fork has none of its threads and connections\n  help: load it in the fork")
        if other is not None and other.thread == call.thread:
            if other.user_code or call.level <= other.level:
                raise _inside(call, other)
            return
        in_user_code: bool = getattr(_user_code, "depth", 0) > 0
        if call.thread in self.working or (other is not None and other.user_code and in_user_code):
            raise _inside(call, other)  # the call under way may wait for this thread
        if not local and self._admits is not None and not self._admits(call.thread):
            law = "every rank takes part in a call\n  help: call the program that load_local returned"
            raise UsageError(f"{call.name} of one rank of a program whose ranks are threads\n  {law}")
        if other is not None and not (self.waits or ending):
            raise _overlapping(call, other.name)

    def refuse_waited(self, call: _Call, calls: int, ending: bool) -> None:
        """Refuses a call that has waited for the lock.

        RankError after the end; UsageError if the call may not wait and another one was made meanwhile.
        """
        if self.ended is not None and not ending:
            raise RankError(f"the program has stopped: {self.ended}")
        if calls != self.state.calls and not (self.waits or ending):
            raise _overlapping(call, "another call")


def _inside(call: _Call, other: _Call | None) -> UsageError:
    by = f", by {other.user_code}" if other is not None and other.user_code else ""
    fact = f"{call.name} inside of {'a call' if other is None else other.name} of the same program{by}"
    return UsageError(f"{fact}\n  one call is under way at a time\n  help: make it when that one has returned")


def _overlapping(call: _Call, other: str) -> UsageError:
    fact = f"{call.name} while another thread is in {other}"
    law = "the ranks of a job make the same calls in one order, which threads of a rank do not have"
    return UsageError(f"{fact}\n  {law}\n  help: make all calls from one thread, or take a lock around each")


class HasTurn(Protocol):
    """An object whose calls are guarded by its `turn`."""

    @property
    def turn(self) -> CallGuard: ...


Owner = TypeVar("Owner", bound=HasTurn)
Method = Callable[Concatenate[Owner, Arguments], Result]


def one_call(
    level: int, name: str = "", local: bool = False, ending: bool = False
) -> Callable[[Method[Owner, Arguments, Result]], Method[Owner, Arguments, Result]]:
    """Decorates a method as one guarded call. `local`: it concerns one rank alone; `ending`: it is the last call, and may always wait."""

    def decorated(method: Method[Owner, Arguments, Result]) -> Method[Owner, Arguments, Result]:
        @wraps(method)
        def call(self: Owner, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
            turn = self.turn
            state, calls = turn.state, turn.state.calls
            inner = _Call(threading.get_ident(), level, name or f"{method.__name__}()")
            turn.refuse(inner, local, ending)
            with state.lock:
                turn.refuse_waited(inner, calls, ending)
                outer, state.call = state.call, inner
                state.calls += outer is None
                try:
                    return method(self, *arguments, **named)
                finally:
                    state.call = outer

        return call

    return decorated
