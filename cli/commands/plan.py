"""The commands about plans: `partc plan` writes a starting plan, `partc schema` prints the JSON schema of plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from partc.cli.commands.cache import no_cache
from partc.cli.commands.run import byte_count, parse_sizes
from partc.cli.output import console
from partc.runtime.errors import UsageError
from partc.runtime.garbage_collection import kept
from partc.runtime.units import parse_seconds

if TYPE_CHECKING:
    from partc.cli.simulation.search import Options
    from partc.compiler.frontend.source import Source
    from partc.compiler.proposal.degrees import Degrees
    from partc.compiler.proposal.generation import Generation
    from partc.compiler.proposal.imports.imported import Imported
    from partc.compiler.proposal.targets import Device


@dataclass(frozen=True)
class _Rule:
    """`options` are given with one of `needs` at least, and with none of `never`; else they are what `fact` says."""

    options: tuple[str, ...]
    fact: str
    help: str
    needs: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


_TOGETHER = (
    _Rule(("--memory", "--batch", "--set", "--time", "--hosts", "--try"), "for a search", "add --ranks", ("--ranks",)),
    _Rule(("--try",), "for the ranks of one host, which is this one", "leave out --hosts", never=("--hosts",)),
    _Rule(
        ("--target", "--device-memory", "--generate", "--slots", "--from"),
        "for a proposal of given degrees",
        "leave out --ranks, and give --tp",
        never=("--ranks",),
    ),
    _Rule(
        ("--machine",),
        "for a search, or the proposal of stages or of generation",
        "add --ranks, --stages or --generate",
        ("--ranks", "--stages", "--generate"),
    ),
    _Rule(("--device-memory",), "for the proposal of targets", "add --target auto", ("--target",)),
    _Rule(
        ("--plan",),
        "for the proposal of targets",
        "add --target auto, or --ranks for a search",
        ("--target", "--ranks"),
    ),
    _Rule(
        ("--target",),
        "not for a plan that is imported",
        "write the plan first, then give --target auto --plan plan.yaml",
        never=("--from",),
    ),
    _Rule(
        ("--quantize",),
        "for a proposal of given degrees",
        "write `quantize` into the plan",
        never=("--ranks", "--plan", "--from"),
    ),
    _Rule(("--slots", "--cache"), "for a proposal of generation", "add --generate LENGTH", ("--generate",)),
    _Rule(
        ("--generate",),
        "for a plan that is not there yet",
        "write `generate` into the plan",
        never=("--plan",),
    ),
)
"""Which options of `partc plan` go together."""


def _bytes(ctx: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    found = None if text is None else byte_count(text)
    if found == 0:
        raise click.BadParameter("0 bytes hold nothing; give a size such as 8GB")
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
    help="Search for the fastest plan on N ranks; --tp, --dp, --ep, --stages, --context fix a part of it.",
)
@click.option("--tp", type=click.IntRange(min=1), metavar="N", help="Propose tensor parallelism over N ranks.")
@click.option("--dp", type=click.IntRange(min=1), metavar="N", help="Propose data parallelism over N ranks.")
@click.option(
    "--ep", type=click.IntRange(min=1), metavar="N", help="Propose to shard experts over N ranks of --dp [--dp N]."
)
@click.option("--stages", type=click.IntRange(min=1), metavar="N", help="Propose N stages of equal cost.")
@click.option(
    "--context",
    "cp",
    type=click.IntRange(min=1),
    metavar="N",
    help="Propose to shard the tokens of sequences over N ranks; of --generate, the entries of caches.",
)
@click.option("--memory", callback=_bytes, metavar="SIZE", help="Memory of a rank for --ranks, such as 8GB.")
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Records of a batch for --ranks.")
@click.option(
    "--set", "sizes", multiple=True, metavar="NAME=SIZE", callback=parse_sizes, help="Size of a symbol for --ranks."
)
@click.option(
    "--time", "limit", callback=_duration, metavar="TIME", help="Most time that --ranks may take, such as 10s."
)
@click.option(
    "--try",
    "tries",
    type=click.IntRange(min=2),
    metavar="N",
    help="Run the N fastest of --ranks on this host, in turns, and take the fastest.",
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
@click.option("--cache", type=click.Choice(["int8"]), help="Propose keys and values in int8 for --generate.")
@click.option("--quantize", "bits", type=click.Choice(["4", "8"]), help="Propose weights of 4 or 8 bits.")
@click.option(
    "--machine",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Machine file, of `partc measure`: what --ranks is searched for; --stages are of equal time there; one sequence of --generate "
    "has drafts where they cost little.",
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
@click.option("--no-compare", is_flag=True, help="Do not compare what torch exports with the torch module.")
@no_cache
@click.option(
    "--plan",
    "plan",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Propose --target for this plan, and write it with them; or the plan whose training --ranks takes over.",
)
def command(
    model: Path,
    out: Path | None,
    ranks: int | None,
    tp: int | None,
    dp: int | None,
    ep: int | None,
    stages: int | None,
    cp: int | None,
    memory: int | None,
    batch: int | None,
    sizes: Mapping[str, int],
    limit: float | None,
    tries: int | None,
    hosts: int | None,
    length: int | None,
    slots: int | None,
    cache: str | None,
    bits: str | None,
    machine: Path | None,
    files: tuple[Path, ...],
    target: str | None,
    device_memory: int | None,
    no_compare: bool,
    no_cache: bool,
    plan: Path | None,
) -> int:
    """Write a starting plan for MODEL: its inputs, and its modules and parameters as comments.

    With --tp, --dp, --stages and --context the plan has placement and sharding for the layers that partc recognizes, on as many ranks as
    their product. With --ep some or all of the DP ranks share the experts of a model.

    With --ranks it is the fastest that a search finds on a machine: candidates are estimated, and the best are compiled and played as by
    `partc simulate`. It also says what usual plans take. --plan has a training to take over. --try 4 runs the four fastest on this host,
    since a simulation hardly tells plans apart that differ by less than its error.

    With --generate it makes tokens with a decoder that has past and present as inputs and outputs: `partc generate` then continues prompts.

    With --quantize 4 the weights of products and tables are stored in blocks of four bits.

    With --from it begins with a file of another system: a .py with a `parallelize_plan` of torch.distributed, a `tp_plan` of transformers
    (config.json, or patterns with words), arguments of Megatron-LM, strategy files of MindSpore. What has no counterpart is listed.

    With --target auto it says what runs on the rank's GPU, and what on the CPU: what has no kernel for GPUs, tables of which a step reads
    little, and what does not fit in --device-memory. --plan begins with a plan that exists, such as one that trains.

    \b
    partc plan model.onnx -o plan.yaml
    partc plan model.onnx --dp 2 --tp 4 -o plan.yaml
    partc plan mixtral --dp 8 --ep 4 -o plan.yaml
    partc plan model.onnx --ranks 16 --memory 8GB --machine machine.yaml --batch 64 --plan train.yaml -o plan.yaml
    partc plan decoder.onnx --tp 2 --generate 4096 --slots 8 -o plan.yaml
    partc plan decoder.onnx --tp 4 --from config.json --generate 4096 -o plan.yaml
    partc plan model.py --from pretrain.sh -o plan.yaml
    partc plan model.onnx --from strategy_0.json --from strategy_1.json -o plan.yaml
    partc plan model.onnx --target auto --device-memory 8GB --plan train.yaml -o targets.yaml
    """

    context = click.get_current_context()
    options = {
        one.opts[-1] for one in context.command.params if context.params.get(str(one.name)) not in (None, (), {})
    }
    if problems := [*_misplaced(options)]:
        raise UsageError("\n".join(problems))
    if plan is not None and ranks is None and (tp or dp or ep or stages or cp):
        raise UsageError(
            "--plan has ranks of its own\n  help: leave out --tp, --dp, --ep, --stages and --context, or --plan"
        )
    if ep is not None and dp is not None and dp % ep:
        fact, law = f"--ep {ep}: it does not divide --dp {dp}", "experts are sharded over ranks that have other records"
        raise UsageError(f"{fact}\n  {law}\n  help: give a divisor of {dp}")
    if out is not None and out.exists():
        raise UsageError(f"{out}: the file exists already\n  help: choose another name with -o, or remove the file")
    read = _Read(model, compare=not no_compare, keep=not no_cache)
    if ranks is not None:
        from partc.cli.simulation.search import Options
        from partc.compiler.search.candidate import Fixed

        fixed = Fixed(tp, dp, stages, ep, cp)
        text = _plan_of_search(
            read, Options(ranks, fixed, sizes, batch, memory, machine, hosts or 1, limit, plan, tries or 0), out
        )
    else:
        from partc.compiler.proposal.degrees import Degrees
        from partc.compiler.proposal.generation import Generation
        from partc.compiler.proposal.imports.read import read_imported
        from partc.compiler.proposal.targets import Device

        degrees = Degrees(tp or 1, dp or ep or 1, stages or 1, ep or 1, cp or 1)
        imported = read_imported(files) if files else None
        if imported is not None:
            degrees = _degrees(degrees, imported)
            if length is not None and (others := _not_generating(imported)):
                fact = f"--generate: {imported.source} has {others}, and a plan that generates has none"
                raise UsageError(f"{fact}\n  help: leave out --generate or --from")
        generation = None if length is None else Generation.over(degrees, length, slots, cache)
        device = Device(device_memory) if target is not None else None
        text = _plan_of_degrees(read, degrees, imported, generation, device, bits, plan, machine)
    return _written(text, out)


@dataclass(frozen=True)
class _Read:
    """A model's path, and the options with which a command reads it."""

    model: Path
    compare: bool
    keep: bool

    @property
    def name(self) -> str:
        return self.model.absolute().name

    def source(self, caches: bool = False) -> Source:
        from partc.compiler.frontend import load
        from partc.compiler.frontend.huggingface.safetensors_files import has_weights

        weights = has_weights(self.model) if self.model.is_dir() else True
        return load(self.model, cache=caches, compare=self.compare, keep=self.keep, weights=weights)


