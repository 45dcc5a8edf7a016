"""Steps of a training that writes a trace against steps of one that does not, in turns of one job.

    python tests/benchmarks/trace_cost.py [CASE...] [--turns 30] [--steps 10] [--keep FOLDER]

Cases: a GPT on 2 ranks, LeNet on 5, wide & deep with 2 workers and 2 servers. A job has three programs of one artifact: one that records
the times of its actions, and two that do not. Printed are medians over the turns of what a step takes by the clock and by the processors
of all ranks, and of the ratios of turns that stand beside each other: `on` recording against not, `off` the third program against the
first, which is what turns differ by on their own. As turns differ by more than that beside other processes, each rank also records steps
of as many actions that do nothing, and the microseconds that this takes are held against the processors' time of a step. A program that
records nothing has the actions that it has without this option, so off costs nothing by construction. Wanted: at most 2 % more of the
processors' time. `--keep` keeps the traces, `CASE/x.trace.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from predicted_steps import Case, sample
from train_cases import CASES, data_parallel, write
from transformer import HERE, ROOT, mpi_command

LONGEST = 600.0
"""Seconds that a job may take."""
RECORDED = {
    "gpt_dp2": Case(lambda folder: write(folder, CASES["gpt256"], data_parallel(2), 2), {"batch": 8, "seq": 64}, 2),
    "lenet_placed": Case(sample("lenet/model.py", "lenet/train.yaml"), {"batch": 32}, 5),
    "wide_deep_servers": Case(sample("wide_deep/model.py", "wide_deep/train_servers.yaml"), {"batch": 256}, 4),
}


def run(case: Case, folder: Path, turns: int, steps: int) -> dict[str, Any]:
    """What a job measures, whose trace is `x.trace.json`; compiles first where that is not done."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "build").exists():
        case.compiled(folder)
    script = [str(HERE / "trace_cost_rank.py"), str(folder), json.dumps(case.sizes), str(turns), str(steps)]
    command = mpi_command(case.ranks, *script)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ROOT}, timeout=LONGEST)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(RECORDED))
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--keep", type=Path, help="keep what is compiled and measured here")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; a step without and with a trace, and what is more")
    for name in options.cases or RECORDED:
        case = RECORDED[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.keep / name if options.keep else Path(temporary)
            found = run(case, folder, options.turns, options.steps)
        print(f"{name}: {sum(found['actions'])} actions on {case.ranks} ranks")
        for at, kind in enumerate(("clock", "processors")):
            off, on, again = ([row[at] for row in found["rows"][side]] for side in ("off", "on", "again"))
            costs = statistics.median(one / (0.5 * (a + b)) for one, a, b in zip(on, off, again, strict=True)) - 1
            noise = statistics.median(b / a for a, b in zip(off, again, strict=True)) - 1
            times = ", ".join(f"{1e3 * statistics.median(some):.3f} ms" for some in (off, on))
            print(f"  by the {kind:10} {times}; on {costs:+.1%}, off {noise:+.1%}", flush=True)
        spent, step = sum(found["recorded"]), statistics.median(row[1] for row in found["rows"]["off"])
        print(f"  to record them  {1e6 * spent:.1f} us, {spent / step:+.2%} of the processors' time", flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
