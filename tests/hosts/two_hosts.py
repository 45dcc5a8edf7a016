"""Two hosts on one machine: namespaces of network, host name, mounts and processes, with a link of given bandwidth and delay.

    with two_hosts(folder, gbit=1.0, delay=1.0) as hosts:
        subprocess.run([*hosts.inside(0), "partc", "run", ..., "--hostfile", hosts.file, "--", *hosts.options], env=hosts.environment)

The first host has the machine's files; the second sees them too, as by a network file system, but for temporary ones and shared memory,
which are its own, as are its processes. Daemons of Open MPI name their folders by their process ids, which are alike in all namespaces,
so on either host `TMPDIR` is the folder of this pair. Each begins on the other what `hosts.agent` is told, which stands for ssh. The link
is a veth pair with `tc netem`; where the kernel has no netem it is `link.py`. All of it goes when the block ends, or this process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_NAMES = ("first", "second")
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_BEGIN = """
echo {name} > /proc/sys/kernel/hostname
{mounts}
ip link set lo up
export TMPDIR={temporary}
while read -r answer command; do {{ sh -c "$command" < /dev/null && code=0 || code=$?; echo $code > "$answer"; }} & done <> {told} &
echo ready
exec cat
"""
"""A host runs what it is told by its pipe, and ends with its stdin."""
_AGENT = """#!/bin/sh
# stands for ssh: HOST COMMAND..., and ends with the command's exit code
case $1 in
{cases}
*) echo "there is no host $1" >&2; exit 255 ;;
esac
shift
answer=$told.$(readlink /proc/self/ns/pid | tr -dc 0-9).$$
mkfifo "$answer"
echo "$answer $*" > "$told"
read -r code < "$answer"
rm "$answer"
exit "$code"
"""


class Unavailable(Exception):
    """Why this machine does not let a process have namespaces of its own."""


@dataclass(frozen=True)
class TwoHosts:
    """Both hosts while they last."""

    processes: tuple[int, int]
    agent: Path
    temporary: Path
    """The folder of temporary files, another one on each host."""
    link: str
    """What the link is made of."""

    @contextlib.contextmanager
    def cut_off(self) -> Iterator[None]:
        """Each host loses all that it sends to the other one while the block lasts."""
        routes = [(end, f"blackhole {other}") for end, other in zip(self.processes, reversed(_ADDRESSES), strict=True)]
        for end, route in routes:
            _do(end, f"ip route add {route}")
        try:
            yield
        finally:
            for end, route in routes:
                _do(end, f"ip route del {route}")

    def inside(self, host: int) -> list[str]:
        """What begins a command on a host."""
        process = self.processes[host]
        return _enter(process, "-n", "-u", "-m", f"--pid=/proc/{process}/ns/pid_for_children")

    def file(self, slots: int) -> Path:
        """A host file of so many ranks each."""
        path = self.agent.parent / f"hosts{slots}"
        path.write_text("".join(f"{address} slots={slots}\n" for address in _ADDRESSES))
        return path

    def over_both(self, command: Sequence[str], ranks: int) -> list[str]:
        """A command that begins with Open MPI's launcher, begun on the first host with half of its ranks on each.

        Ranks are not bound, since each host would take the same core for its first one.
        """
        launcher, *rest = (word for word in command if word != "--oversubscribe")
        where = ["--hostfile", str(self.file(ranks // 2)), "--bind-to", "none", *self.options]
        return [*self.inside(0), launcher, *where, *rest]

    @property
    def options(self) -> list[str]:
        """Open MPI's options: how it begins processes elsewhere, and that ranks of two hosts send over the link."""
        return ["--prtemca", "plm_ssh_agent", str(self.agent), "--mca", "btl_tcp_if_include", "eth0"]

    @property
    def environment(self) -> dict[str, str]:
        """The environment of commands on either host."""
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return {**os.environ, **root, "TMPDIR": str(self.temporary)}


@contextlib.contextmanager
def two_hosts(folder: Path, gbit: float = 1.0, delay: float = 1.0) -> Iterator[TwoHosts]:
    """Both hosts, with `delay` milliseconds each way; Unavailable with the reason where the machine forbids them."""
    temporary, agent = folder / "temporary", folder / "agent"
    temporary.mkdir()
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(_host(folder, name)) for name in _NAMES)
        hosts = TwoHosts((first, second), agent, temporary, _linked(stack, (first, second), gbit, delay))
        cases = [f"{address}) told={folder / name} ;;" for name, address in zip(_NAMES, _ADDRESSES, strict=True)]
        agent.write_text(_AGENT.format(cases="\n".join(cases)))
        agent.chmod(0o755)
        yield hosts


@contextlib.contextmanager
def _host(folder: Path, name: str) -> Iterator[int]:
    """A host as the process that holds its namespaces."""
    own = [folder / "temporary", "/dev/shm"] if name == _NAMES[1] else []
    mounts = "\n".join(f"mount -t tmpfs tmpfs {place}" for place in own)
    os.mkfifo(folder / name)
    command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    try:
        process = subprocess.Popen(
            [
                *command,
                "sh",
                "-ec",
                _BEGIN.format(name=name, mounts=mounts, temporary=folder / "temporary", told=folder / name),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        raise Unavailable(str(error)) from error
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise Unavailable(f"no namespaces: {process.stderr.read().strip()}")
        yield process.pid
    finally:
        process.communicate(timeout=60)


def _linked(stack: contextlib.ExitStack, ends: tuple[int, int], gbit: float, delay: float) -> str:
    """Joins both hosts; what the link is made of."""
    try:
        first, second = ends
        _do(first, f"ip link add eth0 type veth peer name eth0 netns {second}")
        try:
            for end in ends:
                _do(end, f"tc qdisc add dev eth0 root netem delay {delay}ms rate {gbit}gbit limit 10000")
        except subprocess.CalledProcessError:
            _do(first, "ip link delete eth0")
            return _in_user_space(stack, ends, gbit, delay)
        for end, address in zip(ends, _ADDRESSES, strict=True):
            _do(end, f"ip address add {address}/24 dev eth0")
            _do(end, "ip link set eth0 up")
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{' '.join(error.cmd[-9:])}: {error.stderr.strip()}") from error
    return "a veth pair with netem"


def _in_user_space(stack: contextlib.ExitStack, ends: tuple[int, int], gbit: float, delay: float) -> str:
    joined = [f"{end}:{address}/24" for end, address in zip(ends, _ADDRESSES, strict=True)]
    command = [
        sys.executable,
        str(Path(__file__).with_name("link.py")),
        *joined,
        "--gbit",
        str(gbit),
        "--delay",
        str(delay),
    ]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    stack.callback(process.communicate, timeout=60)
    assert process.stdout is not None
    assert process.stderr is not None
    if process.stdout.readline() != "up\n":
        raise Unavailable(f"the kernel has no netem, and no tun device: {process.stderr.read().strip()[-200:]}")
    return "link.py, since the kernel has no netem"


def _enter(process: int, *namespaces: str) -> list[str]:
    return ["nsenter", "-t", str(process), *namespaces]


def _do(process: int, words: str) -> None:
    """Runs a command with the host's network, and the process ids of this process."""
    subprocess.run([*_enter(process, "-n"), *words.split()], check=True, capture_output=True, text=True)
