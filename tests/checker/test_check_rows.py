"""Rows of tasks that somebody changed, hashes corrected: each is refused with its first wrong cell, and a sound one says what it keeps."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from mutated import change_file, change_manifest, correct
from mutation_kinds import KINDS, build
from mutations_of_calls import Draft
from mutations_of_microbatches import MICROBATCH_MUTATIONS
from mutations_of_rows import exchange, messages, microbatch, tasks
from partc.runtime import ArtifactError, load_local
from partc.runtime.artifact.format import MANIFEST, SCHEDULE
from partc.runtime.checker.check import check, check_artifact

Change = Callable[[onnx.ModelProto], object]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages on a rank each, 1f1b with 4 microbatches.

    rank 0: 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    """
    return build(KINDS["pipeline"], tmp_path_factory.mktemp("rows") / "build")


def forged(built: Path, folder: Path, changes: dict[int, Change]) -> str:
    """What the checker says of a copy whose rank files are changed."""
    shutil.copytree(built, folder)
    for rank, change in changes.items():
        change_file(folder, f"rank_{rank:04d}.onnx", change)
    return "\n".join(map(str, check_artifact(folder)))


def named(model: onnx.ModelProto, cell: str) -> onnx.NodeProto:
    return next(model.graph.node[at] for at in tasks(model) if model.graph.node[at].name == cell)


def place(model: onnx.ModelProto, cell: str) -> int:
    return next(at for at in tasks(model) if model.graph.node[at].name == cell)


def swap(one: str, two: str) -> Change:
    return lambda model: exchange(model, place(model, one), place(model, two))


def drop(cell: str) -> Change:
    return lambda model: model.graph.node.remove(named(model, cell))


def renumber(cell: str, number: int) -> Change:
    return lambda model: setattr(microbatch(named(model, cell)), "i", number)


def cross(one: str, two: str) -> Change:
    """The labels of two calls, which are there from the begin, exchanged."""

    def change(model: onnx.ModelProto) -> None:
        first, second = named(model, one), named(model, two)
        at = next(k for k, name in enumerate(first.input) if name.startswith("label."))
        first.input[at], second.input[at] = second.input[at], first.input[at]

    return change


def no_sum(cell: str) -> Change:
    """A call that begins its sums of gradients anew, from the zeros of the first one."""

    def change(model: onnx.ModelProto) -> None:
        call, first = named(model, cell), named(model, cell[:-1] + "0")
        for k, name in enumerate(first.input):
            if name.endswith(".sum.zeros"):
                call.input[k] = name

    return change


def swap_messages(model: onnx.ModelProto) -> None:
    """The Recv of the second microbatch before that of the first."""
    one, two, *_ = messages(model)
    exchange(model, one, two)


SWAPPED = """\
rank_0001.onnx: rank 1, cell 3: 1B1 comes before 1F1
    1F0 1B0 1B1 1F1 1F2 1B2 1F3 1B3
            ^^^
  of one stage and microbatch F comes before B, and B before W
  help: compile the model again"""
DROPPED = """\
rank_0001.onnx: rank 1, cell 8: 1F2 is missing
    1F0 1B0 1F1 1B1 1B2 1F3 1B3
                                ^
  every function is called once for each microbatch
  help: compile the model again"""
TWICE = """\
rank_0000.onnx: rank 0, cell 6: 0F2 appears twice, first in cell 4
    0F0 0F1 0B0 0F2 0B1 0F2 0B2 0B3
                        ^^^
  every function is called once for each microbatch
  help: compile the model again"""
OTHER = """\
rank_0000.onnx: rank 0, cell 1: 0F1 stands where ir/schedule.txt has 0F0
    0F1 0F0 0B0 0F2 0B1 0F3 0B2 0B3
    ^^^
  the rows of people and of ranks are one"""
CROSSED = """\
rank_0001.onnx: rank 1, cell 1: 1F0 reads 'label.2', which is of microbatch 2
    1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    ^^^
  a task reads what tasks of its own microbatch make; a sum goes from one call of a function to its next"""
