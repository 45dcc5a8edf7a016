"""The program before any pass: the model, the plan and the model's declarations, as they were loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partc.compiler.annotations.read import read
from partc.compiler.frontend.names import node_paths
from partc.compiler.frontend.source import Source
from partc.compiler.ir.graph import OWN_NAME, name_of
from partc.compiler.ir.program import Loaded, Lowered, Scheduled
from partc.compiler.ir.training import ProgramKind
from partc.compiler.plan.dataset import in_order
from partc.compiler.plan.rules import Dataset, Plan


def start(
    source: Source,
    plan: Plan | None,
    name: str,
    configuration: str | None = None,
    *,
    kind: ProgramKind = ProgramKind.STEP,
    strict: bool = False,
    beside: Mapping[ProgramKind, Lowered] | None = None,
    size: int = 0,
) -> Loaded:
    """The program before any pass. Without a plan the model's own annotations are one, else all runs on one rank.

    Of several device configurations the one called `configuration` is meant, or the first; "none" ignores annotations. Of a
    plan that trains, `kind` says which of its programs is meant: each has a model of its own, and the others are over the tensors of the
    programs `beside` it; `size` is that of a narrow program. `strict` is as `compile_model` says.
    """
    annotated = read(source.model, name, configuration)
    declared = source.declared
    if annotated:
        declared = replace(declared, symbols={**annotated.symbols, **declared.symbols}, annotations=annotated)
    if plan is None:
        plan = annotated.plan() if annotated else Plan.whole()
    if annotated:
        plan = replace(plan, outputs=(*annotated.outputs, *plan.outputs))
    plan = replace(plan, dataset=_arriving(source, plan))
    if kind is ProgramKind.STREAMED_EVALUATION and beside:
        plan = _of_forward_passes(plan, beside[ProgramKind.STEP])
    model = source.model
    weights: tuple[str, ...] = ()
    if plan.generate is not None:
        model = source.model.clone()
    if plan.train is not None:
        from partc.compiler.training.trainable import trainable_names

        model, weights = source.model.clone(), tuple(trainable_names(source.model))
    paths = node_paths(model)
    file_names = {path: str(node.meta.get(OWN_NAME) or path) for node, path in paths.items()}
    return Loaded(
        name=name,
        model=model,
        plan=plan,
        declared=declared,
        paths=paths,
        file_names=file_names,
        kind=kind,
        trainable=weights,
        strict=strict,
        size=size,
        other_programs=beside or {},
        warnings=declared.warnings,
    )


def _of_forward_passes(plan: Plan, step: Lowered) -> Plan:
    """The plan of an evaluation in microbatches; a model of one size has that of the step's microbatches."""
    assert plan.pipeline is not None
    assert plan.train is not None
    assert isinstance(step, Scheduled)
    sizes = [value.shape[dim] for value, dim in step.batch_dims.items() if value.shape is not None]
    is_fixed = any(isinstance(size, int) for size in sizes)
    rules = plan.pipeline.of_forward_passes(plan.pipeline.microbatches if is_fixed else step.working_groups)
    return replace(plan, pipeline=rules, train=plan.train.model_copy(update={"accumulate": rules.microbatches}))


def _arriving(source: Source, plan: Plan) -> Dataset:
    """How inputs arrive: as the plan says, else as the model does."""
    said = plan.dataset if plan.dataset.where or source.declared.dataset is None else source.declared.dataset
    own = [name_of(value) for value in source.model.graph.inputs]
    loss = plan.train.loss if plan.train is not None and plan.train.loss.type != "output" else None
    labels = [loss.labels] if loss is not None and loss.labels not in own else []
    return in_order(said, [*own, *labels], len(own))
