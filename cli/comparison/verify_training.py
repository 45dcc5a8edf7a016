"""`partc verify` for a plan that trains: compares three steps of the unsharded model on one rank with three of the compiled one.

It compares the loss and the metrics of all steps, every tensor of the training state (parameters, the optimizer's state of
them, and statistics), and the gradients of the first step, since a parameter's own rounding hides a small step. Both sides go the way
of `partc train`, through data, checkpoint and metrics in files. For a torch module, losses, parameters, statistics and gradients are
compared with torch's own training (`torch_reference.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from partc.cli.comparison.verdict import Case, Verdict, measured, of_torch_named
from partc.cli.job.job import Job, Reporting, TrainingJob
from partc.compiler.comparison.compare import Compared, compare, spread
from partc.compiler.ir.graph import nodes_of
from partc.compiler.ops.families.neural.dropout import DROPOUT
from partc.runtime.artifact.format import Manifest
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.artifact.training.scalars import scalars
from partc.runtime.checkpoint.checkpoint import Checkpoint
from partc.runtime.errors import UsageError
from partc.runtime.files.regular import read_regular
from partc.runtime.files.writers import new_file
from partc.runtime.training.trainer import STEP

if TYPE_CHECKING:
    from partc.cli.job.inputs import Value
    from partc.compiler.frontend.source import Source
    from partc.compiler.plan.rules import Plan

STEPS = 3
MOST_STEPS = 32
"""The most steps: where gradients overflow under the loss scale, the step is skipped and the scale halves, so more steps follow."""
SHARE = 1e-3
_OVERFLOW = (
    "gradients of the first steps overflow under the loss scale, and are not compared; parameters are, after steps that count\n"
    "  help: a lower `precision: {loss_scale: {first: 1024}}` has fewer steps skipped"
)
_UNITS = {"float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}


def verdict(case: Case, rtol: float | None, atol: float | None) -> Verdict:
    """Compares three steps of the unsharded model with three of the compiled one; rounding is measured where they are not close.

    For a loss that sums the ranks' means, the unsharded model's gradients are those of the sum of its parts' means.
    """
    from partc.cli.comparison.first_difference import Compiled, first_difference, gradients, gradients_alone
    from partc.cli.comparison.reference import DRAWS, batch_shards, compile_alone, first_values, perturbed, scaled_seed

    report, scratch, plan = case.report, case.scratch, case.report.program.plan
    assert plan.train is not None
    records = _records(report.manifest, case.values)
    along = {port.name: port.batch_dim for port in report.manifest.inputs}
    assert report.manifest.training is not None
    fixed = {name: records[name].tolist() for name in report.manifest.training.fixed if name in records}
    dealt = {name: array for name, array in records.items() if name not in fixed}
    fields = {name: np.moveaxis(array, along[name], 0) if along.get(name) else array for name, array in dealt.items()}
    data, batch = scratch / "records.npz", len(next(iter(fields.values())))
    with new_file(data) as out:
        np.savez(out, **fields)
    shards = batch_shards(report.manifest)
    alone = compile_alone(case.source, plan, scratch / "whole", shards)
    manifest = open_artifact(alone.folder, trust=True).manifest
    begun = first_values(alone.folder, manifest)
    if plan.train.loss.per_rank_mean:
        alone = Compiled(alone.program, scaled_seed(alone.folder, scratch / "summed", shards))
    alone = replace(alone, devices=case.devices)
    count, whole = STEPS, dict[str, Array]()
    while not whole:
        source = {"source": str(data), **fixed} if fixed else str(data)
        trained = partial(_trained, case.plan, data=source, batch=batch, devices=case.devices, steps=count)
        whole = trained(alone.folder, out=scratch / f"of_whole_{count}", mpi=False)
        if count < MOST_STEPS and not any(name.endswith(f", step {count}") for name in whole):
            count, whole = min(count * 2, MOST_STEPS), {}  # the loss scale was too large for every step
    compiled = trained(report.out, out=scratch / "of_compiled", mpi=case.mpi)
    ours = Compiled(report.program, report.out, case.devices)
    training = report.manifest.training
    assert training is not None
    numbers = scalars([name for name in training.scalars if name != STEP], 0, training.optimizer.numbers)
    feeds = {**records, **{name: np.array(x) for name, x in numbers.items()}, STEP: np.array(0, np.int64)}
    of_whole, of_compiled = gradients(alone, ours, feeds, scratch)
    overflow = count > STEPS and not all(np.isfinite(array).all() for array in of_whole.values())
    if overflow:
        of_whole, of_compiled = {}, {}
    torchs = _against_torch(case, trained, feeds, begun, shards, (rtol, atol))
    notes = [_OVERFLOW, *torchs.notes] if overflow else torchs.notes

    def rows(noise: Mapping[str, Array] | None) -> list[Compared]:
        kept = compared({**whole, **torchs.values}, compiled, begun, rtol, atol, noise)
        steep = {**of_whole, **{name: array for name, array in torchs.gradients.items() if name in of_whole}}
        kept += compared(steep, of_compiled, _zeros(steep), rtol, atol, noise)
        return [*of_torch_named(kept, {*torchs.values, *torchs.gradients}), *torchs.rows(noise is not None)]

    first = Verdict(rows(None), notes)
    if first.passed:
        return first
    noise: dict[str, Array] = {}
    if rtol is None and atol is None:
        draws, steps = [], []
        for draw in range(DRAWS):
            folder = perturbed(alone.folder, scratch / "perturbed", draw + 1)
            draws.append(trained(folder, out=scratch / f"of_perturbed_{draw}", mpi=False))
            steps.append({} if overflow else gradients_alone(replace(alone, folder=folder), feeds, scratch))
        noise = {**spread(whole, draws), **spread(of_whole, steps)}
    again = rows(noise)
    second = Verdict(again, [*notes, *measured(first.rows, again, alone, noise)])
    if second.passed:
        return second
    inside = first_difference(alone, ours, feeds, scratch, bool(noise))
    return Verdict(second.rows, [*second.notes, *filter(None, [inside])])


@dataclass
class _Torch:
    """Torch's training: values and gradients for the compiled model's comparison, or `rows` of the unsharded model's own with torch."""

    values: Mapping[str, Array] = field(default_factory=dict)
    gradients: Mapping[str, Array] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rows: Callable[[bool], list[Compared]] = lambda measured: []


