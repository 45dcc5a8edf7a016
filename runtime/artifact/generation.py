"""What an artifact says of making tokens: which inputs and outputs they are, and how many sequences of which length its ranks keep."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class GenerationRecord(BaseModel):
    """Names of the program's inputs and outputs, and how many sequences (slots) of which length its ranks keep.

    A step is given `tokens` [slots, n], n at most `chunk`, of which the first `count` [slots] of each sequence are meant, and `position`
    [slots], the number of tokens before these. It gives `next` [slots], the likeliest token behind them, on all ranks, and where `logits`
    is not empty what each token of the vocabulary scores there, [slots, vocabulary], on rank 0. `length`: the most tokens of a sequence.
    `padded`: whether a step may have tokens that are not meant. `stop`: the tokens behind which one ends.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: str
    position: str
    count: str
    next: str
    logits: str = ""
    vocabulary: int = Field(ge=1)
    slots: int = Field(ge=1)
    length: int = Field(ge=2)
    chunk: int = Field(ge=1)
    padded: bool = True
    stop: list[int] = []
