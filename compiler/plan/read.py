"""Reads a plan file to a `Plan`: all faults are reported at once, each with its line.

plan.yaml:7: placement of 'conv9': rank 5, but there are 5 ranks
  help: choose a rank from 0 to 4, or set 'ranks' to at least 6
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.adapters import AdapterRule
from partc.compiler.plan.dataset import KEYS, DatasetEntry, full_batch, repeated_keys
from partc.compiler.plan.document import Data, Document, Steps, parse_document, read_text
from partc.compiler.plan.elastic import ElasticEntry, on_ranks
from partc.compiler.plan.experts import ExpertsRule
from partc.compiler.plan.groups import frame_of
from partc.compiler.plan.pipeline import MICROBATCH, PipelineRules
from partc.compiler.plan.precision import QuantizeRule
from partc.compiler.plan.rules import (
    BatchDim,
    Dataset,
    DimRules,
    Elastic,
    InputRule,
    OutputRule,
    PlacementRule,
    Plan,
    ShardingRule,
    SymbolRule,
)
from partc.compiler.plan.schema import PlanEntries, PlanWithoutTraining
from partc.compiler.plan.stages import sizes_of_groups
from partc.compiler.plan.stored import StoredRules
from partc.compiler.plan.target import TargetRule, meant_target
from partc.compiler.plan.training.rules import TrainRules
from partc.runtime.options import Refused, refusals, shown
from pydantic import ValidationError

__all__ = [
    "Dataset",
    "DimRules",
    "InputRule",
    "OutputRule",
    "PlacementRule",
    "Plan",
    "ShardingRule",
    "SymbolRule",
    "parse_plan",
    "read_plan",
]


def read_plan(path: Path) -> Plan:
    """Reads the plan of a file; raises CompileError with all problems, their lines under the given path."""
    return parse_plan(read_text(path), str(path))


def parse_plan(text: str, name: str) -> Plan:
    """Parses the plan of a YAML text that messages call `name`; raises CompileError with all problems in the order of their lines."""
    document = parse_document(text, name)
    entries = _entries(document, document.data)
    plan = _plan(entries, document, entries.elastic)
    others: dict[int, Plan] = {}
    for ranks in [] if entries.elastic is None else [one for one in entries.elastic.ranks if one != plan.ranks]:
        try:
            others[ranks] = _plan(_entries(document, on_ranks(document.data, ranks)), document, entries.elastic)
        except CompileError as error:
            problems = [replace(one, fact=f"on {ranks} ranks: {one.fact}") for one in error.problems]
            raise CompileError(problems) from None
    return replace(plan, elastic=replace(plan.elastic, plans=others))


def _entries(document: Document, data: Data) -> PlanEntries:
    """Returns the entries of a document, or of its `data` for another number of ranks."""
    problems = list(document.problems)
    entries: PlanEntries | None = None
    if not isinstance(data, dict):
        what = "the plan is empty" if data is None else f"a plan is a mapping, but this is {shown(data)}"
        problems.append(Problem(document.where(), what, help="begin with 'ranks: 2'"))
    else:
        try:
            frame = frame_of(data, Path(document.file).parent, sizes_of_groups(data))
            form = PlanEntries if "train" in data else PlanWithoutTraining
            entries = form.model_validate(data, context=frame)
        except ValidationError as error:
            found = [one for one in refusals(error) if one[0] not in document.refused]
            problems += (_problem(steps, refused, value, document) for steps, refused, value in found)
    said = [key for key in KEYS if (key,) in document.lines]
    problems += repeated_keys(said, {key: document.where(key) for key in said})
    if problems or entries is None:
        raise CompileError(sorted(problems, key=lambda problem: int(problem.where.rpartition(":")[2])))
    return entries


def _plan(entries: PlanEntries, document: Document, elastic: ElasticEntry | None) -> Plan:
    """Returns the plan of entries; `elastic` has its numbers of ranks."""
    where = document.where
    train = entries.train.placed(where) if entries.train else None
    pipeline = entries.pipeline.rules(where) if entries.pipeline else None
    if pipeline is None and elastic is not None:
        pipeline = elastic.pipeline(entries.ranks, where)
    if train is not None and pipeline is not None:
        train = train.model_copy(update={"accumulate": pipeline.microbatches})
    elif train is not None and train.accumulate > 1:
        place = where("train", "accumulate")
        pipeline = PipelineRules(place, train.accumulate, statistics=MICROBATCH, accumulates=True)
    if train is not None and pipeline is not None and (uneven := _uneven_batch(train, pipeline, where)):
        raise CompileError(uneven)
    if train is not None and elastic is not None:
        elastic.refuse_uneven(train.batch, pipeline.microbatches if pipeline is not None else 1, entries.mesh, where)
    dims = DimRules(
        symbols={
            symbol: SymbolRule(entry.symbol(), where("symbols", symbol)) for symbol, entry in entries.symbols.items()
        },
        inputs={value: InputRule(tuple(dims), where("inputs", value)) for value, dims in entries.inputs.items()},
        batch_dims={name: BatchDim(dim, where("batch_dims", name)) for name, dim in entries.batch_dims.items()},
    )
    return Plan(
        file=document.file,
        ranks=entries.ranks,
        dims=dims,
        placement=tuple(
            PlacementRule(pattern, group.ranks, where("placement", pattern), group.axes, bool(group.role))
            for pattern, group in entries.placement.items()
        ),
        outputs=tuple(
            OutputRule(pattern, delivery.ranks, where("outputs", pattern), delivery.sharded)
            for pattern, delivery in entries.outputs.items()
        ),
        mesh=tuple(entries.mesh.items()),
        roles={name: group.ranks for name, group in entries.roles.items()},
        dataset=_dataset(entries, document),
        sharding=tuple(entry.rule(pattern, where("sharding", pattern)) for pattern, entry in entries.sharding.items()),
        stored=StoredRules(
            tuple(entry.rule(pattern, where("parameters", pattern)) for pattern, entry in entries.parameters.items()),
            **dict(entries.stored),
        ),
        max_reshard_bytes=entries.max_reshard_bytes,
        train=train,
        pipeline=pipeline,
        elastic=Elastic(copies=elastic.every if elastic is not None and elastic.copies else 0),
        precision=entries.precision.placed(where) if entries.precision else None,
        messages=entries.messages.placed(where) if entries.messages else None,
        quantize=tuple(
            QuantizeRule(pattern, blocks, where("quantize", pattern)) for pattern, blocks in entries.quantize.items()
        ),
        context=entries.context.placed(where) if entries.context else None,
        generate=entries.generate.placed(where) if entries.generate else None,
        adapters=tuple(
            AdapterRule(
                name,
                entry,
                None if entry.source is None else Path(document.file).parent / entry.source,
                where("adapters", name),
            )
            for name, entry in entries.adapters.items()
        ),
        experts=tuple(
            ExpertsRule.of(pattern, entry, where("experts", pattern)) for pattern, entry in entries.experts.items()
        ),
        target=tuple(
            TargetRule(pattern, target, where("target", pattern)) for pattern, target in entries.target.items()
        ),
    )


def _uneven_batch(train: TrainRules, pipeline: PipelineRules, where: Callable[..., str]) -> Problem | None:
    """Returns the problem of a batch that cannot be divided into the plan's microbatches; None if it can, or the plan names no batch."""
    batch, parts = train.batch, pipeline.microbatches
    if batch is None or batch % parts == 0:
        return None
    key = "accumulate" if pipeline.accumulates else "microbatches"
    fact = f"a batch of {batch} records cannot be divided into {parts} microbatches"
    law = f"microbatches are equal, and {batch} is not divisible by {parts} ('{key}')"
    near = [size for size in (batch - batch % parts, batch - batch % parts + parts) if size]
    return Problem(
        where("train", "batch"), fact, law, f"choose batch: {' or '.join(map(str, near))}, or another '{key}'"
    )


