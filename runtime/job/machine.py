"""The share of its machine that the system gives this process."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

from ..files.regular import text_of_system

_CGROUPS = PurePosixPath("/sys/fs/cgroup")


def usable_cores() -> frozenset[int]:
    """The cores that the system lets this process use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def core_limit() -> int:
    """The whole cores whose time this process may use, at least one: those of `usable_cores`, or fewer where its cgroups limit the time.

    It reads `cpu.max` of version 2, the microseconds of each period for all processes of a cgroup and of those inside of it.
    """
    most = float(len(usable_cores()))
    line = next((one for one in text_of_system("/proc/self/cgroup").splitlines() if one.startswith("0::/")), "")
    own = _CGROUPS / line.removeprefix("0::/")
    for cgroup in (own, *own.parents):
        quota, _, period = text_of_system(str(cgroup / "cpu.max")).strip().partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            most = min(most, int(quota) / int(period))
        if cgroup == _CGROUPS:
            break
    return max(1, int(most))
