"""A plan file to a `Plan`: everything that is wrong with it is said at once, each with its line.

plan.yaml:7: placement of 'conv9': rank 5, but there are 5 ranks
  help: choose a rank from 0 to 4, or set 'ranks' to at least 6
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.dataset import KEYS, DatasetEntry, full_batch, said_twice
from partc.compiler.plan.document import Document, parse_document, read_text
from partc.compiler.plan.groups import frame_of
from partc.compiler.plan.pattern import nearest
from partc.compiler.plan.pipeline import MICROBATCH, PipelineEntry, PipelineRules
from partc.compiler.plan.precision import DynamicScaleEntry, PrecisionEntry, low_type
from partc.compiler.plan.rules import (
    Dataset,
    InputRule,
    OutputRule,
    PlacementRule,
    Plan,
    ShardingRule,
    SymbolRule,
)
from partc.compiler.plan.schema import PlanEntries, SymbolEntry
from partc.compiler.plan.sharding import ShardingEntry
from partc.compiler.plan.stages import sizes_of_groups
from partc.compiler.plan.target import TargetRule, meant_target
from partc.compiler.plan.training.initial import InitialEntry
from partc.compiler.plan.training.loop_entries import CheckpointEntry, ClipEntry
from partc.compiler.plan.training.rules import ParameterEntry, TrainEntry, TrainRules
from partc.compiler.plan.violation import Violation, shown
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

__all__ = [
    "Dataset",
    "InputRule",
    "OutputRule",
    "PlacementRule",
    "Plan",
    "ShardingRule",
    "SymbolRule",
    "parse_plan",
    "read_plan",
]

_EXAMPLES = {
    "loss": "write loss: {type: softmax_cross_entropy, logits: logits, labels: label}, or the name of a scalar output",
    "optimizer": "write optimizer: {type: momentum, lr: 0.01, momentum: 0.9}",
}
_FORMS = {
    ("precision",): "write precision: {compute: float16}",
    ("train",): "write train: with loss, optimizer and batch under it",
    ("train", "clip"): "write clip: {norm: 1.0}, the largest global norm, or {value: 0.5}",
    ("train", "checkpoint"): "write checkpoint: {folder: checkpoints, every: 100}",
    ("train", "parameters"): 'write parameters: {"**.bias": {weight_decay: 0}}',
    ("pipeline",): "write pipeline: {microbatches: 4}",
    ("symbols",): "write symbols: {batch: {divisor: 2, max: 64}}",
    ("placement",): "write placement: {conv1: 0, fc: 1}",
    ("sharding",): "write sharding: {fc1: colwise, fc2: rowwise}",
    ("mesh",): "write mesh: {dp: 2, tp: 4}",
    ("inputs",): "write inputs: {x: [batch, 8]}",
    ("target",): "write target: {fc: cuda}",
    (
        "precision",
        "compute",
    ): "write compute: float16, or bfloat16; without 'precision' the model computes in its own types",
    ("precision", "keep"): "write keep: [head]",
    ("precision", "messages"): "write messages: bfloat16, or leave it out",
    ("roles",): "write roles: {ps: [2, 3]}",
    ("train", "parameters", "initial"): "write initial: {normal: 0.01, seed: 7}",
}
"""Remedies by key, without the names that a plan chooses."""
_TRAINING: dict[str, type[BaseModel]] = {
    "parameters": ParameterEntry,
    "clip": ClipEntry,
    "checkpoint": CheckpointEntry,
}
_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "bool_type": "true or false",
    "string_type": "a text",
    "dict_type": "a mapping, 'key: value' on each line",
    "model_type": "a mapping, 'key: value' on each line",
    "model_attributes_type": "a mapping, 'key: value' on each line",
    "list_type": "a list",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
}


def read_plan(path: Path) -> Plan:
    """The plan of a file; CompileError with all problems, their lines under the path as it is given."""
    return parse_plan(read_text(path), str(path))


def parse_plan(text: str, name: str) -> Plan:
    """The plan of a YAML text that messages call `name`; CompileError with all problems in the order of their lines."""
    document = parse_document(text, name)
    problems = list(document.problems)
    entries: PlanEntries | None = None
    if not isinstance(document.data, dict):
        what = (
            "the plan is empty" if document.data is None else f"a plan is a mapping, but this is {shown(document.data)}"
        )
        problems.append(Problem(document.where(), what, help="begin with 'ranks: 2'"))
    else:
        try:
            frame = frame_of(document.data, Path(name).parent, sizes_of_groups(document.data))
            entries = PlanEntries.model_validate(document.data, context=frame)
        except ValidationError as error:
            details = error.errors(include_url=False)
            problems += (_problem(detail, document) for detail in details if detail["loc"] not in document.refused)
    said = [key for key in KEYS if (key,) in document.lines]
    problems += said_twice(said, {key: document.where(key) for key in said})
    if problems or entries is None:
        raise CompileError(sorted(problems, key=lambda problem: int(problem.where.rpartition(":")[2])))
    return _plan(entries, document)


def _plan(entries: PlanEntries, document: Document) -> Plan:
    where = document.where
    train = entries.train.rules(where) if entries.train else None
    pipeline = entries.pipeline.rules(where) if entries.pipeline else None
    if train is not None and pipeline is not None:
        train = replace(train, accumulate=pipeline.microbatches)
    elif train is not None and train.accumulate > 1:
        place = where("train", "accumulate")
        pipeline = PipelineRules(place, train.accumulate, statistics=MICROBATCH, accumulates=True)
    if train is not None and pipeline is not None and (uneven := _uneven_batch(train, pipeline, where)):
        raise CompileError(uneven)
    return Plan(
        file=document.file,
        ranks=entries.ranks,
        symbols={
            symbol: SymbolRule(entry.symbol(), where("symbols", symbol)) for symbol, entry in entries.symbols.items()
        },
        inputs={value: InputRule(tuple(dims), where("inputs", value)) for value, dims in entries.inputs.items()},
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
        max_reshard_bytes=entries.max_reshard_bytes,
        train=train,
        pipeline=pipeline,
        precision=entries.precision.rules(where) if entries.precision else None,
        target=tuple(
            TargetRule(pattern, target, where("target", pattern)) for pattern, target in entries.target.items()
        ),
    )


def _uneven_batch(train: TrainRules, pipeline: PipelineRules, where: Callable[..., str]) -> Problem | None:
    """A batch that cannot be divided into the plan's microbatches; None where it can, or the plan names no batch."""
    batch, parts = train.settings.get("batch"), pipeline.microbatches
    if not isinstance(batch, int) or batch % parts == 0:
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