NO_SUM = "rank 1, cell 6: 1B2: it adds to 'c.grad.sum.zeros', not to what the call before it made\n"
MESSAGES = "it is where manifest.json has transfer"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({1: swap("1F1", "1B1")}, SWAPPED),
        ({0: swap("0F0", "0F1")}, OTHER),
        ({1: drop("1F2")}, DROPPED),
        ({0: renumber("0F3", 2)}, TWICE),
        ({0: renumber("0F3", 9)}, "0F9 is of microbatch 9"),
        ({1: cross("1F0", "1F2")}, CROSSED),
        ({1: no_sum("1B2")}, NO_SUM),
        ({0: swap_messages}, MESSAGES),
    ],
)
def test_a_forged_row_is_refused(changes: dict[int, Change], text: str, built: Path, tmp_path: Path) -> None:
    assert text in forged(built, tmp_path / "build", changes)


LEFT_OUT = """\
rank_0000.onnx: rank 0: 'x' is split into 4 parts, but the rows have 3 microbatches
  because the rows, the parts of inputs, what is joined of them and its divisor state one number of microbatches
  help: compile the model again
rank_0001.onnx: rank 1: 'label' is split into 4 parts, but the rows have 3 microbatches
  because the rows, the parts of inputs, what is joined of them and its divisor state one number of microbatches
  help: compile the model again"""
DIVISOR = "\nrank_0001.onnx: rank 1: 'loss' is the Sum of microbatches divided by 4, but the rows have 3 microbatches"


@pytest.mark.parametrize(
    ("mutation", "told"),
    [
        ("the last microbatch left out", DIVISOR),
        ("the last microbatch left out, and counted so", ""),
        ("a part more", "but the rows have 4 microbatches"),
    ],
)
def test_the_number_of_microbatches_is_one(mutation: str, told: str, built: Path, tmp_path: Path) -> None:
    """What all ranks leave out alike, and no text tells, is told by the parts of inputs."""
    folder = shutil.copytree(built, tmp_path / "build")
    models = {path.name: onnx.load(path) for path in folder.glob("rank_*.onnx")}

    def change(data: dict[str, Any]) -> None:
        assert MICROBATCH_MUTATIONS[mutation](Draft(models, data, random.Random(0), folder))

    change_manifest(folder, change)
    for name, model in models.items():
        (folder / name).write_bytes(model.SerializeToString())
    correct(folder)
    found = "\n".join(map(str, check_artifact(folder)))
    if "left out" in mutation:
        assert all(line in found for line in LEFT_OUT.splitlines()), found
        assert (DIVISOR in found) == bool(told), found
        index = json.loads(
            (folder / MANIFEST).read_text()
        )  # a list is proven when it is written; without one each load proves
        index["files"] = {name: record for name, record in index["files"].items() if not name.endswith(".run.json")}
        (folder / MANIFEST).write_text(json.dumps(index))
        with pytest.raises(ArtifactError, match=r"rank_0000\.onnx: 'x' is split into 4 parts, but the rows have 3"):
            load_local(folder)
    else:
        assert told in found


def test_a_row_of_people_that_ranks_do_not_have(built: Path, tmp_path: Path) -> None:
    """Files that agree among each other, and a text that does not."""
    folder = shutil.copytree(built, tmp_path / "build")
    text = (folder / SCHEDULE).read_text()
    (folder / SCHEDULE).write_text(text.replace("rank 1: 1F0 1B0 1F1", "rank 1: 1F0 1F1 1B0"))
    correct(folder)
    (violation,) = check_artifact(folder)
    assert "rank 1, cell 2: 1B0 stands where ir/schedule.txt has 1F1" in str(violation)


def test_what_a_sound_pipeline_keeps(built: Path) -> None:
    checked = check(built)
    assert not checked.violations
    assert checked.microbatches == 4
    assert [(one.ranks, one.microbatches) for one in checked.memory] == [("0", 2.0), ("1", 1.0)]
    # rank 0: t of 12 columns, which it sends and the gradient of Tanh reads, of a quarter of n records, twice
    assert checked.memory[0].bytes == "24*n"


