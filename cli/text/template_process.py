"""The process in which a chat template is compiled and run: `python -P -m partc.cli.text.template_process`.

It reads a line of JSON and answers with one. A template is a program by the model's author, and a filter or an operator in it may
compute for hours in one call, which no thread can interrupt. So the process limits its own memory, and the kernel ends it when a line has
taken its CPU time.

| line | answer |
|---|---|
| `{"template": text, "special": {name: text}, "seconds": 1.0}` | `{}` |
| `{"messages": [...], "options": {name: value}, "letters": 1000}` | `{"prompt": text}` |
| either | `{"error": text}` |
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

MOST_MEMORY = 512 << 20
"""The address space of the process, in bytes."""


def main() -> None:
    """Answers lines until the input ends."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the server, which ends this process by closing its input
    _limit(resource.RLIMIT_AS, MOST_MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    seconds, template, special = 0.0, None, {}
    for line in sys.stdin.buffer:
        request = json.loads(line)
        seconds = request.get("seconds", seconds)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            if "template" in request:
                template, special = environment.from_string(request["template"]), request["special"]
                answer = {}
            else:
                answer = {
                    "prompt": _prompt(
                        template, {**request["options"], **special, "messages": request["messages"]}, request["letters"]
                    )
                }
        except MemoryError:
            answer = {"error": f"it needs more than {MOST_MEMORY >> 20} MiB of memory"}
        except Exception as error:  # filters and operators may raise anything
            answer = {"error": f"{error}" or type(error).__name__}
        data = json.dumps(answer).encode()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.write(data + b"\n")
        sys.stdout.buffer.flush()


def _prompt(template: Any, values: dict[str, Any], most: int) -> str:
    """Returns the text of a conversation. Raises ValueError where it is longer than `most` letters or is not valid text."""
    parts, letters = list[str](), 0
    for part in template.generate(**values):
        parts.append(part)
        letters += len(part)
        if letters > most:
            raise ValueError(f"it makes more than {most:,} letters of them")
    text = "".join(parts)
    text.encode()
    return text


def _limit(kind: int, most: int) -> None:
    """Lowers a limit of this process, unless it is lower already."""
    before = resource.getrlimit(kind)[1]
    limit = most if before == resource.RLIM_INFINITY else min(most, before)
    with contextlib.suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(kind, (limit, limit))


def _refuse(text: str) -> NoReturn:
    """The function with which a template refuses a conversation."""
    raise ValueError(text)


if __name__ == "__main__":
    main()
