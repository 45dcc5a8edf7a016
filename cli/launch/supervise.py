"""Starts a launcher, watches its ranks, and prints one message for a failure: its first cause.

The ranks' output passes through. A rank reports its failure as one framed line on stderr. A killed rank is found from the launcher's
messages, or from the first process that vanished, and the status board has its position. After the first sign of a failure the launcher has
some seconds to end, then its process group is killed; likewise after a signal to this process, and at once after a second.

Also reports stopped processes that no rank can report: the launcher, all remaining ranks, or a rank that has not begun. Ends a job in which
MPI does not begin: each rank then waits for another within the library, and none can report it.

Separates a launcher's own messages from the ranks' output, and reads from them which rank ended, and how. Launchers explain the end of a
rank in many lines, after the rank itself has reported its error. Those lines are held back and shown only if there is no better message.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from partc.cli.job.faults import fault_of
from partc.cli.job.processes import end_with_parent, naming
from partc.cli.job.rank import BEGUN, ENDED, FRAME
from partc.cli.launch.launcher import inherited
from partc.cli.launch.run_dir import RunDir
from partc.cli.launch.signals import Signals
from partc.cli.output import console
from partc.runtime.errors import NO_MEMORY, speaks_of_memory
from partc.runtime.job.status_board import IDLE, STARTING, read_task, states


@dataclass(frozen=True)
class RankEnd:
    """A rank's end according to the launcher; the rank or its process id is None if the launcher does not name it.

    `host`: the rank's host, if other ranks only saw that their connection to it was closed; empty if they do not name it.
    """

    rank: int | None = None
    pid: int | None = None
    signal: int | None = None
    code: int | None = None
    host: str | None = None


_ENDS: tuple[tuple[str, Callable[[re.Match[str]], RankEnd]], ...] = (
    (
        r"process rank (\d+) with PID (\d+) on node \S+ exited on\s+signal (\d+)",
        lambda found: RankEnd(rank=int(found[1]), pid=int(found[2]) or None, signal=int(found[3])),
    ),
    (
        r"process rank (\d+) with PID (\d+) on node \S+ exiting\s+improperly",
        lambda found: RankEnd(rank=int(found[1]), pid=int(found[2]), code=0),
    ),
    (
        r"Process name: \[\S*?,(\d+)\]\s+Exit code:\s+(\d+)",
        lambda found: RankEnd(rank=int(found[1]), code=int(found[2])),
    ),
    (
        r"PID (\d+) RUNNING AT \S+\s+=\s+EXIT CODE: (\d+)",
        lambda found: _hydra(int(found[1]), int(found[2])),
    ),
    (r"srun: error: \S+: tasks? (\d+)\S*: Killed", lambda found: RankEnd(rank=int(found[1]), signal=9)),
    (r"srun: error: \S+: tasks? (\d+)\S*: Segmentation fault", lambda found: RankEnd(rank=int(found[1]), signal=11)),
    (
        r"srun: error: \S+: tasks? (\d+)\S*: Exited with exit code (\d+)",
        lambda found: RankEnd(rank=int(found[1]), code=int(found[2])),
    ),
    (
        r"peer process has unexpectedly disconnected[\s\S]*?Peer host:\s+(\S+)",
        lambda found: RankEnd(host=found[1]),
    ),
    (
        r"\*\*\* An error occurred in Socket closed",
        lambda found: RankEnd(host=""),
    ),
)
"""The launchers' messages about a rank's end, the most informative first, with functions that read them."""

_ON_EACH_HOST = (
    f"each host needs Python and partc at the path of this one, {sys.executable}; leave out a host without them"
)
_NOT_REACHED = "the host was lost or cannot be reached; each host needs Open MPI of the same version, and ports that are open between hosts"
_LAUNCHER_HELP = (
    ("run as root", "Open MPI refuses to run as root: use partc run -- --allow-run-as-root, or run as another user"),
    ("access an executable", _ON_EACH_HOST),
    ("No module named partc", _ON_EACH_HOST),
    ("No module named 'partc", _ON_EACH_HOST),
    ("Daemon exit status: 127", _ON_EACH_HOST),  # a shell's code for a command that it does not find
    ("failed to report back", _NOT_REACHED),
)
"""Words of a launcher that started no rank, and the help for them; the first that fit count."""

_FENCE = re.compile(r"^(-{60,}|={60,})$")
_LINE = re.compile(
    r"^\[[^\]\s]+:\d+\] |^\[[^\]\s]+\]\[\[\d+,\d+\],\d+\]\["
    r"|^\[warn\] |^srun: |^slurmstepd: |^Abort\(-?\d+\) on node \d+|^\[(mpiexec|proxy)[^\]]*\]"
    r"|^YOUR APPLICATION TERMINATED WITH|^This typically refers to a problem with your application|"
    r"^Please see the FAQ page for debugging"
)


def _hydra(pid: int, code: int) -> RankEnd:
    """Hydra reports a signal as an exit code below 32, or as the shell does, above 128."""
    if code > 128:
        return RankEnd(pid=pid, signal=code - 128)
    return RankEnd(pid=pid, signal=code) if code in (4, 6, 7, 8, 9, 11, 15) else RankEnd(pid=pid, code=code)


@dataclass
class LauncherOutput:
    """The launcher's own lines so far; `hold` decides for each new line whether it is one."""

    lines: list[str] = field(default_factory=list)
    fenced: bool = False

    def hold(self, line: str) -> bool:
        """Returns whether the line is the launcher's own; such a line is held back here."""
        text = line.rstrip("\r\n ")
        fence = _FENCE.match(text) is not None
        held = fence or self.fenced or _LINE.match(text) is not None or (text == "" and bool(self.lines))
        self.fenced ^= fence
        if held:
            self.lines.append(text)
        return held

    def ended(self) -> RankEnd | None:
        """Returns how a rank ended, if the launcher has reported it."""
        text = "\n".join(self.lines)
        for pattern, read in _ENDS:
            if found := re.search(pattern, text):
                return read(found)
        return None


