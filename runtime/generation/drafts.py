"""Drafts of a sequence's next tokens: those that followed the last earlier occurrence of its last tokens, in its own text.

    text    7 3 9 4 . 2 7 3         the last two, 7 3, occurred before 9 4 .
    drafts  9 4 . 2                 the most that are asked for

An answer that repeats its prompt, as code, summaries and extracts do, has many of its tokens drafted right. One step scores all drafts of a
sequence, and keeps those that are the tokens that it would have made anyway (`slots.py`). The text is that of tokens alone: every rank
looks up the same drafts. A look-up takes the same time for any length of text: each run of tokens is indexed once, as its next token comes.
"""

from __future__ import annotations

from collections.abc import Iterable


class Drafts:
    """The text of a sequence; `most`: the number of last tokens that are looked up, fewer where they did not occur."""

    def __init__(self, most: int, text: Iterable[int]) -> None:
        self._most = most
        self._text = list[int]()
        self._next: dict[tuple[int, ...], int] = {}
        """Maps each run of at most `most` tokens to the place after its last occurrence that a token follows."""
        self.add(text)

    def add(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the text."""
        text = self._text
        for token in tokens:
            end = len(text)
            for size in range(1, min(self._most, end) + 1):
                self._next[tuple(text[end - size :])] = end
            text.append(token)

    def next(self, count: int) -> list[int]:
        """Returns `count` drafts of the next tokens; none if the last token did not occur before.

        Drafts that reach the end of the text continue with themselves, as a text that repeats does.
        """
        text = self._text
        for size in range(min(self._most, len(text)), 0, -1):
            if (begin := self._next.get(tuple(text[-size:]))) is not None:
                drafts = list[int]()
                for place in range(begin, begin + count):
                    drafts.append(text[place] if place < len(text) else drafts[place - len(text)])
                return drafts
        return []
