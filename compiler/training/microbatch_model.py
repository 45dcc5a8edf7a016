"""Pass: a program that runs a batch in microbatches gives, over all of them, the outputs of the whole batch.

If a microbatch needs a number of the whole batch that depends only on the inputs, such as the weight of all its labels, the number becomes
an input of the microbatches' programs and an output of an additional program, `totals`, which runs first. Each output is a sum or a mean
over the microbatches, masks of a dropout are those that the whole batch has at the microbatch's records, and symbols, which the plan
promises for the whole batch, are those of a microbatch.

    loss = sum / weight_sum        part 0:  sum_0 / weight_sum    +    part 1:  sum_1 / weight_sum

A node that combines records of different microbatches in another way is named in a warning: it then does so within each microbatch.

The module also finds the inputs with labels that are numbers of classes, so that any other number can be refused: a -1 would count from the
end. The labels of an auc are 0 and 1, even if they are floats.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import drop_unread, name_of, take_out
from partc.compiler.ir.program import Annotated, Placed, Prepared
from partc.compiler.ir.training import ProgramKind, Training
from partc.compiler.ir.value_info import ValueInfo
from partc.compiler.ops.families.neural.dropout import DROPOUT, PARTS, RECORDS_DIM
from partc.compiler.ops.rule import OWN as OWN_OPS
from partc.compiler.plan.pipeline import MICROBATCH
from partc.compiler.plan.rules import FULL_BATCH, Dataset, DatasetSpec, OutputRule
from partc.compiler.plan.training.loss import ClassLabels
from partc.compiler.rewrite.class_losses import CLASS_LABELS
from partc.compiler.sharding.flow import OWN, SUM, Flow
from partc.runtime.artifact.format import LabelRecord


def labels_of(program: Prepared) -> dict[str, LabelRecord]:
    """Maps each label input to its number of classes (0 if only a run tells) and its ignored labels."""
    train = program.plan.train
    if train is None:
        return {}
    graph = program.model.graph
    values = {value.name: value for value in (*graph.inputs, *(out for node in graph for out in node.outputs))}
    inputs = {value.name for value in graph.inputs}
    records: dict[str, LabelRecord] = {}

    def add(labels: str, scores: ir.Value | None, axis: int | None, ignored: int | None) -> None:
        known, classes = records.get(labels, LabelRecord(classes=0)), _classes(scores, axis)
        more = [] if ignored is None or ignored in known.ignored else [ignored]
        records[labels] = LabelRecord(
            classes=0 if classes is None else max(known.classes, classes), ignored=[*known.ignored, *more]
        )

    if (own := train.loss.class_labels) is not None:
        add(str(own.labels), values.get(own.output), own.axis, own.ignored)
    for node in graph:
        labels, ignored = node.meta.get(CLASS_LABELS, (None, None))
        if labels is not None:
            add(labels, node.inputs[0], 1, ignored)
    for name, metric in train.metrics.items():
        match metric.class_labels:
            case ClassLabels(of, count=int(count)) if count:
                records[of or train.loss.labels] = LabelRecord(classes=count, metric=name)
            case ClassLabels(str(of), output, axis, ignored) if of not in records:
                add(of, values.get(output), axis, ignored)
    return {name: one for name, one in records.items() if name in inputs}


def _classes(scores: ir.Value | None, axis: int | None) -> int | None:
    """Returns the number of classes of logits: along `axis`, else the last dim, for images the channels; None if only a run knows it."""
    dims = scores.shape.dims if scores is not None and scores.shape is not None else ()
    size = dims[axis if axis is not None else 1 if len(dims) > 3 else -1] if dims else 0
    return size if isinstance(size, int) else None


PART = "part"
"""The graph's input with the number of the microbatch, counted from 0."""


