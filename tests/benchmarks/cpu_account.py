"""What processes took of the cores while something ran: CPU, time without a core, and how often they slept or were preempted.

    account = Account({"rank 0": [4711], "client": [os.getpid()]})
    with account:
        ...                                 # again and again: each adds to the account
    account.lines(tokens)                   # a line of each name, per token

All threads of a process count, those that end meanwhile up to where they were seen last: Linux's /proc is read before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

TITLE = f"{'':16}{'CPU':>8}{'without a core':>16}{'sleeps':>8}{'preempted':>11}"
"""The columns: microseconds a token, and times a token."""
_RANK = b"OMPI_COMM_WORLD_RANK="


def descendants(pid: int) -> Iterator[int]:
    """A process, and all that it has started, or those have."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from descendants(int(child))


def ranks_below(pid: int) -> dict[str, list[int]]:
    """The ranks of a job of Open MPI that a process has started, as `rank 0`, `rank 1`, .."""
    found = {}
    for one in descendants(pid):
        for entry in Path(f"/proc/{one}/environ").read_bytes().split(b"\0"):
            if entry.startswith(_RANK):
                found[f"rank {int(entry.removeprefix(_RANK))}"] = [one]
    return dict(sorted(found.items()))


class Account:
    """Sums by name of processes."""

    def __init__(self, processes: Mapping[str, Sequence[int]]) -> None:
        self._processes = processes
        self._sums = {name: [0.0] * 4 for name in processes}

    def __enter__(self) -> None:
        self._before = {name: _threads(pids) for name, pids in self._processes.items()}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, pids in self._processes.items():
            for thread, numbers in _threads(pids).items():
                before = self._before[name].get(thread, (0.0,) * 4)
                self._sums[name] = [
                    total + now - then for total, now, then in zip(self._sums[name], numbers, before, strict=True)
                ]

    def lines(self, tokens: int) -> Iterator[str]:
        """Each name's share of a token."""
        for name, sums in self._sums.items():
            cpu, without, sleeps, preempted = (one / tokens for one in sums)
            yield f"{name:16}{1e6 * cpu:8.1f}{1e6 * without:16.1f}{sleeps:8.2f}{preempted:11.2f}"


def _threads(pids: Sequence[int]) -> dict[Path, tuple[float, ...]]:
    """By thread its seconds with a core, and without one that it wanted, and how often it slept and was preempted."""
    found = {}
    for thread in (one for pid in pids for one in Path(f"/proc/{pid}/task").iterdir()):
        try:
            run, without, _ = map(int, (thread / "schedstat").read_text().split())
            lines = (thread / "status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        switches = [float(line.split()[1]) for line in lines if "ctxt_switches" in line]
        found[thread] = (run * 1e-9, without * 1e-9, *switches)
    return found
