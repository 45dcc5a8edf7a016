"""`partc verify` of a plan that trains: two steps of the whole model on one rank against two of the compiled one.

Compared are the loss and the metrics of both steps, and then every tensor that training keeps: parameters, what the optimizer keeps of
them, and statistics. Both sides go the way of `partc train`, through data, checkpoint and metrics in files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from partc.cli.compare import Compared, compare
from partc.cli.job import Job, TrainingJob
from partc.runtime.dtypes import Array
from partc.runtime.errors import UsageError

if TYPE_CHECKING:
    from partc.cli.feed import Value
    from partc.compiler.plan.rules import Plan
    from partc.runtime.format import Manifest

STEPS = 2
SHARE = 1e-3


def both(
    model: Path, plan: Plan, built: Path, manifest: Manifest, values: Mapping[str, Value], scratch: Path, mpi: bool
) -> tuple[dict[str, Array], dict[str, Array]]:
    """What the whole and the compiled model give in two steps, and all tensors after them."""
    from partc.compiler.load import load
    from partc.compiler.load.source import Source
    from partc.compiler.pipeline import compile_source
    from partc.compiler.plan.rules import Dataset

    assert manifest.training is not None
    assert plan.train is not None
    records = _records(manifest, values)
    data = scratch / "records.npz"
    np.savez(data, **records)
    alone = replace(
        plan,
        ranks=1,
        placement=(),
        sharding=(),
        mesh=(),
        dataset=Dataset(),
        outputs=(),
        train=replace(plan.train, shard=None),
    )
    source = load(model)
    declared = replace(source.declared, placements=(), sharding=(), annotations=None)
    whole = scratch / "whole"
    compile_source(Source(source.model, declared), alone, whole)
    batch = len(next(iter(records.values())))
    return (
        _trained(whole, data, batch, scratch / "of_whole", False),
        _trained(built, data, batch, scratch / "of_compiled", mpi),
    )


def compared(
    whole: Mapping[str, Array], compiled: Mapping[str, Array], rtol: float | None, atol: float | None
) -> list[Compared]:
    """The comparison of every tensor; without `atol` a thousandth of its largest element."""
    found: list[Compared] = []
    for name, array in whole.items():
        close = SHARE * float(np.abs(array).max(initial=0.0)) if atol is None and array.dtype.kind == "f" else atol
        found += compare({name: array}, {name: compiled[name]}, rtol, close)
    return found


def _records(manifest: Manifest, values: Mapping[str, Value]) -> dict[str, Any]:
    """The inputs of a step as records; UsageError where they are not all of one batch."""
    assert manifest.training is not None
    found = {name: np.asarray(value) for name, value in values.items() if name not in manifest.training.scalars}
    sizes = {name: array.shape[0] if array.ndim else None for name, array in found.items()}
    if len(set(sizes.values())) != 1 or None in sizes.values():
        told = ", ".join(f"'{name}' {size}" for name, size in sizes.items())
        raise UsageError(f"the inputs are not records of one batch: their first dims are {told}")
    return found


def _trained(folder: Path, data: Path, batch: int, out: Path, mpi: bool) -> dict[str, Array]:
    """What an artifact tells of its steps, and its tensors after the last."""
    import click
    from partc.cli.launch import launch, run_here
    from partc.cli.launcher import Hosts
    from partc.runtime.artifact import open_artifact
    from partc.runtime.training.checkpoint import Checkpoint

    out.mkdir()
    told = out / "metrics.jsonl"
    training = TrainingJob(
        base=str(out),
        data=(str(data),),
        batch=batch,
        steps=STEPS,
        log="1",
        checkpoint=str(out / "kept"),
        save=str(STEPS),
        metrics=str(told),
        only_train=True,
    )
    job = Job(folder=str(folder), training=training, quiet=True)
    manifest = open_artifact(folder, trust=True).manifest
    code = launch(job, manifest, Hosts(None, None), ()) if mpi and manifest.ranks > 1 else run_here(job, manifest)
    if code:
        raise click.exceptions.Exit(code)
    assert manifest.training is not None
    found: dict[str, Array] = {}
    names = [manifest.training.loss, *manifest.training.metrics]
    for row in map(json.loads, told.read_text(encoding="utf-8").splitlines()):
        found |= {f"{name}, step {row['step']}": np.array(row[name], np.float32) for name in names}
    checkpoint = Checkpoint.open(out / "kept")
    return found | {name: checkpoint.read(name) for name in sorted(checkpoint.index.tensors)}
