"""Ends a command on a signal: from the process's first line on, with a sentence and an exit code in place of the system's default.

A handler raises `Stopped` in the main thread, so that files and processes are cleaned up on the way out. If the process has not ended
`_PATIENCE` seconds later (the main thread is in a library call, or the exception was lost), or at a second signal, a thread ends it.
While a compiled module is initialized, a signal is delayed. Parts of a command that end in another way (a training saves first) install
their own handlers while they run; they call `must_end` for a signal that asks for the end, after which the process has the same
time.

    SIGINT, SIGTERM, SIGHUP, SIGUSR1                     128 + the signal's number
    SIGTERM, SIGUSR1, before a training's first step     75: nothing is lost, start it again

This module imports little: it is the first one that the command's process imports.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from types import FrameType

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_ASK_TO_STOP = ("SIGTERM", "SIGUSR1")
"""Signals by which schedulers ask a training to stop."""
_TRACE = "SIGUSR2"
"""The signal that asks a training for a trace; before the first step it is ignored."""
_TRY_AGAIN = 75
_PATIENCE = 10.0
"""The seconds in which a command must clean up."""
_STACK = 1 << 18
_BETWEEN = 0.01
_BEGINS = ("create_module", "exec_module")


class Stopped(KeyboardInterrupt):
    """A signal asks the command to end; `exit_code` and the text are for the command's end."""

    def __init__(self, number: int, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.number, self.exit_code = number, exit_code


class _State:
    """The state of the process, from which the sentence of its end is made."""

    listens = False
    number = 0
    """The signal that was received, or 0."""
    noted = 0
    """The signal for which `must_end` was called, or 0."""
    wake = -1
    """The end of the pipe that is written to; `_watch` reads the other end."""
    resent = 0
    """The number of signals that `_again` has sent again and `_watch` has not read yet."""
    training = False
    """Whether the command is a training that has not begun its steps in this process."""
    step = staticmethod(lambda: 0)
    """Returns the last step of a training in this process."""


def run(command: Callable[[list[str]], int]) -> None:
    """Runs the command of this process, which takes the arguments and returns the exit code, and ends the process."""
    arguments = sys.argv[1:]
    try:
        _open_standard_files()
        listen(arguments)
        code = command(arguments)
        ignore()
    except BaseException as error:  # while modules are imported, or the output of the command ends
        if not isinstance(error, KeyboardInterrupt) and not _state.number:
            raise
        ignore()
        code = _print(of_interrupt(error))
    if "partc.runtime.execution.rank_threads" in sys.modules:
        from partc.runtime.execution.rank_threads import is_rank_running

        if is_rank_running():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    gc.freeze()  # else the interpreter looks through all objects for reference cycles as it ends
    sys.exit(code)


def _open_standard_files() -> None:
    """Opens the null device where standard input or output is closed: else the next opened file would take its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            if number and getattr(sys, name := ("stdout", "stderr")[number - 1]) is None:
                setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def listen(arguments: list[str]) -> None:
    """Installs the handlers, in the main thread. A signal that is ignored at the start (nohup) stays ignored."""
    _state.listens, _state.training = True, arguments[:1] == ["train"]
    sys.unraisablehook = _unraisable
    for number in _numbers(lambda handler: handler is not signal.SIG_IGN):
        signal.signal(number, _note)
    if os.name == "posix":
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        _state.wake = write
        with contextlib.suppress(RuntimeError):  # the system allows no thread
            before = _thread.stack_size(_STACK)
            _thread.start_new_thread(_watch, (read,))
            _thread.stack_size(before)
        os.register_at_fork(after_in_child=restore)


def restore() -> None:
    """Resets the signals that this module still handles to their defaults: this process is a child, or one rank of a job."""
    if not _state.listens:
        return
    _state.listens = False
    signal.set_wakeup_fd(-1)
    for number in _numbers(_is_note):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def ignore() -> None:
    """Ignores the signals from here on: the command is over, and its exit code is known."""
    for number in _numbers(_is_note):
        signal.signal(number, signal.SIG_IGN)


def takes_steps(step: Callable[[], int]) -> None:
    """Records that a training in this process begins its steps: from now on a stop loses work. `step` returns the last step."""
    _state.training, _state.step = False, step


def must_end(number: int) -> None:
    """Makes `_watch` end this process in `_PATIENCE` seconds, for a signal that another module's handler has received."""
    if _state.wake >= 0 and not _state.noted:
        _state.noted = number
        with contextlib.suppress(OSError):
            os.write(_state.wake, b"\0")


def stopped(number: int, step: int = 0, lost: str = "") -> Stopped:
    """Returns the exception that ends the command for a signal.

    Where other processes take the steps, `step` is the last one and `lost` a text of the work that is lost.
    """
    name, step = signal.Signals(number).name, step or _state.step()
    if _state.training and not step:
        code = _TRY_AGAIN if name in _ASK_TO_STOP else 128 + number
        return Stopped(
            number, f"stopped by {name} before the first step: nothing is lost\n  help: start it again", code
        )
    return Stopped(number, f"stopped by {name}" + (f" after step {step}{lost}" if step else ""), 128 + number)


def of_interrupt(error: BaseException) -> Stopped:
    """Returns the exception that ends the command, for an interrupt that no code has caught."""
    return error if isinstance(error, Stopped) else stopped(_state.number or signal.SIGINT)


def refuse_stopped() -> None:
    """Raises the exception of a received signal that a library has swallowed, before other handlers take over the signals."""
    if came := swallowed():
        raise came


def swallowed() -> Stopped | None:
    """Returns the exception of a signal that was received where no exception has arrived; None where no signal was.

    A library has then caught the exception, and its own work is incomplete.
    """
    return stopped(_state.number) if _state.number else None


def _numbers(of: Callable[[object], bool]) -> list[int]:
    """Returns the signals of `_NAMES` on this system whose handler satisfies `of`."""
    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    return [number for number in numbers if of(signal.getsignal(number))]


def _is_note(handler: object) -> bool:
    return handler is _note


def _is_trace(number: int) -> bool:
    return _state.training and signal.Signals(number).name == _TRACE


def _note(number: int, frame: FrameType | None) -> None:
    if _state.number or _is_trace(number):
        return
    if _begins_native_module(frame):
        _thread.start_new_thread(_again, (number, _thread.get_ident()))
        return
    _state.number = number
    raise stopped(number)


def _begins_native_module(frame: FrameType | None) -> bool:
    """Whether a compiled module is being initialized: an exception in Python code that it calls would abort the process."""
    while frame is not None:
        if frame.f_code.co_name in _BEGINS and isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
            return True
        frame = frame.f_back
    return False


def _unraisable(error: sys.UnraisableHookArgs) -> None:
    """Sends a signal again if its exception was raised in a finalizer, and so was lost."""
    if isinstance(error.exc_value, Stopped):
        _thread.start_new_thread(_again, (error.exc_value.number, _thread.get_ident()))
    else:
        sys.__unraisablehook__(error)


def _again(number: int, thread: int) -> None:
    time.sleep(_BETWEEN)
    _state.number, _state.resent = 0, _state.resent + 1
    signal.pthread_kill(thread, number)


def _watch(read: int) -> None:
    """Reads the numbers of received signals, whatever the main thread does, and ends a process that does not end by itself."""
    first, until = 0, 0.0
    while not first or select.select([read], [], [], max(0.0, until - time.monotonic()))[0]:
        for number in os.read(read, 64):
            if number and _state.resent:
                _state.resent -= 1
                continue
            if number and (_is_trace(number) or not (_state.number or _is_note(signal.getsignal(number)))):
                continue
            if first:
                _end_now(first)
            first, until = number or _state.noted, time.monotonic() + _PATIENCE
    _end_now(first)


def _end_now(number: int) -> None:
    # the steps of other processes are not known here
    of_others = Stopped(number, f"stopped by {signal.Signals(number).name}", 128 + number)
    os._exit(_print(of_others if _state.noted else stopped(number)))


def _print(error: Stopped) -> int:
    """Prints the sentence with one system call, where nothing else can be relied on; returns the exit code."""
    with contextlib.suppress(OSError):
        os.write(2, f"{error}\n".encode())
    return error.exit_code


_state = _State()
