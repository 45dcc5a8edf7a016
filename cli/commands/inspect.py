"""The command `partc inspect`: nodes, memory and communication of each rank, and the reasons for them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from partc.cli.commands.run import parse_sizes
from partc.cli.output import console
from partc.cli.output.stats import Moved, RankStats, all_rank_stats, by_rank, moved, slot_lines, stored_lines
from partc.cli.output.table import Table, show_tables
from partc.cli.output.training_stats import TrainingStats, evaluation_lines, training_stats
from partc.runtime.artifact.byte_count import largest_text
from partc.runtime.artifact.comm.collectives import GROUP_OPS
from partc.runtime.artifact.format import BYTES, CAUSE, CUT, DOMAIN, GROUP, PATH, RULE, SEND, Collective, Transfer
from partc.runtime.artifact.generation import DECODE, DRAFT, ENCODE, PREFILL, kind_and_size
from partc.runtime.artifact.graph.onnx_graph import metadata_of, text_of
from partc.runtime.artifact.graph.targets import is_copy, output_target, target_of
from partc.runtime.artifact.manifest import Artifact, open_artifact
from partc.runtime.artifact.tasks.calls import nodes_of, unrolled
from partc.runtime.errors import UsageError
from partc.runtime.spellings import nearest
from partc.runtime.units import count, first_of, size_text

if TYPE_CHECKING:
    from onnx import ModelProto
    from partc.cli.output.pipeline import Pipeline
    from partc.compiler.cost.memory import RankMemory


_LARGEST = 10
_SHOWN = 3


@dataclass(frozen=True)
class NodeRow:
    """A node of a rank's program; `why` is the rule that placed it, or the cause of a transfer."""

    rank: int
    at: int
    op: str
    path: str
    outputs: tuple[str, ...]
    why: str


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("build"))
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="List the program of one rank.")
@click.option("--program", default="", metavar="NAME", help="Show this program, such as 'evaluate' of a training.")
@click.option("--node", "pattern", metavar="PATTERN", help="Show where the matching nodes run, and why.")
@click.option("--set", "set_sizes", multiple=True, metavar="NAME=SIZE", callback=parse_sizes, help="Size of a symbol.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--format", type=click.Choice(["dot", "mermaid"]), help="Print the graph, by modules, for Graphviz or Mermaid."
)
@click.option("--depth", type=click.IntRange(min=1), metavar="N", help="Modules of this depth, with --format.")
def command(
    folder: Path,
    rank: int | None,
    program: str,
    pattern: str | None,
    set_sizes: Mapping[str, int],
    as_json: bool,
    format: str | None,
    depth: int | None,
) -> int:
    """Show nodes, memory and communication of each rank of the artifact in FOLDER (by default build).

    \b
    partc inspect build/                   # ranks, memory, the largest transfers
    partc inspect --rank 3                 # the program of a rank
    partc inspect --node 'conv*'           # where and why
    partc inspect --format mermaid         # the graph of modules, by ranks
    """
    from partc.cli.job.inputs import choose_sizes
    from partc.cli.output.pipeline import pipeline_of, rows_text
    from partc.compiler.cost.memory import memory_of_ranks
    from partc.runtime.artifact.legal_sizes import typical_sizes

    artifact = open_artifact(folder, trust=True, program=program)
    manifest = artifact.manifest
    if rank is not None and rank >= manifest.ranks:
        raise UsageError(f"{folder}: there is no rank {rank}; the ranks are 0 to {manifest.ranks - 1}")
    if format is not None:
        if pattern is not None or as_json or set_sizes:
            raise UsageError("--format prints the graph of modules\n  help: leave out --node, --set and --json")
        console.echo(_graph(artifact, rank, format, depth))
        return 0
    if depth is not None:
        raise UsageError("--depth is of a graph\n  help: give --format dot or --format mermaid, too")
    if pattern is not None or rank is not None:
        ranks = range(manifest.ranks) if rank is None else [rank]
        rows = [row for one in ranks for row in _rows(artifact, one)]
        _show_rows(folder, rows, pattern, as_json)
        return 0
    _, problems = choose_sizes(manifest.symbols, set_sizes)
    if problems:
        raise UsageError("\n".join(problems))
    sizes = {**typical_sizes(manifest), **set_sizes}
    artifact = artifact.shared()
    stats = all_rank_stats(artifact, sizes)
    targets = by_rank(artifact, lambda model, k: target_stats(model, k, sizes))
    memory = memory_of_ranks(artifact, sizes)
    trains = manifest.training is not None and any(record.next for record in manifest.state)
    trained = by_rank(artifact, lambda model, k: [training_stats(manifest, model, k, sizes)]) if trains else []
    if as_json:
        parts: dict[str, Sequence[Any]] = {"ranks": stats, "targets": targets, "training": trained}
        found = {**_as_json(artifact, sizes, parts), "memory": [one.as_json() for one in memory]}
        console.echo(json.dumps(found, indent=1))
        return 0
    pipeline = pipeline_of(artifact)
    tables = [*_pipeline(pipeline, memory, sizes), *_training(trained, artifact), *targets_table(targets)]
    show_tables([_ranks(stats, memory), memory_table(memory), *tables, *_largest(artifact, sizes)])
    console.echo()
    for line in rows_text(pipeline) if pipeline is not None else ():
        console.echo(line)
    for line in _notes(artifact, sizes, sum(one.unknown for one in memory)):
        console.echo(line)
    return 0


