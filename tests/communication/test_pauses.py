"""Who waits gives its core up: every loop of the sources that asks again and again, and the waiting itself."""

import ast
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from partc.runtime.job import parking

ROOT = Path(__file__).parents[2]

ASKS = {
    *("Test", "Testall", "Testany", "Iprobe", "test", "is_set", "is_alive", "done", "idle", "ready", "locked"),
    *("exists", "lexists", "states", "monotonic", "perf_counter", "time", "acquire"),
}
"""Calls whose answer another process, a thread or the clock changes."""
GIVES_WAY = {"sleep", "give_way", "sched_yield", "wait", "get", "join", "select", "communicate", "receive"}
"""Calls that let others have the core meanwhile; so do `poll` with a time, and whatever is awaited."""
STEPS_ON = {
    *("pop", "popleft", "popitem", "append", "appendleft", "extend", "remove", "add", "discard", "clear", "update"),
    *("take", "next", "read", "readinto", "get_nowait"),
}
"""Methods after which what they are called on is another."""


def called(tree: ast.AST) -> set[str]:
    """The last names of all that is called."""
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {
        f.attr if isinstance(f, ast.Attribute) else f.id for f in functions if isinstance(f, ast.Attribute | ast.Name)
    }


def exits(loop: ast.While) -> Iterator[ast.expr]:
    """What decides whether a loop goes on."""
    if not isinstance(loop.test, ast.Constant):
        yield loop.test
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and any(isinstance(one, ast.Break | ast.Return | ast.Raise) for one in node.body):
            yield node.test


