"""Chosen steps of a training are traced, and steps so far when that is asked for; other steps run their plain actions."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partc.cli.job import training
from partc.cli.job.profile import write_profile
from partc.cli.launch.signals import Signals
from partc.cli.main import invoke
from partc.runtime import load_local
from partc.runtime.artifact.trace import BETWEEN, CHECKPOINT, DATA, EVALUATION, STEP, read_trace
from partc.runtime.execution.times.profiler import Profiler
from partc.runtime.execution.times.recording import Recording
from partc.runtime.training.stopping import StopSignals
from trainer_case import PARALLEL, batch, built, on_all

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("steps") / "build", PARALLEL)


def train(build: Path, folder: Path, *given: str) -> int:
    rng = np.random.default_rng(1)
    data = {name: rng.standard_normal((64, size)).astype(np.float32) for name, size in (("x", 6), ("t", 4))}
    np.savez(folder / "data.npz", **data)
    fixed = ["--in-process", "--data", str(folder / "data.npz"), "--batch", "8", "--threads", "1"]
    return invoke(["train", str(build), *fixed, *given])


def steps_of(trace: Path) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for one in read_trace(trace).spans:
        if one.category == STEP:
            found.setdefault(one.rank, set()).add(one.about["step"])
    return found


def test_a_trace_has_the_steps_that_are_asked_for_and_what_goes_on_between(
    build: Path, tmp_path: Path, capsys: Capture
) -> None:
    file, kept = tmp_path / "x.trace.json", ["--checkpoint", str(tmp_path / "runs"), "--save", "2"]
    evaluated = ["--test", str(tmp_path / "data.npz"), "--evaluate", "3"]
    given = ["--profile", str(file), "--trace-steps", "5:7", "--steps", "9", *kept, *evaluated]
    assert train(build, tmp_path, *given) == 0
    assert steps_of(file) == {0: {5, 6, 7}, 1: {5, 6, 7}}
    spans = [one for one in read_trace(file).spans if one.rank == 1]
    between = [(one.category, one.about["step"]) for one in spans if one.category in BETWEEN]
    assert {*between} == {(DATA, 5), (DATA, 6), (DATA, 7), (EVALUATION, 6), (CHECKPOINT, 6)}
    wholes = [(one.begin, one.begin + one.seconds) for one in spans if one.category == STEP]
    for one in spans:
        if one.category in BETWEEN:
            assert all(one.begin + one.seconds <= begin + 1e-8 or one.begin >= end - 1e-8 for begin, end in wholes)
    capsys.readouterr()
    assert invoke(["profile", str(file)]) == 0
    (head,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("rank")]
    assert head[-4:] == ["rest", "data", "evaluation", "checkpoint"]


def test_every_batch_of_an_evaluation_is_traced(build: Path, tmp_path: Path) -> None:
    """The last batch has the records that are left."""
    file, data = tmp_path / "x.trace.json", tmp_path / "data.npz"
    np.savez(data, x=np.ones((22, 6), np.float32), t=np.ones((22, 4), np.float32))
    fixed = ["--in-process", "--data", str(data), "--batch", "8", "--threads", "1"]
    assert invoke(["eval", str(build), *fixed, "--profile", str(file)]) == 0
    assert steps_of(file) == {0: {1, 2, 3}, 1: {1, 2, 3}}


def test_after_a_checkpoint_steps_are_those_of_the_log(build: Path, tmp_path: Path, capsys: Capture) -> None:
    file, kept = tmp_path / "x.trace.json", ["--checkpoint", str(tmp_path / "runs")]
    assert train(build, tmp_path, *kept, "--steps", "4") == 0
    given = ["--profile", str(file), *kept, "--resume", "auto"]
    assert train(build, tmp_path, *given, "--steps", "6", "--trace-steps", "2:3") == 0
    assert "was not written: the last step was 6, and --trace-steps 2:3 wants others" in capsys.readouterr().err
    assert not file.exists()
    assert train(build, tmp_path, *given, "--steps", "9", "--trace-steps", "6:20") == 0
    assert steps_of(file) == {0: {7, 8, 9}, 1: {7, 8, 9}}


def test_steps_that_are_not_recorded_run_the_plain_actions(build: Path) -> None:
    written: list[list[int]] = []

    def write(profiler: Profiler) -> None:
        written.append([number for number, *_ in json.loads(profiler.trace())["steps"]])

    with load_local(build, threads=1) as both:
        program = both.ranks[0]
        recording = Recording(program, write, range(3, 5))
        inputs = {**batch(1), "lr": np.float32(0.1)}
        names = {port.name for port in both.manifest.inputs}
        inputs = {name: inputs.get(name, np.float32(0.9)) for name in names}
        plain: list[Any] = []
        for number in range(1, 7):
            recording.before(number)
            both(inputs)
            (plan,) = program._schedules.values()
            actions = [action for _, action in plan.actions]
            if number == 1:
                plain = actions
            assert (actions == plain) is (number not in (3, 4))
            recording.after(number)
            assert written == ([[3, 4]] if number >= 4 else [])
        recording.end()
        assert written == [[3, 4]]


def test_a_request_of_one_rank_writes_the_trace_on_all_after_the_same_step(build: Path) -> None:
    def act(trainer):  # type: ignore[no-untyped-def]
        own = slice(4 * trainer.rank, 4 * trainer.rank + 4)
        batches = [batch(step, own) for step in range(12)]
        found = []
        for step, following in zip(batches, [*batches[1:], None], strict=True):
            if trainer.rank == 0 and trainer.step in (3, 8):
                trainer.ask_to_trace()
            if trainer.rank == 1 and trainer.step == 8:
                trainer.ask_to_stop(signal.SIGTERM)
            trainer.train(step, following)
            found.append((trainer.step, trainer.tracing, trainer.stopping))
        return [one for one in found if any(one[1:])]

    first, second = on_all(build, 2, act)
    assert first == second
    assert first[0] == (5, True, 0)
    assert {one[1:] for one in first[1:]} == {(False, signal.SIGTERM)}, "who asks to stop is heard before"


def test_a_signal_writes_the_steps_so_far_and_training_goes_on(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, real, calls, written = tmp_path / "x.trace.json", StopSignals.takes_trace, [0], list[set[int]]()

    def takes(signals: StopSignals) -> bool:
        calls[0] += 1
        if calls[0] == 4:
            signals._note(signal.SIGUSR2, None)
        return real(signals)

    def write(path: str, ranks: Sequence[str], quiet: bool) -> None:
        write_profile(path, ranks, quiet)
        first, second = steps_of(file).values()
        assert first == second
        written.append(first)

    monkeypatch.setattr(StopSignals, "takes_trace", takes)
    monkeypatch.setattr(training, "write_profile", write)
    assert train(build, tmp_path, "--profile", str(file), "--steps", "8") == 0
    first, whole = written
    assert first in ({*range(1, 5)}, {*range(1, 6)}), "ranks agree by the end of one of the next two steps"
    assert whole == {*range(1, 9)}


def test_the_signal_is_noted_once() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with StopSignals((), traces=True) as signals:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert signals.takes_trace()
        assert not signals.takes_trace()
        assert signals.received == 0
    assert signal.getsignal(signal.SIGUSR2) is before


def test_the_launching_process_hands_the_signal_on_and_ends_nothing() -> None:
    with Signals(("SIGTERM",), handed="SIGUSR2") as signals:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert signals.has_handed
        assert (signals.exit_code, signals.is_requested, signals.passed) == (None, False, 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--trace-steps", "9:3", "--profile", "x.trace.json"], "step 3 is before step 9"),
        (["--trace-steps", "0:3", "--profile", "x.trace.json"], "'0:3' is not FIRST:LAST"),
        (["--trace-steps", "ten", "--profile", "x.trace.json"], "'ten' is not FIRST:LAST"),
        (["--trace-steps", "1:101", "--profile", "x.trace.json"], "1:101 are 101 steps; a trace has 100 at most"),
        (["--trace-steps", "1:3"], "--trace-steps: steps are chosen of a trace"),
        (["--trace-steps", "1:3", "--profile", "x.json"], "x.json is not the file of a trace"),
    ],
)
def test_steps_that_cannot_be_traced_are_refused(
    build: Path, tmp_path: Path, capsys: Capture, given: list[str], words: str
) -> None:
    assert train(build, tmp_path, *given) == 2
    assert words in capsys.readouterr().err


def test_a_run_repeats_as_many_steps_as_are_traced(tmp_path: Path, build: Path, capsys: Capture) -> None:
    file = tmp_path / "x.trace.json"
    given = ["run", str(build), "--in-process", "--random", "1", "--set", "B=8", "--profile", str(file), "--repeat"]
    assert invoke([*given, "6", "--trace-steps", "3:7"]) == 2
    assert "--trace-steps 3:7: there are 6 steps" in capsys.readouterr().err
    assert invoke([*given, "6", "--trace-steps", "3:4"]) == 0
    assert steps_of(file) == {0: {3, 4}, 1: {3, 4}}