def _graph(artifact: Artifact, rank: int | None, format: str, depth: int | None) -> str:
    """The graph of all classes of ranks, or of the one of a rank."""
    from partc.cli.report.graph import rank_classes
    from partc.cli.report.graph_text import graph_text

    classes = [one for one in rank_classes(artifact) if rank is None or rank in one.ranks]
    return graph_text(classes, format, depth)


def _as_json(artifact: Artifact, sizes: Mapping[str, int], parts: Mapping[str, Sequence[Any]]) -> dict[str, object]:
    """What `--json` prints; of `parts`, the rows of tables by key, those without rows are left out."""
    manifest = artifact.manifest
    rows = {key: [dataclasses.asdict(one) for one in some] for key, some in parts.items() if some}
    collectives = [one.model_dump(mode="json") for one in manifest.collectives]
    found: dict[str, object] = {"sizes": sizes, "ranks": rows.pop("ranks", [])}
    found["transfers"] = [transfer.model_dump(mode="json") for transfer in manifest.messages]
    found |= {"groups": manifest.groups, "collectives": collectives} if collectives else {}
    return {**found, **_pipeline_json(artifact), **rows}


def _ranks(stats: Sequence[RankStats], memory: Sequence[RankMemory]) -> Table:
    """The table of ranks."""
    table = Table(
        [">rank", ">nodes", ">segments", ">weights", ">peak memory", ">received", ">sent", "bytes in and out"]
    )
    for one, needed in zip(stats, memory, strict=True):
        peak = size_text(needed.peak) + ("+?" if needed.unknown else "")
        moves = f"in {one.received.text}, out {one.sent.text}"
        received, sent = _moved(one.received), _moved(one.sent)
        table.add(one.rank, one.nodes, needed.segments, size_text(one.weights), peak, received, sent, moves)
    return table


def _pipeline_json(artifact: Artifact) -> dict[str, object]:
    """The rows of tasks, and what each keeps for backward passes."""
    from partc.cli.output.pipeline import pipeline_of, saved_by_group

    pipeline = pipeline_of(artifact)
    if pipeline is None:
        return {}
    rows = [
        {"ranks": ranks, "row": str(row), "microbatches": one.microbatches, "kept": largest_text(one.bytes)}
        for ranks, row, one in zip(pipeline.stage_ranks, pipeline.rows, saved_by_group(pipeline), strict=True)
    ]
    schedule = pipeline.schedule
    return {"pipeline": {"schedule": schedule.name, "microbatches": schedule.microbatches, "rows": rows}}


