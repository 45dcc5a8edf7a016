"""`partc train` on a `DataLoader` and on streams: over MPI and in one process, stopped and resumed under other plans."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dealt import dealt
from partc.cli.main import invoke
from partc.runtime.checkpoint.checkpoint import Checkpoint
from rows import of_today
from streams_case import PLANS, SOURCES, prepared
from training_command_case import folder, tensors, train

__all__ = ["folder"]

pytest.importorskip("torch", reason="torch is not installed: a DataLoader is torch's")


def assert_alike(have: Path, want: Path) -> None:
    one, other = (Checkpoint.open(folder / "step_00000020") for folder in (have, want))
    assert one.index.tensors.keys() == other.index.tensors.keys()
    for name in other.index.tensors:
        np.testing.assert_allclose(one.read(name), other.read(name), rtol=1e-4, atol=1e-5, err_msg=f"{have}: {name}")


@pytest.mark.parametrize("source", SOURCES)
def test_every_plan_trains_on_the_same_batches(folder: Path, source: str) -> None:
    """Which ranks get a batch follows from the plan, not from the kind of source: each day has some of the plans."""
    several = [name for name in PLANS if name != "one"] if source in ("loader", "stream") else ["parallel", "middle"]
    names = "one", *of_today(several, 2 if len(several) > 2 else 1)
    prepared(folder, SOURCES[source], *names)
    for name in names:
        assert train(name, "--checkpoint", f"kept_{name}", "--save", "20") == 0
        assert_alike(folder / f"kept_{name}", folder / "kept_one")


@pytest.mark.parametrize("source", ["loader", "stream"])
def test_stopped_anywhere_it_goes_on_under_any_plan(
    folder: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(folder, SOURCES[source])
    assert train("one", "--checkpoint", "whole", "--save", "20") == 0
    for steps, name in zip(("3", "5", "7", "11", "14", "20"), (*PLANS, "one"), strict=True):
        capsys.readouterr()
        resume = ["--resume"] if steps != "3" else []
        assert train(name, "--checkpoint", "kept", "--steps", steps, *resume) == 0
        said = capsys.readouterr().out
        again = "skips its first" in said
        assert again == (source == "stream" and steps not in ("3", "7")), said
    assert_alike(folder / "kept", folder / "whole")


def test_stopped_and_resumed_over_mpi_it_ends_in_the_same_bits(folder: Path) -> None:
    source, plan = "loader", "placed"
    prepared(folder, SOURCES[source], plan, more="  test: source.py\n")
    assert train(plan, "--checkpoint", "whole") == 0
    assert train(plan, "--checkpoint", "kept", "--steps", "8") == 0
    words = ["train", plan, "--plan", f"{plan}.yaml", "--threads", "1"]
    assert invoke([*words, "--checkpoint", "kept", "--steps", "20", "--resume"]) == 0
    assert tensors(folder / "kept") == tensors(folder / "whole")


DIES = """
import os, numpy as np, torch
for _ in torch.utils.data.DataLoader([1], num_workers=1): pass  # in the main thread torch handles the signal of a child that ends
class Dies(torch.utils.data.Dataset):
    def __len__(self): return 60
    def __getitem__(self, index):
        if index == 30: os._exit(7)
        return np.zeros(12, np.float32), 1
source = torch.utils.data.DataLoader(Dies(), batch_size=12, num_workers=1)
"""
RAISES = """
import numpy as np
def source():
    yield from [(np.zeros(12, np.float32), 1)] * 20
    raise KeyError("images")
"""
MISTAKES = {
    "died": (DIES, 1, "a worker process of its DataLoader has ended"),
    "raised": (RAISES, 1, "source.py:5: KeyError: 'images'"),
    "changed": (
        RAISES.replace('raise KeyError("images")', "yield from [(np.zeros(11, np.float32), 1)] * 20"),
        2,
        "batch 1 of",
    ),
    "short": (RAISES.replace("* 20", "* 2").replace('raise KeyError("images")', ""), 2, "ended before its first batch"),
    "once": (
        RAISES.replace('raise KeyError("images")', "") + "source = source()\n",
        2,
        "cannot start again for epoch 1",
    ),
}


@pytest.mark.parametrize(("mistake", "plan"), of_today([("died", "parallel"), ("changed", "parallel")], 1))
def test_over_mpi_all_ranks_end_with_one_message(
    folder: Path, mistake: str, plan: str, capfd: pytest.CaptureFixture[str]
) -> None:
    source, code, told = MISTAKES[mistake]
    prepared(folder, source, plan)
    assert invoke(["train", plan, "--plan", f"{plan}.yaml", "--threads", "1"]) == code
    error = capfd.readouterr().err
    assert error.count(told) == 1, error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("mistake", "plan"),
    [
        *of_today(
            [
                *dealt(("died", "raised", "changed"), ("one", "three", "middle")),
                *dealt(("died", "raised", "changed"), ("three", "middle", "one")),
                *dealt(("died", "raised", "changed"), ("middle", "one", "three")),
            ],
            3,
        ),
        *dealt(["short", "once"], ["three", "middle"]),
    ],
)
def test_ranks_as_threads_end_with_one_message(
    folder: Path, mistake: str, plan: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """How ranks learn of a mistake depends on the plan; a source that ends too soon is told as a batch of a wrong shape is."""
    source, code, told = MISTAKES[mistake]
    prepared(folder, source, plan)
    assert train(plan) == code
    error = capfd.readouterr().err
    assert error.count(told) == 1, error
    assert "Traceback" not in error


def test_a_stream_is_evaluated_and_the_log_has_no_total(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream, said = SOURCES["stream"], []
    for name in ("one", *of_today([name for name in PLANS if name != "one"], 2)):
        prepared(folder, stream, name, more="  test: source.py\n  drop_last: true\n")
        assert train(name, "--epochs", "2", "--log", "2") == 0
        said.append([line for line in capsys.readouterr().out.splitlines() if line.startswith(("step", "evaluated"))])
        assert train(name, "--steps", "3", "--metrics", f"{name}.csv") == 0
        capsys.readouterr()
    first = said[0]
    assert first[0].startswith("step 2   epoch 0, 24 records   loss ")
    assert [line.partition("   loss")[0] for line in first] == [
        *("step 2   epoch 0, 24 records", "step 4   epoch 0, 48 records", "evaluated after step 5"),
        *("step 6   epoch 1, 12 records", "step 8   epoch 1, 36 records"),
        *("step 10   epoch 2, 0 records", "evaluated after step 10"),
    ]
    for other in said[1:]:
        assert [line.partition("   lr")[0] for line in other] == [line.partition("   lr")[0] for line in first]
