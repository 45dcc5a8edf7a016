"""Turns a model into one that is trained: training forms of its nodes, and the loss and the metrics in place of its outputs.

This happens to the single-device model, before anything is placed or sharded, so that all of it is placed and sharded like the rest. The
evaluation of a model has its nodes unchanged, and no backward pass. The loss and the metrics of a plan become nodes of the single-device
model, so a mean is over the whole batch for any sharding.

The module refuses a training that torch would do differently from the graph: with hooks, changed buffers, a `torch.autograd.Function`. A
loader writes such facts that are not in the graph into the model's metadata (`UNTRAINABLE`). On an Identity after such a function a loader
notes the function's name (`OWN_BACKWARD`): the derivative of the function's ops would be another one; for `Round` it is zero, where a
straight-through backward passes the cotangent on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import onnx_ir as ir
from partc.compiler.analysis.bindings import promised
from partc.compiler.analysis.part_symbols import part_facts
from partc.compiler.analysis.shape_rules import Known
from partc.compiler.autodiff.reach import followed_values
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.names import node_paths
from partc.compiler.ir.computed import DrawnTensor
from partc.compiler.ir.graph import OWN_BACKWARD, UNTRAINABLE, drop_unread, name_of, operands_of, reads_of
from partc.compiler.ir.program import Loaded, Prepared
from partc.compiler.ir.training import (
    BatchRecords,
    ModelOutputs,
    ParameterOptions,
    ProgramKind,
    Training,
    TrainingNotes,
    Untrained,
)
from partc.compiler.ops.families.neural.dropout import DROPOUT
from partc.compiler.ops.registry import draws, stops_gradient
from partc.compiler.plan.pattern import compile_pattern
from partc.compiler.plan.pipeline import PipelineRules
from partc.compiler.plan.rules import batch_shards
from partc.compiler.plan.training.losses import Loss
from partc.compiler.plan.training.metric import Metric
from partc.compiler.plan.training.metrics import METRICS, OutputMetric
from partc.compiler.plan.training.optimizer import Optimizer
from partc.compiler.plan.training.rules import TrainRules
from partc.compiler.plan.training.usual_names import known_type, usual_names
from partc.compiler.rewrite.batch_norm import BatchSplit
from partc.compiler.rewrite.gradient_forms import give_gradient_forms, in_parts, split_sequences
from partc.compiler.rewrite.local_maps import enter_parameters, refuse_modes
from partc.compiler.rewrite.opset import cuts
from partc.compiler.rewrite.train_mode import STEP, to_evaluation, to_training
from partc.compiler.training.graph_appender import DENOMINATOR, GraphAppender, Inferred
from partc.compiler.training.microbatch_model import PART
from partc.compiler.training.shared import parted, separate_shared
from partc.compiler.training.trainable import candidates, running_statistics
from partc.runtime.artifact.format import Law
from partc.runtime.spellings import nearest
from partc.runtime.units import first_of


def add_loss(
    model: ir.Model,
    loss: Loss,
    where: str = "train.loss",
    known: Known = MappingProxyType({}),
    shards: int = 1,
    inferred: Inferred | None = None,
) -> ir.Value:
    """Adds the loss as a scalar in float32 and returns it: an output `loss` added to the graph, or the model's own output.

    `known`: the promises about the inputs' dims; `shards`: the number of shards of a batch whose means are the mean's terms; `inferred`: as
    in `GraphAppender`. Raises CompileError if the model lacks values that the loss names.
    """
    return loss.add(GraphAppender(model, "loss", where, known, inferred), shards)


def add_metric(
    model: ir.Model,
    name: str,
    metric: Metric,
    where: str = "train.metrics",
    of: Loss | None = None,
    known: Known = MappingProxyType({}),
    inferred: Inferred | None = None,
) -> ir.Value:
    """Adds the metric, or its sums, as a scalar in float32 and returns it: an output `name` added to the graph, or the model's own output.

    Keys that the metric does not set are those of the loss `of`; `known`: the promises about the inputs' dims, `inferred`: as in
    `GraphAppender`. Raises CompileError if the model lacks values that the metric names.
    """
    to, metric = GraphAppender(model, name, where, known, inferred), meant(model, metric, where)
    if of is not None:
        metric = metric.filled(to, of)
    if missing := metric.missing:
        fact = f"the metric '{name}' lacks {' and '.join(missing)}"
        raise to.error(fact, "the loss does not say them", "say them here")
    return metric.add(to)


def meant(model: ir.Model, metric: Metric, where: str) -> Metric:
    """Returns the metric; a word that is not a model output is taken as a type's usual name; raises CompileError for other words."""
    outputs = [name_of(value) for value in model.graph.outputs]
    if not isinstance(metric, OutputMetric) or metric.output in outputs:
        return metric
    kind = METRICS.get(str(known_type(metric.output, METRICS)))
    if kind is None:
        raise CompileError(Problem(where, *_unknown(metric.output or "", outputs)))
    return kind.model_validate(kind.name_options(str(metric.output)))


