"""The bodies of requests, in the form of OpenAI's API, checked before any rank receives a request.

An unknown field is refused, and so is a field of the API that asks for something that this server does not do (`functions`, `suffix`),
unless it has its neutral value. A field that is null counts as absent: clients write all fields of their records, and send an answer's
message back with null for the fields that it does not have.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, NoReturn, Self

from partc.cli.server.adapters import LoadBody, UnloadBody, loaded
from partc.cli.server.body_fields import MOST_LABELS, SAMPLING, Labels, Sampling, Strict
from partc.cli.server.refusals import RefusedError
from partc.cli.server.response_body import ResponseBody
from partc.cli.text.chat_template import ChatTemplate
from partc.cli.text.message_text import MARK_LETTERS, MessageText
from partc.cli.text.tokenizer import ids_of
from partc.runtime.artifact.generation import GenerationRecord
from partc.runtime.errors import InputError
from partc.runtime.generation.adapters import AdapterChange
from partc.runtime.generation.request import MOST_LOGPROBS, Request, faults_of
from partc.runtime.generation.schema import SchemaBound
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

MOST_BYTES = 1_000_000
"""The most bytes of a body."""
_MOST_MESSAGES = _MOST_PARTS = 1024
_MOST_FIELDS, _MOST_STOP_TOKENS = 64, 64
_MOST_SCHEMA_LETTERS = 1 << 15
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_MOST_TOOLS, _MOST_CALLS, _MOST_LEVELS = 128, 128, 64
_SET_NAMES = {
    "messages",
    "tools",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "raise_exception",
    "strftime_now",
}
"""Names in chat templates that clients may not set."""
_DEFAULT_TOKENS = 16
_MOST_CHOICES, _MOST_INPUTS = 128, 2048
_SEEDS = 1 << 64
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
"""Fields of the API that ask for things that this server does not do, with their neutral values."""

_SCHEMAS = {"tools", "response_format"}
"""Fields that contain schemas, in which null is a value."""


def _is_neutral(value: object, neutral: object) -> bool:
    """Whether two values are the same in JSON: `true` is not the number 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _count_of_logprobs(given: object) -> object:
    """Returns the number of likeliest tokens to list for each token; None if `logprobs` is false."""
    return None if given is False else given


def _prompts(given: object, most: int = _MOST_CHOICES) -> object:
    """Returns the prompts as a list, each a text or a list of token ids; raises ValueError for anything else, or more than `most`."""
    several = isinstance(given, list) and bool(given) and all(isinstance(one, str | list) for one in given)
    prompts = given if isinstance(given, list) and several else [given]
    if len(prompts) > most:
        raise ValueError(f"has {len(prompts):,} prompts; at most {most:,}")
    for one in prompts:
        if not isinstance(one, str) and not (isinstance(one, list) and all(type(token) is int for token in one)):
            raise ValueError("is a text, or a list of token ids")
    return prompts


def _content(content: object) -> object:
    """Returns the text of a message's content, which is a text or a list of parts; raises ValueError if a part is not a text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("is a text, or a list of parts with the type 'text'")
    if len(content) > _MOST_PARTS:
        raise ValueError(f"has {len(content):,} parts; at most {_MOST_PARTS:,}")
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"has a part of the type {json.dumps(kind)[:80]} at {at}; this model reads text alone")
        if kind is None or not isinstance(part.get("text"), str):
            raise ValueError(f'has no {{"type": "text", "text": ...}} at {at}')
        if unknown := [*(part.keys() - {"type", "text"})]:
            raise ValueError(f"has the field {json.dumps(min(unknown))[:80]} in its part {at}; leave it out")
    return "".join(part["text"] for part in content)


def _schema(schema: object) -> object:
    """Returns a JSON schema; raises ValueError if it is nested so deeply that readers could not follow it."""
    if not isinstance(schema, dict):
        raise ValueError("is not a JSON schema, which is a mapping")
    inner: list[Any] = [schema]
    for _ in range(_MOST_LEVELS):
        inner = [
            one
            for outer in inner
            for one in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(one, dict | list)
        ]
        if not inner:
            return schema
    raise ValueError(f"has more than {_MOST_LEVELS} levels")


def _parameters(given: object) -> object:
    """Returns the schema of a function's arguments, an empty one for None; raises ValueError if it is not a schema."""
    return _NO_PARAMETERS if given is None else _schema(given)


