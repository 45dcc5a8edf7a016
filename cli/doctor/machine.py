"""Cores, memory, temporary files and limits of this machine, as this process may use them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from partc.cli.doctor.finding import FAULT, NOTE, OK, Finding
from partc.runtime.files.regular import text_of_system
from partc.runtime.files.writers import write_new
from partc.runtime.job.machine import core_limit, usable_cores
from partc.runtime.units import count, size_text

_FEW_FILES = 256
_LOW_MEMORY = 1 << 30
_LOW_DISK = 1 << 28
_SHARED = 16 << 20
"""Bytes of /dev/shm that Open MPI takes for a rank, where it gets them."""


def cores() -> Iterator[Finding]:
    """The cores that this process may use: of the machine, by its affinity, and by limits of its cgroups."""
    there, usable, most = os.cpu_count() or 1, len(usable_cores()), core_limit()
    text = count(there, "core")
    if usable < there:
        text += f", of which this process may use {usable} (affinity)"
    if most < usable:
        text += f", and the time of {most} (cpu.max of its cgroup)"
    if most == 1:
        yield Finding(
            "cores",
            NOTE,
            text,
            "ranks on one host take turns on one core: no plan is faster here than one rank. "
            "Give the container or job more cores, or ranks of their own hosts (--hostfile)",
        )
    else:
        yield Finding("cores", OK, text)
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        yield Finding(
            "cores",
            OK,
            f"OMP_NUM_THREADS={threads}; partc does not read it: a rank has its share of the cores, or --threads",
        )


def memory() -> Iterator[Finding]:
    """Memory that can be had, and /dev/shm, in which Open MPI's processes of one host share memory."""
    lines = dict(line.split(":", 1) for line in text_of_system("/proc/meminfo").splitlines() if ":" in line)
    if "MemAvailable" in lines:
        free = int(lines["MemAvailable"].split()[0]) * 1024
        limits = [
            text_of_system(str(Path("/sys/fs/cgroup") / name)).strip() for name in ("memory.max", "memory.current")
        ]
        if all(one.isdecimal() for one in limits):
            free = min(free, int(limits[0]) - int(limits[1]))
        state = NOTE if free < _LOW_MEMORY else OK
        yield Finding(
            "memory", state, f"{size_text(free)} free", "free some: ranks may be killed" if state == NOTE else ""
        )
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield Finding("shared memory", NOTE, "there is no /dev/shm", "")
        return
    about = shutil.disk_usage(shared)
    about = shutil.disk_usage(shared)
    text = f"/dev/shm has {size_text(about.free)} free of {size_text(about.total)}"
    if not os.access(shared, os.W_OK | os.X_OK):
        yield Finding("shared memory", NOTE, f"{text}; this user may not write there", "chmod 1777 /dev/shm")
    elif about.free < 2 * _SHARED:
        yield Finding(
            "shared memory",
            NOTE,
            f"{text}; Open MPI takes {size_text(_SHARED)} of it for a rank, and warns or is slow where there is less",
            "enlarge it (docker run --shm-size=1g; Kubernetes: an emptyDir of medium Memory), or remove what was left there",
        )
    else:
        yield Finding("shared memory", OK, text)


def temporary() -> Iterator[Finding]:
    """The temporary folder, where each job has its own: writable, not full, and with a path that sockets can have."""
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryDirectory(prefix="partc-doctor-") as name:
            write_new(Path(name, "file"), b"x")
    except OSError as error:
        yield Finding(
            "temporary", FAULT, f"no temporary file can be written: {error}", "set TMPDIR to a folder that can"
        )
        return
    free = shutil.disk_usage(folder).free
    if free < _LOW_DISK:
        yield Finding("temporary", NOTE, f"{folder} has {size_text(free)} free", "free some, or set TMPDIR")
    else:
        yield Finding("temporary", OK, f"{folder}, {size_text(free)} free")


def limits() -> Iterator[Finding]:
    """The system's limits that jobs meet first: open files and processes."""
    with contextlib.suppress(ImportError):
        import resource

        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY and files < _FEW_FILES:
            yield Finding("limits", FAULT, f"{files} open files", f"ulimit -n {4 * _FEW_FILES}")
        else:
            yield Finding("limits", OK, "open files: " + ("any" if files == resource.RLIM_INFINITY else f"{files:,}"))
    changed = sorted(name for name in os.environ if name.startswith("PARTC_"))
    if changed:
        yield Finding("settings", OK, ", ".join(f"{name}={os.environ[name]}" for name in changed))
