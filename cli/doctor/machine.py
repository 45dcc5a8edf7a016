"""Checks cores, memory, temporary files and limits of this machine, as this process may use them, onnxruntime, and Python packages.

The result of a check of the machine or the installation, with its remedy.

Checks the MPI library that mpi4py loads, the launcher that partc uses, whether they match, and whether two ranks connect.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from partc.cli.launch.launcher import Hosts, Kind, Launcher, command_line, find_launcher, launch_environment
from partc.cli.launch.run_dir import RunDir
from partc.runtime.communication.nccl import gpu
from partc.runtime.devices.devices import Device, gpus
from partc.runtime.errors import UsageError
from partc.runtime.files.regular import text_of_system
from partc.runtime.files.writers import write_new
from partc.runtime.job.machine import core_limit, usable_cores
from partc.runtime.job.place import inherited_variables, is_launched, surrounding_job
from partc.runtime.units import count, size_text

OK, NOTE, FAULT = "ok", "note", "fault"
"""OK: as it should be. NOTE: it works, but less well than it could. FAULT: something that partc does fails because of it."""
SECONDS = 20.0
"""The time limit of a program that is asked for its version or its devices."""


@dataclass(frozen=True)
class Finding:
    """The result of one check: `about` is a word for the first column, `state` is OK, NOTE or FAULT.

    `remedy` is a sentence for the machine's administrator, empty where there is nothing to do.
    """

    about: str
    state: str
    text: str
    remedy: str = ""


def output_of(
    command: Sequence[str], seconds: float = SECONDS, environment: Mapping[str, str] | None = None
) -> tuple[bool, str]:
    """Runs a program; returns whether it succeeded within `seconds`, and a text.

    The text is its stdout, or after a failure the last line of its stderr, or the reason.
    """
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {seconds:g} s"
    except OSError as error:
        return False, str(error)
    if ended.returncode == 0:
        return True, ended.stdout.strip()
    lines = [line.strip() for line in (ended.stderr or ended.stdout).splitlines() if any(map(str.isalnum, line))]
    return False, lines[-1] if lines else f"exit code {ended.returncode}"


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
    if there and begins:
        _, lacks = gpu(Device("cuda"))
        told = f"between GPUs values go through the host: {lacks}" if lacks else "it carries values between GPUs"
        yield Finding("NCCL", NOTE if lacks else OK, told, 'pip install "partc[nccl]"' if lacks else "")


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


_LIBRARY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__)
print(MPI.Get_library_version())
"""
_INSTALL = (
    'pip install "partc[mpi]" installs a library and its launcher into this environment; --in-process needs neither'
)
_VARIABLES = {"OMPI_COMM_WORLD_SIZE": Kind.OPEN_MPI, "PMI_SIZE": Kind.HYDRA}
"""Maps the environment variable in which a launcher gives a process the number of ranks to the launcher's family."""
_RANKS = 2
_FAMILIES = (
    (r"Open MPI\)? v?(\d+(?:\.\d+)+)", Kind.OPEN_MPI),
    (r"(?:PRRTE|OpenRTE)\)? v?(\d+(?:\.\d+)+)", Kind.OPEN_MPI),
    (r"MPICH Version:\s*(\d+(?:\.\d+)+)", Kind.HYDRA),
    (r"HYDRA build details:\s*Version:\s*(\d+(?:\.\d+)+)", Kind.HYDRA),
    (r"Intel\(R\) MPI Library.*?(\d+(?:\.\d+)+)", Kind.HYDRA),
    (r"slurm (\d+(?:\.\d+)+)", Kind.SLURM),
)
"""Patterns of the text that a library or launcher prints about itself, each with its family; the group is the version."""


@dataclass(frozen=True)
class _Named:
    """A library or launcher: its family, None where its text is not recognized, and its version, `major.minor`."""

    kind: Kind | None
    version: str

    def __str__(self) -> str:
        return f"{self.kind.value if self.kind else 'unknown MPI'} {self.version}".rstrip()


def _named(text: str) -> _Named:
    for pattern, kind in _FAMILIES:
        if found := re.search(pattern, text, re.DOTALL):
            return _Named(kind, found[1])
    return _Named(None, "")


