"""Ctrl-C at any instant of a call of a program in one process: KeyboardInterrupt in bounded time, and the next call is right."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from artifact_text import write
from test_turns import PING_PONG

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


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ctrl_c_at_random_instants(built: Path, seed: int) -> None:
    """10 of each seed, within the first milliseconds of a row of calls."""
    told, late = ended(INTERRUPTED, built / "two", seed, 10).split()
    assert int(told) == 10
    assert float(late) < 10
