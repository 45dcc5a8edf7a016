"""What an artifact says of making tokens: which inputs and outputs they are, and how many sequences of which length its ranks keep."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class GenerationRecord(BaseModel):
    """The program takes `tokens` [slots, n], n at most `chunk`, and `position` [slots], the number of tokens before those of each sequence.

    It gives `logits` [slots, n, vocabulary]. `length`: the most tokens of a sequence. `stop`: the tokens behind which one ends.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: str
    position: str
    logits: str
    slots: int = Field(ge=1)
    length: int = Field(ge=2)
    chunk: int = Field(ge=1)
    stop: list[int] = []