def _call_arguments(given: object) -> object:
    """Returns the arguments of a call, given as a text with a JSON object; raises ValueError if it is not one."""
    try:
        found = json.loads(given, parse_constant=_not_json) if isinstance(given, str) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("is not a text with a JSON object")
    return _schema(found)


def _values(values: object) -> object:
    """Returns the values of names in the template; raises ValueError if one is not a scalar, or its name is set by the server."""
    if not isinstance(values, dict):
        raise ValueError("is not a mapping from names of the template to values")
    if len(values) > MOST_LABELS:
        raise ValueError(f"has {len(values):,} names; at most {MOST_LABELS:,}")
    if wrong := [name for name, value in values.items() if not isinstance(value, str | int | float)]:
        raise ValueError(f"has no true, false, number or text as {json.dumps(wrong[0])[:80]}")
    if taken := values.keys() & _SET_NAMES:
        raise ValueError(f"has the name {json.dumps(min(taken))}, which the server sets")
    return values


class _StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class _Body(Labels, Sampling):
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=_MOST_STOP_TOKENS)] | None = None
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] = 1
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


class _CompletionBody(_Body):
    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    logprobs: Annotated[int | None, BeforeValidator(_count_of_logprobs)] = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] = 0
    echo: bool = False
    best_of: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None


def _tool_choice(given: object) -> object:
    """Returns the tool choice, a tool's name as a list of one; raises ValueError for anything else."""
    match given:
        case "none" | "auto" | "required":
            return given
        case {"type": "function", "function": {"name": str() as name}}:
            return [name]
    raise ValueError('is not "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')


def _format(given: object) -> object:
    """Returns the schema of an answer, None for any text; raises ValueError for an unknown type."""
    match given:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return _schema(schema)
    raise ValueError(
        'is not of the type "text", "json_object", or "json_schema" with {"json_schema": {"schema": {...}}}'
    )


Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class _CalledFunction(Strict):
    name: Name
    arguments: Annotated[dict[str, Any], BeforeValidator(_call_arguments)]


class _ToolCall(Strict):
    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: _CalledFunction
    index: int | None = Field(None, exclude=True)


class _Message(Strict):
    role: Annotated[str, Field(pattern="^(system|developer|user|assistant|tool)$")]
    content: Annotated[str, BeforeValidator(_content)] = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[_ToolCall], Field(max_length=_MOST_CALLS)] | None = None

    @model_validator(mode="after")
    def _refuse_misplaced(self) -> Self:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("has no content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"has tool_calls, and its role is {self.role}; those are the assistant's")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"has a tool_call_id, and its role is {self.role}; that is a tool's")
        return self


class _Function(Strict):
    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any], BeforeValidator(_parameters)] = _NO_PARAMETERS
    strict: bool | None = None


class _Tool(Strict):
    type: Literal["function"]
    function: _Function


class _Conversation(Strict):
    messages: Annotated[list[_Message], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_values)] | None = None
    tools: Annotated[list[_Tool], Field(max_length=_MOST_TOOLS)] = Field(default_factory=list)


class _ChatBody(_Body, _Conversation):
    messages: Annotated[list[_Message], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=1, le=1)] = 1
    tool_choice: Annotated[str | list[str], BeforeValidator(_tool_choice)] = "auto"
    parallel_tool_calls: bool = True
    response_format: Annotated[dict[str, Any] | None, BeforeValidator(_format)] = None


