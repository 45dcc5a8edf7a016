"""Slurm on this machine: one node with eight slots, its daemons in a folder of their own, with ports of their own.

    with cluster(folder, install=True) as slurm:
        subprocess.run(["sbatch", "--ntasks=4", "job.sh"], env=slurm.environment)

It needs root, `slurmctld`, `slurmd` and `munged`; with `install` apt installs what is missing (Debian's slurm-wlm, munge and
libpmix-dev), and starts no service of the machine. A job of the partition `urgent` takes the slots of jobs of `normal`, which are
requeued at once, and of `patient`, a minute after their signal; a step that uses more memory than it asked for is killed. The
daemons end when the block ends. As a script it runs one command under Slurm:

    PYTHONPATH=tests/support python tests/hosts/slurm_node.py [--install] -- srun -n 4 --mpi=pmix partc run build --random 1
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from waiting import comes

SLOTS = 8
_LONG = 180.0
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scancel")
_CONFIGURATION = """\
ClusterName=partc
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=10
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=256
SlurmctldParameters=preempt_send_user_signal
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={slots} RealMemory={memory} State=UNKNOWN
PartitionName=normal Nodes={host} Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=patient Nodes={host} MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes={host} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class Unavailable(Exception):
    """Why there is no Slurm on this machine."""


@dataclass(frozen=True)
class Slurm:
    """The running daemons."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment of Slurm's commands: nothing of another job."""
        others = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI", "OMPI_"))}
        return {**others, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *words: str, also: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """A command of Slurm, run to its end; `also` are further variables of its environment."""
        environment = {**self.environment, **(also or {})}
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=_LONG, check=False)

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of a job."""
        words = self.run("scontrol", "show", "job", number).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextlib.contextmanager
def cluster(folder: Path, install: bool = False) -> Iterator[Slurm]:
    """The node while it runs; Unavailable with the reason where it cannot."""
    if os.geteuid() != 0:
        raise Unavailable("slurmd and munged are run as root")
    missing = _missing()
    if missing and install:
        _install()
        missing = _missing()
    if missing:
        raise Unavailable(f"{', '.join(missing)} are not installed (Debian's slurm-wlm and munge)")
    folder.mkdir(parents=True, exist_ok=True)
    for place in (folder, *(folder / name for name in ("state", "spool"))):
        place.mkdir(exist_ok=True)
        place.chmod(0o755)
    with contextlib.ExitStack() as stack:
        _start_munge(stack, folder)
        (folder / "slurm.conf").write_text(_configuration(folder))
        slurm = Slurm(folder)
        for name in ("slurmctld", "slurmd"):
            _start(stack, folder, name, slurm.environment, [_program(name), "-D", "-f", str(folder / "slurm.conf")])
        stack.callback(slurm.run, "scancel", "--signal=KILL", "--full", "--user=root")
        _await(lambda: slurm.run("sinfo", "--noheader", "--format=%T").stdout.split()[:1] == ["idle"], folder, "sinfo")
        yield slurm
        _await(lambda: not _jobs_left(slurm), folder, "squeue")


def _jobs_left(slurm: Slurm) -> str:
    slurm.run("scancel", "--user=root")
    return slurm.run("squeue", "--noheader").stdout.strip()


def _start_munge(stack: contextlib.ExitStack, folder: Path) -> None:
    key, names = folder / "munge.key", ("socket", "pid", "log", "seed")
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    paths = {name: folder / f"munge.{name}" for name in names}
    options = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in paths.items()]
    command = [_program("munged"), "--foreground", "--force", f"--key-file={key}", *options]
    _start(stack, folder, "munged", dict(os.environ), command)
    _await(paths["socket"].exists, folder, "munged")


def _configuration(folder: Path) -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    ports = []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            ports.append(taken.getsockname()[1])
    host = socket.gethostname().partition(".")[0]
    controller, daemon = ports
    return _CONFIGURATION.format(
        host=host, controller=controller, daemon=daemon, folder=folder, slots=SLOTS, memory=memory
    )


def _start(
    stack: contextlib.ExitStack, folder: Path, name: str, environment: dict[str, str], command: list[str]
) -> None:
    with (folder / f"{name}.out").open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    stack.callback(_stop, process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _await(condition: Callable[[], object], folder: Path, what: str) -> None:
    if not comes(condition):
        words = "".join(path.read_text(errors="replace")[-1000:] for path in sorted(folder.glob("*.out")))
        raise Unavailable(f"{what} does not answer as it should: {words}")


def _program(name: str) -> str:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or name


def _missing() -> list[str]:
    return [name for name in _PROGRAMS if _program(name) == name]


def _install() -> None:
    """Installs Debian's packages; in run level 1, so that none of their services starts."""
    if shutil.which("apt-get") is None:
        raise Unavailable("no apt-get, and no Slurm")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    packages = ["slurm-wlm", "munge", "libpmix-dev"]
    for words in (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(["apt-get", *words], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"apt-get {words[0]}: {done.stderr.strip()[-300:]}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--install", action="store_true", help="install slurm-wlm and munge where they are missing")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder), options.install) as slurm:
        return subprocess.run(options.command, env=slurm.environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
