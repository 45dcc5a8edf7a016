"""The release of partc, with which its files are marked."""

from __future__ import annotations

import functools
from importlib.metadata import version


@functools.cache
def release() -> str:
    """The installed version: `0.1.0`. Looking it up parses the package's metadata, which takes longer than to write a small rank file."""
    return version("partc")
