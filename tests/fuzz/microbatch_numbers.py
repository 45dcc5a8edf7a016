"""Every number of an artifact that has to do with microbatches, changed one at a time: the checker refuses it, or it is harmless.

    python tests/fuzz/microbatch_numbers.py            all numbers of a pipeline and of a training that accumulates
    python tests/fuzz/microbatch_numbers.py 0 10       each tenth, from the first

Changed are the head and the rows of the schedule's text; of the manifest the batch of the settings, and what is said of messages;
of the rank files the calls of tasks and what each reads, the parts of inputs, constants of one number, and tags. What the text says of
times, idle shares and bytes is computed of these, and nothing reads it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import onnx
from onnx import numpy_helper

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from mutated import change_file, change_manifest, correct
from mutation_kinds import KINDS, build, run
from mutations import same
from mutations_of_rows import microbatch
from partc.runtime.artifact.format import SCHEDULE, TASKS
from partc.runtime.checker.check import check_artifact

Change: TypeAlias = Callable[[Path], None]
_NUMBER = re.compile(r"\d+")
BATCH = 4


def changes(folder: Path) -> Iterator[tuple[str, Change]]:
    """What is changed, and how."""
    if (folder / SCHEDULE).exists():
        yield from _of_text((folder / SCHEDULE).read_text())
    yield from _of_manifest(json.loads((folder / "manifest.json").read_text()))
    for path in sorted(folder.glob("rank_*.onnx")):
        yield from _of_file(path.name, onnx.load(path, load_external_data=False))


def _numbers(text: str) -> Iterator[tuple[str, str]]:
    """Texts with one number that is larger, and with one that is smaller, by one."""
    for found in _NUMBER.finditer(text):
        for number in (int(found[0]) + 1, int(found[0]) - 1):
            if number >= 0:
                yield (
                    f"{found[0]} to {number} at {found.start()}",
                    f"{text[: found.start()]}{number}{text[found.end() :]}",
                )


def _of_text(text: str) -> Iterator[tuple[str, Change]]:
    lines = text.splitlines(keepends=True)
    for at, line in enumerate(lines):
        head = line.partition("   ")[0] if line.startswith("# Stage ") else line
        if not line.startswith(("# Schedule", "# Stage", "rank")) or "|" in line:
            continue
        for said, other in _numbers(head):
            changed = "".join([*lines[:at], other + line[len(head) :], *lines[at + 1 :]])

            def write(folder: Path, changed: str = changed) -> None:
                (folder / SCHEDULE).write_text(changed)
                correct(folder)

            yield f"{SCHEDULE}, line {at + 1}: {said}", write


def _of_manifest(data: dict[str, Any]) -> Iterator[tuple[str, Change]]:
    def changed(change: Callable[[dict[str, Any]], object]) -> Change:
        return lambda folder: change_manifest(folder, change)

    for batch in (BATCH - 1, BATCH + 1, 0):
        yield (
            f"settings.batch: {batch}",
            changed(lambda one, batch=batch: one["training"]["settings"].update(batch=batch)),
        )
    transfers = data["programs"]["train"]["transfers"]
    for at, record in enumerate(transfers):
        for key in ("value", "tag", "shape", "bytes"):
            for said, other in _numbers(json.dumps(record[key])):
                value = json.loads(other)
                yield (
                    f"transfers.{at}.{key}: {said}",
                    changed(lambda one, at=at, key=key, value=value: one["transfers"][at].update({key: value})),
                )


def _of_file(file: str, model: onnx.ModelProto) -> Iterator[tuple[str, Change]]:
    def changed(change: Callable[[onnx.ModelProto], object]) -> Change:
        return lambda folder: change_file(folder, file, change)

    for at, node in enumerate(model.graph.node):
        if node.domain == TASKS:
            for number in (microbatch(node).i + 1, microbatch(node).i - 1):
                yield (
                    f"{file}, {node.name or node.op_type}: microbatch {number}",
                    changed(lambda one, at=at, number=number: setattr(microbatch(one.graph.node[at]), "i", number)),
                )
        for k, name in enumerate(node.input):
            base, dot, number = name.rpartition(".")
            if dot and number.isdecimal():
                for other in (int(number) + 1, int(number) - 1):
                    yield (
                        f"{file}, {node.name or node.op_type}: reads {base}.{other} for {name}",
                        changed(lambda one, at=at, k=k, other=f"{base}.{other}": _read(one, at, k, other)),
                    )
        for k, attribute in enumerate(node.attribute):
            if attribute.name in ("num_outputs", "tag"):
                for number in (attribute.i + 1, attribute.i - 1):
                    yield (
                        f"{file}, {node.name or node.op_type}: {attribute.name} {number}",
                        changed(lambda one, at=at, k=k, n=number: setattr(one.graph.node[at].attribute[k], "i", n)),
                    )
    for at, tensor in enumerate(model.graph.initializer):
        if not tensor.dims and not tensor.metadata_props and not tensor.external_data:
            for factor in (2, 0.5):

                def scaled(one: onnx.ModelProto, at: int = at, factor: float = factor) -> None:
                    tensor = one.graph.initializer[at]
                    number = numpy_helper.to_array(tensor)
                    tensor.CopyFrom(numpy_helper.from_array((number * factor).astype(number.dtype), tensor.name))

                yield f"{file}, the constant '{tensor.name}': times {factor}", changed(scaled)


def _read(model: onnx.ModelProto, at: int, k: int, name: str) -> None:
    model.graph.node[at].input[k] = name


def sweep(begin: int = 0, step: int = 1) -> tuple[Counter[str], list[str]]:
    """How each change ended, or each `step`-th from the one at `begin` on, and those that neither the checker nor loading told."""
    ends: Counter[str] = Counter()
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("pipeline", "parts of a batch"):
            kind, source = KINDS[name], Path(scratch) / name
            build(kind, source)
            change_manifest(source, lambda one: one["training"]["settings"].update(batch=BATCH))
            assert not check_artifact(source)
            wanted = run(kind, source)
            for said, change in [*changes(source)][begin::step]:
                target = Path(shutil.copytree(source, Path(scratch) / "build"))
                change(target)
                end = "refused"
                if not check_artifact(target):
                    end = "harmless" if same(wanted, run(kind, target)) else "missed"
                ends[end] += 1
                missed += [f"{name}, {said}"] if end == "missed" else []
                shutil.rmtree(target)
    return ends, missed


if __name__ == "__main__":
    os.environ.setdefault("PARTC_FILL_FREED", "1")
    counted, lost = sweep(*map(int, sys.argv[1:3]))
    print(
        "\n".join(
            [*lost, f"{counted.total()} changes: {', '.join(f'{n} {end}' for end, n in sorted(counted.items()))}"]
        )
    )
    sys.exit(1 if lost else 0)
