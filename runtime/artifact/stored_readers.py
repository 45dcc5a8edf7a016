"""The nodes that may read a stored parameter: those of its own module, and others that the manifest names.

A node of module `layers.1.norm1` reads `layers.1.norm1.weight`; a head that is tied to a table reads that of module `tokens`, which the
manifest says (`StoredUnitRecord.readers`). The compiler writes what `partc check` proves, by the same rule.
"""

from __future__ import annotations

FORMS = ("Cast", "Identity", "Transpose")
"""Ops whose result is the parameter that they read, in another form: its readers are readers of the parameter."""


def is_of_module(path: str, parameter: str) -> bool:
    """Whether the node at this path is in the module that owns the parameter; no node is in that of a parameter without a module."""
    module = parameter.rpartition(".")[0]
    return bool(module) and path.startswith(f"{module}.")