def in_parts(program: Annotated) -> Annotated:
    """Fills `training.records`, and changes the graph to that of a microbatch; warns of nodes that mix records of several."""
    training = program.training
    if training is None:
        return program
    fixed = tuple(name_of(value) for value in program.model.graph.inputs if value not in program.batch_dims)
    fixed = tuple(name for name in fixed if name not in training.scalars)
    known = replace(training.records, fixed=fixed, labels=labels_of(program))
    training = replace(training, records=known)
    program = _arriving_whole(program, fixed)
    if training.rules.accumulate == 1 or program.kind is ProgramKind.EVALUATION:
        return replace(program, training=training)
    flow = Flow(program, training.rules.accumulate)
    outputs, divisors = program.model.graph.outputs, {divisor.outputs[0] for divisor in program.means}
    own = [value for value in outputs if flow.state(value) is OWN and value not in divisors]
    flow.totals.update(dict.fromkeys(value for value in own if flow.follows_from_inputs(value)))
    own = [value for value in own if value not in flow.totals]
    # A part's number of positions is its own, and a term of the batch's.
    summed = [value for value in outputs if flow.state(value) is OWN and value in divisors]
    summed += [value for value, state in flow.states.items() if state == SUM]
    paths, values = dict(program.paths), dict(program.values)
    _deliver_totals(program.model.graph, flow, paths, values)
    known = replace(known, totals=tuple(name_of(value) for value in flow.totals))
    training = replace(training, records=known)
    if program.kind is ProgramKind.TOTALS:
        return replace(program, training=training, paths=paths, values=values)
    if program.kind is ProgramKind.STREAMED_EVALUATION:
        _hold_evaluation(program, flow, own)
    training = replace(training, records=replace(known, summed=frozenset(map(name_of, summed))))
    read = {value for node in _needed_for(flow.totals, program) for value in program.reads[node]}
    counted = [
        value for value in program.model.graph.inputs if value in read
    ]  # fed, also where nothing else reads them
    _give_totals(program, flow, values)
    _take_shares(flow, training.rules.accumulate, paths, values)
    if _place_masks(program.model.graph, flow, training.rules.accumulate, values):
        training = replace(training, scalars=(*training.scalars, PART))
    used = [value for value in training.statistics.values() if value is not None]
    drop_unread(program.model.graph, [*used, *counted])
    there = {*program.model.graph}
    paths = {node: path for node, path in paths.items() if node in there}
    program = _arriving_whole(program, training.records.totals)
    if flow.mixing and program.plan.pipeline is not None and program.plan.pipeline.statistics != MICROBATCH:
        raise CompileError(_refused(program, flow))
    if program.plan.pipeline is not None and program.plan.pipeline.parts:
        _hold_bits(program, flow, read, training)
    warnings = (*program.warnings, *_told(program, flow, [str(value.name) for value in own]))
    return replace(program, training=training, paths=paths, values=values, warnings=warnings)


def _hold_bits(program: Annotated, flow: Flow, read: Collection[ir.Value], training: Training) -> None:
    """Raises CompileError for values whose bits depend on the number of ranks, although all sums over parts have one order.

    `read`: the values from which the whole batch's numbers are computed; they must be integers, whose sums are exact in any order.
    """
    rules = program.plan.pipeline
    assert rules is not None
    facts: dict[str, str] = {}
    if flow.state(training.loss) != SUM:
        facts[f"the loss '{training.loss.name}' is not a sum over records"] = "take one of train.loss, or its sum"
    for value in read:
        tensor = ir.convenience.get_const_tensor(value)
        fraction = value.is_graph_input() if tensor is None else (tensor.numpy() % 1).any()
        if value.dtype is not None and value.dtype.is_floating_point() and fraction:
            facts[f"the loss divides by a sum of '{value.name}', which has fractions"] = (
                "take weights that are whole numbers"
            )
    for node, _ in flow.shares:
        path = program.paths[node]
        facts[f"{path} ({node.op_type}) adds what all parts have alike to the loss"] = "leave it out of the loss"
    if training.low_messages:
        facts["gradients are sent in 16 bits"] = "leave out the type of messages"
    optimizer = training.rules.optimizer
    if optimizer.shard and any(not training.optimizer_of(one).is_elementwise for one in training.parameters):
        facts[f"an optimizer with norms of whole parameters, '{optimizer.type}', is shared out"] = "leave out 'shard'"
    law = "the bits are to be the same on any number of ranks"
    if facts:
        raise CompileError(
            [Problem(rules.where, fact, law, f"{help}, or leave out 'parts'") for fact, help in facts.items()]
        )


