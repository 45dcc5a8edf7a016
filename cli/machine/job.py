"""A job whose rank 0 prints what all ranks have found, as one JSON document on a line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from partc.cli.doctor.finding import output_of
from partc.cli.launch.launcher import Hosts, Kind, command_line, find_launcher, launch_environment
from partc.cli.launch.run_dir import RunDir
from partc.runtime.errors import RankError

_LONGEST = 600.0


def found_by(module: str, folder: Path, ranks: int) -> dict[str, Any]:
    """What a module finds that so many ranks of this host run with the folder as its argument; RankError where they fail."""
    launcher = find_launcher(ranks, instead="")
    with RunDir(ranks) as run_dir:
        command = command_line(launcher, ranks, Hosts(), (), [sys.executable, "-P", "-m", module, str(folder)])
        if launcher.kind is Kind.OPEN_MPI and "--oversubscribe" not in command:
            command.insert(1, "--oversubscribe")
        environment = {**launch_environment(launcher, run_dir.folder, run_dir.memory), "TMPDIR": str(run_dir.folder)}
        good, text = output_of(command, _LONGEST, environment)
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not good or not lines:
        raise RankError(f"the ranks failed: {text}\n  help: see what `partc doctor` says")
    found: dict[str, Any] = json.loads(lines[0])
    return found
