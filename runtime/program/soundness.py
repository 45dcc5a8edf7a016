"""Check that every value of a graph is made exactly once, and before it is used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from partc.runtime.artifact.graph.onnx_graph import op_and_path

from ..errors import ArtifactError

if TYPE_CHECKING:
    from onnx import NodeProto

_SHOWN = 10


def refuse_unsound(
    where: str,
    initializers: Iterable[str],
    inputs: Iterable[str],
    nodes: Iterable[tuple[NodeProto, Sequence[str]]],
    outputs: Iterable[str],
) -> None:
    """ArtifactError that names the first values of the file `where` of which it is not so; `nodes` each with what it reads."""
    makers = dict.fromkeys(initializers, "an initializer")
    problems: list[str] = []

    def make(name: str, maker: str) -> None:
        if name in makers:
            problems.append(f"{where}: the value '{name}' is defined twice, by {makers[name]} and by {maker}")
        makers[name] = maker

    for name in inputs:
        make(name, "a model input")
    for node, needed in nodes:
        problems += [
            f"{where}: {op_and_path(node)} needs the value '{name}', which nothing before it makes"
            for name in dict.fromkeys(needed)
            if name not in makers
        ]
        for name in filter(None, node.output):
            make(name, op_and_path(node))
    problems += [f"{where}: no node makes the output '{name}'" for name in outputs if name not in makers]
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ArtifactError("\n".join([*problems[:_SHOWN], *more, "  help: the file was changed; compile again"]))
