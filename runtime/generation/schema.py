"""The tokens that a JSON schema allows next in an answer; llguidance tracks the schema, and each rank masks its shards of the logits.

All ranks know the tokens of the answer, so they have the same state of the schema; no mask is sent. Between the parts of an answer is at
most one space.

An answer that nears its maximum of tokens is led to its end. For this a short end is searched from the current state, letter by letter:
first whatever closes open strings and brackets, then the shortest values. It is searched again before the tokens since then can have used
up the spare ones. Once the remaining tokens are only as many as the end needs plus those that one more token may add to it, only the
end's tokens are allowed. So strings, lists and numbers without a limit in the schema end, too. The tokens that one token may add are
those of the longest of the short answers to the parts of the schema, and of a name.

    {"a": "many wor     ->     {"a": "many wor"}
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from partc.runtime.artifact.tensors.dtypes import Array

from ..errors import InputError

_MARGIN, _MOST_PARTS = 8, 64
_DIGITS = b"0123456789"
_OUTSIDE = b"}]" + _DIGITS + b'"ntf[{-:, .eE+' + bytes(range(97, 123))
_NUMBER = b"}], " + _DIGITS
"""The letters that are tried for a short end, in this order: `_OUTSIDE` a JSON string, and there `_NUMBER` after a digit."""
_INSIDE = b'"' + _DIGITS + bytes(range(97, 123)) + bytes(range(65, 91)) + bytes(range(32, 127))
"""The letters tried inside a string: first the quote that ends it, then the least used, so that a pattern cannot repeat one for ever."""


@dataclass(frozen=True)
class SchemaBound:
    """A JSON schema that an answer must fit, as text, and the path of the model's `tokenizer.json`, which each rank reads."""

    tokenizer: str
    schema: str