def _hold_evaluation(program: Annotated, flow: Flow, own: Iterable[ir.Value]) -> None:
    """Raises CompileError if an evaluation in microbatches differs from that of the whole batch, or needs totals that the step lacks."""
    totals = program.other_programs.get(ProgramKind.TOTALS)
    made = totals.training.records.totals if totals is not None and totals.training is not None else ()
    facts = [f"the step makes no '{value.name}' of the whole batch" for value in flow.totals if value.name not in made]
    facts += [f"'{value.name}' of a batch does not follow from those of its parts" for value in own]
    if flow.mixing:
        raise CompileError(_refused(program, flow))
    if facts:
        raise CompileError([Problem(program.name, fact) for fact in facts])


def only_totals(program: Placed) -> Placed:
    """Removes all nodes that the whole batch's numbers do not need; every rank gets the numbers."""
    training = program.training
    if training is None or program.kind is not ProgramKind.TOTALS:
        return program
    graph = program.model.graph
    made = {value.name: value for node in graph for value in node.outputs}
    outputs = [made[name] for name in training.records.totals]
    needed = {*_needed_for(outputs, program)}
    graph.outputs[:] = outputs
    for node in reversed([node for node in graph if node not in needed]):
        take_out(graph, node)
    drop_unread(graph)
    everyone = tuple(range(program.plan.ranks))
    plan = replace(program.plan, sharding=(), outputs=(OutputRule("**", everyone, name_of(training.loss)),))
    specs = {name: spec for name, spec in plan.dataset.specs.items() if any(one.name == name for one in graph.inputs)}
    plan = replace(plan, dataset=Dataset(plan.dataset.style, specs, plan.dataset.where))
    return replace(
        program,
        plan=plan,
        declared=replace(program.declared, sharding=(), annotations=None),
        paths={node: program.paths[node] for node in graph},
        placement={node: program.placement[node] for node in graph},
        training=replace(training, loss=outputs[0], parameters={}, statistics={}, metrics=()),
    )


def _needed_for(values: Collection[ir.Value], program: Annotated) -> Iterator[ir.Node]:
    """Yields the nodes on which some values depend, from the last to the first."""
    wanted = {*values}
    for node in reversed(list(program.model.graph)):
        if not wanted.isdisjoint(node.outputs):
            wanted.update(program.reads[node])
            yield node


def _arriving_whole(program: Annotated, names: Iterable[str]) -> Annotated:
    """Returns the program with these inputs replicated on every rank, even if records are dealt out."""
    dataset = program.plan.dataset
    dims = {value.name: len(value.shape) for value in program.model.graph.inputs if value.shape is not None}
    whole = {name: DatasetSpec((1,) * dims[name], dataset.where) for name in names if dims.get(name)}
    if dataset.style == FULL_BATCH or not whole:
        return program
    return replace(program, plan=replace(program.plan, dataset=replace(dataset, specs={**whole, **dataset.specs})))


def _deliver_totals(graph: ir.Graph, found: Flow, paths: dict[ir.Node, str], values: dict[ir.Value, ValueInfo]) -> None:
    """Gives outputs that are totals of the batch nodes of their own, so that the totals can become inputs."""
    for value in [value for value in found.totals if value.is_graph_output()]:
        name, node = name_of(value), value.producer()
        assert node is not None
        out = ir.Value(name=name, type=value.type, shape=value.shape)
        graph.outputs[:] = [out if one is value else one for one in graph.outputs]
        value.name = f"{name}.of_batch"
        made = ir.Node("", "Identity", [value], outputs=[out], name=name)
        made.metadata_props.update(node.metadata_props)
        graph.insert_after(node, made)
        paths[made], values[out] = name, values[value]


def _give_totals(program: Annotated, found: Flow, values: dict[ir.Value, ValueInfo]) -> None:
    """Turns the whole batch's numbers into inputs."""
    graph = program.model.graph
    for value in found.totals:
        given = ir.Value(name=value.name, type=value.type, shape=value.shape)
        value.name = f"{value.name}.of_part"
        ir.convenience.replace_all_uses_with(value, given)
        graph.inputs.append(given)
        values[given] = values[value]