def _pipeline(pipeline: Pipeline | None, memory: Sequence[RankMemory], sizes: Mapping[str, int]) -> Iterator[Table]:
    """By home its stages, sessions, and the most that its row keeps for backward passes."""
    if pipeline is None:
        return
    from partc.cli.output.pipeline import saved_by_group

    schedule = pipeline.schedule
    title = f"pipeline: {schedule.name}, {schedule.microbatches} microbatches"
    table = Table(
        ["ranks", "stages", ">tasks", ">sessions", ">keeps at most", "bytes kept for backward passes", ">at this size"],
        title=title,
    )
    for home, (row, saved) in enumerate(zip(pipeline.rows, saved_by_group(pipeline), strict=True)):
        stages = ",".join(map(str, sorted(row.stages)))
        ranks = schedule.stages.label(home).partition(" ")[2]
        most = f"{saved.microbatches:.4g}"
        sessions = memory[pipeline.stage_ranks[home][0]].sessions
        at = size_text(saved.at(sizes)) + ("+?" if saved.unknown else "")
        table.add(ranks, stages, len(row.cells), sessions, most, largest_text(saved.bytes), at)
    yield table


def _training(stats: Sequence[TrainingStats], artifact: Artifact) -> Iterator[Table]:
    """Nodes of each phase, bytes of the state, and the buckets in which gradients are reduced."""
    statistics = any(one.statistics for one in stats)
    columns = [">rank", ">forward", ">backward", ">update", ">parameters", ">optimizer"]
    columns += [*([">statistics"] if statistics else []), "gradient buckets"]
    record = artifact.manifest.training
    by = record.optimizer.types if record is not None and record.optimizer.others else ""
    table = Table(columns, title=f"training by {by}" if by else "training")
    for one in stats:
        sizes = [one.parameters, one.optimizer]
        sizes += [one.statistics] if statistics else []
        buckets = f"{one.buckets}, {size_text(one.bucket_bytes)}" if one.buckets else "none"
        table.add(one.rank, one.forward, one.backward, one.update, *map(size_text, sizes), buckets)
    if stats:
        yield table


def _moved(moved: Moved) -> str:
    return size_text(moved.bytes) + ("+?" if moved.unknown else "")


def _largest(artifact: Artifact, sizes: Mapping[str, int]) -> Iterator[Table]:
    """The largest transfers and the largest collectives, a table each."""
    from partc.cli.report.graph import type_text

    manifest = artifact.manifest
    of_transfers = [">from", ">to", "value", "type", ">bytes", ">at this size", "cause"]
    of_collectives = ["op", "ranks", "value", "type", ">bytes per rank", ">at this size", "cause"]
    kinds: Sequence[tuple[str, Sequence[str], Sequence[Transfer | Collective]]] = (
        ("transfers", of_transfers, manifest.messages),
        ("collectives", of_collectives, manifest.collectives),
    )
    for kind, columns, records in kinds:
        measured = sorted(
            ((moved([one.bytes], sizes), one) for one in records), key=lambda pair: (-pair[0].bytes, pair[1].tag)
        )
        title = kind if len(measured) <= _LARGEST else f"the {_LARGEST} largest of {len(measured)} {kind}"
        table = Table(columns, title=title)
        for bytes, record in measured[:_LARGEST]:
            at = "?" if bytes.unknown else size_text(bytes.bytes)
            ends: tuple[object, object] = (
                (record.source, record.target)
                if isinstance(record, Transfer)
                else (record.op, _lists_text(manifest.groups[record.group]))
            )
            table.add(*ends, record.value, type_text(record.type, record.shape), record.bytes, at, record.cause)
        if measured:
            yield table


def _lists_text(lists: list[list[int]]) -> str:
    """Lists of ranks as text: `0-3`, `0,2`, `4 lists of 2: 0,4`."""
    first = lists[0] if lists else []
    run = len(first) > 1 and first == list(range(first[0], first[0] + len(first)))
    text = f"{first[0]}-{first[-1]}" if run else ",".join(map(str, first))
    return text if len(lists) == 1 else f"{len(lists)} lists of {len(first)}: {text}"


