"""The command `partc verify`: the whole model in one session against the compiled one on ranks in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from partc.cli.present import Table, count
from partc.cli.run import parse_sizes
from partc.runtime.dtypes import Array

if TYPE_CHECKING:
    from partc.cli.compare import Compared
    from partc.cli.feed import Value
    from partc.compiler.pipeline import Report
    from partc.runtime.format import Manifest


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--plan", type=click.Path(path_type=Path), help="The plan; without it all runs on one rank.")
@click.option(
    "--input", "inputs", multiple=True, metavar="X.NPZ|NAME=X.NPY", help="Inputs; may be given several times."
)
@click.option("--random", type=int, metavar="SEED", help="Random values for the other inputs; 0 where none is given.")
@click.option("--set", "sizes", multiple=True, metavar="NAME=SIZE", callback=parse_sizes, help="A symbol's size.")
@click.option("--mpi", is_flag=True, help="Run the compiled model over MPI, as `partc run` does.")
@click.option("--rtol", type=click.FloatRange(min=0), help="Relative tolerance, instead of the dtype's.")
@click.option("--atol", type=click.FloatRange(min=0), help="Absolute tolerance, instead of the dtype's.")
def command(
    model: Path,
    plan: Path | None,
    inputs: tuple[str, ...],
    random: int | None,
    sizes: Mapping[str, int],
    mpi: bool,
    rtol: float | None,
    atol: float | None,
) -> int:
    """Compile MODEL, run it whole and compiled on the same inputs, and compare every output.

    By a plan that trains, two steps are taken, and every parameter and all that the optimizer keeps is compared, too: there,
    atol is a thousandth of the tensor's largest element, since what is learned depends on the order of sums. An element passes
    where |compiled - whole| <= atol + rtol * |whole|. Exit code 1 where one does not.

    \b
    partc verify model.onnx --plan plan.yaml --set batch=7
    partc verify model.py --plan plan.yaml --input x.npz --mpi
    """
    from partc.cli.compare import compare
    from partc.cli.feed import open_feed
    from partc.cli.results import flatten
    from partc.compiler.pipeline import compile_model
    from partc.runtime import load_local

    with tempfile.TemporaryDirectory(prefix="partc-verify-") as scratch:
        report = compile_model(model, plan, Path(scratch) / "build")
        manifest = report.manifest
        seed = random if random is not None or inputs else 0
        values = open_feed(manifest, inputs, seed, sizes).read(port.name for port in manifest.inputs)
        chosen = report.program.plan
        if chosen.train is not None:
            from partc.cli.verify_training import both, compared

            expected, compiled = both(model, chosen, report.out, manifest, values, Path(scratch), mpi)
            return _told(model, manifest, compared(expected, compiled, rtol, atol), mpi, "tensor")
        whole = run_whole(_whole_model(model, report, Path(scratch)), manifest, values)
        if mpi:
            compiled = _run_over_mpi(report, flatten(values), Path(scratch))
        else:
            with load_local(report.out) as program:
                compiled = flatten(program(values))
        rows = compare(flatten(whole), compiled, rtol, atol)
    return _told(model, manifest, rows, mpi, "output")


def _told(model: Path, manifest: Manifest, rows: Sequence[Compared], mpi: bool, what: str) -> int:
    """Shows the comparison; the exit code."""
    table = Table(
        ["output", "dtype", "shape", ">largest |error|", "at", ">largest relative", "at", "tolerance", "result"]
    )
    for row in rows:
        table.add(*row.cells())
    table.show()
    failed = [row.name for row in rows if not row.passed]
    ranks = count(manifest.ranks, "MPI rank" if mpi else "rank")
    if failed:
        click.echo(f"\n{model}: {count(len(failed), what)} on {ranks} not equal: {', '.join(failed)}", err=True)
        return 1
    click.echo(f"\n{model}: {count(len(rows), what)} on {ranks} equal to the whole model's")
    return 0


def _run_over_mpi(report: Report, inputs: Mapping[str, Array], scratch: Path) -> dict[str, Array]:
    """The outputs of the compiled model on MPI ranks, through files as a user would."""
    import numpy as np
    from partc.cli.job import Job
    from partc.cli.launch import launch
    from partc.cli.launcher import Hosts

    given, made = scratch / "inputs.npz", scratch / "outputs.npz"
    np.savez(given, **inputs)  # type: ignore[arg-type]
    job = Job(folder=str(report.out), inputs=(str(given),), output=str(made), quiet=True)
    code = launch(job, report.manifest, Hosts(None, None), ())
    if code:
        raise click.exceptions.Exit(code)
    with np.load(made) as outputs:
        return dict(outputs)


def _whole_model(model: Path, report: Report, scratch: Path) -> Path:
    """A file of the whole model: the user's own where it is one, else the loaded program's."""
    if model.suffix == ".onnx":
        return model
    import onnx_ir as ir

    path = scratch / "whole.onnx"
    ir.save(report.program.model, path, external_data="whole.data")
    return path


def run_whole(path: Path, manifest: Manifest, values: Mapping[str, Value]) -> dict[str, Any]:
    """The outputs of the model in one onnxruntime session."""
    import onnxruntime
    from partc.runtime.errors import PartcError

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    names = [port.name for port in manifest.outputs]
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        taken = {port.name for port in session.get_inputs()}
        return dict(
            zip(
                names, session.run(names, {name: value for name, value in values.items() if name in taken}), strict=True
            )
        )
    except Exception as error:
        raise PartcError(f"{path}: onnxruntime cannot run the whole model: {error}") from error