def _take_shares(found: Flow, count: int, paths: dict[ir.Node, str], values: dict[ir.Value, ValueInfo]) -> None:
    """Scales values that are equal in every microbatch, and are added to its terms, by 1 / `count`."""
    for node, k in found.shares:
        value, graph = node.inputs[k], node.graph
        assert value is not None
        assert value.dtype is not None
        assert graph is not None
        path = f"{paths[node]}.share" + (f".{k}" if k else "")
        tensor = ir.tensor(np.array(1 / count, value.dtype.numpy()))
        number = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], name=f"{path}_of_part")
        number.outputs[0].name, number.outputs[0].type = f"{path}_of_part", ir.TensorType(value.dtype)
        number.outputs[0].shape, number.outputs[0].const_value = ir.Shape([]), tensor
        share = ir.Node("", "Mul", [value, number.outputs[0]], name=path)
        share.outputs[0].name, share.outputs[0].type, share.outputs[0].shape = path, value.type, value.shape
        for made in (number, share):
            made.metadata_props.update(node.metadata_props)
            paths[made] = name_of(made)
        graph.insert_before(node, [number, share])
        node.replace_input_with(k, share.outputs[0])
        values[share.outputs[0]] = values[value]
        values[number.outputs[0]] = ValueInfo(values[value].type, (), values[value].item_bytes)


def _place_masks(graph: ir.Graph, found: Flow, count: int, values: dict[ir.Value, ValueInfo]) -> bool:
    """Makes dropouts draw the masks of the microbatch's records; returns whether there are any."""
    which: ir.Value | None = None
    for node in graph:
        data = node.inputs[0] if node.domain == OWN_OPS and node.op_type == DROPOUT else None
        shard = found.shard(data) if data is not None else None
        if shard is None:
            continue
        if which is None:
            which = ir.Value(name=PART, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
            graph.inputs.append(which)
            values[which] = ValueInfo("tensor(int64)", (), 8)
        node.resize_inputs(3)
        node.replace_input_with(2, which)
        node.attributes.add(ir.AttrInt64(PARTS, count))
        node.attributes.add(ir.AttrInt64(RECORDS_DIM, shard.dim))
    return which is not None


def _refused(program: Annotated, found: Flow) -> Problem:
    """Returns the problem of a pipeline with nodes that would need the records of other microbatches."""
    assert program.plan.pipeline is not None
    named = [f"{program.paths[node]} ({node.op_type}) {what}" for node, what in found.mixing.items()]
    more = f", and {len(named) - 3} more nodes do" if len(named) > 3 else ""
    if program.plan.pipeline.parts:
        return Problem(
            program.plan.pipeline.where,
            f"not all of the model can run by parts: {'; '.join(named[:3])}{more}",
            "a part knows its own records alone; only losses and gradients are added up",
            "write statistics: part, if a batch normalization may take those of each part, freeze what reads all records, or leave out "
            "'parts'",
        )
    return Problem(
        program.plan.pipeline.where,
        f"not all of the model can run by microbatches: {'; '.join(named[:3])}{more}",
        "a microbatch knows its own records alone; only losses and gradients are added up",
        "write statistics: microbatch, if these may be of each microbatch, as is usual for batch normalization",
    )


def _told(program: Annotated, flow: Flow, own: Sequence[str]) -> list[str]:
    """Returns a warning of all nodes that see a microbatch's records in place of the batch's, and one of outputs of such nodes."""
    assert program.training is not None
    parts = f"with `accumulate: {program.training.rules.accumulate}`"
    means = (
        [f"{parts} these are means over the parts of a batch, and not of all of it: {', '.join(own)}"] if own else []
    )
    if not flow.mixing:
        return means
    named = [f"{program.paths[node]} ({node.op_type}) {what}" for node, what in flow.mixing.items()]
    more = f", and {len(named) - 3} more nodes do" if len(named) > 3 else ""
    told = f"{parts} these see the records of one part of a batch at a time: {'; '.join(named[:3])}{more}"
    return [told, *means]
