"""Reads a model's tokenizer, the file `tokenizer.json`, with the package `tokenizers`, and decodes tokens to text as they arrive."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from partc.runtime.errors import InputError, UsageError
from partc.runtime.files import counted

CONFIG = "tokenizer_config.json"
"""The file next to a tokenizer that names its special tokens, and may have its chat template."""
_CONFIG_BYTES = 1 << 24
_SHORT_LETTERS = 1024
_SPACE, _BYTE = "\u2581", re.compile("<0x([0-9A-F]{2})>")
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {
    chr(letter): byte
    for letter, byte in [
        *zip(_SHOWN, _SHOWN, strict=True),
        *enumerate(sorted({*range(256)} - {*_SHOWN}), 256),
    ]
}
"""Maps each letter in a vocabulary of bytes to its byte: the letter with that code where it is printable, else a letter from 256 on."""
_PADDED = 1024
"""The most tokens by which a model's vocabulary may be padded, or a tenth of it if that is more."""


@functools.cache
def open_tokenizer(path: str | None) -> Any:
    """Opens the tokenizer in a file; returns None without a path."""
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError('--tokenizer needs the package tokenizers\n  help: pip install "partc[text]"') from None
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time needs no threads
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # errors of tokenizers have no common class
        raise InputError(f"{path}: is not a tokenizer: {error}\n  help: give the tokenizer.json of the model") from None


def ids_of(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """Returns the tokens of a text, with `special` also those that the tokenizer puts around a text.

    A long text is encoded without the interpreter's lock, so that other threads run.
    """
    if len(text) <= _SHORT_LETTERS:
        return [*tokenizer.encode(text, add_special_tokens=special).ids]
    return [*tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids]  # without the interpreter's lock


def bytes_of(tokenizer: Any, token: int) -> bytes | None:
    """Returns the bytes of a token within a text; None where the tokenizer does not have it."""
    name = tokenizer.id_to_token(token)
    if name is None:
        return None
    decoder = b"" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
    if token in tokenizer.get_added_tokens_decoder():
        return bytes(name.encode())
    if b"ByteLevel" in decoder and all(letter in _BYTES for letter in name):
        return bytes(_BYTES[letter] for letter in name)
    if b"ByteFallback" in decoder and (byte := _BYTE.fullmatch(name)):
        return bytes.fromhex(byte[1])
    if _SPACE.encode() in decoder:
        return bytes(name.replace(_SPACE, " ").encode())
    return bytes(tokenizer.decode([token]).encode())


def refuse_other_vocabulary(path: str, tokenizer: Any, vocabulary: int) -> None:
    """Raises InputError where the tokenizer does not belong to a model with a vocabulary of this size.

    It has more tokens then, or so few that padding does not explain the difference.
    """
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size <= vocabulary <= max(size + _PADDED, size * 1.1):
        return
    fact = f"its tokens are 0 to {size - 1}, and those of the model 0 to {vocabulary - 1}"
    raise InputError(
        f"{path}: is not the tokenizer of this model: {fact}\n  help: give the tokenizer.json of the model"
    )


def tokenizer_settings(path: str) -> dict[str, Any]:
    """Returns the mapping in the file `tokenizer_config.json` next to a tokenizer; empty where there is none."""
    file = Path(path).with_name(CONFIG)
    if not file.exists():
        return {}
    try:
        found = json.loads(counted.read_text(file, _CONFIG_BYTES))
    except ValueError as error:
        raise InputError(f"{file}: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{file}: is not a mapping")
    return found


class TextStream:
    """Decodes tokens to text as they arrive: a letter of several tokens is withheld until it is complete.

    Control tokens have no text, except those in `controls`.
    """

    def __init__(self, tokenizer: Any, controls: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._controls = {tokenizer.token_to_id(control): control for control in controls}
        self._tokens: list[int] = []
        self._text = ""
        self._begin()

    def _begin(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> str:
        """Returns the text that a token adds."""
        if token in self._controls:
            held = self.end()
            self._tokens, self._text = [], ""
            self._begin()
            return held + self._controls[token]
        self._tokens.append(token)
        try:
            added = self._stream.step(self._tokenizer, token) or ""
        except Exception:  # it refuses tokens whose text changes the text before them
            self._begin()
            added = self._tokenizer.decode([token])
        self._text += added
        return added

    def end(self) -> str:
        """Returns the withheld text after the last token: an incomplete letter, as the tokenizer shows it."""
        whole = self._tokenizer.decode(self._tokens)
        return whole[len(self._text) :] if whole.startswith(self._text) else ""
