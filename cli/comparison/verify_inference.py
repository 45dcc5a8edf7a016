"""`partc verify` for a plan that does not train: compares the outputs of the unsharded model with those of the compiled one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from partc.cli.comparison.verdict import Case, Verdict, measured, of_torch_named, unsharded_session
from partc.compiler.comparison.compare import compare, spread
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.errors import PartcError
from partc.runtime.units import first_of

if TYPE_CHECKING:
    from partc.cli.job.inputs import Value
    from partc.runtime.artifact.format import Manifest


def verdict(case: Case, rtol: float | None, atol: float | None) -> Verdict:
    """Compares every output of the unsharded model with the compiled one's; the effect of rounding is measured where they are not close.

    Outputs of a torch module are compared with torch's.
    """
    from partc.cli.comparison.first_difference import Compiled, first_difference
    from partc.cli.comparison.reference import DRAWS, compile_alone, merged, perturbed
    from partc.cli.comparison.torch_reference import torch_outputs
    from partc.cli.job.outputs import flatten
    from partc.runtime import load_local

    def run(folder: Path) -> dict[str, Array]:
        with load_local(folder, trust=True, devices=case.devices) as program:
            return flatten(program(case.values))

    report, scratch = case.report, case.scratch
    path = case.unsharded()
    exported = flatten(run_unsharded(path, report.manifest, case.values))
    of_torch, torch_notes = torch_outputs(case)
    whole = {**exported, **of_torch}
    compiled = _run_over_mpi(case, flatten(case.values)) if case.mpi else run(report.out)
    first = Verdict(of_torch_named(compare(whole, compiled, rtol, atol), of_torch), torch_notes)
    if first.passed:
        return first
    alone = compile_alone(case.source, report.program.plan, scratch / "alone")
    noise: dict[str, Array] = {}
    if rtol is None and atol is None:
        draws = [run(perturbed(alone.folder, scratch / "perturbed", draw + 1)) for draw in range(DRAWS)]
        plain = flatten(run_unsharded(path, report.manifest, case.values, False))
        noise = merged(spread(run(alone.folder), draws), spread(exported, [plain]))
    rows = of_torch_named(compare(whole, compiled, rtol, atol, noise), of_torch)
    second = Verdict(rows, [*torch_notes, *measured(first.rows, rows, alone, noise)])
    if second.passed:
        return second
    inside = first_difference(
        replace(alone, devices=case.devices),
        Compiled(report.program, report.out, case.devices),
        case.values,
        scratch,
        bool(noise),
    )
    of_export = [
        row.name for row in compare(of_torch, exported, rtol, atol, noise) if row.name in of_torch and not row.passed
    ]
    own = f"the exported model by itself is not torch's in {first_of(of_export)}" if of_export else ""
    return Verdict(second.rows, [*second.notes, *filter(None, [own, inside])])


def _run_over_mpi(case: Case, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the outputs of the compiled model on MPI ranks, through files as a user would."""
    import numpy as np
    from partc.cli.job.job import InferenceJob, Job, Reporting
    from partc.cli.launch.launch import launch
    from partc.cli.launch.launcher import WITHOUT_MPI, Hosts
    from partc.runtime.files.regular import open_regular
    from partc.runtime.files.writers import new_file

    report, scratch = case.report, case.scratch
    given, outputs_file = scratch / "inputs.npz", scratch / "outputs.npz"
    with new_file(given) as out:
        np.savez(out, **inputs)  # type: ignore[arg-type]
    job = Job(
        str(report.out),
        InferenceJob((str(given),), output=str(outputs_file)),
        reporting=Reporting(quiet=True),
        devices=case.devices,
    )
    code = launch(job, report.manifest, Hosts(None, None), (), WITHOUT_MPI)
    if code:
        raise click.exceptions.Exit(code)
    with open_regular(outputs_file) as file, np.load(file) as outputs:
        return dict(outputs)


def run_unsharded(
    path: Path, manifest: Manifest, values: Mapping[str, Value], optimized: bool = True
) -> dict[str, Any]:
    """Returns the outputs of the model in one session of `unsharded_session`."""

    names = [port.name for port in manifest.outputs]
    session = unsharded_session(path, optimized)
    taken = {port.name for port in session.get_inputs()}
    try:
        feeds = {name: value for name, value in values.items() if name in taken}
        return dict(zip(names, session.run(names, feeds), strict=True))
    except Exception as error:
        raise PartcError(f"{path}: onnxruntime cannot run the unsharded model: {error}") from error
