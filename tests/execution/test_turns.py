"""Programs and trainers under threads, after and during close, inside of a call, in a fork, in a notebook: one law for each method."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from artifact_text import write
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import LocalProgram, Program, RankError, Trainer, UsageError, load, load_local, load_trainer
from partc.runtime.communication.in_process import LocalWorld
from partc.runtime.user_code import user_code
from training_equivalence import from_text
from turns_case import PING_PONG

THREADS, STEPS = 4, 50
ALONE = ["rank0 (float[batch, 3] x) => (float[batch, 3] y) <float[batch, 3] h> { h = Relu(x) y = Neg(h) }"]
MODEL = """<ir_version: 10, opset_import: ["" : 21]>
m (float[B, 6] x) => (float[B, 4] y) <float[6, 8] w, float[8, 4] v> { a = MatMul (x, w) b = Tanh (a) y = MatMul (b, v) }"""
PLAN = (
    "ranks: 1\ntrain: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: {type: momentum, lr: 0.01}}\n"
)
RNG = np.random.default_rng(3)
BATCH = {"x": RNG.normal(size=(8, 6)).astype(np.float32), "t": RNG.normal(size=(8, 4)).astype(np.float32)}
X = RNG.normal(size=(64, 3)).astype(np.float32)

Case: TypeAlias = Callable[[Any, int, Path], bool]
"""A call of a method, the k-th; whether what comes back is right."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("turns")
    write(folder / "two", PING_PONG)
    write(folder / "one", ALONE)
    compile_source(from_text(MODEL, {"w": (6, 8), "v": (8, 4)}), parse_plan(PLAN, "plan.yaml"), folder / "trains")
    return folder


def rows(k: int) -> np.ndarray[Any, Any]:
    return X[k % 50 : k % 50 + 1 + k % 4]


def stepped(name: str, factor: float) -> Case:
    """A step of another size and other numbers at each call."""
    return lambda program, k, _: bool(
        np.array_equal(getattr(program, name)({"x": rows(k)})["y"], np.maximum(rows(k), 0) * np.float32(factor))
    )


def announced(program: Any, k: int, _: Path) -> bool:
    program.announce({"x": X})
    return True


def evaluated(trainer: Any, k: int, _: Path) -> bool:
    return bool(np.isfinite(trainer.evaluate([(BATCH, 8), (BATCH, 8)])["loss"]))


def saved(trainer: Any, k: int, folder: Path) -> bool:
    return trainer.save(folder / "runs").is_dir()


def loaded(trainer: Any, k: int, folder: Path) -> bool:
    return trainer.load(folder / "before") is not None


def nothing(name: str) -> Case:
    return lambda thing, k, _: getattr(thing, name)() is None


def read(name: str) -> Case:
    return lambda thing, k, _: getattr(thing, name, None) is not NotImplemented


def said(name: str, given: object, found: object) -> Case:
    return lambda thing, k, _: getattr(thing, name)(given) == found


