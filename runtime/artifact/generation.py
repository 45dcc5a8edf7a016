"""The artifact's record of generation: the inputs and outputs of its steps, and the number and length of the sequences that its ranks keep.

Two programs run over the same caches. `decode`, the main one, makes one token for every slot. `prefill` reads a chunk of the prompt of one
slot: one in each of `runs` equal runs, if slots are dealt out to ranks. In its files a cache has `runs` slots in place of all slots, one on
each rank, and a step binds the row of the slot that it is given.

An encoder before a decoder is a third program, `encode`, for one slot of each run, as a prefill. It writes the complete caches of keys and
values that the decoder's layers make of its output; the other two programs read them, up to the slot's number of entries, and never write
them.

Narrow programs, `prefill_16` or `decode_2`, are the same with fewer tokens of a chunk, or fewer slots of each run: a step binds the rows of
the slots that it is given, one after the other.

With drafts (`draft`) a further program, `draft_5`, is given the last token of one slot of each run and up to four that may follow it, and
scores all of them; `draft_2` is for one draft or none. They make all tokens but the first of an answer, whether there are drafts or not:
kernels of attention compute the same bits for any number of tokens but one.

If slots take turns in several `groups`, each group has the same number of slots of every run, one after the other: in the files of decode a
cache has the slots of one group, and a step binds the rows of the group that it is given. `next` also stays where it is made, so that the
first of several stages continues with another group, while the last one works on this group.

The law of rows: a row of a step reads and writes only the row of its own slot. It writes from the slot's position on, and entries there are
not read until a later step of that slot has written them again. So a row without a part in a step (a free slot, or one whose prompt is
being read while others decode; a run without a prompt) gets its slot's position and any token, and changes nothing that is ever read. A
state (`states`) has no entries by token: it is zeros if a step's position is 0, and a row without a token leaves it unchanged.
"""

from __future__ import annotations

from typing import Any, Literal

from partc.runtime.options import Options
from pydantic import BaseModel, ConfigDict, Field

DECODE, PREFILL, ENCODE, DRAFT = "decode", "prefill", "encode", "draft"
"""Names of a decoder's programs: one token of every slot, a chunk of a prompt of one slot, the encoder on the input of one slot, and a
token of one slot with those drafted after it.
"""


def narrow(kind: str, size: int) -> str:
    """Returns the name of a program of a size: a prefill or a draft of `size` tokens, or a decode of `size` slots of each run."""
    return f"{kind}_{size}"


def kind_and_size(name: str) -> tuple[str, int]:
    """Returns the kind of a decoder's program, and the size of a narrow one; 0 for others."""
    kind, _, size = name.partition("_")
    return (kind, int(size)) if size.isdecimal() else (name, 0)


def binds_rows(name: str) -> bool:
    """Whether a step of a program binds the rows of the slots that it is given, in place of all slots."""
    kind, size = kind_and_size(name)
    return kind in (PREFILL, ENCODE, DRAFT) or (kind == DECODE and size > 0)