_BETWEEN = 0.25
_STOPPED = ("T", "t")
_ENDED = ("", "Z", "X")


class Stopped:
    """The watch over a job's processes; `look` is called several times a second.

    `local`: whether all ranks are processes of this machine, which first of all write down their process ids.
    """

    def __init__(self, stall: float, local: bool = False) -> None:
        self.stall = stall
        self.local = local
        self._looked = 0.0
        self._since: float | None = None
        self._report = stall

    def look(self, launcher: int, ranks: Callable[[], Sequence[int]]) -> None:
        """Prints a line on stderr if the job has been unable to continue for `stall` seconds, and again each time the wait has doubled.

        `ranks`: reads the ranks' process ids, 0 for a rank without one; it is not called at each look.
        """
        now = time.monotonic()
        if now - self._looked < _BETWEEN:
            return
        self._looked = now
        what = _what(launcher, ranks(), self.local)
        if not what:
            self._since, self._report = None, self.stall
            return
        self._since = now if self._since is None else self._since
        waited = now - self._since
        if waited >= self._report:
            self._report = 2 * waited
            console.echo(f"partc: the job has waited {waited:.0f} s: {what}", err=True)


def _what(launcher: int, ranks: Sequence[int], local: bool) -> str:
    if states([launcher]) in [[letter] for letter in _STOPPED]:
        return f"the launcher (process {launcher}) is stopped"
    missing = [rank for rank, pid in enumerate(ranks) if not pid] if local else []
    if missing:
        names = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
        return f"{names} not begun: stopped, or still loading Python"
    begun = [(rank, pid) for rank, pid in enumerate(ranks) if pid]
    found = [(rank, pid, state) for (rank, pid), state in zip(begun, states([pid for _, pid in begun]), strict=True)]
    there = [one for one in found if one[2] not in _ENDED]
    if not there or not all(state in _STOPPED for _, _, state in there):
        return ""
    return "; ".join(f"rank {rank} (process {pid}) is stopped" for rank, pid, _ in there)


_BEGINS, _BEGINS_SOMEWHERE = 120.0, 600.0
"""Seconds, and one for each rank, in which a further rank must begin: if all are processes of this machine, and if some are unknown."""


