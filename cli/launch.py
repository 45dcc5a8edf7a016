"""Starts the ranks of a job under a launcher, and leaves nothing behind, however the run ends."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from partc.cli.job import Job
from partc.cli.launcher import Hosts, command_line, find_launcher, launch_environment
from partc.cli.progress import Progress
from partc.cli.scratch import Scratch
from partc.cli.supervise import Stopped, supervise
from partc.runtime.format import Manifest


def launch(job: Job, manifest: Manifest, hosts: Hosts, extra: Sequence[str]) -> int:
    """Runs the job on the manifest's number of ranks; the exit code."""
    launcher = find_launcher(manifest.ranks)
    with Scratch(manifest.ranks) as scratch, Progress(job.repeat) as progress:
        given = dataclasses.replace(job, scratch=str(scratch.folder))
        program = [sys.executable, "-m", "partc.cli.rank", given.dumps()]
        command = command_line(launcher, manifest.ranks, hosts, extra, program)

        def tick() -> None:
            progress.reached(min(step for step, _ in scratch.board()))

        def where(rank: int, action: int) -> str:
            from partc.runtime.program import describe_action

            return describe_action(Path(job.folder), rank, action)

        try:
            return supervise(command, launch_environment(launcher), scratch, where, tick, progress.close)
        except Stopped as stopped:
            return stopped.exit_code
        finally:
            if job.output is not None:
                job.partial.unlink(missing_ok=True)
