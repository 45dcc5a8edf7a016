"""Runs a model's chat template, which makes one prompt of a conversation, in jinja2's sandbox. Models have it next to their tokenizer.

The template comes from the model's author and its input from the client, so it can neither reach Python's objects nor change its input.
It runs in a separate process (`template_process.py`), which is killed when it has used up its CPU time or memory, and is started again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partc.cli.text.tokenizer import tokenizer_settings
from partc.runtime.errors import InputError, UsageError
from partc.runtime.files import counted

MOST_LETTERS = 1 << 22
MOST_SECONDS = 1.0
"""The CPU seconds of a conversation, and of the template's compilation."""
_LONGEST_WAIT, _LONGEST_START = 5.0, 30.0
"""The most seconds until the process has had a conversation's CPU time, and until it has started."""
_FILE_BYTES = 1 << 20
_FILE = "chat_template.jinja"
_ANSWER_BEGINS: Mapping[str, Any] = {"add_generation_prompt": True}


class ChatTemplate:
    """A compiled template, for one conversation at a time. Raises InputError where it cannot be compiled."""

    def __init__(self, where: str, text: str, special: dict[str, str]) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise UsageError('a chat template needs the package jinja2\n  help: pip install "partc[serve]"')
        self.text = text
        self._begin = {"template": text, "special": special, "seconds": MOST_SECONDS}
        self._lock, self._closed = threading.Lock(), False
        self._processes: list[subprocess.Popen[bytes]] = []
        """The process that runs now; empty before the first one."""
        self._at_exit = weakref.finalize(self, _end, self._processes)
        if (answer := self._start()).get("error") is not None:
            self.close()
            raise InputError(f"{where}: is not a template: {answer['error']}")

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        letters: int = MOST_LETTERS,
        options: Mapping[str, Any] = _ANSWER_BEGINS,
    ) -> str:
        """Returns the text of a conversation, up to the start of the answer.

        Raises InputError where the template refuses it or makes too many letters. `options`: further variables of the template.
        """
        with self._lock:
            answer = self._ask({"messages": [*messages], "options": {**options}, "letters": letters}, _LONGEST_WAIT)
            if self._processes[0].poll() is not None and not self._closed:
                with contextlib.suppress(OSError):  # no file or memory is left: the next conversation tries again
                    self._start()
                if self._closed:
                    _end(self._processes)
        if "error" in answer:
            raise InputError(f"the chat template refuses these messages: {answer['error']}")
        return str(answer["prompt"])

    def close(self) -> None:
        """Ends the process, even while it runs."""
        self._closed = True
        self._at_exit()

    def _start(self) -> dict[str, Any]:
        """Starts the process anew; returns its answer to the template."""
        _end(self._processes)
        command = [sys.executable, "-P", "-m", "partc.cli.text.template_process"]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._processes[:] = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing)]
        return self._ask(self._begin, _LONGEST_START)

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Returns the process's answer; an error where it has ended instead, or taken too long."""
        process = self._processes[0]
        assert process.stdin is not None
        assert process.stdout is not None
        line, in_time = b"", True
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answers = select.poll()
            answers.register(process.stdout, select.POLLIN)
            in_time = bool(answers.poll(seconds * 1000))
            line = process.stdout.readline() if in_time else b""
        except (OSError, ValueError):  # the process has ended, or `close` has ended it
            pass
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        if not in_time:
            process.kill()
        code = process.wait()
        if not in_time or code == -signal.SIGPROF:
            return {"error": f"it takes more than {self._begin['seconds']:g} s of CPU time, or {seconds:g} s"}
        return {"error": f"the process in which it runs has ended with code {code}"}


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends processes and closes their pipes."""
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def find_chat_template(tokenizer: str) -> ChatTemplate | None:
    """Returns the template next to a tokenizer, from a file or from `tokenizer_config.json`; None without one.

    If there are several, it takes the default one, and for requests with tools the one for tools.
    """
    config, file = tokenizer_settings(tokenizer), Path(tokenizer).with_name(_FILE)
    special = {
        name: _text(config[name]) for name in ("bos_token", "eos_token", "unk_token", "pad_token") if config.get(name)
    }
    if file.exists():
        try:
            return ChatTemplate(str(file), counted.read_text(file, _FILE_BYTES), special)
        except UnicodeDecodeError as error:
            raise InputError(f"{file}: is not UTF-8 text: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template, tools = named.get("default"), named.get("tool_use")
        if isinstance(template, str) and isinstance(tools, str):
            tools, template = (text.removesuffix("\n") for text in (tools, template))
            template = f"{{% if tools +%}}{tools}{{%+ else +%}}{template}{{%+ endif +%}}"
    return ChatTemplate(f"{tokenizer}: chat_template", template, special) if isinstance(template, str) else None


def end_of_text(path: str, tokenizer: Any) -> list[int]:
    """Returns the token that ends the model's text, which `tokenizer_config.json` names; empty where it does not."""
    name = _text(tokenizer_settings(path).get("eos_token"))
    token = tokenizer.token_to_id(name) if name else None
    return [] if token is None else [token]


def _text(token: object) -> str:
    """Returns a special token's text; files have it as a text or as a mapping with its `content`."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""
