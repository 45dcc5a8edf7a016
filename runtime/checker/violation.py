"""One broken promise of an artifact, as the checker reports it: file, node, source path, the fact and the remedy.

rank_0001.onnx: Recv 'conv1.y' (conv1): tag 4 has no Send on rank 0
  help: compile the model again
"""

from __future__ import annotations

from dataclasses import dataclass

from partc.runtime.errors import one_line, printable


@dataclass(frozen=True)
class Violation:
    """`file` is relative to the artifact; `node` is an op and its name, `path` its place in the model, or empty."""

    file: str
    fact: str
    node: str = ""
    path: str = ""
    help: str = ""

    def __str__(self) -> str:
        source = f" ({self.path})" if self.path else ""
        where = one_line(f"{self.file}: {self.node}{source}" if self.node else f"{self.file}{source}")
        text = f"{where}: {self.fact}"
        return printable(f"{text}\n  help: {self.help}" if self.help else text)
