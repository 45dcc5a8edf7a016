"""The process of `partc`, also as `python -m partc.cli`: it installs signal handlers before it imports anything else.

As `python -m partc.cli` it imports nothing from the folder where it is started.
"""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` has put the current folder first
    del sys.path[0]

try:
    from partc.cli.interruption import run
except KeyboardInterrupt:  # by Python's own handler, before partc installs its own
    os.write(2, b"stopped by SIGINT\n")
    os._exit(130)


def _command(arguments: list[str]) -> int:
    from partc.cli.main import invoke

    return invoke(arguments)


def main() -> None:
    """The entry point of the console script."""
    run(_command)


if __name__ == "__main__":
    main()
