"""Trainings on MPI ranks that get SIGTERM at random moments and go on by `--resume auto`: each ends in time with a whole checkpoint, and
the result has every byte of one that was never disturbed.

python tests/fuzz/preemption.py --signals 100 --seed 1 [--background] [--ranks 2]
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from partc.compiler.pipeline import compile_model
from partc.runtime.checkpoint.newest import latest
from partc.runtime.checkpoint.verify import verify
from saving import prepare, train, train_here

PLAN = """
ranks: RANKS
dataset: data_parallel
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label}
  optimizer: {type: adam, lr: 0.001}
  batch: 12
  log: 1
"""
WITHIN = 10.0
"""Seconds in which a signal must have ended a training."""
_SAVED = 75
_BEFORE_THE_FIRST_STEP = 0.1
"""The share of signals that are sent while ranks start."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--signals", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4))
    parser.add_argument("--background", action="store_true", help="save while training goes on")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        model = (folder / "model.py").read_text().replace("Symbol()", "Symbol(divisor=4)")
        (folder / "model.py").write_text(model)
        (folder / "plan.yaml").write_text(
            PLAN.replace("RANKS", str(given.ranks)) + "  checkpoint: {background: true}\n" * given.background
        )
        compile_model(folder / "model.py", folder / "plan.yaml", folder / "build")
        codes, longest = preempted(folder, given.signals, random.Random(given.seed))
        last = latest(folder / "runs")
        total = (0 if last is None else int(last.name[5:])) + 3
        for kept in ("runs", "whole"):
            train_here(folder, kept, "--save", "100000", "--resume", "auto", "--steps", str(total))
        have, want = (folder / name / f"step_{total:08d}" for name in ("runs", "whole"))
        differ = [file.name for file in sorted(want.iterdir()) if (have / file.name).read_bytes() != file.read_bytes()]
    print(
        f"{given.signals} signals, exit codes {dict(sorted(codes.items()))}, the longest end {longest:.1f} s; {total} steps; "
        f"files that differ: {differ or 'none'}"
    )
    sys.exit(1 if differ or longest > WITHIN else 0)


def preempted(folder: Path, signals: int, chance: random.Random) -> tuple[Counter[int], float]:
    """Sends so many signals to trainings, each of which goes on from the one before; the exit codes, and the seconds of the longest end."""
    codes: Counter[int] = Counter()
    longest, known = 0.0, 0
    for _ in range(signals):
        process = train(folder, "runs", "--save", "200", "--resume", "auto", "--steps", "1000000")
        assert process.stdout is not None
        early, lines = chance.random() < _BEFORE_THE_FIRST_STEP, []
        if early:
            time.sleep(chance.uniform(0, 2))
        else:
            for line in process.stdout:
                lines.append(line)
                if line.startswith("step"):
                    break
            time.sleep(chance.uniform(0, 0.5))
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate()
        longest = max(longest, time.monotonic() - begun)
        codes[process.returncode] += 1
        assert early or process.returncode == _SAVED, f"{process.returncode}: {''.join(lines)}{rest}"
        last = latest(folder / "runs")
        if process.returncode == _SAVED:
            assert last is not None, "no checkpoint is left"
        if last is not None:
            assert int(last.name[5:]) >= known, f"step {known} was there, and {last} is left"
            assert verify(last) == [], verify(last)
            known = int(last.name[5:])
    return codes, longest


if __name__ == "__main__":
    main()
