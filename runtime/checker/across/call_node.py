"""A collective or lookup node of one rank, with the types its file declares: the subject of the checks across ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from partc.runtime.artifact.comm.collective_node import AnyCall, CollectiveCall
from partc.runtime.checker.graph.declared import ValueType
from partc.runtime.errors import Violation

AGAIN = "compile the model again"
"""The remedy for problems that only a compiler fault or an edited file can cause."""


@dataclass(frozen=True)
class CallNode:
    """A collective or lookup node of a rank, with the types that the file declares of its input and output.

    The values of a coalesced node are sent as one vector: `input` and `output` are then the types of that vector, and `parts` has the types
    of each value's input and output. `looked_up`: a lookup's values with their types.
    """

    call: AnyCall
    rank: int
    file: str
    title: str
    input: ValueType | None
    output: ValueType | None
    parts: tuple[tuple[ValueType | None, ValueType | None], ...] = ()
    looked_up: tuple[tuple[str, ValueType | None], ...] = ()

    @property
    def collective(self) -> CollectiveCall:
        """The call, which must be that of a collective."""
        assert isinstance(self.call, CollectiveCall)
        return self.call

    def on(self, rank: int, file: str) -> CallNode:
        """The same node on another rank, whose file has the same nodes."""
        return self if rank == self.rank else replace(self, rank=rank, file=file)

    def violation(self, fact: str, help: str = AGAIN) -> Violation:
        """A violation at this node."""
        return Violation(self.file, f"on rank {self.rank}: {fact}", self.title, self.call.path, help)

    def __str__(self) -> str:
        return f"{self.title} of group '{self.call.group}', tag {self.call.tag}"
