"""Five plans of one GPT in the order that `partc simulate` gives them, against the order that is measured, in one run.

    python tests/benchmarks/predicted_order.py [--turns 20] [--keep FOLDER]

Trainings over 2 ranks: data parallel without and with ZeRO, tensor parallel, two stages by GPipe and by 1F1B. One machine file has the
curves and the segments of all five (`partc measure --of`), by which each step is played. A plan's measured step is that of
`predicted_steps.py`: the tenth percentile of the quietest turns, and `alone`, in which each action takes the tenth percentile of what the
trace has of it; beside other processes only the second says something of the plan. Printed are both, and for either the pairs of plans
that are predicted in the wrong order, of those whose measured steps differ by more than 5 %. Ends with 1 where there are any by `alone`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from predicted_steps import Case, measured, partc, predicted, undisturbed
from train_cases import CROSS_ENTROPY, data_parallel, gpt, train, write
from train_cases import Case as Model

ALIKE = 0.05
"""Steps that differ by less are alike."""
SIZES = {"batch": 8, "seq": 64}
MODEL = Model(lambda: gpt(256, 4, heads=4, vocabulary=1000), SIZES)
TENSOR = """ranks: 2
sharding:
  tokens: rowwise
  "layers.*.*.project": colwise
  "layers.*.*.out": rowwise
  head: colwise
"""
STAGES = """ranks: 2
symbols: {{batch: {{divisor: 4}}}}
placement: {{tokens: 0, positions: 0, "layers.[0-1]": 0, "layers.[2-3]": 1, norm: 1, head: 1}}
pipeline: {{microbatches: 4, schedule: {}}}
"""
PLANS = {
    "dp": data_parallel(2),
    "dp, zero": data_parallel(2)
    .replace("momentum: 0.9}", "momentum: 0.9, shard: dp}")
    .replace("dataset: data_parallel", "mesh: {dp: 2}\ndataset: data_parallel"),
    "tp": TENSOR + train(CROSS_ENTROPY),
    "gpipe": STAGES.format("gpipe") + train(CROSS_ENTROPY),
    "1f1b": STAGES.format("1f1b") + train(CROSS_ENTROPY),
}


def wrong(steps: Mapping[str, float], times: Mapping[str, float]) -> list[str]:
    """The pairs of plans of which the one with the shorter measured step is predicted to take longer."""
    pairs = itertools.permutations(times, 2)
    return [
        f"{fast} before {slow}"
        for fast, slow in pairs
        if times[fast] * (1 + ALIKE) < times[slow] and steps[fast] > steps[slow]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="keep what is compiled and measured here")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ms a step", flush=True)
    cases = {name: Case(partial(write, case=MODEL, plan=plan, parts=1), SIZES, 2) for name, plan in PLANS.items()}
    with tempfile.TemporaryDirectory() as temporary:
        place = options.keep or Path(temporary)
        folders = {name: place / name.replace(", ", "_") for name in PLANS}
        for name, case in cases.items():
            folders[name].mkdir(parents=True, exist_ok=True)
            if not (folders[name] / "build").exists():
                case.compiled(folders[name])
        sizes = [f"--set={name}={size}" for name, size in SIZES.items()]
        builds = [f"--of={folder / 'build'}" for folder in folders.values()]
        partc("measure", "-o", str(place / "machine.yaml"), "-n", "2", *builds, *sizes)
        steps, tenth, alone = dict[str, float](), dict[str, float](), dict[str, float]()
        for name, case in cases.items():
            steps[name], _ = predicted(folders[name], case, "--machine", str(place / "machine.yaml"))
            _, tenth[name], others, _ = measured(folders[name], case, options.turns)
            alone[name] = undisturbed(folders[name], case)
            print(
                f"{name:10} predicted {1e3 * steps[name]:8.2f}   measured {1e3 * tenth[name]:8.2f} beside {others:4.0%}   "
                f"alone {1e3 * alone[name]:8.2f}",
                flush=True,
            )
    print("predicted: " + ", ".join(sorted(steps, key=steps.__getitem__)))
    for kind, times in (("measured", tenth), ("alone", alone)):
        pairs = wrong(steps, times)
        print(
            f"{kind}: {', '.join(sorted(times, key=times.__getitem__))}; {'; '.join(pairs) or 'no pair'} in the wrong order"
        )
    print(f"load {os.getloadavg()[0]:.1f}")
    return int(bool(wrong(steps, alone)))


if __name__ == "__main__":
    sys.exit(main())
