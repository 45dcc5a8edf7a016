"""The section `generate` of a proposed plan.

The rest of such a plan is proposed for the model as it is, with past and present as inputs and outputs: what makes a cache lies where the
cache does. It says nothing of inputs and outputs, whose sizes `generate` fixes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import onnx_ir as ir
from partc.compiler.plan.generate import DEFAULT_CHUNK
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.rewrite.generation.encoder import takes_any_length


@dataclass(frozen=True)
class Generation:
    """How long the sequences are that a decoder makes, how many at once, in how many groups these take turns, and the most entries of an
    encoder before it, where it takes any number.
    """

    length: int
    slots: int
    groups: int = 1
    encoder_length: int | None = None

    @classmethod
    def over(cls, degrees: Degrees, length: int, slots: int | None) -> Generation:
        """As many groups as stages, where they divide the slots, of which there is one for each group and replica unless they are given."""
        slots = slots or degrees.dp * degrees.stages
        return cls(length, slots, degrees.stages if slots % (degrees.dp * degrees.stages) == 0 else 1)

    def of_model(self, graph: ir.Graph) -> Self:
        """With as many entries of an encoder as tokens, where the model's takes any number."""
        return replace(self, encoder_length=self.length) if takes_any_length(graph) else self

    @property
    def line(self) -> str:
        """As a plan says it."""
        chunk = f", chunk: {self.length}" if self.length < DEFAULT_CHUNK else ""
        groups = f", groups: {self.groups}" if self.groups > 1 else ""
        encoder = "" if self.encoder_length is None else f", encoder_length: {self.encoder_length}"
        return f"generate: {{slots: {self.slots}, length: {self.length}{encoder}{groups}{chunk}}}"