def mpi() -> Iterator[Finding]:
    """Checks library, launcher, their match, and a job of two ranks on this host."""
    good, text = output_of([sys.executable, "-P", "-W", "ignore", "-c", _LIBRARY])
    library = _named(text) if good else None
    if library is None:
        yield Finding("MPI library", FAULT, f"mpi4py cannot load one: {text}", _INSTALL)
    else:
        version = text.partition("\n")[0]
        yield Finding("MPI library", OK, f"{library}, by mpi4py {version}")
        yield from _surrounding(library)
    try:
        launcher = find_launcher(_RANKS)
    except UsageError as error:
        yield Finding("launcher", FAULT, str(error).splitlines()[0], _INSTALL)
        return
    good, text = output_of([launcher.path, "--version"])
    if not good:
        yield Finding("launcher", FAULT, f"{launcher.path} --version: {text}", _INSTALL)
        return
    starts = _named(text)
    yield Finding("launcher", OK, f"{launcher.path}, {starts}")
    if library is None:
        return
    # srun starts ranks of any library, and an unknown kind cannot be checked
    is_known = None not in (library.kind, starts.kind) and starts.kind is not Kind.SLURM
    if is_known and library.kind is not starts.kind:
        yield Finding(
            "launcher",
            FAULT,
            f"{launcher.path} is of {starts}, mpi4py loads {library}: each process would be a job of its own",
            f"take the launcher of the library that mpi4py loads: put its folder first in PATH, or {_INSTALL}",
        )
        return
    yield from _meeting(launcher)


def _surrounding(library: _Named) -> Iterator[Finding]:
    """Checks the launcher that started this process: whether it belongs to another MPI than the library."""
    place = surrounding_job(os.environ)
    if place is not None and not is_launched():
        fact, _, help = inherited_variables(os.environ, place).partition("\n  help: ")
        yield Finding("launcher", FAULT, fact, help)
        return
    if place is None or "SLURM_PROCID" in os.environ or place.variable not in _VARIABLES:
        return
    if library.kind not in (None, _VARIABLES[place.variable]):
        yield Finding(
            "launcher",
            FAULT,
            f"this process was started by that of {place.launcher}, mpi4py loads {library}",
            f"take the launcher of the library that mpi4py loads, or start partc without one; {_INSTALL}",
        )


def _meeting(launcher: Launcher) -> Iterator[Finding]:
    """Checks whether two ranks start, connect, and share memory."""
    with RunDir(_RANKS) as run_dir:
        program = [sys.executable, "-P", "-m", "partc.cli.doctor.ranks", str(run_dir.folder)]
        command = command_line(launcher, _RANKS, Hosts(), (), program)
        if launcher.kind is Kind.OPEN_MPI and "--oversubscribe" not in command:
            command.insert(1, "--oversubscribe")
        begun = time.monotonic()
        environment = {**launch_environment(launcher, run_dir.folder, run_dir.memory), "TMPDIR": str(run_dir.folder)}
        good, text = output_of(command, _START, environment)
        seconds = time.monotonic() - begun
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not good or not lines:
        yield Finding(
            "two ranks",
            FAULT,
            f"they did not begin: {text}",
            f"run `{launcher.path} -n 2 hostname` to see what the launcher itself says; {_INSTALL}",
        )
        return
    report = json.loads(lines[0])
    if report["ranks"] != _RANKS:
        yield Finding(
            "two ranks",
            FAULT,
            f"each found itself alone: {launcher.path} is not of the library that mpi4py loads",
            f"put the library's own launcher first in PATH, or {_INSTALL}",
        )
        return
    yield Finding(
        "two ranks", OK, f"met, and ended after {seconds:.1f} s; an exchange takes {report['seconds'] * 1e6:.0f} us"
    )
    if report["mpi_alone"]:
        if "PARTC_" in report["mpi_alone"]:
            remedy = "unset it"
        elif os.path.exists("/.dockerenv"):
            remedy = "allow memfd_create, futex and /proc/PID/fd in the container (its seccomp profile), or run all ranks in one container"
        else:
            remedy = "slower, and right: messages and sums go over MPI"
        yield Finding("two ranks", NOTE, f"they share no memory but MPI's: {report['mpi_alone']}", remedy)