def test_a_deadlock_shows_where_each_row_waits(built: Path, tmp_path: Path) -> None:
    """Rank 0 receives the first gradient before it sends anything: it can be posted so, but not if it is waited for there."""

    def early(model: onnx.ModelProto) -> None:
        nodes = model.graph.node
        at = next(at for at in messages(model) if nodes[at].op_type == "Recv")
        exchange(model, messages(model)[0], at)

    text = forged(built, tmp_path / "build", {0: early})
    (found,) = re.findall(r"a deadlock of 2 ranks: .*?\n  help", text, re.DOTALL)
    assert "beside 0F0; rank 1 waits at Recv" in found
    assert "\n  rank 0:\n    0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3\n    ^^^\n  rank 1:\n    1F0 1B0" in found


def restated(built: Path, folder: Path, change: Callable[[str], str]) -> str:
    """What the checker says of an artifact whose text of rows is another."""
    text = (shutil.copytree(built, folder) / SCHEDULE).read_text()
    (folder / SCHEDULE).write_text(change(text))
    assert change(text) != text
    correct(folder)
    return "\n".join(map(str, check_artifact(folder)))


def test_calls_of_other_stages_than_those_of_its_row(built: Path, tmp_path: Path) -> None:
    """A rank takes part in a task of other ranks where their values reach it: the text has the tasks of its own stages alone."""

    def other_homes(text: str) -> str:
        text = text.replace("Stages: 2", "Stages: 3").replace(
            "# Stage 1: rank 1", "# Stage 1: rank 0\n# Stage 2: rank 1"
        )
        rank_1 = re.search(r"rank 1: (1F0.*)", text)
        assert rank_1 is not None
        return text.replace(rank_1[0], "rank 1: 2F0").replace("rank 0: 0F0", f"rank 0: {rank_1[1]} 0F0")

    assert restated(built, tmp_path / "build", other_homes) == ""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ((r"rank 1: 1F0.*", "rank 1: x"), "line 12, cell 1: 'x' is not a task"),
        (
            (r"rank 1: 1F0.*", "rank 1:"),
            "stage 1 is on ranks 1 by its head, which counts 2 stages; its tasks are in the",
        ),
        ((r"\nrank 1: 1F0.*", ""), "its tasks are in the rows of no rank"),
        ((r"\nrank 1: 1F0.*", "\nrank 0: 1F0"), "line 12: rank 0 has two rows"),
        ((r"rank 1: 1F0", "rank 0-70000: 1F0"), "are more than 65536 ranks"),
        ((r"Stages: 2", "Stages: 1"), "line 12, cell 1: 1F0, and its head counts 1 stages and 4 microbatches"),
        ((r"Stages: 2", "Stages: 3"), "stage 2 is on no rank by its head, which counts 3 stages"),
        ((r"# Stage 1: rank 1", "# Stage 1: rank 0"), "stage 1 is on ranks 0 by its head"),
        ((r"# Stage 1: rank 1", "# Stage 2: rank 1"), "stage 1 is on no rank by its head"),
        ((r"# Stage 1: rank 1", "# Stage 1: rank 1\n# Stage 2: rank 1"), "stage 2 is on ranks 1 by its head"),
        ((r"Microbatches: 4", "Microbatches: 3"), "0F3, and its head counts 2 stages and 3 microbatches"),
        ((r"Microbatches: 4", "Microbatches: 5"), "0F4 1F4 are missing|0F4 0B4 are missing"),
        ((r"Microbatches: 4", "Microbatches: x"), "it has no number of stages and microbatches, or no rows"),
        ((r"(?s)rank 0: 0F0.*", ""), "it has no number of stages and microbatches, or no rows"),
        ((r"(?s)Stages: 2(.*)\n# Stage 1: [^\n]*(.*)\nrank 1: 1F0[^\n]*", r"Stages: 1\1\2"), "1F0 is in no row"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_text_that_contradicts_itself_or_leaves_out(
    change: tuple[str, str], told: str, built: Path, tmp_path: Path
) -> None:
    found = restated(built, tmp_path / "build", lambda text: re.sub(*change, text, count=1))
    assert any(one in found for one in told.split("|")), found
