"""Checks the manifest's record of training: names that exist, numbers that the update nodes have, a schedule that can be followed.

outputs    the loss, the metrics and the guard are outputs; there is a guard exactly if steps may be skipped
scalars    the runtime can compute each, and each is one number; every scalar that an update node reads is listed
optimizer  a number that update nodes also have as an attribute equals that attribute, since the runtime derives scalars from it; the
           scalars that they read are the optimizer's, each at its own input
schedule   its least rate is not above the optimizer's
batch      if the settings state one, every input may have this many records
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping

from onnx import AttributeProto, ModelProto, NodeProto
from partc.runtime.artifact.format import MANIFEST, OPTIMIZER, Manifest, Shape, TrainingRecord
from partc.runtime.artifact.graph.onnx_graph import node_title
from partc.runtime.artifact.legal_sizes import wrong_batch
from partc.runtime.artifact.training.lr_schedule import above_base
from partc.runtime.artifact.training.metric_formula import Formula, formula
from partc.runtime.artifact.training.scalars import SCALARS, scalar_name, scalars
from partc.runtime.errors import Violation

_AGAIN = "compile the model again"
_COUNTS = ("step",)
_OF_A_PARAMETER = ("weight_decay", "lr_multiplier")
"""Attributes that a plan may set for each parameter by itself."""
_FED = SCALARS.keys() - {"scale"}
"""Scalars that only the runtime computes; a scale may also be computed from the gradients."""
_ANY = "*"


def check_training(manifest: Manifest, models: Mapping[int, ModelProto]) -> list[Violation]:
    """Violations of a manifest's `training` section, by itself and against the rank files."""
    training = manifest.training
    if training is None:
        replaced = [one for one in manifest.state if one.kind == "parameter" and one.next]
        fact = f"'{replaced[0].next}' takes its place, and the manifest has no training" if replaced else ""
        return [Violation(MANIFEST, fact, f"state '{replaced[0].value}'", help=_AGAIN)] if replaced else []
    schedule = training.settings.schedule
    wrong_rate = above_base(schedule, training.optimizer.lr) if schedule is not None else None
    facts = [
        *_names(manifest, training),
        *_scalars(manifest, training),
        *([f"schedule: {wrong_rate.fact}"] if wrong_rate else ()),
        *(wrong_batch(training.settings.batch, manifest) if training.settings.batch is not None else ()),
    ]
    return [
        *(Violation(MANIFEST, fact, "training", help=_AGAIN) for fact in facts),
        *_optimizer(manifest, training, models),
    ]


def _names(manifest: Manifest, training: TrainingRecord) -> Iterator[str]:
    outputs = {port.name: port for port in manifest.outputs}
    inputs = {port.name for port in manifest.inputs}
    for kind, name in [("loss", training.loss), *(("metric", metric) for metric in training.metrics)]:
        if name not in outputs:
            yield f"the {kind} '{name}' is not an output"
    for name, text in training.formulas.items():
        if name not in training.metrics:
            yield f"the formula '{text}' is of '{name}', which is not a metric"
        try:
            found = formula(text)
        except ValueError as error:
            yield f"the metric '{name}' has the formula '{text}'; {error}"
            continue
        if name in outputs and not _fits(outputs[name].shape, found):
            yield f"the metric '{name}' has the shape {outputs[name].shape}; of '{text}' it is {found.sums}"
    for name, denominator in training.denominators.items():
        if name not in (training.loss, *training.metrics):
            yield f"the denominator '{denominator}' is of '{name}', which is neither the loss nor a metric"
        if denominator not in outputs:
            yield f"the denominator '{denominator}' of '{name}' is not an output"
        elif (
            outputs[denominator].shape != []
            or outputs[denominator].ranks != outputs.get(name, outputs[denominator]).ranks
        ):
            yield f"the denominator '{denominator}' of '{name}' is not one number on the ranks that '{name}' is delivered to"
    for name in training.sums:
        if name not in (training.loss, *training.metrics):
            yield f"'{name}' is a sum over records, and neither the loss nor a metric"
    yield from (f"the fixed input '{name}' is not an input" for name in training.fixed if name not in inputs)
    said = training.settings.on_nonfinite
    if (said == "skip") != bool(training.guard):
        there = f"the guard is '{training.guard}'" if training.guard else "there is no guard"
        yield f"{there}, and 'on_nonfinite' is {said!r}"
    if training.guard and [*range(manifest.ranks)] != sorted(
        outputs[training.guard].ranks if training.guard in outputs else []
    ):
        yield f"the guard '{training.guard}' is not an output that every rank has"


