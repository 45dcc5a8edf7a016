"""The template that makes one prompt of a conversation, as models have it beside their tokenizer, run by jinja2 in its sandbox.

The template belongs to the model and what it is given to the client, so it can neither reach Python's objects nor change what it is given.
Its text is taken in pieces, and given up where it gets too long or takes too much time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from partc.cli.text.tokenizer import tokenizer_settings
from partc.runtime.errors import InputError, UsageError
from partc.runtime.files import counted

MOST_LETTERS = 1 << 22
MOST_SECONDS = 2.0
_FILE_BYTES = 1 << 20
_FILE = "chat_template.jinja"


class ChatTemplate:
    """A compiled template; InputError where it cannot be compiled."""

    def __init__(self, where: str, text: str, special: dict[str, str]) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise UsageError('a chat template needs the package jinja2\n  help: pip install "partc[serve]"') from None
        self._where, self._error = where, TemplateError
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise InputError(f"{where}: is not a template: {error}") from None
        self._special = special

    def prompt(self, messages: Sequence[dict[str, str]]) -> str:
        """The text of a conversation, up to where the answer begins; InputError where the template refuses it."""
        until, parts, letters = time.monotonic() + MOST_SECONDS, list[str](), 0
        try:
            for part in self._template.generate(messages=messages, add_generation_prompt=True, **self._special):
                parts.append(part)
                letters += len(part)
                if letters > MOST_LETTERS:
                    raise InputError(f"the chat template makes more than {MOST_LETTERS:,} letters of these messages")
                if time.monotonic() > until:
                    raise InputError(f"the chat template takes more than {MOST_SECONDS:.0f} s for these messages")
        except (self._error, TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise InputError(f"the chat template refuses these messages: {error}") from None
        return "".join(parts)


def find_chat_template(tokenizer: str) -> ChatTemplate | None:
    """The template beside a tokenizer, a file or a text in `tokenizer_config.json`, of several the default; None without one."""
    config, file = tokenizer_settings(tokenizer), Path(tokenizer).with_name(_FILE)
    special = {
        name: _text(config[name]) for name in ("bos_token", "eos_token", "unk_token", "pad_token") if config.get(name)
    }
    if file.exists():
        try:
            return ChatTemplate(str(file), counted.read_text(file, _FILE_BYTES), special)
        except UnicodeDecodeError as error:
            raise InputError(f"{file}: is not UTF-8 text: {error}") from None
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}.get("default")
    return ChatTemplate(f"{tokenizer}: chat_template", found, special) if isinstance(found, str) else None


def end_of_text(path: str, tokenizer: Any) -> list[int]:
    """The token behind which the model has nothing more to say, as `tokenizer_config.json` names it; empty where it does not."""
    name = _text(tokenizer_settings(path).get("eos_token"))
    token = tokenizer.token_to_id(name) if name else None
    return [] if token is None else [token]


def _text(token: object) -> str:
    """A special token's text, which files write as a text or as a mapping with its `content`."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _refuse(text: str) -> NoReturn:
    """What templates call to refuse a conversation."""
    raise ValueError(text)
