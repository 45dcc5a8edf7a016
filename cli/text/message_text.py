"""Makes sure that a client's messages are encoded as text, even where they contain texts of the model's control tokens.

A tokenizer takes `</s>` or `<|im_end|>` for the token wherever it stands in a prompt, so that a client could end its own turn and write
one for the model. In messages they are replaced by marks before the template sees them, and each mark becomes the tokens of its letters:

    messages    hello</s>            ->  hello<mark 0>
    prompt      <s>hello<mark 0></s> ->  <s> hello < / s > </s>

A conversation without such a text, and the template's own text, are encoded unchanged.
"""

from __future__ import annotations

import copy
import re
import secrets
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar, cast

from partc.cli.text.tokenizer import ids_of

T = TypeVar("T")

MARK_LETTERS = 32
"""The most letters of a mark."""
_BEFORE = "\n"
"""A prefix for a text that is encoded by itself, whose tokens are removed again: some tokenizers add a space at the start of a text."""


@dataclass(frozen=True)
class MessageText:
    """The control tokens in the messages of one conversation: maps each mark to its token's text."""

    tokenizer: Any
    marks: dict[str, str] = field(default_factory=dict)
    secret: str = field(default_factory=lambda: secrets.token_hex(8))

    def marked(self, document: T) -> T:
        """Returns a document of mappings, lists and values, with a mark in place of each control token's text in its texts and names."""
        tokens = self.tokenizer.get_added_tokens_decoder().values()
        texts = sorted((token.content for token in tokens if token.special), key=len, reverse=True)
        if not texts:
            return document
        any_of = re.compile("|".join(map(re.escape, texts)))

        def of(value: Any) -> Any:
            match value:
                case str():
                    return any_of.sub(self._mark, value)
                case dict():
                    return {of(name): of(inner) for name, inner in value.items()}
                case list():
                    return [of(inner) for inner in value]
            return value

        return cast(T, of(document))

    def ids(self, prompt: str) -> list[int]:
        """Returns the tokens of a prompt that the template made of marked messages."""
        if not self.marks:
            return ids_of(self.tokenizer, prompt, special=False)
        parts = re.split(f"(\ue000{self.secret}\\.[0-9]+\ue001)", prompt)
        ids = _following(self.tokenizer, parts[0], "")
        for part in parts[1:]:
            text = self.marks.get(part)
            if text is None:
                ids += _following(self.tokenizer, part, _BEFORE)
                continue
            ids += _following(_of_letters(self.tokenizer), text, _BEFORE)
        return ids

    def _mark(self, found: re.Match[str]) -> str:
        """Returns a mark that no client can write."""
        mark = f"\ue000{self.secret}.{len(self.marks)}\ue001"
        self.marks[mark] = found[0]
        return mark


def _following(tokenizer: Any, text: str, before: str) -> list[int]:
    """Returns the tokens of a text that follows `before`; those of the text by itself where both would share a token."""
    first, both = (ids_of(tokenizer, one, special=False) for one in (before, before + text))
    return both[len(first) :] if both[: len(first)] == first else ids_of(tokenizer, text, special=False)


@lru_cache(maxsize=1)
def _of_letters(tokenizer: Any) -> Any:
    """Returns a copy of a tokenizer that encodes control tokens as text; other threads use the original at the same time."""
    found = copy.deepcopy(tokenizer)
    found.encode_special_tokens = True
    return found
