"""Random models by random plans, written as annotated models and compiled again from these alone: the programs are the same, byte for byte.

    python tests/fuzz/random_annotations.py --cases 300 --seed 1

The cases are those of the random tests of strategies, of placements and of `random_cases.py`. Compared are the files of all ranks and
programs, without what says by which line of a plan a node is placed and cut; `partc check` must accept both artifacts.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import onnx
from hypothesis import HealthCheck, Phase, given, seed, settings
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_model
from partc.runtime.checker.check import check_artifact
from pool import Wrong, main
from random_cases import cases as risky
from random_placement_case import cases as placed
from random_sharding_case import cases as sharded

REASONS = ("partc.rule", "partc.cut", "partc.cause")
"""Metadata of a node that names lines of a plan, or the file of a model."""


def drawn(chance: random.Random) -> tuple[onnx.ModelProto, str]:
    """A model and a plan that trains nothing; hypothesis begins with the simplest one."""
    found: list[tuple[onnx.ModelProto, str]] = []
    strategy = chance.choice([sharded, placed, risky])()
    quiet = settings(
        max_examples=3, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )

    def one(case: object) -> None:
        model, plan = case if isinstance(case, tuple) else (case.model, case.plan)  # type: ignore[attr-defined]
        found.append((model, plan.partition("\ntrain:")[0] + "\n"))

    run: Callable[[], None] = seed(chance.randrange(2**31))(quiet(given(strategy)(one)))
    run()
    return found[-1]


def rank_files(build: Path) -> dict[str, bytes]:
    """The files of all ranks, and of the weights, without the reasons and the own names of nodes, which have their paths."""
    found = {str(path.relative_to(build)): path.read_bytes() for path in sorted(build.rglob("*.safetensors"))}
    for path in sorted(build.rglob("rank_*.onnx")):
        model = onnx.load(path, load_external_data=False)
        for node in model.graph.node:
            kept = [entry for entry in node.metadata_props if entry.key not in REASONS]
            node.name = ""
            del node.metadata_props[:]
            node.metadata_props.extend(sorted(kept, key=lambda entry: entry.key))
        found[str(path.relative_to(build))] = model.SerializeToString(deterministic=True)
    return found


def compare(folder: Path) -> None:
    """Compiles `model.onnx` by `plan.yaml`, then the annotated model without a plan; Wrong where the programs differ."""
    first, again, annotated = folder / "build", folder / "again", folder / "annotated.onnx"
    compile_model(folder / "model.onnx", folder / "plan.yaml", first, annotated=annotated)
    try:
        compile_model(annotated, None, again)
    except CompileError as error:
        raise Wrong("the annotated model is refused", str(error)) from None
    have, want = rank_files(again), rank_files(first)
    unlike = [name for name in {**want, **have} if have.get(name) != want.get(name)]
    if unlike:
        texts = [(build / "ir" / "step_parallel_begin.ir").read_text() for build in (first, again)]
        raise Wrong("different", "\n".join([", ".join(unlike), (folder / "plan.yaml").read_text(), *texts]))
    for build in (first, again):
        if found := check_artifact(build):
            raise Wrong("refused by check", "\n".join(map(str, found[:4])))


def work(chance: random.Random, folder: Path) -> str:
    """One case: '' or the compile's refusal of the plan."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, plan = drawn(chance)
    onnx.save(model, folder / "model.onnx")
    (folder / "plan.yaml").write_text(plan)
    try:
        compare(folder)
    except CompileError as error:
        return str(error)
    return ""


def reason(text: str) -> str:
    """A refusal without names, numbers and places."""
    line = text.splitlines()[0].split(": ", 1)[-1] if text else ""
    return re.sub(r"'[^']*'|\[[^\]]*\]|\([^)]*\)|\S*[\d@]\S*", "_", line)[:90]


if __name__ == "__main__":
    main(work, "annotated models", reason=reason)
