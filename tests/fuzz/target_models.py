"""Whole models on two targets by every kind of plan, with and without offload: they learn what one rank without targets learns.

    python tests/fuzz/target_models.py [--models lenet,gpt,dlrm,resnet] [--only zero] [--mpi]

A plan is one of `target_plans.py`; all targets run on the CPU, with their copies. Each trains three batches of other sizes: with the
optimizer where parameters are read, with it on the CPU, and so in float16. Losses and all tensors are compared with those of one rank
whose plan names no target; `partc check` must accept the artifact. Printed is by how many tolerances they differ at most: 1 and less is
equal. With `--mpi` a case is `partc verify --mpi --device cuda=cpu` instead, ranks being processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.frontend.source import Source
from partc.compiler.ir.programs import Copy
from partc.runtime.checker.check import check_artifact

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from target_plans import PLANS, Layout, model_of
from training_equivalence import FLOAT_STEPS, Run, run, source_of
from training_models import Feeds

LABELS = "{type: softmax_cross_entropy, logits: y, labels: labels}"
HALF = "precision: {compute: float16, loss_scale: 64}\n"
FLOAT, SIXTEEN = (2e-6, 2e-5), (2e-3, 0.1)
"""What losses, and tensors of their largest change, may differ by: sums in another order, and what is rounded to 16 bits elsewhere."""
UNITS = {FLOAT: 2.0**-23, SIXTEEN: 2.0**-11}
MOVED = 2.0
"""A ResNet of few channels, whose last batches have few positions, amplifies rounding. What is further off is compared by the distance of
all changes: that by which they move on one rank when its images do by a unit of rounding, as many times."""


@dataclass(frozen=True)
class Way:
    """How a plan trains: the target of its optimizer, its precision, and what may differ."""

    name: str
    target: str = ""
    precision: str = ""
    bounds: tuple[float, float] = FLOAT


WAYS = (Way("plain"), Way("offload", "target: cpu, "), Way("float16 offload", "target: cpu, ", HALF, SIXTEEN))


def training(name: str, layout: Layout, way: Way) -> str:
    """The section of the plan; tables have an optimizer of their own where gradients are rows."""
    loss = "loss" if name == "dlrm" else LABELS
    optimizer = f"{way.target}type: adamw, lr: 0.01, eps: 0.01{layout.shard}"
    rows = "  parameters: {'tables.*': {optimizer: {type: lazy_adam, lr: 0.01, eps: 0.01}}}\n" if layout.rows else ""
    return (
        f"train:\n  loss: {loss}\n  optimizer: {{{optimizer}}}\n{rows}{layout.train}{layout.accumulated}{way.precision}"
    )


def whole_of(layout: Layout, text: str) -> str:
    """The plan of one rank without targets."""
    plain = text
    for one in ("target: cpu, ", layout.shard, layout.accumulated):
        plain = plain.replace(one, "")
    some = f"pipeline: {{microbatches: {layout.microbatches}, statistics: microbatch}}\n" if layout.statistics else ""
    return f"ranks: 1\n{plain}{some}"


def times(have: Run, want: Run, bounds: tuple[float, float]) -> float:
    """The largest difference, in tolerances."""
    found = [0.0]
    for one, other in zip(have.outputs, want.outputs, strict=True):
        found.append(abs(float(one["loss"]) - float(other["loss"])) / (bounds[0] * abs(float(other["loss"]))))
    changes = {name: float(np.abs(array - want.before[name]).max(initial=0)) for name, array in want.after.items()}
    least = max(changes.values()) / 1000
    for name, array in want.after.items():
        unit = float(np.finfo(array.dtype).eps) if array.dtype.kind == "f" else 0.0
        room = bounds[1] * max(changes[name], least) + FLOAT_STEPS * unit * float(np.abs(array).max(initial=0))
        apart = float(np.abs(have.after[name] - array).max(initial=0))
        found.append(apart / room if room else float(apart > 0))
    return max(found) if all(map(np.isfinite, found)) else float("inf")


def distance(have: Run, want: Run) -> float:
    """How far the changes of all parameters are from those of another run, of the length of these."""
    training = want.program.training
    assert training is not None
    names = [str(value.name) for value in training.parameters]
    apart, length = (
        sum(float(np.square(want.after[name] - other[name]).sum()) for name in names)
        for other in (have.after, want.before)
    )
    return float(np.sqrt(apart / length))


def disturbed(feed: Feeds, unit: float) -> Feeds:
    """A batch whose numbers are off by a unit, relatively."""
    signs = np.random.default_rng(1)
    return {
        name: (one * (1 + unit * signs.choice([-1, 1], one.shape))).astype(one.dtype) if one.dtype.kind == "f" else one
        for name, one in feed.items()
    }


def in_process(name: str, layout: Layout, way: Way, folder: Path, wholes: dict[str, Run]) -> tuple[float, str]:
    """How far a case is off, and what it copies."""
    model, sizes = model_of(name)
    source, rng = source_of(model), np.random.default_rng(7)
    feeds = [model.feeds(rng, **{key: some[k] for key, some in sizes.items()}) for k in range(3)]
    text = training(name, layout, way)
    whole = whole_of(layout, text)
    key = f"{name}{whole}{layout.order}"
    if key not in wholes:
        wholes[key] = run(Source(source.model.clone()), whole, folder / "whole", given_of(layout, feeds))
    have = run(Source(source.model.clone()), layout.plan + text, folder / "cut", feeds)
    if faults := check_artifact(folder / "cut"):
        return float("inf"), str(faults[0])
    copies = sum(
        isinstance(step, Copy) for part in have.program.parts for body in (part, *part.bodies) for step in body.steps
    )
    off, said = times(have, wholes[key], way.bounds), f"{copies} copies"
    if off > 1 and name == "resnet":
        noise = f"{key} disturbed"
        if noise not in wholes:
            other = [disturbed(feed, UNITS[way.bounds]) for feed in given_of(layout, feeds)]
            wholes[noise] = run(Source(source.model.clone()), whole, folder / "disturbed", other)
        apart, moved = (distance(one, wholes[key]) for one in (have, wholes[noise]))
        off, said = apart / (MOVED * moved), f"{said}, {apart:.1e} apart, and rounding moves one rank by {moved:.1e}"
    return off, said


def given_of(layout: Layout, feeds: Sequence[Feeds]) -> list[Feeds]:
    """What one rank is fed, in its order."""
    return [{one: layout.ordered(array) for one, array in feed.items()} for feed in feeds]


def over_mpi(name: str, layout: Layout, way: Way, folder: Path) -> tuple[float, str]:
    """0 where `partc verify` says that a case is equal over MPI, and the largest difference that it tells of what training keeps."""
    model, sizes = model_of(name)
    source = source_of(model)
    ir.save(source.model, folder / "model.onnx")
    feed = model.feeds(np.random.default_rng(7), **{key: some[0] for key, some in sizes.items()})
    np.savez(folder / "batch.npz", **feed)
    (folder / "plan.yaml").write_text(layout.plan + training(name, layout, way))
    words = [
        "verify",
        "model.onnx",
        "--plan",
        "plan.yaml",
        "--mpi",
        "--device",
        "cuda=cpu",
        "--input",
        "batch.npz",
        "--json",
    ]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "partc.cli", *words],
        cwd=folder,
        env={**os.environ, **as_root},
        capture_output=True,
        text=True,
    )
    try:
        told: Mapping[str, Any] = json.loads(done.stdout)
    except ValueError:
        return float("inf"), f"exit {done.returncode}: {(done.stderr or done.stdout)[-1500:]}"
    if "compared" not in told:
        return float("inf"), json.dumps(told)[:1500]
    worst = max((row["absolute"] for row in told["compared"] if row["dtype"].startswith("float")), default=0.0)
    failed = [row["name"] for row in told["compared"] if not row["equal"]]
    said = f"{len(told['compared'])} tensors, largest |error| {worst:.1e}" + (
        f", not equal: {failed[:6]} {told['notes']}" if failed else ""
    )
    return (0.0 if told["equal"] and done.returncode == 0 else float("inf")), said


def cases(models: Sequence[str], only: str) -> Iterator[tuple[str, Layout, Way]]:
    """All cases of these models."""
    for name in models:
        yield from (
            (name, layout, way) for layout in PLANS[name] for way in WAYS if only in f"{layout.name}, {way.name}"
        )


def main() -> None:
    """Runs all cases, prints each, and ends with an error where one is not equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(PLANS))
    parser.add_argument("--only", default="", help="cases whose name has this, such as 'float16' or 'zero, offload'")
    parser.add_argument("--mpi", action="store_true", help="ranks are processes")
    options = parser.parse_args()
    wholes: dict[str, Run] = {}
    wrong = total = 0
    for name, layout, way in cases(options.models.split(","), options.only):
        begin, total = time.perf_counter(), total + 1
        with tempfile.TemporaryDirectory() as folder:
            try:
                if options.mpi:
                    off, said = over_mpi(name, layout, way, Path(folder))
                else:
                    off, said = in_process(name, layout, way, Path(folder), wholes)
            except Exception as error:
                off, said = float("inf"), f"{type(error).__name__}: {error}"
        wrong += off > 1
        seconds = time.perf_counter() - begin
        print(
            f"{'ok ' if off <= 1 else 'NOT'}  {name:6} {layout.name:34} {way.name:16} {off:8.3f}  {said}, {seconds:.0f} s",
            flush=True,
        )
    print(f"{total} cases, {wrong} not equal")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    os.environ.setdefault("PARTC_FILL_FREED", "1")
    main()
