"""Lines of a plan that decide for no node, since later lines match all that they do: mostly exceptions that stand before the general line.

placement: {conv1: 0, "**": 1}      conv1 runs on rank 1, and rank 0 has nothing to do
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Protocol

import onnx_ir as ir
from partc.compiler.ir.program import Annotated
from partc.compiler.ir.training import ProgramKind
from partc.compiler.matching import matched_nodes


class _Line(Protocol):
    @property
    def pattern(self) -> str: ...
    @property
    def where(self) -> str: ...


def shadowed_lines(program: Annotated) -> Iterator[str]:
    """A warning for each line of `placement`, `target` and of styles in `sharding` that decides for no node."""
    plan = program.plan
    if program.kind is ProgramKind.STEP:
        yield from _of(program, "placement", [rule for rule in plan.placement if not rule.serves])
        yield from _of(program, "target", plan.target)
        yield from _of(program, "sharding", [rule for rule in plan.sharding if rule.style])


def _of(program: Annotated, key: str, lines: Sequence[_Line]) -> Iterator[str]:
    hits = [matched_nodes(program, line.pattern) for line in lines]
    decided: dict[ir.Node, int] = {node: k for k, hit in enumerate(hits) for node in hit}
    for k, (line, hit) in enumerate(zip(lines, hits, strict=True)):
        later = dict.fromkeys(decided[node] for node in hit)
        if hit and k not in later:
            names = ", ".join(f"'{lines[at].pattern}' ({PurePath(lines[at].where).name})" for at in later)
            yield (
                f"{line.where}: {key} of '{line.pattern}' decides nothing: {names} matches all that it does, and the last match wins\n"
                "  help: write general lines first, then exceptions"
            )
