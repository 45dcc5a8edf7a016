"""Checks cores, memory, temporary files and limits of this machine, as this process may use them, onnxruntime, and Python packages."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from partc.cli.doctor.finding import FAULT, NOTE, OK, Finding, output_of
from partc.runtime.devices.devices import gpus
from partc.runtime.files.regular import text_of_system
from partc.runtime.files.writers import write_new
from partc.runtime.job.machine import core_limit, usable_cores
from partc.runtime.units import count, size_text

_FEW_FILES = 256
_LOW_MEMORY = 1 << 30
_LOW_DISK = 1 << 28
_SHARED = 16 << 20
"""Bytes of /dev/shm that Open MPI takes for each rank, where they are available."""


def cores() -> Iterator[Finding]:
    """Checks the cores that this process may use: those of the machine, of its affinity, and of its cgroups' limits."""
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
    """Checks the available memory, and /dev/shm, in which Open MPI's processes of one host share memory."""
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
    """Checks the temporary folder, where each job has its own: it must be writable, not full, and have a path short enough for sockets."""
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
    """Checks the system's limits that jobs reach first: open files and processes."""
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


_ASK = """
import json, onnxruntime
onnxruntime.set_default_logger_severity(4)
{preload}
from onnx import TensorProto, helper
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "one", [x], [y])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
used, error = [], ""
try:
    used = onnxruntime.InferenceSession(model.SerializeToString(), providers=["{provider}"]).get_providers()
except Exception as problem:
    error = (str(problem).splitlines() or [""])[0]
known = onnxruntime.get_available_providers()
print(json.dumps({"version": onnxruntime.__version__, "known": known, "used": used, "error": error}))
"""
_START = 60.0
_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
_LIBRARIES = "pip install onnxruntime-gpu[cuda,cudnn], or CUDA and cuDNN of the versions that it needs"


def providers() -> Iterator[Finding]:
    """Checks whether onnxruntime loads, which providers it has, and whether a session starts on the system's GPUs."""
    there = gpus()
    wanted = _CUDA if there else _CPU
    program = _ASK.replace("{provider}", wanted).replace("{preload}", "onnxruntime.preload_dlls()" if there else "")
    good, text = output_of([sys.executable, "-P", "-c", program], _START)
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not good or not lines:
        remedy = "pip install --force-reinstall onnxruntime-gpu, or onnxruntime where there is no such wheel"
        yield Finding("onnxruntime", FAULT, f"it cannot be loaded: {text}", remedy)
        return
    report = json.loads(lines[-1])
    begins = wanted in report["used"]
    if begins or wanted == _CUDA:
        yield Finding("onnxruntime", OK, f"{report['version']}, {', '.join(report['known'])}")
    else:
        yield Finding("onnxruntime", FAULT, f"no session begins: {report['error']}", "reinstall onnxruntime")
    if there and not begins:
        has = _CUDA in report["known"]
        why = f"a session does not begin there: {report['error'] or 'its libraries are missing'}"
        text = f"{count(there, 'GPU')}; " + (why if has else f"onnxruntime has no {_CUDA}")
        remedy = _LIBRARIES if has else "pip uninstall onnxruntime, then pip install onnxruntime-gpu"
        yield Finding("GPU", NOTE, text, f"{remedy}; until then run with --device cuda=cpu")
    else:
        yield Finding(
            "GPU", OK, f"{count(there, 'GPU')} usable" if there else "none; --device cuda=cpu stands in for one"
        )


_TWINS = ("onnxruntime", "onnxruntime-gpu")
"""Distributions that install the same modules: the later one overwrites the other's files."""


def python() -> Iterator[Finding]:
    """Checks the interpreter: its version and whether it has 64 bits."""
    needed = metadata.metadata("partc")["Requires-Python"] or ""
    version = platform.python_version()
    where = f"{platform.python_implementation()} {version}, {sys.executable}"
    if Version(version) not in SpecifierSet(needed, prereleases=True):
        yield Finding("python", FAULT, where, f"partc needs Python {needed}")
    elif sys.maxsize < 2**32:
        yield Finding("python", FAULT, f"{where}, 32 bits", "install a Python of 64 bits: onnxruntime has no other")
    else:
        yield Finding("python", OK, where)


def packages() -> Iterator[Finding]:
    """Checks all packages at once: missing or outdated ones, optional ones that are absent, and two onnxruntimes in one environment."""
    missing, old, there = [], [], []
    for need in map(Requirement, metadata.requires("partc") or ()):
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        installed = _version(need.name)
        if installed is None:
            missing.append(need)
        elif installed not in need.specifier:
            old.append((need, installed))
        else:
            there.append(f"{need.name} {installed}")
    if missing or old:
        wrong = [f"{one.name} is missing" for one in missing]
        wrong += [f"{one.name} is {found}, tested is {one.specifier}" for one, found in old]
        wanted = [f'"{one.name}{one.specifier}"' for one in (*missing, *(one for one, _ in old))]
        yield Finding("packages", FAULT, "; ".join(wrong), f"pip install {' '.join(wanted)}")
    if there:
        yield Finding("packages", OK, ", ".join(there))
    twins = [name for name in _TWINS if _version(name) is not None]
    if len(twins) > 1:
        yield Finding(
            "packages",
            FAULT,
            " and ".join(twins) + " are both installed: the later one has overwritten files of the other",
            f"pip uninstall {' '.join(twins)}, then install the one that is needed",
        )
    if _version("torch") is None:
        yield Finding(
            "packages", NOTE, "torch is not installed", 'pip install "partc[torch]" for models that are torch modules'
        )


def _version(name: str) -> Version | None:
    try:
        return Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        return None
