"""Writes logarithms of probabilities in the forms of OpenAI's API: that of chats, and the older one of completions.

    chat           {"content": [{"token": " the", "logprob": -0.7, "bytes": [32, 116, 104, 101], "top_logprobs": [...]}], "refusal": null}
    completions    {"tokens": [..], "token_logprobs": [..], "top_logprobs": [{" the": -0.7}, ..], "text_offset": [..]}

A token that is only a part of a letter has the text `bytes:\\xe2\\x80`, as in that API; without a tokenizer it is `token_id:306`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from partc.cli.server.engine import Score
from partc.cli.text.tokenizer import bytes_of

_LEAST = -9999.0
"""The number that replaces the logarithm of 0, which JSON cannot express."""


class TokenTexts:
    """The text of each token by itself."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.bytes_of = lru_cache(1 << 12)(self._bytes_of)

    def _bytes_of(self, token: int) -> bytes | None:
        return None if self._tokenizer is None else bytes_of(self._tokenizer, token)

    def text_of(self, token: int) -> str:
        """Returns the text of a token."""
        if (found := self.bytes_of(token)) is None:
            return f"token_id:{token}"
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def chat(self, tokens: Sequence[int], scores: Sequence[Score]) -> dict[str, Any]:
        """Returns the scores of tokens of a chat's answer."""
        found = []
        for token, (logprob, top) in zip(tokens, scores, strict=False):
            likely = [self._of_chat(other, number) for other, number in top]
            found.append({**self._of_chat(token, logprob), "top_logprobs": likely})
        return {"content": found, "refusal": None}

    def _of_chat(self, token: int, logprob: float) -> dict[str, Any]:
        found = self.bytes_of(token)
        return {
            "token": self.text_of(token),
            "logprob": max(logprob, _LEAST),
            "bytes": None if found is None else [*found],
        }

    def completion(
        self, tokens: Sequence[int], scores: Sequence[Score | None], begin: int
    ) -> tuple[dict[str, Any], int]:
        """Returns the scores of tokens of a completion whose text begins at letter `begin`, and the letter at which it ends.

        The score of a prompt's first token is None.
        """
        texts = [self.text_of(token) for token in tokens]
        offsets, data = list[int](), b""
        for token in tokens:
            offsets.append(begin + len(data.decode(errors="ignore")))
            data += self.bytes_of(token) or b""
        tops = list[dict[str, float] | None]()
        for text, score in zip(texts, scores, strict=False):
            if score is None:
                tops.append(None)
                continue
            top = dict[str, float]()
            for other, number in score[1]:
                top.setdefault(self.text_of(other), max(number, _LEAST))
            top.setdefault(text, max(score[0], _LEAST))
            tops.append(top)
        logprobs = [None if score is None else max(score[0], _LEAST) for score in scores]
        found = {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
        return found, begin + len(data.decode(errors="ignore"))
