"""Trainings over MPI with `--restarts`, whose processes are lost at random moments: each ends with the losses and the bits of one that was
never disturbed, from copies in memory or the disk, also where it continues on another number of ranks; what is the user's mistake is not
repeated.

    python tests/fuzz/restarts.py --failures 200 --seed 1
    python tests/fuzz/restarts.py --failures 20 --only memory
    python tests/fuzz/restarts.py --failures 40 --hosts       # 2 ranks on each of two hosts, which are namespaces of this machine

    kill       a rank gets SIGKILL
    stop       a rank is stopped, and goes on after a moment
    silent     a rank is stopped, and then killed
    launcher   the launcher of the ranks, or its daemon on the other host, gets SIGKILL
    memory     a rank gets no more memory from now on, also while MPI begins
    start      MPI did not begin, as Open MPI's daemons sometimes wait for each other for ever; nothing of this script's doing
    link       the hosts do not reach each other for some seconds, or for longer than TCP repeats what it sends, here about ten
    host       all processes of the second host get SIGKILL, its memory is lost, and it may not answer for a while
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from partc.compiler.pipeline import compile_model
from partc.runtime.checkpoint.checkpoint import Checkpoint
from partc.runtime.checkpoint.newest import latest
from saving import ENVIRONMENT, MODEL, prepare

sys.path.append(str(Path(__file__).parents[1] / "hosts"))

from two_hosts import TwoHosts, two_hosts

PLAN = """
ranks: 4
elastic: {ranks: [4, 2, 1], parts: 12, copies: 1, every: 3}
dataset: data_parallel
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label}
  optimizer: {type: adam, lr: 0.001, shard: true}
  clip: {norm: 1.0}
  data: {source: data.npz, transform: "slow.py:slow"}
  batch: 12
  log: 1
"""
SLOW = '''
import os, time

def slow(batch):
    """A batch that takes its time; one of them is a mistake, where the environment says so."""
    slow.calls += 1
    if slow.calls == int(os.environ.get("PARTC_MISTAKE", "0")):
        raise ValueError("a mistake")
    time.sleep(0.02)
    return batch

slow.calls = 0
'''
KINDS, OF_HOSTS = ("kill", "stop", "silent", "launcher", "memory"), ("link", "host")
SILENT = 25.0
"""Seconds in which a host that is lost does not answer: longer than `partc train` waits for one."""
IMPATIENT = """
from partc.cli.__main__ import main
from partc.cli.launch import supervise
supervise._BEGINS_SOMEWHERE = 120.0
main()
"""
"""`partc` that gives a start over several hosts two minutes, not ten: Open MPI's daemons sometimes wait for each other for ever."""
REPEATS = 4
"""How often TCP sends again what has no answer: fifteen times would be a quarter of an hour."""
STEPS, SAVE = 36, 4
LEAST, MOST, WITHIN = 3, 8, 600.0
"""The least and most failures of a training, of which some may come after its end; the seconds in which it must have ended, more where an
undisturbed one takes long."""


