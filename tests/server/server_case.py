"""A server for tests, and its clients: all of it in this process, or `partc serve` with its ranks over MPI.

with LocalServer(build, tokenizer=path) as server:
    status, answer = server.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 3})
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self

from partc.cli.job.serving import lead, open_front
from partc.cli.server.link import Link
from partc.cli.server.settings import ServerSettings
from partc.runtime import ContinuousBatch, load_local_generator, open_artifact
from waiting import LONG, until

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.?"
"""The texts of the tokens of a decoder of 64, one each."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}{{ message.content | trim }}{% endfor %}{{ extra }}"
    "{% if add_generation_prompt %}A{% endif %}"
)
SCRIPT = ["U", "Sure", ". ", "[TOOL_CALLS]", '[{"name": ', '"f", "argu', 'ments": {"x": ', "1}}", "]", "</s>"]
"""What the model writes after its first token, a text for each token."""
TOOLS_TEMPLATE = (
    "{% for tool in tools %}t{{ tool.function.name }}{{ tool.function.parameters | tojson }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}{{ message.content }}{{ message.tool_call_id }}"
    "{% for call in message.tool_calls %}c{{ call.function.name }}{{ call.function.arguments.x }}{% endfor %}{% endfor %}U"
)
Answer = tuple[int, dict[str, Any]]


def write_tokenizer(folder: Path, letters: str = LETTERS, template: str | None = TEMPLATE) -> Path:
    """A tokenizer of one token a letter, and its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def write_script(folder: Path, plan: str) -> Path:
    """The artifact of a model that counts, and its tokenizer: after token 1 it makes 2, 3, ..., whose texts are the script's."""
    import numpy as np
    import onnx
    from decoders import VOCABULARY, WIDTH, decoder
    from onnx import numpy_helper
    from partc.compiler.pipeline import compile_model
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    model = decoder()
    table = np.random.default_rng(0).standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    set_weights = {
        "embed.tokens.weight": table,
        "embed.positions.weight": np.zeros((4096, WIDTH), np.float32),
        "head.weight": np.roll(table, 1, 0).T,
    }
    for weight in model.graph.initializer:
        if weight.name.endswith(".weight"):
            array = set_weights.get(weight.name, np.zeros(weight.dims, np.float32))
            weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    onnx.save(model, folder / "model.onnx")
    (folder / "plan.yaml").write_text(plan)
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    letters = [letter for letter in 'abcdefghijklmnopqrstuvwxyzS0123456789{}[]:",_T-</>' if letter not in SCRIPT]
    pieces = ["Ġ", *SCRIPT, *letters]
    tokenizer = Tokenizer(models.BPE({piece.replace(" ", "Ġ"): at for at, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TOOLS_TEMPLATE, "eos_token": "</s>"}))
    return folder / "build"


@dataclass
class Client:
    """What asks a server on a port of this machine."""

    port: int = 0

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, {key.lower(): value for key, value in response.getheaders()}, response.read()

    def get(self, path: str) -> Answer:
        status, _, body = self.request("GET", path)
        return status, json.loads(body)

    def post(self, path: str, body: dict[str, Any]) -> Answer:
        status, _, found = self.request("POST", path, json.dumps(body).encode())
        return status, json.loads(found)

    def complete(self, prompt: list[Any] | str, **options: Any) -> dict[str, Any]:
        """The choice of an answer."""
        status, found = self.post("/v1/completions", {"prompt": prompt, **options})
        assert status == 200, found
        return {**found["choices"][0], "usage": found["usage"]}

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics."""
        lines = self.request("GET", "/metrics")[2].decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    @contextmanager
    def streaming(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[tuple[str, str]]]:
        """The events of a stream, kind and data, while the connection is open."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("POST", path, json.dumps({**body, "stream": True}))
            response = connection.getresponse()
            assert response.status == 200, response.read()
            yield _events(response)
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)
            response.close()


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[str, str]]:
    kind = "message"
    for line in response:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, value
            kind = "message"


class LocalServer(Client):
    """The server of an artifact, its ranks as threads of this process."""

    def __init__(self, folder: Path, tokenizer: Path | None = None, **settings: Any) -> None:
        named = None if tokenizer is None else str(tokenizer)
        self.front = open_front(ServerSettings(port=0, tokenizer=named, **settings), open_artifact(folder).manifest)
        self.port = int(self.front.address.rpartition(":")[2])
        self.generator = load_local_generator(folder, threads=1)
        self.batch = ContinuousBatch(self.generator)
        self.near, far = socket.socketpair()
        self.front.__enter__()
        self.front.attach(far)
        self._thread = Thread(target=lead, args=(self.batch, Link(self.near), 0.2))
        self._thread.start()
        until(lambda: self.front.is_ready)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.front.drain()
        self._thread.join(60)
        self.near.close()
        self.front.__exit__(None, None, None)
        self.generator.close()
        assert not self._thread.is_alive()


@dataclass
class MpiServer(Client):
    """The command, with its ranks over MPI."""

    folder: Path = Path()
    options: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    """A program that starts it, with its arguments."""
    lines: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        command = [
            *self.before,
            sys.executable,
            "-m",
            "partc.cli",
            "serve",
            str(self.folder),
            "--port",
            "0",
            *self.options,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.await_ready()
        return self

    def await_ready(self) -> None:
        """Waits for the line that says where it is."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving on http://127.0.0.1:"), line + self.ended()[1]
        self.port = int(line.partition(";")[0].rpartition(":")[2])

    def ranks(self) -> list[int]:
        """The process ids of the ranks, in order."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes().split(b"\0")
                status = (entry.parent / "environ").read_bytes()
            except OSError:
                continue
            if b"partc.cli.job" in words and b"-n" not in words and str(self.folder).encode() in words[-2]:
                rank = next(one for one in status.split(b"\0") if one.startswith(b"OMPI_COMM_WORLD_RANK="))
                found.append((int(rank.rpartition(b"=")[2]), int(entry.parent.name)))
        return [pid for _, pid in sorted(found)]

    def ended(self, seconds: float = LONG) -> tuple[int, str]:
        """The exit code and what was told, once it has ended."""
        _, told = self.process.communicate(timeout=seconds)
        return self.process.returncode, told

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