def _unknown(name: str, outputs: Sequence[str]) -> tuple[str, str, str]:
    types = [one for one in METRICS if one != "output"]
    close = nearest(name, [*outputs, *types, *usual_names(METRICS)])
    law = f"the metrics are {', '.join(types)}; the model's outputs are {', '.join(map(repr, outputs))}"
    return (
        f"'{name}' is no metric and no output of the model",
        law,
        f"say '{known_type(close[0], METRICS)}'"
        if close
        else "name one of them, or compute it in the model as an output of one float",
    )


_LAW = "its backward is Python, and a gradient would be that of the ops of its forward"
_HELP = (
    "write it in torch's operators, straight through as `x + (f(x) - x).detach()`, or freeze the parameters before it"
)


def refuse_untrainable(model: ir.Model, training: Training, paths: Mapping[ir.Node, str]) -> None:
    """Raises CompileError with all reasons for which torch would train the model differently from its graph."""
    problems = [*_noted(model), *_own_backward(model.graph, training, paths)]
    if problems:
        raise CompileError(problems)


def _noted(model: ir.Model) -> list[Problem]:
    """Returns the problems that the model's loader has written into its metadata."""
    try:
        noted = json.loads(model.metadata_props.get(UNTRAINABLE, "[]"))
        return [Problem(*map(str, one)) for one in noted]
    except (ValueError, TypeError) as error:
        fact, law = f"its metadata '{UNTRAINABLE}' is broken", " ".join(str(error).split())
        raise CompileError(Problem("the model", fact, law, "export the model again with `partc export`")) from None


def _own_backward(graph: ir.Graph, training: Training, paths: Mapping[ir.Node, str]) -> list[Problem]:
    """Returns a problem for each Python function through which a gradient flows from the loss to a parameter."""
    if not any(OWN_BACKWARD in node.metadata_props for node in graph):
        return []
    reads = reads_of(graph)
    followed, reaching = followed_values(reads, training), {training.loss}
    problems: list[Problem] = []
    for node, read in reversed(reads.items()):
        if stops_gradient(node) or reaching.isdisjoint(node.outputs):
            continue
        reaching.update(read)
        if OWN_BACKWARD in node.metadata_props and not followed.isdisjoint(read):
            fact = f"a gradient flows through the torch.autograd.Function '{node.metadata_props[OWN_BACKWARD]}'"
            problems.append(Problem(paths[node], fact, _LAW, _HELP))
    return problems[::-1]


