"""The resources of the machine that this process may use."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

from ..files.regular import text_of_system

_CGROUPS = PurePosixPath("/sys/fs/cgroup")


def usable_cores() -> frozenset[int]:
    """Returns the numbers of the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def core_limit() -> int:
    """Returns the number of cores whose time this process may use: those of `usable_cores`, or fewer, at least one, if cgroups limit it.

    It reads `cpu.max` of cgroups version 2: the microseconds in each period that all processes of a cgroup and of its descendants may use.
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
