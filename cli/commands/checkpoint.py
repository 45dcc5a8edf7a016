"""The commands `partc checkpoint show`, `verify`, `export` and `import`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from partc.cli.commands.run import byte_count
from partc.cli.output import console
from partc.cli.output.table import Table
from partc.runtime.errors import UsageError, printable
from partc.runtime.units import count, size_text

if TYPE_CHECKING:
    from partc.runtime.checkpoint.checkpoint import Checkpoint

_PATH = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Show, verify, export and import checkpoints.

    CKPT is a checkpoint, or a folder of checkpoints whose newest intact one is used.

    \b
    partc checkpoint show checkpoints/
    partc checkpoint verify checkpoints/step_00000120
    partc checkpoint export checkpoints/ -o weights.safetensors
    partc checkpoint import half.pt -o checkpoints
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
    from partc.runtime.checkpoint.newest import take_newest_intact

    _, checkpoint = take_newest_intact(path, Checkpoint.at, "partc checkpoint show")
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


@command.command(short_help="Write the weights in another format, or the trained model.")
@click.argument("path", metavar="CKPT", type=_PATH)
@click.option(
    "-o",
    "--output",
    "out",
    type=_PATH,
    required=True,
    help="The file to write; with hf, dcp, or a name without suffix, the folder.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "hf", "peft", "torch", "dcp"]),
    default="safetensors",
    help="safetensors: a file, or a folder of files with an index. hf: a folder as from_pretrained of transformers reads it. "
    "peft: a folder of the adapter that is trained. "
    "torch: a file as torch.load reads it. dcp: a folder of torch.distributed.checkpoint.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder of a Hugging Face model whose config and tokenizer to copy.",
)
@click.option("--shard", default="5GB", metavar="SIZE", help="Largest file of a folder, such as 5GB.")
@click.option(
    "--like",
    type=_PATH,
    metavar="FILE",
    help="A file of a PyTorch training whose form to keep, with the optimizer's state.",
)
@click.option("--model", type=_PATH, help="Write this model, the one that was trained, with the trained weights.")
@click.option("--all", "everything", is_flag=True, help="Include the optimizer's tensors.")
@click.option("--ema", is_flag=True, help="Write the moving averages in place of the parameters.")
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Write the weights that a plan's pattern matches, such as '**.lora_*'; it may be repeated.",
)
def export(
    path: Path,
    out: Path,
    form: str,
    config: Path | None,
    shard: str,
    like: Path | None,
    model: Path | None,
    everything: bool,
    ema: bool,
    only: tuple[str, ...],
) -> int:
    """Write the weights of a checkpoint for other libraries, or the model with these weights as an .onnx file.

    Names and shapes are those of the model and do not depend on the plan. The model is written in its inference form.

    \b
    partc checkpoint export checkpoints/ -o weights.safetensors
    partc checkpoint export checkpoints/ --only '**.lora_*' -o adapters.safetensors
    partc checkpoint export checkpoints/ --model model.py -o trained.onnx
    partc checkpoint export checkpoints/ --format hf --config path/to/llama -o trained/
    partc checkpoint export checkpoints/ --format peft -o adapter/
    partc checkpoint export checkpoints/ --format torch --like half.pt -o trained.pt
    """
    from partc.cli.job.weights_of import weights_of
    from partc.runtime.checkpoint.checkpoint import Checkpoint
    from partc.runtime.checkpoint.export import WEIGHTS, export_adapter, export_folder, export_tensors
    from partc.runtime.checkpoint.interchange.torch_export import export_torch
    from partc.runtime.checkpoint.newest import take_newest_intact

    into_folder = form in ("hf", "peft", "dcp") or (form == "safetensors" and model is None and not out.suffix)
    for option, has_option, where, fits in (
        ("--config", config is not None, "--format hf", form == "hf"),
        ("--like", like is not None, "--format torch or dcp", form in ("torch", "dcp")),
        ("--model", model is not None, "an .onnx file alone", form == "safetensors"),
        (
            "--only",
            bool(only),
            "weights alone, not --model, --like or --format peft",
            model is like is None and form != "peft",
        ),
        ("--all", everything, "one .safetensors file", form == "safetensors" and model is None and not into_folder),
    ):
        if has_option and not fits:
            raise UsageError(f"{option}: it goes with {where}\n  help: change the other options, or remove {option}")
    wanted = ".onnx" if model is not None else {"safetensors": ".safetensors", "torch": ".pt"}.get(form, "")
    if not into_folder and out.suffix not in (wanted, ".pth" if form == "torch" else wanted):
        remedy = (
            "add --model with the model that was trained"
            if out.suffix == ".onnx"
            else f"use a name that ends in {wanted}"
        )
        raise UsageError(f"{out}: its name must end in {wanted}\n  help: {remedy}")

    def write(place: Path) -> tuple[Checkpoint, str]:
        checkpoint = Checkpoint.at(place).averaged() if ema else Checkpoint.at(place)
        if only:
            names = [name for name, one in checkpoint.index.tensors.items() if one.kind in WEIGHTS]
            remedy = f"`partc checkpoint show {checkpoint.path}` lists them"
            checkpoint = checkpoint.only(weights_of(only, names, str(checkpoint.path), remedy))
        if form in ("torch", "dcp"):
            return checkpoint, count(len(export_torch(checkpoint, out, like, form == "dcp")), "tensor")
        if form == "peft":
            return checkpoint, f"{', '.join(export_adapter(checkpoint, out))}: the adapter"
        if into_folder:
            return checkpoint, f"{', '.join(export_folder(checkpoint, out, config, byte_count(shard)))}: the weights"
        if model is not None:
            from partc.cli.comparison.checkpoint_model import export_model

            return checkpoint, f"{model.name} with {count(export_model(checkpoint, model, out), 'weight')}"
        kinds = (*WEIGHTS, "optimizer") if everything else WEIGHTS
        return checkpoint, count(len(export_tensors(checkpoint, out, kinds)), "tensor")

    _, (checkpoint, what) = take_newest_intact(path, write, "partc checkpoint export")
    size = "" if into_folder or model is not None else f", {size_text(out.stat().st_size)}"
    console.echo(f"{out}: {what} of step {checkpoint.index.step}{size}")
    if form == "hf" and config is None:
        console.echo(
            "from_pretrained needs config.json as well: --config FOLDER copies that of the model, and its tokenizer"
        )
    return 0


@command.command("import", short_help="Make a checkpoint of what another library has trained.")
@click.argument("source", metavar="SOURCE", type=_PATH)
@click.option("--build", type=_PATH, default="build", show_default=True, help="The artifact that is to go on with it.")
@click.option("-o", "--output", "out", type=_PATH, required=True, help="The folder of checkpoints to write into.")
@click.option("--step", type=click.IntRange(min=0), help="The number of steps taken, where SOURCE does not say.")
@click.option("--weights", is_flag=True, help="Leave the optimizer's state out: it begins anew.")
def import_(source: Path, build: Path, out: Path, step: int | None, weights: bool) -> int:
    """Make a checkpoint of what another library has trained; `partc train --resume` goes on with it, under any plan of the model.

    SOURCE is a file of torch.save (a state_dict, or {"model": ..., "optimizer": ..., "step": ...}), a folder of
    torch.distributed.checkpoint, a .safetensors file, or a folder of a Hugging Face model.

    \b
    partc checkpoint import half.pt -o checkpoints
    partc checkpoint import path/to/llama --build build -o checkpoints
    """
    from partc.runtime.artifact.manifest import open_artifact
    from partc.runtime.checkpoint.interchange.import_checkpoint import import_checkpoint

    manifest = open_artifact(build, trust=True).manifest
    done = import_checkpoint(source, manifest, out, step, weights)
    optimizer = f", {done.slots} of the optimizer" if done.slots else "; the optimizer begins anew"
    console.echo(f"{done.path}: {count(done.tensors, 'tensor')} of {source}{optimizer}")
    if done.unused:
        more = f" and {len(done.unused) - 8} more" if len(done.unused) > 8 else ""
        console.echo(
            printable(f"not used, since training changes nothing under the name: {', '.join(done.unused[:8])}{more}")
        )
    console.echo(f"go on with it: partc train {build} --resume {out}")
    return 0
