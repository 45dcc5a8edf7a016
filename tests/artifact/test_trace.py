"""A trace has every action of every step, nested as they ran, and an arrow for each message; a damaged file is read as far as it goes."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutation_kinds import KINDS, build
from partc.cli.job.profile import clock_offset
from partc.cli.main import invoke
from partc.runtime.artifact.trace import BETWEEN, CATEGORIES, STEP, read_trace
from partc.runtime.communication.in_process import LocalWorld
from partc.runtime.errors import UsageError
from partc.runtime.execution.rank_program import describe_action

STEPS = 6
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(KINDS["pipeline"], tmp_path_factory.mktemp("traced") / "build")


@pytest.fixture(scope="module")
def trace(built: Path) -> Path:
    """Of a training over MPI, whose ranks have clocks of their own."""
    rng = np.random.default_rng(1)
    data, file = built.parent / "data.npz", built.parent / "a.trace.json"
    np.savez(data, x=rng.normal(size=(16, 6)).astype(np.float32), label=rng.integers(0, 5, 16))
    given = ["--data", str(data), "--batch", "8", "--steps", str(STEPS), "--profile", str(file), "-q"]
    assert invoke(["train", str(built), *given]) == 0
    return file


def events(trace: Path, kind: str) -> list[dict[str, Any]]:
    return [one for one in json.loads(trace.read_text())["traceEvents"] if one["ph"] == kind]


def test_every_action_of_every_step_is_there_once(trace: Path, built: Path) -> None:
    """The names are those of failures and of the status board."""
    found = Counter(
        (one["pid"], one["args"]["step"], one["name"]) for one in events(trace, "X") if one["cat"] in CATEGORIES
    )
    assert {step for _, step, _ in found} == {*range(1, STEPS + 1)}
    for rank in range(2):
        names = []
        while (name := describe_action(built, rank, len(names))) and not name.startswith("nothing"):
            names.append(name)
            if len(names) > 1000:
                break
        for step in range(1, STEPS + 1):
            have = Counter({name: count for (pid, one, name), count in found.items() if (pid, one) == (rank, step)})
            assert not Counter(names) - have
            assert all(name.startswith(("end of ", "memory after ")) for name in (have - Counter(names)))


def test_spans_of_a_lane_follow_each_other_inside_of_their_step(trace: Path) -> None:
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    steps = {}
    for one in events(trace, "X"):
        span = one["ts"], one["ts"] + one["dur"]
        if one["cat"] == STEP:
            steps[one["pid"], one["args"]["step"]] = span
        elif one["cat"] in CATEGORIES:
            lanes[one["pid"], one["tid"]].append(span)
            begin, end = steps[one["pid"], one["args"]["step"]]
            assert begin <= span[0]
            assert span[1] <= end + 0.01  # times are written to a nanosecond
    for spans in lanes.values():
        for before, after in itertools.pairwise(spans):
            assert before[1] <= after[0] + 0.01


def test_arrows_go_from_sends_to_receives_of_the_same_step(trace: Path) -> None:
    begun = {one["id"]: one for one in events(trace, "s")}
    ended = {one["id"]: one for one in events(trace, "f")}
    assert begun.keys() == ended.keys()
    assert len(begun) == len(events(trace, "s")) == len(events(trace, "f"))
    assert {type(number) for number in begun} == {int}  # Perfetto's trace processor drops arrows of other ids
    each = Counter(one["args"]["step"] for one in begun.values())
    assert each.keys() == {*range(1, STEPS + 1)}
    assert len({*each.values()}) == 1
    assert each[1] >= 8  # four microbatches, forward and backward
    for name, one in begun.items():
        assert one["args"] == ended[name]["args"]
        assert one["pid"] != ended[name]["pid"]
        assert one["ts"] <= ended[name]["ts"]


def test_spans_say_task_microbatch_and_bytes(trace: Path) -> None:
    spans = [one for one in read_trace(trace).spans if one.category not in (STEP, *BETWEEN)]
    assert {one.category for one in spans} <= {*CATEGORIES}
    assert {(one.about["task"], one.about["microbatch"]) for one in spans if "task" in one.about} >= {
        ("0F2", 2),
        ("1B3", 3),
    }
    sizes = {one.about.get("bytes") for one in spans if one.about["kind"] in ("Send", "WaitRecv")}
    assert None not in sizes


def test_the_command_says_where_the_time_went(trace: Path, capsys: Capture) -> None:
    assert invoke(["profile", str(trace), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["steps"] == STEPS - 3
    assert [row["rank"] for row in document["ranks"]] == [0, 1]
    assert sum(row["share"] for row in document["modules"]) == pytest.approx(1.0)
    assert invoke(["profile", str(trace), "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert f"{trace}: 2 ranks, 3 steps\n" in text
    assert "slowest modules (all ranks)" in text
    assert len(text.splitlines()) == 1 + 3 + 2 * (2 + 3)


def test_a_trace_that_was_cut_short_is_read_as_far_as_it_goes(trace: Path, tmp_path: Path) -> None:
    whole = trace.read_bytes()
    assert read_trace(trace).is_complete
    chance, file = random.Random(3), tmp_path / "cut.trace.json"
    for _ in range(40):
        end = chance.randrange(whole.index(b"\n"), len(whole) - 4)
        file.write_bytes(whole[:end])
        found = read_trace(file)
        assert not found.is_complete
        complete = whole[:end].count(b'"ph": "X"')
        assert complete - 1 <= len(found.spans) <= complete


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((b'"dur": ', b'"dur": -'), "not an event of a trace"),
        ((b'"cat": "compute"', b'"cat": "magic"'), "a span of 'magic'"),
        ((b'"pid": 0', b'"pid": "a"'), r":\d+: not an event"),
        ((b'"producer": "partc"', b'"producer": "other"'), "not a trace of partc"),
    ],
)
def test_what_is_not_a_trace_is_refused(trace: Path, tmp_path: Path, change: tuple[bytes, bytes], words: str) -> None:
    file = tmp_path / "bad.trace.json"
    file.write_bytes(trace.read_bytes().replace(*change))
    with pytest.raises(UsageError, match=words):
        read_trace(file)


def test_clocks_of_hosts_are_aligned_within_the_error_that_is_said() -> None:
    world, ahead = LocalWorld(3), (0.0, 7.25, -1e4)
    found: dict[int, tuple[float, float]] = {}

    def rank(number: int) -> None:
        clock = lambda: time.perf_counter() + ahead[number]  # noqa: E731
        found[number] = clock_offset(world.transport(number), clock, f"host {number}")

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found[0] == (0.0, 0.0)
    for number in (1, 2):
        offset, error = found[number]
        assert 0 < error < 1.0
        assert abs(offset + ahead[number]) <= error
