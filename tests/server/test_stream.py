"""What a stream writes, and when: an event with all tokens that are there, in one write, and nothing after its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from partc.cli.job.serving import _News
from partc.cli.server.answer import Answer, Letters
from partc.cli.server.bodies import Completion
from partc.cli.server.engine import Engine, State
from partc.cli.server.metrics import Metrics, Seconds
from partc.cli.server.stream import EventStream
from partc.runtime.generation.request import NewToken, Request


class Ranks:
    """What the ranks are told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.writes = 0

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.told += [json.loads(line) for line in data.splitlines()]
        self.writes += 1


def streamed(
    *happens: Callable[[Engine], object], chat: bool = False, counts: bool = False, always: bool = False
) -> tuple[list[str], list[dict[str, Any]]]:
    """The bodies that a stream writes while this happens, each once the stream has nothing more to write, and what the ranks are told."""

    async def run() -> tuple[list[str], list[dict[str, Any]]]:
        engine, ranks, written, left = Engine(2, 0, Metrics()), Ranks(), list[str](), asyncio.Event()
        engine.state, engine._writer = State.READY, ranks  # type: ignore[assignment]
        request = Request([1, 2], max_tokens=9)
        completion = Completion(
            0, False, request, (), streams=True, counts=counts, counts_always=always, timeout=None, chat=chat
        )
        answer = Answer(completion, "m", engine.submit(request, 60.0), Letters(None, ()), 0)

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if "body" in message:
                written.append(message["body"].decode())
                ends.append(not message["more_body"])

        ends: list[bool] = []
        stream = asyncio.create_task(EventStream([answer], engine)({"type": "http"}, receive, send))
        for one in happens:
            await asyncio.sleep(0)  # the stream waits again
            one(engine)
            if one is leaves:
                left.set()
            for _ in range(4):
                await asyncio.sleep(0)
        await asyncio.wait_for(stream, 10)
        assert ends == [False] * (len(ends) - 1) + [True]
        return written, ranks.told[1:]

    return asyncio.run(run())


def made(*tokens: int, finish: str = "") -> Callable[[Engine], object]:
    """Steps make tokens of which the server hears at once."""
    return lambda engine: engine._take(
        {"made": [[0, [*tokens], finish]], "used": 1, "waiting": 0, "seconds": [0.001], "cached": []}
    )


def leaves(engine: Engine) -> None:
    """The client goes away."""


def choices(body: str) -> list[dict[str, Any]]:
    """The first choice of each event."""
    events = [one.removeprefix("data: ") for one in body.split("\n\n") if one and one != "data: [DONE]"]
    return [json.loads(one)["choices"][0] for one in events]


def test_tokens_that_are_there_together_are_one_event_and_one_write() -> None:
    written, told = streamed(made(5), made(6, 7, 8), made(9, finish="length"))
    found = [choices(body) for body in written]
    assert [[one["token_ids"] for one in body] for body in found] == [[[5]], [[6, 7, 8]], [[9]]]
    assert [body[0]["finish_reason"] for body in found] == [None, None, "length"]
    assert written[-1].endswith("data: [DONE]\n\n")
    assert told == []


def test_the_last_write_has_the_counts() -> None:
    written, _ = streamed(made(5, 6, finish="stop"), counts=True)
    usage = json.loads(written[-1].split("\n\n")[1].removeprefix("data: "))["usage"]
    assert (len(written), usage["completion_tokens"]) == (1, 2)


def test_each_event_has_the_counts_where_they_are_asked_for() -> None:
    written, _ = streamed(made(5), made(6, 7), made(8, finish="stop"), counts=True, always=True)
    events = [event.removeprefix("data: ") for body in written for event in body.split("\n\n") if event]
    assert [json.loads(event)["usage"]["completion_tokens"] for event in events[:-1]] == [1, 3, 4, 4]


def test_the_first_event_of_a_conversation_alone_has_the_role() -> None:
    written, _ = streamed(made(5), made(6, finish="length"), chat=True)
    assert [choices(body)[0]["delta"] for body in written] == [{"role": "assistant", "content": ""}, {"content": ""}]


@pytest.mark.parametrize("first", [(), (made(5),)])
def test_a_client_that_leaves_ends_its_request_once(first: tuple[Callable[[Engine], object], ...]) -> None:
    _, told = streamed(*first, leaves)
    assert told == [{"cancel": 0}]


