"""The command line that starts a job's ranks, and the name of a rank's action: the common part of runs and servers."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from partc.cli.job.job import Job
from partc.cli.launch.launcher import Hosts, Launcher, command_line, launch_environment
from partc.cli.launch.run_dir import RunDir
from partc.cli.output import console


def command_of(job: Job, launcher: Launcher, ranks: int, hosts: Hosts, extra: Sequence[str]) -> list[str]:
    """Returns the command line that starts the ranks of a job; `-v` shows it, and `-vv` also shows the job, many lines of JSON."""
    # -P: modules are not imported from the current folder, which may belong to another user
    program = [sys.executable, "-P", "-m", "partc.cli.job", job.dumps()]
    command = command_line(launcher, ranks, hosts, extra, program)
    console.detail(shlex.join(command if console.verbose() > 1 else [*command[:-1], "JOB"]))
    return command


def environment_of(launcher: Launcher, hosts: Hosts, run_dir: RunDir) -> dict[str, str]:
    """Returns the environment of that command."""
    return launch_environment(launcher, run_dir.folder if hosts.are_local else None, run_dir.memory)


def where_of(job: Job) -> Callable[[int, int], str]:
    """Returns a function that gives the name of a rank's action, for messages."""

    def where(rank: int, action: int) -> str:
        from partc.runtime.execution.rank_program import describe_action

        return describe_action(Path(job.folder), rank, action)

    return where