def names(tree: ast.AST, kinds: type[ast.expr_context]) -> set[str]:
    """Names, and last names of attributes, that are read or written."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, kinds)}
    return found | {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, kinds)
    }


def waits_by_poll(loop: ast.While) -> bool:
    """Whether a loop polls files with a time."""
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and node.args]
    return any(isinstance(node.func, ast.Attribute) and node.func.attr == "poll" for node in calls)


def spinning(source: str) -> list[int]:
    """The lines of the loops that ask for what only others change, and keep their core meanwhile."""
    found = []
    for loop in [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.While)]:
        does = called(loop)
        if does & GIVES_WAY or waits_by_poll(loop) or any(isinstance(node, ast.Await) for node in ast.walk(loop)):
            continue
        read: set[str] = set()
        for one in exits(loop):
            read |= names(one, ast.Load)
        written = names(loop, ast.Store)
        for node in ast.walk(loop):
            if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                written |= names(node.value, ast.Load)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STEPS_ON:
                written |= names(node.func.value, ast.Load)
        if does & ASKS or not read & written:
            found.append(loop.lineno)
    return found


def test_no_loop_of_the_sources_keeps_its_core_while_it_waits() -> None:
    """But for one, which lasts two milliseconds at most, 5 microseconds where others want the cores, and is followed by a sleep."""
    files = [path for part in ("runtime", "cli") for path in sorted((ROOT / part).rglob("*.py"))]
    found = [path.relative_to(ROOT).as_posix() for path in files for _ in spinning(path.read_text())]
    assert found == ["runtime/job/parking.py"], (
        "wait as runtime/job/parking.py does, or parking.py for what cannot wake"
    )
    assert parking.SHORTEST_SPIN <= 5e-6
    assert parking.LONGEST_SPIN <= 2e-3
    assert "give_way()" in Path(parking.__file__).read_text()


@pytest.mark.parametrize(
    "loop",
    [
        "while not request.Test():\n    pass",
        "while not test():\n    continue",
        "while True:\n    if test():\n        break",
        "while self.cells[0] < number:\n    pass",
        "while not self.ended:\n    self.look()",
        "while self.board()[rank] == step:\n    tests += 1",
        "while time.monotonic() - begun < 2e-3:\n    if ready():\n        return",
        "done = False\nwhile not done:\n    done = request.Test()",
        "while os.path.exists(name):\n    pass",
        "while process.poll() is None and first is None:\n    pass",
    ],
)
def test_a_planted_loop_that_keeps_its_core_is_found(loop: str) -> None:
    source = "def wait(self, request, test, number):\n" + "".join(f"    {line}\n" for line in loop.splitlines())
    assert len(spinning(source)) == 1
    last = loop.splitlines()[-1]
    indent = last[: len(last) - len(last.lstrip())]
    assert not spinning(f"{source}    {indent}time.sleep(0.001)\n")


@pytest.mark.parametrize("loop", ["while left:\n    left = step(left)", "while queue:\n    work(queue.popleft())"])
def test_a_loop_that_goes_on_by_itself_is_none(loop: str) -> None:
    assert not spinning(loop)


def test_all_ranks_spin_shortly_after_one_was_without_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, now = tmp_path / "schedstat", [0.0]
    monkeypatch.setattr(parking, "_COUNTS", str(counts))
    monkeypatch.setattr(parking, "perf_counter", lambda: now[0])
    counts.write_text("5 7 1\n")
    until = memoryview(bytearray(8)).cast("d")
    one, other = (parking.SpinTime(parking.ShortSpin(until)) for _ in range(2))
    lengths = []
    for seconds, waited in (
        (0.05, 1e6),
        (0.1, 1e7),
        (0.105, 1e7),
        (0.111, 1e7),
        (0.114, 2e7),
        (0.13, 2e7),
        (0.135, 2e7),
    ):
        counts.write_text(f"5 {waited:.0f} 1\n")
        now[0] = seconds
        lengths.append((one.at(seconds), other.at(seconds)))
    one.close()
    other.close()
    long, short = (parking.LONGEST_SPIN,) * 2, (parking.SHORTEST_SPIN,) * 2
    assert lengths == [long, short, short, long, short, short, long]


def test_no_rank_gives_its_core_up_for_a_time_after_a_long_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now, length = [0.0], [1e-4]
    monkeypatch.setattr(parking, "perf_counter", lambda: now[0])
    until = memoryview(bytearray(8)).cast("d")
    given: list[float] = []

    def give() -> None:
        given.append(now[0])
        now[0] += length[0]

    one, other = (parking.YieldTurns(parking.ShortSpin(until), give) for _ in range(2))
    assert one.is_ready_after(lambda: True)
    length[0] = 3e-3
    assert not one.is_ready_after(lambda: False)
    for seconds in (0.005, 0.012, 0.014, 0.03, 0.045, 0.06):  # the second time lasts for twice as long
        now[0] = seconds
        other.is_ready_after(lambda: True)
        now[0] = seconds
        one.is_ready_after(lambda: True)
    assert given == [0.0, 1e-4, 0.014, 0.03, 0.06]


def test_a_spin_gives_its_core_up_before_each_look_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    monkeypatch.setattr(parking, "give_way", lambda: happened.append("way"))
    for _ in parking.spins(60.0):
        happened.append("look")
        if len(happened) == 7:
            break
    assert happened == ["look", "way", "look", "way", "look", "way", "look"]
    begun = time.monotonic()
    assert sum(1 for _ in parking.spins(0.01)) > 1
    assert time.monotonic() - begun >= 0.01


def test_a_wait_sleeps_longer_each_time_and_ends_with_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(parking.time, "sleep", sleep)
    monkeypatch.setattr(parking.time, "monotonic", lambda: now[0])
    looks = list(parking.sleeps(1e-3, 4e-3, within=0.02))
    assert slept == [1e-3, 2e-3, 4e-3, 4e-3, 4e-3, 4e-3, 4e-3]
    assert looks[0] == 0.0
    assert looks[-1] == pytest.approx(sum(slept))
    slept.clear()
    assert len(list(parking.sleeps(2e-5, 1e-4, within=0.2))) == len(slept) + 1
    assert max(slept) == 1e-3  # of a long wait
    assert slept[:4] == [2e-5, 4e-5, 8e-5, 1e-4]
