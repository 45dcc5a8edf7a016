"""Makes a model one that is trained: training forms of its nodes, the loss and the metrics in place of its outputs.

This happens to the single-device model, before anything is placed or cut, so that all of it is placed and cut like the rest. The
evaluation of a model is the same with its nodes as they are, and without a backward pass.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import nn
from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.pattern import compile_pattern, nearest
from partc.compiler.plan.training import TrainRules
from partc.compiler.training.losses import add_loss
from partc.compiler.training.metrics import add_metric
from partc.compiler.training.modes import STEP, to_evaluation, to_training
from partc.compiler.training.training import Learned, Part, Training

LEARNED = "partc.learned"
"""Key of `ir.Value.meta`: whether a loader knows that a weight is learned, or that it is not."""


def learned_names(model: ir.Model) -> list[str]:
    """The weights that training changes: the parameters of the model's modules; of a file, floating-point tensors of several numbers."""
    statistics = set(_statistics(model.graph))
    weights = [value for value in model.graph.initializers.values() if value not in statistics]
    told = any(isinstance(value, nn.Parameter) or LEARNED in value.meta for value in weights)
    return [str(value.name) for value in weights if (_is_told(value) if told else _is_likely(value))]


def attach(model: ir.Model, rules: TrainRules, learned: list[str], *, cut: bool, part: Part) -> Training:
    """Changes `model` to give the loss and the metrics; what is said of its training.

    `learned`: the weights that may be; `cut`: whether operators run on several ranks. CompileError for patterns that match nothing.
    """
    graph = model.graph
    how = _learned(rules, learned)
    statistics: dict[ir.Value, ir.Value | None] = {}
    scalars: list[str] = []
    if not part.backward:
        to_evaluation(model)
        statistics.update(dict.fromkeys(_statistics(graph)))
    else:
        modes = to_training(model, cut=cut, seed=rules.seed, frozen=lambda name: name in how and how[name].frozen)
        statistics.update(dict.fromkeys(_statistics(graph)))
        statistics.update(modes.statistics)
        scalars += [STEP] if modes.needs_step else []
    loss = add_loss(model, rules.loss, rules.where)
    metrics = [add_metric(model, name, metric, rules.where, rules.loss) for name, metric in rules.metrics.items()]
    graph.outputs[:] = list(dict.fromkeys([loss, *metrics]))
    _drop_unread(graph, {value for value in statistics.values() if value is not None})
    kept = {graph.initializers[name]: one for name, one in how.items() if name in graph.initializers}
    return Training(
        loss=loss,
        optimizer=rules.optimizer,
        parameters=kept,
        statistics=statistics,
        metrics=tuple(str(value.name) for value in metrics),
        bucket_bytes=rules.bucket_bytes,
        clip_norm=rules.clip_norm,
        clip_value=rules.clip_value,
        per_rank_mean=rules.per_rank_mean,
        shard=rules.shard,
        scalars=tuple(scalars),
        schedule=rules.schedule,
        settings=rules.settings,
        accumulate=rules.accumulate,
        mean=rules.loss.reduction == "mean",
        part=part,
    )


def _learned(rules: TrainRules, names: list[str]) -> dict[str, Learned]:
    """How each parameter is learned: of all rules that match, the later wins, key by key."""
    found = {name: {"frozen": False, "weight_decay": None, "lr": 1.0} for name in names}
    problems = []
    for rule in rules.parameters:
        matches = compile_pattern(rule.pattern).matches
        hit = [name for name in names if matches(name)]
        said = {"frozen": rule.frozen, "weight_decay": rule.weight_decay, "lr": rule.lr}
        for name in hit:
            found[name] |= {key: value for key, value in said.items() if value is not None}
        if not hit:
            close = ", ".join(f"'{name}'" for name in nearest(rule.pattern, names))
            help_ = f"the nearest are {close}" if close else "the model has no parameters"
            problems.append(Problem(rule.where, f"'{rule.pattern}' matches no parameter of the model", help=help_))
    if problems:
        raise CompileError(problems)
    return {name: Learned(**said) for name, said in found.items()}  # type: ignore[arg-type]


def _is_told(value: ir.Value) -> bool:
    known = value.meta.get(LEARNED)
    if known is not None:
        return bool(known)
    return isinstance(value, nn.Parameter) and _is_floating(value) and bool(getattr(value, "learned", True))


def _is_likely(value: ir.Value) -> bool:
    return _is_floating(value) and value.shape is not None and value.shape.rank() > 0 and value.shape.numpy() != (1,)


def _is_floating(value: ir.Value) -> bool:
    dtype = value.dtype or (value.const_value.dtype if value.const_value is not None else None)
    return dtype is not None and dtype.is_floating_point()


def _statistics(graph: ir.Graph) -> list[ir.Value]:
    """The running statistics of normalizations, as far as they are weights."""
    norms = [node for node in graph if node.op_type == "BatchNormalization"]
    read = [value for node in norms for value in node.inputs[3:5]]
    return list(dict.fromkeys(value for value in read if value is not None and value.is_initializer()))


def _drop_unread(graph: ir.Graph, used: set[ir.Value]) -> None:
    """Takes out nodes that neither the loss nor a metric nor running statistics need, and then inputs that nobody reads."""
    used = {*graph.outputs, *used}
    for node in reversed(list(graph)):
        if not any(out in used or out.uses() for out in node.outputs):
            graph.remove(node, safe=True)
    for value in [value for value in graph.inputs if not value.uses() and value not in used]:
        graph.inputs.remove(value)
