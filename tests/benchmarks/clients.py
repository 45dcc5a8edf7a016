"""Clients of OpenAI's API, unchanged, against `partc serve` of a small decoder over two MPI ranks: a table of requests and results.

    pip install openai litellm langchain-openai instructor
    NODE_PATH=node_modules python tests/benchmarks/clients.py [--only openai,langchain,node]         npm install openai

The decoder counts (`tests/server/server_case.py`): after the prompt it writes a word and a call of the tool `f`, unless a schema binds it.
A client that is not installed is left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from server_case import MpiServer, write_script

PLAN = """ranks: 2
sharding: {"layers.*.q": colwise, "layers.*.k": colwise, "layers.*.v": colwise, "layers.*.o": rowwise, head: colwise}
generate: {slots: 4, length: 2048, chunk: 64, embeddings: mean}
"""
FUNCTION = {
    "name": "f",
    "description": "a test",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
TURN: Any = [{"role": "user", "content": "hi"}]
SHAPE = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "shape", "strict": True, "schema": SHAPE}}
Cases = Iterator[tuple[str, Callable[[], object]]]


def _openai(url: str) -> Cases:
    from openai import BadRequestError, OpenAI
    from pydantic import BaseModel

    class Shape(BaseModel):
        a: int
        b: list[str]

    client = OpenAI(base_url=url, api_key="none")
    chat = client.chat.completions

    def call(**options: Any) -> object:
        choice = chat.create(model="model.onnx", messages=TURN, tools=TOOLS, max_tokens=100, **options).choices[0]
        assert choice.message.tool_calls is not None, choice
        function = choice.message.tool_calls[0].function
        assert function.name == "f"
        assert isinstance(json.loads(function.arguments)["x"], int)
        return choice.finish_reason, choice.message.content, function.arguments

    def stream() -> object:
        text, calls, finish = "", [], None
        for chunk in chat.create(model="model.onnx", messages=TURN, tools=TOOLS, stream=True):
            text += chunk.choices[0].delta.content or ""
            calls += chunk.choices[0].delta.tool_calls or []
            finish = chunk.choices[0].finish_reason or finish
        assert [one.function.name for one in calls] == ["f"]
        return finish, text, calls[0].function.arguments

    def turns() -> object:
        message = chat.create(model="model.onnx", messages=TURN, tools=TOOLS).choices[0].message
        answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"}
        return chat.create(model="model.onnx", messages=[*TURN, message, answer], tools=TOOLS).choices[0].finish_reason

    def formed(format: Any) -> object:
        text = (
            chat.create(model="model.onnx", messages=TURN, response_format=format, max_tokens=60)
            .choices[0]
            .message.content
        )
        return json.loads(text)

    def parsed() -> object:
        message = chat.parse(model="model.onnx", messages=TURN, response_format=Shape, max_tokens=60).choices[0].message
        assert isinstance(message.parsed, Shape)
        return message.parsed

    def refused(**options: Any) -> object:
        try:
            chat.create(model="model.onnx", messages=TURN, **options)
        except BadRequestError as error:
            return error.status_code, error.body["message"]
        raise AssertionError("is not refused")

    yield "embeddings", lambda: len(client.embeddings.create(model="model.onnx", input=["hi", "h"]).data[1].embedding)
    yield "completion", lambda: client.completions.create(model="model.onnx", prompt="hi", max_tokens=4).choices[0].text
    yield "chat", lambda: chat.create(model="model.onnx", messages=TURN, max_tokens=3).choices[0].message.content
    yield "tools, auto", call
    yield "tools, required", lambda: call(tool_choice="required")
    yield "tools, by name", lambda: call(tool_choice={"type": "function", "function": {"name": "f"}})
    yield "tools, stream", stream
    yield "tool message", turns
    yield "json_object", lambda: formed({"type": "json_object"})
    yield "json_schema", lambda: formed(FORMAT)
    yield "parse(pydantic)", parsed
    yield "schema without an end", lambda: refused(response_format=FORMAT, max_tokens=5)
    yield "tool without a name", lambda: refused(tools=[{"type": "function", "function": {}}])
    yield "image", lambda: refused_image(chat)


def refused_image(chat: Any) -> object:
    """The refusal of an image."""
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    try:
        chat.create(model="model.onnx", messages=[{"role": "user", "content": [part]}])
    except Exception as error:
        return str(error)[:120]
    raise AssertionError("is not refused")


def _litellm(url: str) -> Cases:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for prices on the internet
    import litellm

    def complete(**options: Any) -> Any:
        return litellm.completion(
            model="openai/model.onnx", api_base=url, api_key="none", messages=TURN, max_tokens=60, **options
        )

    yield "chat", lambda: complete().choices[0].message.content
    yield "stream", lambda: "".join(one.choices[0].delta.content or "" for one in complete(stream=True))
    yield "tools", lambda: complete(tools=TOOLS).choices[0].message.tool_calls[0].function.arguments
    yield "json_schema", lambda: json.loads(complete(response_format=FORMAT).choices[0].message.content)


def _langchain(url: str) -> Cases:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Shape(BaseModel):
        """A shape."""

        a: int
        b: list[str]

    model = ChatOpenAI(base_url=url, api_key="none", model="model.onnx", max_tokens=80)
    tools = model.bind_tools(TOOLS)

    def turns() -> object:
        first = tools.invoke("hi")
        answer = ToolMessage("7", tool_call_id=first.tool_calls[0]["id"])
        return tools.invoke([HumanMessage("hi"), first, answer]).response_metadata["finish_reason"]

    yield "batch of 6", lambda: [one.content for one in model.batch(["hi"] * 6)]
    yield "stream", lambda: "".join(one.content for one in model.stream("hi"))
    yield "bind_tools", lambda: tools.invoke("hi").tool_calls
    yield "tool message", turns
    yield (
        "structured output, json_schema",
        lambda: model.with_structured_output(Shape, method="json_schema").invoke("hi"),
    )
    yield (
        "structured output, function_calling",
        lambda: model.with_structured_output(Shape, method="function_calling").invoke("hi"),
    )
    yield (
        "structured output, json_mode",
        lambda: model.with_structured_output(FORMAT["json_schema"], method="json_mode").invoke("hi"),
    )


def _instructor(url: str) -> Cases:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class Shape(BaseModel):
        a: int
        b: list[str]

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=mode)
        yield (
            mode.name,
            lambda client=client: client.chat.completions.create(
                model="model.onnx", messages=TURN, response_model=Shape, max_tokens=80, max_retries=1
            ),
        )


NODE = """
const OpenAI = require("openai").default;
const client = new OpenAI({baseURL: process.argv[1], apiKey: "none"}), model = "model.onnx";
const messages = [{role: "user", content: "hi"}], tools = TOOLS, response_format = FORMAT;
const chat = options => client.chat.completions.create({model, messages, ...options});
const message = async options => (await chat(options)).choices[0].message;
const asked = {
  completion: async () => (await client.completions.create({model, prompt: "hi", max_tokens: 4})).choices[0].text,
  chat: async () => (await message({max_tokens: 3})).content,
  stream: async () => {
    let text = "";
    for await (const one of await chat({stream: true})) text += one.choices[0].delta.content ?? "";
    return text;
  },
  tools: async () => (await message({tools})).tool_calls[0].function,
  json_schema: async () => JSON.parse((await message({response_format, max_tokens: 60})).content),
  responses: async () => (await client.responses.create({model, input: "hi", max_output_tokens: 3})).output_text,
  embeddings: async () => {
    const found = await client.embeddings.create({model, input: ["hi", "h"]});
    const size = Math.hypot(...found.data[0].embedding);
    if (Math.abs(size - 1) > 1e-5) throw new Error(`the length is ${size}`);
    return [found.data.length, found.data[0].embedding.length, found.usage.prompt_tokens];
  },
  models: async () => { const ids = []; for await (const one of client.models.list()) ids.push(one.id); return ids; },
  refused: async () => {
    try { await chat({n: 10000}); } catch (error) { return [error.constructor.name, error.status]; }
    throw new Error("is not refused");
  },
};
asked[process.argv[2]]().then(found => console.log(JSON.stringify(found)), error => { console.error(String(error)); process.exit(1); });
"""


def _node(url: str) -> Cases:
    script = NODE.replace("TOOLS", json.dumps(TOOLS)).replace("FORMAT", json.dumps(FORMAT))

    def ask(request: str) -> object:
        ran = subprocess.run(["node", "-e", script, url, request], capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(ran.stderr.strip())
        return json.loads(ran.stdout)

    for request in re.findall(r"^  (\w+): async", NODE, re.MULTILINE):
        yield request, lambda request=request: ask(request)


def _has_node() -> bool:
    """Whether node has openai's package."""
    look = ["node", "-e", 'require("openai")']
    return shutil.which("node") is not None and not subprocess.run(look, capture_output=True).returncode


CLIENTS = {
    "openai": _openai,
    "litellm": _litellm,
    "langchain_openai": _langchain,
    "instructor": _instructor,
    "node": _node,
}


def main() -> int:
    """Prints the table; the exit code says whether every request was met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build = write_script(folder, PLAN)
        with MpiServer(folder=build, options=("--tokenizer", str(folder / "tokenizer.json"))) as server:
            for client, cases in CLIENTS.items():
                if only and client.partition("_")[0] not in only:
                    continue
                if not (_has_node() if client == "node" else importlib.util.find_spec(client)):
                    print(f"{client:17} is not installed")
                    continue
                for request, ask in cases(f"http://127.0.0.1:{server.port}/v1"):
                    try:
                        shown = f"ok     {ask()!r}"
                    except Exception as error:
                        wrong, shown = wrong + 1, f"WRONG  {type(error).__name__}: {error}"
                    print(f"{client:17}{request:37}{shown[:160]}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