class Beginning:
    """The watch over the start of MPI, in which all ranks wait for each other; `look` is called several times a second.

    `local`: as for `Stopped`. Ranks on other hosts are not known, but MPI begins on all at once. `queues`: whether the launcher may wait
    for free slots before it starts any rank, as srun does.
    """

    def __init__(self, local: bool, queues: bool = False) -> None:
        self.local = local
        self.queues = queues
        self._over = False
        self._seen = (0, 0)
        self._looked = self._since = time.monotonic()

    def look(self, run_dir: RunDir, has_begun: bool = False) -> str:
        """Returns the failure of a start that has made no progress for too long, though no process is stopped; else "".

        `has_begun`: whether a rank of another host has reported that MPI has begun.
        """
        now = time.monotonic()
        self._over |= has_begun
        if self._over or now - self._looked < _BETWEEN:
            return ""
        self._looked = now
        pids = run_dir.pids()
        known = sum(pid > 0 for pid in pids)
        waiting = [
            rank
            for rank, (_, action) in enumerate(run_dir.board())
            if action == STARTING and (self.local or pids[rank])
        ]
        self._over = bool(known) and not waiting
        if self._over or (known, len(waiting)) != self._seen or (self.queues and not known):
            self._seen, self._since = (known, len(waiting)), now
            return ""
        limit = (_BEGINS if known == run_dir.ranks else _BEGINS_SOMEWHERE) + run_dir.ranks
        if now - self._since < limit:
            return ""
        if any(state in _STOPPED for state in states([*naming(run_dir.folder)])):
            self._since = now
            return ""
        if not waiting:
            return (
                f"MPI has not begun: the launcher has started no rank in {limit:.0f} s\n"
                "  help: it waits for its daemon on another host: `mpiexec --hostfile FILE hostname` shows whether that can reach this one"
            )
        names = f"rank {waiting[0]} has" if len(waiting) == 1 else f"ranks {', '.join(map(str, waiting))} have"
        return (
            f"MPI has not begun: {names} waited {limit:.0f} s for it\n"
            "  help: a rank that gets no memory, or a network that MPI cannot use; `partc doctor` tests both"
        )


_PATIENCE = 4.0
_LAST_PATIENCE = 2.0
_POLL = 0.05
_REMEMBERED = 40


@dataclass(frozen=True)
class Failure:
    """A failure that a rank reported."""

    rank: int
    code: int
    text: str


@dataclass(frozen=True)
class Outcome:
    """The end of a job: its exit code, and whether a rank, its host or the launcher was lost without a report, or for lack of memory."""

    code: int
    is_lost: bool = False


@dataclass
class _Heard:
    """The findings of the reading and watching threads so far."""

    failure: Failure | None = None
    failed_at: float | None = None
    first_dead: int | None = None
    on_stdout: LauncherOutput = field(default_factory=LauncherOutput)
    on_stderr: LauncherOutput = field(default_factory=LauncherOutput)
    has_begun: bool = False
    has_ended: bool = False
    not_begun: str = ""
    passed: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def ended(self) -> RankEnd | None:
        """Returns how a rank ended, according to the launcher's messages."""
        return self.on_stderr.ended() or self.on_stdout.ended()

    def words(self) -> list[str]:
        """Returns the lines held back, and the last lines passed through."""
        return [*self.on_stdout.lines, *self.on_stderr.lines, *self.passed]

    def help(self) -> str:
        """Returns a line of help about ranks that could not begin, from the launcher's words; "" without any."""
        said = " ".join(" ".join(self.words()).split())
        return next((f"\n  help: {text}" for words, text in _LAUNCHER_HELP if words in said), "")

    def show_launcher_output(self) -> None:
        """Prints the lines held back."""
        for line in [*self.on_stdout.lines, *self.on_stderr.lines]:
            console.echo(line, err=True)

    def fail(self, failure: Failure | None) -> None:
        self.failure = self.failure or failure
        self.failed_at = self.failed_at or time.monotonic()


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    run_dir: RunDir,
    where: Callable[[int, int], str],
    tick: Callable[[], None],
    before_output: Callable[[], None],
    signals: Signals,
    stall: float = 30.0,
    local: bool = False,
    failed: Callable[[str], object] = console.failure,
) -> Outcome:
    """Runs the command to its end and prints one message for a failure; returns the outcome, whose exit code a signal may have set.

    `where` renders an action of a rank; `tick` is called some times a second, for progress, and `before_output` before a line of the ranks
    is passed through. Stopped processes are reported after `stall` seconds; if all ranks are `local`, of this machine, ranks that have not
    begun are reported too. `failed` gets the message.
    """
    heard, stopped = _Heard(), Stopped(stall, local)
    beginning = Beginning(local, os.path.basename(command[0]) == "srun")
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=(lambda: end_with_parent(signal.SIGTERM)) if sys.platform == "linux" else None,
    )
    run_dir.notify_guard(process.pid)
    assert process.stdout is not None
    assert process.stderr is not None
    readers = [
        threading.Thread(target=_pass_through, args=(process.stdout, heard, before_output), daemon=True),
        threading.Thread(target=_listen, args=(process.stderr, heard), daemon=True),
        threading.Thread(target=_watch, args=(process, run_dir, heard), daemon=True),
    ]
    try:
        for reader in readers:
            reader.start()
        while process.poll() is None and not signals.noted:
            tick()
            stopped.look(process.pid, run_dir.pids)
            if signals.is_requested:
                with contextlib.suppress(OSError):  # a stopped launcher, too, has to run for its ranks to end
                    process.send_signal(signal.SIGCONT)
            heard.not_begun = beginning.look(run_dir, heard.has_begun)
            if heard.not_begun or (heard.failed_at is not None and time.monotonic() - heard.failed_at > _PATIENCE):
                break
            time.sleep(_POLL)
    finally:
        is_ended_here = _end(process, signals)
        run_dir.end_ranks()
        for reader in readers:
            reader.join(_LAST_PATIENCE)
        if not any(reader.is_alive() for reader in readers):
            process.stdout.close()
            process.stderr.close()
    if signals.is_requested and process.returncode and heard.failure is None and heard.ended() is None:
        signals.give_up()
    if signals.exit_code:
        return Outcome(signals.exit_code)
    return _verdict(process.returncode, is_ended_here, heard, run_dir, where, local, failed)


