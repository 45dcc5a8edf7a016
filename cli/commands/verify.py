"""The command `partc verify`: the whole model in one session against the compiled one on ranks in this process."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from partc.cli.commands.run import parse_sizes
from partc.cli.job.byte_count import max_bytes
from partc.cli.output import say
from partc.cli.output.present import Table, count
from partc.runtime.artifact.dtypes import Array

if TYPE_CHECKING:
    from partc.cli.comparison.compare import Compared
    from partc.cli.comparison.trace import Compiled
    from partc.cli.job.feed import Value
    from partc.compiler.pipeline import Report
    from partc.runtime.artifact.format import Manifest


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--plan", type=click.Path(path_type=Path), help="The plan; without it all runs on one rank.")
@click.option(
    "--input", "inputs", multiple=True, metavar="X.NPZ|NAME=X.NPY|NAME=0.5", help="Inputs; may be given several times."
)
@click.option("--random", type=int, metavar="SEED", help="Random values for the other inputs; 0 where none is given.")
@click.option("--set", "sizes", multiple=True, metavar="NAME=SIZE", callback=parse_sizes, help="A symbol's size.")
@click.option("--mpi", is_flag=True, help="Run the compiled model over MPI, as `partc run` does.")
@max_bytes
@click.option("--rtol", type=click.FloatRange(min=0), help="Relative tolerance, instead of the dtype's.")
@click.option("--atol", type=click.FloatRange(min=0), help="Absolute tolerance, instead of the dtype's.")
def command(
    model: Path,
    plan: Path | None,
    inputs: tuple[str, ...],
    random: int | None,
    sizes: Mapping[str, int],
    mpi: bool,
    max_bytes: int | None,
    rtol: float | None,
    atol: float | None,
) -> int:
    """Compile MODEL, run it whole and compiled on the same inputs, and compare every output.

    By a plan that trains, two steps are taken, and every parameter and all that the optimizer keeps is compared, too: there,
    atol is a thousandth of the largest change in a step, since what is learned depends on the order of sums. An element passes
    where |compiled - whole| <= atol + rtol * |whole|. Where one does not, it is measured how far rounding carries the whole model
    itself (float16, quantized steps, gradients that are nothing but rounding), and no more than that is allowed. Exit code 1
    where something is not equal; then the first value inside that differs is named, with its rank.

    \b
    partc verify model.onnx --plan plan.yaml --set batch=7
    partc verify model.py --plan plan.yaml --input x.npz --mpi
    """
    from partc.cli.job.feed import open_feed
    from partc.cli.output.watch import CompileWatch
    from partc.compiler.pipeline import compile_model
    from partc.runtime.training.batch import of_batch

    with tempfile.TemporaryDirectory(prefix="partc-verify-") as scratch:
        with CompileWatch() as watch:
            report = compile_model(model, plan, Path(scratch) / "build", watch=watch)
        seed = random if random is not None or inputs else 0
        asked = of_batch(report.manifest)
        values = open_feed(asked, inputs, seed, sizes, max_bytes).read(port.name for port in asked.inputs)
        case = Case(model, plan, report, values, Path(scratch), mpi)
        if report.program.plan.train is not None:
            from partc.cli.comparison.verify_training import verdict

            return _told(model, report.manifest, verdict(case, rtol, atol), mpi, "tensor")
        return _told(model, report.manifest, _verdict(case, rtol, atol), mpi, "output")


@dataclass(frozen=True)
class Case:
    """A model that was compiled, and the inputs on which it is compared."""

    model: Path
    plan: Path | None
    report: Report
    values: Mapping[str, Value]
    scratch: Path
    mpi: bool


@dataclass(frozen=True)
class Verdict:
    """The comparison, and lines that explain it."""

    rows: Sequence[Compared]
    notes: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether all is equal."""
        return all(row.passed for row in self.rows)