def _dataset(entries: PlanEntries, document: Document) -> Dataset:
    key = next((key for key in KEYS if (key,) in document.lines), "")
    if not key:
        return Dataset()
    old = full_batch(entries.full_batch) or DatasetEntry({})
    entry = {"dataset": entries.dataset, "dataset_strategy": entries.dataset_strategy}.get(key, old)
    return entry.dataset(document.where(key), {name: document.where(key, name) for name in entry.root})


def _problem(steps: Steps, refused: Refused, value: object, document: Document) -> Problem:
    """Returns a refusal as a problem at its line."""
    at = (*steps, refused.key) if refused.key else steps
    device = meant_target(value) if steps[:1] == ("placement",) else ""
    if device:
        refused = Refused(refused.fact, refused.law, f"write target: {{{steps[1]}: {device}}}; a placement is a rank")
    return Problem.of(refused, document.where(*at), _subject(steps))


_SUBJECTS = {
    **{"symbols": "symbol", "inputs": "input", "batch_dims": "batch dim of", "roles": "role", "mesh": "mesh axis"},
    **{"dataset": "dataset of", "dataset_strategy": "dataset of", "placement": "placement of", "target": "target of"},
    **{"quantize": "quantize of", "adapters": "adapter", "experts": "experts of", "sharding": "sharding of"},
    **{"outputs": "delivery of", "parameters": "parameters of"},
}
"""Maps a key of the plan to what messages call its entries."""


def _subject(steps: Steps) -> str:
    """Returns a description of a path of the plan: `placement of 'conv1'`, `input 'x', dim 2`; empty for the plan itself."""
    match steps:
        case ():
            return ""
        case ("pipeline", "stages", int(index), *_):
            return f"stage {index}"
        case ("train", "parameters", pattern, *inside):
            return f"parameters '{pattern}'{_inside(inside)}"
        case (str(key), name, *inside) if key in _SUBJECTS:
            return f"{_SUBJECTS[key]} '{name}'{_inside(inside)}"
        case _:
            return "'" + ".".join(str(step) for step in steps) + "'"


def _inside(steps: list[str | int]) -> str:
    """Returns a description of a path within an entry: `, input 1, dim 0`, `, 'min'`."""
    match steps:
        case ("in" | "out" as side, index, *rest):
            named = f", {side}put {index}"
        case ("parameters", name, *rest):
            named = f", parameter '{name}'"
        case _:
            named, rest = "", steps
    return named + "".join(f", dim {step}" if isinstance(step, int) else f", '{step}'" for step in rest)
