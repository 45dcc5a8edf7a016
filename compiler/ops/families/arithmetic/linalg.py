"""Ops on whole matrices (the last two dims): every other dim is free."""

from __future__ import annotations

from partc.compiler.ops.registry import CONTRIB, op

op("Det", factors="*..->*", remarks="the matrix is replicated")
op("Inverse", domain=CONTRIB, factors="*..->*..", remarks="the matrix is replicated")
