"""The command `partc export`: a model as one `.onnx` file, so that later commands need not build it again."""

from __future__ import annotations

from pathlib import Path

import click
from partc.cli.output import console
from partc.runtime.errors import UsageError
from partc.runtime.units import count, seconds, size_text


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The .onnx file to write; large weights go beside it, into its name and `.data`.",
)
@click.option("--cache", is_flag=True, help="Export a decoder of transformers with past and present, to generate.")
@click.option("--no-compare", is_flag=True, help="Do not compare what torch exports with the torch module.")
def command(model: Path, out: Path, cache: bool, no_compare: bool) -> int:
    """Write MODEL (.py, a folder of transformers, or .onnx) as an .onnx file, which compiles to the same programs.

    What torch exports is run on small inputs, as the torch module is, and refused where its numbers are not torch's.
    torch exports a model in seconds to minutes, in each command that reads a model.py or a folder; the file is read at once.

    \b
    partc export path/to/llama -o llama.onnx
    partc compile llama.onnx --plan plan.yaml
    partc export path/to/llama --cache -o decoder.onnx     # for a plan with `generate`
    """
    import time

    from partc.cli.output.compile_progress import CompileProgress
    from partc.compiler.emit.whole import write_exported
    from partc.compiler.frontend import load

    if out.suffix != ".onnx":
        raise UsageError(f"{out}: its name must end in .onnx\n  help: write -o {out.with_suffix('.onnx')}")
    begin = time.perf_counter()
    with CompileProgress() as watch:
        watch("load")
        source = load(model, cache=cache, compare=not no_compare)
        tensors = [value.const_value for value in source.model.graph.initializers.values() if value.const_value]
        size = sum(tensor.nbytes for tensor in tensors)
        nodes = len(source.model.graph)
        watch("write")
        write_exported(source, out)
    spent = time.perf_counter() - begin
    for warning in source.declared.warnings:
        console.echo(f"warning: {warning}", err=True)
    weights = f"{count(len(tensors), 'weight')} of {size_text(size)}"
    console.echo(f"{out}: {count(nodes, 'node')}, {weights}, in {seconds(spent)}")
    return 0
