"""The commands about plans: `partc plan` writes a starting plan, `partc schema` prints the JSON schema of plans."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
from partc.cli.commands.run import byte_count, parse_sizes
from partc.cli.output import console
from partc.runtime.units import parse_seconds

if TYPE_CHECKING:
    from partc.cli.simulation.search import Found
    from partc.compiler.proposal.degrees import Degrees
    from partc.compiler.proposal.imports.imported import Imported


def _bytes(ctx: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    found = None if text is None else byte_count(text)
    if found == 0:
        raise click.BadParameter("a device of 0 bytes holds nothing; give a size such as 8GB")
    return found


def _duration(ctx: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    found = None if text is None else parse_seconds(text)
    if text is not None and not found:
        raise click.BadParameter(f"'{text}' is not a time above 0, such as 10s or 2min")
    return found


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", "out", type=click.Path(path_type=Path, dir_okay=False), help="Write the plan to this file."
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Search the fastest plan on N ranks; --tp, --dp, --stages fix a part of it.",
)
@click.option("--tp", type=click.IntRange(min=1), metavar="N", help="Propose tensor parallelism over N ranks.")
@click.option("--dp", type=click.IntRange(min=1), metavar="N", help="Propose data parallelism over N ranks.")
@click.option("--stages", type=click.IntRange(min=1), metavar="N", help="Propose N stages of equal cost.")
@click.option("--memory", callback=_bytes, metavar="SIZE", help="Memory of a rank for --ranks, such as 8GB.")
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Records of a batch for --ranks.")
@click.option(
    "--set", "sizes", multiple=True, metavar="NAME=SIZE", callback=parse_sizes, help="Size of a symbol for --ranks."
)
@click.option(
    "--time", "limit", callback=_duration, metavar="TIME", help="Most time that --ranks may take, such as 10s."
)
@click.option("--hosts", type=click.IntRange(min=1), help="Hosts that the ranks of --ranks are on [1].")
@click.option(
    "--generate",
    "length",
    type=click.IntRange(min=2),
    metavar="LENGTH",
    help="Propose to make tokens with a decoder, in sequences of at most LENGTH.",
)
@click.option("--slots", type=click.IntRange(min=1), metavar="N", help="Sequences at once of --generate.")
@click.option(
    "--machine",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Machine file, of `partc measure`: what --ranks is searched for; --stages are of equal time there.",
)
@click.option(
    "--from",
    "files",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    help="Begin with the plan of another system: torch, Hugging Face, Megatron-LM, MindSpore.",
)
@click.option("--target", type=click.Choice(["auto"]), help="Propose which nodes of a rank its GPU and its CPU run.")
@click.option(
    "--device-memory", callback=_bytes, metavar="SIZE", help="Memory of a rank's GPU for --target, such as 8GB."
)
@click.option(
    "--plan",
    "given",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Propose --target for this plan, and write it with them; or the plan whose training --ranks takes over.",
)
def command(
    model: Path,
    out: Path | None,
    ranks: int | None,
    tp: int | None,
    dp: int | None,
    stages: int | None,
    memory: int | None,
    batch: int | None,
    sizes: Mapping[str, int],
    limit: float | None,
    hosts: int | None,
    length: int | None,
    slots: int | None,
    machine: Path | None,
    files: tuple[Path, ...],
    target: str | None,
    device_memory: int | None,
    given: Path | None,
) -> int:
    """Write a starting plan for MODEL: its inputs, and its modules and parameters as comments.

    With --tp, --dp and --stages the plan has placement and sharding for the layers that partc recognizes, on TP * DP * STAGES ranks.

    With --ranks it is the fastest that a search finds on a machine: candidates are estimated, and the best are compiled and played as by
    `partc simulate`. It says how far it may be from the best, and what usual plans take. --plan has a training to take over.

    With --generate it makes tokens with a decoder that has past and present as inputs and outputs: `partc generate` then continues prompts.

    With --from it begins with a file of another system: a .py with a `parallelize_plan` of torch.distributed, a `tp_plan` of transformers
    (config.json, or patterns with words), arguments of Megatron-LM, strategy files of MindSpore. What has no counterpart is listed.

    With --target auto it says what runs on the rank's GPU, and what on the CPU: what has no kernel for GPUs, tables of which a step reads
    little, and what does not fit in --device-memory. --plan begins with a plan that exists, such as one that trains.

    \b
    partc plan model.onnx -o plan.yaml
    partc plan model.onnx --dp 2 --tp 4 -o plan.yaml
    partc plan model.onnx --ranks 16 --memory 8GB --machine machine.yaml --batch 64 --plan train.yaml -o plan.yaml
    partc plan decoder.onnx --tp 2 --generate 4096 --slots 8 -o plan.yaml
    partc plan model.py --from pretrain.sh -o plan.yaml
    partc plan model.onnx --from strategy_0.json --from strategy_1.json -o plan.yaml
    partc plan model.onnx --target auto --device-memory 8GB --plan train.yaml -o targets.yaml
    """
    from partc.cli.simulation.search import Options, searched
    from partc.compiler.cost.machine_file import read_machine
    from partc.compiler.frontend import load
    from partc.compiler.frontend.names import node_paths
    from partc.compiler.plan.document import read_text
    from partc.compiler.proposal.degrees import Degrees
    from partc.compiler.proposal.edited_plan import with_targets
    from partc.compiler.proposal.generation import Generation
    from partc.compiler.proposal.imports.read import read_imported
    from partc.compiler.proposal.imports.strategies import plan_of_strategies
    from partc.compiler.proposal.propose import propose
    from partc.compiler.proposal.starting_plan import starting_plan
    from partc.compiler.proposal.targets import Device
    from partc.compiler.search.candidate import Fixed
    from partc.runtime.errors import UsageError
    from partc.runtime.files.replace import write_text

    if out is not None and out.exists():
        raise UsageError(f"{out}: the file exists already\n  help: choose another name with -o, or remove the file")
    if ranks is not None:
        if target is not None or length is not None:
            option = "--target" if target is not None else "--generate"
            raise UsageError(f"{option} is for a proposal of given degrees\n  help: leave out --ranks, and give --tp")
        request = Options(ranks, Fixed(tp, dp, stages), sizes, batch, memory, machine, hosts or 1, limit, given)
        return _write_found(searched(load(model), model.absolute().name, request), out)
    of_search = {"--memory": memory, "--batch": batch, "--set": sizes or None, "--time": limit, "--hosts": hosts}
    if named := [option for option, value in of_search.items() if value is not None]:
        verb = "is" if len(named) == 1 else "are"
        raise UsageError(f"{', '.join(named)} {verb} for a search\n  help: add --ranks")
    degrees = Degrees(tp or 1, dp or 1, stages or 1)
    if machine is not None and degrees.stages == 1:
        raise UsageError("--machine is for a search, or the proposal of stages\n  help: add --ranks or --stages")
    if target is None and (device_memory is not None or given is not None):
        option = "--device-memory" if device_memory is not None else "--plan"
        more = "" if device_memory is not None else ", or --ranks for a search"
        raise UsageError(f"{option} is for the proposal of targets\n  help: add --target auto{more}")
    if given is not None and degrees.ranks > 1:
        raise UsageError("--plan has ranks of its own\n  help: leave out --tp, --dp and --stages, or --plan")
    if slots is not None and length is None:
        raise UsageError("--slots is for a proposal of generation\n  help: add --generate LENGTH")
    if given is not None and length is not None:
        raise UsageError("--plan has a 'generate' of its own, or none\n  help: write it there, or leave out --plan")
    generation = None if length is None else Generation(length, slots or degrees.dp)
    device = Device(device_memory) if target is not None else None
    imported = None
    if files:
        imported = read_imported(files)
        degrees = _degrees(degrees, imported)
    source, name = load(model, cache=length is not None), model.absolute().name
    if given is not None and device is not None:
        text = with_targets(source, read_text(given), given, name, device)
    elif imported is not None and imported.strategies:
        text = plan_of_strategies(source, name, imported)
    elif degrees.ranks > 1 or device is not None or generation is not None or imported is not None:
        measured = None if machine is None else read_machine(machine)
        text, missing = propose(source, name, degrees, device, measured, generation, imported)
        for line in missing:
            console.echo(f"warning: not recognized: {line}", err=True)
    else:
        paths, ranks = node_paths(source.model), source.declared.least_ranks
        text = starting_plan(source.model, paths, name, source.declared.symbols, ranks=ranks)
    if out is None:
        console.echo(text, nl=False)
        return 0
    write_text(out, text)
    console.echo(f"wrote {out}")
    return 0


def _degrees(given: Degrees, imported: Imported) -> Degrees:
    """The degrees of the command, else those of the files. UsageError where the two differ, or styles come without a degree."""
    from partc.compiler.proposal.degrees import Degrees
    from partc.runtime.errors import UsageError

    found = {name: imported.degrees.get(name, 1) for name in ("tp", "dp", "stages")}
    for name, of_file in found.items():
        asked = getattr(given, name)
        if asked > 1 and (imported.strategies or of_file not in (1, asked)):
            said = f"{name} {of_file}" if of_file > 1 else "strategies with shards of their own"
            raise UsageError(f"--{name} {asked}: {imported.source} has {said}\n  help: leave out --{name}")
        found[name] = max(asked, of_file)
    if imported.styles and found["tp"] == 1:
        fact = f"{imported.source} says what is sharded, and not over how many ranks"
        raise UsageError(f"{fact}\n  help: add --tp, such as --tp 4")
    return Degrees(**found)


def _write_found(found: Found, out: Path | None) -> int:
    """Writes the plan that a search found; what it costs is printed where the plan is not."""
    from partc.runtime.files.replace import write_text

    for line in found.warnings:
        console.echo(f"warning: {line}", err=True)
    console.echo(found.report, err=out is None)
    if out is None:
        console.echo(found.text, nl=False)
        return 0
    write_text(out, found.text)
    console.echo(f"wrote {out}")
    return 0


@click.command()
def schema() -> int:
    """Print the JSON schema of a plan, for editors and other tools.

    \b
    partc schema > plan.schema.json
    # then, as the first line of a plan:
    # yaml-language-server: $schema=plan.schema.json
    """
    import json

    from partc.compiler.plan.schema import plan_schema

    console.echo(json.dumps(plan_schema(), indent=2))
    return 0