def add_training(program: Loaded) -> Prepared:
    """Pass: returns the model with the loss and the metrics, and `training` filled; `training` is None if the plan does not train."""
    plan, rules, model = program.plan, program.plan.train, program.model
    if rules is None:
        return program.into(Prepared, training=None)
    axes = [axis for axis, _ in plan.mesh]
    shard = rules.optimizer.shard
    if isinstance(shard, str) and shard not in axes:
        fact = f"the optimizer is shared out over '{shard}', and the mesh has no such axis"
        help_ = (
            f"its axes are {', '.join(axes)}"
            if axes
            else "add a mesh to the plan, such as {dp: 4}, or write shard: true"
        )
        raise CompileError(Problem(rules.where(), fact, help=help_))
    said = plan.dims.batch_dims.get(rules.loss.labels)
    if rules.loss.per_rank_mean and said is not None and said.dim != 0:
        fact = f"'{rules.loss.labels}' does not hold its records along dim 0, and the loss is the sum over ranks of their means"
        help_ = "transpose the labels and what they are compared with in the model, or take `reduction: mean`"
        raise CompileError(Problem(said.where, fact, "each rank's mean is of records that follow each other", help_))
    # An evaluation is of all its records, however they are dealt out.
    alone = not rules.loss.per_rank_mean or program.kind.evaluates
    shards = 1 if alone else batch_shards(plan, rules.loss.labels)
    split: BatchSplit | None = None
    if plan.pipeline is not None and plan.pipeline.parts:
        shards = 0
        if plan.pipeline.statistics == "part":
            split = _split_of(rules, plan.pipeline)
    cut = cuts(plan, program.declared)
    known = part_facts(model.graph, rules, program.kind, plan.dims.batch_dims, promised(program))
    precision = plan.precision
    if precision is not None and precision.scale is not None and precision.scale.dynamic:
        rules = rules.model_copy(update={"on_nonfinite": "skip"})
    metrics = {name: meant(model, metric, rules.where("metrics")) for name, metric in rules.metrics.items()}
    rules = rules.model_copy(update={"metrics": metrics})
    operands = {path: operands_of(node) for node, path in program.paths.items()}
    apart = parted(model, program.trainable) if program.kind is ProgramKind.STEP else []
    step = program.other_programs.get(ProgramKind.STEP)
    outputs = None if step is None or step.training is None else step.training.untrained.outputs
    training = add_loss_and_metrics(
        model,
        rules,
        list(program.trainable),
        cut=cut,
        part=program.kind,
        known=known,
        shards=shards,
        outputs=outputs,
        split=split,
    )
    training = replace(training, untrained=replace(training.untrained, operands=operands), precision=precision)
    plan, paths = replace(plan, train=rules, outputs=()), node_paths(model)
    if program.kind is ProgramKind.STEP:
        refuse_untrainable(model, training, paths)
    names = [name_of(value) for value in candidates(program.model)]
    idle = (
        _idle(rules, [*names, *(name_of(value) for value in training.parameters)])
        if program.kind is ProgramKind.STEP
        else []
    )
    drawn = _drawn(model, paths) if program.kind is ProgramKind.STEP else []
    warnings = (*program.warnings, *apart, *idle, *drawn)
    return program.into(Prepared, plan=plan, paths=paths, training=training, warnings=warnings)


