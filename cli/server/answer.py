"""An answer while it is generated: deltas of text and tokens up to a token or text that ends it, and both in the documents of OpenAI's API.

A text that ends an answer may begin in one token and end in another, so letters that could be its beginning are held back.
"""

from __future__ import annotations

import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from partc.cli.server.bodies import Completion
from partc.cli.server.engine import Engine, Failed, News, RequestEnd, Score, Ticket, Tokens
from partc.cli.server.logprobs import TokenTexts
from partc.cli.server.refusals import RefusedError
from partc.cli.text.tokenizer import TextStream
from partc.cli.text.tool_calls import FORMS, Call, CallText, overlap

_NOT_FINITE = "the logits of this request are not finite: no token follows its prompt and the tokens made so far"


@dataclass(frozen=True)
class Delta:
    """An addition to an answer; `finish` is the reason for which it is the last, empty if it is not."""

    text: str
    tokens: list[int]
    finish: str
    scores: list[Score] = field(default_factory=list)
    """The score of each token, if the request has `logprobs`."""
    calls: Sequence[Call] = ()


class Letters:
    """Decodes tokens to text, up to one of `stops`. `controls`: control tokens that are part of the text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], controls: Sequence[str] = ()) -> None:
        self._stream = None if tokenizer is None else TextStream(tokenizer, controls)
        self._stops = stops
        self._held = ""
        self.stopped = False

    def add(self, tokens: Sequence[int], ends: bool) -> tuple[str, int]:
        """Adds tokens; returns the text that now surely belongs to the answer, and the number of tokens up to one of `stops`.

        `ends`: whether the last token ends the answer, and has no text.
        """
        if self._stream is None:
            return "", len(tokens)
        text, shown = "", len(tokens) - ends
        for at in range(shown):
            text += self._sure(self._stream.add(tokens[at]))
            if self.stopped:
                return text, at + 1
        return text, len(tokens)

    def end(self) -> str:
        """Returns the text that was held back, when no token follows."""
        if self._stream is None or self.stopped:
            return ""
        text, self._held = self._sure(self._stream.end()) + self._held, ""
        return text

    def _sure(self, added: str) -> str:
        text = self._held + added
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


@dataclass
class Answer:
    """One choice of the answer to a request; `next` returns its deltas."""

    completion: Completion
    model: str
    ticket: Ticket
    letters: Letters
    number: int
    texts: TokenTexts = field(default_factory=lambda: TokenTexts(None))
    num_tokens: int = 0
    letters_shown: int = 0
    """The number of letters before the next delta, including the prompt's if the prompt is shown."""
    logprob: float = 0.0
    """The log probability of all tokens so far, if the request has `logprobs`."""
    of_prompt: list[Score] = field(default_factory=list)
    """The scores of the prompt's tokens except the first, if the prompt is shown with `logprobs`."""
    created: int = field(default_factory=lambda: int(time.time()))
    calls: CallText | None = field(init=False)
    """Divides the text into content and tool calls, if the request has tools."""

    def __post_init__(self) -> None:
        tools = self.completion.tools
        self.calls = None if tools is None else CallText(FORMS[tools.form], tools.names, tools.most)

    async def next(self, engine: Engine) -> Delta:
        """Waits for the next delta; raises RefusedError if the ranks fail, or the request's logits are not finite."""
        while True:
            delta = self._delta(engine, await self.ticket.news())
            if delta.text or delta.tokens or delta.finish:  # else there are scores of its prompt alone
                return delta

    def _delta(self, engine: Engine, news: Sequence[News]) -> Delta:
        text, tokens, finish, logprobs = "", list[int](), "", list[Score]()
        for one in news:
            match one:
                case Failed(why):
                    raise RefusedError(500, why, code="ranks_failed")
                case RequestEnd(finish):
                    pass
                case Tokens(_, "error"):
                    raise RefusedError(500, _NOT_FINITE, code="not_finite")
                case Tokens(numbers, finish, scores, of_prompt):
                    self.of_prompt += of_prompt
                    added, count = self.letters.add(numbers, finish == "stop")
                    text += added
                    tokens += numbers[:count]
                    logprobs += scores[:count]
                    if self.letters.stopped:
                        engine.end(self.ticket, "stop")
                        finish = "stop"
            if finish:
                text += self.letters.end()
                break
        self.num_tokens += len(tokens)
        self.logprob += sum(score for score, _ in logprobs)
        calls: Sequence[Call] = ()
        if self.calls is not None:
            text = self.calls.add(text)
            if finish:
                rest, calls = self.calls.end()
                text, finish = text + rest, "tool_calls" if calls and finish == "stop" else finish
        return Delta(text, tokens, finish, logprobs, calls)

    def document(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Returns the whole choice as a document."""
        text, tokens = "".join(one.text for one in deltas), [token for one in deltas for token in one.tokens]
        delta = Delta(
            text, tokens, deltas[-1].finish, [score for one in deltas for score in one.scores], deltas[-1].calls
        )
        text = (self.completion.echo or "") + text
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if delta.calls:
            message |= {"content": text or None, "tool_calls": [_shown(call) for call in delta.calls]}
        content = {"message": message} if self.completion.chat else {"text": text}
        return self._document(False, [self._choice(content, delta, True)])

    def chunk(self, delta: Delta, first: bool) -> dict[str, Any]:
        """Returns the event of a stream for a delta."""
        role = {"role": "assistant"} if first else {}
        text = (self.completion.echo or "") + delta.text if first else delta.text
        calls = {"tool_calls": [{"index": at, **_shown(call)} for at, call in enumerate(delta.calls)]}
        message = {**role, "content": text, **(calls if delta.calls else {})}
        content = {"delta": message} if self.completion.chat else {"text": text}
        usage = {"usage": usage_of([self])} if self.completion.counts_always else {}
        return self._document(True, [self._choice(content, delta, first)]) | usage

    def counts(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Returns the event that ends a stream with the token counts of all its choices."""
        return self._document(True, []) | {"usage": usage_of(answers)}

    def _choice(self, content: dict[str, Any], delta: Delta, first: bool) -> dict[str, Any]:
        return {
            "index": self.completion.index,
            **content,
            "token_ids": delta.tokens,
            "logprobs": self._logprobs(delta, first) if self.completion.logprobs else None,
            "finish_reason": delta.finish or None,
        }

    def _logprobs(self, delta: Delta, first: bool) -> dict[str, Any]:
        """Returns the log probabilities of a delta's tokens; in the first delta also those of the prompt, if it is shown."""
        if self.completion.chat:
            return self.texts.chat(delta.tokens, delta.scores)
        tokens, scores = delta.tokens, list[Score | None](delta.scores)
        if first and self.completion.echo is not None:
            tokens, scores = [*self.completion.request.prompt, *tokens], [None, *self.of_prompt, *scores]
        found, self.letters_shown = self.texts.completion(tokens, scores, self.letters_shown)
        return found

    def _document(self, streams: bool, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = (
            ("chat.completion.chunk" if streams else "chat.completion") if self.completion.chat else "text_completion"
        )
        prefix = "chatcmpl" if self.completion.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


async def embedding_of(ticket: Ticket) -> str:
    """Waits for the embedding of a prompt and returns it as base64 of float32; raises RefusedError if there is none."""
    while True:
        for one in await ticket.news():
            match one:
                case Failed(why):
                    raise RefusedError(500, why, code="ranks_failed")
                case RequestEnd(finish):
                    raise RefusedError(408 if finish == "timeout" else 503, f"the request ended: {finish}", code=finish)
                case Tokens(_, "error"):
                    raise RefusedError(500, _NOT_FINITE, code="not_finite")
                case Tokens() if ticket.embedding:
                    return ticket.embedding


def shortened(embedding: str, dimensions: int, as_base64: bool) -> str | list[float]:
    """Returns the first `dimensions` numbers of an embedding, normalized to length 1, as base64 or as numbers."""
    numbers = np.frombuffer(b64decode(embedding), "<f4")
    if dimensions < numbers.size:
        part = numbers[:dimensions].astype(np.float64)
        numbers = (part / (np.linalg.norm(part) or 1)).astype("<f4")
    return b64encode(numbers.tobytes()).decode() if as_base64 else [*map(float, numbers)]


def likeliest(answers: Sequence[Answer], choices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the choices to answer: for each prompt the likeliest ones, if more were generated than asked for (`best_of`)."""
    first, found = answers[0].completion, list[dict[str, Any]]()
    for begin in range(0, len(choices), first.copies):
        of_prompt = range(begin, begin + first.copies)
        best = sorted(of_prompt, key=lambda at: -answers[at].logprob / max(answers[at].num_tokens, 1))[: first.kept]
        found += [choices[at] for at in (best if first.kept < first.copies else of_prompt)]
    return [{**choice, "index": index} for index, choice in enumerate(found)]


def _shown(call: Call) -> dict[str, Any]:
    """Returns a call in the API's form, with an id of nine letters: templates of Mistral's models refuse any other length."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}


def usage_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Counts the tokens read, those generated, and the prompt tokens that were in a cache; a prompt with several choices counts once."""
    prompts = [one for one in answers if not one.completion.is_copy or len(answers) == 1]
    read, made = sum(one.completion.request.read for one in prompts), sum(one.num_tokens for one in answers)
    details = {"cached_tokens": sum(one.ticket.cached for one in prompts)}
    counts = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
    return {**counts, "prompt_tokens_details": details}