def _fits(shape: Shape, found: Formula) -> bool:
    """Whether a shape is that of a vector with a number of sums that the formula accepts."""
    return shape is not None and len(shape) == 1 and isinstance(shape[0], int) and found.fits(shape[0])


def _scalars(manifest: Manifest, training: TrainingRecord) -> Iterator[str]:
    inputs = {port.name: port for port in manifest.inputs}
    hyper, known = training.optimizer.numbers, _scalar_names(training)
    for name in training.scalars:
        if name in inputs and inputs[name].shape != []:
            yield f"the scalar '{name}' is an input of shape {inputs[name].shape}; it is one number"
        if name in _COUNTS:
            continue
        if name not in known:
            yield f"the runtime knows no scalar '{name}'; it knows {', '.join([*known, *_COUNTS])}"
            continue
        try:
            scalars([name], 0, hyper)
        except KeyError as error:
            yield f"the scalar '{name}' is computed from {error}, which the optimizer does not have"
    if len({*training.scalars}) < len(training.scalars):
        yield f"its scalars are {', '.join(training.scalars)}; each is listed once"


def _optimizer(manifest: Manifest, training: TrainingRecord, models: Mapping[int, ModelProto]) -> Iterator[Violation]:
    own = {of: one.hyper for of, one in {"": training.optimizer, **training.optimizer.others}.items()}
    known = _scalar_names(training)
    state = {record.value for record in manifest.state}  # a parameter may have the name of a scalar
    for file, model in {manifest.program(rank): model for rank, model in models.items()}.items():
        inputs = {one.name: one.input for one in model.functions if one.domain == OPTIMIZER}
        for node in model.graph.node:
            if node.domain == OPTIMIZER:
                lost = sorted({*node.input} & known.keys() - {*training.scalars} - state)
                unlisted = [f"it reads '{name}', which is not a scalar of the training" for name in lost]
                read = {known[name] for name in node.input if name in known and name not in state} - {_ANY}
                taken = dict(zip(inputs.get(node.op_type, ()), node.input, strict=False))
                fed = {name: taken[name] for name in _FED & taken.keys() - state}
                wrong = [[*_other_numbers(node, of, own[of], read), *_other_scalars(fed, of)] for of in own]
                for fact in [*min(wrong, key=len), *unlisted]:
                    yield Violation(file, fact, node_title(node), help=_AGAIN)


def _scalar_names(training: TrainingRecord) -> dict[str, str]:
    """Maps the name of each scalar that the runtime can compute to its optimizer; scalars that all optimizers share belong to any."""
    names = ("", *training.optimizer.others)
    return {
        scalar_name(of, scalar): _ANY if scalar_name(_ANY, scalar) == scalar else of
        for of in names
        for scalar in SCALARS
    }


def _other_numbers(node: NodeProto, of: str, own: Mapping[str, float], read: Collection[str]) -> Iterator[str]:
    """Why a node is not a valid update of an optimizer: wrong attributes, or another optimizer's scalars."""
    name = _title(of)
    numbers = {f"one_minus_{key}": 1 - number for key, number in own.items()}
    numbers |= {f"minus_{key}": -number for key, number in own.items()}
    numbers |= {key: number for key, number in own.items() if key not in _OF_A_PARAMETER}
    for one in node.attribute:
        if one.type == AttributeProto.FLOAT and one.name in numbers and one.f != _rounded(numbers[one.name]):
            yield f"its {one.name} is {one.f:g}, and that of {name} {numbers[one.name]:g}"
    for other in sorted({*read} - {of}):
        yield f"it reads scalars of {_title(other)}, and its numbers are those of {name}"


def _other_scalars(fed: Mapping[str, str], of: str) -> Iterator[str]:
    """Yields the scalar inputs where a node reads another value than the optimizer's scalar; `fed` maps each scalar to the value read."""
    for scalar, name in fed.items():
        if name != scalar_name(of, scalar):
            yield f"it reads '{name}' as '{scalar}', which is the scalar '{scalar_name(of, scalar)}'"


def _title(optimizer: str) -> str:
    return f"the optimizer '{optimizer}'" if optimizer else "the training's optimizer"


def _rounded(number: float) -> float:
    """Rounds to float32, the type of attributes; NaN where the number is too large."""
    try:
        found: float = struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return float("nan")
    return found