def _problem(detail: ErrorDetails, document: Document) -> Problem:
    """A problem in the plan's words from what pydantic found."""
    steps = tuple(step for step in detail["loc"] if step != "[key]")
    kind, context = detail["type"], detail.get("ctx", {})
    where, subject = document.where(*steps), _subject(steps)
    violation = context.get("error")
    if isinstance(violation, Violation):
        at = (*steps, violation.key) if violation.key else steps
        problem = violation.at(document.where(*at), subject)
        device = meant_target(detail["input"]) if steps[:1] == ("placement",) else ""
        return (
            replace(problem, help=f"write target: {{{steps[1]}: {device}}}; a placement is a rank")
            if device
            else problem
        )
    if kind == "extra_forbidden":
        return _unknown(where, steps)
    if kind == "missing" and steps[0] == "train":
        about = "; training minimizes it" if steps[-1] == "loss" else ""
        return Problem(document.where("train"), f"{subject} is missing{about}", help=_EXAMPLES.get(str(steps[-1]), ""))
    if kind == "missing" and steps[0] == "precision":
        return Problem(document.where("precision"), f"{subject} is missing", help="write compute: float16, or bfloat16")
    if kind == "missing":
        return Problem(document.where(), "'ranks' is missing", help="begin with the number of ranks, 'ranks: 2'")
    if kind == "greater_than_equal":
        return Problem(where, f"{subject}: expected at least {context['ge']}, but got {detail['input']}")
    if kind == "less_than_equal":
        return Problem(where, f"{subject}: expected at most {context['le']}, but got {detail['input']}")
    if kind in ("greater_than", "less_than"):
        bound = f"above {context['gt']}" if "gt" in context else f"below {context['lt']}"
        return Problem(where, f"{subject}: expected a number {bound}, but got {detail['input']}")
    if kind == "literal_error":
        fact = f"{subject}: expected {context['expected']}, but got {shown(detail['input'])}"
        return Problem(where, fact, help=_form(steps))
    if kind in _EXPECTED:
        fact = f"{subject}: expected {_EXPECTED[kind]}, but got {shown(detail['input'])}"
        return Problem(where, fact, help=_form(steps, detail["input"]))
    return Problem(where, f"{subject}: {detail['msg']}")


