"""A model taken through the commands of a user, from `partc plan` to a run, with the seconds of each."""

import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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


def both_ways(models: Sequence[str], made: Callable[[str, Path], str], collectives: Mapping[str, int]) -> int:
    """Takes models through the commands as `made` writes them, and as `partc export` does; the exit code.

    Prints a row for each. Failed has one that sends another number of AllReduce than its `collectives`, or another way from its file.
    """
    failed = []
    rows = []
    for name in models:
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            model = made(name, folder)
            try:
                sent, spent = through_the_commands(model, folder)
                _, export = told(f"partc export {model} -o {name}.onnx", folder)
                again, later = through_the_commands(f"{name}.onnx", folder)
            except RuntimeError as error:
                failed.append(f"{name}: {error}")
                continue
        if sent != again or f"{collectives[name]} AllReduce" not in sent:
            failed.append(f"{name}: sends {sent}; from its file {again}; expected are {collectives[name]} AllReduce")
        rows.append(f"{name:8} {spent:6.1f} s as it is   {export:6.1f} s export, then {later:6.1f} s   {sent}")
    print("\n".join(["", *rows, *failed]))
    return bool(failed)