@dataclass(frozen=True)
class Place:
    """The folder of the artifact and the trainings, and the hosts of the ranks; None where all are processes of this one."""

    folder: Path
    hosts: TwoHosts | None = None

    def command(self, ranks: int, words: Sequence[str]) -> list[str]:
        """The command line of a training on up to so many ranks; the hosts that answer choose the number where they can hold them all."""
        command = ["train", "build", "--trust-code", "--threads", "1", *words]
        if self.hosts is None:
            return [sys.executable, "-m", "partc.cli", *command, "-n", str(ranks)]
        begin = [*self.hosts.inside(0), "env", f"--chdir={self.folder}"]
        where = ["--hostfile", str(self.hosts.file(ranks // 2)), "--", *self.hosts.options, "-x", "PARTC_RESTARTS"]
        return [*begin, sys.executable, "-P", "-c", IMPATIENT, *command, *where]


@dataclass
class Outcome:
    """How a training ended: its exit code, what it said, the failures that met a process, and its seconds."""

    code: int | None
    said: str
    met: list[str] = field(default_factory=list)
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failures", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--hosts", action="store_true", help="the ranks are on two hosts")
    options = parser.parse_args()
    chance = Random(options.seed)
    kinds = options.only.split(",") if options.only else [*KINDS, *OF_HOSTS * options.hosts]
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        place = Place(folder, stack.enter_context(two_hosts(folder, delay=0.1)) if options.hosts else None)
        build(folder)
        whole = trained(place, "whole", {4: STEPS}, [])
        assert whole.code == 0, whole.said
        wanted, counts, wrong, lost, number = state(folder / "whole"), Counter[str](), 0, 0.0, 0
        usual = whole.seconds
        while sum(counts.values()) < options.failures:
            number += 1
            moments = [usual * chance.random() ** 2 for _ in range(chance.randint(LEAST, MOST))]
            failures = [(moment, chance.choice(kinds)) for moment in moments]
            failures = failures[: options.failures - sum(counts.values())]
            numbers = {4: STEPS} if chance.random() < 0.7 else {4: STEPS // 3, 2: STEPS}
            within = max(WITHIN, 12 * whole.seconds)
            outcome = trained(place, f"runs{number}", numbers, failures, chance, within=within)
            counts.update(outcome.met)
            usual = usual if outcome.met else min(usual, outcome.seconds)
            problems = judged(folder, f"runs{number}", outcome, wanted)
            wrong += bool(problems)
            lost += (outcome.seconds - whole.seconds) * (len(numbers) == 1)
            print(f"{number}: {outcome.met}, {outcome.seconds:.1f} s", file=sys.stderr, flush=True)
            for problem in problems:
                print(f"training {number}, {failures}: {problem}\n{outcome.said[-2000:]}", flush=True)
        mistake = trained(
            place, "mistake", {4: STEPS}, [], environment={"PARTC_MISTAKE": str(chance.randint(1, STEPS))}
        )
        repeated = mistake.code != 1 or "a mistake" not in mistake.said or "starts the ranks again" in mistake.said
        wrong += repeated
    total = sum(counts.values())
    print(
        f"{total} failures of {number} trainings {dict(sorted(counts.items()))}, {wrong} wrong; an undisturbed one takes "
        f"{whole.seconds:.1f} s, a failure {lost / max(1, total):.1f} s; a mistake {'was repeated' if repeated else 'ended it'}"
    )
    sys.exit(1 if wrong else 0)


def build(folder: Path) -> None:
    """The artifact of three numbers of ranks, and its data."""
    prepare(folder)
    (folder / "model.py").write_text(MODEL.replace("900", "96").replace("Symbol()", "Symbol(divisor=12)"))
    (folder / "slow.py").write_text(SLOW)
    (folder / "plan.yaml").write_text(PLAN)
    compile_model(folder / "model.py", folder / "plan.yaml", folder / "build")


def trained(
    place: Place,
    kept: str,
    numbers: Mapping[int, int],
    failures: list[tuple[float, str]],
    chance: Random | None = None,
    environment: Mapping[str, str] = os.environ,
    within: float = 10 * WITHIN,
) -> Outcome:
    """Trains on each number of ranks up to its steps; `failures` are seconds after the start or the failure before, with their kinds."""
    begun, outcome, due = time.monotonic(), Outcome(0, ""), list(failures)
    before = begun
    for ranks, steps in numbers.items():
        mark = uuid.uuid4().hex
        words = ["--checkpoint", kept, "--save", str(SAVE), "--steps", str(steps), "--metrics", f"{kept}.jsonl"]
        variables = {**ENVIRONMENT, **environment, "PARTC_RESTARTS": mark, "OMP_NUM_THREADS": "1"}
        with (place.folder / f"{kept}.out").open("w+") as out:
            process = subprocess.Popen(
                place.command(ranks, [*words, "--resume", "auto", "--restarts", "10"]),
                cwd=place.folder,
                stdout=out,
                stderr=out,
                env=variables if place.hosts is None else {**variables, "TMPDIR": str(place.hosts.temporary)},
            )
            while process.poll() is None and time.monotonic() < begun + within:
                if due and time.monotonic() > before + due[0][0] and chance is not None:
                    _, kind = due.pop(0)
                    outcome.met += [kind] * strike(kind, mark, chance, place.hosts)
                    before = time.monotonic()
                time.sleep(0.01)
            if process.poll() is None:
                process.kill()
            outcome.code = process.wait()
            out.seek(0)
            said = out.read()
            outcome.said += said
            outcome.met += ["start"] * said.count("MPI has not begun")
        if outcome.code:
            break
    outcome.seconds = time.monotonic() - begun
    return outcome


def strike(kind: str, mark: str, chance: Random, hosts: TwoHosts | None) -> bool:
    """Has a failure happen to one of the job's processes; whether there was one."""
    ranks, launchers = processes(mark)
    if kind in OF_HOSTS and hosts is not None:
        return bool(ranks) and lose(kind, chance, hosts)
    there = [*launchers, *on_second(hosts, b"prted")] if kind == "launcher" else ranks
    if not there:
        return False
    pid = chance.choice(there)
    with contextlib.suppress(ProcessLookupError):
        if kind == "memory":
            resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
        if kind in ("stop", "silent"):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(chance.uniform(0.05, 1.0))
        os.kill(pid, signal.SIGCONT if kind in ("stop", "memory") else signal.SIGKILL)
    return True


def lose(kind: str, chance: Random, hosts: TwoHosts) -> bool:
    """The hosts lose each other for a while; or the second one loses its processes and its memory, and answers again at once or later."""
    if kind == "link":
        for host in hosts.processes:
            limit = f"echo {REPEATS} > /proc/sys/net/ipv4/tcp_retries2"
            subprocess.run(["nsenter", "-t", str(host), "-n", "sh", "-c", limit], check=True)
        with hosts.cut_off():
            time.sleep(chance.choice([chance.uniform(0.3, 6.0), SILENT]))
        return True
    is_silent = chance.random() < 0.5
    with hosts.cut_off() if is_silent else contextlib.nullcontext():
        for pid in on_second(hosts, b"prted", b"python"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run([*hosts.inside(1), "sh", "-c", "rm -rf /dev/shm/*"], check=True)
        time.sleep(SILENT * is_silent)
    return True


def on_second(hosts: TwoHosts | None, *names: bytes) -> list[int]:
    """The processes of programs with such names on the second host; none without hosts."""
    pids = list[int]()
    for path in Path("/proc").iterdir() if hosts is not None else ():
        with contextlib.suppress(OSError):
            if path.name.isdecimal() and os.readlink(path / "ns/net") == os.readlink(
                f"/proc/{hosts.processes[1]}/ns/net"
            ):
                program = (path / "cmdline").read_bytes().partition(b"\0")[0].rpartition(b"/")[2]
                pids += [int(path.name)] * program.startswith(names)
    return pids


def processes(mark: str) -> tuple[list[int], list[int]]:
    """The ranks of a job, and its launchers, by the mark in their environment."""
    ranks, launchers = [], []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not path.name.isdecimal() or f"PARTC_RESTARTS={mark}".encode() not in (path / "environ").read_bytes():
                continue
            words = (path / "cmdline").read_bytes().split(b"\0")
            if b"OMPI_COMM_WORLD_RANK=" in (path / "environ").read_bytes():
                ranks.append(int(path.name))
            elif words and words[0].rpartition(b"/")[2] in (b"mpiexec", b"mpirun", b"prterun"):
                launchers.append(int(path.name))
    return ranks, launchers


def state(folder: Path) -> dict[str, bytes]:
    """The bytes of all tensors of the newest checkpoint."""
    newest = latest(folder)
    assert newest is not None
    checkpoint = Checkpoint.open(newest)
    return {name: checkpoint.read(name).tobytes() for name in checkpoint.index.tensors}


def losses(file: Path) -> dict[int, set[float]]:
    """Maps each step to the losses that were logged for it, several where it was repeated."""
    found: dict[int, set[float]] = {}
    for line in map(json.loads, file.read_text().splitlines()):
        found.setdefault(line["step"], set()).add(line["loss"])
    return found


def judged(folder: Path, kept: str, outcome: Outcome, wanted: Mapping[str, bytes]) -> list[str]:
    """What is wrong with a training that was disturbed."""
    if outcome.code != 0:
        return [f"exit code {outcome.code}"]
    if latest(folder / kept) is None:
        return ["it ended well, without a checkpoint"]
    problems = []
    if differ := [name for name, data in state(folder / kept).items() if data != wanted[name]]:
        problems.append(f"{len(differ)} tensors differ, {', '.join(differ[:3])}")
    if losses(folder / f"{kept}.jsonl") != losses(folder / "whole.jsonl"):
        problems.append("the losses differ")
    return problems


if __name__ == "__main__":
    main()
