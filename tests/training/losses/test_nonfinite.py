"""Numbers that are not finite: a step that gives some is told on all ranks, or changes nothing; good checkpoints stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dealt import dealt
from nonfinite_case import PLANS, batch, built, fed, kept
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import NonFiniteError, Trainer
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check_artifact
from partc.runtime.checker.training.in_place import unsafe_state
from partc.runtime.checkpoint.newest import latest
from rows import of_today
from trainer_case import on_all
from training_equivalence import from_text, run

UNLABELLED = {
    ("sum_over_ranks", 4): [
        "rank 0: all 4 labels of 't' are -1, which is ignored: with `reduction: sum_over_ranks` its mean is 0/0",
        "`reduction: mean`, which divides by the labels of the whole batch",
    ],
    ("mean", 8): ["  rank 0: all 4 labels", "  rank 1: all 4 labels", "a mean of no losses is 0/0"],
}


@pytest.mark.parametrize(("reduction", "ignored"), UNLABELLED)
def test_a_mean_of_no_labels_is_told_where_it_is(reduction: str, ignored: int, tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
        m (float[batch, 6] x) => (float[batch, 4] y) { [up] y = MatMul (x, w) }"""
    loss = f"{{type: softmax_cross_entropy, logits: y, labels: t, ignore_index: -1, reduction: {reduction}}}"
    plan = "ranks: 2\ndataset: data_parallel\nsymbols: {batch: {divisor: 2}}\n"
    plan += f"train: {{loss: {loss}, optimizer: {{type: sgd, lr: 1}}}}\n"
    compile_source(from_text(text, {"w": (6, 4)}), parse_plan(plan, "plan.yaml"), tmp_path / "build")
    whole = {"x": np.ones((8, 6), np.float32), "t": np.array([-1] * ignored + [0, 1, 2, 3] * 2)[:8]}

    def act(trainer: Trainer) -> None:
        trainer.train(fed(trainer, whole))
        trainer.check_last_loss()

    with pytest.raises(NonFiniteError) as caught:
        on_all(tmp_path / "build", 2, act)
    found = str(caught.value)
    assert [part for part in UNLABELLED[reduction, ignored] if part not in found] == [], found


@pytest.mark.parametrize(("name", "bad"), of_today(dealt(PLANS, [np.nan, np.inf]), 2))
def test_a_skipped_step_changes_nothing(name: str, bad: float, tmp_path: Path) -> None:
    folder, ranks = built(tmp_path / "build", name, "skip")

    def act(steps: list[dict[str, np.ndarray]]) -> Callable[[Trainer], Any]:
        def run(trainer: Trainer) -> Any:
            found = []
            for step in steps:
                before, skipped = kept(trainer), trainer.skipped
                trainer.train(fed(trainer, step))
                found.append((trainer.skipped > skipped, kept(trainer) == before))
            return found, kept(trainer), trainer.step

        return run

    have = on_all(folder, ranks, act([batch(0), batch(1, bad), batch(2)]))
    want = on_all(folder, ranks, act([batch(0), batch(2)]))
    for (steps, tensors, taken), (_, other, _) in zip(have, want, strict=True):
        assert steps == [(False, False), (True, True), (False, False)]
        assert tensors == other
        assert taken == 3


NEXT: dict[str, Callable[[Trainer, Path], Any]] = {
    "trains": lambda trainer, _: trainer.train(fed(trainer, batch(2))),
    "is refused": lambda trainer, _: trainer.train({}),
    "evaluates": lambda trainer, _: trainer.evaluate([(fed(trainer, batch(2)), 8)]),
    "saves": lambda trainer, path: trainer.save(path / "runs"),
    "loads": lambda trainer, path: trainer.load(path / "runs"),
    "closes": lambda trainer, _: trainer.close(),
}


def stopped(folder: Path, ranks: int, following: Callable[[Trainer, Path], Any]) -> tuple[str, list[dict[str, bytes]]]:
    """The text that all ranks raise alike, with what comes after the step or in it, and what each keeps then."""

    def act(trainer: Trainer) -> tuple[str, dict[str, bytes]]:
        def on() -> None:
            trainer.train(fed(trainer, batch(1, np.nan)))
            assert ranks > 1
            following(trainer, folder.parent)

        trainer.train(fed(trainer, batch(0)))
        with pytest.raises(NonFiniteError) as found:
            on()
        return str(found.value), kept(trainer)

    found = on_all(folder, ranks, act)
    assert len({text for text, _ in found}) == 1
    assert not (folder.parent / "runs").exists()
    return found[0][0], [tensors for _, tensors in found]


@pytest.mark.parametrize("name", of_today([*PLANS], 2))
def test_training_stops_on_all_ranks_before_the_next_step(name: str, tmp_path: Path) -> None:
    folder, ranks = built(tmp_path / "build", name, "stop")
    text, after = stopped(folder, ranks, NEXT["trains"])
    rank = 1 if "data_parallel" in PLANS[name][1] else 0
    assert text.startswith("step 2: the loss is nan\n")
    assert f"\n  rank {rank}: input 'x': record 5 of the batch holds nan\n" in text

    def two_steps(trainer: Trainer) -> dict[str, bytes]:
        for step in (batch(0), batch(1, np.nan)):
            try:
                trainer.train(fed(trainer, step))
            except NonFiniteError:
                assert ranks == 1
        found = kept(trainer)
        trainer._untold.clear()
        return found

    assert after == on_all(folder, ranks, two_steps)


