"""The section `generate` of a proposed plan.

The rest of such a plan is proposed for the model as it is, with past and present as inputs and outputs: what makes a cache lies where the
cache does. It says nothing of inputs and outputs, whose sizes `generate` fixes.
"""

from __future__ import annotations

from dataclasses import dataclass

from partc.compiler.plan.generate import DEFAULT_CHUNK


@dataclass(frozen=True)
class Generation:
    """How long the sequences are that a decoder makes, and how many at once."""

    length: int
    slots: int

    @property
    def line(self) -> str:
        """As a plan says it."""
        chunk = f", chunk: {self.length}" if self.length < DEFAULT_CHUNK else ""
        return f"generate: {{slots: {self.slots}, length: {self.length}{chunk}}}"
