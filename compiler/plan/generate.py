"""The plan's `generate`: a decoder with past and present keeps its caches, and generates tokens.

generate: {slots: 8, length: 4096, chunk: 64, memory: 4GB, stop: [2]}
"""

from __future__ import annotations

from typing import ClassVar, Literal

from partc.compiler.plan.adapters import MOST_RANK
from partc.compiler.plan.document import PlacedOptions
from partc.runtime.artifact.generation import Lookup, RequestDefaults
from partc.runtime.options import ByteCount, Refused
from pydantic import Field, model_validator

MOST_SLOTS, MOST_TOKENS, DEFAULT_CHUNK = 1 << 12, 1 << 24, 64


def multiples_beside(size: int, count: int) -> str:
    """Returns the multiples of `count` next to a size, as text: `4 or 8`."""
    below = size // count * count
    return " or ".join(str(one) for one in (below, below + count) if one)


class GenerateRules(PlacedOptions):
    """How many sequences at once, and how long."""

    KEY: ClassVar[str] = "generate"

    slots: int = Field(1, ge=1, le=MOST_SLOTS, description="Sequences at once.")
    length: int = Field(ge=2, le=MOST_TOKENS, description="The most tokens of a sequence, prompt and answer together.")
    groups: int = Field(
        1,
        ge=1,
        le=MOST_SLOTS,
        description="In how many groups slots take turns: as many as stages.",
    )
    chunk: int = Field(
        DEFAULT_CHUNK,
        ge=1,
        le=MOST_TOKENS,
        description="The most tokens of a prompt in one step.",
    )
    sampling: bool = Field(
        True,
        description="Whether tokens can be drawn from their logits.",
    )
    embeddings: Literal["mean", "last"] | None = Field(
        None,
        description="What an embedding is of the inputs of the head: their mean over a prompt, or the last; null: none are made.",
    )
    adapters: int = Field(
        0,
        ge=0,
        le=MOST_SLOTS,
        description="Adapters for which there is room, those of the plan included: others are loaded while it serves.",
    )
    adapter_rank: int = Field(
        16,
        ge=1,
        le=MOST_RANK,
        description="The largest rank of an adapter for which there is room.",
    )
    draft: Lookup | None = Field(
        None,
        description="Tokens are looked up in a sequence's own text, and one step verifies them; null: none are.",
    )
    memory: ByteCount = Field(
        None,
        description="The most memory of a rank, as `partc inspect` states it; null: no limit.",
    )
    cache: Literal["int8"] | None = Field(
        None,
        description="int8: keys and values in a quarter of the bytes of float32, rounded; null: in the model's type.",
    )
    encoder_length: int | None = Field(
        None,
        ge=1,
        le=MOST_TOKENS,
        description="The most tokens that an encoder is given.",
    )
    start: list[int] = Field(
        [],
        description="The tokens with which its decoder begins.",
    )
    stop: list[int] | None = Field(
        None,
        description="The tokens behind which a sequence ends; null: those of the model's configuration.",
    )
    defaults: RequestDefaults | None = Field(
        None,
        description="Options of requests that do not say them; null: those of the model's configuration.",
    )

    @model_validator(mode="after")
    def _fits(self) -> GenerateRules:
        if self.slots % self.groups:
            fact = f"{self.slots} slots are not {self.groups} equal groups"
            near = multiples_beside(self.slots, self.groups)
            raise Refused(fact, help=f"write slots: {near}, or other 'groups'", key="groups")
        if not self.sampling and self.defaults is not None and self.defaults.options:
            fact = "'defaults' ask for logits, and 'sampling: false' has none"
            raise Refused(fact, help="write 'sampling: true', or 'defaults: {}'", key="defaults")
        if self.draft is not None and self.draft.tokens >= self.chunk:
            fact = f"a step of {self.draft.tokens} drafted tokens and the one before them is longer than a chunk, {self.chunk}"
            law = "a cache has room for a chunk after its last entry"
            raise Refused(f"{fact}: {law}", help="choose a larger 'chunk', or fewer 'tokens' of 'draft'", key="draft")
        if self.chunk > self.length:
            fact = f"a chunk of {self.chunk} tokens is longer than a sequence, {self.length}"
            raise Refused(fact, help="choose a smaller 'chunk', or a larger 'length'", key="chunk")
        return self

    @property
    def rows(self) -> int:
        """The slots of a group, which a step computes."""
        return self.slots // self.groups