@pytest.mark.parametrize("following", NEXT)
def test_nothing_is_done_after_a_step_whose_loss_is_not_finite(following: str, tmp_path: Path) -> None:
    folder, ranks = built(tmp_path / "build", "in parts" if following == "is refused" else "shared", "stop")
    text, _ = stopped(folder, ranks, NEXT[following])
    assert text.startswith("step 2: the loss is nan\n  rank 1: input 'x': record 5 of the batch holds nan\n")


@pytest.mark.parametrize(("name", "ahead"), [("shared", False), ("placed", True)])
def test_a_step_that_goes_well_agrees_once(name: str, ahead: bool, tmp_path: Path) -> None:
    folder, ranks = built(tmp_path / "build", name, "stop")

    def act(trainer: Trainer) -> int:
        transport, agreements = trainer.program._transport, trainer.program.agreement._agreements
        found: list[int] = []
        for place, name in ((transport, "all_reduce_max"), (agreements, "begin")):
            agree = getattr(place, name)
            setattr(place, name, lambda vector, agree=agree: found.append(1) or agree(vector))
        batches = [fed(trainer, batch(step)) for step in range(6)]
        for step in range(5):
            trainer.train(batches[step], batches[step + 1] if ahead and step < 4 else None)
        return sum(found)

    assert on_all(folder, ranks, act) == [5] * ranks


def test_leaving_the_block_and_the_end_of_a_loop_tell_it_too(tmp_path: Path) -> None:
    folder, ranks = built(tmp_path / "build", "placed", "stop")
    with pytest.raises(NonFiniteError, match="step 1: the loss is nan"):
        on_all(folder, ranks, lambda trainer: trainer.train(fed(trainer, batch(1, np.nan))))


def test_inputs_that_were_overwritten_are_not_blamed(tmp_path: Path) -> None:
    folder, ranks = built(tmp_path / "build", "placed", "stop")

    def act(trainer: Trainer) -> str:
        given = fed(trainer, batch(1, np.nan))
        trainer.train(given)
        for array in given.values():
            array[...] = 1
        with pytest.raises(NonFiniteError) as found:
            trainer.train(given)
        return str(found.value)

    assert "rank 0: its inputs were overwritten since" in on_all(folder, ranks, act)[0]


def test_a_parameter_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    folder, ranks = built(tmp_path / "build", "placed", "stop")

    def act(trainer: Trainer) -> None:
        trainer.save(tmp_path / "runs", keep=1)
        arrays = {record.tensor: array for record, array in trainer.program.state.arrays()}
        if "v" in arrays:
            arrays["v"][0, 0] = np.inf
        trainer.train(fed(trainer, batch(0))) if trainer.on_nonfinite != "stop" else None
        with pytest.raises(NonFiniteError, match="'v' holds numbers that are not finite, so no checkpoint"):
            trainer.save(tmp_path / "runs", keep=1)

    on_all(folder, ranks, act)
    assert [path.name for path in (tmp_path / "runs").glob("step_*")] == ["step_00000000"]


def test_good_checkpoints_stay_and_are_gone_on_from(tmp_path: Path) -> None:
    folder, ranks = built(tmp_path / "build", "alone", "warn")

    def act(trainer: Trainer) -> None:
        for step in range(6):
            trainer.train(fed(trainer, batch(step, np.nan if step >= 2 else None)))
            trainer.save(tmp_path / "runs", keep=2)

    on_all(folder, ranks, act)
    names = sorted(path.name for path in (tmp_path / "runs").glob("step_*"))
    assert names == ["step_00000001", "step_00000002", "step_00000006"]
    found = latest(tmp_path / "runs")
    assert found is not None
    assert found.name == "step_00000002"


GUARDED = "train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: {type: momentum, lr: 0.1SHARD}, on_nonfinite: skip}\n"


PRECISIONS = ["", "{compute: float16, loss_scale: 64}", "{compute: float16, loss_scale: dynamic}"]
GUARDED_ON = [
    "ranks: 1\ntarget: {first: cuda}\n",
    "ranks: 2\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\n",
    "ranks: 2\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\ntarget: {first: cuda, '**': cpu}\n",
]


@pytest.mark.parametrize(
    ("where", "precision", "shard"),
    [
        (where, precision, ("", ", shard: true")[(j + k) % 2])
        for j, where in enumerate(GUARDED_ON)
        for k, precision in enumerate(PRECISIONS)
    ],
)
def test_updates_wait_for_the_guard(where: str, precision: str, shard: str, tmp_path: Path) -> None:
    """Nothing else that an update reads comes of it, where the loss scale is fixed and no norm clips."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    m (float[batch, 6] x) => (float[batch, 5] y) {
        [first] h = MatMul (x, w)
        [act] a = Tanh (h)
        [last] y = MatMul (a, head)
    }"""
    random = np.random.default_rng(2)
    steps = [
        {"x": random.standard_normal((8, 6), np.float32), "t": random.standard_normal((8, 5), np.float32)}
        for _ in range(3)
    ]
    steps[1]["x"][5, 2] = np.inf
    plan = where + (f"precision: {precision}\n" if precision else "") + GUARDED.replace("SHARD", shard)
    found = run(from_text(text, {"w": (6, 8), "head": (8, 5)}), plan, tmp_path / "build", steps)
    assert not check_artifact(tmp_path / "build")
    assert all(np.isfinite(one["loss"]) for one in found.outputs), "the gradients of the second step are not finite"
    assert all(np.isfinite(one).all() for one in found.after.values())
    manifest, late = open_artifact(tmp_path / "build").manifest, open_artifact(tmp_path / "build").model(0)
    assert not unsafe_state(manifest, 0, late)
    made = next(node for node in late.graph.node if manifest.guard in node.output)
    late.graph.node.append(made)
    late.graph.node.remove(made)
    assert any("by which it is decided whether it runs" in one.fact for one in unsafe_state(manifest, 0, late))
