"""A link between two network namespaces in user space, for kernels without `tc netem`: a bandwidth and a delay for each direction.

    python link.py 4711:10.77.0.1/24 4712:10.77.0.2/24 --gbit 1 --delay 1

Each namespace, given by a process of it, gets an interface `eth0`, a tun device. What one sends reaches the other after the time that its
bits take and the delay. As on a network card the sender finds a full queue: no more than a millisecond of bits is taken from it ahead.
Segments cross as TCP makes them, up to 64 KB (the header of virtio goes along), as over a veth pair. It ends when its stdin does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_TUN, _NO_INFO, _VNET_HEADER = 0x0001, 0x1000, 0x4000
_CHECKSUMS, _TSO4, _TSO6 = 0x01, 0x02, 0x04
_HEADER = 10
_AHEAD = 1e-3
_LARGEST = 1 << 17
_NETWORK = 0x40000000


def tun(process: int, address: str) -> int:
    """A tun device in the network namespace of a process; its file is used from here."""
    with open(f"/proc/{process}/ns/net") as there, open("/proc/self/ns/net") as here:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(there.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TUN | _NO_INFO | _VNET_HEADER))
        fcntl.ioctl(file, _TUNSETVNETHDRSZ, struct.pack("i", _HEADER))
        fcntl.ioctl(file, _TUNSETOFFLOAD, _CHECKSUMS | _TSO4 | _TSO6)
        for words in (f"address add {address} dev eth0", "link set eth0 txqueuelen 5000 up"):
            subprocess.run(["ip", *words.split()], check=True)
        libc.setns(here.fileno(), _NETWORK)
    return file


class Direction:
    """What is on its way from one device to the other."""

    def __init__(self, source: int, target: int, rate: float, delay: float) -> None:
        self.source, self.target, self.rate, self.delay = source, target, rate, delay
        self.free = 0.0
        self.under_way: deque[tuple[float, bytes]] = deque()

    def take(self, now: float) -> None:
        """Takes what is sent, up to the queue's length."""
        while self.free < now + _AHEAD:
            try:
                packet = os.read(self.source, _LARGEST)
            except BlockingIOError:
                return
            self.free = max(self.free, now) + (len(packet) - _HEADER) / self.rate
            self.under_way.append((self.free + self.delay, packet))

    def give(self, now: float) -> None:
        """Gives what has come."""
        while self.under_way and self.under_way[0][0] <= now:
            os.write(self.target, self.under_way.popleft()[1])

    def next(self, now: float) -> float:
        """When there is something to do although nothing new is sent."""
        times = [self.under_way[0][0]] if self.under_way else []
        return min([*times, self.free - _AHEAD] if self.free > now + _AHEAD else times, default=now + 60.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ends", nargs=2)
    parser.add_argument("--gbit", type=float, required=True)
    parser.add_argument("--delay", type=float, required=True, help="milliseconds each way")
    options = parser.parse_args()
    first, second = (tun(int(process), address) for process, _, address in (end.partition(":") for end in options.ends))
    rate, delay = options.gbit * 1e9 / 8, options.delay / 1e3
    both = [Direction(first, second, rate, delay), Direction(second, first, rate, delay)]
    with contextlib.suppress(OSError):
        # As the kernel's own work it is not held up by who computes.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print("up", flush=True)
    stdin = sys.stdin.fileno()
    while True:
        now = time.monotonic()
        for one in both:
            one.take(now)
            one.give(now)
        now = time.monotonic()
        wait = max(0.0, min(one.next(now) for one in both) - now)
        ready = [one.source for one in both if one.free <= now + _AHEAD]
        if stdin in select.select([stdin, *ready], [], [], wait)[0] and not os.read(stdin, 1):
            return


if __name__ == "__main__":
    main()
