"""Kills, stops and signals at random moments of real MPI jobs, and what users' code can do to them; `kill_case.py` says what must hold.

    python tests/fuzz/kills.py --cases 200 --seed 1
    python tests/fuzz/kills.py --cases 20 --only pipeline --plain       kill -9 of a rank in mid-pipe
    python tests/fuzz/kills.py --cases 50 --only lookup --plain         of one that looks rows up, or that has them

Prints every case that is not as it must be, and a table. The cases are those of the seed, and the seconds those of the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from kill_case import Verdict, judged
from kill_job import MODES, MOMENTS, SIGNALS, USER, Act, Case, Running, make

WHAT = {
    "rank": ("SIGKILL", "SIGSTOP", *SIGNALS),
    "all": ("SIGKILL", "SIGSTOP", *SIGNALS),
    "launcher": ("SIGKILL", "SIGTERM", "SIGSTOP"),
    "partc": ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP"),
}
RANKS = {
    "run": (2, 3),
    "train": (2, 3, 4),
    "pipeline": (2, 3, 4),
    "lookup": (2, 3, 4),
    "eval": (2, 3, 4),
    "script": (2, 3, 4),
}


def drawn(random: Random, modes: Sequence[str] = MODES, plain: bool = False) -> Case:
    """A case at random; a `plain` one kills a rank outright while it trains or runs."""
    mode = random.choice(modes)
    ranks = random.choice(RANKS[mode])
    moment = random.choice(
        [one for one in MOMENTS if one != "saving" or mode in ("train", "pipeline", "lookup", "script")]
    )
    delay = random.random()
    rank = random.randrange(ranks)
    if plain:
        return Case(mode, ranks, "stepping", Act("SIGKILL", "rank", rank), delay)
    if mode in ("train", "pipeline", "lookup", "eval") and random.random() < 0.2:
        act = Act(random.choice(sorted(USER)), random.choice(("user", "users")), rank)
        return Case(mode, ranks, "stepping", act, delay)
    target = random.choice(("rank", "rank", "all", "launcher", "launcher" if mode == "script" else "partc"))
    what = random.choice(WHAT[target])
    if mode == "script" and what == "SIGSTOP" and (target != "rank" or moment == "ending"):
        what = "SIGKILL"  # nobody is left who could tell of it
    return Case(mode, ranks, moment, Act(what, target, rank), delay)


def undisturbed(works: dict[tuple[str, int], Path], folder: Path) -> float:
    """Seconds until the first step of a job."""
    case = Case("train", 2, "ending", Act("SIGTERM", "rank"))
    running = Running(case, works["train", 2], folder, 30.0)
    while running.steps() < 1 and running.process.poll() is None:
        time.sleep(0.05)
    seconds = time.monotonic() - running.begun
    running.process.wait()
    running.end()
    return seconds


def table(found: list[tuple[Case, Verdict]]) -> str:
    """Per mode and kind of act: cases, how many were over before, how many are wrong, seconds until all had ended."""
    rows: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for case, verdict in found:
        rows[case.mode, f"{case.act.what} {case.act.target}"].append(verdict)
    lines = [f"{'mode':7} {'act':22} {'cases':>5} {'over':>5} {'wrong':>5} {'median s':>8} {'max s':>6}"]
    for (mode, act), verdicts in sorted(rows.items()):
        seconds = [one.seconds for one in verdicts]
        over, wrong = sum(one.over for one in verdicts), sum(bool(one.problems) for one in verdicts)
        median, most = statistics.median(seconds), max(seconds)
        lines.append(f"{mode:7} {act:22} {len(verdicts):5} {over:5} {wrong:5} {median:8.1f} {most:6.1f}")
    wrong = sum(bool(verdict.problems) for _, verdict in found)
    slowest = max(verdict.seconds for _, verdict in found)
    return "\n".join([*lines, f"{len(found)} cases, {wrong} wrong, the slowest {slowest:.1f} s"])


def main() -> int:
    """The exit code: 1 where a case is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stall", type=float, default=2.0)
    parser.add_argument("--only", default=",".join(MODES), help="the kinds of jobs")
    parser.add_argument(
        "--start", type=float, help="seconds until a job's first step; without it, of one that is run for it"
    )
    parser.add_argument("--plain", action="store_true", help="kill -9 of a rank in the middle of the steps alone")
    options = parser.parse_args()
    random = Random(options.seed)
    found: list[tuple[Case, Verdict]] = []
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        modes = options.only.split(",")
        works = make(folder / "works", [("train", 2), *((mode, ranks) for mode in modes for ranks in RANKS[mode])])
        start = options.start or undisturbed(works, folder / "undisturbed")
        print(f"the first step after {start:.1f} s", flush=True)
        for number in range(options.cases):
            case = drawn(random, modes, options.plain)
            place = folder / f"case_{number}"
            verdict = judged(case, works[case.mode, case.ranks], place, options.stall, start)
            found.append((case, verdict))
            mark = "WRONG" if verdict.problems else "over" if verdict.over else "ok"
            load = os.getloadavg()[0]
            print(f"{number} {mark} {case}: {verdict.seconds:.1f} s, load {load:.0f}", flush=True)
            for problem in verdict.problems:
                print(f"    {problem}")
            if verdict.problems:
                print(
                    "    | " + "\n    | ".join((place / "out").read_text(errors="replace").splitlines()[-12:]),
                    flush=True,
                )
    print(table(found))
    return int(any(verdict.problems for _, verdict in found))


if __name__ == "__main__":
    os.environ.setdefault("PARTC_FILL_FREED", "1")
    sys.exit(main())
