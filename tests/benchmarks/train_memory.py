"""The memory of training on one rank against PyTorch's on one thread, by Linux's counts of each process.

    python tests/benchmarks/train_memory.py [MODEL...]

All numbers are MB beyond what the process had before it loaded the model: at the peak of some steps, after them, and how much that
grew over the steps, none of which should be any. Prints partc's peak over PyTorch's. The interpreter has torch.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from train_cases import CASES, data_parallel, write
from train_data_parallel import partc_side, torch_side
from turns import Side


def measured(side: Side, steps: int) -> dict[str, Any]:
    """What the process says after so many steps."""
    side.turn(steps)
    found: dict[str, Any] = json.loads(side.close().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(CASES))
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in CASES]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(CASES)}")
    print(f"{'model':8} {'side':6} {'peak MB':>8} {'after':>8} {'anonymous':>10} {'growth':>7} {'before':>8}")
    for name in options.models or CASES:
        peaks = []
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write(folder, CASES[name], data_parallel(1, loss=CASES[name].loss), 1)
            for own in (True, False):
                side = partc_side(folder, 1, "--memory") if own else torch_side(folder, name, 1, "--memory")
                found = measured(side, options.steps)
                first, end = (found["notes"][when] for when in ("first steps", "end"))
                peaks.append(found["peak"])
                print(
                    f"{name:8} {side.name:6} {found['peak']:8.1f} {end['resident']:8.1f} {end['anonymous']:10.1f}"
                    f" {end['anonymous'] - first['anonymous']:7.1f} {found['begin']['resident']:8.1f}",
                    flush=True,
                )
        print(f"{name:8} partc / torch = {peaks[0] / peaks[1]:.2f} of the peak", flush=True)


if __name__ == "__main__":
    main()
