"""The command `partc compile`: one program per rank, and a table of what each rank got."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
from partc.cli.commands.cache import no_cache
from partc.cli.output import console
from partc.cli.output.table import Table
from partc.runtime.errors import UsageError
from partc.runtime.units import count, first_of, seconds, size_text

if TYPE_CHECKING:
    import onnx_ir as ir
    from partc.compiler.pipeline import Report

_READABLE = 64
"""The length of an expression that still is."""
_LARGEST = 10
_NAMED = 4


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--plan", type=click.Path(path_type=Path), help="The plan; without it, the model's annotations or one rank."
)
@click.option(
    "-o",
    "--output",
    "out",
    type=click.Path(path_type=Path),
    default=Path("build"),
    show_default=True,
    help="Folder of the artifact.",
)
@click.option("--strict", is_flag=True, help="Refuse reshards that the plan does not ask for.")
@click.option(
    "--annotated",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the unsharded model to this file, each node annotated with its sharding.",
)
@click.option("--configuration", metavar="NAME", help="The model's device configuration to use; 'none' ignores all.")
@click.option("--no-check", is_flag=True, help="Skip the check of the written files by the checker and onnxruntime.")
@click.option("--no-compare", is_flag=True, help="Do not compare what torch exports with the torch module.")
@click.option(
    "--weights",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of the weights of a MODEL that is a folder with its configuration.",
)
@click.option("--no-weights", is_flag=True, help="Read no weights of a folder; the artifact can be looked at, not run.")
@click.option(
    "--by-reference", is_flag=True, help="Leave weights in the files that have them, instead of copying them."
)
@no_cache
@click.option("--dump-ir", is_flag=True, help="Also write a dump after each pass: ir/1_normalize.ir and on.")
@click.option("--verify-passes", is_flag=True, help="Verify the program after each pass; an error names the pass.")
def command(
    model: Path,
    plan: Path | None,
    out: Path,
    strict: bool,
    annotated: Path | None,
    configuration: str | None,
    no_check: bool,
    no_compare: bool,
    weights: Path | None,
    no_weights: bool,
    by_reference: bool,
    no_cache: bool,
    dump_ir: bool,
    verify_passes: bool,
) -> int:
    """Compile MODEL (.onnx, .py or a folder of transformers) by a plan into one ONNX program per rank.

    With --no-weights `config.json` is all that a folder needs: its weights are names, types and shapes, and `partc check`, `inspect`,
    `report` and `simulate` take the artifact as any other. --weights compiles the same with the weights of another folder.

    With --by-reference weights stay in the safetensors files of a folder, or in the external data of an .onnx file: the artifact
    names files, tensors and boxes, and ranks read theirs. It is refused once such a file changes or moves.

    An existing output folder is replaced when the new artifact is complete, and only if it is empty or holds nothing but an artifact.

    \b
    partc compile model.py --plan plan.yaml -o build/
    partc compile llama/ --plan plan.yaml --no-weights
    """
    import time

    from partc.runtime.garbage_collection import importing

    with importing():
        from partc.cli.output.compile_progress import CompileProgress
        from partc.cli.output.stats import slot_lines, stored_lines
        from partc.compiler.pipeline import compile_model
        from partc.runtime.artifact.format import BEGIN_IR, END_IR

    if weights is not None and no_weights:
        raise UsageError("--weights and --no-weights exclude each other\n  help: leave out one of the two")
    if by_reference and no_weights:
        raise UsageError("--by-reference and --no-weights exclude each other\n  help: leave out one of the two")
    begin = time.perf_counter()
    with CompileProgress() as watch:
        report = compile_model(
            model,
            plan,
            out,
            dump_ir,
            strict,
            annotated,
            configuration,
            not no_check,
            watch,
            verify_passes,
            not no_compare,
            keep=not no_cache,
            weights=False if no_weights else weights or True,
            by_reference=by_reference,
        )
    spent = time.perf_counter() - begin
    if console.as_json():
        for warning in report.warnings:
            console.echo(f"warning: {warning}", err=True)
        exported = {"export_seconds": round(watch.spent["load"], 4)} if report.exported else {}
        console.result({**document(report, spent), **exported})
        return 0
    ranks_table(out).show()
    if report.manifest.collectives:
        console.echo()
        communication_table(report).show()
    ranks = report.manifest.ranks
    moves = count(len(report.manifest.messages), "transfer")
    if report.manifest.collectives:
        moves += f", {count(len(report.manifest.collectives), 'collective')}"
    for warning in report.warnings:
        console.echo(f"warning: {warning}", err=True)
    console.echo(f"\n{out}: {count(ranks, 'rank')}, {moves}, in {seconds(spent)}")
    if report.program.training is not None:
        from partc.cli.output.training_stats import evaluation_lines

        console.echo(trained_line(report))
        for line in (*shared_lines(report), *table_lines(report), *evaluation_lines(report.manifest)):
            console.echo(line)
    for line in stored_lines(report.manifest):
        console.echo(line)
    unfused = report.program.generation.unfused if report.program.generation is not None else ()
    for line in slot_lines(report.manifest, unfused):
        console.echo(line)
    if report.exported:
        cache = ["--cache"] if report.manifest.generation is not None else []
        once = shlex.join(["partc", "export", str(model), *cache, "-o", f"{model.absolute().stem}.onnx"])
        later = (
            "the next command takes this export (partc cache)"
            if report.is_export_cached
            else f"to export it once: {once}"
        )
        console.echo(f"torch exported the model in {seconds(watch.spent['load'])}; {later}")
    if referenced := report.manifest.referenced.values():
        files = first_of([record.path for record in referenced])
        size = size_text(sum(record.bytes for record in referenced))
        console.echo(f"weights stay in {files}, {size}: the artifact is refused once a file changes or moves")
    if report.manifest.lacks_weights:
        console.echo(
            "without weights: the artifact can be checked, inspected, reported and simulated, and cannot be run"
        )
    console.echo(f"dumps: {out / BEGIN_IR}, {out / END_IR}")
    if report.program.training is not None and plan is not None and not report.manifest.lacks_weights:
        console.echo(f"train it with: {shlex.join(['partc', 'train', str(out), '--plan', str(plan)])}")
    return 0


def document(report: Report, spent: float) -> dict[str, object]:
    """The JSON document of a compile; byte counts of dynamic shapes are expressions in the symbols."""
    from partc.cli.output.stats import all_rank_stats
    from partc.compiler.sharding.values.budget import largest_first
    from partc.runtime.artifact.legal_sizes import typical_sizes
    from partc.runtime.artifact.manifest import open_artifact

    artifact = open_artifact(report.out, trust=True)
    sizes = typical_sizes(artifact.manifest)
    ranks = []
    for one in all_rank_stats(artifact, sizes):
        figures = {"nodes": one.nodes, "weights": one.weights, "received": one.received.text, "sent": one.sent.text}
        ranks.append({"rank": one.rank, **figures})
    return {
        "folder": str(report.out),
        "ranks": ranks,
        "transfers": len(report.manifest.messages),
        "collectives": len(report.manifest.collectives),
        "communication": [
            {"op": e.op_type, "value": e.name, "ranks": e.ranks, "bytes": e.bytes, "cause": e.cause}
            for e in largest_first(report.program)
        ],
        "referenced": [record.path for record in report.manifest.referenced.values()],
        "trains": report.program.training is not None,
        "warnings": list(report.warnings),
        "seconds": round(spent, 4),
    }


def communication_table(report: Report) -> Table:
    """A row per collective and message, the largest first; of more than ten, the last row counts the rest."""
    from partc.compiler.sharding.values.budget import largest_first

    events = largest_first(report.program)
    table = Table(["communication", "value", "ranks", ">bytes per rank", "cause"])
    for event in events[:_LARGEST]:
        ranks = ", ".join("-".join(map(str, some)) for some in event.ranks[:2]) + (
            ", ..." if len(event.ranks) > 2 else ""
        )
        table.add(event.op_type, event.name, ranks, event.bytes, event.cause)
    if len(events) > _LARGEST:
        table.add(f"and {len(events) - _LARGEST} more", "", "", "", "all in step_parallel_end.ir")
    return table


def trained_line(report: Report) -> str:
    """Trained and frozen parameters, and the float tensors of several elements that are not parameters."""
    from partc.cli.output.training_stats import trained_tensors
    from partc.compiler.training.trainable import candidates

    training, manifest = report.program.training, report.manifest
    assert training is not None
    known = training.parameters
    frozen = [value for value, how in known.items() if how.frozen]
    learned = trained_tensors(manifest)
    others = [value for value in candidates(report.program.model) if value not in known and _elements(value) > 1]
    parts = [f"trains {count(len(learned), 'parameter')}, {count(sum(learned.values()), 'element')}"]
    text = f"{count(len(frozen), 'parameter')}, {count(sum(map(_elements, frozen)), 'element')}"
    parts += [f"frozen: {text}"] if frozen else []
    named = [f"{value.name} {list(value.shape or ())}" for value in others]
    if named:
        more = f", and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        parts.append(f"not trained: {', '.join(named[:_NAMED])}{more}")
    return "; ".join(parts)


def shared_lines(report: Report) -> list[str]:
    """Lines about weights that several modules read, of many the first ones."""
    found = report.program.training.notes.shared if report.program.training is not None else ()
    more = [f"and {len(found) - _NAMED} more weights that several modules read"] if len(found) > _NAMED else []
    help_ = "  help: `train: parameters: {name: {shared: true}}` makes it one parameter, `shared: false` one per module"
    return [*found[:_NAMED], *more, *([help_] if found else [])]


def table_lines(report: Report) -> list[str]:
    """Lines about parameters that are looked up, of many the first ones."""
    found = report.program.training.notes.tables if report.program.training is not None else ()
    return [*found[:_NAMED], *([f"and {len(found) - _NAMED} more tables"] if len(found) > _NAMED else [])]


def _elements(value: ir.Value) -> int:
    return math.prod(dim for dim in value.shape or () if isinstance(dim, int))


def ranks_table(folder: Path) -> Table:
    """A row per rank: nodes, weights, bytes in and out as expressions, where one is too long at the sizes that the title names."""
    from partc.cli.output.stats import Moved, all_rank_stats
    from partc.runtime.artifact.legal_sizes import typical_sizes
    from partc.runtime.artifact.manifest import open_artifact

    artifact = open_artifact(folder, trust=True)
    sizes = typical_sizes(artifact.manifest)
    stats = all_rank_stats(artifact, sizes)
    readable = all(len(some.text) <= _READABLE for one in stats for some in (one.received, one.sent))

    def text(some: Moved) -> str:
        return some.text if readable else size_text(some.bytes) + ("+?" if some.unknown else "")

    chosen = ", ".join(f"{name}={value}" for name, value in sizes.items())
    title = "" if readable else f"bytes are for {chosen}; those of each message are in step_parallel_end.ir"
    table = Table([">rank", ">nodes", ">weights", ">bytes received", ">bytes sent"], title=title)
    for one in stats:
        table.add(one.rank, one.nodes, size_text(one.weights), text(one.received), text(one.sent))
    return table