def _notes(artifact: Artifact, sizes: Mapping[str, int], unknown: int) -> Iterator[str]:

    if artifact.manifest.lacks_weights:
        yield "the artifact has no weights: its figures are those of the types and shapes"
    if referenced := artifact.manifest.referenced.values():
        yield f"weights are read from {first_of([record.path for record in referenced])}"
    symbols = artifact.manifest.symbols
    if symbols:
        chosen = ", ".join(f"{name}={value}" for name, value in sizes.items())
        batch = "the batch of the training, " if artifact.manifest.training is not None else ""
        yield f"sizes are for {chosen}: {batch}the maximum, or the minimum if there is no maximum; --set changes it"
    yield from evaluation_lines(artifact.manifest)
    yield from slot_lines(artifact.manifest)
    yield from stored_lines(artifact.manifest)
    if PREFILL in artifact.programs:
        steps = {
            DECODE: "one token of every slot",
            PREFILL: "a chunk of a prompt of one slot",
            ENCODE: "the encoder of one slot",
        }
        name = artifact.manifest.name
        for one in artifact.programs:
            kind, size = kind_and_size(one)
            if size:
                of_size = {PREFILL: f"{size} tokens of a prompt", DRAFT: f"a token of one slot and {size - 1} drafts"}
                steps[one] = of_size.get(kind, f"one token of {count(size, 'slot')}")
        others = [
            f"--program {one} shows {what}" for one, what in steps.items() if one != name and one in artifact.programs
        ]
        yield f"this is the program '{name}', {steps[name]}; {', '.join(others)}"
    yield "peak memory is all that a rank holds at these sizes; inside segments and of sessions it is an estimate of what onnxruntime takes"
    if (generation := artifact.manifest.generation) is not None:
        longest = f"sequences of {generation.length} tokens, the longest"
        yield f"it is an upper bound: what grows with the sequences counts as in a step of {longest}"
    if unknown:
        yield f"'+?': without {count(unknown, 'value')} whose size is known only at run time"


def _rows(artifact: Artifact, rank: int) -> Iterator[NodeRow]:
    from partc.cli.report.graph import type_text
    from partc.runtime.artifact.comm.collective_node import peer_of
    from partc.runtime.checker.graph.declared import ValueType, declared_types

    model = unrolled(artifact.model(rank))
    types: dict[str, ValueType] = declared_types(model)
    replaced = {one.next: one.tensor for one in artifact.manifest.state if rank in one.ranks and one.next}
    for at, node in enumerate(model.graph.node):
        metadata = {entry.key: entry.value for entry in node.metadata_props}
        op = node.op_type
        if node.domain == DOMAIN and op in GROUP_OPS:
            group = text_of(node, GROUP)
            ranks = artifact.manifest.groups_of(rank).get(group, ())
            op += f" with {','.join(str(other) for other in ranks if other != rank)}"
        elif is_copy(node):
            op += f" to {output_target(node)}"
        elif target := target_of(node):
            op += f" on {target}"
        elif node.domain == DOMAIN:
            peer = peer_of(node, artifact.manifest.groups_of(rank))
            op += f" to {peer}" if op == SEND else f" from {peer}"
        names = list(node.input) if node.domain == DOMAIN and node.op_type == SEND else list(node.output)
        outputs = tuple(f"{name} {type_text(*types[name])}" if name in types else name for name in names if name)
        why = metadata.get(CAUSE if node.domain == DOMAIN else RULE, "")
        if cut := metadata.get(CUT):
            why += f"; sharded {cut}"
        if tensors := [replaced[name] for name in node.output if name in replaced]:
            why += f"{'; ' if why else ''}next {', '.join(tensors)}"
        yield NodeRow(rank, at, op, metadata.get(PATH) or node.name or next(iter(node.output), ""), outputs, why)


