"""Finds calls of tools in the text of an answer, in the four forms in which most models write them.

| form | text of a call |
|---|---|
| `hermes` | `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>` |
| `llama3` | `{"name": "f", "parameters": {"x": 1}}`, the whole answer, several with `;` between, also after `<|python_tag|>` |
| `mistral` | `[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]`, or `[TOOL_CALLS]f[ARGS]{"x": 1}` |
| `pythonic` | `[f(x=1), g(y="a")]`, the whole answer |

A call names a tool of the request and has an object of arguments. All other text is content of the answer, as the model wrote it: no letter
is lost. Text that may be a call is held back until the answer ends; text before it is passed on at once.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

_MOST_PYTHON = 1 << 16
"""The longest text in Python's form that is parsed."""


@dataclass(frozen=True)
class Call:
    """A call: the name of a tool, and its arguments as a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Form:
    """The form in which a model writes calls.

    `begins`: texts after which a call follows, anywhere in the answer; `first`: first letters of an answer that consists of calls alone.
    `parse(text, at)` returns the calls after position `at` and the position after them, or no calls and `at`.
    """

    begins: tuple[str, ...]
    first: str
    controls: tuple[str, ...]
    """Tokens that are part of the text, although tokenizers treat them as control tokens."""
    parse: Callable[[str, int], tuple[list[Call], int]]


class CallText:
    """Splits the text of an answer, as it arrives, into its content and its calls."""

    def __init__(self, form: Form, names: Collection[str], most: int | None = None) -> None:
        self._form, self._names, self._most = form, names, most
        self._held, self._is_first, self._has_begun = "", True, False

    def add(self, text: str) -> str:
        """Adds text; returns the text that is certainly content by now."""
        self._held += text
        if self._has_begun or not (shown := self._held.lstrip()):
            return ""
        self._has_begun, self._is_first = self._is_first and shown[0] in self._form.first, False
        if self._has_begun:
            return ""
        marks = self._form.begins
        if places := [at for mark in marks if (at := self._held.find(mark)) >= 0]:
            self._has_begun, at = True, min(places)
        else:
            at = len(self._held) - max(overlap(self._held, mark) for mark in marks)
        sure = self._held[:at].rstrip()  # space before a call is not content
        self._held = self._held[len(sure) :]
        return sure

    def end(self) -> tuple[str, list[Call]]:
        """Returns the rest of the content, and the calls."""
        content, calls, at = "", list[Call](), 0
        for begin in self._starts():
            if begin < at:
                continue
            found, end = self._form.parse(self._held, begin)
            if found and all(call.name in self._names for call in found):
                content += self._held[at:begin].rstrip()
                calls, at = [*calls, *found], end
        rest = self._held[at:]
        self._held = ""
        return content + (rest if rest.strip() or not calls else ""), calls[: self._most]

    def _starts(self) -> Iterator[int]:
        """Yields the positions where calls may begin."""
        if self._held.lstrip()[:1] in {*self._form.first}:
            yield 0
        yield from (found.start() for found in re.finditer("|".join(map(re.escape, self._form.begins)), self._held))


def overlap(text: str, mark: str) -> int:
    """Returns the largest number of letters that both end the text and begin `mark`, less than all of `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


def _not_json(word: str) -> NoReturn:
    raise ValueError(word)


_DECODER = json.JSONDecoder(parse_constant=_not_json)
_SPACE = re.compile(r"\s*")


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _json(text: str, at: int) -> tuple[Any, int]:
    """Returns the JSON value at a position and the position after it; None and the position where there is none."""
    try:
        return _DECODER.raw_decode(text, _behind_space(text, at))
    except (ValueError, RecursionError):
        return None, at


def _call(value: object) -> Call | None:
    """Converts an object with a name and arguments to a call; None for any other value."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    try:
        return Call(name, _arguments(value.get("arguments", value.get("parameters", {}))))
    except (ValueError, RecursionError):
        return None


def _arguments(value: object) -> str:
    """Returns arguments as JSON. Raises ValueError where they are not an object, or cannot be written as JSON in UTF-8."""
    if not isinstance(value, dict):
        raise ValueError("is not an object")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def _hermes(text: str, at: int) -> tuple[list[Call], int]:
    value, end = _json(text, at + len("<tool_call>"))
    call = _call(value)
    if call is None:
        return [], at
    closed = _behind_space(text, end)
    return [call], closed + len("</tool_call>") if text.startswith("</tool_call>", closed) else end


def _llama3(text: str, at: int) -> tuple[list[Call], int]:
    calls, end = list[Call](), at
    start = at + len("<|python_tag|>") if text.startswith("<|python_tag|>", at) else at
    while True:
        value, behind = _json(text, start)
        call = _call(value)
        if call is None:
            return calls, end
        calls, end = [*calls, call], behind
        start = _behind_space(text, end)
        if not text.startswith(";", start):
            return calls, end
        start += 1


_NAMED = re.compile(r"\s*([\w.-]{1,64})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?(?=\s*\{)")


def _mistral(text: str, at: int) -> tuple[list[Call], int]:
    start = at + len("[TOOL_CALLS]")
    if named := _NAMED.match(text, start):
        value, end = _json(text, named.end())
        call = _call({"name": named[1], "arguments": value})
        return ([], at) if call is None else ([call], end)
    values, end = _json(text, start)
    calls = [call for value in values if (call := _call(value)) is not None] if isinstance(values, list) else []
    return (calls, end) if calls and len(calls) == len(values) else ([], at)


def _pythonic(text: str, at: int) -> tuple[list[Call], int]:
    source = text[at:].strip()
    for control in ("<|python_start|>", "<|python_end|>"):
        source = source.removeprefix(control).removesuffix(control).strip()
    if len(source) > _MOST_PYTHON:
        return [], at
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for escapes that Python does not know
            body = ast.parse(source, mode="eval").body
        if not isinstance(body, ast.List):
            return [], at
        calls = [_python_call(element) for element in body.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return [], at
    return calls, len(text)


def _python_call(node: ast.expr) -> Call:
    """Converts an expression to a call. Raises ValueError where it is not a call of a name with literal keyword arguments."""
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("is not a call of a name")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("has unpacked arguments")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return Call(ast.unparse(node.func), _arguments(arguments))


FORMS: Mapping[str, Form] = {
    "hermes": Form(("<tool_call>",), "", ("<tool_call>", "</tool_call>"), _hermes),
    "llama3": Form(("<|python_tag|>",), "{", ("<|python_tag|>",), _llama3),
    "mistral": Form(("[TOOL_CALLS]",), "", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), _mistral),
    "pythonic": Form(("<|python_start|>",), "[", ("<|python_start|>", "<|python_end|>"), _pythonic),
}
"""Maps the names in `--tool-calls` to the forms."""
_SIGNS = (
    (r"<function=|<arg_key>", ""),
    (r"<tool_call>", "hermes"),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"\[func_name", "pythonic"),
    (r"<\|python_tag\|>|\"parameters\": dictionary of argument", "llama3"),
)
"""Patterns of a template, each with the form that it indicates, the first match counts; an empty name: a form that is not supported."""


def form_of(template: str, tokenizer: Any) -> str:
    """Returns the name of the form in which a model writes calls, from its template and its tokens; empty where neither indicates one."""
    for sign, name in _SIGNS:
        if re.search(sign, template):
            return name
    return "mistral" if tokenizer.token_to_id("[TOOL_CALLS]") is not None else ""
