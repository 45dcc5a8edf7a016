"""Runs a server: its HTTP side in a thread of this process, and the ranks under a launcher; the server outlives these and may restart them.

    port is bound -> ranks start -> rank 0 connects -> requests
                     ^                                   |
                     +----------- with --restart --------+  a rank has failed: open requests end with the message of the failure

After a signal the server takes no more requests; the ranks end when the open requests have ended, or when `drain` seconds are over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Sequence

from partc.cli.interruption import stopped
from partc.cli.job.job import Job
from partc.cli.job.serving import open_front, report_address, report_draining
from partc.cli.launch.launcher import Hosts, Launcher, find_launcher
from partc.cli.launch.ranks import command_of, environment_of, where_of
from partc.cli.launch.run_dir import RunDir
from partc.cli.launch.signals import Signals
from partc.cli.launch.supervise import supervise
from partc.cli.output import console
from partc.cli.server.front import Front
from partc.runtime.artifact.format import Manifest
from partc.runtime.job.status_board import states

_LINK = "link"
_STOPPED_HELP = (
    "\n  help: a stopped process runs again after `kill -CONT`; with a larger --stall the server waits longer for it"
)
_BETWEEN_LOOKS = 0.5
"""Seconds between two checks for stopped ranks: the cores are for the ranks."""
_LAST_SECONDS = 5.0
"""The seconds that the ranks have to end, once no request is open."""


def serve(job: Job, manifest: Manifest, hosts: Hosts, extra: Sequence[str]) -> int:
    """Serves until a signal or a failure ends it; returns the exit code."""
    assert job.serving is not None
    launcher, left = find_launcher(manifest.ranks), job.serving.restart
    with Signals(("SIGINT", "SIGTERM"), once=True) as signals, open_front(job.serving, manifest) as front:
        while True:
            current = _ServerJob(job, front, signals)
            code = current.run(launcher, manifest.ranks, hosts, extra)
            if signals.exit_code is not None and not current.ends:
                raise stopped(signals.noted[0])
            if current.ends:
                return 0
            if current.began is None or not left:
                return code or 1
            left -= 1
            front.restarting()
            console.echo(f"starts the ranks again; {left} more times at most", err=True)


class _ServerJob:
    """One job of the server: the ranks from their start to their end."""

    def __init__(self, job: Job, front: Front, signals: Signals) -> None:
        self.job, self.front, self.signals = job, front, signals
        self.began: float | None = None
        """The time when the ranks had loaded; None before."""
        self.ends = False
        """Whether a signal has asked the server to end."""
        self._drained: float | None = None
        self._stopped: dict[int, float] = {}
        self._looked = 0.0

    def run(self, launcher: Launcher, ranks: int, hosts: Hosts, extra: Sequence[str]) -> int:
        """Runs the job to its end; returns the exit code."""
        job = self.job
        assert job.serving is not None
        with RunDir(ranks) as run_dir:
            link = run_dir.folder / _LINK
            self.front.listen(link)
            started = dataclasses.replace(
                job,
                run_dir=str(run_dir.folder),
                serving=dataclasses.replace(job.serving, link=str(link), api_key=None),  # command lines are public
            )
            command, environment = (
                command_of(started, launcher, ranks, hosts, extra),
                environment_of(launcher, hosts, run_dir),
            )
            outcome = supervise(
                command,
                environment,
                run_dir,
                where_of(job),
                lambda: self._look(run_dir),
                lambda: None,
                self.signals,
                job.stall,
                hosts.are_here,
                self._failed,
            )
            return outcome.code

    def _failed(self, text: str) -> None:
        console.failure(text)
        self.front.fail(text)

    def _look(self, run_dir: RunDir) -> None:
        """Does the work that is due several times a second: reports the address, drains, and ends stopped ranks."""
        if self.began is None and self.front.is_ready:
            self.began = time.monotonic()
            report_address(self.front)
        if self.signals.passed:
            self.signals.passed, self.ends = 0, True
            report_draining(self.front)
            if self.began is None:
                self.signals.noted.append(signal.SIGTERM)
            self.front.drain()
        if self.front.drained.is_set():
            self._drained = self._drained or time.monotonic()
            if time.monotonic() - self._drained > _LAST_SECONDS:
                self.signals.noted.append(signal.SIGTERM)
        self._end_stopped(run_dir)

    def _end_stopped(self, run_dir: RunDir) -> None:
        """Kills a rank that has been stopped for too long: no request would ever be answered."""
        now = time.monotonic()
        if now - self._looked < _BETWEEN_LOOKS:
            return
        self._looked, pids = now, run_dir.pids()
        for rank, (pid, state) in enumerate(zip(pids, states(pids), strict=True)):
            if not pid or state not in ("T", "t"):
                self._stopped.pop(rank, None)
            elif now - self._stopped.setdefault(rank, now) > self.job.stall:
                told = f"(process {pid}) was stopped for {self.job.stall:g} s and is killed,"
                run_dir.ended[rank] = told, _STOPPED_HELP
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
