"""The command `partc verify`: the compiled model on its ranks against the unsharded model."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from partc.cli.commands.cache import no_cache
from partc.cli.commands.run import device_option, max_bytes, parse_sizes
from partc.cli.output import console
from partc.cli.output.table import Table
from partc.runtime.errors import InputError, UsageError
from partc.runtime.files.regular import read_regular
from partc.runtime.units import count

if TYPE_CHECKING:
    from partc.cli.comparison.verdict import Case, Verdict
    from partc.compiler.frontend.source import Source
    from partc.compiler.frontend.torch.torch_model import TorchModel
    from partc.compiler.plan.rules import Plan
    from partc.runtime.artifact.format import Manifest


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--plan", type=click.Path(path_type=Path), help="The plan; without it the model runs on one rank.")
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="MODEL.PY",
    help="Compare with this torch module, or folder of transformers, of which MODEL is a file.",
)
@click.option("--input", "inputs", multiple=True, metavar="X.NPZ|NAME=X.NPY|NAME=0.5", help="Inputs; may be repeated.")
@click.option(
    "--random", type=int, default=0, metavar="SEED", help="Seed of the random values of all other inputs; 0 by default."
)
@click.option("--set", "sizes", multiple=True, metavar="NAME=SIZE", callback=parse_sizes, help="Size of a symbol.")
@no_cache
@click.option("--mpi", is_flag=True, help="Run the compiled model over MPI, as `partc run` does.")
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Also state the perplexity of this text, with a plan that generates.",
)
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The tokenizer.json for --text; by default that of the folder of MODEL.",
)
@device_option
@max_bytes
@click.option("--rtol", type=click.FloatRange(min=0), help="Relative tolerance, instead of the dtype's.")
@click.option("--atol", type=click.FloatRange(min=0), help="Absolute tolerance, instead of the dtype's.")
def command(
    model: Path,
    plan: Path | None,
    against: Path | None,
    inputs: tuple[str, ...],
    random: int,
    sizes: Mapping[str, int],
    no_cache: bool,
    mpi: bool,
    text: Path | None,
    tokenizer: Path | None,
    devices: Mapping[str, str],
    max_bytes: int | None,
    rtol: float | None,
    atol: float | None,
) -> int:
    """Compile MODEL and compare every output with that of the unsharded model on the same inputs.

    A torch module, or a folder of transformers, is compared with torch itself: outputs, or losses, gradients, parameters and statistics
    of three steps. The exported model is also compared on zeros, tiny and large numbers, as by `partc compile`. --against does the same
    for a file that torch exported.

    Inputs that --input leaves out, labels too, have random values, in the sizes of those that are given.

    An element passes if |compiled - unsharded| <= atol + rtol * |unsharded|. With a plan that trains, two steps are taken and the
    gradients, parameters and optimizer state are compared too; there, atol is a thousandth of the largest change in a step. If an
    element does not pass, the effect of rounding on the unsharded model is measured (float16, quantized values), and a difference
    as large as that is accepted. With a plan that generates, the tokens behind random prompts are compared. Exit code 1 if anything
    differs; the first different value inside the model is named with its rank.

    \b
    partc verify model.onnx --plan plan.yaml --set batch=7
    partc verify model.py --plan plan.yaml --input x.npz --mpi
    partc verify model.onnx --against model.py
    """
    from partc.cli.comparison import verify_generation, verify_inference, verify_training
    from partc.cli.comparison.verdict import Case
    from partc.cli.job.inputs import open_inputs
    from partc.cli.output.compile_progress import CompileProgress
    from partc.compiler.adapters import adapted
    from partc.compiler.frontend.torch.compare_with_torch import compare_graph
    from partc.compiler.frontend.torch.torch_model import called_as, torch_model_of
    from partc.compiler.pipeline import compile_model
    from partc.compiler.plan.read import read_plan
    from partc.compiler.quantize import quantized
    from partc.compiler.unroll import unrolled
    from partc.runtime.training.data import of_batch

    sources: list[Source] = []

    def loaded(source: Source) -> None:
        torch_model = torch_model_of(source.model)
        if reference is not None:
            torch_model = called_as(reference, source.model, str(against))
            compare_graph(source.model, torch_model, model.name)
        torch_models.append(torch_model)
        sources.append(replace(source, model=source.model.clone()))

    reference = _torch_model(against, plan) if against is not None else None
    torch_models: list[TorchModel | None] = []
    rules = read_plan(plan) if plan is not None else None
    experts = rules.experts if rules is not None else ()
    if dropping := next((rule for rule in experts if rule.capacity is not None), None):
        law = "each rank drops rows by its own tokens, so the unsharded model has other results"
        raise UsageError(
            f"{dropping.where}: a capacity of experts is not verified\n  {law}\n  help: verify the plan without 'capacity'"
        )
    if rules is not None and rules.messages is not None and rules.messages.rows is not None:
        fact = f"{rules.messages.where('rows')}: rows in eight bits are not verified"
        law = "a number that is sent is off by up to 1/254 of its block's largest, so the unsharded model has other results"
        raise UsageError(f"{fact}\n  {law}\n  help: verify the plan without 'messages.rows'")
    with tempfile.TemporaryDirectory(prefix="partc-verify-") as scratch:
        with CompileProgress() as watch:
            report = compile_model(model, plan, Path(scratch) / "build", watch=watch, loaded=loaded, keep=not no_cache)
        chosen, source = report.program.plan, sources[0]
        others = (chosen.train, chosen.pipeline, chosen.precision, chosen.quantize, chosen.adapters)
        if any(others):  # which do not do all that they do in bodies, too
            source = unrolled(source, chosen, model.name)
        source = adapted(quantized(source, chosen, model.name), chosen, model.name)
        torch_model = None if source.quantized or source.adapted else torch_models[0]
        case = Case(model, plan, report, {}, Path(scratch), mpi, source, devices, torch_model)
        for line in _quantization(sources[0], report.program.plan, model.name) if source.quantized else ():
            console.echo(line)
        if text is not None:
            console.echo(_perplexity(case, sources[0], text, tokenizer))
        if report.manifest.generation is not None:
            return _show(model, report.manifest, verify_generation.verdict(case, random), mpi, "answer")
        asked = of_batch(report.manifest)
        reader = open_inputs(asked, inputs, random, sizes, max_bytes)
        values = reader.read(port.name for port in asked.inputs)
        if inputs and (made := reader.generated()):
            console.echo(f"random values, seed {random}: {', '.join(made)}", err=True)
        case = replace(case, values=values)
        if report.program.plan.train is not None:
            return _show(model, report.manifest, verify_training.verdict(case, rtol, atol), mpi, "tensor")
        return _show(model, report.manifest, verify_inference.verdict(case, rtol, atol), mpi, "output")


def _perplexity(case: Case, source: Source, text: Path, tokenizer: Path | None) -> str:
    """A line with the perplexity of a text by the model, and by its quantized form where the plan has that."""
    from partc.cli.comparison.verify_generation import perplexity
    from partc.cli.text.tokenizer import ids_of, open_tokenizer, refuse_other_vocabulary

    record, beside = case.report.manifest.generation, case.model if case.model.is_dir() else case.model.parent
    if record is None or record.encoder is not None:
        fact = "--text: perplexity is that of a decoder alone"
        raise UsageError(f"{fact}\n  help: write `generate: {{slots: 1, length: 512}}` into the plan")
    path = str(tokenizer or beside / "tokenizer.json")
    if tokenizer is None and not Path(path).exists():
        raise UsageError("--text: a text needs a tokenizer\n  help: give --tokenizer tokenizer.json")
    try:
        words = ids_of(known := open_tokenizer(path), read_regular(text).decode())
    except UnicodeDecodeError:
        raise InputError(f"{text}: is not UTF-8\n  help: give a file of text") from None
    refuse_other_vocabulary(path, known, record.vocabulary)
    if len(words) < 2:
        raise InputError(f"{text}: has {count(len(words), 'token')}, and perplexity is that of a token behind another")
    exact = perplexity(replace(case, source=source, scratch=Path(tempfile.mkdtemp(dir=case.scratch))), words)
    line = f"perplexity of {text.name}, {count(len(words), 'token')}: {exact:.3f}"
    if not case.source.quantized:
        return line
    rounded = perplexity(replace(case, torch_model=None), words)
    return f"{line}; quantized {rounded:.3f}, {100 * (rounded / exact - 1):+.2f} %"


def _quantization(source: Source, plan: Plan, name: str) -> Iterator[str]:
    """Lines that say what is quantized, and how far quantized weights are from the model's own."""
    from partc.compiler.quantize import errors

    if plan.generate is not None and plan.generate.cache is not None:
        yield f"caches in {plan.generate.cache}: what is compiled is compared with the model that rounds its keys and values"
    found = errors(source, plan, name)
    if not found:  # the model's files have them so
        return
    yield f"{count(len(found), 'weight')} quantized: what is compiled is compared with the quantized model on one rank"
    ordered = sorted(found.items(), key=lambda item: -item[1])
    worst = ", ".join(f"'{path}' {100 * error:.1f} %" for path, error in ordered[:3])
    middle = ordered[len(ordered) // 2][1]
    yield f"error of their weights, root mean squares: {100 * middle:.1f} % in the median, most in {worst}"


def _torch_model(against: Path, plan: Path | None) -> TorchModel:
    """The torch module of a `model.py` or a folder; UsageError where there is none."""
    from partc.compiler.frontend import load
    from partc.compiler.frontend.torch.torch_model import torch_model_of
    from partc.compiler.plan.read import read_plan

    found = torch_model_of(load(against, cache=plan is not None and read_plan(plan).generate is not None).model)
    if found is None:
        fact = f"--against {against}: it has no torch module"
        raise UsageError(f"{fact}\n  help: give a model.py with a torch module, or a folder of a model of transformers")
    return found


def _show(model: Path, manifest: Manifest, verdict: Verdict, mpi: bool, what: str) -> int:
    """Prints the comparison; the exit code."""
    table = Table(
        [
            "output",
            "dtype",
            "shape",
            ">largest |error|",
            "at",
            ">largest relative",
            "at",
            "tolerance",
            "compared with",
            "result",
        ]
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
    references = {row.reference for row in rows}
    whose = " and ".join(f"{'the ' * (name != 'torch')}{name}'s" for name in sorted(references, reverse=True))
    console.echo("\n".join(["", *verdict.notes, f"{model}: {count(len(rows), what)} on {ranks} equal to {whose}"]))
    return 0
