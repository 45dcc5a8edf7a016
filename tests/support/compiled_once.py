"""Artifacts that several tests compile from the same texts: the first one compiles, the others take a copy."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Hashable
from pathlib import Path

_ARTIFACTS: dict[Hashable, Path] = {}


def compiled_once(out: Path, key: Hashable, compile_into: Callable[[Path], object]) -> Path:
    """Puts the artifact of a key into `out`, which it returns; `compile_into` makes it where no test of this process has done so."""
    if key in _ARTIFACTS:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(_ARTIFACTS[key], out)
    else:
        compile_into(out)
        folder = Path(tempfile.mkdtemp(prefix="partc-test-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _ARTIFACTS[key] = shutil.copytree(out, folder / "build")
    return out
