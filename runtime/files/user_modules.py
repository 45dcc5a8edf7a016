"""Finds and unloads the modules next to a user's file, which it imports by name: other folders may have different ones of that name."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from threading import RLock
from types import ModuleType

IMPORTING = RLock()
"""The lock to hold while a user's file runs: the module path, the loaded modules and the import caches belong to the whole process."""
_LIBRARIES = tuple(os.path.join(sysconfig.get_path(kind), "") for kind in ("purelib", "platlib", "stdlib"))


def module_names(folder: Path) -> set[str]:
    """Returns the names of the folder's top-level modules, except those of an installed library."""
    found = {entry.stem for entry in folder.glob("*.py")} | {
        entry.parent.name for entry in folder.glob("*/__init__.py")
    }
    return {name for name in found if name not in sys.stdlib_module_names and not _is_library(sys.modules.get(name))}


def is_imported_from(module: ModuleType | None, below: str) -> bool:
    """Whether the module was imported from a folder or one of its subfolders; `below` is the folder's path with a trailing separator."""
    if origin := getattr(module, "__file__", None):
        if not origin.startswith(below):  # checked first: few of the process's modules are in the folder
            return False
    elif not any(os.path.join(place, "").startswith(below) for place in getattr(module, "__path__", ())):
        return False
    return not _is_library(module) and (getattr(module, "__name__", None) or "").split(".")[0] not in (
        "partc",
        "__main__",
    )


def forget_namesakes(folder: Path) -> None:
    """Unloads modules of other folders that have the names of the folder's own modules, so that these can be imported."""
    own, below = module_names(folder), os.path.join(folder, "")
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in own and not is_imported_from(module, below):
            sys.modules.pop(name, None)


def _is_library(module: ModuleType | None) -> bool:
    origin = getattr(module, "__file__", None)
    return origin is not None and origin.startswith(_LIBRARIES)
