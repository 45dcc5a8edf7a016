"""What is asked of a generator, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..artifact.generation import GenerationRecord
from ..errors import InputError

Finish: TypeAlias = Literal["", "stop", "length", "error"]
"""Why a sequence ended: a token behind which it stops, the most tokens that were asked for, or logits that are not finite; empty where it
goes on."""
_SEED = 1 << 64


@dataclass(frozen=True)
class Request:
    """A prompt, as numbers of tokens, and how it is continued.

    `temperature` 0 takes the likeliest token; above it tokens are drawn with probabilities that it sharpens (below 1) or flattens, of the
    `top_k` likeliest alone (0: of all), and of the fewest whose probabilities together reach `top_p`. What is drawn follows from `seed` and
    the number of the token alone. `stop`: tokens behind which the sequence ends, beside those of the artifact.
    """

    prompt: Sequence[int]
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: Sequence[int] = ()


@dataclass
class Answer:
    """The tokens behind a prompt, those that end it included, and why there are no more."""

    tokens: list[int] = field(default_factory=list)
    finish: Finish = ""


def refuse_unfit(requests: Iterable[Request], record: GenerationRecord) -> None:
    """InputError with everything that is wrong with any of the requests."""
    problems = [f"request {number}: {fact}" for number, one in enumerate(requests) for fact in faults_of(one, record)]
    if problems:
        raise InputError("\n".join(problems))


def faults_of(one: Request, record: GenerationRecord) -> Iterator[str]:
    """What is wrong with a request, a text each."""
    size = len(one.prompt)
    if not size:
        yield "its prompt has no token\n  help: begin with the token that the model knows for a begin"
    if outside := [token for token in (*one.prompt, *one.stop) if not 0 <= token < record.vocabulary]:
        yield f"{outside[0]} is not a token; tokens are 0 to {record.vocabulary - 1}"
    if one.max_tokens < 1:
        yield f"it asks for {one.max_tokens} tokens; at least 1"
    elif size + one.max_tokens > record.length:
        fact = f"a prompt of {size} tokens and {one.max_tokens} more are {size + one.max_tokens}; a sequence has at most {record.length}"
        yield f"{fact}\n  help: ask for fewer, or compile with a larger 'length'"
    if not 0 <= one.temperature < float("inf"):
        yield f"its temperature is {one.temperature}; it is 0 or more"
    elif one.temperature and not record.logits:
        fact = "it draws tokens, and the artifact gives the likeliest alone ('sampling: false')"
        yield f"{fact}\n  help: leave out 'temperature', or compile with 'sampling: true'"
    if one.top_k < 0:
        yield f"its top_k is {one.top_k}; it is 0 (all tokens) or more"
    if not 0 < one.top_p <= 1:
        yield f"its top_p is {one.top_p}; it is above 0 and at most 1"
    if not 0 <= one.seed < _SEED:
        yield f"its seed is {one.seed}; it is 0 to 2**64 - 1"
