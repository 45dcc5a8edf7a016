"""Python and the packages that partc needs, each against the lowest version with which it was tested."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from partc.cli.doctor.finding import FAULT, NOTE, OK, Finding

_TWINS = ("onnxruntime", "onnxruntime-gpu")
"""Distributions that install the same modules, the later one over the other's files."""


def python() -> Iterator[Finding]:
    """The interpreter: its version and whether it has 64 bits."""
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
    """What is missing or older than tested, all at once; optional packages that are not there; two onnxruntimes in one place."""
    missing, old, there = [], [], []
    for need in map(Requirement, metadata.requires("partc") or ()):
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        found = _version(need.name)
        if found is None:
            missing.append(need)
        elif found not in need.specifier:
            old.append((need, found))
        else:
            there.append(f"{need.name} {found}")
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
