"""Programs that are measured in turns: each waits on its stdin without using a core until it is told how many steps to run.

    serve(step, told)                      # in the measured program: times each step, answers on stdout
    side = Side("JAX", [command]); side.turn(10)     # in the benchmark: the seconds of ten steps
    with busy(1): ...                                # beside a process that computes without end; prints the machine's load

Imports nothing but the standard library: the measured programs run in other interpreters.
"""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

_MARK, _END = "@turn ", "end"
_ENDLESS = """import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000): pass"""
"""What a busy process runs while whoever started it is there."""


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many busy processes beside what is measured, on whichever core; prints at the end how many, and the load of the machine."""
    processes = [subprocess.Popen([sys.executable, "-c", _ENDLESS]) for _ in range(count)]
    load = os.getloadavg()[0]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
        print(
            f"{count} busy {'process' if count == 1 else 'processes'} beside, {os.cpu_count()} cores, "
            f"load {load:.1f} before and {os.getloadavg()[0]:.1f} after",
            flush=True,
        )


def told() -> Iterator[int]:
    """The numbers of steps that this program is told to run, until it is told to end."""
    for line in sys.stdin:
        if line.strip() == _END:
            return
        yield int(line)


def serve(step: Callable[[], object], numbers: Iterator[int], answers: bool = True) -> None:
    """Runs as many steps as each number says and answers with their times; `answers` is for one of several processes."""
    if answers:
        answer([])
    for count in numbers:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        if answers:
            answer(times)


def answer(times: Sequence[float]) -> None:
    """Says that the program is ready, or what a turn took, where it measures that itself."""
    print(f"{_MARK}{json.dumps(times)}", flush=True)


class Side:
    """One measured program: one process or several, of which the first answers."""

    def __init__(
        self, name: str, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]] | None = None
    ) -> None:
        self.name = name
        self.times: list[float] = []
        self.processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if index == 0 else None,
                env={**os.environ, **(environments[index] if environments else {})},
                text=True,
            )
            for index, command in enumerate(commands)
        ]
        atexit.register(self._stop)
        self.last = self._answer()
        """The answer to the last turn, at first to none."""

    def turn(self, steps: int) -> list[float]:
        """The seconds of so many steps."""
        for process in self.processes:
            assert process.stdin
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        return self._answer()

    def close(self) -> str:
        """Ends the program; gives what it says last."""
        for process in self.processes:
            assert process.stdin
            process.stdin.write(f"{_END}\n")
            process.stdin.close()
        for process in self.processes:
            process.wait(600)
        assert self.processes[0].stdout
        return self.processes[0].stdout.read().strip()

    def _stop(self) -> None:
        """Nothing outlives a benchmark that fails."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()

    def _answer(self) -> list[float]:
        assert self.processes[0].stdout
        for line in self.processes[0].stdout:
            if line.startswith(_MARK):
                times: list[float] = json.loads(line.removeprefix(_MARK))
                return times
            print(line, end="")
        raise SystemExit(f"{self.name} has ended with {self.processes[0].wait()}")
