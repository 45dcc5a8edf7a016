"""Checks of two microbatches that stand for all: they find in later microbatches what checks of all find."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from mutated import change_file
from mutation_kinds import ADAM, KINDS, LEARN, build
from partc.runtime.artifact.format import DOMAIN, TAG
from partc.runtime.artifact.tasks.calls import is_call
from partc.runtime.checker.check import check
from partc.runtime.checker.graph import rank_file, uniform_rows

LATE, BEFORE = ".3", ".2"
PLAN = (
    "ranks: 4\nsymbols: {n: {divisor: 10}}\nmesh: {tp: 2}\n"
    "placement: {up: [0, 1], shift: [0, 1], act: [0, 1], down: [2, 3], last: [2, 3]}\n"
    "sharding: {up: colwise, down: rowwise}\n" + LEARN % (ADAM, "") + "pipeline: {microbatches: 5, schedule: 1f1b}\n"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages, each on two ranks that share its products, with five microbatches."""
    return build(replace(KINDS["pipeline"], plan=PLAN), tmp_path_factory.mktemp("uniform") / "build")


def verdicts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """The violations found in two microbatches where these stand for all, and in all."""
    few = [str(one) for one in check(folder).violations]
    with monkeypatch.context() as patched:
        patched.setattr(rank_file, "is_uniform", lambda model, row: False)
        return few, [str(one) for one in check(folder).violations]


def late_places(file: Path) -> list[tuple[int, int, str]]:
    """The inputs of a rank file's nodes that are values of a late microbatch: the node, the place, and the name for the one before."""
    nodes = onnx.load(file, load_external_data=False).graph.node
    made = {name for node in nodes for name in node.output}
    return [
        (at, place, name.removesuffix(LATE) + BEFORE)
        for at, node in enumerate(nodes)
        for place, name in enumerate(node.input)
        if name.endswith(LATE) and name.removesuffix(LATE) + BEFORE in made
    ]


def test_a_sound_artifact_is_checked_by_two_microbatches(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = list[bool]()

    def spied(*arguments: object) -> bool:
        answers.append(uniform_rows.is_uniform(*arguments))  # type: ignore[arg-type]
        return answers[-1]

    monkeypatch.setattr(rank_file, "is_uniform", spied)
    checked = check(built)
    assert answers
    assert all(answers)
    assert not checked.violations
    monkeypatch.setattr(rank_file, "is_uniform", lambda model, row: False)
    every = check(built)
    assert not every.violations
    assert (every.nodes, every.memory, every.state) == (checked.nodes, checked.memory, checked.state)


def test_a_wrong_value_of_a_late_microbatch_is_found_as_among_all(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = 0
    for file in (built / "rank_0000.onnx", built / "rank_0002.onnx"):
        places = late_places(file)
        assert places
        for at, place, name in places[:: max(1, len(places) // 2)]:
            folder = tmp_path / f"{file.stem}-{at}-{place}"
            shutil.copytree(built, folder)
            change_file(
                folder,
                file.name,
                lambda model: model.graph.node[at].input.__setitem__(place, name),  # noqa: B023
            )
            few, every = verdicts(folder, monkeypatch)
            assert few == every, (file.name, at, place, name)
            found += bool(few)
    assert found >= 3


@pytest.mark.parametrize("kind", ["exchanged parts", "an early update", "another tag", "a sum that is not the last"])
def test_a_changed_row_is_not_uniform(built: Path, tmp_path: Path, kind: str) -> None:
    from partc.runtime.artifact.tasks.rows import row_of

    model = onnx.load(built / "rank_0000.onnx", load_external_data=False)
    row = row_of(model)
    assert row is not None
    assert uniform_rows.is_uniform(model, row)
    nodes = model.graph.node
    calls = [at for at, node in enumerate(nodes) if is_call(node)]
    if kind == "exchanged parts":
        split = next(node for node in nodes if node.op_type == "Split" and not node.domain)
        split.output[3], split.output[4] = split.output[4], split.output[3]
    elif kind == "an early update":
        nodes.insert(calls[2], nodes.pop())
    elif kind == "another tag":
        message = next(
            node for node in nodes if node.domain == DOMAIN and [*node.input, *node.output][0].endswith(LATE)
        )
        next(one for one in message.attribute if one.name == TAG).i += 1
    else:
        sums = [name for name in nodes[calls[-1]].output if ".sum" in name]
        reader = next(node for node in nodes if not is_call(node) and {*sums} & {*node.input})
        place = next(k for k, name in enumerate(reader.input) if name in sums)
        at = [*nodes[calls[-1]].output].index(reader.input[place])
        before = next(nodes[k] for k in reversed(calls[:-1]) if nodes[k].op_type == nodes[calls[-1]].op_type)
        reader.input[place] = before.output[at]
    changed = row_of(model)
    assert changed is not None
    assert not uniform_rows.is_uniform(model, changed)
