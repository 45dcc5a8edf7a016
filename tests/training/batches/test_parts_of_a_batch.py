"""A batch that is run in parts: losses, metrics and gradients are those of the whole batch, however unevenly its labels count."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_in_parts import (
    CLASSES,
    HEAD,
    LABELLED,
    LOSSES,
    MEASURED,
    NET,
    OWN_LOSS,
    PLANS,
    WEIGHTS,
    Trained,
    close,
    numbers,
    start_of,
    stepped,
    train,
    trained,
    trained_whole,
)
from partc.compiler.analysis.part_symbols import quotient
from partc.compiler.dims.symbol import Symbol
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import InputError, load_trainer
from partc.runtime.artifact.format import Manifest, SymbolRecord
from partc.runtime.communication.in_process import LocalWorld
from rows import of_today
from training_equivalence import from_text

CASES = [
    *[(1, name, (4,)) for name in LOSSES],
    (2, "both, smoothed", (8,)),
    (2, "sum", (4,)),
    (4, "both, smoothed", (8,)),
    (4, "sum of squares", (2,)),
]


def whole(text: str, weights: Mapping[str, tuple[int, ...]], plan: str, steps: list[dict[str, Any]]) -> Trained:
    """Trains a model's text with these weights on one rank, by the `train` of a plan."""
    return trained_whole(from_text(text, weights), PLANS[1] + plan, steps)


@pytest.mark.parametrize(("ranks", "name", "parts"), of_today(CASES, 4), ids=lambda one: str(one))
def test_parts_are_as_the_whole(ranks: int, name: str, parts: tuple[int, ...], tmp_path: Path) -> None:
    loss, given = LOSSES[name], numbers(LOSSES[name])
    more = MEASURED if "label" in given else ""
    if "ignore_index" in loss:
        more = more.replace("labels: label", "labels: label, ignore_index: -1")
    want = whole(NET, WEIGHTS, train(loss, 1, more=more), [given])
    plan = PLANS[ranks].replace("DATA", "label: [dp]" if "label" in given else "t: [dp, null]")
    for count in parts:
        text = plan + train(loss, count, more=more)
        close(trained(tmp_path / str(count), from_text(NET, WEIGHTS), text, [given]), want, start_of())


@pytest.mark.parametrize(
    ("ranks", "name"), of_today([(1, "entropy"), (5, "entropy and logs"), *((2, name) for name in LABELLED)], 4)
)
def test_a_loss_of_the_models_own(ranks: int, name: str, tmp_path: Path) -> None:
    text = OWN_LOSS.replace("ENTROPY", LABELLED[name]).replace("small = {0.01}", "small = {0.01}, int64 zero = {0}")
    given = {**numbers(LOSSES["ignored"]), "keep": np.array(0.5, np.float32)}
    more = "  metrics: [other]\n"
    want = whole(text, {"w": (6, 5)}, train("loss", 1, more=more), [given])
    have = trained(
        tmp_path / "parts", from_text(text, {"w": (6, 5)}), PLANS[ranks] + train("loss", 4, more=more), [given]
    )
    close(have, want, start_of({"w": (6, 5)}, text))


POSITIONS = (
    HEAD
    + """m (float[batch, seq, 6] x) => (float[batch, seq, 5] y) <float[6, 8] w, float[8, 5] v> {
    [up] a = MatMul (x, w)
    [drop] b = Dropout (a)
    [flat] f = Reshape (b, rows)
    [down] c = MatMul (f, v)
    [wide] s = Shape (x)
    [lead] l = Slice (s, zero, two)
    [all] t = Concat<axis = 0> (l, five)
    [back] y = Reshape (c, t)
}"""
).replace("<float[6", "<int64[2] rows = {-1, 8}, int64[1] zero = {0}, int64[1] two = {2}, int64[1] five = {5}, float[6")
PER_POSITION = f"{{{CLASSES}, axis: 2, ignore_index: -1}}"
AROUND = {
    "alone": "ranks: 1\n",
    "data parallel": "ranks: 2\nmesh: {dp: 2}\ndataset: data_parallel\nsymbols: {batch: {divisor: 16}}\n",
    "placed": "ranks: 2\nplacement: {up: 0, drop: 0, flat: 0, down: 1, wide: 1, lead: 1, all: 1, back: 1}\n",
    "placed again": "ranks: 2\nplacement: {up: 0, drop: 1, flat: 0, down: 1, wide: 1, lead: 1, all: 1, back: 1}\n",
}


