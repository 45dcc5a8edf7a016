"""A model taken through the commands of a user, from `partc plan` to a run, with the seconds of each."""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path


def told(command: str, folder: Path) -> tuple[str, float]:
    """What a command prints, and its seconds. Raises RuntimeError where it fails."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "partc.cli", *shlex.split(command)[1:]], cwd=folder, capture_output=True, text=True
    )
    spent = time.perf_counter() - begin
    print(f"  {spent:6.1f} s  $ {command}", flush=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout, spent


def through_the_commands(model: str, folder: Path) -> tuple[str, float]:
    """What a step sends by the plan that is proposed, and the seconds of all commands."""
    plan = f"{Path(model).stem}.yaml"
    commands = [
        f"partc plan {model} --tp 2 -o {plan}",
        f"partc compile {model} --plan {plan} -o build",
        f"partc verify {model} --plan {plan}",
        "partc run build --in-process --random 0",
    ]
    (folder / plan).unlink(missing_ok=True)
    spent = sum(told(command, folder)[1] for command in commands)
    (sent,) = re.findall(r"^# Communication in a step: (.*)\.$", (folder / plan).read_text(), re.MULTILINE)
    return sent, spent
