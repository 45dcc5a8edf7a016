"""A pipeline's step as `partc simulate` has it with measured times, held against the measured step.

    compared(folder)      what `train_pipeline_times.py` measured there

Times are those of the artifact's own tasks in the same steps, not of stages that are compiled alone: these would have neither the caches
nor the other ranks beside them. Messages take no time there, nor does what a step does around its program (binding the batch, the
agreement of the ranks).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from partc.cli.output.pipeline import RankTimes, read_profile


def compared(folder: Path) -> str:
    """Medians over steps: measured and simulated milliseconds and their ratio; by rank the time in tasks, and waiting."""
    times = folder / "times.json"
    command = [sys.executable, "-m", "partc.cli", "simulate", str(folder / "build"), "--times", str(times), "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["measured"]
    wall, total = 1e3 * found["measured"], 1e3 * found["simulated"]
    rows = [_row(one) for one in read_profile(times).ranks]
    return "\n".join([f"measured {wall:9.3f}, simulated {total:9.3f}, measured/simulated {found['ratio']:.3f}", *rows])


def _row(one: RankTimes) -> str:
    """Where a rank's time goes, medians in milliseconds."""
    parts = {kind: 1e3 * statistics.median(seconds) for kind, seconds in one.kinds.items()}
    text = ", ".join(f"{kind} {ms:.3f}" for kind, ms in parts.items())
    return f"    rank {one.rank}: {text} of {1e3 * statistics.median(one.step):.3f}"
