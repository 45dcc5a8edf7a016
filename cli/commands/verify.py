"""The command `partc verify`: the compiled model on its ranks against the unsharded model."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
from partc.cli.commands.run import device_option, max_bytes, parse_sizes
from partc.cli.output import console
from partc.cli.output.table import Table
from partc.runtime.units import count

if TYPE_CHECKING:
    from partc.cli.comparison.verdict import Verdict
    from partc.runtime.artifact.format import Manifest


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--plan", type=click.Path(path_type=Path), help="The plan; without it the model runs on one rank.")
@click.option("--input", "inputs", multiple=True, metavar="X.NPZ|NAME=X.NPY|NAME=0.5", help="Inputs; may be repeated.")
@click.option(
    "--random", type=int, default=0, metavar="SEED", help="Seed of the random values of all other inputs; 0 by default."
)
@click.option("--set", "sizes", multiple=True, metavar="NAME=SIZE", callback=parse_sizes, help="Size of a symbol.")
@click.option("--mpi", is_flag=True, help="Run the compiled model over MPI, as `partc run` does.")
@device_option
@max_bytes
@click.option("--rtol", type=click.FloatRange(min=0), help="Relative tolerance, instead of the dtype's.")
@click.option("--atol", type=click.FloatRange(min=0), help="Absolute tolerance, instead of the dtype's.")
def command(
    model: Path,
    plan: Path | None,
    inputs: tuple[str, ...],
    random: int,
    sizes: Mapping[str, int],
    mpi: bool,
    devices: Mapping[str, str],
    max_bytes: int | None,
    rtol: float | None,
    atol: float | None,
) -> int:
    """Compile MODEL and compare every output with that of the unsharded model on the same inputs.

    Inputs that --input leaves out, labels too, have random values, in the sizes of those that are given.

    An element passes if |compiled - unsharded| <= atol + rtol * |unsharded|. With a plan that trains, two steps are taken and the
    gradients, parameters and optimizer state are compared too; there, atol is a thousandth of the largest change in a step. If an
    element does not pass, the effect of rounding on the unsharded model is measured (float16, quantized values), and a difference
    as large as that is accepted. With a plan that generates, the tokens behind random prompts are compared. Exit code 1 if anything
    differs; the first different value inside the model is named with its rank.

    \b
    partc verify model.onnx --plan plan.yaml --set batch=7
    partc verify model.py --plan plan.yaml --input x.npz --mpi
    """
    from partc.cli.comparison import verify_generation, verify_inference, verify_training
    from partc.cli.comparison.verdict import Case
    from partc.cli.job.inputs import open_inputs
    from partc.cli.output.compile_progress import CompileWatch
    from partc.compiler.pipeline import compile_model
    from partc.runtime.training.batch import of_batch

    with tempfile.TemporaryDirectory(prefix="partc-verify-") as scratch:
        with CompileWatch() as watch:
            report = compile_model(model, plan, Path(scratch) / "build", watch=watch)
        if report.manifest.generation is not None:
            case = Case(model, plan, report, {}, Path(scratch), mpi, devices)
            return _show(model, report.manifest, verify_generation.verdict(case, random), mpi, "answer")
        asked = of_batch(report.manifest)
        reader = open_inputs(asked, inputs, random, sizes, max_bytes)
        values = reader.read(port.name for port in asked.inputs)
        if inputs and (made := reader.generated()):
            console.echo(f"random values, seed {random}: {', '.join(made)}", err=True)
        case = Case(model, plan, report, values, Path(scratch), mpi, devices)
        if report.program.plan.train is not None:
            return _show(model, report.manifest, verify_training.verdict(case, rtol, atol), mpi, "tensor")
        return _show(model, report.manifest, verify_inference.verdict(case, rtol, atol), mpi, "output")


def _show(model: Path, manifest: Manifest, verdict: Verdict, mpi: bool, what: str) -> int:
    """Prints the comparison; the exit code."""
    table = Table(
        ["output", "dtype", "shape", ">largest |error|", "at", ">largest relative", "at", "tolerance", "result"]
    )
    rows = verdict.rows
    shown = [{**dataclasses.asdict(row), "equal": row.passed} for row in rows]
    head = {"equal": verdict.passed, "model": str(model), "ranks": manifest.ranks, "mpi": mpi}
    console.result({**head, "compared": shown, "notes": list(verdict.notes)})
    for row in rows:
        table.add(*row.cells())
    table.show()
    failed = [row.name for row in rows if not row.passed]
    ranks = count(manifest.ranks, "MPI rank" if mpi else "rank")
    if failed:
        lines = [f"\n{model}: {count(len(failed), what)} on {ranks} not equal: {', '.join(failed)}", *verdict.notes]
        console.echo("\n".join(lines), err=True)
        return 1
    console.echo(
        "\n".join(["", *verdict.notes, f"{model}: {count(len(rows), what)} on {ranks} equal to the unsharded model's"])
    )
    return 0