def _plan_of_search(read: _Read, request: Options, out: Path | None) -> str:
    """The text of the fastest plan that a search finds; prints what it says about the others."""
    from partc.cli.machine.trials import run_fastest
    from partc.cli.simulation.search import searched
    from partc.compiler.unroll import layers_unrolled

    with kept():
        found = searched(layers_unrolled(read.source()), read.name, request, run_fastest)
    _warn(found.warnings)
    console.echo(found.report, err=out is None)
    return found.text


def _plan_of_degrees(
    read: _Read,
    degrees: Degrees,
    imported: Imported | None,
    generation: Generation | None,
    device: Device | None,
    bits: str | None,
    plan: Path | None,
    machine: Path | None,
) -> str:
    """The text of a plan of given degrees, or of what a plan or files of other systems say."""
    from partc.compiler.cost.machine_file import read_machine
    from partc.compiler.frontend.names import node_paths
    from partc.compiler.plan.document import read_text
    from partc.compiler.plan.read import parse_plan
    from partc.compiler.proposal.batch import least_sizes
    from partc.compiler.proposal.edited_plan import with_targets
    from partc.compiler.proposal.imports.strategies import plan_of_strategies
    from partc.compiler.proposal.propose import propose
    from partc.compiler.proposal.quantize import quantize_section
    from partc.compiler.proposal.starting_plan import starting_plan
    from partc.compiler.quantize import quantized, reordered
    from partc.compiler.unroll import layers_unrolled

    name, source = read.name, read.source(caches=generation is not None)
    if degrees.tp > 1 or degrees.stages > 1:
        source = layers_unrolled(source)
    section = quantize_section(source, int(bits), degrees.tp) if bits is not None else []
    rules = parse_plan("\n".join(["ranks: 1", *section]), "plan.yaml") if section else None
    if section or not reordered(source):  # what is in another order is proposed as the float model
        source = quantized(source, rules, name)
    if bits is not None and not section:
        _warn([f"{name}: no product with a constant weight, and no table, that can be quantized"])
    if plan is not None and device is not None:
        text = with_targets(source, read_text(plan), plan, name, device)
    elif imported is not None and imported.strategies:
        text = plan_of_strategies(source, name, imported)
    elif degrees.ranks > 1 or device is not None or generation is not None or imported is not None:
        measured = None if machine is None else read_machine(machine)
        text, missing = propose(source, name, degrees, device, measured, generation, imported)
        _warn(f"not recognized: {line}" for line in missing)
    else:
        paths, least = node_paths(source.model), source.declared.least_ranks
        symbols, because = least_sizes(source, name)
        text = starting_plan(source.model, paths, name, symbols, ranks=least, because=because)
    return _with_section(text, section)