def _end(process: subprocess.Popen[bytes], signals: Signals) -> bool:
    """Ends the launcher: by SIGTERM, so that it ends its ranks on all hosts, then by SIGKILL; returns whether it was still running."""
    if process.poll() is not None:
        return False
    process.terminate()
    until = time.monotonic() + _LAST_PATIENCE
    while process.poll() is None and time.monotonic() < until and not signals.again:
        time.sleep(_POLL)
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return True


def _pass_through(stream: IO[bytes], heard: _Heard, before_output: Callable[[], None]) -> None:
    for line in stream:
        if heard.on_stdout.hold(line.decode(errors="replace")):
            continue
        before_output()
        _, given, document = line.partition(console.DOCUMENT.encode())
        if given:
            console.result(json.loads(document))
            continue
        with contextlib.suppress(OSError):
            # Who reads them may have gone; the job goes on, and must not wait for a full pipe.
            sys.stdout.buffer.write(line)
            sys.stdout.flush()


def _listen(stream: IO[bytes], heard: _Heard) -> None:
    for raw in stream:
        # Open MPI ends an empty line of its own by a zero when a job is aborted.
        line = raw.decode(errors="replace").replace("\0", "")
        _, framed, text = line.partition(FRAME)
        if framed:
            heard.fail(_failure(text))
        elif BEGUN in line:
            heard.has_begun = True
        elif ENDED in line:
            heard.has_ended = True
        elif not heard.on_stderr.hold(line):
            heard.passed.append(line)
            with contextlib.suppress(OSError):
                sys.stderr.write(line)
                sys.stderr.flush()
        elif heard.on_stderr.ended() is not None:
            heard.fail(None)


def _failure(text: str) -> Failure:
    try:
        fields = json.loads(text)
        return Failure(fields["rank"], fields["code"], fields["text"])
    except (ValueError, KeyError):
        return Failure(-1, 1, text)


def _watch(process: subprocess.Popen[bytes], run_dir: RunDir, heard: _Heard) -> None:
    """Records the rank whose process ends first, by pidfd."""
    if not hasattr(os, "pidfd_open"):
        return
    poll = select.poll()
    ranks: dict[int, int] = {}
    known: set[int] = set()
    try:
        while process.poll() is None and heard.first_dead is None:
            for rank, pid in enumerate(run_dir.pids() if len(known) < run_dir.ranks else []):
                if pid and rank not in known:
                    known.add(rank)
                    handle = os.pidfd_open(pid)
                    ranks[handle] = rank
                    poll.register(handle, select.POLLIN)
            for handle, _ in poll.poll(200 if len(known) == run_dir.ranks else 20)[:1]:
                heard.first_dead = ranks[handle]
    except OSError:
        return
    finally:
        for handle in ranks:
            os.close(handle)


