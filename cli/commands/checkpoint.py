"""The commands `partc checkpoint show`, `verify` and `export`."""

from __future__ import annotations

from pathlib import Path

import click
from partc.cli.output import console
from partc.cli.output.table import Table
from partc.runtime.errors import printable
from partc.runtime.units import count, size_text

_PATH = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Show, verify and export checkpoints.

    CKPT is a checkpoint, or a folder of checkpoints whose newest intact one is used.

    \b
    partc checkpoint show checkpoints/
    partc checkpoint verify checkpoints/step_00000120
    partc checkpoint export checkpoints/ -o weights.safetensors
    """


@command.command(short_help="List tensors and metadata.")
@click.argument("path", metavar="CKPT", type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(path: Path, as_json: bool) -> int:
    """Show the tensors of a checkpoint and the metadata of its training run.

    \b
    partc checkpoint show checkpoints/
    """
    import json

    from partc.runtime.checkpoint.checkpoint import Checkpoint
    from partc.runtime.checkpoint.newest import take_whole

    _, checkpoint = take_whole(path, Checkpoint.at, "partc checkpoint show")
    index = checkpoint.index
    if as_json:
        tensors = {
            name: {
                "dtype": one.dtype,
                "shape": list(one.shape),
                "kind": one.kind,
                "pieces": len(one.pieces),
                "bytes": one.bytes,
            }
            for name, one in index.tensors.items()
        }
        found = {"path": str(checkpoint.path), "step": index.step, "ranks": index.ranks, "meta": index.meta}
        console.echo(json.dumps({**found, "tensors": tensors}, indent=1))
        return 0
    table = Table(["tensor", "dtype", "shape", "kind", ">shards", ">bytes"])
    for name, one in index.tensors.items():
        table.add(printable(name), one.dtype, list(one.shape), one.kind, len(one.pieces), size_text(one.bytes))
    table.show()
    console.echo()
    for key, value in index.meta.items():
        console.echo(printable(f"{key}: {value if isinstance(value, str) else json.dumps(value)}"))
    total = sum(one.bytes for one in index.tensors.values())
    console.echo(
        f"{checkpoint.path}: step {index.step}, {count(len(index.tensors), 'tensor')}, {size_text(total)}, "
        f"written by {count(index.ranks, 'rank')} in {count(len(index.files), 'file')}"
    )
    return 0


@command.command(short_help="Verify a checkpoint's integrity.")
@click.argument("path", metavar="CKPT", type=_PATH)
def verify(path: Path) -> int:
    """Verify a checkpoint's integrity: files match their hashes, shards hold each element of each tensor exactly once.

    Exit code 1 if there is a problem.

    \b
    partc checkpoint verify checkpoints/step_00000120
    """
    from partc.runtime.checkpoint.index import read_index
    from partc.runtime.checkpoint.newest import candidates
    from partc.runtime.checkpoint.verify import verify as verified

    folder = next(candidates(path))
    problems = verified(folder)
    for problem in problems:
        console.echo(problem, err=True)
    if problems:
        console.echo(f"{folder}: {count(len(problems), 'problem')}", err=True)
        return 1
    index = read_index(folder)
    console.echo(
        f"{folder}: ok, step {index.step}, {count(len(index.tensors), 'tensor')}, {count(len(index.files), 'file')}"
    )
    return 0


@command.command(short_help="Write one safetensors file, or the trained model.")
@click.argument("path", metavar="CKPT", type=_PATH)
@click.option(
    "-o",
    "--output",
    "out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The .safetensors or .onnx file to write.",
)
@click.option("--model", type=_PATH, help="Write this model, the one that was trained, with the trained weights.")
@click.option("--all", "everything", is_flag=True, help="Include the optimizer's tensors.")
def export(path: Path, out: Path, model: Path | None, everything: bool) -> int:
    """Write the weights of a checkpoint as one safetensors file, or the model with these weights as an .onnx file.

    Names and shapes are those of the model and do not depend on the plan. The model is written in its inference form.

    \b
    partc checkpoint export checkpoints/ -o weights.safetensors
    partc checkpoint export checkpoints/ --model model.py -o trained.onnx
    """
    from partc.runtime.checkpoint.checkpoint import Checkpoint
    from partc.runtime.checkpoint.export import WEIGHTS, export_tensors
    from partc.runtime.checkpoint.newest import take_whole
    from partc.runtime.errors import UsageError

    wanted = ".safetensors" if model is None else ".onnx"
    if out.suffix != wanted:
        remedy = (
            "add --model with the model that was trained"
            if out.suffix == ".onnx"
            else f"use a name that ends in {wanted}"
        )
        raise UsageError(f"{out}: its name must end in {wanted}\n  help: {remedy}")
    if model is not None and everything:
        raise UsageError("--all: an .onnx model cannot hold the optimizer's tensors\n  help: remove --all or --model")
    kinds = (*WEIGHTS, "optimizer") if everything else WEIGHTS

    def write(place: Path) -> tuple[Checkpoint, int]:
        checkpoint = Checkpoint.at(place)
        if model is None:
            return checkpoint, len(export_tensors(checkpoint, out, kinds))
        from partc.cli.comparison.checkpoint_model import export_model

        return checkpoint, export_model(checkpoint, model, out)

    _, (checkpoint, number) = take_whole(path, write, "partc checkpoint export")
    if model is not None:
        console.echo(f"{out}: {model.name} with {count(number, 'weight')} of step {checkpoint.index.step}")
    else:
        console.echo(
            f"{out}: {count(number, 'tensor')} of step {checkpoint.index.step}, {size_text(out.stat().st_size)}"
        )
    return 0
