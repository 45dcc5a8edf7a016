"""Scripts of this folder one after the other in one process, which imports partc once; processes that they fork have it, too.

    python tests/fuzz/in_turn.py "plans --cases 3" "random_masks --cases 1 --seed 3"

Prints `--- SCRIPT` before what each prints, and how it ended where it did not end well; the exit code is 1 then.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
import traceback
from pathlib import Path

import partc.compiler.pipeline
import partc.runtime  # noqa: F401

FOLDER = Path(__file__).parent


def ended(line: str) -> object:
    """The exit code of a script with its arguments; 0 or None where all is well."""
    name, *arguments = shlex.split(line)
    sys.argv[:] = [str(FOLDER / f"{name}.py"), *arguments]
    print(f"--- {name}", flush=True)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return 1
    return 0


def main() -> int:
    """1 where a script did not end well."""
    wrong = 0
    for line in sys.argv[1:]:
        if code := ended(line):
            print(f"{line}: exit code {code}", flush=True)
            wrong += 1
    return int(bool(wrong))


if __name__ == "__main__":
    os.environ.setdefault("PARTC_FILL_FREED", "1")
    sys.exit(main())
