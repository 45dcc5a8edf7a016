"""A training loop of one's own: `load_trainer`, on one rank and with ranks as threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.runtime import InputError, Trainer, UsageError, load_trainer
from trainer_case import PARALLEL, TRAIN, batch, built, on_all


def test_a_rate_of_ones_own_and_what_is_kept(tmp_path: Path) -> None:
    folder = built(tmp_path / "build", "ranks: 1\n" + TRAIN)
    with load_trainer(folder, rate=lambda step: 0.5 / (1 + step), threads=1) as trainer:
        before = {record.tensor: array.copy() for record, array in trainer.program.state.arrays()}
        losses = [float(trainer.train(batch(k))["loss"]) for k in range(3)]
        after = {record.tensor: array.copy() for record, array in trainer.program.state.arrays()}
    weights = {name: array.astype(float) for name, array in before.items()}
    for step, loss in enumerate(losses):
        one = batch(step)
        hidden = np.tanh(one["x"] @ weights["w"])
        off = hidden @ weights["v"] - one["t"]
        assert loss == pytest.approx(np.square(off).mean(), rel=1e-5)
        dy = 2 * off / off.size
        gradients = {"v": hidden.T @ dy, "w": one["x"].T @ ((dy @ weights["v"].T) * (1 - hidden**2))}
        for name, gradient in gradients.items():
            weights[f"{name}.momentum"] = 0.9 * weights[f"{name}.momentum"] + gradient
            weights[name] = weights[name] - 0.5 / (1 + step) * weights[f"{name}.momentum"]
    for name, array in weights.items():
        np.testing.assert_allclose(after[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


def test_what_is_saved_goes_on_elsewhere(tmp_path: Path) -> None:
    one, two = built(tmp_path / "one", "ranks: 1\n" + TRAIN), built(tmp_path / "two", PARALLEL)

    def first(trainer: Trainer) -> float:
        rows = slice(4 * trainer.rank, 4 * trainer.rank + 4)
        for step in range(2):
            trainer.train(batch(step, rows))
        trainer.save(tmp_path / "kept", {"note": "two ranks"})
        return float(trainer.train(batch(2, rows)).get("loss", 0.0))

    expected = on_all(two, 2, first)[0]
    with load_trainer(one, threads=1) as trainer:
        meta = trainer.load(tmp_path / "kept")
        assert (meta["note"], trainer.step) == ("two ranks", 2)
        measured = trainer.evaluate([(batch(2), 8)])
        assert float(trainer.train(batch(2))["loss"]) == pytest.approx(expected, rel=1e-5)
    assert measured["loss"] == pytest.approx(expected, rel=1e-5)
    assert measured.keys() == {"loss", "off"}
    with load_trainer(one, threads=1) as trainer:
        assert trainer.load_weights(tmp_path / "kept") == {"w", "v"}
        assert trainer.step == 0
        assert float(trainer.train(batch(2))["loss"]) == pytest.approx(expected, rel=1e-5)


def test_a_bad_batch_is_refused_by_all_and_harms_nothing(tmp_path: Path) -> None:
    folder = built(tmp_path / "build", PARALLEL)

    def act(trainer: Trainer) -> str:
        rows = slice(4 * trainer.rank, 4 * trainer.rank + 4)
        with pytest.raises(InputError) as caught:
            trainer.train({**batch(0, rows), "t": np.zeros((3, 4), np.float32)})
        trainer.train(batch(0, rows))
        assert trainer.step == 1
        return str(caught.value)

    first, second = on_all(folder, 2, act)
    assert first == second
    assert "input 't'" in first


def test_an_artifact_that_runs_has_no_trainer(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the artifact has no training program"):
        load_trainer(built(tmp_path / "build", "ranks: 1\n"))


def test_steps_of_several_sizes_share_their_memory(tmp_path: Path) -> None:
    folder = built(tmp_path / "build", PARALLEL)

    def act(trainer: Trainer) -> None:
        for rows in (4, 2, 3):
            trainer.train(batch(0, slice(rows)))
        program = trainer.program
        block = program._program.arenas.host
        first, last = block.ctypes.data, block.ctypes.data + block.size
        slots = [name for name in program._program.values.shapes if program._program.values.shapes[name]]
        assert slots
        for schedule in program._schedules.values():
            for name in slots:
                tensor = schedule.memory.tensor(name)
                assert first <= tensor.pointer <= tensor.pointer + tensor.data.size <= last, name

    on_all(folder, 2, act)
