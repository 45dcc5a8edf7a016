"""The handler of SIGCHLD that was there before a loader is read is there afterwards, whoever set torch's, and torch's is out meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from data_case import sharded
from partc.runtime.artifact.training.data_spec import Spec
from partc.runtime.data.loader import open_loader

torch = pytest.importorskip("torch", reason="torch is not installed: a DataLoader is its")
SOURCE = """
import numpy as np, torch
from torch.utils.data import DataLoader, TensorDataset
source = DataLoader(TensorDataset(torch.zeros(12, 4), torch.arange(12)), batch_size=4)
torch.utils.data._utils.signal_handling._set_SIGCHLD_handler()    # as by `next(iter(source))` with workers
"""


def of_user(number: int, frame: FrameType | None) -> None:
    """A handler of the user's."""


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN, of_user], ids=["default", "ignored", "own"])
def before(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A handler that is set while a test runs; torch has set none."""
    monkeypatch.setattr("torch.utils.data._utils.signal_handling._SIGCHLD_handler_set", False)
    kept = signal.signal(signal.SIGCHLD, request.param)
    yield request.param
    signal.signal(signal.SIGCHLD, kept)


def now() -> Any:
    return signal.getsignal(signal.SIGCHLD)


def source() -> Any:
    tensors = torch.utils.data.TensorDataset(torch.zeros(12, 4), torch.arange(12))
    return torch.utils.data.DataLoader(tensors, batch_size=4)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_file_that_iterates_its_loader(depth: int, before: Any, tmp_path: Path) -> None:
    (tmp_path / "source.py").write_text(SOURCE)
    spec = Spec.parse(str(tmp_path / "source.py"))
    with open_loader(spec, sharded(1), 0, 4, depth=depth) as loader:
        assert now() == before
        next(loader)
        assert now() == before
    assert now() == before


@pytest.mark.parametrize("depth", [0, 2])
def test_torchs_own_is_put_back(depth: int, before: Any) -> None:
    """Where the process has iterated a loader before, and that again for each reading."""
    torch.utils.data._utils.signal_handling._set_SIGCHLD_handler()
    torchs = now()
    assert torchs.__module__.startswith("torch.")
    spec = Spec.parse({"source": "source.py"})
    loader = open_loader(Spec(**{**vars(spec), "source": None}), sharded(1), 0, 4, depth=depth, source=source())
    for _ in range(2):
        with loader:
            assert np.shape(next(loader)["x"]) == (4, 4)
            assert now() == signal.SIG_DFL
        assert now() is torchs


@pytest.mark.parametrize("depth", [0, 2])
def test_torchs_handler_that_reading_sets_is_taken_out(depth: int, before: Any) -> None:
    """With workers, torch sets it where the main thread iterates: without reading ahead."""
    found = torch.utils.data.DataLoader(source().dataset, batch_size=4, num_workers=1)
    spec = Spec.parse({"source": "source.py"})
    with open_loader(Spec(**{**vars(spec), "source": None}), sharded(1), 0, 4, depth=depth, source=found) as loader:
        next(loader)
        assert now() == before
    assert now() == before


def test_a_handler_that_the_user_sets_meanwhile_stays(before: Any) -> None:
    def later(number: int, frame: FrameType | None) -> None:
        """Another one."""

    torch.utils.data._utils.signal_handling._set_SIGCHLD_handler()
    spec = Spec.parse({"source": "source.py"})
    with open_loader(Spec(**{**vars(spec), "source": None}), sharded(1), 0, 4, source=source()) as loader:
        next(loader)
        signal.signal(signal.SIGCHLD, later)
    assert now() is later