def _verdict(case: Case, rtol: float | None, atol: float | None) -> Verdict:
    """Every output of the whole model against the compiled one's; what rounding does is measured where they are not close."""
    from partc.cli.comparison.alone import DRAWS, compile_alone, merged, perturbed
    from partc.cli.comparison.compare import compare, spread
    from partc.cli.comparison.trace import Compiled, first_difference
    from partc.cli.job.results import flatten
    from partc.runtime import load_local

    def run(folder: Path) -> dict[str, Array]:
        with load_local(folder, trust=True) as program:
            return flatten(program(case.values))

    report, scratch = case.report, case.scratch
    path = _whole_model(case.model, report, scratch)
    whole = flatten(run_whole(path, report.manifest, case.values))
    compiled = _run_over_mpi(report, flatten(case.values), scratch) if case.mpi else run(report.out)
    first = Verdict(compare(whole, compiled, rtol, atol))
    if first.passed:
        return first
    alone = compile_alone(case.model, report.program.plan, scratch / "alone")
    noise: dict[str, Array] = {}
    if rtol is None and atol is None:
        draws = [run(perturbed(alone.folder, scratch / "perturbed", draw + 1)) for draw in range(DRAWS)]
        plain = flatten(run_whole(path, report.manifest, case.values, False))
        noise = merged(spread(run(alone.folder), draws), spread(whole, [plain]))
    rows = compare(whole, compiled, rtol, atol, noise)
    second = Verdict(rows, measured(first.rows, rows, alone, noise))
    if second.passed:
        return second
    inside = first_difference(alone, Compiled(report.program, report.out), case.values, scratch, bool(noise))
    return Verdict(second.rows, [*second.notes, *filter(None, [inside])])


def measured(
    before: Sequence[Compared], after: Sequence[Compared], alone: Compiled, noise: Mapping[str, Array]
) -> list[str]:
    """A line for what is not close, and is within what rounding does."""
    from partc.cli.comparison.alone import DRAWS, is_quantized
    from partc.runtime.artifact.manifest import open_artifact

    pairs = zip(before, after, strict=True)
    moved = {new.name: float(noise[new.name].max()) for old, new in pairs if new.passed and not old.passed}
    if not moved:
        return []
    names = ", ".join(f"'{name}' by {most:.3g}" for name, most in list(moved.items())[:3])
    more = f" and {len(moved) - 3} more" if len(moved) > 3 else ""
    text = f"rounding alone changes the whole model's {names}{more}, in {DRAWS} runs with operands changed by units in the last place"
    if is_quantized(alone.folder, open_artifact(alone.folder, trust=True).manifest):
        text += "; it is quantized, and rounding decides where a value halfway between two steps goes"
    return [text]


def _told(model: Path, manifest: Manifest, verdict: Verdict, mpi: bool, what: str) -> int:
    """Shows the comparison; the exit code."""
    table = Table(
        ["output", "dtype", "shape", ">largest |error|", "at", ">largest relative", "at", "tolerance", "result"]
    )
    rows = verdict.rows
    shown = [{**dataclasses.asdict(row), "equal": row.passed} for row in rows]
    head = {"equal": verdict.passed, "model": str(model), "ranks": manifest.ranks, "mpi": mpi}
    say.result({**head, "compared": shown, "notes": list(verdict.notes)})
    for row in rows:
        table.add(*row.cells())
    table.show()
    failed = [row.name for row in rows if not row.passed]
    ranks = count(manifest.ranks, "MPI rank" if mpi else "rank")
    if failed:
        lines = [f"\n{model}: {count(len(failed), what)} on {ranks} not equal: {', '.join(failed)}", *verdict.notes]
        say.echo("\n".join(lines), err=True)
        return 1
    say.echo(
        "\n".join(["", *verdict.notes, f"{model}: {count(len(rows), what)} on {ranks} equal to the whole model's"])
    )
    return 0


def _run_over_mpi(report: Report, inputs: Mapping[str, Array], scratch: Path) -> dict[str, Array]:
    """The outputs of the compiled model on MPI ranks, through files as a user would."""
    import numpy as np
    from partc.cli.job.job import Job
    from partc.cli.job.launch import launch
    from partc.cli.job.launcher import Hosts

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
    from partc.compiler.rewrite.unrolled import unrolled

    path = scratch / "whole.onnx"
    whole = unrolled(report.program.model, dict(report.program.plan.mesh))
    ir.save(whole, path, external_data="whole.data")
    return path


def run_whole(path: Path, manifest: Manifest, values: Mapping[str, Value], optimized: bool = True) -> dict[str, Any]:
    """The outputs of the model in one onnxruntime session; without its optimizations no kernel stands for several nodes."""
    import onnxruntime
    from partc.runtime.errors import PartcError

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
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