def _with_section(text: str, section: Sequence[str]) -> str:
    """The text of a plan with a section behind its ranks and mesh."""
    lines = text.splitlines()
    ranks = next(k for k, line in enumerate(lines) if line.startswith("ranks:"))
    end = next((k for k, line in enumerate(lines[ranks:], ranks) if not line), len(lines) - 1) + 1
    return "\n".join([*lines[:end], *section, *lines[end:]]) + "\n"


def _misplaced(given: set[str]) -> Iterator[str]:
    """What is wrong with options that are given together, or without one that they are for."""
    for rule in _TOGETHER:
        named = [one for one in rule.options if one in given]
        if named and (not given.isdisjoint(rule.never) or (rule.needs and given.isdisjoint(rule.needs))):
            verb = "is" if len(named) == 1 else "are"
            yield f"{', '.join(named)} {verb} {rule.fact}\n  help: {rule.help}"


def _degrees(from_command: Degrees, imported: Imported) -> Degrees:
    """The degrees of the command, else those of the files. UsageError where the two differ, or styles come without a degree."""

    degrees = {name: imported.degrees.get(name, 1) for name in ("tp", "dp", "stages")}
    for name, of_file in degrees.items():
        asked = getattr(from_command, name)
        if asked > 1 and (imported.strategies or of_file not in (1, asked)):
            said = f"{name} {of_file}" if of_file > 1 else "strategies with shards of their own"
            raise UsageError(f"--{name} {asked}: {imported.source} has {said}\n  help: leave out --{name}")
        degrees[name] = max(asked, of_file)
    if imported.styles and degrees["tp"] == 1:
        fact = f"{imported.source} says what is sharded, and not over how many ranks"
        raise UsageError(f"{fact}\n  help: add --tp, such as --tp 4")
    return replace(from_command, **degrees)


def _not_generating(imported: Imported) -> str:
    """What files say that a plan with `generate` cannot have, in words; "" where there is nothing."""
    found = {"a training": imported.training, "a pipeline": imported.pipeline, "strategies": imported.strategies}
    return " and ".join(word for word, said in found.items() if said)


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        console.echo(f"warning: {line}", err=True)


def _written(text: str, out: Path | None) -> int:
    """Writes a plan to its file, or prints it; the exit code."""
    from partc.runtime.files.replace import write_text

    if out is None:
        console.echo(text, nl=False)
        return 0
    write_text(out, text)
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
