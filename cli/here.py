"""Runs an artifact in this process: a program of one rank without MPI, or all ranks as threads."""

from __future__ import annotations

import time

from partc.cli.job import Job
from partc.cli.progress import Progress
from partc.runtime.format import Manifest


def run_here(job: Job, manifest: Manifest) -> int:
    """Runs all ranks of the job here; the exit code."""
    from partc.cli.rank import finish, open_job_feed
    from partc.cli.results import flatten
    from partc.runtime import load_local

    begin = time.perf_counter()
    inputs = open_job_feed(job, manifest).read(port.name for port in manifest.inputs)
    times = []
    with load_local(job.folder, threads=job.threads, trust=job.trust, stall=job.stall) as program:
        loaded = time.perf_counter() - begin
        with Progress(job.repeat) as progress:
            for step in range(job.repeat):
                start = time.perf_counter()
                outputs = program(inputs)
                times.append(time.perf_counter() - start)
                progress.reached(step + 1)
    finish(job, flatten(outputs), loaded, times)
    return 0