def _form(steps: tuple[str | int, ...], value: object = None) -> str:
    """The remedy for a value of another kind, made of that value where it can be meant so; empty where the fact says enough."""
    if steps == ("precision",) and (meant := low_type(value)):
        return f"write precision: {{compute: {meant}}}"
    if steps == ("train", "clip") and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return f"write clip: {{norm: {value}}}, the largest global norm, or {{value: {value}}}, the largest element"
    named = steps[:2] + steps[3:] if len(steps) > 3 and steps[:2] == ("train", "parameters") else steps
    return _FORMS.get(named, "")  # type: ignore[arg-type]


def _unknown(where: str, steps: tuple[str | int, ...]) -> Problem:
    key = str(steps[-1])
    model: type[BaseModel] = PlanEntries
    if steps[0] == "train":
        model = _TRAINING.get(str(steps[1]), TrainEntry) if len(steps) > 2 else TrainEntry
        model = InitialEntry if steps[3:4] == ("initial",) and len(steps) > 4 else model
    elif steps[0] == "pipeline" and len(steps) > 1:
        model = PipelineEntry
    elif steps[0] == "precision":
        model = PrecisionEntry if len(steps) == 2 else DynamicScaleEntry
    elif len(steps) > 1:
        model = ShardingEntry if steps[0] == "sharding" else SymbolEntry
    keys = [field.alias or name for name, field in model.model_fields.items()]
    near = nearest(key, keys, 1)
    remedy = f"the nearest is '{near[0]}'" if near else f"the keys here are {', '.join(keys)}"
    around = "" if len(steps) == 1 else f"{_subject(steps[:-1])}: "
    return Problem(where, f"{around}unknown key '{key}'", help=remedy)


def _subject(steps: tuple[str | int, ...]) -> str:
    """What a path of the plan speaks of: `placement of 'conv1'`, `input 'x', dim 2`."""
    match steps:
        case ("symbols", name):
            return f"symbol '{name}'"
        case ("symbols", name, key):
            return f"symbol '{name}', '{key}'"
        case ("inputs", name):
            return f"input '{name}'"
        case ("inputs", name, index):
            return f"input '{name}', dim {index}"
        case ("roles", name):
            return f"role '{name}'"
        case ("mesh", name):
            return f"mesh axis '{name}'"
        case ("dataset" | "dataset_strategy", name):
            return f"dataset of '{name}'"
        case ("dataset" | "dataset_strategy", name, index):
            return f"dataset of '{name}', dim {index}"
        case ("placement", pattern):
            return f"placement of '{pattern}'"
        case ("target", pattern):
            return f"target of '{pattern}'"
        case ("sharding", pattern, *inside):
            return f"sharding of '{pattern}'{_operand(inside)}"
        case ("outputs", pattern):
            return f"delivery of '{pattern}'"
        case ("pipeline", "stages", int(index), *_):
            return f"stage {index}"
        case ("train", "parameters", pattern, *inside):
            return f"parameters '{pattern}'" + "".join(f", '{key}'" for key in inside)
        case _:
            return "'" + ".".join(str(step) for step in steps) + "'"


def _operand(steps: list[str | int]) -> str:
    """What a path within a strategy speaks of: `, input 1, dim 0`."""
    match steps:
        case ("in" | "out" as side, index, *inside):
            named = f", {side}put {index}"
        case ("parameters", name, *inside):
            named = f", parameter '{name}'"
        case (key, *inside):
            named = f", '{key}'"
        case _:
            return ""
    return named + "".join(f", dim {index}" for index in inside)
