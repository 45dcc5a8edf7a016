"""The options of `partc serve`, as commands, launching process and ranks pass them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """Where it listens and for how long it waits; times in seconds, paths absolute.

    `hosts`: further names by which clients may call it. `origins`: whose pages may use it. `name`: of the model, in place of the
    artifact's. `api_key`: what clients name. `shares`: whether prompts share the begins that slots have. `tool_calls`: the form of the
    model's calls of tools, in place of what its template tells. `drain`: how long open requests may go on when the server ends. `queue`:
    how many may wait for a slot. `timeout`: of a request that does not say its own. `restart`: how often a job that fails is started again.
    `adapters`: inside of which folder clients may load adapters; None: they may not. `link`: the socket by which rank 0 reaches the
    launching process, empty where the server runs in rank 0 itself.
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