def _split_of(rules: TrainRules, pipeline: PipelineRules) -> BatchSplit:
    """Returns the parts of a batch; raises CompileError if the plan does not give the number of records."""
    if rules.batch is None:
        fact, law = (
            "'statistics: part', and the plan has no 'batch'",
            "a normalization divides a batch into parts of a known size",
        )
        raise CompileError(Problem(pipeline.where, fact, law, f"write train: {{batch: {8 * pipeline.parts}}}"))
    return BatchSplit(pipeline.parts, rules.batch // pipeline.parts)


def add_loss_and_metrics(
    model: ir.Model,
    rules: TrainRules,
    trainable: list[str],
    *,
    cut: bool,
    part: ProgramKind,
    known: Known,
    shards: int = 1,
    outputs: ModelOutputs | None = None,
    split: BatchSplit | None = None,
) -> Training:
    """Changes `model` to compute the loss and the metrics; returns its `Training`.

    `trainable`: the weights that may be trained; `cut`: whether operators run on several ranks; `known`: the promises about inputs' dims;
    `shards`: the number of shards of a batch that have means of their own; `outputs`: those of the same model in another program; `split`:
    the parts of which batch normalizations take their statistics. Raises CompileError for patterns that match nothing.
    """
    graph = model.graph
    split_sequences(model)
    trainable, shared = separate_shared(model, trainable, _shared_by(rules))
    others = [name_of(value) for value in candidates(model) if value.name not in trainable]
    how = _parameter_options(rules, trainable, others)
    _begin_anew(graph, rules, list(how))
    statistics: dict[ir.Value, ir.Value | None] = {}
    scalars: list[str] = []
    if part.evaluates:
        to_evaluation(model)
        statistics.update(dict.fromkeys(running_statistics(graph)))
    else:
        refuse_modes(model, node_paths(model))
        modes = to_training(
            model,
            cut=cut or split is not None,
            seed=rules.seed,
            frozen=lambda name: name in how and how[name].frozen,
            known=known,
            split=split,
        )
        statistics.update(dict.fromkeys(running_statistics(graph)))
        statistics.update(modes.statistics)
        scalars += [STEP] if modes.needs_step else []
        labels = (rules.loss.labels, *(getattr(metric, "labels", None) for metric in rules.metrics.values()))
        if modes.needs_step and STEP in labels:
            raise CompileError(_taken(STEP))
    if part.backward:
        give_gradient_forms(model, lambda table: table.name in how and not how[name_of(table)].frozen)
    known_outputs = outputs.types if outputs is not None and outputs.settled(known) else {}
    inferred: Inferred = {
        value: known_outputs[name_of(value)] for value in graph.outputs if name_of(value) in known_outputs
    }
    loss = add_loss(model, rules.loss, rules.where("loss"), known, shards, inferred)
    metrics = [
        add_metric(model, name, metric, rules.where("metrics"), rules.loss, known, inferred)
        for name, metric in rules.metrics.items()
    ]
    told = () if part is ProgramKind.TOTALS else (loss, *metrics)
    denominators = {one: one.meta[DENOMINATOR] for one in told if DENOMINATOR in one.meta}
    graph.outputs[:] = list(dict.fromkeys([loss, *metrics, *denominators.values()]))
    drop_unread(graph, {value for value in statistics.values() if value is not None})
    kept = {graph.initializers[name]: one for name, one in how.items() if name in graph.initializers}
    training = Training(
        rules,
        loss,
        kept,
        statistics,
        metrics=tuple(name_of(value) for value in metrics),
        denominators={name_of(one): name_of(made) for one, made in denominators.items()},
        scalars=tuple(scalars),
        records=BatchRecords(shards=max(1, shards)),
        notes=TrainingNotes(shared=tuple(one.text(own) for one, own in shared)),
        untrained=Untrained(outputs=ModelOutputs(known, {name_of(value): one for value, one in inferred.items()})),
    )
    made = ({*training.fed} - {STEP}) | ({PART} if scalars and rules.accumulate > 1 else set[str]())
    if taken := [_taken(name_of(value)) for value in graph.inputs if value.name in made]:
        raise CompileError(taken)
    if cut and part.backward:
        in_parts(model, training, known)
        enter_parameters(model, {value: one for value, one in kept.items() if not one.frozen})
    return training


def _taken(name: str) -> Problem:
    """Returns the refusal of a user's input that has the name of one of the training's own inputs."""
    law = f"'{name}' is a number that the training itself gives its programs in each step"
    return Problem(
        f"'{name}'",
        "names an input of the training",
        law,
        "give the model's input, or that of the labels, another name",
    )


def _shared_by(rules: TrainRules) -> Callable[[str], bool | None]:
    """Returns a function of a weight's name: whether the weight stays one parameter. The last matching rule wins; a frozen weight stays."""
    patterns = [(rule, compile_pattern(pattern)) for pattern, rule in rules.parameters.items()]

    def said(name: str) -> bool | None:
        hit = [rule for rule, pattern in patterns if pattern.matches(name)]
        frozen = next((rule.frozen for rule in reversed(hit) if rule.frozen is not None), False)
        return next((rule.shared for rule in reversed(hit) if rule.shared is not None), True if frozen else None)

    return said


def _parameter_options(rules: TrainRules, names: list[str], others: list[str]) -> dict[str, ParameterOptions]:
    """Maps each parameter to its options: among all matching rules the later wins, key by key.

    One of the `others` becomes a parameter if a rule of its whole name says `frozen: false`.
    """
    freed = {pattern for pattern, rule in rules.parameters.items() if rule.frozen is False}
    options: dict[str, dict[str, Any]] = {
        name: {"frozen": False, "weight_decay": None, "lr": 1.0, "optimizer": None, "staleness": 0}
        for name in (*names, *(name for name in others if name in freed))
    }
    places = {name: dict[str, str]() for name in options}
    problems = [*_rates_without_base(rules)]
    for pattern, rule in rules.parameters.items():
        hit, kept = _matching(pattern, list(options)), _matching(pattern, others)
        keys = ("frozen", "weight_decay", "lr", "optimizer", "staleness")
        said = {key: value for key in keys if (value := getattr(rule, key)) is not None}
        for name in hit:
            options[name] |= said
            places[name] |= dict.fromkeys(said, rules.where("parameters", pattern))
        if not hit and not (kept and rule.frozen) and (kept or not _is_open(pattern)):
            problems.append(_unmatched(rules, pattern, list(options), kept))
    problems += _still(rules, options)
    problems += _late(rules, options, places)
    if problems:
        raise CompileError(problems)
    return {name: ParameterOptions(**said, where=places[name]) for name, said in options.items()}


def _rates_without_base(rules: TrainRules) -> Iterator[Problem]:
    """Yields a problem for each rule whose optimizer's rate has no proportion to that of the schedule, which is 0."""
    for pattern, rule in rules.parameters.items():
        own = rule.optimizer
        if own is not None and own.is_scheduled and own.lr > 0 and rules.optimizer.lr == 0:
            fact = f"'{pattern}': the optimizer's 'lr' is {own.lr:g}, and that of train.optimizer 0"
            law = "a schedule gives the rate of train.optimizer, which others follow in proportion of their 'lr'"
            yield Problem(
                rules.where("parameters", pattern),
                fact,
                law,
                "give train.optimizer an 'lr' above 0, and freeze what it must not change",
            )


def _begin_anew(graph: ir.Graph, rules: TrainRules, names: list[str]) -> None:
    """Gives parameters the plan's initial values; the later matching rule wins."""
    for pattern, rule in rules.parameters.items():
        if rule.initial is None:
            continue
        matches = compile_pattern(pattern).matches
        for name in names:
            value = graph.initializers[name]
            if matches(name) and value.dtype is not None and value.shape is not None and value.shape.is_static():
                law = rule.initial.law(name)
                value.const_value = DrawnTensor(partial(_same, law), value.dtype, value.shape.numpy(), always=True)


def _same(law: Law) -> Law:
    return law


def _still(rules: TrainRules, found: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    """Yields a problem for the first parameter whose optimizer would divide by a rate of 0."""
    for name, said in found.items():
        optimizer: Optimizer = said["optimizer"] or rules.optimizer
        if not optimizer.is_scheduled and optimizer.lr * said["lr"] == 0 and not said["frozen"]:
            law = f"{optimizer.type} divides by its rate"
            yield Problem(rules.where(), f"the learning rate of '{name}' is 0", law, f"write {name}: {{frozen: true}}")
            return


def _late(
    rules: TrainRules, found: Mapping[str, Mapping[str, Any]], places: Mapping[str, Mapping[str, str]]
) -> Iterator[Problem]:
    """Yields, for each line of the plan, a problem for the first parameter with late updates, if a step may change nothing."""
    told = set[str]()
    for name, said in found.items():
        if not (rules.guarded and said["staleness"] and not said["frozen"]) or places[name]["staleness"] in told:
            continue
        told.add(places[name]["staleness"])
        fact = f"'{name}' is updated late, and a step whose gradients are not finite changes nothing"
        law = "such a gradient would stay in the queue"
        help = "leave out 'staleness', or take 'on_nonfinite: stop' and no dynamic loss scale"
        yield Problem(places[name]["staleness"], fact, law, help)


def _is_open(pattern: str) -> bool:
    """Whether a pattern is for all modules, so that it may match nothing, such as `**.bias` in a model without biases."""
    return "**" in pattern


def misnamed(rules: TrainRules, names: Sequence[str]) -> list[Problem]:
    """Returns the problems of parameter rules that match none of a module's tensors; used if they are known before the export."""
    wrong = [pattern for pattern in rules.parameters if not _is_open(pattern) and not _matching(pattern, names)]
    return [_unmatched(rules, pattern, list(names), []) for pattern in wrong]


def _idle(rules: TrainRules, names: Sequence[str]) -> list[str]:
    """Returns warnings of rules that are for all modules and match no parameter."""
    return [
        f"{rules.where('parameters', pattern)}: '{pattern}' matches no parameter of the model, and changes nothing"
        for pattern in rules.parameters
        if _is_open(pattern) and not _matching(pattern, names)
    ]


def _drawn(model: ir.Model, paths: Mapping[ir.Node, str]) -> list[str]:
    """Returns a warning of random numbers other than the masks of a Dropout."""
    names = [paths[node] for node in model.graph if draws(node) and node.op_type != DROPOUT]
    if not names:
        return []
    text = f"random numbers are drawn in evaluations, too ({first_of(names)})"
    return [f"{text}; write a mask for training alone, as of a path that is dropped, as a Dropout of ones"]


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    matches = compile_pattern(pattern).matches
    return [name for name in names if matches(name)]


def _unmatched(rules: TrainRules, pattern: str, names: list[str], kept: list[str]) -> Problem:
    fact, where = f"'{pattern}' matches no parameter of the model", rules.where("parameters", pattern)
    if kept:
        law = f"it matches '{kept[0]}', a tensor of floats that is not trainable"
        return Problem(where, fact, law, f'"{kept[0]}": {{frozen: false}} makes it trainable')
    close = ", ".join(f"'{name}'" for name in nearest(pattern, names))
    if not names:
        return Problem(where, fact, help="the model has no parameters")
    return Problem(where, fact, help=f"the nearest are {close}" if close else "`partc plan MODEL` lists all names")