def _against_torch(
    case: Case,
    trained: Callable[..., dict[str, Array]],
    inputs: Mapping[str, Any],
    begun: Mapping[str, Array],
    shards: int,
    tolerances: tuple[float | None, float | None],
) -> _Torch:
    """Returns torch's training, to compare the compiled model with, where the plan has nothing that torch's training lacks.

    Else the unsharded model is compiled once more without these parts, and compared with torch; `rows(True)` then also measures rounding.
    """
    from partc.cli.comparison.first_difference import gradients_alone
    from partc.cli.comparison.reference import DRAWS, compile_alone, perturbed
    from partc.cli.comparison.torch_reference import torch_training

    training, plan = case.report.program.training, case.report.program.plan
    if case.torch_model is None or training is None or plan.train is None or case.report.manifest.training is None:
        return _Torch()
    folder = Path() if case.plan is None else case.plan.parent
    loss = case.report.manifest.training.loss
    torchs = torch_training(case.torch_model, training, loss, inputs, STEPS, folder)
    if not torchs.values:
        return _Torch(notes=torchs.notes)
    source, plain, left = _undivided(case, plan, shards)
    if not left:
        return _Torch(torchs.values, torchs.gradients, torchs.notes)
    alone = replace(compile_alone(source, plain, case.scratch / "plain"), devices=case.devices)
    numbers = {name: array for name, array in inputs.items() if name != STEP}
    values = trained(alone.folder, out=case.scratch / "of_plain", mpi=False, steps=STEPS)
    steep = gradients_alone(alone, numbers, case.scratch / "plain_look")

    def rows(is_measured: bool) -> list[Compared]:
        noise: dict[str, Array] = {}
        if is_measured and tolerances == (None, None):
            draws, looks = [], []
            for draw in range(DRAWS):
                place = perturbed(alone.folder, case.scratch / "plain_perturbed", draw + 1)
                draws.append(trained(place, out=case.scratch / f"of_plain_{draw}", mpi=False, steps=STEPS))
                looks.append(gradients_alone(replace(alone, folder=place), numbers, case.scratch / "plain_look"))
            noise = {**spread(values, draws), **spread(steep, looks)}
        of_torch = {name: array for name, array in torchs.gradients.items() if name in steep}
        made = compared(torchs.values, values, begun, *tolerances, noise)
        made += compared(of_torch, steep, _zeros(of_torch), *tolerances, noise)
        return [replace(row, name=f"unsharded {row.name}", reference="torch") for row in made]

    told = f"the unsharded model is compared with torch without {', '.join(left)}, and the compiled model with it"
    return _Torch(notes=[*torchs.notes, told], rows=rows)