SHARED = {name: read(name) for name in ("inputs", "outputs", "at_slots")}
PROGRAM: Mapping[str, Case] = {
    **SHARED,
    **{name: read(name) for name in ("state", "looked_up", "usable", "size", "transport")},
    "__call__": stepped("__call__", -1.0),
    # another thread's step may have overwritten what lies where the step made it
    "step_of_all": lambda program, k, _: program.step_of_all({"x": rows(k)})["y"].shape == rows(k).shape,
    "announce": announced,
    "connect": nothing("connect"),
    "recover": nothing("recover"),
    "record_times": lambda program, k, _: program.record_times() is not None,
    "prepare": lambda program, k, _: program.prepare({"batch": 4}) is None,
    "all_gather_text": said("all_gather_text", "a\nb", ["a\nb"]),
    "any_rank": said("any_rank", True, True),
    "largest": said("largest", 7, 7),
    "maxima": lambda program, k, _: program.maxima(np.array([k, 7])).tolist() == [k, 7],
    "describe": lambda program, k, _: bool(program.describe(0)),
    "sibling_program": lambda program, k, _: program.sibling_program("infer").usable,
    "agreements": lambda program, k, _: program.agreements() is not None,
    "leave": lambda program, k, _: program.leave(ValueError("x")) is None,
    "release": nothing("release"),
    "close": nothing("close"),
}
LOCAL: Mapping[str, Case] = {
    **SHARED,
    "ranks": read("ranks"),
    "__call__": stepped("__call__", -0.5),
    "step_of_all": lambda program, k, _: len(program.step_of_all({"x": rows(k)})) == 2,
    "sibling_program": lambda program, k, _: len(program.sibling_program("infer").ranks) == 2,
    "close": nothing("close"),
}
TRAINER: Mapping[str, Case] = {
    **{name: read(name) for name in ("rank", "source", "manifest", "inputs", "turn", "is_saving")},
    "train": lambda trainer, k, _: bool(np.isfinite(trainer.train(BATCH)["loss"])),
    "advance": lambda trainer, k, _: bool(np.isfinite(trainer.advance(BATCH)["loss"])),
    "numbers": said("numbers", {"a": 1}, {"a": 1}),
    "ask_to_stop": said("ask_to_stop", 0, None),
    "ask_to_trace": nothing("ask_to_trace"),
    "check_last_loss": nothing("check_last_loss"),
    "keep_copies": lambda trainer, k, folder: trainer.keep_copies(folder / "copies") is not None,
    "copy": lambda trainer, k, _: trainer.copy(k % 2 == 0, dict) is None,
    "end_copies": nothing("end_copies"),
    "loader": lambda trainer, k, _: next(trainer.loader(BATCH, batch=8)).keys() == BATCH.keys(),
    "evaluate": evaluated,
    "record_evaluation": lambda trainer, k, _: trainer.record_evaluation() is not None,
    "save": saved,
    "finish_saving": lambda trainer, k, folder: trainer.finish_saving() is None,
    "claim": lambda trainer, k, folder: trainer.claim(folder / "runs") is None,
    "load": loaded,
    "load_weights": lambda trainer, k, folder: len(trainer.load_weights(folder / "before")) == 2,
    "close": nothing("close"),
}
KINDS: dict[type, Mapping[str, Case]] = {LocalProgram: LOCAL, Program: PROGRAM, Trainer: TRAINER}
STILL = {
    *(
        "transport",
        "inputs",
        "outputs",
        "state",
        "looked_up",
        "usable",
        "describe",
        "leave",
        "release",
        "close",
        "ranks",
        "rank",
        "size",
    ),
    *("source", "manifest", "turn", "numbers", "ask_to_stop", "ask_to_trace", "is_saving", "loader", "at_slots"),
}
"""What works after the end; all else is a RankError then."""
ALONE_IN_TURN = {"release", "leave", "close", "recover", "announce"}
"""What ends, or binds the next call, of whatever thread."""