def _show_rows(folder: Path, rows: list[NodeRow], pattern: str | None, as_json: bool) -> None:

    if pattern is not None:
        from partc.compiler.plan.pattern import compile_pattern

        try:
            matches = compile_pattern(pattern).matches
        except ValueError as error:
            raise UsageError(f"--node '{pattern}': {error}") from None
        paths = {row.path for row in rows}
        chosen = {path for path in paths if matches(path)}
        if not chosen:
            names = ", ".join(f"'{name}'" for name in nearest(pattern, sorted(paths)))
            help = f"\n  help: the nearest names are {names}" if names else ""
            raise UsageError(f"{folder}: '{pattern}' matches no node{help}")
        rows = [row for row in rows if row.path in chosen]
    if as_json:
        console.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
        return
    table = Table([">rank", ">at", "op", "path", "value", "why"])
    for row in rows:
        values = ", ".join(row.outputs[:_SHOWN])
        if len(row.outputs) > _SHOWN:
            values += f" and {len(row.outputs) - _SHOWN} more"
        table.add(row.rank, row.at, row.op, row.path, values, row.why)
    table.show()


def memory_table(memory: Sequence[RankMemory]) -> Table:
    """A row for each target of each rank; columns without bytes on any are left out."""
    rows = [(one.rank, target) for one in memory for target in one.targets]
    columns = {
        "weights": [target.weights + target.parameters for _, target in rows],
        "optimizer": [target.optimizer for _, target in rows],
        "caches": [target.caches for _, target in rows],
        "inputs, outputs": [target.inputs_outputs for _, target in rows],
        "between segments": [target.between for _, target in rows],
        "inside segments": [target.inside for _, target in rows],
        "sessions": [target.sessions for _, target in rows],
        "messages": [target.messages for _, target in rows],
        "evaluation": [target.evaluation for _, target in rows],
        "loading": [target.loading for _, target in rows],
    }
    columns = {name: bytes for name, bytes in columns.items() if any(bytes)}
    table = Table([">rank", "target", *(f">{name}" for name in columns), ">peak memory"], title="memory")
    for k, (rank, target) in enumerate(rows):
        peak = size_text(target.peak) + ("+?" if target.unknown else "")
        table.add(rank, target.target, *(size_text(bytes[k]) for bytes in columns.values()), peak)
    return table


@dataclass(frozen=True)
class TargetStats:
    """A target of a rank: its ops, and the copies that lead to it.

    `switches`: how often the rank changes from an op of this target to one of another.
    """

    rank: int
    target: str
    ops: int
    copies: int
    copied: Moved
    switches: int


def target_stats(model: ModelProto, rank: int, sizes: Mapping[str, int]) -> list[TargetStats]:
    """The targets of a rank, whose tasks stand in place of their calls; none where its file names no target."""
    ops: Counter[str] = Counter()
    switches: Counter[str] = Counter()
    copies: dict[str, list[str]] = {}
    last = ""
    for node, _ in nodes_of(model):
        if is_copy(node):
            copies.setdefault(output_target(node), []).append(metadata_of(node, BYTES, "unknown"))
        elif node.domain != DOMAIN and (target := target_of(node)):
            ops[target] += 1
            switches[last] += bool(last) and last != target
            last = target
    if not ops:
        return []
    return [
        TargetStats(
            rank,
            target,
            ops[target],
            len(copies.get(target, ())),
            moved(copies.get(target, ()), sizes),
            switches[target],
        )
        for target in sorted({*ops, *copies})
    ]


def targets_table(stats: Sequence[TargetStats]) -> Iterator[Table]:
    """A row for each target of each rank."""
    if not stats:
        return
    columns = [">rank", "target", ">ops", ">copies to it", "bytes copied a step", ">at this size"]
    table = Table([*columns, ">switches from it"], title="targets")
    for one in stats:
        at = size_text(one.copied.bytes) + ("+?" if one.copied.unknown else "")
        table.add(one.rank, one.target, one.ops, one.copies, one.copied.text, at, one.switches)
    yield table
