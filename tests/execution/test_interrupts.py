"""Ctrl-C at any instant of a call of a program in one process: the next call is right."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from artifact_text import write
from partc.runtime.job.turn import PROGRAM, TRAINER, CallGuard, one_call
from turns_case import PING_PONG

INTERRUPTED = """
import faulthandler, random, signal, sys
import numpy as np
from partc.runtime import load_local
faulthandler.dump_traceback_later(100, exit=True)
x = np.ones((2, 3), np.float32)
chance, told = random.Random(int(sys.argv[2])), 0
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests may have it ignored
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
with load_local(sys.argv[1]) as program:
    program(x=x)
    for _ in range(int(sys.argv[3])):
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0005, 0.006))
            while True:
                program(x=x)
        except KeyboardInterrupt:
            told += 1
        assert program(x=x)["y"].tolist() == [[-0.5] * 3] * 2
print(told)
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
    assert ended(INTERRUPTED, built / "two", 1, 30) == "30\n"  # nor does a rank say that it waits


class Nested:
    """A call that makes a call, as a trainer's step makes one of its program."""

    def __init__(self) -> None:
        self.turn = CallGuard(waits=True)

    @one_call(TRAINER)
    def outer(self) -> int:
        with self.turn.running("the schedule"):
            self.doing = "asks"
        return self.inner() + 1

    @one_call(PROGRAM)
    def inner(self) -> int:
        return 1


def test_ctrl_c_at_many_instants_of_taking_and_giving_back() -> None:
    """2,000 signals within tens of microseconds of a row of short calls: the next call is made, also by another thread."""
    thing, chance, interrupted = Nested(), random.Random(2), 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for instant in range(2000):
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 6e-5))
                while True:
                    assert thing.outer() == 2
            except KeyboardInterrupt:
                interrupted += 1
            assert not thing.turn.busy
            assert thing.outer() == 2
            if instant % 50 == 0:
                results: list[int] = []
                other = threading.Thread(target=lambda results=results: results.append(thing.outer()), daemon=True)
                other.start()
                other.join(60)
                assert results == [2]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted == 2000
