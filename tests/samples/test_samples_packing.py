"""Documents packed into rows give the loss that each gives by itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from partc.compiler.pipeline import compile_model
from partc.runtime import load_trainer
from partc.runtime.communication.in_process import LocalWorld
from samples_training_case import samples

__all__ = ["samples"]

UNPACKED = """
from packing import NO_LABEL, documents
import numpy as np
source = [{"ids": one.astype(np.int64), "labels": np.append(one[1:], NO_LABEL).astype(np.int64)} for one in documents()]
"""


def evaluated(folder: Path, ranks: int, data: object) -> float:
    """The loss of all records before the first step."""
    world = LocalWorld(ranks)

    def on(rank: int) -> float:
        with (
            load_trainer(folder, world.transport(rank), threads=1) as trainer,
            trainer.loader(data, epochs=1, batch=8, shuffle=False, drop_last=False) as batches,
        ):
            return trainer.evaluate((batch, batches.size) for batch in batches).get("loss", 0.0)

    with ThreadPoolExecutor(ranks) as threads:
        return next(iter([*threads.map(on, range(ranks))]))


def test_rows_of_documents_have_the_loss_of_the_documents(samples: Path, tmp_path: Path) -> None:
    folder = samples / "gpt"
    (folder / "unpacked.py").write_text(UNPACKED)
    plan = (folder / "train_packed.yaml").read_text()
    one = plan[plan.index("train:") :].replace("packing.py", "{source: unpacked.py, pad: {ids: 0, labels: -100}}")
    (folder / "unpacked.yaml").write_text(f"ranks: 1\n{one}")
    compile_model(folder / "packed_model.py", folder / "train_packed.yaml", tmp_path / "packed")
    compile_model(folder / "model.py", folder / "unpacked.yaml", tmp_path / "unpacked")
    whole = evaluated(tmp_path / "packed", 2, folder / "packing.py")
    alone = evaluated(
        tmp_path / "unpacked", 1, {"source": str(folder / "unpacked.py"), "pad": {"ids": 0, "labels": -100}}
    )
    assert whole == pytest.approx(alone, abs=1e-5)
    assert 5 < alone < 7


def test_every_token_is_in_a_row_once(samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(samples / "gpt"))
    from packing import NO_LABEL, documents, packed  # type: ignore[import-not-found]

    texts = documents()
    rows = packed(texts, 100)
    found = [
        rows["ids"][row, rows["documents"][row] == number]
        for row in range(len(rows["ids"]))
        for number in range(1, rows["documents"][row].max() + 1)
    ]
    assert sorted(one.tobytes() for one in found) == sorted(one.astype(np.int64).tobytes() for one in texts)
    assert (rows["labels"] != NO_LABEL).sum() == sum(len(one) - 1 for one in texts)
    assert (rows["position_ids"][rows["documents"] > 0] == np.concatenate([np.arange(len(one)) for one in found])).all()