def test_a_failure_is_the_last_event() -> None:
    written, told = streamed(made(5), lambda engine: engine.fail("rank 1 was killed"))
    kind, data = written[-1].removesuffix("\n\n").split("\n")
    assert (kind, json.loads(data.removeprefix("data: "))["error"]["code"]) == ("event: error", "ranks_failed")
    assert (len(written), told) == (2, [])


def test_messages_of_one_turn_of_the_event_loop_are_one_write_in_their_order() -> None:
    async def run() -> Ranks:
        engine, ranks = Engine(2, 2, Metrics()), Ranks()
        engine.state, engine._writer = State.READY, ranks  # type: ignore[assignment]
        first = engine.submit(Request([1], max_tokens=9), 60.0)
        engine.submit(Request([2], max_tokens=9), 60.0)
        engine.end(first, "stop")
        assert ranks.writes == 0
        await asyncio.sleep(0)
        assert ranks.writes == 1
        await engine.drain(0.0)
        await asyncio.sleep(0)
        return ranks

    ranks = asyncio.run(run())
    assert [next(iter(one.items())) for one in ranks.told] == [
        ("admit", 0),
        ("admit", 1),
        ("cancel", 0),
        ("cancel", 1),
        ("end", True),
    ]
    assert ranks.writes == 2


def test_a_time_is_counted_in_its_bucket_and_all_larger_ones() -> None:
    seconds = Seconds()
    for one in (0.001, 0.0011, 10.0, 11.0):
        seconds.add(one)
    counts = [int(line.rpartition(" ")[2]) for line in seconds.lines("x") if "bucket" in line]
    assert counts == [1, *[2] * 11, 3, 4]
    assert [*seconds.lines("x")][-1] == "x_count 4"


class Steps:
    """What the server is sent of steps of `seconds` each, by a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.seconds, self.sent, self._now = seconds, list[dict[str, Any]](), 10.0
        self._slots = SimpleNamespace(used=0, waiting=0, running=set[int](), drafted=0, accepted=0)
        self._news = _News(SimpleNamespace(send=self.sent.append))  # type: ignore[arg-type]
        monkeypatch.setattr("partc.cli.job.serving.time", SimpleNamespace(perf_counter=lambda: self._now))

    def step(self, *rows: tuple[int, int, str]) -> list[Any]:
        """What is sent of a step that makes these tokens."""
        self._now, before, slots = self._now + self.seconds, len(self.sent), self._slots
        ended = {request for request, _, finish in rows if finish}
        slots.running = (slots.running | {request for request, _, _ in rows}) - ended
        slots.used = len(slots.running)
        self._news.add([NewToken(*row) for row in rows], slots, self.seconds)  # type: ignore[arg-type]
        return [one["made"] for one in self.sent[before:]]


def test_first_and_last_tokens_are_sent_alone_and_the_others_together(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, 0.0095)
    assert steps.step((0, 5, "")) == [[(0, [5], "")]]
    assert steps.step((0, 6, "")) == []
    assert steps.step((0, 7, ""), (1, 8, "")) == [[(1, [8], "")]]
    assert steps.step((0, 9, ""), (1, 10, "length")) == [[(1, [10], "length")]]
    assert [steps.step((0, token, "")) for token in (11, 12)] == [[], [[(0, [6, 7, 9, 11, 12], "")]]]
    assert sum(len(one["seconds"]) for one in steps.sent) == 6


def test_no_token_of_long_steps_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, 0.026)
    rows = [((0, token, ""), (1, 2 * token, "")) for token in range(5, 15)]
    assert [steps.step(*row) for row in rows] == [[[(0, [a], ""), (1, [b], "")]] for (_, a, _), (_, b, _) in rows]


def test_all_tokens_of_short_steps_are_sent_once_and_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, given = Steps(monkeypatch, 0.001), {request: [*range(request, 400, 7)] for request in range(3)}
    ends = max(map(len, given.values())) + 2
    for at in range(ends):
        due = {request: at - request for request in given if 0 <= at - request < len(given[request])}
        steps.step(*((one, given[one][n], "length" * (n == len(given[one]) - 1)) for one, n in due.items()))
    got: dict[int, list[int]] = {request: [] for request in given}
    finished = list[tuple[int, str]]()
    for request, tokens, finish in (row for message in steps.sent for row in message["made"]):
        assert request not in dict(finished)
        got[request] += tokens
        finished += [(request, finish)] if finish else []
    assert (got, finished) == (given, [(request, "length") for request in given])
    assert len(steps.sent) < ends / 4