class _EmbeddingBody(Labels):
    input: Annotated[
        list[str | list[int]],
        BeforeValidator(lambda given: _prompts(given, _MOST_INPUTS)),
        Field(min_length=1),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool = True


class _TextBody(_Conversation):
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True


class _TokensBody(Strict):
    model: str | None = None
    tokens: list[int]


@dataclass(frozen=True)
class Tools:
    """The tool calls that an answer may have: their form, the tools by name, and the most calls."""

    form: str
    names: frozenset[str]
    most: int | None


@dataclass(frozen=True)
class Completion:
    """A checked choice of an answer: the request for the ranks, the texts that end it, and the form of the answer."""

    index: int
    is_copy: bool
    """Whether the previous choice has the same prompt."""
    request: Request
    stops: tuple[str, ...]
    streams: bool
    counts: bool
    """Whether a stream ends with token counts."""
    counts_always: bool
    """Whether each event of a stream has the token counts so far."""
    timeout: float | None
    chat: bool
    logprobs: bool = False
    """Whether the answer has the log probabilities of its tokens."""
    echo: str | None = None
    """The text of the prompt, if the answer begins with it."""
    copies: int = 1
    """The number of choices generated for its prompt; the `kept` likeliest are answered."""
    kept: int = 1
    tools: Tools | None = None
    response: Mapping[str, Any] | None = None
    """The fields of a request to `/v1/responses` that the answer repeats."""


@dataclass(frozen=True)
class Embeddings:
    """The prompts of a request for embeddings, the number of dimensions, and whether to return base64."""

    requests: list[Request]
    dimensions: int
    base64: bool
    timeout: float | None
    model: str


@dataclass(frozen=True)
class Reader:
    """Reads bodies for one model. `ending`: tokens that end an answer, in addition to those of the artifact.

    `calls`: the form in which the model writes tool calls; empty if it is not known. `path`: the tokenizer's file. `stacks`: maps each
    module with room for adapters to its inputs, outputs and rank.
    """

    model: str
    record: GenerationRecord
    tokenizer: Any
    template: ChatTemplate | None
    ending: tuple[int, ...] = ()
    calls: str = ""
    path: str = ""
    stacks: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)

    def completion(self, data: bytes | bytearray) -> list[Completion]:
        """Returns the choices of a request to `/v1/completions`; raises RefusedError."""
        body = self._body(data, _CompletionBody.model_validate)
        copies = body.n if body.best_of is None else body.best_of
        if len(body.prompt) * copies > _MOST_CHOICES:
            fact = f"{len(body.prompt)} prompts with {copies} choices each; at most {_MOST_CHOICES} choices together"
            raise RefusedError(400, fact, "n" if body.best_of is None else "best_of")
        if copies < body.n or (copies > body.n and body.stream):
            fact = f"best_of is {copies}: it is at least n, {body.n}, and n itself of a stream"
            raise RefusedError(400, fact, "best_of")
        prompts = [self._ids(one) if isinstance(one, str) else one for one in body.prompt]
        logprobs = 0 if copies > body.n and body.logprobs is None else body.logprobs
        choices = self._choices(body, prompts, body.max_tokens, _DEFAULT_TOKENS, False, copies, logprobs)
        texts = [self._echo(one, ids) if body.echo else None for one, ids in zip(body.prompt, prompts, strict=True)]
        shown = body.logprobs is not None
        return [
            replace(one, logprobs=shown, echo=texts[at // copies], copies=copies, kept=body.n)
            for at, one in enumerate(choices)
        ]

    def chat(self, data: bytes | bytearray) -> list[Completion]:
        """Returns the choices of a request to `/v1/chat/completions`; raises RefusedError."""
        body = self._body(data, _ChatBody.model_validate)
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if body.echo:
            raise RefusedError(400, "the prompt of a conversation is not shown; leave it out", "echo", "unsupported")
        if body.top_logprobs and not body.logprobs:
            raise RefusedError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        if body.tool_choice == "none":
            body.tools = []
        names = frozenset(tool.function.name for tool in body.tools)
        schema, form = body.response_format, self.calls
        if body.tool_choice not in ("none", "auto"):
            wanted = names if body.tool_choice == "required" else {*body.tool_choice}
            if not wanted or not wanted <= names:
                raise RefusedError(400, "asks for a tool that is not in 'tools'", "tool_choice")
            if schema is not None:
                raise RefusedError(400, "an answer is a call of a tool or has a format, not both", "response_format")
            schema, form = (
                _schema_of_calls([tool.function for tool in body.tools if tool.function.name in wanted]),
                "llama3",
            )
        tools = Tools(form, names, None if body.parallel_tool_calls else 1) if names else None
        ids = self._ids_of_messages(body)
        bound = None if schema is None else SchemaBound(self.path, json.dumps(schema, separators=(",", ":")))
        if bound is not None and len(bound.schema) > _MOST_SCHEMA_LETTERS:
            fact = f"the schema of the answer has {len(bound.schema):,} letters; at most {_MOST_SCHEMA_LETTERS:,}"
            raise RefusedError(400, fact, "response_format")
        choices = self._choices(body, [ids], most, self.record.length, True, body.n, logprobs, bound)
        return [replace(one, logprobs=body.logprobs, copies=body.n, kept=body.n, tools=tools) for one in choices]

    def response(self, data: bytes | bytearray) -> list[Completion]:
        """Returns the single choice of a request to `/v1/responses`; raises RefusedError."""
        body = self._body(data, ResponseBody.model_validate)
        return [replace(one, response=body.repeated()) for one in self.chat(json.dumps(body.chat()).encode())]

    def embeddings(self, data: bytes | bytearray) -> Embeddings:
        """Returns the prompts of a request to `/v1/embeddings`; raises RefusedError."""
        body = self._body(data, _EmbeddingBody.model_validate)
        if (record := self.record.embedding) is None:
            fact = "the artifact gives no embeddings; compile it with `generate: {embeddings: mean}` in the plan"
            raise RefusedError(400, fact, "input", "unsupported")
        if body.dimensions is not None and body.dimensions > record.width:
            raise RefusedError(400, f"'dimensions' is {body.dimensions}; the model has {record.width}", "dimensions")
        adapter = "" if body.model in (None, self.model) else body.model
        requests = []
        for number, one in enumerate(body.input):
            ids = self._ids(one, body.add_special_tokens) if isinstance(one, str) else one
            requests.append(Request(ids, embeds=True, adapter=adapter))
            if faults := [*faults_of(requests[-1], self.record)]:
                raise RefusedError(400, f"input {number}: {faults[0].partition(chr(10))[0]}", "input")
        return Embeddings(
            requests,
            body.dimensions or record.width,
            body.encoding_format == "base64",
            body.timeout,
            adapter or self.model,
        )

    def tokens(self, data: bytes | bytearray) -> dict[str, Any]:
        """Returns the answer to `/tokenize`, the tokens of a text or of a conversation's prompt; raises RefusedError."""
        body = self._body(data, _TextBody.model_validate)
        if (body.prompt is None) == (body.messages is None):
            raise RefusedError(400, "the body has either a prompt or messages", "prompt")
        ids = self._ids(body.prompt, body.add_special_tokens) if body.messages is None else self._ids_of_messages(body)
        return {"count": len(ids), "max_model_len": self.record.length, "tokens": ids}

    def text(self, data: bytes | bytearray) -> dict[str, Any]:
        """Returns the answer to `/detokenize`, the text of tokens; raises RefusedError."""
        tokens = self._body(data, _TokensBody.model_validate).tokens
        if self.tokenizer is None:
            raise RefusedError(400, "text needs a tokenizer: start the server with --tokenizer", "tokens")
        if len(tokens) > self.most_tokens:
            raise self._too_many_tokens(f"there are {len(tokens):,} tokens", "tokens")
        if outside := [token for token in tokens if not 0 <= token < self.record.vocabulary]:
            fact = f"{outside[0]} is not a token; tokens are 0 to {self.record.vocabulary - 1}"
            raise RefusedError(400, fact, "tokens")
        return {"prompt": self.tokenizer.decode(tokens, skip_special_tokens=False)}

    def _ids_of_messages(self, body: _Conversation) -> list[int]:
        """Returns the tokens of the prompt that the template makes of a conversation; raises RefusedError."""
        if self.template is None:
            fact = "the server has no chat template: start it with --tokenizer, and the template in tokenizer_config.json beside it"
            raise RefusedError(400, fact, "messages")
        self._refuse_tools(body.tools)
        assert body.messages is not None  # who calls has looked
        messages = [message.model_dump(exclude_none=True) | {"content": message.content} for message in body.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
        values = {**(body.chat_template_kwargs or {}), **({"tools": tools} if tools else {})}
        written = [[message["content"], message.get("tool_calls")] for message in messages]
        self._refuse_long(sum(_letters([values, written])), "messages")
        continues = body.continue_final_message
        if continues and messages[-1]["role"] != "assistant":
            fact = "the last message is the user's, and an answer continues the assistant's"
            raise RefusedError(400, fact, "continue_final_message")
        text = MessageText(self.tokenizer)
        marked, values = text.marked(messages), text.marked(values)
        options = {**values, "add_generation_prompt": body.add_generation_prompt and not continues}
        if len(text.marks) > self.most_tokens:
            raise self._too_many_tokens(f"the messages have {len(text.marks):,} texts of control tokens", "messages")
        try:
            prompt = self.template.prompt(marked, self.most_letters + len(text.marks) * MARK_LETTERS, options)
        except InputError as error:
            raise RefusedError(400, str(error), "messages") from None
        if continues:
            prompt = _up_to_end_of(prompt, marked[-1]["content"])
        return text.ids(prompt)

    def _refuse_tools(self, tools: Sequence[_Tool]) -> None:
        """Raises RefusedError if a request has tools and the template does not show them to the model, or the form of calls is unknown."""
        if not tools:
            return
        assert self.template is not None
        if "tools" not in self.template.text:
            raise RefusedError(400, "the chat template of this model has no place for tools", "tools", "unsupported")
        if not self.calls:
            fact = "the form in which this model writes calls is not known; start the server with --tool-calls"
            raise RefusedError(400, fact, "tools", "unsupported")
        names = [tool.function.name for tool in tools]
        if double := {name for name in names if names.count(name) > 1}:
            raise RefusedError(400, f"two tools have the name '{min(double)}'", "tools")

    @property
    def most_tokens(self) -> int:
        """The most tokens of a text."""
        return self.record.length if self.record.encoder is None else self.record.encoder.length

    @cached_property
    def most_letters(self) -> int:
        """The most letters of a text: `most_tokens` times the length of the longest token. A longer text is refused untokenized."""
        longest = max((len(one.encode()) for one in self.tokenizer.get_vocab(with_added_tokens=True)), default=1)
        return self.most_tokens * longest

    def _refuse_long(self, letters: int, field: str) -> None:
        """Raises RefusedError for a text that is too long to fit, before it is tokenized."""
        if letters > self.most_letters:
            raise self._too_many_tokens(f"the text has {letters:,} letters", field)

    def _too_many_tokens(self, fact: str, field: str) -> RefusedError:
        law = f"more than {self.most_tokens:,} tokens have, the length of this model"
        return RefusedError(400, f"{fact}, {law}", field, "context_length_exceeded")

    def refuse_other(self, model: str) -> None:
        """Raises RefusedError if a client names a model other than this one or one of its adapters."""
        if model not in self.models:
            fact = f"the model '{model}' is not here; this is '{self.model}'"
            more = f", with the adapters {', '.join(map(repr, self.models[1:]))}" if self.models[1:] else ""
            raise RefusedError(404, fact + more, "model", "model_not_found")

    @property
    def models(self) -> list[str]:
        """The names that a request may give as its model: the model's, and those of its adapters."""
        return [self.model, *filter(None, self.record.adapters)]

    def change(self, data: bytes | bytearray, folder: str | None) -> AdapterChange:
        """Returns the adapter that a request to `/v1/load_lora_adapter` loads from inside `folder`; raises RefusedError."""
        body = self._body(data, LoadBody.model_validate)
        if body.lora_name in self.models:
            raise RefusedError(
                400, f"there is a model '{body.lora_name}'; unload it, or give another name", "lora_name"
            )
        change = loaded(body, folder, self.stacks)
        if "" not in self.record.adapters:
            fact = f"the {len(self.record.adapters)} places of adapters are taken; unload one"
            raise RefusedError(400, fact, "lora_name", "no_place")
        return change

    def leaving(self, data: bytes | bytearray) -> AdapterChange:
        """Returns the adapter that a request to `/v1/unload_lora_adapter` unloads; raises RefusedError."""
        name = self._body(data, UnloadBody.model_validate).lora_name
        if name not in self.models[1:]:
            raise RefusedError(404, f"there is no adapter '{name}'", "lora_name", "model_not_found")
        if not self.stacks:
            raise RefusedError(
                400, "adapters of this artifact stay: it has no room for others", "lora_name", "unsupported"
            )
        return AdapterChange(name)

    def _body(self, data: bytes | bytearray, validate: Callable[[object], Any]) -> Any:
        try:
            content = json.loads(data, parse_constant=_not_json)
            if not data.isascii() or b"\\u" in data:
                json.dumps(content, ensure_ascii=False).encode()  # half a pair of UTF-16 is no text
            content = (
                {
                    name: value if name in _SCHEMAS else _without_nulls(value)
                    for name, value in content.items()
                    if value is not None
                }
                if isinstance(content, dict)
                else content
            )
        except UnicodeError:
            raise RefusedError(400, "the body is not valid UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise RefusedError(400, f"the body is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise RefusedError(400, "the body is not a JSON object")
        for name, neutral in _NEUTRAL.items():
            if name not in content:
                continue
            value = content.pop(name)
            if not any(_is_neutral(value, one) for one in neutral):
                shown = json.dumps(value)[:80]
                raise RefusedError(
                    400, f"'{name}' is {shown}: this server does not do that; leave it out", name, "unsupported"
                )
        if len(content) > _MOST_FIELDS:
            raise RefusedError(400, f"the body has {len(content):,} fields, more than this server knows")
        try:
            body = validate(content)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_input=False)
            texts = [f"'{'.'.join(map(str, one['loc']))}' {_fact_of(one)}" for one in faults[:8]]
            raise RefusedError(400, "; ".join(texts), str(faults[0]["loc"][0]) if faults[0]["loc"] else None) from None
        if (model := getattr(body, "model", None)) is not None:
            self.refuse_other(model)
        return body

    def _ids(self, text: str, special: bool = True) -> list[int]:
        if self.tokenizer is None:
            raise RefusedError(
                400, "text needs a tokenizer: start the server with --tokenizer, or give a list of ids", "prompt"
            )
        self._refuse_long(len(text), "prompt")
        return ids_of(self.tokenizer, text, special)

    def _echo(self, prompt: str | list[int], ids: list[int]) -> str:
        """Returns the text of a prompt."""
        if isinstance(prompt, str) or self.tokenizer is None:
            return prompt if isinstance(prompt, str) else ""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def _choices(
        self,
        body: _CompletionBody | _ChatBody,
        prompts: list[list[int]],
        most: int | None,
        default: int,
        chat: bool,
        copies: int,
        logprobs: int | None,
        schema: SchemaBound | None = None,
    ) -> list[Completion]:
        """Returns `copies` choices for each prompt, each with its own seed."""
        first = [self._checked(body, ids, most, default, chat, logprobs, schema) for ids in prompts]
        copied = [(one, copy) for one in first for copy in range(copies)]
        return [
            replace(
                one,
                index=index,
                is_copy=copy > 0,
                request=replace(one.request, seed=(one.request.seed + copy) % _SEEDS),
            )
            for index, (one, copy) in enumerate(copied)
        ]

    def _checked(
        self,
        body: _CompletionBody | _ChatBody,
        ids: list[int],
        most: int | None,
        default: int,
        chat: bool,
        logprobs: int | None,
        schema: SchemaBound | None,
    ) -> Completion:
        encoder = self.record.encoder  # the prompt is the encoder's, where there is one
        prompt, encoder_ids = (ids, None) if encoder is None else (encoder.start, ids)
        room = self.record.length - len(prompt)
        if body.echo and encoder is not None:
            raise RefusedError(400, "the prompt is the encoder's, and no text before the answer; leave it out", "echo")
        scores_prompt = body.echo and (most == 0 or logprobs is not None)
        if room < (0 if scores_prompt and most == 0 else 1):
            fact = f"the prompt has {len(ids)} tokens; of the {self.record.length} of a sequence at least one is the answer's"
            raise RefusedError(400, fact, "prompt", "context_length_exceeded")
        stops = tuple(body.stop or ())
        if stops and self.tokenizer is None:
            raise RefusedError(
                400, "a text that ends the answer needs a tokenizer: start the server with --tokenizer", "stop"
            )
        asked = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
        request = Request(
            prompt,
            **{**self.record.defaults.options, **asked},
            encoder=encoder_ids,
            max_tokens=min(room, default) if most is None else most,
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            stop=[*(() if body.ignore_eos else self.ending), *(body.stop_token_ids or ())],
            ignore_end=body.ignore_eos,
            min_tokens=body.min_tokens or 0,
            logprobs=0 if scores_prompt and logprobs is None else logprobs,
            scores_prompt=scores_prompt,
            schema=schema,
            adapter="" if body.model in (None, self.model) else body.model,
        )
        if faults := [*faults_of(request, self.record)]:
            raise RefusedError(400, "; ".join(fact.partition("\n")[0] for fact in faults))
        options = body.stream_options or _StreamOptions()
        counts, always = options.include_usage, options.include_usage and options.continuous_usage_stats
        return Completion(0, False, request, stops, bool(body.stream), counts, always, body.timeout, chat)


def _without_nulls(document: Any) -> Any:
    """Returns a document without its null fields."""
    if isinstance(document, dict):
        return {name: _without_nulls(value) for name, value in document.items() if value is not None}
    if isinstance(document, list):  # most are long lists of numbers
        return [_without_nulls(one) if isinstance(one, dict | list) else one for one in document]
    return document


def _fact_of(fault: ErrorDetails) -> str:
    """Returns the text of a field's fault, to be put after the field's name."""
    if fault["type"] == "extra_forbidden":
        return "is not a field that this server knows; leave it out"
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    return f"is wrong: {fault['msg']}"


def _schema_of_calls(functions: Sequence[_Function]) -> dict[str, Any]:
    """Returns the schema of an object with the name of one of the functions, and matching arguments."""
    calls = []
    for at, function in enumerate(functions):
        where = f"#/anyOf/{at}/properties/arguments"
        arguments = _moved(function.parameters, where)
        properties = {"name": {"const": function.name}, "arguments": arguments}
        shape = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        calls.append(shape)
    return {"anyOf": calls}


def _moved(schema: Any, where: str) -> Any:
    """Returns a schema with the references to its own parts changed for its new place `where` inside another schema."""
    match schema:
        case dict():
            return {
                name: where + value[1:]
                if name == "$ref" and isinstance(value, str) and value.startswith("#")
                else _moved(value, where)
                for name, value in schema.items()
            }
        case list():
            return [_moved(inner, where) for inner in schema]
    return schema


def _letters(document: object) -> Iterator[int]:
    """Yields the number of letters of each text in a document."""
    match document:
        case str():
            yield len(document)
        case dict():
            for value in document.values():
                yield from _letters(value)
        case list():
            for value in document:
                yield from _letters(value)


def _up_to_end_of(prompt: str, message: str) -> str:
    """Returns the prompt up to the end of the last message, without the end of its turn; raises RefusedError if the prompt lacks it."""
    shown = message if message in prompt else message.strip()
    before, content, _ = prompt.rpartition(shown) if shown else ("", "", "")
    if not content:
        raise RefusedError(400, "the chat template does not write the last message as it is", "continue_final_message")
    return before + content


def _not_json(word: str) -> NoReturn:
    """Raises ValueError for NaN and Infinity, which Python reads, and JSON does not have."""
    raise ValueError(f"{word} is not a number")