def _undivided(case: Case, plan: Plan, shards: int) -> tuple[Source, Plan, list[str]]:
    """Returns the model and the plan without the parts that torch's training lacks, and the names of these parts."""
    assert plan.train is not None
    rules = plan.train
    late = {pattern: rule for pattern, rule in rules.parameters.items() if rule.staleness}
    model = case.source.model.clone()
    drops = [node for node in nodes_of(model.graph) if node.op_type == DROPOUT and not node.domain]
    for node in drops:
        node.op_type = "Identity"
        node.resize_inputs(1)
    left = {
        "microbatches": plan.pipeline is not None or rules.accumulate > 1,
        "its precision": plan.precision is not None,
        "late updates": bool(late),
        "means of ranks": rules.loss.per_rank_mean and shards > 1,
        "dropout": bool(drops),
    }
    prompt = {pattern: rule.model_copy(update={"staleness": None}) for pattern, rule in late.items()}
    parameters = {**rules.parameters, **prompt}
    plain = replace(
        plan, pipeline=None, precision=None, train=rules.model_copy(update={"accumulate": 1, "parameters": parameters})
    )
    return replace(case.source, model=model), plain, [name for name, is_left in left.items() if is_left]


def _zeros(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.zeros_like(array) for name, array in arrays.items()}


def compared(
    whole: Mapping[str, Array],
    compiled: Mapping[str, Array],
    begun: Mapping[str, Array],
    rtol: float | None,
    atol: float | None,
    noise: Mapping[str, Array] | None = None,
) -> list[Compared]:
    """Compares every tensor; without tolerances, the tolerance of the training state depends on its change since `begun`.

    It is a thousandth of the largest change, plus a few units in the last place of the largest element: a step may change a parameter by
    less than the parameter's own rounding.
    """
    rows: list[Compared] = []
    for name, array in whole.items():
        relative, close = rtol, atol
        if name in begun and array.dtype.kind == "f":
            unit = 4 * _UNITS.get(array.dtype.name, 0.0)
            change = np.abs(array.astype(np.float64) - begun[name].astype(np.float64))
            largest = float(np.abs(array).max(initial=0.0))
            close = SHARE * float(change.max(initial=0.0)) + unit * largest if atol is None else atol
            relative = unit if rtol is None else rtol
        rows += compare({name: array}, {name: compiled[name]} if name in compiled else {}, relative, close, noise)
    return rows


def _records(manifest: Manifest, values: Mapping[str, Value]) -> dict[str, Any]:
    """Returns the inputs of a step as records. Raises UsageError where they do not have one batch size."""
    assert manifest.training is not None
    inputs = {name: np.asarray(value) for name, value in values.items() if name not in manifest.training.scalars}
    records = {name: array for name, array in inputs.items() if name not in manifest.training.fixed}
    along = {port.name: port.batch_dim for port in manifest.inputs}
    sizes = {name: array.shape[along[name]] if array.ndim else None for name, array in records.items()}
    if len(set(sizes.values())) != 1 or None in sizes.values():
        told = ", ".join(f"'{name}' {size}" for name, size in sizes.items())
        raise UsageError(f"the inputs are not records of one batch: their batch dims are {told}")
    return {**records, **inputs}


def _trained(
    plan: Path | None,
    folder: Path,
    data: str | Mapping[str, Any],
    batch: int,
    devices: Mapping[str, str],
    steps: int,
    out: Path,
    mpi: bool,
) -> dict[str, Array]:
    """Trains an artifact, compiled from the user's plan; returns the logged numbers of its steps, and its tensors after the last one."""
    import click
    from partc.cli.launch.launch import launch, run_here
    from partc.cli.launch.launcher import WITHOUT_MPI, Hosts

    out.mkdir()
    log = out / "metrics.jsonl"
    training = TrainingJob(
        options={
            "data": data,
            "batch": batch,
            "steps": steps,
            "log": 1,
            "checkpoint": {"folder": str(out / "kept"), "every": steps},
        },
        metrics=str(log),
        plan=None if plan is None else str(plan.absolute()),
        only_train=True,
    )
    job = Job(folder=str(folder), training=training, reporting=Reporting(quiet=True), trust=True, devices=devices)
    manifest = open_artifact(folder, trust=True).manifest
    code = (
        launch(job, manifest, Hosts(None, None), (), WITHOUT_MPI)
        if mpi and manifest.ranks > 1
        else run_here(job, manifest)
    )
    if code:
        raise click.exceptions.Exit(code)
    assert manifest.training is not None
    results: dict[str, Array] = {}
    names = [manifest.training.loss, *manifest.training.metrics]
    for row in map(json.loads, read_regular(log).splitlines()):
        if row["kind"] == "train":
            results |= {f"{name}, step {row['step']}": np.array(row[name], np.float32) for name in names if name in row}
    checkpoint = Checkpoint.open(out / "kept")
    return results | {name: checkpoint.read(name) for name in sorted(checkpoint.index.tensors)}
