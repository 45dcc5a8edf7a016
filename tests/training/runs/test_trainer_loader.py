"""A loop of one's own on data as people have it: `Trainer.loader`, stopped and resumed on other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partc.runtime import Trainer, UsageError
from trainer_case import PARALLEL, TRAIN, built, on_all

RNG = np.random.default_rng(5)
X, T = RNG.standard_normal((36, 6)).astype(np.float32), RNG.standard_normal((36, 4)).astype(np.float32)


def records() -> Iterator[tuple[Any, Any]]:
    yield from zip(X, T, strict=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    home = tmp_path_factory.mktemp("loader")
    three = PARALLEL.replace("ranks: 2", "ranks: 3").replace("divisor: 2", "divisor: 3")
    plans = {1: "ranks: 1\n" + TRAIN, 2: PARALLEL, 3: three}
    return {ranks: built(home / str(ranks), plan) for ranks, plan in plans.items()}


def losses(trainer: Trainer, data: Any, **choices: Any) -> list[float]:
    with trainer.loader(data, **choices) as batches:
        return [float(trainer.train(batch, batches.peek()).get("loss", 0.0)) for batch in batches]


def test_all_ranks_train_on_one_batch(folders: dict[int, Path]) -> None:
    for data in (records, {"x": X, "t": T}, [*records()]):
        want = on_all(folders[1], 1, lambda trainer: losses(trainer, data, batch=6, epochs=2))[0]  # noqa: B023
        assert len(want) == 12
        for ranks in (2, 3):
            have = on_all(folders[ranks], ranks, lambda trainer: losses(trainer, data, batch=6, epochs=2))[0]  # noqa: B023
            np.testing.assert_allclose(have, want, rtol=1e-5)


def test_it_goes_on_elsewhere(folders: dict[int, Path], tmp_path: Path) -> None:
    def whole(trainer: Trainer) -> list[float]:
        return losses(trainer, records, batch=6, epochs=2)

    def first(trainer: Trainer) -> list[float]:
        found = []
        with trainer.loader(records, batch=6) as batches:
            for _ in range(4):
                found.append(float(trainer.train(next(batches)).get("loss", 0.0)))
            trainer.save(tmp_path / "kept", batches.saved(trainer.program.all_gather_text))
        return found

    def then(trainer: Trainer) -> list[float]:
        meta = trainer.load(tmp_path / "kept")
        with trainer.loader(records, batch=6, epochs=2) as batches:
            assert "skips its first 24 records" in batches.restore(meta, trainer.step)
            return [float(trainer.train(batch).get("loss", 0.0)) for batch in batches]

    want = on_all(folders[1], 1, whole)[0]
    have = [*on_all(folders[2], 2, first)[0], *on_all(folders[3], 3, then)[0]]
    np.testing.assert_allclose(have, want, rtol=1e-5)


def test_what_it_takes(folders: dict[int, Path], tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=X, target=T)
    (tmp_path / "source.py").write_text(
        "import numpy as np\nwith np.load(__file__.replace('source.py', 'd.npz')) as d:\n    source = dict(d)\n"
    )

    def act(trainer: Trainer) -> None:
        said = {"source": str(tmp_path / "source.py"), "fields": {"t": "target"}}
        assert next(trainer.loader(said, batch=4))["t"].shape == (4, 4)
        given = trainer.loader({"x": X, "target": T}, batch=4, fields={"t": "target"}, shuffle=False)
        np.testing.assert_array_equal(next(given)["t"], T[:4])
        with pytest.raises(UsageError, match=r"has no field; the fields are 'x', 'target'"):
            trainer.loader(tmp_path / "d.npz", batch=4)
        with pytest.raises(
            UsageError, match=r"loader\(\) takes no shufle\n  help: it takes data, epochs, batch, seed, shuffle"
        ):
            trainer.loader({"x": X, "t": T}, batch=4, shufle=False)  # type: ignore[call-arg]
        with pytest.raises(UsageError, match="the global batch size is not known"):
            trainer.loader({"x": X, "t": T})

    on_all(folders[1], 1, act)
