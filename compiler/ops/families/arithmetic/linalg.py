"""Ops on matrices, each of which is one problem: every other dim is free."""

from __future__ import annotations

from partc.compiler.ops.registry import CONTRIB, op

op("Det", factors="*..->*", remarks="the matrix is replicated")
op("Inverse", domain=CONTRIB, factors="*..->*..", remarks="the matrix is replicated")