def room_for_entries(length: int, chunk: int, cut: int) -> int:
    """Returns the entries of a slot in a rank's shard of a cache that `cut` ranks share.

    A step writes a whole chunk, even for fewer tokens, so there is room for one at the end. Where several ranks share a cache, block k of a
    chunk of its entries is on rank k modulo `cut`; a shard has whole blocks, and a spare one for what is appended on other ranks.
    """
    return length + chunk - 1 if cut == 1 else (-(-length // (cut * chunk)) + 1) * chunk


class EmbeddingRecord(BaseModel):
    """The output [slots, width] of each program with the input of the head: of a slot's last token, or the sum over its tokens."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)

    output: str
    width: int = Field(ge=1)
    pooling: Literal["mean", "last"]


class Lookup(Options):
    """Drafts by look-up: the tokens that followed the last occurrence of a sequence's last tokens are taken for the next ones."""

    tokens: int = Field(4, ge=1, le=64, description="The most tokens that a step verifies besides the one before them.")
    lookup: int = Field(
        3, ge=1, le=16, description="The most last tokens that are looked up; where they do not occur, fewer."
    )


class DraftRecord(Lookup):
    """The look-up of drafts, and the input of a step that has the numbers [rows, n] of each slot's tokens that are scored.

    n is 1 for a decode or prefill. `next` and `logits` have n times as many rows, those of a slot one after the other.
    """

    scored: str

    @property
    def sizes(self) -> list[int]:
        """The tokens of its programs' steps: two, for steps without drafts or with one, and those of all drafts and the one before them."""
        return sorted({2, self.tokens + 1})


class StepPorts(BaseModel):
    """Names of the programs' inputs and outputs.

    A step of decode is given `tokens` [slots, 1], of which the first `count` [slots] of each slot are meant, one or none, and `position`
    [slots], the number of tokens before these. It gives `next` [slots], the likeliest token behind them, on all ranks, and where `logits`
    is not empty what each token of the vocabulary scores there, [slots, vocabulary], in shards where it is made. A step of prefill has
    [runs, n] tokens, n at most `chunk`. Where slots take turns, those of a decode are the slots of one group. Where `adapter` is not empty
    a step is given there the number of each slot's adapter, 0 for none and 1 for the first. `embedding`: what a step gives of the prompts
    that it reads; None where it gives tokens alone. `draft`: None without drafts.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)

    tokens: str
    position: str
    count: str
    next: str
    logits: str = ""
    adapter: str = ""
    embedding: EmbeddingRecord | None = None
    draft: DraftRecord | None = None


class RequestDefaults(Options):
    """What requests of `partc generate` and `partc serve` ask for where they do not say so themselves: options of `Request`."""

    temperature: float = Field(0.0, ge=0, description="0: the likeliest token; else tokens are drawn.")
    top_k: int = Field(0, ge=0, description="Draw of so many likeliest tokens; 0: of all.")
    top_p: float = Field(1.0, gt=0, le=1, description="Draw of the fewest tokens whose probabilities reach it.")
    min_p: float = Field(0.0, ge=0, le=1, description="Draw of tokens with so much of the largest probability.")
    repetition_penalty: float = Field(1.0, gt=0, description="Divides logits of tokens that are there already.")
    suppress: list[int] = Field([], description="Tokens that no answer has.")
    suppress_first: list[int] = Field([], description="Tokens that an answer does not begin with.")
    forced_first: int | None = Field(None, ge=0, description="The first token of each answer.")
    forced_last: int | None = Field(None, ge=0, description="The last token of an answer of the most tokens.")

    @property
    def options(self) -> dict[str, Any]:
        """Options of `Request`, those that ask for something."""
        return self.model_dump(exclude_defaults=True)


class EncoderRecord(BaseModel):
    """What the program `encode` is given of one slot of each run, and what the other steps are given of it.

    `input`: the encoder's input [runs, ..], of each slot of this `shape` and `type`; `vocabulary`: how many tokens it knows, where it is
    tokens. `count`: the input [runs], of the other programs [slots], that says how many of its at most
    `length` entries are meant; empty where all are. `start`: the tokens with which a decoder begins, where a request has none.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)

    input: str
    type: str
    shape: list[int] = Field(min_length=1)
    vocabulary: int | None = None
    count: str = ""
    length: int = Field(ge=1)
    start: list[int] = []


class Blocks(BaseModel):
    """A kind of `MatMulNBits`: its attributes, and whether blocks have zero points."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)

    bits: int = Field(ge=1, le=8)
    block: int = Field(ge=1)
    level: int = 0
    points: bool = False


class GenerationRecord(StepPorts):
    """The inputs and outputs of steps that make tokens, and how many sequences (slots) of which length the ranks keep.

    `groups`: in how many equal groups slots take turns, one a step.

    `length`: the most tokens of a sequence. `padded`: whether a prefill always has a chunk, and so tokens that are not meant. `memory`: the
    most bytes that a rank may need, as the plan says; `room`: the most slots that fit into that. `stop`: the tokens behind which one ends.
    `defaults`: what requests of commands ask for where they do not say. `encoder`: that of an encoder before the decoder; None of a decoder
    alone. `narrow_chunks`, `narrow_rows`: the tokens of narrow prefills, and the slots of each run of narrow decodes, in rising order.
    `adapters`: the names of adapters. `products`: the kinds of products with quantized weights. `states`: the caches that each token
    replaces: prompts are then read by decodes, a token a step. `cut`: the number of ranks over which each cache is cut along its entries,
    in blocks of a chunk (`room_for_entries`).
    """

    vocabulary: int = Field(ge=1)
    slots: int = Field(ge=1)
    groups: int = Field(1, ge=1)
    length: int = Field(ge=2)
    chunk: int = Field(ge=1)
    runs: int = Field(1, ge=1)
    padded: bool = True
    memory: int | None = None
    room: int | None = None
    stop: list[int] = []
    defaults: RequestDefaults = RequestDefaults()
    encoder: EncoderRecord | None = None
    narrow_chunks: list[int] = []
    narrow_rows: list[int] = []
    products: list[Blocks] = []
    adapters: list[str] = []
    states: list[str] = []
    cut: int = Field(1, ge=1)

    @property
    def room_for_entries(self) -> int:
        """The entries of a slot for which a rank's shard of a cache has room."""
        return room_for_entries(self.length, self.chunk, self.cut)

    def first_entries(self, count: int) -> int:
        """Returns the number of entries at the begin of a rank's shard that contain those of a slot's first `count` tokens."""
        return count if self.cut == 1 else -(-count // (self.cut * self.chunk)) * self.chunk

    @property
    def narrow(self) -> list[str]:
        """The names of the programs of a size: narrow ones, and that of drafts."""
        return [
            *([] if self.draft is None else [narrow(DRAFT, size) for size in self.draft.sizes]),
            *(narrow(PREFILL, size) for size in self.narrow_chunks),
            *(narrow(DECODE, size) for size in self.narrow_rows),
        ]

    def rows_of(self, name: str) -> int | None:
        """Returns the number of slots of each cache that a step of a program binds; None for a program with all slots of a group."""
        kind, size = kind_and_size(name)
        if kind == DECODE and size:
            return size * self.runs
        return self.runs if kind in (PREFILL, ENCODE, DRAFT) else None

    def slots_of(self, group: int) -> list[int]:
        """Maps each row of a decode to its slot for the turn of a group: every run has the same number of slots, one after the other."""
        of_run = self.slots // self.runs
        size = of_run // self.groups
        return [begin + at for begin in range(group * size, self.slots, of_run) for at in range(size)]