class AllowedTokens:
    """The change of logits that forbids the tokens which the schema does not allow next.

    `ends`: the tokens that end an answer. `most`: the most tokens of an answer, its end included.
    """

    def __init__(self, bound: SchemaBound, ends: Sequence[int], vocabulary: int, most: int) -> None:
        self._bound, self._ends, self._vocabulary, self._most = bound, ends, vocabulary, most
        self._state: _State | None = None
        self._seen, self._next_look, self._margin = -1, 0, 0
        self._end: list[int] | None = None
        """The tokens up to the end, once only they are allowed."""
        self._bits: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    def change(self, logits: Array, begin: int, tokens: Sequence[int]) -> None:
        """See `LogitChange`."""
        if len(tokens) != self._seen:
            self._bits = self._allowed(tokens)
        first = begin // 8
        bits: Array = np.unpackbits(self._bits[first : -(-(begin + len(logits)) // 8)], bitorder="little")
        logits[bits[begin - first * 8 :][: len(logits)] == 0] = -np.inf

    def _allowed(self, tokens: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Returns a bit for each token of the vocabulary: whether it is allowed after `tokens`."""
        if self._state is None:
            self._state = _State.begun(self._bound, self._ends[0], self._vocabulary)
        state, before = self._state, max(self._seen, 0)
        for token in tokens[before:]:
            state.take(token)
        self._seen, left = len(tokens), self._most - len(tokens)
        if self._end is not None:
            self._end = self._end[len(tokens) - before :]
        elif len(tokens) >= self._next_look:
            end = state.end(left)
            self._margin = self._margin or _added(self._bound, self._ends[0], self._vocabulary, self._most)
            spare = 0 if end is None else left - 1 - len(end) - self._margin
            self._next_look = len(tokens) + max(1, spare // (self._margin + 1))
            if spare <= 0:
                self._end = end
        if self._end:
            bits = np.zeros(-(-self._vocabulary // 8), np.uint8)
            bits[self._end[0] // 8] = 1 << self._end[0] % 8
            return bits
        bits = np.frombuffer(state.matcher.compute_bitmask(), np.uint8).copy()
        if self._end is not None:
            bits[:] = 0
        if state.matcher.is_accepting():
            for end_token in self._ends:
                bits[end_token // 8] |= 1 << end_token % 8
        return bits


class _State:
    """The position of an answer in a schema, and whether it is inside a JSON string."""

    def __init__(self, matcher: Any, tokenizer: Any, inside: bool = False, escaped: int = 0, last: int = 0) -> None:
        self.matcher, self._tokenizer, self._inside, self._last = matcher, tokenizer, inside, last
        self._escaped = escaped  # the letters that an escape still needs, 1 if it may still get longer

    @classmethod
    def begun(cls, bound: SchemaBound, end: int, vocabulary: int) -> _State:
        """The state before the first token; InputError where the schema cannot be followed."""
        return cls(_matcher(bound, end, vocabulary).deep_copy(), _tokenizer(bound.tokenizer, end, vocabulary))

    def take(self, token: int) -> None:
        """Advances the state by a token."""
        self.matcher.consume_token(token)
        for letter in self._tokenizer.decode_bytes([token]):
            self._last = letter
            if self._escaped:
                self._escaped = 4 if letter == ord("u") else self._escaped - 1
            elif self._inside and letter == ord("\\"):
                self._escaped = 1
            elif letter == ord('"'):
                self._inside = not self._inside

    def end(self, most: int) -> list[int] | None:
        """Returns a few tokens that lead to an end; None where `most` tokens are too few."""
        at = _State(self.matcher.deep_copy(), self._tokenizer, self._inside, self._escaped, self._last)
        tokens, count = list[int](), Counter[int]()
        while not at.matcher.is_accepting():
            if len(tokens) == most or (token := at._next(count)) is None:
                return None
            count[token] += at._inside
            at.take(token)
            tokens.append(token)
            if not at._inside:
                count.clear()  # else the letters of one name would decide which name comes next
        return tokens

    def _next(self, count: Mapping[int, int]) -> int | None:
        """Returns the first token of a short end; None where no token is allowed. `count`: how often each token is in the string so far."""
        if forced := self.matcher.compute_ff_tokens():
            return int(forced[0])
        order = _INSIDE if self._inside else _NUMBER if self._last in _DIGITS else _OUTSIDE
        letters = _letters(self._tokenizer, order)
        if self._inside:
            letters = [*letters[:1], *sorted(letters[1:], key=count.__getitem__)]
        for token in letters:
            if self.matcher.validate_tokens([token]):
                return token
        bits = np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), np.uint8), bitorder="little")
        return int(bits.argmax()) if bits.any() else None


def faults_of_schema(bound: SchemaBound, ends: Sequence[int], vocabulary: int, most: int) -> Iterator[str]:
    """Yields a text for each fault of the schema of a request for at most `most` tokens."""
    if not ends:
        yield "it has a schema, and no token ends an answer\n  help: name the model's end in 'stop'"
        return
    try:
        end = _State.begun(bound, ends[0], vocabulary).end(most)
    except InputError as error:
        yield str(error)
        return
    if end is None or len(end) >= most:
        fact = f"no answer that fits its schema is found within its {most} tokens"
        yield f"{fact}\n  help: ask for more tokens, or for less by the schema"


@lru_cache(maxsize=4)
def _tokenizer(path: str, end: int, vocabulary: int) -> Any:
    """Returns llguidance's tokenizer; InputError where llguidance is not installed or cannot read the file."""
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise InputError('a schema needs the package llguidance\n  help: pip install "partc[schema]"') from None
    try:
        return LLTokenizer(path, n_vocab=vocabulary, eos_token=[end])
    except Exception as error:  # what it raises has no class of its own
        raise InputError(f"the tokenizer cannot be used with a schema: {error}") from None


@lru_cache(maxsize=128)
def _matcher(bound: SchemaBound, end: int, vocabulary: int) -> Any:
    """Returns the matcher of a schema before the first token, to be copied by callers; InputError where the schema cannot be compiled."""
    tokenizer = _tokenizer(bound.tokenizer, end, vocabulary)
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(bound.schema, overrides={"whitespace_pattern": "[ ]?"})
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        first, *_, last = [line.strip() for line in matcher.get_error().splitlines() if line.strip()] * 2
        reason = (
            f"{first} {last}" if first.endswith(":") else first
        )  # that of a pattern points into it, and ends with the reason
        raise InputError(f"the schema cannot be compiled: {reason}")
    return matcher


@lru_cache(maxsize=32)
def _added(bound: SchemaBound, end: int, vocabulary: int, most: int) -> int:
    """Returns the number of tokens that one token may add to the short end of a state."""
    root = json.loads(bound.schema)
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    lengths, names = [0], [0]
    for part in itertools.islice(_parts(root), _MOST_PARTS):
        names += map(len, part.get("properties", {}))
        if part is root:
            continue
        text = json.dumps({**shared, **part})
        try:
            found = _State.begun(replace(bound, schema=text), end, vocabulary).end(most)
        except InputError:  # a part with references to other places than these, which has no meaning alone
            continue
        lengths.append(most if found is None else len(found))
    return max(lengths) + max(names) + _MARGIN


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields a schema and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        for inner in schema.get(name, {}).values():
            yield from _parts(inner)
    for name in ("items", "additionalProperties"):
        yield from _parts(schema.get(name))
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for inner in schema.get(name, ()):
            yield from _parts(inner)


@lru_cache(maxsize=16)
def _letters(tokenizer: Any, order: bytes) -> list[int]:
    """Returns the tokens of the single letters in `order`, in that order."""
    tokens = dict[int, int]()
    for token in range(tokenizer.vocab_size):
        if not tokenizer.is_special_token(token) and len(letter := tokenizer.decode_bytes([token])) == 1:
            tokens.setdefault(letter[0], token)
    return [tokens[letter] for letter in dict.fromkeys(order) if letter in tokens]
