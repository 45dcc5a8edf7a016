"""Simulated runs of the runtime by their seeds; a seed whose run goes wrong is replayed and shown.

    python tests/simulation/run.py --seed 4711                  one run, with its trace
    python tests/simulation/run.py --runs 100000 [--from 0]     many; ends with the first that goes wrong, unless --all
    python tests/simulation/run.py --sample pipeline --runs 500

A seed says everything: the sample is the seed modulo the number of samples. What goes wrong is shown with the fewest decisions that it
takes: those of the seed up to one place, and after it none.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.extend(
    str(path) for path in (Path(__file__).parents[1], *Path(__file__).parents[1].iterdir()) if path.is_dir()
)

from simulation.samples import SAMPLES
from simulation.session import Found, Session

SHOWN = 60


def shortest(session: Session, seed: int) -> Found:
    """The run of a seed that goes wrong, with as few of its decisions as bisection finds."""
    whole = session.seeded(seed, traced=True)
    low, high = -1, whole.decisions
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if session.seeded(seed, middle).problems else (middle, high)
    found = session.seeded(seed, high, traced=True)
    return found if found.problems and found.decisions <= whole.decisions else whole


def show(found: Found, every: bool = False) -> None:
    """What a run was, and what is wrong with it."""
    print(f"seed {found.seed}, sample '{found.sample}': {found.fault}; {found.weather}, {found.decisions} decisions")
    trace = found.trace or []
    if len(trace) > SHOWN and not every:
        print(f"  ... {len(trace) - SHOWN} lines before")
    for at, rank, what in trace if every else trace[-SHOWN:]:
        print(f"  {at * 1e6:12.1f} us  {'    ' * rank}rank {rank}: {what}")
    for problem in found.problems:
        print(f"  WRONG: {problem}")
    if not found.problems:
        print("  all is well")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="run this seed alone, and show what happens")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--runs", type=int, default=1000, help="how many seeds, of all samples together")
    parser.add_argument("--sample", help="only the seeds of this sample")
    parser.add_argument(
        "--all", action="store_true", help="go on after a run that goes wrong; with --seed, the whole trace"
    )
    options = parser.parse_args()
    names = [sample.name for sample in SAMPLES]
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.runs)
    if options.sample is not None:
        at = names.index(options.sample)
        seeds = [seed * len(names) + at for seed in range(options.first, options.first + options.runs)]
    with tempfile.TemporaryDirectory() as name:
        sessions: dict[int, Session] = {}
        begun = time.perf_counter()
        kinds: Counter[str] = Counter()
        wrong = decisions = given_up = 0
        for count, seed in enumerate(seeds):
            at = seed % len(names)
            if at not in sessions:
                before = time.perf_counter()
                sessions[at] = Session(SAMPLES[at], Path(name) / SAMPLES[at].model)
                begun += time.perf_counter() - before
            session = sessions[at]
            found = session.seeded(seed, traced=options.seed is not None)
            kinds[f"a rank {found.fault.kind}" if found.hit else "none"] += 1
            given_up += found.given_up > 0
            decisions += found.decisions
            if options.seed is not None:
                show(found, options.all)
            if found.problems:
                wrong += 1
                show(shortest(session, seed))
                print(f"  replay: python tests/simulation/run.py --seed {seed}", flush=True)
                if not options.all:
                    break
            if count % 10000 == 9999:
                print(
                    f"{count + 1} runs, {wrong} wrong, {(count + 1) / (time.perf_counter() - begun):.0f} a second",
                    flush=True,
                )
        passed = time.perf_counter() - begun
        told = ", ".join(f"{kind}: {number}" for kind, number in sorted(kinds.items()))
        print(
            f"{sum(kinds.values())} runs of {len(sessions)} samples, {wrong} wrong; {sum(kinds.values()) / passed:.0f} a second, "
            f"{decisions / max(1, sum(kinds.values())):.0f} decisions each; faults: {told}; steps given up: {given_up}"
        )
        for session in sessions.values():
            session.close()
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