def made(kind: type, built: Path) -> Any:
    if kind is LocalProgram:
        return load_local(built / "two")
    return load(built / "one", threads=1) if kind is Program else load_trainer(built / "trains", threads=1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_public_method_has_a_case(kind: type) -> None:
    public = {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}
    assert KINDS[kind].keys() == public | ({"__call__"} if "__call__" in vars(kind) else set())
    assert "one call is under way at a time" in " ".join((kind.__doc__ or "").lower().split())


def test_steps_of_many_threads_follow_each_other(built: Path) -> None:
    with load_trainer(built / "trains", threads=1) as thing, load_trainer(built / "trains", threads=1) as alone:
        in_threads(lambda _: [thing.train(BATCH) for _ in range(STEPS)])
        assert thing.step == THREADS * STEPS
        for _ in range(THREADS * STEPS):
            alone.train(BATCH)
        for (_, found), (_, wanted) in zip(thing.program.state.arrays(), alone.program.state.arrays(), strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_all_methods_at_once_and_the_end_meanwhile(built: Path, tmp_path: Path, kind: type) -> None:
    """Threads that make all calls in orders of their own, until one of them closes: right, or told that it was closed, as all are then."""
    thing = made(kind, built)
    if kind is Trainer:
        thing.save(tmp_path / "before")
    for name in ALONE_IN_TURN & KINDS[kind].keys():
        other = made(kind, built)
        right: list[bool] = []
        in_threads(
            lambda _, name=name, other=other, right=right: right.extend(
                KINDS[kind][name](other, k, tmp_path) for k in range(5)
            )
        )
        assert right == [True] * (5 * THREADS), name
        other.close()
    cases = {name: case for name, case in KINDS[kind].items() if name not in ALONE_IN_TURN}
    found: list[object] = []

    def work(thread: int) -> None:
        order = np.random.default_rng(thread)
        for k in range(60):
            name = str(order.choice(sorted(cases)))
            try:
                found.append(cases[name](thing, k, tmp_path))
            except RankError as error:
                found.append(str(error) == "the program has stopped: it was closed")
            if thread == 0 and k == 30:
                thing.close()

    in_threads(work)
    assert found == [True] * (60 * THREADS)
    for name, case in KINDS[kind].items():
        if name in STILL:
            assert case(thing, 0, tmp_path), name
        else:
            with pytest.raises(RankError, match="the program has stopped: it was closed"):
                case(thing, 0, tmp_path)
    thing.close()


def in_threads(work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(THREADS) as threads:
        for one in [threads.submit(work, thread) for thread in range(THREADS)]:
            one.result(timeout=300)


def test_a_call_inside_a_call_is_refused(built: Path) -> None:
    trainers: list[Trainer] = []
    refused: list[str] = []

    def tried(act: Callable[[], object]) -> None:
        with pytest.raises(UsageError, match="one call is under way at a time") as caught:
            act()
        refused.append(str(caught.value).splitlines()[0])

    def rate(step: int) -> float:
        for act in (lambda: trainers[0].train(BATCH), trainers[0].close, lambda: trainers[0].program.any_rank(True)):
            tried(act)
        return 0.01

    def batches() -> Iterator[tuple[dict[str, Any], int]]:
        tried(lambda: trainers[0].evaluate([]))

        def transform() -> None:
            with user_code("t.py", "transforming a batch"):
                tried(lambda: trainers[0].train(BATCH))

        thread = threading.Thread(target=transform)
        thread.start()
        thread.join()
        yield BATCH, 8

    with load_trainer(built / "trains", rate=rate, threads=1) as trainer:
        trainers.append(trainer)
        trainer.train(BATCH)
        trainer.evaluate(batches())
    assert refused == [
        "train() inside of advance() of the same program, by the schedule".replace("advance", "train"),
        "close() inside of train() of the same program, by the schedule",
        "any_rank() inside of train() of the same program, by the schedule",
        "evaluate() inside of evaluate() of the same program, by the batches of an evaluation",
        "train() inside of evaluate() of the same program, by the batches of an evaluation",
    ]


def test_an_array_that_calls_the_program_that_reads_it_is_refused(built: Path) -> None:
    class Lazy:
        def __array__(self, *_: object, **__: object) -> np.ndarray[Any, Any]:
            return np.asarray(program(x=X)["y"])

    with load_local(built / "two") as program, pytest.raises((UsageError, TypeError, ValueError)):
        program(x=Lazy())


def test_one_rank_of_ranks_that_are_threads_is_not_called_alone(built: Path) -> None:
    with load_local(built / "two") as program:
        for call in (lambda: program.ranks[0](x=X), lambda: program.ranks[1].any_rank(True), program.ranks[0].close):
            with pytest.raises(UsageError, match="of one rank of a program whose ranks are threads"):
                call()
        assert stepped("__call__", -0.5)(program, 7, built)


def test_calls_that_overlap_on_one_of_several_ranks_are_refused(built: Path) -> None:
    """Each rank has two threads that call with other numbers: a wait would let one rank's first call meet another's second."""
    world = LocalWorld(2)
    together = threading.Barrier(2)
    late = threading.Event()
    found: list[str] = []

    def rank(number: int) -> None:
        program = load(built / "two", world.transport(number), threads=1)
        together.wait()
        if number == 0:
            other = threading.Thread(target=second, args=(program,))
            other.start()
            assert np.array_equal(program(x=X)["y"], np.maximum(X, 0) * np.float32(-0.5))
            other.join()
        else:
            late.wait(60)
            program()
        program.close()

    def second(program: Program) -> None:
        while not program.turn.busy:
            threading.Event().wait(0.001)
        try:
            program(x=X + 1)
        except UsageError as error:
            found.append(str(error).splitlines()[0])
        late.set()

    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(rank, number) for number in range(2)]:
            one.result(timeout=120)
    assert found == ["a step while another thread is in a step"]


FORKED = """
import os, sys
import numpy as np
from partc.runtime import UsageError, load, load_local, load_trainer
folder = sys.argv[1]
x = np.ones((2, 3), np.float32)
with load_local(folder + "/two") as two, load(folder + "/one", threads=1) as one, load_trainer(folder + "/trains", threads=1) as trainer:
    two(x=x), one(x=x)
    child = os.fork()
    if child == 0:
        for call in (lambda: two(x=x), lambda: one(x=x), lambda: trainer.evaluate([]), lambda: one.any_rank(True)):
            try:
                call()
                os._exit(3)
            except UsageError as error:
                assert "a fork of process" in str(error), error
        for thing in (two, one, trainer):
            thing.close()
        os._exit(0)  # as multiprocessing ends a fork
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert two(x=x)["y"].tolist() == [[-0.5] * 3] * 2
print("done")
"""


@pytest.mark.skipif(not hasattr(sys, "getdlopenflags"), reason="there is no fork")
def test_a_fork_is_told(built: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKED, str(built)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["done"]), done.stderr


def rank_threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith("partc rank")}


def test_a_cell_that_runs_again_leaves_nothing_behind(built: Path, tmp_path: Path) -> None:
    """Loaded again without a close, under the same name: threads and the lock of a folder of checkpoints are given back."""
    gc.collect()
    before = rank_threads()
    for _ in range(4):
        program = load_local(built / "two")
        assert stepped("__call__", -0.5)(program, 5, tmp_path)
        trainer = load_trainer(built / "trains", threads=1)
        trainer.train(BATCH)
        trainer.save(tmp_path / "runs")
    del program
    gc.collect()
    wait_until(lambda: rank_threads() <= before)  # those of earlier tests may end meanwhile
    trainer.close()


def wait_until(ready: Callable[[], bool]) -> None:
    for _ in range(1000):
        if ready():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came")