def _verdict(
    code: int,
    is_ended_here: bool,
    heard: _Heard,
    run_dir: RunDir,
    where: Callable[[int, int], str],
    local: bool,
    failed: Callable[[str], object],
) -> Outcome:
    if heard.failure is not None:
        failed(heard.failure.text)
        return Outcome(heard.failure.code, is_lost=NO_MEMORY in heard.failure.text)
    if heard.not_begun:
        failed(heard.not_begun)
        return Outcome(1, is_lost=True)
    if code == 0 and heard.failed_at is None:
        heard.show_launcher_output()
        if not heard.has_ended:  # a launcher that loses another host's daemon may end as if all were well
            failed(
                "the launcher ended with exit code 0 before rank 0 was done\n"
                "  help: a host, or the network between the hosts, was lost; or code of the user ended the rank"
            )
            return Outcome(1, is_lost=not local)
        return Outcome(0)
    number = code - 128 if 128 < code < 160 else code  # the launcher has exit codes of its own above these
    killed = number != code or code in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
    ended = heard.ended() or (RankEnd(signal=number) if killed else RankEnd(code=code))
    if code < 0 and ended.rank is None and not is_ended_here:
        failed(f"the launcher was killed by signal {-code}{_name(-code)}, and its ranks with it")
        return Outcome(1, is_lost=True)
    rank = ended.rank
    if rank is None and not heard.help():  # else ranks that had begun ended with the launcher
        rank = heard.first_dead
    if ended.host is not None:
        # A rank of this host that is lost is named by the launcher; one whose connections closed ended for the loss of another.
        place = f"host {ended.host}" if ended.host not in ("", socket.gethostname()) else "another host"
        failed(
            f"a rank on {place} ended with no message: the connections to it were closed"
            f"{'' if rank is None else f', that of rank {rank} {_position(run_dir, rank, where, local)}'}\n"
            "  help: the system's log of that host says whether it killed the process (memory that ran out); else the network "
            "between the hosts was lost"
        )
        return Outcome(1, is_lost=True)
    if rank is None or not 0 <= rank < run_dir.ranks:
        heard.show_launcher_output()
        failed(f"the launcher ended with exit code {code}, and no rank reported an error{heard.help() or inherited()}")
        return Outcome(1, is_lost=_NOT_REACHED in heard.help())
    manner = f"ended with exit code {ended.code} and no message,"
    if ended.signal is not None:
        manner = f"was killed by signal {ended.signal}{_name(ended.signal)}"
    advice = _advice(ended) or (heard.help() or inherited() if ended.code and not run_dir.board()[rank][0] else "")
    manner, advice = run_dir.ended.get(rank, (manner, advice))
    failed(f"rank {rank} {manner} {_position(run_dir, rank, where, local)}{advice}")
    system = any(
        line.startswith(("MemoryError", NO_MEMORY)) or speaks_of_memory(line) or "An error occurred in MPI_Init" in line
        for line in heard.words()
    )
    return Outcome(1, is_lost=ended.signal is not None or system)


def _position(run_dir: RunDir, rank: int, where: Callable[[int, int], str], local: bool) -> str:
    """Returns the last position of a rank; for a rank on another host, whose board is not here, only that."""
    if not (local or run_dir.pids()[rank]):
        return "on another host"
    task, line = read_task(run_dir.folder, rank), fault_of(run_dir.folder, rank)
    step, action = run_dir.board()[rank]
    if action in (IDLE, STARTING):
        position = f"after step {step}" if step else "before its first step"
    else:
        position = f"in step {step}, at {where(rank, action)}"
    if task or line:
        position += "\n  while it ran " + (task or "user code") + (f", at {line}" if line else "")
    return position


def _name(number: int) -> str:
    return f" ({signal.Signals(number).name})" if number in set(signal.Signals) else ""


def _advice(ended: RankEnd) -> str:
    if ended.signal != signal.SIGKILL:
        return ""
    return (
        "\n  help: the system kills processes when memory runs out; 'partc inspect' estimates the memory of each rank"
    )
