"""The options of `partc serve`, which the command passes to the launching process and the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """The server's address, its time limits in seconds, and other settings; paths are absolute.

    `hosts`: further host names for the server. `origins`: the origins whose pages may use it. `name`: the model's name, in place of the
    artifact's. `api_key`: the key that clients give. `shares`: whether prompts share beginnings that slots already have. `tool_calls`: the
    form of the model's tool calls, in place of the one derived from its template. `drain`: the time for open requests when the server ends.
    `queue`: the most requests that wait for a slot. `timeout`: the limit of a request that does not set its own. `restart`: the most
    restarts of a failed job. `adapters`: the folder from which clients may load adapters; None forbids it. `link`: the socket by which rank
    0 reaches the launching process; empty if the server runs in rank 0 itself.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain: float = 30.0
    queue: int = 64
    timeout: float = 600.0
    tokenizer: str | None = None
    restart: int = 0
    link: str = ""
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    name: str | None = None
    api_key: str | None = None
    shares: bool = True
    tool_calls: str | None = None
    adapters: str | None = None