@pytest.mark.parametrize("around", of_today([*AROUND], 2))
def test_masks_positions_clipping_and_shares(around: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    steps = []
    for _ in range(3):
        label = rng.integers(0, 5, (16, 3))
        label[:4], label[7, 1:] = -1, -1
        steps.append({"x": rng.normal(size=(16, 3, 6)).astype(np.float32), "label": label})
    optimizer, more = "{type: adam, lr: 0.05}", "  clip: {norm: 0.1}\n  seed: 3\n"
    source = {"w": (6, 8), "v": (8, 5)}
    want = whole(POSITIONS, source, train(PER_POSITION, 1, optimizer, more), steps)
    if "dp" in AROUND[around]:
        optimizer = optimizer.replace("}", ", shard: dp}")
    text = AROUND[around] + train(PER_POSITION, 4, optimizer, more)
    have = trained(tmp_path / "parts", from_text(POSITIONS, source), text, steps)
    close(have, want, start_of(source, POSITIONS), 1e-5)


@pytest.mark.parametrize("name", ["both, smoothed", "squares", "sum of squares"])
def test_a_model_of_one_size_has_it_in_every_part(name: str, tmp_path: Path) -> None:
    loss, given = LOSSES[name], numbers(LOSSES[name])
    want = whole(NET, WEIGHTS, train(loss, 1), [given])
    fixed = NET.replace("batch", "4")
    have = trained(tmp_path / "parts", from_text(fixed, WEIGHTS), PLANS[1] + train(loss, 4), [given])
    close(have, want, start_of())


def test_a_fixed_size_counts_the_records_of_a_part(tmp_path: Path) -> None:
    """What a loss of the model's own is divided by is the number of all records, also where it is known; other sizes are sizes."""
    own = (
        LABELLED["counted"] + "\n    wide = Shape<start = 1> (y)\n    by = Cast<to = 1> (wide)\n    each = Squeeze (by)"
    )
    text = OWN_LOSS.replace("ENTROPY", own).replace("small = {0.01}", "small = {0.01}, int64 zero = {0}")
    text = text.replace("less = Mul (decay, small)", "some = Mul (decay, small)\n    less = Div (some, each)")
    given = {**numbers(LOSSES["ignored"]), "keep": np.array(0.5, np.float32)}
    want = whole(text, {"w": (6, 5)}, train("loss", 1), [given])
    source = from_text(text.replace("batch", "4"), {"w": (6, 5)})
    have = trained(tmp_path / "parts", source, PLANS[1] + train("loss", 4), [given])
    close(have, want, start_of({"w": (6, 5)}, text))


def test_the_symbols_of_a_plan_speak_of_the_whole_batch(tmp_path: Path) -> None:
    def compiled(symbols: str, parts: int) -> Manifest:
        plan = f"ranks: 2\ndataset: data_parallel\nsymbols: {{batch: {symbols}}}\n" + train(LOSSES["mean"], parts)
        return compile_source(from_text(NET, WEIGHTS), parse_plan(plan, "plan.yaml"), tmp_path / "build").manifest

    manifest = compiled("{divisor: 8, max: 64}", 4)
    assert manifest.symbols["batch"] == SymbolRecord(min=8, max=64, divisor=8)
    text = r"'batch' is any size in each of the 4 microbatches.*\n.*declare `batch: \{divisor: 8\}` under symbols"
    with pytest.raises(CompileError, match=text):
        compiled("{divisor: 2}", 4)
    with pytest.raises(CompileError, match=r"no batch of 'batch', .*8N\+4, can be cut into 8 parts"):
        compiled("{divisor: 8, remainder: 4}", 8)


@pytest.mark.parametrize(("divisor", "remainder"), [(1, 0), (2, 0), (6, 3), (8, 4), (3, 1), (5, 2)])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_a_part_may_have_just_the_sizes_whose_multiple_is_legal(divisor: int, remainder: int, parts: int) -> None:
    whole = Symbol(divisor=divisor, remainder=remainder, min=2, max=90).facts()
    part = quotient(whole, parts)
    legal = [size for size in range(100) if whole.contains(size * parts)]
    assert legal == [size for size in range(100) if part is not None and part.contains(size)]


@pytest.mark.parametrize(
    "nodes",
    [
        "largest = ReduceMax<keepdims = 0> (a)\n    [bend] b = Sub (a, largest)",
        "lower = Trilu (a)\n    [bend] b = Tanh (lower)",
    ],
    ids=["a maximum over records", "which records a microbatch has"],
)
def test_what_sees_one_part_at_a_time_is_named(nodes: str, tmp_path: Path) -> None:
    text = NET.replace("[bend] b = Tanh (a)", nodes)
    plan = PLANS[1] + train(LOSSES["mean"], 4)
    program = compile_source(from_text(text, WEIGHTS), parse_plan(plan, "plan.yaml"), tmp_path / "build").program
    (warning,) = program.warnings
    assert warning.startswith("with `accumulate: 4` these see the records of one part of a batch at a time: ")
    assert nodes.split(" = ")[1].split("<")[0].split(" (")[0] in warning


def test_a_batch_that_parts_refuse_leaves_no_gradient_behind(tmp_path: Path) -> None:
    plan = PLANS[1] + train(LOSSES["mean"], 2)
    compile_source(from_text(NET, WEIGHTS), parse_plan(plan, "plan.yaml"), tmp_path / "build")
    given = numbers(LOSSES["mean"])
    with load_trainer(tmp_path / "build", LocalWorld(1).transport(0), threads=1) as trainer:
        with pytest.raises(InputError, match="input 'x' axis 0 is 15\n  'batch' is 2\\*N"):
            trainer.train({name: array[1:] for name, array in given.items()})
        bad = {**given, "label": np.where(np.arange(16) == 12, 7, given["label"])}
        with pytest.raises(InputError, match="record 12 of the batch has the label 7"):
            trainer.train(bad)
        (loss,) = trainer.train(given).values()
    with load_trainer(tmp_path / "build", LocalWorld(1).transport(0), threads=1) as trainer:
        assert trainer.train(given) == {"loss": loss}


def test_all_ranks_refuse_what_one_cannot_cut_and_statistics_stay(tmp_path: Path) -> None:
    text = (
        HEAD
        + """m (float[batch, 6] x) => (float[batch, 6] y) <float[6, 6] w, float[6] a, float[6] b, float[6] c, float[6] d> {
        [up] h = MatMul (x, w) [bn] y = BatchNormalization (h, a, b, c, d) }"""
    )
    source = from_text(text, {"w": (6, 6), **dict.fromkeys("abcd", (6,))})
    plan = parse_plan(PLANS[2] + train(LOSSES["mean"], 2), "plan.yaml")
    compile_source(source, plan, tmp_path)
    given = {"x": np.ones((8, 6), np.float32), "label": np.zeros(8, np.int64)}
    world = LocalWorld(2, stall=2)

    def act(rank: int) -> tuple[str, bytes, bytes]:
        def kept() -> bytes:
            return b"".join(array.tobytes() for _, array in trainer.program.state.arrays())

        with load_trainer(tmp_path, world.transport(rank), threads=1) as trainer:
            before, bad = kept(), given["label"].copy()
            with pytest.raises(InputError) as found:
                trainer.train({name: array[rank:] for name, array in given.items()})
            bad[-1] = 9 * rank
            with pytest.raises(InputError, match="has the label 9"):
                trainer.train({**given, "label": bad})
            after = kept()
            trainer.train(given)
            return str(found.value), before, after

    with ThreadPoolExecutor(2) as threads:
        (text, before, after), (other, *_) = threads.map(act, (0, 1))
    assert text == other
    assert "input 'x' axis 0 in all is not the same on all ranks: 14 to 16" in text
    assert before == after


@pytest.mark.parametrize(("ranks", "parts"), [(2, 1), (4, 4)])
def test_a_sum_over_ranks_is_of_the_mean_of_each(ranks: int, parts: int, tmp_path: Path) -> None:
    given = numbers(LOSSES["ignored"])
    given["label"][:4] = [1, -1, 0, 3]
    loss = LOSSES["both, smoothed"]
    plan = PLANS[ranks].replace("DATA", "label: [dp]")
    summed = loss.replace("}", ", reduction: sum_over_ranks}")
    have = trained(tmp_path / "cut", from_text(NET, WEIGHTS), plan + train(summed, parts), [given])
    start, change, means = start_of(), dict.fromkeys(WEIGHTS, np.zeros(())), []
    for half in (slice(0, 8), slice(8, 16)):
        one = {name: array[half] for name, array in given.items()}
        told, tensors = whole(NET, WEIGHTS, train(loss, 1), [one])
        means.append(told[0]["loss"])
        change = {name: change[name] + tensors[name] - start[name] for name in WEIGHTS}
    close(have, ([{"loss": float(np.mean(means))}], {name: start[name] + change[name] for name in WEIGHTS}), start)


def test_parts_have_the_same_records_wherever_these_are(tmp_path: Path) -> None:
    loss, given = LOSSES["both, smoothed"], numbers(LOSSES["ignored"])
    plan = "ranks: 3\nmesh: {dp: 3}\nsymbols: {batch: {divisor: 12}}\ndataset: {x: [dp, null], LABELS}\n"
    given = {name: array[:12] for name, array in given.items()}
    want = whole(NET, WEIGHTS, train(loss, 1), [given])
    for labels in ("label: [dp]", "label: [null]"):
        text = plan.replace("LABELS", labels) + train(loss, 4)
        close(trained(tmp_path / labels, from_text(NET, WEIGHTS), text, [given]), want, start_of())
    plan = "ranks: 3\nplacement: {up: [0, 1], bend: [0, 1], down: 2, add: 2}\ndataset: data_parallel\nsymbols: {batch: {divisor: 4}}\n"
    have = trained(tmp_path / "b", from_text(NET, WEIGHTS), plan + train(loss, 2), [given])
    close(have, want, start_of())
    given["label"][7] = 5
    with pytest.raises(InputError, match="record 7 of the batch has the label 5"):
        stepped(tmp_path / "b", [given])


def test_the_number_of_parts_is_bounded() -> None:
    with pytest.raises(CompileError, match=r"'train\.accumulate': expected at most 4096"):
        parse_plan(PLANS[1] + train(LOSSES["mean"], 1 << 40), "plan.yaml")
