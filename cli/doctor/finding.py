"""A finding of a check about the machine or the installation, and its remedy."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OK, NOTE, FAULT = "ok", "note", "fault"
"""As it should be; works, with less than there could be; something that partc does fails because of it."""
SECONDS = 20.0
"""A program that is asked for its version or its devices has so long."""


@dataclass(frozen=True)
class Finding:
    """`about` is a word for the first column; `remedy` a sentence for whoever runs the machine, empty where there is nothing to do."""

    about: str
    state: str
    text: str
    remedy: str = ""


def output_of(
    command: Sequence[str], seconds: float = SECONDS, environment: Mapping[str, str] | None = None
) -> tuple[bool, str]:
    """Whether a program ended well in so many seconds, and what it printed: stdout then, else the last line of stderr or why not."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {seconds:g} s"
    except OSError as error:
        return False, str(error)
    if ended.returncode == 0:
        return True, ended.stdout.strip()
    lines = [line.strip() for line in (ended.stderr or ended.stdout).splitlines() if any(map(str.isalnum, line))]
    return False, lines[-1] if lines else f"exit code {ended.returncode}"
