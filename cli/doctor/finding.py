"""The result of a check of the machine or the installation, with its remedy."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OK, NOTE, FAULT = "ok", "note", "fault"
"""OK: as it should be. NOTE: it works, but less well than it could. FAULT: something that partc does fails because of it."""
SECONDS = 20.0
"""The time limit of a program that is asked for its version or its devices."""


@dataclass(frozen=True)
class Finding:
    """The result of one check: `about` is a word for the first column, `state` is OK, NOTE or FAULT.

    `remedy` is a sentence for the machine's administrator, empty where there is nothing to do.
    """

    about: str
    state: str
    text: str
    remedy: str = ""


def output_of(
    command: Sequence[str], seconds: float = SECONDS, environment: Mapping[str, str] | None = None
) -> tuple[bool, str]:
    """Runs a program; returns whether it succeeded within `seconds`, and a text.

    The text is its stdout, or after a failure the last line of its stderr, or the reason.
    """
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
