"""Calls of a program in one process that something meets at any instant: Ctrl-C, after which the next call is right, or a collection."""

from __future__ import annotations

import dis
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from artifact_text import write
from partc.runtime.job import turn as turns
from partc.runtime.job.turn import PROGRAM, TRAINER, Turn, one_at_a_time
from turns_case import PING_PONG

INTERRUPTED = """
import faulthandler, random, signal, sys, time
import numpy as np
from partc.runtime import load_local
faulthandler.dump_traceback_later(100, exit=True)
x = np.ones((2, 3), np.float32)
chance, told, late = random.Random(int(sys.argv[2])), 0, 0.0
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests may have it ignored
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
with load_local(sys.argv[1]) as program:
    program(x=x)
    for _ in range(int(sys.argv[3])):
        delay = chance.uniform(0.0005, 0.006)
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            begun = time.monotonic()
            while time.monotonic() < begun + 0.5:
                program(x=x)
        except KeyboardInterrupt:
            told += 1
        late = max(late, time.monotonic() - begun - delay)
        assert program(x=x)["y"].tolist() == [[-0.5] * 3] * 2
print(told, round(late, 1))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupts")
    write(folder / "two", PING_PONG)
    return folder


def ended(script: str, *given: object) -> str:
    asked = [sys.executable, "-c", script, *map(str, given)]
    with tempfile.TemporaryFile("w+") as said:  # no pipe, which a fork that hangs would keep open
        done = subprocess.run(asked, stdout=said, stderr=said, timeout=120, check=False)
        said.seek(0)
        text = said.read()
    assert done.returncode == 0, text
    return text


def test_ctrl_c_at_random_instants(built: Path) -> None:
    """30 of them, within the first milliseconds of a row of calls."""
    told, late = ended(INTERRUPTED, built / "two", 1, 30).split()
    assert int(told) == 30
    assert float(late) < 10


class Nested:
    """A call that makes a call, as a trainer's step makes one of its program."""

    def __init__(self) -> None:
        self.turn = Turn(waits=True)

    @one_at_a_time(TRAINER)
    def outer(self) -> int:
        with self.turn.lent("the schedule"):
            self.doing = "asks"
        return self.inner() + 1

    @one_at_a_time(PROGRAM)
    def inner(self) -> int:
        return 1


class Interrupt:
    """KeyboardInterrupt at the `at`-th instant of turn.py where the interpreter looks for signals: a function's start, a call's end."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.before: dict[FrameType, str] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> Interrupt | None:
        if not frame.f_code.co_filename.endswith("turn.py"):
            return None
        frame.f_trace_opcodes = True
        looks = event == "call" or (event == "opcode" and self.before.get(frame, "").startswith(("CALL", "JUMP_BACK")))
        if event == "opcode":
            self.before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if looks:
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def test_ctrl_c_at_each_instant_of_taking_and_giving_back() -> None:
    """The next call is made, whoever makes it."""
    thing, interrupted = Nested(), 0
    while True:
        before = sys.gettrace()
        sys.settrace(Interrupt(interrupted))
        try:
            found = thing.outer()
        except KeyboardInterrupt:
            found = 0
        finally:
            sys.settrace(before)
        if found == 2:
            break
        assert not thing.turn.busy
        if interrupted % 2:
            assert (thing.inner(), thing.outer()) == (1, 2)
        else:
            others: list[int] = []
            thread = threading.Thread(target=lambda others=others: others.append(thing.outer()))
            thread.start()
            thread.join(60)
            assert others == [2]
        interrupted += 1
    assert interrupted > 30


COLLECTING = """
import gc, threading, time
from partc.runtime.job import turn as turns
from partc.runtime.job.turn import PROGRAM, Turn
turn, kept = Turn(waits=True), []

def work():
    for _ in range(60):
        kept.append([[]])
        turn.busy
        with turn.taken(PROGRAM, "a step"):
            kept.append([[]])
            time.sleep(0.0002)

gc.callbacks.append(lambda *_: time.sleep(0.0001))
gc.set_threshold(1, 1, 1)
threads = [threading.Thread(target=work) for _ in range(4)]
[one.start() for one in threads]
[one.join() for one in threads]
"""


def test_a_collection_while_threads_wait_stops_none() -> None:
    """Something runs at each collection, such as a finalizer, and another thread is let run."""
    assert subprocess.run([sys.executable, "-c", COLLECTING], timeout=60, check=False).returncode == 0


def test_a_look_that_ends_at_a_generator_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that a call has resumed leaves the stack between two steps of who looks: the frames below cannot be reached from it."""
    turn, entered, leave = Turn(waits=True), threading.Event(), threading.Event()

    def call() -> None:
        with turn.taken(TRAINER, "a call"):
            entered.set()
            leave.wait(60)

    def numbers() -> Iterator[int]:
        yield 1

    suspended = numbers()
    next(suspended)
    seen = iter([suspended.gi_frame, suspended.gi_frame])
    look = turns._stack_of
    monkeypatch.setattr(turns, "_stack_of", lambda thread: next(seen, None) or look(thread))
    thread = threading.Thread(target=call)
    thread.start()
    entered.wait(60)
    assert turn.busy
    assert next(seen, None) is None
    leave.set()
    thread.join()
    assert not turn.busy
